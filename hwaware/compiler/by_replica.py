"""Let each replica do something by itself: an operation on its own samples, or a sum of its own.

XLA's partitioner gathers all samples on every device for a convolution whose replicas are one more dimension (seen with
JAX 0.4.30). So it is told to leave the operation alone: each device makes its part of the result from its part of the
operands, as in `shard_map`, which however wants the devices themselves, and the driver has none of them.

Replicas' scalars have no dimension along which they could lie one below the other. Each replica keeps its own under the
name of one that all have: the partitioner takes a scalar for a copy on every device, and never looks.
"""

from __future__ import annotations

import functools
from typing import Any, Optional, Sequence

import jax
import jax.numpy as jnp

from hwaware.compat.lowering import lower_by_part, register_lowering
from hwaware.compat.programs import Primitive, ShapedArray
from hwaware.compiler.layouts import alpa_spec
from hwaware.compiler.sharding import DATA, Mesh, spec_with


@functools.lru_cache(maxsize=None)
def by_part_primitive() -> Any:
    """Return the operation that stands for a function, applied by each device to its own parts of the operands.

    Its parameters: the `function`, the abstract `result` of all parts together, and Alpa's sharding `specs` of the
    operands and of the result.
    """
    primitive = Primitive("by_part")
    primitive.def_abstract_eval(lambda *_, result, **__: result)
    register_lowering(
        primitive,
        lambda ctx, *operands, function, result, specs: lower_by_part(ctx, operands, function, specs[:-1], specs[-1]),
    )
    return primitive


def by_replica(operation: Any, operands: Sequence[Any], dims: Sequence[Optional[int]], replicas: int) -> Any:
    """Apply an operation to each replica's part of the operands; stack the results along a new first dimension.

    It can be lowered for meshes without tensor parallelism only.

    Args:
        operation: It has one result and no inner programs.
        operands: Whole.
        dims: The dimension of each operand that is cut into the replicas' parts; None where every replica has all.
        replicas: How many.
    """

    def function(*parts: Any) -> Any:
        return operation.equation.primitive.bind(*parts, **operation.params)[None]

    mesh = (replicas, 1)
    specs = [alpa_spec(spec_with(operand.shape, dim, DATA), mesh) for operand, dim in zip(operands, dims)]
    parts = [jax.ShapeDtypeStruct(spec.part(each.shape), each.dtype) for spec, each in zip(specs, operands)]
    one = jax.eval_shape(function, *parts)
    specs.append(alpa_spec((DATA, *[None] * (one.ndim - 1)), mesh))
    result = ShapedArray((replicas, *one.shape[1:]), one.dtype)
    return by_part_primitive().bind(*operands, function=function, result=result, specs=tuple(specs))


def split(array: Any, dim: Optional[int], replicas: int) -> Any:
    """Return the replicas' parts of an array in a new first dimension; the array itself where it is not cut."""
    if dim is None:
        return array
    return jnp.moveaxis(array.reshape((*array.shape[:dim], replicas, -1, *array.shape[dim + 1 :])), dim, 0)


def own_scalar(vector: Any, mesh: Mesh) -> Any:
    """Each replica's own of a vector with one element for each replica, as a scalar of which all have "copies"."""
    return _reshaped(vector, (DATA,), (), mesh)


def all_scalars(scalar: Any, mesh: Mesh) -> Any:
    """Return the replicas' own scalars as a vector of them."""
    return _reshaped(scalar, (), (DATA,), mesh)


def _reshaped(array: Any, spec: Any, result_spec: Any, mesh: Mesh) -> Any:
    result = ShapedArray((mesh[DATA],) * len(result_spec), array.dtype)
    return by_part_primitive().bind(
        array,
        function=lambda part: jax.lax.reshape(part, (1,) * len(result_spec)),
        result=result,
        specs=(alpa_spec(spec, mesh), alpa_spec(result_spec, mesh)),
    )
