"""Use XLA's client: devices, processes of one stage, arrays and programs on devices."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import jax
import numpy
from jax._src import distributed, lib, xla_bridge
from jax._src.lib import xla_client

from hwaware.compat.lowering import is_for_shardy


def is_alpas() -> bool:
    """Return True on Alpa's own jaxlib, which names its version."""
    return hasattr(xla_client._xla, "get_alpa_jaxlib_version")


def accelerators() -> Set[str]:
    """Return the kinds of accelerators that the installed JAX has code for; it has that for TPUs everywhere."""
    getattr(xla_bridge, "_discover_and_register_pjrt_plugins", lambda: None)()  # else newer JAX knows no CUDA yet
    return {"cuda", "rocm", "tpu"} & set(xla_bridge._backend_factories)


def distributed_state() -> Any:
    """Return JAX's state of the other processes that it computes with."""
    return distributed.global_state


def has_gloo() -> bool:
    """Return True if this JAX can run one stage on the CPUs of several hosts."""
    return hasattr(xla_client._xla, "make_gloo_tcp_collectives")


def register_gloo(address: str) -> None:
    """Register a CPU client whose collectives go through gloo on `address`, on which hwaware measured the plan's links.

    JAX's own client takes the address that the host's name resolves to, often 127.0.0.1.
    """
    state = distributed_state()

    def make() -> Any:
        collectives = xla_client._xla.make_gloo_tcp_collectives(distributed_client=state.client, hostname=address)
        return xla_client.make_cpu_client(
            distributed_client=state.client,
            node_id=state.process_id,
            num_nodes=state.num_processes,
            collectives=collectives,
        )

    xla_bridge.register_backend_factory("cpu", make, priority=0, fail_quietly=False)


# (text, devices) -> loaded program; None until a call of `keep_loaded`.
_kept: Optional[Dict[Any, Any]] = None
_store: Any = None


def keep_loaded() -> None:
    """Keep every program that `load` loads from here on: this process will load the same ones again."""
    global _kept
    _kept = {} if _kept is None else _kept


def share_programs(store: Any) -> None:
    """Let `load` take programs of one CPU device from a store, and put there what it compiles.

    Args:
        store: An object with `get(key)` and `put(key, data)`; None shares no programs.
    """
    global _store
    _store = store


def load(stablehlo: str, devices: Sequence[Any]) -> Any:
    """Compile a program and load it on all devices of a stage: XLA cuts it into equal parts, one for each."""
    if _kept is None:
        return _loaded(stablehlo, devices)
    key = (stablehlo, *(device.id for device in devices))
    if key not in _kept:
        _kept[key] = _loaded(stablehlo, devices)
    return _kept[key]


def _loaded(stablehlo: str, devices: Sequence[Any]) -> Any:
    if _LAPACK.search(stablehlo):
        lib.lapack._lapack.initialize()  # JAX does so where it lowers the call; without it, the call has no address
    options = xla_client.CompileOptions()
    build = options.executable_build_options
    if len(devices) > 1:
        for each in (options, build):
            each.num_replicas, each.num_partitions = 1, len(devices)
        numbers = numpy.array([[device.id for device in devices]])
        build.device_assignment = xla_client.DeviceAssignment.create(numbers)
        build.use_spmd_partitioning = True
        if hasattr(build, "use_shardy_partitioner"):
            build.use_shardy_partitioner = is_for_shardy(stablehlo)
    client = devices[0].client
    if client.platform == "cpu" and len(devices) == 1 and _has_ynnpack(devices[0]):
        options.env_option_overrides = [(_YNNPACK, _products_of(stablehlo))]
    if _store is None or client.platform != "cpu" or [device.id for device in devices] != [0]:
        return _compiled(client, stablehlo, devices, options)
    key = f"{lib.version_str} {stablehlo}"
    data = _store.get(key)
    if data is not None:
        with contextlib.suppress(RuntimeError, TypeError):  # another build of XLA
            try:
                return client.deserialize_executable(data, list(devices), options)
            except TypeError:  # older jaxlib takes no devices
                return client.deserialize_executable(data, options)
    found = _compiled(client, stablehlo, devices, options)
    with contextlib.suppress(RuntimeError):  # not every program can be stored
        _store.put(key, found.serialize() if hasattr(found, "serialize") else client.serialize_executable(found))
    return found


# A product without batches: its right operand, the operand's axis that is summed over, and the operand's shape.
_PRODUCT = re.compile(
    r"dot_general %\S+, (%\S+), contracting_dims = \[\d+\] x \[(\d+)\][^:]*: \(tensor<[^>]*>, tensor<((?:\d+x)*)"
)
_LAPACK = re.compile("@(lapack|blas)_")
_YNNPACK = "xla_cpu_experimental_ynn_fusion_type"


def _products_of(stablehlo: str) -> str:
    """Return XLA's setting for the products that YNNPACK computes: all if some product's right operand is transposed.

    YNNPACK took 0.4 to 0.7 of the time of XLA's own code on such programs. It took 1.1 on others (JAX 0.12, AMD EPYC).
    """
    transposed = re.findall(r"(%\S+) = stablehlo.transpose", stablehlo)
    for operand, axis, shape in _PRODUCT.findall(stablehlo):
        if operand in transposed or 0 < int(axis) == shape.count("x") - 1:
            return "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
    return ""


@functools.lru_cache(maxsize=None)
def _has_ynnpack(device: Any) -> bool:
    options = xla_client.CompileOptions()
    with contextlib.suppress(AttributeError, RuntimeError):  # older XLA
        options.env_option_overrides = [(_YNNPACK, "")]
        _compiled(device.client, "func.func @main() { return }", [device], options)
        return _YNNPACK not in os.environ.get("XLA_FLAGS", "")  # the user's own choice
    return False


def _compiled(client: Any, stablehlo: str, devices: Sequence[Any], options: Any) -> Any:
    if hasattr(client, "compile_and_load"):
        return client.compile_and_load(stablehlo, list(devices), options)
    return client.compile(stablehlo, options)


def put(array: Any, device: Any, copy: bool = False) -> Any:
    """Put a NumPy array on a device by the shortest way; without `copy` the result may share the array's memory."""
    if hasattr(device.client, "buffer_from_pyval"):
        return device.client.buffer_from_pyval(array, device, force_copy=copy)
    # In newer JAX, `device_put` still reads the array after it has returned, even if it is to copy it.
    return jax.device_put(numpy.array(array) if copy else array, device)


def execute_sharded(compiled: Any, arrays: Sequence[List[Any]], devices: Sequence[Any], with_tokens: bool) -> Any:
    """Start a program of several devices.

    Args:
        compiled: A program that `load` returned.
        arrays: The part of each argument on each of this process's devices.
        devices: All devices of the program.
        with_tokens: True if the results shall tell when the program has ended.
    """
    global _takes_parts
    if _takes_parts:
        try:
            return compiled.execute_sharded(arrays, with_tokens=with_tokens)
        except TypeError:  # before anything has started: newer jaxlib takes whole arrays
            _takes_parts = False
    whole = [_whole(parts, tuple(devices)) for parts in arrays]
    return compiled.execute_sharded(whole, with_tokens=with_tokens)


_takes_parts = True


def _whole(parts: Sequence[Any], devices: Tuple[Any, ...]) -> Any:
    """Return an array that has these parts, one below the other. Programs only take the parts out of it again."""
    from hwaware.compat.programs import ArrayImpl

    aval, sharding = _kind(parts[0].shape, parts[0].dtype, devices)
    # JAX's public way checks each part, which takes ten times as long.
    return ArrayImpl(aval, sharding, list(parts), committed=True, _skip_checks=True)


@functools.lru_cache(maxsize=4096)
def _kind(shape: Tuple[int, ...], dtype: Any, devices: Tuple[Any, ...]) -> Tuple[Any, Any]:
    """Return the abstract value and the sharding of an array that has parts of this shape on the devices."""
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from hwaware.compat.programs import ShapedArray

    whole = (len(devices) * shape[0], *shape[1:]) if shape else ()
    sharding = NamedSharding(Mesh(numpy.array(devices), ("device",)), PartitionSpec(*["device"] * bool(shape)))
    return ShapedArray(whole, dtype), sharding
