"""Let each replica do something by itself: an operation on its own samples, or a sum of its own.

If a convolution has the replicas as one more dimension, XLA's partitioner gathers all samples on every device (JAX
0.4.30). So hwaware tells the partitioner to leave the operation alone: each device computes on its own parts.
`shard_map` does the same, but needs the devices themselves, and the driver has none.

Replicas' scalars have no dimension along which they could lie one below the other. Each replica keeps its own scalar
under the name of a common one. The partitioner takes a scalar for a copy on every device, and never looks.
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

    Its parameters are the `function`, the abstract `result` of all parts together, and `specs`: Alpa's sharding specs
    of the operands and of the result.
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

    Only meshes without tensor parallelism can run this.

    Args:
        operation: An operation with one result and no inner programs.
        operands: The whole operands.
        dims: The dimension of each operand that is cut into the replicas' parts; None if every replica has all.
        replicas: The number of replicas.
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
    """Return the replicas' parts of an array in a new first dimension; the array itself if `dim` is None."""
    if dim is None:
        return array
    shape = (*array.shape[:dim], replicas, array.shape[dim] // replicas, *array.shape[dim + 1 :])
    return jnp.moveaxis(array.reshape(shape), dim, 0)


def own_scalar(vector: Any, mesh: Mesh) -> Any:
    """Return each replica's own element of a vector, as a scalar that XLA takes for a copy on every device."""
    return _reshaped(vector, (DATA,), (), mesh)


def all_scalars(scalar: Any, mesh: Mesh) -> Any:
    """Return the replicas' own scalars as a vector."""
    return _reshaped(scalar, (), (DATA,), mesh)


def _reshaped(array: Any, spec: Any, result_spec: Any, mesh: Mesh) -> Any:
    result = ShapedArray((mesh[DATA],) * len(result_spec), array.dtype)
    return by_part_primitive().bind(
        array,
        function=lambda part: jax.lax.reshape(part, (1,) * len(result_spec)),
        result=result,
        specs=(alpa_spec(spec, mesh), alpa_spec(result_spec, mesh)),
    )
