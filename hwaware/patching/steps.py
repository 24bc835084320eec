"""Turn a traced training step into the form that Alpa can cut into layers, a gradient and an update.

Alpa knows three places for an operation: a layer of the loss, the sum of gradients, and the update. User programs
have more. They split keys and prepare labels before the loss. No sample influences some of their results, and no
gradient flows through some of their layers. This module moves such operations to a place that Alpa knows.

JAX traces a step with one microbatch, which Alpa runs. It also traces the step with the whole batch, which says what
Alpa joins. This module rewrites both alike.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, NamedTuple, Sequence, Set, Tuple

from hwaware.compat.jaxprs import MARKER, is_literal, renamed, variables, without_markers
from hwaware.errors import AlpaError
from hwaware.tracing.flops import equation_flops

_BACKWARD = "_backward"
# Layers repeat an operation on arrays of at most this many elements. They do not send its result.
_SMALL_ELEMENTS = 1024


class Names(NamedTuple):
    """Name the arguments and results of a step in messages.

    Attributes:
        arguments, results: One name for each, in the order of the traced program; numbers stand in for missing names.
    """

    arguments: Sequence[str] = ()
    results: Sequence[str] = ()

    def argument(self, index: int) -> str:
        """Return the name of an argument."""
        return self.arguments[index] if index < len(self.arguments) else f"argument {index}"

    def result(self, index: int) -> str:
        """Return the name of a result."""
        return self.results[index] if index < len(self.results) else f"Result {index}"


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
        AlpaError: The step takes no gradient or several, its update reads samples, or its state holds typed keys. Or
            Alpa can neither average nor join what the loss returns.
    """
    _require_plain_types(micro, names)
    _require_one_gradient(micro, schedule)
    whole = micro if full is None else full
    cut = [flag and microbatches > 1 for flag in batch]
    if full is not None:
        require_same_results(parts_of(micro).marker.outvars, parts_of(full).marker.outvars, microbatches, "The loss")
        _require_no_samples_in_update(micro, full, cut, names)
    micro, whole = _independent_results(micro, whole, cut)
    whole_layers = [_with_copied_numbers(_without_prologue(program, cut, names)) for program in (micro, whole)]
    programs = [_with_backward_of_all_layers(program) for program in whole_layers]
    return programs[0], None if full is None else programs[1]


class _Parts(NamedTuple):
    """A step's operations before its gradient marker, the marker, and the operations after it."""

    before: List[Any]
    marker: Any
    after: List[Any]


def mark_of(equation: Any) -> str:
    """Return the kind of an Alpa marker; an empty text for any other operation."""
    return str(equation.params["mark_type"]) if equation.primitive.name == MARKER else ""


def parts_of(closed_jaxpr: Any) -> _Parts:
    """Cut a step at its gradient marker."""
    equations = list(closed_jaxpr.jaxpr.eqns)
    (place,) = (place for place, equation in enumerate(equations) if mark_of(equation) == "grad")
    return _Parts(equations[:place], equations[place], equations[place + 1 :])


def _joined(closed_jaxpr: Any, parts: _Parts, results: Sequence[Any]) -> Any:
    from alpa.util import clone_jaxpr

    return clone_jaxpr(closed_jaxpr, outvars=list(results), eqns=[*parts.before, parts.marker, *parts.after])


def _require_plain_types(micro: Any, names: Names) -> None:
    for index, variable in enumerate(micro.jaxpr.invars):
        if not hasattr(variable.aval.dtype, "kind"):
            raise AlpaError(
                f"{names.argument(index)} of the step holds typed random keys ({variable.aval.dtype}), which Alpa "
                "cannot place.",
                "keep the key of jax.random.PRNGKey(seed), or jax.random.key_data(key), in the state; a step can give "
                "jax.random.wrap_key_data(...) of it to the loss.",
                found=str(variable.aval.dtype),
                expected="uint32",
            )


def _require_one_gradient(micro: Any, schedule: str) -> None:
    count = sum(mark_of(equation) == "grad" for equation in micro.jaxpr.eqns)
    if count == 0:
        raise AlpaError(
            f"The function takes no gradient by alpa.grad or alpa.value_and_grad, but its schedule {schedule!r} is "
            "for training.",
            "take the gradient by alpa.value_and_grad instead of jax.value_and_grad; for a function without a "
            'gradient, give alpa.PipeshardParallel pipeline_schedule="inference".',
            found=0,
            expected=1,
        )
    if count > 1:
        raise AlpaError(
            f"The step takes {count} gradients, but Alpa takes one alpa.grad or alpa.value_and_grad a step.",
            "write one parallelized function for each gradient, e.g. one for the discriminator and one for the "
            "generator; or add up the losses, with jax.lax.stop_gradient where one loss shall not change a part.",
            found=count,
            expected=1,
        )


def require_same_results(micro: Sequence[Any], full: Sequence[Any], microbatches: int, whose: str) -> None:
    """Refuse averages of bools, and values whose shape depends on the batch otherwise than by one row a sample.

    Args:
        micro: The results of the program with one microbatch.
        full: The results with the whole batch.
        microbatches: The number of microbatches.
        whose: The start of messages: who returns it.

    Raises:
        AlpaError: Alpa can neither average nor join a value.
    """
    shapes = [[tuple(v.aval.shape) for v in values] for values in (micro, full)]
    types = [str(v.aval.dtype) for v in micro]
    if any(kind == "bool" and shape == whole for kind, shape, whole in zip(types, *shapes)):
        raise AlpaError(
            f"{whose} returns a bool without a row for each sample, but Alpa averages such values over the "
            "microbatches.",
            'return it as a number: value.astype("float32") is then the part of the microbatches in which it holds.',
        )
    if len(shapes[0]) != len(shapes[1]):
        raise AlpaError(
            f"{whose} returns {len(shapes[0])} values with one microbatch, and {len(shapes[1])} with the whole batch.",
            "return as many values whatever the size of the batch.",
        )
    for part, whole in zip(*shapes):
        if part != whole and (part[1:] != whole[1:] or part[0] * microbatches != whole[0]):
            raise AlpaError(
                f"{whose} returns a value of the shape {part} with one microbatch, and of {whole} with the whole "
                "batch.",
                "return values with one row a sample, or of a shape that does not depend on the batch.",
                found=part,
                expected=(whole[0] // microbatches, *whole[1:]) if whole else whole,
            )


def _require_no_samples_in_update(micro: Any, full: Any, batch: Sequence[bool], names: Names) -> None:
    """Refuse an update that reads samples or rows of results: the update runs once a step, not once a microbatch."""
    parts, whole = parts_of(micro), parts_of(full)
    made = [zip(one.outvars, w.outvars) for one, w in zip([parts.marker, *parts.before], [whole.marker, *whole.before])]
    rows = {v for values in made for v, w in values if v.aval.shape != w.aval.shape}
    samples = {v: index for index, (v, flag) in enumerate(zip(micro.jaxpr.invars, batch)) if flag}
    tainted: Dict[Any, str] = dict.fromkeys(rows, "a value with one row for each sample")
    tainted.update({v: f"{names.argument(index)}, which is cut into microbatches" for v, index in samples.items()})
    for equation in parts.after:
        found = [tainted[v] for v in variables(equation.invars) if v in tainted]
        tainted.update(dict.fromkeys(equation.outvars, found[0]) if found else {})
    for index, result in enumerate(micro.jaxpr.outvars):
        if not is_literal(result) and result in tainted and result not in rows:
            raise AlpaError(
                f"{names.result(index)} of the step is computed after the gradient from {tainted[result]}.",
                "compute it inside the loss function, and return it beside the loss: alpa.value_and_grad(..., "
                "has_aux=True). Alpa averages such values over the microbatches.",
            )


class _Slices:
    """Find the operations behind values.

    Args:
        equations: The operations in order, without Alpa's markers.
    """

    def __init__(self, equations: Sequence[Any]) -> None:
        self._equations = list(equations)
        self._makers = {v: place for place, equation in enumerate(equations) for v in equation.outvars}

    def behind(self, values: Iterable[Any]) -> Tuple[List[Any], Set[Any]]:
        """Return the operations that these values need, in order, and the values that no operation makes."""
        places: Set[int] = set()
        roots: Set[Any] = set()
        open_values = variables(values)
        while open_values:
            value = open_values.pop()
            if value not in self._makers:
                roots.add(value)
            elif self._makers[value] not in places:
                places.add(self._makers[value])
                open_values += variables(self._equations[self._makers[value]].invars)
        return [self._equations[place] for place in sorted(places)], roots


def _is_small(equation: Any) -> bool:
    """Return True if an operation is cheaper to repeat than its result is to send."""
    values = [*variables(equation.invars), *equation.outvars]
    return all(value.aval.size <= _SMALL_ELEMENTS for value in values) and equation_flops(equation) == 0


def _independent_results(micro: Any, full: Any, batch: Sequence[bool]) -> Tuple[Any, Any]:
    """Let the update compute the results that no sample influences, such as a new random key or the batch size.

    The program with the whole batch says what they are: with one microbatch, the batch size is another number.
    """
    equations, alias = without_markers(full.jaxpr.eqns)
    slices = _Slices(equations)
    micro_before = {v for equation in parts_of(micro).before for v in equation.outvars}
    micro_equations, micro_alias = without_markers(micro.jaxpr.eqns)
    micro_slices = _Slices(micro_equations)
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
        copier = _Copier(program)
        for (place, _, _), value, behind in zip(places, values, slices):
            equations, names = copier.copied(behind, rename)
            last, result = copier.passed(*renamed([value], names))
            parts.after.extend([*equations, last])
            results[place] = result
        programs.append(_joined(program, parts, results))
    return _without_unread(programs[0], programs[1], {places_[0] for places_ in places}, micro)


def _without_unread(micro: Any, full: Any, replaced: Set[int], before: Any) -> Tuple[Any, Any]:
    """Remove from the gradient markers the values that only replaced results have read."""
    parts = parts_of(micro)
    read = {v for equation in parts.after for v in variables(equation.invars)}.union(variables(micro.jaxpr.outvars))
    unread = {before.jaxpr.outvars[place] for place in replaced if not is_literal(before.jaxpr.outvars[place])} - read
    kept = [index for index, variable in enumerate(parts.marker.outvars) if variable not in unread]
    programs = []
    for program in (micro, full):
        cut = parts_of(program)
        marker = cut.marker.replace(
            invars=[cut.marker.invars[index] for index in kept], outvars=[cut.marker.outvars[index] for index in kept]
        )
        programs.append(_joined(program, cut._replace(marker=marker), program.jaxpr.outvars))
    return programs[0], programs[1]


class _Copier:
    """Copy operations of a program under new names."""

    def __init__(self, closed_jaxpr: Any) -> None:
        from hwaware.compat.programs import gensym

        self.new = gensym([closed_jaxpr.jaxpr])

    def copied(self, equations: Sequence[Any], names: Dict[Any, Any]) -> Tuple[List[Any], Dict[Any, Any]]:
        """Return copies of operations, and the old names with the new ones."""
        names, copies = dict(names), []
        for equation in equations:
            names.update({v: v if _is_dropped(v) else self.new(v.aval) for v in equation.outvars})
            copies.append(_with_names(equation, names))
        return copies, names

    def passed(self, value: Any) -> Tuple[Any, Any]:
        """Return an operation that passes a value on, and its result."""
        from alpa.util import new_jaxpr_eqn

        from hwaware.compat.programs import copy_p

        result = self.new(value.aval)
        return new_jaxpr_eqn([value], [result], copy_p, {}), result


def _is_dropped(variable: Any) -> bool:
    return type(variable).__name__ == "DropVar"


def _with_names(equation: Any, names: Dict[Any, Any]) -> Any:
    """Return an operation with other names for its operands and results."""
    return equation.replace(invars=renamed(equation.invars, names), outvars=renamed(equation.outvars, names))


def with_results_apart(closed_jaxpr: Any) -> Any:
    """Copy each value that a step's update returns again: a later step cannot take over the same memory twice."""
    copier, parts = _Copier(closed_jaxpr), parts_of(closed_jaxpr)
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
    return _joined(closed_jaxpr, parts, results)


class _Layer(NamedTuple):
    """Hold one layer: the markers at its start and end, and the operations between these."""

    start: Any
    body: List[Any]
    end: Any


def _layers(equations: Sequence[Any]) -> List[Any]:
    """Return the layers, and the operations outside them, in order."""
    found: List[Any] = []
    start: Any = None
    body: List[Any] = []
    for equation in equations:
        mark = mark_of(equation)
        if mark == "start":
            start, body = equation, []
        elif mark == "end":
            found.append(_Layer(start, body, equation))
            start = None
        else:
            (found if start is None else body).append(equation)
    return found


def _flat(items: Sequence[Any]) -> List[Any]:
    return [e for one in items for e in ([one.start, *one.body, one.end] if isinstance(one, _Layer) else [one])]


def _without_prologue(closed_jaxpr: Any, batch: Sequence[bool], names: Names) -> Any:
    """Move the operations before a step's loss into the layers and the update that need them."""
    parts = parts_of(closed_jaxpr)
    items = _layers(parts.before)
    prologue: List[Any] = []
    known = {*closed_jaxpr.jaxpr.invars, *closed_jaxpr.jaxpr.constvars}
    for item in items:
        if not isinstance(item, _Layer) and known.issuperset(variables(item.invars)):
            prologue.append(item)
            known.update(item.outvars)
    made = {v for equation in prologue for v in equation.outvars if not _is_dropped(v)}
    samples = {v for v, flag in zip(closed_jaxpr.jaxpr.invars, batch) if flag}
    after = {v for equation in parts.after for v in variables(equation.invars)}.union(
        variables(closed_jaxpr.jaxpr.outvars)
    )
    slices = _Slices(prologue)
    per_sample = [v for v in made if slices.behind([v])[1] & samples]
    # If the loss does not use a weight, the step makes its zero gradient outside the layers. Alpa moves it itself.
    left = [v for v in variables(parts.marker.invars) if v in made and v not in per_sample]
    summed = [v for v in [*per_sample] if v in after or v in parts.marker.invars]
    moved = _Prologue(closed_jaxpr, prologue, made, summed)
    ids = set(map(id, prologue)) - set(map(id, slices.behind(left)[0]))
    kept = [moved.into(item) if isinstance(item, _Layer) else item for item in items if id(item) not in ids]
    for variable in summed:
        _require_mean(variable, closed_jaxpr, parts, names)
    equations, rename = moved.copier.copied(slices.behind(v for v in after if v in made and v not in per_sample)[0], {})
    crossing = {v: moved.copier.new(v.aval) for v in summed if v in after}
    inputs = renamed(parts.marker.invars, moved.ends)
    marker = parts.marker.replace(
        invars=[*inputs, *(moved.ends[v] for v in crossing)], outvars=[*parts.marker.outvars, *crossing.values()]
    )
    rename.update(crossing)
    results = renamed(closed_jaxpr.jaxpr.outvars, rename)
    update = [*equations, *(_with_names(equation, rename) for equation in parts.after)]
    return _joined(closed_jaxpr, _Parts(_flat(kept), marker, update), results)


def _require_mean(variable: Any, closed_jaxpr: Any, parts: _Parts, names: Names) -> None:
    """Refuse integers and bools that a step computes from samples: their mean over microbatches has no use."""
    from jax import dtypes, numpy

    if dtypes.issubdtype(variable.aval.dtype, numpy.inexact):
        return
    index = next((i for i, v in enumerate(closed_jaxpr.jaxpr.outvars) if v is variable), None)
    what = "A value that the update reads" if index is None else f"{names.result(index)} of the step"
    raise AlpaError(
        f"{what} is computed from samples, before the loss, as {variable.aval.dtype}. Alpa averages it over the "
        "microbatches, so it cannot be a whole number.",
        "convert it to float32, or compute it from values that are not cut into microbatches.",
        found=str(variable.aval.dtype),
    )


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
        self.copier = _Copier(closed_jaxpr)
        self.ends: Dict[Any, Any] = {}
        self._slices = _Slices(equations)
        self._made = made
        self._summed = list(summed)
        self._placed: Set[Any] = set()
        self._small: Set[Any] = set()
        # A value's name behind the layer's marker -> its name before the marker.
        self._alias: Dict[Any, Any] = {}
        for equation in equations:
            if _is_small(equation) and all(v in self._small for v in variables(equation.invars) if v in made):
                self._small.update(equation.outvars)

    def into(self, layer: _Layer) -> _Layer:
        """Return the layer with all that it needs. The first one also makes the results that leave the layers."""
        start = layer.start
        kept = [(v, w) for v, w in zip(start.invars, start.outvars) if is_literal(v) or v not in self._made]
        self._alias.update({w: v for v, w in zip(start.invars, start.outvars) if (v, w) not in kept})
        body = [_with_names(equation, self._alias) for equation in layer.body]
        end = layer.end.replace(invars=renamed(layer.end.invars, self._alias))
        wanted = [v for equation in [*body, end] for v in variables(equation.invars) if v in self._made]
        equations, names = self._needed([*wanted, *self._summed])
        leaving = [(names.get(v, v), self.copier.new(v.aval), v) for v in self._summed]
        self.ends.update({v: outer for _, outer, v in leaving})
        self._summed = []
        end = end.replace(
            invars=[*renamed(end.invars, names), *(v for v, _, _ in leaving)],
            outvars=[*end.outvars, *(outer for _, outer, _ in leaving)],
        )
        start = start.replace(invars=[v for v, _ in kept], outvars=[w for _, w in kept])
        return _Layer(start, [*equations, *(_with_names(equation, names) for equation in body)], end)

    def _needed(self, values: Sequence[Any]) -> Tuple[List[Any], Dict[Any, Any]]:
        """Return the operations that a layer has to do itself, and the names that it gives to small results."""
        names: Dict[Any, Any] = {}
        done: List[Any] = []
        for equation in self._slices.behind(values)[0]:
            if self._small.issuperset(equation.outvars):
                copies, names = self.copier.copied([equation], names)
                done += copies
            elif not self._placed.issuperset(equation.outvars):
                self._placed.update(equation.outvars)
                done.append(_with_names(equation, names))
        return done, names


def _with_copied_numbers(closed_jaxpr: Any) -> Any:
    """Let layers copy literals that they only pass on, such as a gradient of 1: Alpa hashes results."""
    copier, parts = _Copier(closed_jaxpr), parts_of(closed_jaxpr)
    before: List[Any] = []
    numbers: Set[Any] = set()
    for equation in parts.before:
        if mark_of(equation) == "start":
            numbers = {inner for value, inner in zip(equation.invars, equation.outvars) if is_literal(value)}
        if mark_of(equation) == "end":
            values = list(equation.invars)
            for place, value in enumerate(values):
                if is_literal(value) or value in numbers:
                    copy, values[place] = copier.passed(value)
                    before.append(copy)
            equation = equation.replace(invars=values)
        before.append(equation)
    return _joined(closed_jaxpr, parts._replace(before=before), closed_jaxpr.jaxpr.outvars)


def _with_backward_of_all_layers(closed_jaxpr: Any) -> Any:
    """Give an empty backward pass to each layer through which no gradient flows."""
    from alpa.pipeline_parallel.primitive_def import mark_pipeline_jaxpreqn

    parts = parts_of(closed_jaxpr)
    items = _layers(parts.before)
    names = [item.start.params["name"] if isinstance(item, _Layer) else "" for item in items]
    forward = [name for name in names if name and not name.endswith(_BACKWARD)]
    if all(name + _BACKWARD in names for name in forward):
        return closed_jaxpr
    previous = forward[-1]
    for name in reversed(forward):
        own = name + _BACKWARD
        if own not in names:
            place = names.index(previous) + 1
            empty = [mark_pipeline_jaxpreqn([], [], own, kind) for kind in ("start", "end")]
            items.insert(place, _Layer(empty[0], [], empty[1]))
            names.insert(place, own)
        previous = own
    return _joined(closed_jaxpr, parts._replace(before=_flat(items)), closed_jaxpr.jaxpr.outvars)
