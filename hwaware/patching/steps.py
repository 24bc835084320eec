"""Turn a traced training step into the form that Alpa can cut into layers, a gradient and an update.

Alpa knows three places for an operation: a layer of the loss, the sum of gradients, and the update. User programs
have more. They split keys and prepare labels before the loss. No sample influences some of their results, and no
gradient flows through some of their layers. This module moves such operations to a place that Alpa knows.

JAX traces a step with one microbatch, which Alpa runs. It also traces the step with the whole batch, which says what
Alpa joins. This module rewrites both alike.
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Set, Tuple

from hwaware.compat.jaxprs import is_literal, renamed, variables, without_markers
from hwaware.patching import refusals
from hwaware.patching.parts import (
    Copier,
    Layer,
    Parts,
    Slices,
    flat,
    is_dropped,
    joined,
    layers_of,
    mark_of,
    parts_of,
    with_names,
)
from hwaware.patching.refusals import Names
from hwaware.tracing.flops import equation_flops

_BACKWARD = "_backward"
# Layers repeat an operation on arrays of at most this many elements. They do not send its result.
_SMALL_ELEMENTS = 1024


def tidied(
    micro: Any, full: Any, batch: Sequence[bool], microbatches: int, schedule: str, names: Names
) -> Tuple[Any, Any]:
    """Return a training step that Alpa can cut, as traced with one microbatch and with the whole batch.

    Args:
        micro: The program with one microbatch.
        full: The program with the whole batch; None where one microbatch is the whole batch.
        batch: True for each argument that Alpa cuts into microbatches.
        microbatches: The number of microbatches.
        schedule: Alpa's name of the pipeline schedule.
        names: The names of arguments and results in messages.

    Raises:
        AlpaError: The step takes no gradient or several, or its update reads samples. Or Alpa can neither average nor
            join what the loss returns.
    """
    refusals.require_one_gradient(micro, schedule)
    whole = micro if full is None else full
    cut = [flag and microbatches > 1 for flag in batch]
    if full is not None:
        refusals.require_same_results(
            parts_of(micro).marker.outvars, parts_of(full).marker.outvars, microbatches, "The loss"
        )
        refusals.require_no_samples_in_update(micro, full, cut, names)
    micro, whole = _independent_results(micro, whole, cut)
    whole_layers = [_with_copies_of_what_passes(_without_prologue(program, cut, names)) for program in (micro, whole)]
    programs = [_with_backward_of_all_layers(program) for program in whole_layers]
    return programs[0], None if full is None else programs[1]


def _is_small(equation: Any) -> bool:
    """Return True if an operation is cheaper to repeat than its result is to send."""
    values = [*variables(equation.invars), *equation.outvars]
    return all(value.aval.size <= _SMALL_ELEMENTS for value in values) and equation_flops(equation) == 0


def _independent_results(micro: Any, full: Any, batch: Sequence[bool]) -> Tuple[Any, Any]:
    """Let the update compute the results that no sample influences, such as a new random key or the batch size.

    The program with the whole batch says what they are: with one microbatch, the batch size is another number.
    """
    equations, alias = without_markers(full.jaxpr.eqns)
    slices = Slices(equations)
    micro_before = {v for equation in parts_of(micro).before for v in equation.outvars}
    micro_equations, micro_alias = without_markers(micro.jaxpr.eqns)
    micro_slices = Slices(micro_equations)
    samples = {v for v, flag in zip(full.jaxpr.invars, batch) if flag}
    places = []
    for place, (result, own) in enumerate(zip(full.jaxpr.outvars, micro.jaxpr.outvars)):
        (value,), (mine,) = renamed([result], alias), renamed([own], micro_alias)
        behind, roots = slices.behind([value])
        if roots & samples or not (all(map(_is_small, behind)) or roots <= set(full.jaxpr.constvars)):
            continue
        made, _ = micro_slices.behind([mine])
        is_outside = is_literal(mine) or mine in micro.jaxpr.constvars
        if is_outside or any(v in micro_before for equation in made for v in equation.outvars) or _differ(behind, made):
            places.append((place, value, behind))
    return _computed_by_update(micro, full, places)


def _differ(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return True if two programs read different numbers, or make arrays of different shapes."""

    def numbers(equations: Sequence[Any]) -> List[str]:
        read = [f"{value.val}" for equation in equations for value in equation.invars if is_literal(value)]
        return read + [f"{value.aval.shape}" for equation in equations for value in equation.outvars]

    return numbers(some) != numbers(others)


def _computed_by_update(micro: Any, full: Any, places: Sequence[Tuple[int, Any, List[Any]]]) -> Tuple[Any, Any]:
    """Let both programs' updates compute some results: append the operations behind them."""
    values, slices = [value for _, value, _ in places], [behind for _, _, behind in places]
    programs = []
    for program in (micro, full):
        rename = dict(
            zip([*full.jaxpr.invars, *full.jaxpr.constvars], [*program.jaxpr.invars, *program.jaxpr.constvars])
        )
        parts, results = parts_of(program), list(program.jaxpr.outvars)
        copier = Copier(program)
        for (place, _, _), value, behind in zip(places, values, slices):
            equations, names = copier.copied(behind, rename)
            last, result = copier.passed(*renamed([value], names))
            parts.after.extend([*equations, last])
            results[place] = result
        programs.append(joined(program, parts, results))
    replaced = variables(micro.jaxpr.outvars[place] for place, _, _ in places)
    return _without_unread(programs[0], programs[1], replaced)


def _without_unread(micro: Any, full: Any, replaced: Sequence[Any]) -> Tuple[Any, Any]:
    """Remove from the gradient markers the values that only replaced results have read."""
    parts = parts_of(micro)
    read = {v for equation in parts.after for v in variables(equation.invars)}.union(variables(micro.jaxpr.outvars))
    unread = set(replaced) - read
    kept = [index for index, variable in enumerate(parts.marker.outvars) if variable not in unread]
    programs = []
    for program in (micro, full):
        cut = parts_of(program)
        ends = {name: [getattr(cut.marker, name)[index] for index in kept] for name in ("invars", "outvars")}
        programs.append(joined(program, cut._replace(marker=cut.marker.replace(**ends)), program.jaxpr.outvars))
    return programs[0], programs[1]


def with_results_apart(closed_jaxpr: Any) -> Any:
    """Copy each value that a step's update returns again: a later step cannot take over the same memory twice."""
    copier, parts = Copier(closed_jaxpr), parts_of(closed_jaxpr)
    left = {v for equation in parts.after for v in equation.outvars}
    returned, results = set(left), list(closed_jaxpr.jaxpr.outvars)
    for place, value in enumerate(results):
        if is_literal(value) or value not in returned:
            continue
        if value in left:
            left.remove(value)
        else:
            equation, results[place] = copier.passed(value)
            parts.after.append(equation)
    return joined(closed_jaxpr, parts, results)


def _without_prologue(closed_jaxpr: Any, batch: Sequence[bool], names: Names) -> Any:
    """Move the operations before a step's loss into the layers and the update that need them."""
    parts = parts_of(closed_jaxpr)
    items = layers_of(parts.before)
    prologue: List[Any] = []
    known = {*closed_jaxpr.jaxpr.invars, *closed_jaxpr.jaxpr.constvars}
    for item in items:
        if not isinstance(item, Layer) and known.issuperset(variables(item.invars)):
            prologue.append(item)
            known.update(item.outvars)
    made = {v for equation in prologue for v in equation.outvars if not is_dropped(v)}
    samples = {v for v, flag in zip(closed_jaxpr.jaxpr.invars, batch) if flag}
    after = {v for equation in parts.after for v in variables(equation.invars)}.union(
        variables(closed_jaxpr.jaxpr.outvars)
    )
    slices = Slices(prologue)
    per_sample = [v for v in made if slices.behind([v])[1] & samples]
    # If the loss does not use a weight, the step makes its zero gradient outside the layers. Alpa moves it itself.
    left = [v for v in variables(parts.marker.invars) if v in made and v not in per_sample]
    summed = [v for v in per_sample if v in after or v in parts.marker.invars]
    moved = _Prologue(closed_jaxpr, prologue, made, summed)
    ids = set(map(id, prologue)) - set(map(id, slices.behind(left)[0]))
    kept = [moved.into(item) if isinstance(item, Layer) else item for item in items if id(item) not in ids]
    for variable in summed:
        refusals.require_mean(variable, closed_jaxpr, parts, names)
    equations, rename = moved.copier.copied(slices.behind(v for v in after if v in made and v not in per_sample)[0], {})
    crossing = {v: moved.copier.new(v.aval) for v in summed if v in after}
    inputs = renamed(parts.marker.invars, moved.ends)
    marker = parts.marker.replace(
        invars=[*inputs, *(moved.ends[v] for v in crossing)], outvars=[*parts.marker.outvars, *crossing.values()]
    )
    rename.update(crossing)
    results = renamed(closed_jaxpr.jaxpr.outvars, rename)
    update = [*equations, *(with_names(equation, rename) for equation in parts.after)]
    return joined(closed_jaxpr, Parts(flat(kept), marker, update), results)


class _Prologue:
    """Put operations from before a step's loss into its layers.

    Every layer that needs a small operation repeats it. Another operation goes into the first layer that needs it. That
    layer hands the result to the others.

    Args:
        closed_jaxpr: The step.
        equations: The operations, in order.
        made: The results of these operations.
        summed: Results that leave the layers, for Alpa to average over the microbatches.
    """

    def __init__(self, closed_jaxpr: Any, equations: Sequence[Any], made: Set[Any], summed: Sequence[Any]) -> None:
        self.copier = Copier(closed_jaxpr)
        self.ends: Dict[Any, Any] = {}
        self._slices = Slices(equations)
        self._made = made
        self._summed = list(summed)
        self._placed: Set[Any] = set()
        self._small: Set[Any] = set()
        # A value's name behind the layer's marker -> its name before the marker.
        self._alias: Dict[Any, Any] = {}
        for equation in equations:
            if _is_small(equation) and all(v in self._small for v in variables(equation.invars) if v in made):
                self._small.update(equation.outvars)

    def into(self, layer: Layer) -> Layer:
        """Return the layer with all that it needs. The first one also makes the results that leave the layers."""
        start = layer.start
        kept = [(v, w) for v, w in zip(start.invars, start.outvars) if is_literal(v) or v not in self._made]
        self._alias.update({w: v for v, w in zip(start.invars, start.outvars) if (v, w) not in kept})
        body = [with_names(equation, self._alias) for equation in layer.body]
        end = layer.end.replace(invars=renamed(layer.end.invars, self._alias))
        wanted = [v for equation in [*body, end] for v in variables(equation.invars) if v in self._made]
        inside = {v: w for v, w in kept if not is_literal(v) and not is_dropped(w)}
        equations, names = self._needed([*wanted, *self._summed], inside)
        leaving = [(names.get(v, v), self.copier.new(v.aval), v) for v in self._summed]
        self.ends.update({v: outer for _, outer, v in leaving})
        self._summed = []
        end = end.replace(
            invars=[*renamed(end.invars, names), *(v for v, _, _ in leaving)],
            outvars=[*end.outvars, *(outer for _, outer, _ in leaving)],
        )
        start = start.replace(invars=[v for v, _ in kept], outvars=[w for _, w in kept])
        return Layer(start, [*equations, *(with_names(equation, names) for equation in body)], end)

    def _needed(self, values: Sequence[Any], inside: Dict[Any, Any]) -> Tuple[List[Any], Dict[Any, Any]]:
        """Return the operations that a layer has to do itself, and the names that it gives to small results.

        `inside` has the layer's names for its inputs: Alpa gives an input that a layer's marker names no second name.
        """
        names = dict(inside)
        done: List[Any] = []
        for equation in self._slices.behind(values)[0]:
            if self._small.issuperset(equation.outvars):
                copies, names = self.copier.copied([equation], names)
                done += copies
            elif not self._placed.issuperset(equation.outvars):
                self._placed.update(equation.outvars)
                done.append(with_names(equation, names))
        return done, names


def _with_copies_of_what_passes(closed_jaxpr: Any) -> Any:
    """Let layers copy what they only pass on, such as a gradient of 1.

    Another case is the gradient of a weight plus a constant. Alpa hashes results, so they may be no literals. It also
    drops an input that no operation of the layer reads.
    """
    copier, parts = Copier(closed_jaxpr), parts_of(closed_jaxpr)
    before: List[Any] = []
    given: Set[Any] = set()
    for equation in parts.before:
        if mark_of(equation) == "start":
            given = set(equation.outvars)
        if mark_of(equation) == "end":
            values = list(equation.invars)
            for place, value in enumerate(values):
                if is_literal(value) or value in given:
                    copy, values[place] = copier.passed(value)
                    before.append(copy)
            equation = equation.replace(invars=values)
        before.append(equation)
    gradients = list(parts.marker.invars)
    for place, value in enumerate(gradients):
        if is_literal(value):  # the zero gradient of a scalar that the loss does not use
            copy, gradients[place] = copier.passed(value)
            before.append(copy)
    parts = Parts(before, parts.marker.replace(invars=gradients), parts.after)
    return joined(closed_jaxpr, parts, closed_jaxpr.jaxpr.outvars)


def _with_backward_of_all_layers(closed_jaxpr: Any) -> Any:
    """Give an empty backward pass to each layer through which no gradient flows."""
    from alpa.pipeline_parallel.primitive_def import mark_pipeline_jaxpreqn

    parts = parts_of(closed_jaxpr)
    items = layers_of(parts.before)
    names = [item.start.params["name"] if isinstance(item, Layer) else "" for item in items]
    forward = [name for name in names if name and not name.endswith(_BACKWARD)]
    if all(name + _BACKWARD in names for name in forward):
        return closed_jaxpr
    previous = forward[-1]
    for name in reversed(forward):
        own = name + _BACKWARD
        if own not in names:
            place = names.index(previous) + 1
            empty = [mark_pipeline_jaxpreqn([], [], own, kind) for kind in ("start", "end")]
            items.insert(place, Layer(empty[0], [], empty[1]))
            names.insert(place, own)
        previous = own
    return joined(closed_jaxpr, parts._replace(before=flat(items)), closed_jaxpr.jaxpr.outvars)
