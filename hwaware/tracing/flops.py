"""Count floating-point operations of JAX programs.

This module counts matrix products and convolutions: each multiplication and its addition are two operations.
Element-wise operations, reductions, gathers and comparisons count as none. Memory bounds them, and they are few beside
the products.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, Iterable, Iterator, Sequence, Tuple

from hwaware.compat.jaxprs import LOOPS, called_programs, inner_programs, open_jaxpr


def jaxpr_flops(jaxpr: Any) -> float:
    """Return the FLOPs of one run of a jaxpr or closed jaxpr, with all inner programs.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jaxpr_flops(jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 5))))
        60.0
    """
    return math.fsum(equation_flops(equation) for equation in open_jaxpr(jaxpr).eqns)


def equation_flops(equation: Any) -> float:
    """Return the FLOPs of one run of an equation.

    A scan counts its body `length` times, a conditional its most expensive branch. A while loop counts condition and
    body once, because nobody knows before the run how often they run.
    """
    name = equation.primitive.name
    if name in _PRODUCTS:
        return _PRODUCTS[name](equation)
    if name in LOOPS:
        return _loop_flops(equation)
    return math.fsum(jaxpr_flops(inner) for inner in called_programs(equation))


def product_flops(equation: Any) -> Iterator[Tuple[str, str, float]]:
    """Yield (primitive, data type, FLOPs) of the products in an equation; those in a scan count `length` times."""
    name = equation.primitive.name
    if name in _PRODUCTS:
        kind = "dot_general" if name == "ragged_dot_general" else name
        yield kind, str(equation.invars[0].aval.dtype), equation_flops(equation)
    runs = float(equation.params["length"]) if name == "scan" else 1.0
    for inner in inner_programs(equation):
        for each in open_jaxpr(inner).eqns:
            for primitive, dtype, flops in product_flops(each):
                yield primitive, dtype, runs * flops


def main_dtype(products: Iterable[Tuple[str, float]]) -> str:
    """Return the data type of most FLOPs among (data type, FLOPs); float32 without products."""
    totals: Dict[str, float] = {}
    for dtype, flops in products:
        totals[dtype] = totals.get(dtype, 0.0) + flops
    return max(totals, key=lambda dtype: totals[dtype], default="float32")


def _loop_flops(equation: Any) -> float:
    bodies = [jaxpr_flops(inner) for inner in inner_programs(equation)]
    name = equation.primitive.name
    if name == "cond":
        return max(bodies)
    if name == "scan":
        return float(equation.params["length"]) * bodies[0]
    return math.fsum(bodies)


def _dot_flops(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    depth = float(math.prod(left[axis] for axis in contracted))
    return 2.0 * depth * _elements(equation.outvars[0])


def _ragged_dot_flops(equation: Any) -> float:
    """Return 2 x left elements x free right elements. Each left row meets one of the right's groups, e.g. experts."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batched) = numbers.dot_dimension_numbers
    taken = {*contracted, *batched, *numbers.rhs_group_dimensions}
    right: Sequence[int] = equation.invars[1].aval.shape
    return 2.0 * _elements(equation.invars[0]) * math.prod(n for axis, n in enumerate(right) if axis not in taken)


def _convolution_flops(equation: Any) -> float:
    """Return 2 x outputs x kernel elements per output channel.

    The kernel's input-channel axis holds one group's channels. So the kernel's shape already contains feature groups,
    and the output's shape contains batch groups. Input dilation (the gradient of a strided convolution) spreads the
    input with zeros that need no multiplication. So divide by the product of the dilations. Padding counts as data.
    """
    kernel = equation.invars[1].aval.shape
    out_channel_axis = equation.params["dimension_numbers"].rhs_spec[0]
    per_output = _elements(equation.invars[1]) / float(max(kernel[out_channel_axis], 1))
    zeros = float(math.prod(equation.params["lhs_dilation"]))
    return 2.0 * _elements(equation.outvars[0]) * per_output / zeros


def _elements(variable: Any) -> float:
    return float(math.prod(variable.aval.shape))


_PRODUCTS: Dict[str, Callable[[Any], float]] = {
    "dot_general": _dot_flops, "ragged_dot_general": _ragged_dot_flops, "conv_general_dilated": _convolution_flops,
}  # fmt: skip
