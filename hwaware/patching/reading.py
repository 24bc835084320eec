"""Let a training loop read Alpa's arrays as it reads JAX's: compare a step, format a loss, test a flag.

Each such use fetches the value from the workers, once an array. Alpa keeps what was fetched.
"""

from __future__ import annotations

import math
from typing import Any, List

import numpy

from hwaware.patching.mechanism import Patch, Target

_MODULE = "alpa.device_mesh"
# What JAX's arrays do, and both of Alpa's kinds of arrays lack. Alpa's arrays keep the hash of an object. Copies and
# pickles are arrays of JAX, which any function of Alpa takes.
_READS = "bool int index complex format len getitem iter round eq ne lt le gt ge neg pos abs invert reduce deepcopy"
_OPERATORS = "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift"
_OTHERS = "item tolist astype reshape sum mean max min all any argmax argmin"
_METHODS = (
    *(f"__{name}__" for name in _READS.split()),
    *(f"__{side}{name}__" for name in _OPERATORS.split() for side in ("", "r")),
    *_OTHERS.split(),
)


def _as_jax(array: Any) -> Any:
    from jax.numpy import asarray

    return asarray(array._value)


def _method(name: str) -> Any:
    """Return a method that JAX's array of the value answers, also by NotImplemented."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(_as_jax(self), name)(*args, **kwargs)

    return method


def _added(kind: str, name: str, attribute: Any) -> Patch:
    return Patch(Target(_MODULE, f"{kind}.{name}", ()), lambda _: attribute)


def _of_replicas() -> List[Patch]:
    """Return what only arrays with copies on several meshes lack."""
    of_aval = {
        "shape": lambda self: self.aval.shape,
        "dtype": lambda self: self.aval.dtype,
        "size": lambda self: math.prod(self.aval.shape),
    }
    found = {"__float__": _method("__float__"), "block_until_ready": _block_until_ready}
    found.update({name: property(get) for name, get in of_aval.items()})
    return [_added("ReplicatedDistributedArray", name, one) for name, one in found.items()]


def _block_until_ready(replicated: Any) -> Any:
    """Wait for the array's workers: `jax.block_until_ready` waits only for arrays with this method."""
    replicated.replica.block_until_ready()
    return replicated


def array(_original: Any) -> Any:
    """Replace the conversion to NumPy's array: NumPy 2 also says whether it shall copy."""

    def replacement(self: Any, dtype: Any = None, copy: Any = None) -> Any:
        value = numpy.asarray(self._value, dtype)
        return value.copy() if copy else value

    return replacement


class _ReadOnlyValue:
    """Set Alpa's cache of an array's value, for reading alone: hwaware may send it to workers of another function."""

    def __set__(self, array: Any, value: Any) -> None:
        if value is not None:
            value.flags.writeable = False
        array.__dict__["_npy_value"] = value


PATCHES = (
    Patch(Target(_MODULE, "DistributedArray.__array__", ("754dc89e0e4db701",)), array),
    Patch(Target(_MODULE, "ReplicatedDistributedArray.__array__", ("754dc89e0e4db701",)), array),
    _added("DistributedArray", "_npy_value", _ReadOnlyValue()),
    *(
        _added(kind, name, attribute)
        for kind in ("DistributedArray", "ReplicatedDistributedArray")
        for name, attribute in (
            *((name, _method(name)) for name in _METHODS),
            ("__jax_array__", _as_jax),
            ("real", property(lambda self: _as_jax(self).real)),
            ("ndim", property(lambda self: len(self.aval.shape))),
        )
    ),
    *_of_replicas(),
)
