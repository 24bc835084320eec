"""Cut a stage's program where its meshes have to combine a value, e.g. the norm of all stages' gradients.

`hwaware.patching.update_sums` turns a sum over values of several meshes, or another such operation, into one equation,
Alpa's `__builtin$CrossMeshAllReduce`. Stock XLA has no counterpart. The equations before it become one program and
those after it another. Between them the workers exchange the value (hwaware.runtime.reductions).
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

from hwaware.compat.jaxprs import is_literal, renamed, variables, without_markers
from hwaware.compat.programs import ClosedJaxpr, Jaxpr
from hwaware.compiler.layouts import Layout
from hwaware.compiler.programs import Part, Reduction, SplitProgram, group_name, lower
from hwaware.errors import AlpaError
from hwaware.tracing.flops import equation_flops

ALL_REDUCE = "__builtin$CrossMeshAllReduce"
# The next part keeps results of at most this size, and results of matrix products. It computes others again.
_SMALL_ELEMENTS = 1024


# (arguments, results) of a program, as the stage names them -> their layout on the stage's devices.
LayoutOf = Callable[[Sequence[Any], Sequence[Any]], Optional[Layout]]


def has_reductions(closed_jaxpr: Any) -> bool:
    """Return True if a stage's program combines values across meshes."""
    return any(equation.primitive.name == ALL_REDUCE for equation in closed_jaxpr.jaxpr.eqns)


def lower_in_parts(
    closed_jaxpr: Any, name: str, donated: Sequence[bool] = (), layout_of: LayoutOf = lambda *_: None
) -> SplitProgram:
    """Cut a stage's program at its reductions and lower its parts.

    A later part computes a large and cheap value of an earlier one again (a gradient divided by a constant). Other
    values are kept. So no second copy of the gradients lives between the parts.

    Args:
        closed_jaxpr: The stage, with Alpa's markers.
        name: The name of the stage.
        donated: True for each input that gives its memory to the output of the same position.
        layout_of: (arguments, results) -> their layout on the stage's devices.
    """
    return _Splitter(closed_jaxpr, name, donated, layout_of).result()


class _Splitter:
    """Cut one program; see `lower_in_parts`."""

    def __init__(self, closed_jaxpr: Any, name: str, donated: Sequence[bool], layout_of: LayoutOf) -> None:
        jaxpr = closed_jaxpr.jaxpr
        self._name = name
        self._constants = dict(zip(jaxpr.constvars, closed_jaxpr.consts))
        self._equations, alias = without_markers(jaxpr.eqns)
        self._results = renamed(map(_not_constant, jaxpr.outvars), alias)
        self._layout_of = layout_of
        self._names = dict(zip(self._results, jaxpr.outvars))
        donors = (variable for variable, given in zip(jaxpr.invars, donated) if given)
        self._heirs = dict(zip(donors, self._results))
        self._slots: Dict[Any, int] = {variable: index for index, variable in enumerate(jaxpr.invars)}
        self._level = self._levels()

    def result(self) -> SplitProgram:
        """Return the parts in order, with the reductions between them."""
        last = max([level for _, level in self._reductions()], default=0)
        wanted = [[e.invars[0] for e, level in self._reductions() if level == index + 1] for index in range(last)]
        wanted.append(self._results)
        parts = self._parts(wanted)
        steps: List[Any] = []
        for index, equations in enumerate(parts):
            if equations:
                steps.append(self._part(index, equations, self._kept(parts, index, wanted), index == last))
            reductions = [e for e, level in self._reductions() if level == index + 1]
            steps.extend(self._reduction(equation) for equation in reductions)
        outputs = tuple(self._slots[variable] for variable in self._results)
        return SplitProgram(self._name, tuple(steps), outputs, tuple(range(len(self._heirs))))

    def _reductions(self) -> List[Tuple[Any, int]]:
        found = (equation for equation in self._equations if equation.primitive.name == ALL_REDUCE)
        return [(equation, self._level[equation.outvars[0]]) for equation in found]

    def _levels(self) -> Dict[Any, int]:
        """Return the number of reductions before each value, on whichever mesh; so all meshes keep one order."""
        level: Dict[Any, int] = {}
        for equation in self._equations:
            before = max([level.get(variable, 0) for variable in variables(equation.invars)], default=0)
            after = before
            if equation.primitive.name == ALL_REDUCE:
                after = max(before + 1, equation.params.get("level", 0))
            level.update(dict.fromkeys(equation.outvars, after))
        return level

    def _parts(self, wanted: Sequence[Sequence[Any]]) -> List[List[Any]]:
        """Return the equations of each part: all that its wanted values need and that no earlier part has kept."""
        at_hand: Set[Any] = set(self._slots)
        parts = []
        for index, targets in enumerate(wanted):
            at_hand.update(e.outvars[0] for e, level in self._reductions() if level <= index)
            equations = self._slice(targets, at_hand)
            at_hand.update(variable for equation in equations if _is_kept(equation) for variable in equation.outvars)
            # A wanted value of an earlier part is there, however large.
            at_hand.update(targets)
            parts.append(equations)
        return parts

    def _slice(self, targets: Sequence[Any], at_hand: Set[Any]) -> List[Any]:
        needed = {variable for variable in targets if variable not in at_hand}
        chosen = []
        for equation in reversed(self._equations):
            if equation.primitive.name != ALL_REDUCE and needed.intersection(equation.outvars):
                chosen.append(equation)
                needed.update(variable for variable in variables(equation.invars) if variable not in at_hand)
        return chosen[::-1]

    def _kept(self, parts: Sequence[Sequence[Any]], index: int, wanted: Sequence[Sequence[Any]]) -> List[Any]:
        """Return the values of part `index` that a later part reads without computing them."""
        own = {variable for equation in parts[index] for variable in equation.outvars}
        read = dict.fromkeys(wanted[index])
        for later in range(index + 1, len(parts)):
            made = {variable for equation in parts[later] for variable in equation.outvars}
            inputs = [variable for equation in parts[later] for variable in variables(equation.invars)]
            read.update(dict.fromkeys(variable for variable in [*inputs, *wanted[later]] if variable not in made))
        return [variable for variable in read if variable in own]

    def _part(self, index: int, equations: List[Any], outputs: List[Any], last: bool) -> Part:
        made = {variable for equation in equations for variable in equation.outvars}
        read = dict.fromkeys(v for equation in equations for v in variables(equation.invars) if v not in made)
        constants = [variable for variable in read if variable in self._constants]
        inputs = [variable for variable in read if variable not in self._constants]
        closed = ClosedJaxpr(Jaxpr(constants, inputs, outputs, equations), [self._constants[v] for v in constants])
        # Only the last part donates: an earlier one might overwrite what a later one reads.
        heirs = self._heirs if last else {}
        donated = {outputs.index(heirs[v]): at for at, v in enumerate(inputs) if heirs.get(v) in outputs}
        layout = self._layout_of(renamed(inputs, self._names), renamed(outputs, self._names))
        pairs = {at: target for target, at in donated.items()}
        program = lower(closed, f"{self._name} part {index}", pairs, layout)
        return Part(program, tuple(map(self._slot, inputs)), tuple(map(self._slot, outputs)))

    def _reduction(self, equation: Any) -> Reduction:
        source, target = self._slot(equation.invars[0]), self._slot(equation.outvars[0])
        return Reduction(source, target, equation.params["type"].name, group_name(equation.params["group_meshes"]))

    def _slot(self, variable: Any) -> int:
        return self._slots.setdefault(variable, len(self._slots))


def _is_kept(equation: Any) -> bool:
    """Return True if a later part reads an equation's results and does not compute them again."""
    elements = sum(variable.aval.size for variable in equation.outvars)
    return elements <= _SMALL_ELEMENTS or equation_flops(equation) > 0


def _not_constant(value: Any) -> Any:
    if is_literal(value):
        raise AlpaError(
            f"A result of the update is the constant {value}, which Alpa cannot place.",
            "return a value that depends on the state or the gradients.",
        )
    return value
