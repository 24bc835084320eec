"""Run Alpa 0.2.3 on stock JAX: `install` imports Alpa with JAX 0.3.22 as Alpa knows it (`hwaware.compat.facades`).

`install` does nothing on the JAX that Alpa brings. Training on each version showed which ones work (`make versions`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import types
import warnings
from typing import Any, Tuple

import numpy

from hwaware.compat.packages import install_jax
from hwaware.errors import AlpaError

# The versions on which `make versions` trains; patches/README.md has the table.
SEEN = ("0.4.13", "0.4.30", "0.6.2", "0.8.3", "0.12.0.1")
SUPPORTED = (
    f"hwaware runs Alpa 0.2.3 on stock JAX from {SEEN[0]} on (seen: {', '.join(SEEN)}), Python 3.9 to 3.13, Ray 2.9 "
    "and newer."
)
LOG = logging.getLogger("hwaware")
# Packages that Alpa uses in the driver alone. A worker takes 0.36 s of processor time to import these.
_DRIVERS = ("flax", "numba")
_installed = False


def is_needed() -> bool:
    """Return True if this JAX is stock JAX; Alpa's own names its version."""
    from hwaware.compat.client import is_alpas

    return not is_alpas()


def install() -> None:
    """Make `import alpa` work on stock JAX; safe to call again.

    Raises:
        AlpaError: Alpa is missing, or this JAX lacks what Alpa or hwaware needs.
    """
    global _installed
    _require_alpa()
    if _installed or not is_needed():
        return
    _require_known_jax()
    from hwaware.compat import facades

    with warnings.catch_warnings():
        # JAX warns of names that it will drop next. The facades replace such names.
        warnings.simplefilter("ignore")
        facades.install()
        _import_alpa()
    _adapt_alpa()
    _installed = True


def prepare_worker(wide: bool = False) -> Any:
    """Make `import alpa` work in a worker, and return the module with Alpa's timers.

    Args:
        wide: The driver's `jax_enable_x64`. Without it, JAX makes narrower arrays than the driver's programs take.
    """
    import jax

    from hwaware.compat.absent import without

    jax.config.update("jax_enable_x64", wide)

    with without(*_DRIVERS):
        install()
        from alpa import timer

    return timer


def _require_alpa() -> None:
    from importlib import metadata

    expected, found = "0.2.3", None
    with contextlib.suppress(metadata.PackageNotFoundError):
        found = metadata.version("alpa")
    if found != expected:
        what = "Alpa is not installed" if found is None else f"Alpa {found} is installed"
        what = f"{what}, expected version {expected}. {SUPPORTED}"
        raise AlpaError(what, "pip install --no-deps alpa==0.2.3", found=found, expected=expected)


def _require_known_jax() -> None:
    """Refuse a JAX that is too old, or newer than all seen ones if it lacks a name. Else warn of the newer one."""
    import jax

    found = _release(jax.__version__)
    if _release(SEEN[0]) <= found <= _release(SEEN[-1]):
        return
    lacks = ""
    if found > _release(SEEN[-1]):
        from hwaware.compat import scan

        missing = scan.missing()
        if not missing:
            LOG.warning(
                "JAX %s is newer than %s, the newest on which hwaware was seen to train. It has all names that Alpa "
                "and hwaware need. To be safe, compare the losses of a short run with plain JAX's.",
                jax.__version__,
                SEEN[-1],
            )
            return
        lacks = f" It lacks {len(missing)} names that Alpa or hwaware needs, e.g. {missing[0]}."
    raise AlpaError(
        f"JAX {jax.__version__} is installed.{lacks} {SUPPORTED}",
        install_jax(SEEN[0], SEEN[-1]),
        found=jax.__version__,
        expected=(SEEN[0], SEEN[-1]),
    )


def _release(version: str) -> Tuple[int, ...]:
    """Return the numbers of a version, without the suffix of a development version."""
    numbers = re.match(r"[\d.]*\d", version)
    return tuple(map(int, numbers.group().split("."))) if numbers else ()


def _import_alpa() -> None:
    """Import Alpa, and take back the XLA flags that it sets: newer XLA aborts on unknown flags."""
    flags = os.environ.get("XLA_FLAGS")
    # With a GPU, Alpa imports this module, and with it CuPy, for transfers by NCCL. hwaware's workers use none.
    sys.modules.setdefault("alpa.collective.worker_nccl_util", types.ModuleType("worker_nccl_util"))
    import alpa  # noqa: F401

    if flags is None:
        os.environ.pop("XLA_FLAGS", None)
    else:
        os.environ["XLA_FLAGS"] = flags


def _adapt_alpa() -> None:
    """Register JAX's one array type with Alpa, which knows older types, and Alpa's arrays and marker with JAX."""
    from alpa import device_mesh
    from alpa.pipeline_parallel import primitive_def

    from hwaware.compat.lowering import register_lowering
    from hwaware.compat.programs import ArrayImpl, primitive_batchers, take_values_of

    def shard(array: Any, *args: Any, **kwargs: Any) -> Any:
        # Alpa's own handler of device arrays compiles a slice for every shape; a view of the host's copy needs none.
        return device_mesh._shard_array(numpy.asarray(array), *args, **kwargs)

    device_mesh.shard_arg_handlers.setdefault(ArrayImpl, shard)
    device_mesh.shard_arg_handlers.setdefault(numpy.ndarray, device_mesh._shard_array)
    take_values_of(device_mesh.DistributedArray, device_mesh.ReplicatedDistributedArray)
    register_lowering(primitive_def.pipeline_p, lambda _, *args, **__: list(args))
    primitive_batchers[primitive_def.pipeline_p] = _refuse_samples


def _refuse_samples(*_: Any, **__: Any) -> None:
    raise AlpaError(
        "alpa.grad or a mark of Alpa's is inside jax.vmap, and Alpa computes no gradient for each sample.",
        "take one gradient of the loss of all samples; jax.vmap may stand inside the loss.",
    )
