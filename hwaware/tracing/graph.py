"""Turn a traced train step into a flat list of operations over numbered values.

This module inlines calls (pjit, remat, custom derivatives, named calls), and drops dead operations as XLA does. Each
operation knows whether JAX made it for the forward or for the backward pass. After this module, only `programs`
depends on JAX.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, List, Sequence, Set, Tuple

from hwaware.compat import jaxprs
from hwaware.tracing.flops import equation_flops, product_flops

FORWARD, BACKWARD, OTHER = "forward", "backward", "other"

# The names that the primitive of jax.checkpoint has had since JAX 0.3.22.
REMAT = ("checkpoint", "remat", "remat2")


@dataclasses.dataclass(frozen=True)
class Operation:
    """Describe one equation that does not merely call others.

    Attributes:
        name: The name of the primitive.
        flops: The FLOPs of one run.
        inputs, outputs: The numbers of the values that it reads and makes, without literals.
        phase: FORWARD, BACKWARD or OTHER (data preparation before the gradient, the optimizer after it).
        product_flops: (data type, FLOPs) of the products inside; all branches of a conditional count.
        inside_remat: True if it is part of a `jax.checkpoint`. In the backward phase, it may repeat the forward pass.
        equation: JAX's own equation, for running it.
    """

    name: str
    flops: float
    inputs: Tuple[int, ...]
    outputs: Tuple[int, ...]
    phase: str
    product_flops: Tuple[Tuple[str, float], ...] = ()
    inside_remat: bool = False
    equation: Any = dataclasses.field(default=None, compare=False, repr=False)


@dataclasses.dataclass(frozen=True)
class Value:
    """Hold the size and kind of one value; complex numbers are floating, as they may have gradients."""

    nbytes: int
    floating: bool


@dataclasses.dataclass(frozen=True)
class Graph:
    """Hold a flat program. `outputs` has -1 for a literal that it returns; `constants` are arrays it closes over."""

    operations: Tuple[Operation, ...]
    values: Tuple[Value, ...]
    inputs: Tuple[int, ...]
    outputs: Tuple[int, ...]
    constants: Tuple[int, ...] = ()


def flatten(closed_jaxpr: Any) -> Graph:
    """Return the flat form of a closed jaxpr, without dead operations."""
    flat = jaxprs.flatten(jaxprs.open_jaxpr(closed_jaxpr))
    outputs = tuple(-1 if value in flat.literals else value for value in flat.outputs)
    operations = _settle_phases(_drop_dead(list(map(_operation, flat.operations)), outputs))
    values = tuple(map(value_of, flat.variables))
    return Graph(tuple(operations), values, flat.inputs, outputs, (*flat.own_constants, *flat.constants))


def _operation(operation: jaxprs.Operation) -> Operation:
    equation = operation.equation
    flops = equation_flops(equation)
    return Operation(
        operation.name,
        flops,
        tuple(value for value in operation.inputs if value >= 0),
        operation.outputs,
        # A call's marks hold for all that it calls: recomputation inside a transposed remat is backward.
        max(map(marked_phase, (*operation.callers, equation)), key=(OTHER, FORWARD, BACKWARD).index),
        tuple((dtype, amount) for _, dtype, amount in product_flops(equation)) if flops else (),
        any(caller.primitive.name in REMAT for caller in operation.callers),
        equation,
    )


def value_of(variable: Any) -> Value:
    """Return the size and kind of a jaxpr variable; tokens and the like have no size."""
    shape, dtype = getattr(variable.aval, "shape", None), getattr(variable.aval, "dtype", None)
    if shape is None or dtype is None:
        return Value(0, False)
    # Extended types (typed random keys) have no numpy kind; bfloat16 and its relatives are of kind "V".
    floating = getattr(dtype, "kind", "") in ("f", "c") or "float" in str(dtype)
    return Value(math.prod(shape) * int(getattr(dtype, "itemsize", 0)), floating)


def marked_phase(equation: Any) -> str:
    """Return the phase that JAX's transformations wrote into an equation's name stack.

    `jax.grad` marks what it traces with "jvp", and the transposed (backward) equations with "transpose" as well.
    """
    stack = getattr(equation.source_info, "name_stack", None)
    # The textual form drops markers that have no name to wrap, so read the elements if the stack has any. A user's
    # jax.named_scope("transpose") is a Scope, not a Transform.
    elements = getattr(stack, "stack", None)
    if elements is None:
        text = str(stack)
        marks = {mark for mark in ("jvp", "transpose") if f"{mark}(" in text}
    else:
        marks = {element.name for element in elements if type(element).__name__ == "Transform"}
    if "transpose" in marks:
        return BACKWARD
    return FORWARD if "jvp" in marks else OTHER


def _drop_dead(operations: Sequence[Operation], outputs: Sequence[int]) -> List[Operation]:
    live: Set[int] = set(outputs)
    kept = []
    for operation in reversed(operations):
        if live.intersection(operation.outputs):
            kept.append(operation)
            live.update(operation.inputs)
    return kept[::-1]


def _settle_phases(operations: Sequence[Operation]) -> List[Operation]:
    """Move unmarked operations that the gradient needs (casts and masks made before it) to the forward pass."""
    needed: Set[int] = set()
    settled = []
    for operation in reversed(operations):
        if operation.phase == OTHER and needed.intersection(operation.outputs):
            operation = dataclasses.replace(operation, phase=FORWARD)
        if operation.phase != OTHER:
            needed.update(operation.inputs)
        settled.append(operation)
    return settled[::-1]
