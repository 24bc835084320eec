"""Write primitives in StableHLO, and tell XLA's partitioner, Shardy or GSPMD, how to split arrays."""

from __future__ import annotations

from typing import Any, Callable, List, Mapping, Sequence

import jax
from jax._src.lib.mlir import dialects, ir
from jax.interpreters import mlir

from hwaware.compat.specs import ShardingSpec

register_lowering, lower_fun = mlir.register_lowering, mlir.lower_fun
__all__ = ["annotate", "is_for_shardy", "lower_by_part", "lower_fun", "register_lowering"]

_sdy = getattr(dialects, "sdy", None)
_MANUAL = "{manual}"


def _uses_shardy() -> bool:
    """Return True if JAX's setting chooses Shardy or, without such a setting, if JAX has Shardy."""
    return bool(getattr(jax.config, "jax_use_shardy_partitioner", _sdy is not None))


def is_for_shardy(stablehlo: str) -> bool:
    """Return True if a program's shardings are written for Shardy."""
    return "#sdy.sharding" in stablehlo


def annotate(
    module: Any,
    pairs: Mapping[int, int],
    num_devices: int = 1,
    inputs: Sequence[ShardingSpec] = (),
    outputs: Sequence[ShardingSpec] = (),
) -> None:
    """Write into a program what jit writes there; jit itself would need the devices in this process.

    Args:
        module: The module that `jax.jit(...).lower` made.
        pairs: Argument -> result that takes over its memory.
        num_devices: The number of devices of the program.
        inputs: On several devices, the sharding of each argument.
        outputs: On several devices, the sharding of each result.
    """
    main = ir.SymbolTable(module.operation)["main"]
    with module.context:
        int32 = ir.IntegerType.get_signless(32)
        for name, specs in (("arg_attrs", inputs), ("res_attrs", outputs)):
            found = ir.ArrayAttr(main.attributes[name]) if name in main.attributes else ()
            entries = [{each.name: each.attr for each in ir.DictAttr(one)} for one in found] or [{} for _ in specs]
            for index, target in pairs.items() if name == "arg_attrs" else ():
                entries[index]["tf.aliasing_output"] = ir.IntegerAttr.get(int32, target)
            for entry, spec in zip(entries, specs):
                if _uses_shardy():
                    entry["sdy.sharding"] = ir.Attribute.parse(f"#sdy.sharding{spec.shardy()}")
                else:
                    entry["mhlo.sharding"] = ir.StringAttr.get(spec.gspmd())
            if entries:
                main.attributes[name] = ir.ArrayAttr.get([ir.DictAttr.get(entry) for entry in entries])
        if num_devices > 1:
            module.operation.attributes["mhlo.num_partitions"] = ir.IntegerAttr.get(int32, num_devices)


def lower_by_part(
    ctx: Any,
    operands: Sequence[Any],
    function: Callable[..., Any],
    specs: Sequence[ShardingSpec],
    result_spec: ShardingSpec,
) -> List[Any]:
    """Lower a function that each device applies by itself. `shard_map` would need the devices in this process.

    Args:
        ctx: JAX's lowering context of the primitive.
        operands: The whole operands.
        function: A function from a device's parts of the operands to its part of the result.
        specs: The shardings of the operands.
        result_spec: The sharding of the result.
    """
    (whole,) = ctx.avals_out
    avals = [aval.update(shape=spec.part(aval.shape)) for aval, spec in zip(ctx.avals_in, specs)]
    part = whole.update(shape=result_spec.part(whole.shape))

    def applied(parts: Sequence[Any]) -> Any:
        inner = ctx.replace(primitive=None, avals_in=avals, avals_out=[part])
        results = lower_fun(function, multiple_results=False)(inner, *parts)
        return results[0][0] if isinstance(results[0], (list, tuple)) else results[0]  # JAX 0.4.13 nests them

    if not _uses_shardy():
        parts = []
        for operand, given, spec, aval in zip(operands, ctx.avals_in, specs, avals):
            cut = _custom_call("Sharding", operand, given, spec.gspmd())
            parts.append(_custom_call("SPMDFullToShardShape", cut, aval, _MANUAL))
        manual = _custom_call("Sharding", applied(parts), part, _MANUAL)
        return [_custom_call("SPMDShardToFullShape", manual, whole, result_spec.gspmd())]
    assert _sdy is not None
    shardings = [
        ir.Attribute.parse(f"#sdy.sharding_per_value<[{', '.join(spec.shardy() for spec in each)}]>")
        for each in (specs, [result_spec])
    ]
    axes = ir.Attribute.parse('#sdy<manual_axes{"device"}>')
    call = _sdy.ManualComputationOp([_type(whole)], operands, *shardings, axes)
    block = ir.Block.create_at_start(call.body, [_type(aval) for aval in avals])
    with ir.InsertionPoint(block):
        _sdy.return_([applied(block.arguments)])
    return list(call.results)


def _custom_call(target: str, operand: Any, aval: Any, sharding: str) -> Any:
    """Return an array of the abstract type `aval`, made by a custom call that tells GSPMD a sharding."""
    from jax._src.lib.mlir.dialects import hlo

    call = hlo.CustomCallOp([_type(aval)], [operand], call_target_name=ir.StringAttr.get(target))
    call.operation.attributes["mhlo.sharding"] = ir.StringAttr.get(sharding)
    return call.result


def _type(aval: Any) -> Any:
    """Return the type of an array."""
    return ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype))
