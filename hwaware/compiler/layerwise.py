"""Run a stage of several layers as one program a layer, one after the other.

Alpa merges a stage's layers into one program. XLA's CPU compiler then computes all activations' gradients before those
of the weights, and reads the former from memory again. Four GPT blocks took 1.2 times as long that way, with 3.3 times
the scratch. Besides, hwaware compiles layers that are alike once. A stage then takes the sum of its layers' times,
which is its price.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from hwaware.compat.jaxprs import is_literal, renamed, without_markers
from hwaware.compat.programs import ClosedJaxpr, Jaxpr
from hwaware.compiler.layouts import Layout
from hwaware.compiler.programs import Part, SplitProgram, lower

_CALL = "named_call"
# (layer, names of the values that it reads, and that it makes) -> the layer as several devices run it, and its layout.
Splitting = Callable[[Any, Sequence[Any], Sequence[Any]], Optional[Tuple[Any, Optional[Layout]]]]


def lower_by_layer(
    stage: Any, donated: Sequence[bool], microbatched: bool, split: Optional[Splitting] = None
) -> Optional[SplitProgram]:
    """Return the stage's layers as parts; None if it cannot run layer by layer.

    Args:
        stage: Alpa's stage, in which it calls one program a layer.
        donated: True for each input that gives its memory to the output of the same position.
        microbatched: True if the stage runs once a microbatch, not once a step.
        split: A function that splits a layer over several devices, called for the layers in order. It returns None for
            a layer that it cannot split. Values have the names of the stage's arguments and results; values between
            layers have any other names.
    """
    closed_jaxpr, name = stage.closed_jaxpr(), stage.name
    equations, results = _layers(closed_jaxpr.jaxpr)
    if len(equations) < 2 or any(equation.primitive.name != _CALL for equation in equations):
        return None
    layers = _Layers(closed_jaxpr, results, donated)
    if any(is_literal(result) or result in layers.constants for result in results):
        return None
    names = {**dict(zip(results, stage.outvars)), **dict(zip(closed_jaxpr.jaxpr.invars, stage.invars))}
    parts = []
    for index, equation in enumerate(equations):
        layer = layers.layer(equation, equations[index + 1 :])
        closed, layout = layer.closed_jaxpr, None
        if split is not None:
            done = split(closed, *(renamed(values, names) for values in (layer.given, layer.made)))
            if done is None:
                return None
            closed, layout = done
        program = lower(closed, f"{name} part {index}", layer.pairs, layout, microbatched)
        parts.append(Part(program, tuple(map(layers.slot, layer.given)), tuple(map(layers.slot, layer.made))))
    outputs = tuple(layers.slot(result) for result in layers.results)
    return SplitProgram(name, tuple(parts), outputs, tuple(index for index, given in enumerate(donated) if given))


def _layers(jaxpr: Any) -> Tuple[List[Any], List[Any]]:
    """Return the equations inside all wrappers, and the variables that are the results."""
    equations, alias = without_markers(jaxpr.eqns)
    results = renamed(jaxpr.outvars, alias)
    while len(equations) == 1 and equations[0].primitive.name == _CALL:
        (call,) = equations
        inner = call.params["call_jaxpr"]
        if inner.constvars or _made(inner.eqns).intersection(jaxpr.invars):
            break
        names = dict(zip(inner.invars, call.invars))
        equations, alias = without_markers([one.replace(invars=renamed(one.invars, names)) for one in inner.eqns])
        # Alpa may call a value inside by the name of another one outside, so each name is looked up once.
        inside = dict(zip(call.outvars, renamed(renamed(inner.outvars, names), alias)))
        results = renamed(results, inside)
    return equations, results


def _made(equations: Sequence[Any]) -> Set[Any]:
    return {variable for equation in equations for variable in equation.outvars}


class _Layer(NamedTuple):
    """Hold one layer's program.

    Attributes:
        closed_jaxpr: The program.
        given, made: The stage's values that it reads and makes.
        pairs: Input -> output that takes over its memory.
    """

    closed_jaxpr: Any
    given: List[Any]
    made: List[Any]
    pairs: Dict[int, int]


class _Layers:
    """Hold the values that a stage's layers hand to each other."""

    def __init__(self, closed_jaxpr: Any, results: List[Any], donated: Sequence[bool]) -> None:
        jaxpr = closed_jaxpr.jaxpr
        self.constants = dict(zip(jaxpr.constvars, closed_jaxpr.consts))
        self.results = results
        self._heirs = {v: heir for v, heir, given in zip(jaxpr.invars, results, donated) if given}
        self._slots: Dict[Any, int] = {variable: index for index, variable in enumerate(jaxpr.invars)}

    def slot(self, variable: Any) -> int:
        """Return the slot in which a value lives."""
        return self._slots.setdefault(variable, len(self._slots))

    def layer(self, equation: Any, later: Sequence[Any]) -> _Layer:
        """Return one layer's program, whose results are the values that a later layer or the stage's user reads."""
        wanted: Set[Any] = {v for one in later for v in one.invars if not is_literal(v)}.union(self.results)
        layer = equation.params["call_jaxpr"]
        fixed = {
            inner: given.val if is_literal(given) else self.constants[given]
            for inner, given in zip(layer.invars, equation.invars)
            if is_literal(given) or given in self.constants
        }
        inputs = [(inner, given) for inner, given in zip(layer.invars, equation.invars) if inner not in fixed]
        outputs = [(inner, made) for inner, made in zip(layer.outvars, equation.outvars) if made in wanted]
        jaxpr = Jaxpr(
            [*fixed], [inner for inner, _ in inputs], [inner for inner, _ in outputs], layer.eqns, layer.effects
        )
        given, made = [outer for _, outer in inputs], [outer for _, outer in outputs]
        closed = ClosedJaxpr(jaxpr, [*fixed.values()])
        return _Layer(closed, given, made, self._pairs(given, made, wanted))

    def _pairs(self, given: List[Any], made: List[Any], wanted: Set[Any]) -> Dict[int, int]:
        """Return input -> output that takes over its memory, if nothing reads the input afterwards."""
        return {
            at: made.index(self._heirs[variable])
            for at, variable in enumerate(given)
            if given.count(variable) == 1 and variable not in wanted and self._heirs.get(variable) in made
        }
