"""Read the programs that JAX traced, without importing JAX: the one walker of jaxprs.

This module uses only what every JAX from 0.3.22 on has: `eqn.primitive.name`, `eqn.params`, `aval.shape`.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Sequence, Tuple

Shape = Tuple[int, ...]

# Parameters under which the primitives that only call another program keep it (pjit, jit, xla_call, closed_call, remat,
# checkpoint, named_call, custom_jvp_call, custom_vjp_call and their older names).
_CALLED_PROGRAM_KEYS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
# Primitives whose inner program does not run exactly once.
LOOPS = ("scan", "while", "cond")
# Alpa's primitive between layers, which only gives values new names.
MARKER = "pipeline_marker"


def open_jaxpr(jaxpr: Any) -> Any:
    """Return the jaxpr inside a closed jaxpr; an open one as it is."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def is_literal(atom: Any) -> bool:
    """Return True if what an equation reads is a number written in it, and no variable."""
    return hasattr(atom, "val")


def variables(atoms: Iterable[Any]) -> List[Any]:
    """Return the variables among what equations read or programs return."""
    return [atom for atom in atoms if not is_literal(atom)]


def renamed(atoms: Iterable[Any], names: Mapping[Any, Any]) -> List[Any]:
    """Return what equations read or programs return, under the new names of those that have one."""
    return [atom if is_literal(atom) else names.get(atom, atom) for atom in atoms]


def without_markers(equations: Sequence[Any]) -> Tuple[List[Any], Dict[Any, Any]]:
    """Return the equations without Alpa's markers, and the value that stands for each value behind a marker."""
    alias: Dict[Any, Any] = {}
    kept = []
    for equation in equations:
        inputs = renamed(equation.invars, alias)
        if equation.primitive.name == MARKER:
            alias.update(zip(equation.outvars, inputs))
        else:
            kept.append(equation.replace(invars=inputs))
    return kept, alias


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
    """Return True if a called program has as many arguments and results as the equation."""
    jaxpr = open_jaxpr(program)
    return len(jaxpr.invars) == len(equation.invars) and len(jaxpr.outvars) == len(equation.outvars)


def scan_counts(params: Dict[str, Any]) -> Tuple[int, int]:
    """Return the number of constants among a scan's operands, and the number of values that the scan carries."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].unpack()
    return len(constants), len(carried)


def with_inner(equation: Any) -> Iterator[Any]:
    """Yield an equation, and the equations of all programs inside it, however deep."""
    yield equation
    for program in inner_programs(equation):
        for inner in open_jaxpr(program).eqns:
            yield from with_inner(inner)


class Operation(NamedTuple):
    """Describe one primitive applied to values.

    Attributes:
        name: The name of the primitive.
        params: Its parameters.
        inputs, outputs: Numbers of values; -1 for a literal.
        input_shapes, output_shapes: The shapes of these values.
        literals: The values of literal inputs, by their place.
        equation: JAX's own equation.
        callers: The equations that call it, the outermost first.
    """

    name: str
    params: Dict[str, Any]
    inputs: Tuple[int, ...]
    outputs: Tuple[int, ...]
    input_shapes: Tuple[Shape, ...]
    output_shapes: Tuple[Shape, ...]
    literals: Dict[int, Any]
    equation: Any
    callers: Tuple[Any, ...]


class Flat(NamedTuple):
    """Hold a jaxpr without inner calls.

    Attributes:
        operations: The operations in the order of execution.
        inputs, outputs: The values of the jaxpr's own arguments and results.
        variables: For each value, JAX's variable or another object with its `aval`.
        constants: The constants of called programs, by value.
        literals: Literals that calls pass or return, by value.
        own_constants: The values of the jaxpr's own constants.
    """

    operations: List[Operation]
    inputs: Tuple[int, ...]
    outputs: Tuple[int, ...]
    variables: List[Any]
    constants: Dict[int, Any]
    literals: Dict[int, Any]
    own_constants: Tuple[int, ...]


def flatten(jaxpr: Any, unfolds: Callable[[Any], bool] = lambda program: True) -> Flat:
    """Return the operations of a jaxpr (not closed) on numbered values; `unfolds` says which calls to unfold."""
    walker = _Walker(unfolds)
    inputs, constants = map(walker.numbers, (jaxpr.invars, jaxpr.constvars))
    outputs = walker.walk(jaxpr, inputs, constants, ())
    return Flat(walker.operations, inputs, outputs, walker.variables, walker.constants, walker.literals, constants)


class _Walker:
    """Number values and list operations; a program that is called twice gets new numbers for the second call."""

    def __init__(self, unfolds: Callable[[Any], bool]) -> None:
        self._unfolds = unfolds
        self.operations: List[Operation] = []
        self.variables: List[Any] = []
        self.constants: Dict[int, Any] = {}
        self.literals: Dict[int, Any] = {}

    def numbers(self, variables: Sequence[Any]) -> Tuple[int, ...]:
        first = len(self.variables)
        self.variables.extend(variables)
        return tuple(range(first, len(self.variables)))

    def walk(
        self, jaxpr: Any, arguments: Sequence[int], constants: Sequence[int], callers: Tuple[Any, ...]
    ) -> Tuple[int, ...]:
        """Append the operations of a jaxpr on the given values, and return the values of its results."""
        known: Dict[Any, int] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments]))
        for equation in jaxpr.eqns:
            program = next((one for one in called_programs(equation) if fits(one, equation)), None)
            if program is None or not self._unfolds(program):
                results = self.numbers(equation.outvars)
                inputs = tuple(-1 if is_literal(atom) else known.get(atom, -1) for atom in equation.invars)
                self.operations.append(_operation(equation, inputs, results, callers))
            else:
                inner, consts = open_jaxpr(program), getattr(program, "consts", ())
                held = self.numbers(inner.constvars)
                self.constants.update(zip(held, consts))
                given = [self._value(atom, known) for atom in equation.invars]
                results = self.walk(inner, given, held, (*callers, equation))
            known.update(zip(equation.outvars, results))
        return tuple(self._value(atom, known) for atom in jaxpr.outvars)

    def _value(self, atom: Any, known: Dict[Any, int]) -> int:
        if not is_literal(atom):
            return known.get(atom, -1)
        (number,) = self.numbers([atom])
        self.literals[number] = atom.val
        return number


def _operation(equation: Any, inputs: Tuple[int, ...], outputs: Tuple[int, ...], callers: Tuple[Any, ...]) -> Operation:
    name, params, atoms = equation.primitive.name, equation.params, equation.invars
    literals = {place: atom.val for place, atom in enumerate(atoms) if is_literal(atom)}
    shapes = _shapes(atoms), _shapes(equation.outvars)
    return Operation(name, params, inputs, outputs, *shapes, literals, equation, callers)


def _shapes(atoms: Sequence[Any]) -> Tuple[Shape, ...]:
    return tuple(tuple(getattr(atom.aval, "shape", ())) for atom in atoms)
