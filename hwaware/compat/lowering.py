"""StableHLO: how primitives are written in it, and what XLA's partitioner is told."""

from __future__ import annotations

from typing import Any, Sequence

from jax._src.lib.mlir import ir
from jax.interpreters import mlir

register_lowering, lower_fun = mlir.register_lowering, mlir.lower_fun
__all__ = ["custom_call", "ir", "lower_fun", "register_lowering", "reshaped"]


def reshaped(operand: Any, aval: Any) -> Any:
    """Return an array with the shape of an abstract one."""
    from jax._src.lib.mlir.dialects import hlo

    return hlo.ReshapeOp(_type(aval.shape, operand), operand).result


def custom_call(target: str, operand: Any, aval: Any, sharding: str) -> Any:
    """Return an array, with the shape of an abstract one, about which XLA's partitioner gets a message."""
    from jax._src.lib.mlir.dialects import hlo

    call = hlo.CustomCallOp([_type(aval.shape, operand)], [operand], call_target_name=ir.StringAttr.get(target))
    call.operation.attributes["mhlo.sharding"] = ir.StringAttr.get(sharding)
    return call.result


def _type(shape: Sequence[int], like: Any) -> Any:
    """Return the type of an array of the elements of another one."""
    return ir.RankedTensorType.get(shape, ir.RankedTensorType(like.type).element_type)
