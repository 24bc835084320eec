"""Read the programs that JAX traced, without importing JAX.

Only what every JAX from 0.3.22 on has is used: `eqn.primitive.name`, `eqn.params`, `aval.shape`.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Tuple

# Parameters under which the primitives that only call another program keep it (pjit, jit, xla_call, closed_call, remat,
# checkpoint, named_call, custom_jvp_call, custom_vjp_call and their older names).
_CALLED_PROGRAM_KEYS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
# Primitives whose inner program does not run exactly once.
LOOPS = ("scan", "while", "cond")


def open_jaxpr(jaxpr: Any) -> Any:
    """Return the jaxpr inside a closed jaxpr; an open one as it is."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def is_literal(atom: Any) -> bool:
    """Return True if an equation reads a number that is written in it instead of a variable."""
    return hasattr(atom, "val")


def variables(atoms: Iterable[Any]) -> List[Any]:
    """Return the variables among what equations read or programs return."""
    return [atom for atom in atoms if not is_literal(atom)]


def called_programs(equation: Any) -> List[Any]:
    """Return the programs that an equation runs exactly once by calling them; none for loops and branches."""
    if equation.primitive.name in LOOPS:
        return []
    found = (equation.params.get(key) for key in _CALLED_PROGRAM_KEYS)
    return [program for program in found if hasattr(program, "eqns")]


def inner_programs(equation: Any) -> List[Any]:
    """Return all programs inside an equation: called ones, bodies of loops, branches."""
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        return list(params["branches"])
    if name == "while":
        return [params["cond_jaxpr"], params["body_jaxpr"]]
    if name == "scan":
        return [params["jaxpr"]]
    return called_programs(equation)


def fits(program: Any, equation: Any) -> bool:
    """Return True if a called program's arguments and results are the equation's own."""
    jaxpr = open_jaxpr(program)
    return len(jaxpr.invars) == len(equation.invars) and len(jaxpr.outvars) == len(equation.outvars)


def scan_counts(params: Dict[str, Any]) -> Tuple[int, int]:
    """Return how many of a scan's operands are constants, and how many it carries."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].unpack()
    return len(constants), len(carried)
