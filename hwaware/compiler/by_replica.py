"""Let each replica do something by itself: an operation on its own samples, or a sum of its own.

XLA's partitioner gathers all samples on every device for a convolution whose replicas are one more dimension (seen with
JAX 0.4.30). So it is told to leave the operation alone: each device makes its part of the result from its part of the
operands, as in `shard_map`, which however wants the devices themselves, and the driver has none of them.

Replicas' scalars have no dimension along which they could lie one below the other. Each replica keeps its own under the
name of one that all have: the partitioner takes a scalar for a copy on every device, and never looks.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, List, Optional, Sequence, Tuple

import jax
import jax.numpy as jnp

from hwaware.compat.lowering import custom_call, lower_fun, register_lowering, reshaped
from hwaware.compat.programs import Primitive, ShapedArray
from hwaware.compiler.layouts import COPIES


@functools.lru_cache(maxsize=None)
def by_replica_primitive() -> Any:
    """Return the operation that stands for another one, applied by each replica to its own part.

    Its parameters: the primitive `applied` and the `params` of the other one, the `dims` along which its operands are
    cut (None for an operand that every replica has whole) and the number of `replicas`. Its result has the replicas as
    a new first dimension. It can be lowered for meshes without tensor parallelism only.
    """
    primitive = Primitive("by_replica")
    primitive.def_impl(_reference)

    @primitive.def_abstract_eval  # type: ignore[misc]  # JAX's decorator has no types
    def _shape(*operands: Any, **how: Any) -> Any:
        result = _of_one_replica(operands, **how)
        return ShapedArray((how["replicas"], *result.shape), result.dtype)

    register_lowering(primitive, _lower)
    return primitive


def by_replica(operation: Any, operands: Sequence[Any], dims: Sequence[Optional[int]], replicas: int) -> Any:
    """Each replica's result of an operation on its own part of the operands, in a new first dimension.

    Args:
        operation: It has one result and no inner programs.
        operands: Whole.
        dims: The dimension of each operand that is cut into the replicas' parts; None where every replica has all.
        replicas: How many.
    """
    params = tuple(operation.params.items())
    return by_replica_primitive().bind(
        *operands, applied=operation.equation.primitive, params=params, dims=tuple(dims), replicas=replicas
    )


def split(array: Any, dim: Optional[int], replicas: int) -> Any:
    """Return the replicas' parts of an array in a new first dimension; the array itself where it is not cut."""
    if dim is None:
        return array
    return jnp.moveaxis(array.reshape((*array.shape[:dim], replicas, -1, *array.shape[dim + 1 :])), dim, 0)


def _reference(*operands: Any, applied: Any, params: Any, dims: Sequence[Optional[int]], replicas: int) -> Any:
    """Return what it computes, on one device."""
    axes = tuple(None if dim is None else 0 for dim in dims)
    parts = [split(operand, dim, replicas) for operand, dim in zip(operands, dims)]
    return jax.vmap(lambda *each: applied.bind(*each, **dict(params)), axes)(*parts)


def _of_one_replica(operands: Any, applied: Any, params: Any, dims: Any, replicas: int) -> Any:
    """Shape and type of the operation's result on one replica's part."""
    parts = [
        jax.ShapeDtypeStruct(_part_shape(operand.shape, dim, replicas), operand.dtype)
        for operand, dim in zip(operands, dims)
    ]
    return jax.eval_shape(lambda *each: applied.bind(*each, **dict(params)), *parts)


def _part_shape(shape: Sequence[int], dim: Optional[int], replicas: int) -> Tuple[int, ...]:
    return tuple(size // replicas if place == dim else size for place, size in enumerate(shape))


def _lower(ctx: Any, *operands: Any, applied: Any, params: Any, dims: Any, replicas: int) -> List[Any]:
    """As `shard_map` is lowered: the operands' parts, the operation, the results' parts together."""
    (whole,) = ctx.avals_out
    part = ShapedArray((1, *whole.shape[1:]), whole.dtype)
    avals, parts = [], []
    for operand, aval, dim in zip(operands, ctx.avals_in, dims):
        cut = custom_call("Sharding", operand, aval, _cut(aval, dim, replicas))
        avals.append(ShapedArray(_part_shape(aval.shape, dim, replicas), aval.dtype))
        parts.append(custom_call("SPMDFullToShardShape", cut, avals[-1], _MANUAL))
    inner = lower_fun(lambda *each: applied.bind(*each, **dict(params))[None], multiple_results=False)
    results = inner(ctx.replace(primitive=None, avals_in=avals, avals_out=[part]), *parts)
    (result,) = results[0] if isinstance(results[0], (list, tuple)) else results  # JAX 0.4.13 nests them
    manual = custom_call("Sharding", result, part, _MANUAL)
    return [custom_call("SPMDShardToFullShape", manual, whole, _cut(whole, 0, replicas))]


@functools.lru_cache(maxsize=None)
def own_scalar_primitive() -> Any:
    """Each replica's own of a vector with one element for each replica, as a scalar of which all devices have "copies".

    Its parameter: the `mesh`, (DP, TP).
    """
    return _scalar_primitive("own_scalar", lambda vector, mesh: ((), vector.dtype), _lower_own)


@functools.lru_cache(maxsize=None)
def all_scalars_primitive() -> Any:
    """Return the replicas' own scalars as a vector of them; its parameter: the `mesh`, (DP, TP)."""
    return _scalar_primitive("all_scalars", lambda scalar, mesh: ((mesh[0],), scalar.dtype), _lower_all)


def _scalar_primitive(name: str, kind_of: Callable[..., Any], lowering: Callable[..., Any]) -> Any:
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda operand, mesh: ShapedArray(*kind_of(operand, mesh)))
    register_lowering(primitive, lowering)
    return primitive


def _lower_own(ctx: Any, vector: Any, mesh: Tuple[int, int]) -> List[Any]:
    (given,), (scalar,) = ctx.avals_in, ctx.avals_out
    part = given.update(shape=(1,))
    mine = custom_call(
        "SPMDFullToShardShape", custom_call("Sharding", vector, given, _vector_over(mesh)), part, _MANUAL
    )
    own = custom_call("Sharding", reshaped(mine, scalar), scalar, _MANUAL)
    return [custom_call("SPMDShardToFullShape", own, scalar, COPIES)]


def _lower_all(ctx: Any, scalar: Any, mesh: Tuple[int, int]) -> List[Any]:
    (given,), (vector,) = ctx.avals_in, ctx.avals_out
    part = vector.update(shape=(1,))
    own = custom_call("SPMDFullToShardShape", custom_call("Sharding", scalar, given, COPIES), given, _MANUAL)
    mine = custom_call("Sharding", reshaped(own, part), part, _MANUAL)
    return [custom_call("SPMDShardToFullShape", mine, vector, _vector_over(mesh))]


def _vector_over(mesh: Tuple[int, int]) -> str:
    """XLA's words for a vector of which each replica's devices have one element."""
    devices = ",".join(map(str, range(mesh[0] * mesh[1])))
    copies = (f",{mesh[1]}", " last_tile_dim_replicate") if mesh[1] > 1 else ("", "")
    return f"{{devices=[{mesh[0]}{copies[0]}]{devices}{copies[1]}}}"


_MANUAL = "{manual}"


def _cut(aval: Any, dim: Optional[int], replicas: int) -> str:
    """XLA's words for an array that is cut along one dimension, a part on each device."""
    if dim is None:
        return COPIES
    counts = ",".join(str(replicas if place == dim else 1) for place in range(len(aval.shape)))
    return f"{{devices=[{counts}]{','.join(map(str, range(replicas)))}}}"
