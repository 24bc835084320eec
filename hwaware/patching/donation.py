"""Pair the arguments that a program donates with the results that take over their memory.

Alpa pairs them by their places, and stops if an argument has no result at its place. If a step returns its loss before
its new state, Alpa then also moves weights between stages in every step.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence

from hwaware.compat.jaxprs import is_literal, variables


def taken_over(arguments: Sequence[Any], donated: Sequence[bool], results: Sequence[Any]) -> Dict[Any, Any]:
    """Return argument -> result of the same shape and type. An argument without such a result stays.

    The new state of a step mostly has the order of the old one, anywhere among the results. Otherwise, each argument
    gets the first result that is left.
    """
    given = [value for value, flag in zip(arguments, donated) if flag]
    left = list(dict.fromkeys(variables(results)))
    own, kinds = _kinds(given), _kinds(left)
    for first in range(len(left) - len(given) + 1):
        if kinds[first : first + len(given)] == own:
            return dict(zip(given, left[first:]))
    found: Dict[Any, Any] = {}
    for value, kind in zip(given, own):
        if kind in kinds:
            found[value] = left.pop(kinds.index(kind))
            kinds.remove(kind)
    return found


def _kinds(values: Sequence[Any]) -> List[Any]:
    return [(tuple(value.aval.shape), value.aval.dtype) for value in values]


def process_apply_gradient(original: Any) -> Callable[..., Any]:
    """Wrap Alpa's function: give it the donated arguments at the places of their results."""

    def replacement(
        update: Any, bound: Any, stages: Any, stage_to_mesh: Any, gensym_func: Any, num_meshes: int,
        global_invars: Any, global_outvars: Any, donated_invars: Any, *rest: Any,
    ) -> Any:  # fmt: skip
        donors = {result: value for value, result in taken_over(global_invars, donated_invars, global_outvars).items()}
        invars = [None if is_literal(result) else donors.get(result) for result in global_outvars]
        flags = [value is not None for value in invars]
        return original(
            update, bound, stages, stage_to_mesh, gensym_func, num_meshes, invars, global_outvars, flags, *rest
        )

    return replacement


def create_donation_mapping(_original: Any) -> Callable[..., Dict[Any, Any]]:
    """Replace Alpa's function, which pairs values of different types, and logs an argument that stays."""

    def replacement(known: Dict[Any, Any], donated: Any, arguments: Any, results: Any) -> Dict[Any, Any]:
        return {**known, **taken_over(arguments, donated, results)}

    return replacement
