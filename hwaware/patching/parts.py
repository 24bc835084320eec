"""Cut a traced step into its layers, its gradient marker and its update, and put such parts together again."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, NamedTuple, Sequence, Set, Tuple

from hwaware.compat.jaxprs import MARKER, renamed, variables


def mark_of(equation: Any) -> str:
    """Return the kind of an Alpa marker; an empty text for any other operation."""
    return str(equation.params["mark_type"]) if equation.primitive.name == MARKER else ""


class Parts(NamedTuple):
    """A step's operations before its gradient marker, the marker, and the operations after it."""

    before: List[Any]
    marker: Any
    after: List[Any]


def parts_of(closed_jaxpr: Any) -> Parts:
    """Cut a step at its gradient marker."""
    equations = list(closed_jaxpr.jaxpr.eqns)
    (place,) = (place for place, equation in enumerate(equations) if mark_of(equation) == "grad")
    return Parts(equations[:place], equations[place], equations[place + 1 :])


def joined(closed_jaxpr: Any, parts: Parts, results: Sequence[Any]) -> Any:
    """Return a step with other parts and results."""
    from alpa.util import clone_jaxpr

    return clone_jaxpr(closed_jaxpr, outvars=list(results), eqns=[*parts.before, parts.marker, *parts.after])


class Layer(NamedTuple):
    """Hold one layer: the markers at its start and end, and the operations between these."""

    start: Any
    body: List[Any]
    end: Any


def layers_of(equations: Sequence[Any]) -> List[Any]:
    """Return the layers, and the operations outside them, in order."""
    found: List[Any] = []
    start: Any = None
    body: List[Any] = []
    for equation in equations:
        mark = mark_of(equation)
        if mark == "start":
            start, body = equation, []
        elif mark == "end":
            found.append(Layer(start, body, equation))
            start = None
        else:
            (found if start is None else body).append(equation)
    return found


def flat(items: Sequence[Any]) -> List[Any]:
    """Return the operations of `layers_of` in order, with the layers' markers."""
    return [e for one in items for e in ([one.start, *one.body, one.end] if isinstance(one, Layer) else [one])]


class Slices:
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


class Copier:
    """Copy operations of a program under new names."""

    def __init__(self, closed_jaxpr: Any) -> None:
        from hwaware.compat.programs import gensym

        self.new = gensym([closed_jaxpr.jaxpr])

    def copied(self, equations: Sequence[Any], names: Dict[Any, Any]) -> Tuple[List[Any], Dict[Any, Any]]:
        """Return copies of operations, and the old names with the new ones."""
        names, copies = dict(names), []
        for equation in equations:
            names.update({v: v if is_dropped(v) else self.new(v.aval) for v in equation.outvars})
            copies.append(with_names(equation, names))
        return copies, names

    def passed(self, value: Any) -> Tuple[Any, Any]:
        """Return an operation that passes a value on, and its result."""
        from alpa.util import new_jaxpr_eqn

        from hwaware.compat.programs import copy_p

        result = self.new(value.aval)
        return new_jaxpr_eqn([value], [result], copy_p, {}), result


def is_dropped(variable: Any) -> bool:
    """Return True if nobody reads a result."""
    return type(variable).__name__ == "DropVar"


def with_names(equation: Any, names: Dict[Any, Any]) -> Any:
    """Return an operation with other names for its operands and results."""
    return equation.replace(invars=renamed(equation.invars, names), outvars=renamed(equation.outvars, names))
