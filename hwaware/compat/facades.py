"""Show Alpa 0.2.3, and nobody else, the JAX 0.3.22 and jaxlib that it knows, made of the installed JAX.

An `import` in an Alpa module, also inside a function, returns a facade if this module names one. Otherwise it returns
JAX's own module. All other code of the process sees JAX as it is.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.machinery
import operator
import sys
import types
from importlib.abc import MetaPathFinder
from typing import Any, Dict, Sequence, Tuple

import numpy

from hwaware.compat import programs, specs

_ROOTS = ("jax", "jaxlib")


class _HashableDict(Dict[Any, Any]):
    """A dictionary that can be part of a key. It stands for the FrozenDict of older JAX."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


def _placeholder(name: str) -> type:
    return type(name, (), {"__doc__": "A class of older JAX, without instances any more."})


def _placeholders(*names: str) -> Dict[str, Any]:
    return {name: _placeholder(name) for name in names}


def _donation_vector(donated: Sequence[int], args: Sequence[Any], kwargs: Any) -> Tuple[bool, ...]:
    from jax.tree_util import tree_leaves

    each = [index in donated for index, argument in enumerate(args) for _ in tree_leaves(argument)]
    return (*each, *(False for _ in tree_leaves(kwargs)))


def _rebased(argnums: Any, static_argnums: Any) -> Any:
    """Return what JAX's function does. Alpa gives it whatever a program wrote, JAX itself only what it has checked."""
    from jax.api_util import rebase_donate_argnums

    try:
        places = tuple(map(operator.index, argnums))
    except TypeError:
        raise TypeError(
            f"donate_argnums or batch_argnums of alpa.parallelize is {argnums!r}, expected places of arguments in a "
            "tuple. To fix: write (0,) for the first argument."
        ) from None
    return rebase_donate_argnums(places, static_argnums)


def _hashable_index(index: Any) -> Tuple[Any, ...]:
    return tuple((x.start, x.stop, x.step) if isinstance(x, slice) else x for x in index)


# Facade -> the modules that it stands before: they have the names that it does not add.
_BEHIND: Dict[str, Tuple[str, ...]] = {
    **{name: (name,) for name in ("jax", "jax._src", "jax._src.api", "jax._src.dispatch", "jax._src.lib", "jaxlib")},
    **{name: (name,) for name in ("jax._src.tree_util", "jax.api_util", "jax.experimental", "jax.interpreters")},
    "jax._src.lib.xla_bridge": ("jax._src.xla_bridge",),
    "jax._src.lib.xla_client": ("jaxlib.xla_client",),
    "jax._src.lib.xla_extension": ("jaxlib.xla_extension", "jaxlib._jax"),
    "jax.abstract_arrays": (),
    "jax.core": ("jax._src.core",),
    "jax.experimental.maps": (),
    "jax.experimental.pjit": (),
    "jax.interpreters.partial_eval": ("jax._src.interpreters.partial_eval",),
    "jax.interpreters.pxla": ("jax._src.interpreters.pxla",),
    "jax.interpreters.xla": ("jax._src.interpreters.xla", "jax.interpreters.xla"),
    "jax.lib": (),
    "jax.linear_util": ("jax._src.linear_util",),
}


@functools.lru_cache(maxsize=None)
def _added() -> Dict[str, Dict[str, Any]]:
    """Return the names that each facade adds."""
    import jax.tree_util as tree_util
    from jax._src import config

    trees = ("tree_map", "tree_flatten", "tree_unflatten", "tree_leaves")
    return {
        "jax": {name: getattr(tree_util, name) for name in trees},
        "jax._src.api": {
            "FLAGS": getattr(config, "FLAGS", None),
            "_check_callable": lambda _: None,
            "make_jaxpr": programs.make_jaxpr,
        },
        "jax._src.lib.xla_client": {"ops": _Facade("ops", (), {})},
        "jax._src.lib.xla_extension": {
            "get_alpa_jaxlib_version": lambda: "0.2.2",  # the oldest that Alpa 0.2.3 accepts
            # The module is an UnloweredProgram of hwaware.patching.names.
            "hlo_module_count_flop_dot_conv_only": lambda module: module.flops(),
        },
        "jax._src.tree_util": {"_replace_nones": None},
        "jax.abstract_arrays": {"array_types": {numpy.ndarray}},
        "jax.api_util": {"donation_vector": _donation_vector, "rebase_donate_argnums": _rebased},
        "jax.core": {
            "ClosedJaxpr": programs.ClosedJaxpr,
            "Jaxpr": programs.Jaxpr,
            "gensym": programs.gensym,
            "get_aval": programs.get_aval,
            "named_call_p": programs.named_call_primitive(),
            "raise_to_shaped": lambda aval, weak_type=None: aval,
        },
        "jax.experimental.maps": {"FrozenDict": _HashableDict},
        "jax.interpreters.partial_eval": {"trace_to_jaxpr_final": programs.trace},
        "jax.interpreters.xla": _added_to_xla(),
        "jax.linear_util": {"wrap_init": programs.wrap_init},
        **_added_for_sharding(),
    }


def _added_to_xla() -> Dict[str, Any]:
    from jax import api_util
    from jax.interpreters import xla

    handlers = ("canonicalize_dtype_handlers", "pytype_aval_mappings")
    return {
        **_placeholders("_CppDeviceArray", "_DeviceArray", "DeviceArray", "AxisEnv"),
        "translations": {},
        "register_translation": lambda *_, **__: None,
        "xops": None,
        "canonicalize_dtype": programs.canonicalized,
        "abstractify": api_util.shaped_abstractify,
        **{name: {} for name in handlers if not hasattr(xla, name)},
    }


def _added_for_sharding() -> Dict[str, Dict[str, Any]]:
    cut = ("NoSharding", "Chunked", "ShardedAxis", "Replicated", "ShardingSpec", "spec_to_indices")
    return {
        "jax.experimental.pjit": {
            **dict.fromkeys(("_is_unspecified", "_is_auto", "_is_from_gda"), lambda _: False),
            **dict.fromkeys(("_prepare_axis_resources", "get_array_mapping", "_UNSPECIFIED")),
            **_placeholders("ParsedPartitionSpec"),
        },
        "jax.interpreters.pxla": {
            **_placeholders("_ShardedDeviceArray", "ShardedDeviceArray", "Unstacked", "Index", "MeshAxisName"),
            **{name: getattr(specs, name) for name in cut},
            "_hashable_index": _hashable_index,
        },
    }


# Other name under which Alpa imports a facade -> the facade's name.
_ALSO = {
    "jax.lib.xla_bridge": "jax._src.lib.xla_bridge",
    "jax.lib.xla_client": "jax._src.lib.xla_client",
    "jax.xla": "jax.interpreters.xla",
    "jaxlib.xla_client": "jax._src.lib.xla_client",
    "jaxlib.xla_extension": "jax._src.lib.xla_extension",
}
# In these facades, a name that no module has is an empty class: Alpa only annotates its functions with it.
_OF_CLASSES = ("jax._src.lib.xla_client", "jax._src.lib.xla_extension", "ops")


class _Facade(types.ModuleType):
    """A module in front of others. It has its own names, then facades and modules inside it, then the others' names."""

    def __init__(self, name: str, modules: Sequence[str], names: Dict[str, Any]) -> None:
        super().__init__(name)
        self._modules = modules
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        inside = f"{self.__name__}.{name}"
        if inside in _ALSO or inside in _BEHIND:
            return module(inside)
        for owner in self._modules:
            try:
                return getattr(importlib.import_module(owner), name)
            except (ImportError, AttributeError):
                continue
        if self.__name__ in _OF_CLASSES and not name.startswith("__"):
            vars(self)[name] = _placeholder(name)
            return vars(self)[name]
        try:
            return importlib.import_module(inside)
        except ImportError:
            what = f"module {self.__name__!r} has no attribute {name!r}"
            raise AttributeError(f"{what}: on this JAX, Alpa compiles only while hwaware is enabled") from None


@functools.lru_cache(maxsize=None)
def module(name: str) -> Any:
    """Return a module of JAX or jaxlib as Alpa knows it."""
    name = _ALSO.get(name, name)
    if name not in _BEHIND:
        return importlib.import_module(name)
    return _Facade(name, _BEHIND[name], _added().get(name, {}))


def _import(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    """Import a module of JAX as Alpa knows it, and any other module as `__import__` does."""
    root = name.split(".", 1)[0]
    if level or root not in _ROOTS:
        return builtins.__import__(name, globals, locals, fromlist, level)
    found = module(name)
    return found if fromlist else module(root)


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": _import}
        super().exec_module(module)


class _Finder(MetaPathFinder):
    """Find Alpa's modules as Python does, and have them loaded with an `import` of their own."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.split(".", 1)[0] != "alpa":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Let all modules of Alpa that are imported from here on see the facades."""
    sys.meta_path.insert(0, _Finder())
