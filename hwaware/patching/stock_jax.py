"""Names that Alpa 0.2.3 expects of JAX 0.3.22 and its own jaxlib, and that stock JAX 0.4.13 to 0.4.30 has no more.

`install()` adds the missing names to JAX's modules before Alpa is imported, and gives Alpa's two primitives a lowering.
It only adds what is missing and does nothing when Alpa's own jaxlib is there. Which name is needed for which version of
JAX was found by importing and running Alpa on 0.4.13, 0.4.20 and 0.4.30.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import types
import warnings
from typing import Any, Dict, Tuple

from hwaware.errors import AlpaError

OLDEST_JAX, NEWEST_JAX = (0, 4, 13), (0, 4, 30)
# What `make versions` runs; patches/README.md has the table.
SUPPORTED = (
    "hwaware runs Alpa 0.2.3 on stock JAX 0.4.13 to 0.4.30 (checked: 0.4.13, 0.4.20, 0.4.30), "
    "Python 3.9 and 3.11, Ray 2.9 and newer."
)
_installed = False


def is_needed() -> bool:
    """Return True if this JAX is a stock one; Alpa's own jaxlib names its version."""
    import jaxlib.xla_extension as xla_extension

    return not hasattr(xla_extension, "get_alpa_jaxlib_version") or _installed


def install() -> None:
    """Make `import alpa` work on stock JAX; safe to call again.

    Raises:
        AlpaError: Alpa is missing, or this JAX is one on which Alpa was never seen to run.
    """
    global _installed
    _require_alpa()
    if _installed or not is_needed():
        return
    _require_known_jax()
    with warnings.catch_warnings():
        # JAX announces what it will drop next; that is what this module is about.
        warnings.simplefilter("ignore")
        _add_modules()
        _add_names()
        _import_alpa()
    _replace_in_alpa()
    _installed = True


def _require_alpa() -> None:
    from importlib import metadata

    fix, expected = "pip install --no-deps alpa==0.2.3", "0.2.3"
    try:
        found = metadata.version("alpa")
    except metadata.PackageNotFoundError:
        what = f"Alpa is not installed, expected version {expected}. {SUPPORTED}"
        raise AlpaError(what, fix, expected=expected) from None
    if found != expected:
        what = f"Alpa {found} is installed, expected version {expected}. {SUPPORTED}"
        raise AlpaError(what, fix, found=found, expected=expected)


def _require_known_jax() -> None:
    import jax

    release = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", jax.__version__)  # a development version is another one
    if release is None or not OLDEST_JAX <= tuple(map(int, release.groups())) <= NEWEST_JAX:
        raise AlpaError(
            f"JAX {jax.__version__} is installed. {SUPPORTED}",
            "pip install jax==0.4.30 jaxlib==0.4.30",
            found=jax.__version__,
            expected=("0.4.13", "0.4.30"),
        )


def _set_missing(owner: Any, names: Dict[str, Any]) -> None:
    for name, value in names.items():
        if not hasattr(owner, name):
            setattr(owner, name, value)


def _placeholder(name: str) -> type:
    return type(name, (), {"__doc__": "A class of older JAX, of which there are no instances any more."})


class _HashableDict(Dict[Any, Any]):
    """Stands for the FrozenDict of older JAX: a dictionary that can be part of a key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))


def _ensure_module(name: str, **names: Any) -> None:
    try:
        module: Any = __import__(name, fromlist=["_"])
    except ImportError:
        module = types.ModuleType(name)
        sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    _set_missing(sys.modules[parent], {child: module})
    _set_missing(module, names)


def _add_modules() -> None:
    import jax
    import jax._src.lib as lib
    import jax._src.linear_util as linear_util
    import jax._src.xla_bridge as xla_bridge
    import jax.interpreters.xla as xla
    import numpy

    _set_missing(jax, {"linear_util": linear_util, "xla": xla})
    sys.modules.setdefault("jax.linear_util", linear_util)
    sys.modules["jax._src.lib.xla_bridge"] = xla_bridge
    _set_missing(lib, {"xla_bridge": xla_bridge})
    _ensure_module("jax.abstract_arrays", array_types={numpy.ndarray})
    _ensure_module("jax.experimental.maps", FrozenDict=_HashableDict)


def _add_names() -> None:
    import jax._src.api as api
    import jax._src.config as config
    import jax._src.dispatch as dispatch
    import jax._src.interpreters.pxla as inner_pxla
    import jax._src.interpreters.xla as inner_xla
    import jax.core as core
    import jax.experimental.pjit as pjit
    import jax.interpreters.pxla as pxla
    import jax.interpreters.xla as xla
    import jaxlib.xla_extension as xla_extension
    from jax._src import core as inner_core

    from hwaware.runtime import layouts

    for name in ("_CppDeviceArray", "_DeviceArray", "DeviceArray"):
        _set_missing(xla, {name: _placeholder(name)})
    xla_names = {"translations": {}, "register_translation": lambda *_, **__: None, "AxisEnv": object}
    _set_missing(xla, {**xla_names, "xops": getattr(inner_xla, "xops", None)})
    for name in ("_ShardedDeviceArray", "ShardedDeviceArray"):
        _set_missing(pxla, {name: _placeholder(name)})
    _set_missing(pxla, {"_hashable_index": getattr(inner_pxla, "_hashable_index", _hashable_index)})
    pxla.ShardingSpec.sharding_proto = layouts.tiles  # one JAX has none, another one whose fields became methods
    _set_missing(api, {"FLAGS": getattr(config, "FLAGS", None), "_check_callable": lambda _: None})
    _set_missing(core, {"named_call_p": inner_core.CallPrimitive("named_call")})
    for name in ("_is_unspecified", "_is_auto", "_is_from_gda"):
        setattr(pjit, name, lambda _: False)
    parsed = _placeholder("ParsedPartitionSpec")
    names = ("_prepare_axis_resources", "get_array_mapping", "_UNSPECIFIED")
    _set_missing(pjit, {"ParsedPartitionSpec": parsed, **dict.fromkeys(names)})
    _set_missing(xla_extension, {"DeviceArray": _placeholder("DeviceArray")})
    # The oldest version of Alpa's jaxlib that Alpa 0.2.3 accepts.
    _set_missing(xla_extension, {"get_alpa_jaxlib_version": lambda: "0.2.2"})
    # Of a module that hwaware.patching.programs stands for.
    _set_missing(xla_extension, {"hlo_module_count_flop_dot_conv_only": lambda module: module.flops()})
    _set_missing(dispatch, {"prefetch": lambda value: value, "jaxpr_literals": lambda _: []})
    _accept_jaxprs_in_gensym(core, inner_core)


def _hashable_index(index: Any) -> Tuple[Any, ...]:
    return tuple((x.start, x.stop, x.step) if isinstance(x, slice) else x for x in index)


def _accept_jaxprs_in_gensym(core: Any, inner_core: Any) -> None:
    """Older JAX took the jaxprs whose names to avoid; newer names are unique by themselves."""
    if "jaxprs" in inspect.signature(inner_core.gensym).parameters:
        return
    gensym = inner_core.gensym
    core.gensym = lambda jaxprs=None, suffix="": gensym(suffix)


def _import_alpa() -> None:
    """Import Alpa, and take back the XLA flags that it sets: newer XLA aborts on those it does not know."""
    flags = os.environ.get("XLA_FLAGS")
    # Where there is a GPU, Alpa imports this one and with it CuPy, for transfers by NCCL that our workers do not use.
    sys.modules.setdefault("alpa.collective.worker_nccl_util", types.ModuleType("worker_nccl_util"))
    import alpa  # noqa: F401

    if flags is None:
        os.environ.pop("XLA_FLAGS", None)
    else:
        os.environ["XLA_FLAGS"] = flags


def _replace_in_alpa() -> None:
    """Replace names of Alpa whose meaning changed: donation, lowering of its primitives, counting of FLOPs."""
    import jax.core as core
    from alpa.pipeline_parallel import layer_construction, layer_stats, primitive_def, stage_profiling
    from jax._src.interpreters import mlir

    mlir.register_lowering(primitive_def.pipeline_p, lambda _, *args, **__: list(args))
    mlir.register_lowering(core.named_call_p, _lower_named_call)
    _adapt_donation_vector()
    _accept_array_types()
    for module in (layer_stats, layer_construction, stage_profiling):
        for name, function in (("eqn_flops", equation_flops), ("heavy_count", heavy_count)):
            if hasattr(module, name):
                setattr(module, name, function)


def _accept_array_types() -> None:
    """Alpa moves arguments to workers by their type; newer JAX has one array type where older had several."""
    import numpy
    from alpa import device_mesh
    from jax._src.array import ArrayImpl

    def shard(array: Any, *args: Any, **kwargs: Any) -> Any:
        # Alpa's own handler of device arrays compiles a slice for every shape; a view of the host's copy needs none.
        return device_mesh._shard_array(numpy.asarray(array), *args, **kwargs)

    device_mesh.shard_arg_handlers.setdefault(ArrayImpl, shard)
    device_mesh.shard_arg_handlers.setdefault(numpy.ndarray, device_mesh._shard_array)


def _lower_named_call(ctx: Any, *args: Any, name: str, call_jaxpr: Any, backend: Any = None) -> Any:
    from jax._src.interpreters import mlir

    return mlir.core_call_lowering(ctx, *args, name=name, backend=backend, call_jaxpr=call_jaxpr)


def _adapt_donation_vector() -> None:
    import alpa.api
    import jax
    from jax import api_util

    parameters = inspect.signature(api_util.donation_vector).parameters
    if "in_tree" in parameters:
        structure = jax.tree_util.tree_structure
        alpa.api.donation_vector = lambda donated, args, kwargs: api_util.donation_vector(
            donated, (), structure((tuple(args), kwargs))
        )
    elif "donate_argnames" in parameters:
        alpa.api.donation_vector = lambda donated, args, kwargs: api_util.donation_vector(donated, (), args, kwargs)


def _inner_jaxpr(equation: Any) -> Any:
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    return getattr(inner, "jaxpr", inner)


def equation_flops(equation: Any) -> float:
    """FLOPs of one equation, as tracing counts them; Alpa asks its jaxlib for this, which stock JAX lacks."""
    from hwaware.tracing.flops import equation_flops as count

    return float(count(equation))


def heavy_count(equation: Any) -> int:
    """Matrix products and convolutions in an equation: Alpa cuts layers between these."""
    inner = _inner_jaxpr(equation)
    if inner is not None:
        return sum(heavy_count(part) for part in inner.eqns)
    return int(equation.primitive.name in ("dot_general", "conv_general_dilated"))
