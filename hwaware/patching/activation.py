"""Switching the override on and off: `enable`, `enabled`, `disable`."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Iterator, List, Optional, Tuple, Union

from hwaware.cluster import ClusterProfile
from hwaware.patching import leaves, stage_option, stock_jax
from hwaware.patching.mechanism import Patch, PatchSet
from hwaware.patching.stage_option import PlacementSettings

ProfileOrPath = Union[ClusterProfile, str, "os.PathLike[str]"]
_OVERRIDE = PatchSet([stage_option.PATCH])
# Not empty once an explicit stage option has put the override in place.
_explicit: List[bool] = []
# What each `enable` found, so that `disable` can put it back: (the default before, whether leaves were replaced).
_stack: List[Tuple[Optional[PlacementSettings], bool]] = []


def enable(profile: ProfileOrPath, **settings: Any) -> None:
    """Make Alpa's automatic stage construction hardware-aware from here on.

    Call it before `import alpa` on stock JAX, where it also puts hwaware's runtime under Alpa. Calls nest.

    Args:
        profile: A profile or the path of its file.
        **settings: Further fields of PlacementSettings, e.g. `solver`, `exclude`.

    Raises:
        AlpaError: Alpa is missing, or is not one that hwaware overrides; nothing was changed.
        RecordError: The profile cannot be read.
    """
    measured = profile if isinstance(profile, ClusterProfile) else ClusterProfile.load(profile)
    chosen = PlacementSettings(measured, **settings)
    on_stock_jax = install_runtime()
    try:
        _OVERRIDE.apply()
    except BaseException:
        _remove_runtime(on_stock_jax)
        raise
    _stack.append((stage_option.set_default(chosen), on_stock_jax))


def disable() -> None:
    """Undo the newest `enable`; silent if there is none."""
    if not _stack:
        return
    _OVERRIDE.revert()
    previous, on_stock_jax = _stack.pop()
    stage_option.set_default(previous)
    _remove_runtime(on_stock_jax)


@contextlib.contextmanager
def enabled(profile: ProfileOrPath, **settings: Any) -> Iterator[None]:
    """`enable` inside the block, `disable` at its end, also after an exception."""
    enable(profile, **settings)
    try:
        yield
    finally:
        disable()


def install_runtime() -> bool:
    """On stock JAX, put hwaware's runtime under Alpa; returns whether this JAX is a stock one.

    Raises:
        AlpaError: Alpa is missing or of another version, or this JAX is one on which it was never seen to run.
    """
    stock_jax.install()
    if not stock_jax.is_needed():
        return False
    leaves.PATCHES.apply()
    return True


def install_once() -> None:
    """Put the override in place for explicit stage options, once, without changing what "auto" means."""
    if not _explicit:
        install_runtime()
        _OVERRIDE.apply()
        _explicit.append(True)


def _remove_runtime(on_stock_jax: bool) -> None:
    if on_stock_jax:
        leaves.PATCHES.revert()


def patches() -> Tuple[Patch, ...]:
    """Every patch of Alpa that hwaware has, for `doctor` and the tests."""
    return leaves.PATCHES.patches + _OVERRIDE.patches
