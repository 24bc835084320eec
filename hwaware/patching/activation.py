"""Switching the override on and off: `enable`, `enabled`, `disable`."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple, Union

from hwaware import autoload
from hwaware.cluster import ClusterProfile
from hwaware.patching import leaves, stage_option, stock_jax
from hwaware.patching.mechanism import Patch, PatchSet
from hwaware.patching.stage_option import PlacementSettings

ProfileOrPath = Union[ClusterProfile, str, "os.PathLike[str]"]
_OVERRIDE = PatchSet(stage_option.PATCHES)
# Not empty once an explicit stage option has put the override in place.
_explicit: List[bool] = []
_lock = threading.RLock()


class _Enabled(NamedTuple):
    """One `enable` that is not undone yet."""

    settings: PlacementSettings
    on_stock_jax: bool


# The newest last: it decides.
_stack: List[_Enabled] = []


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
    _enable(profile, settings)


def _enable(profile: ProfileOrPath, fields: Dict[str, Any]) -> _Enabled:
    autoload.cancel()
    measured = profile if isinstance(profile, ClusterProfile) else ClusterProfile.load(profile)
    chosen = PlacementSettings(measured, **fields)
    with _lock:
        entry = _Enabled(chosen, _install())
        _stack.append(entry)
        stage_option.set_default(chosen)
        return entry


def disable() -> None:
    """Undo the newest `enable`; silent if there is none.

    Raises:
        AlpaError: Somebody replaced one of hwaware's replacements; nothing is changed.
    """
    with _lock:
        if _stack:
            _disable(_stack[-1])


def _disable(entry: _Enabled) -> None:
    with _lock:
        places = [place for place, each in enumerate(_stack) if each is entry]
        if not places:  # a `disable` inside the block was first
            return
        _OVERRIDE.refuse_foreign()
        leaves.PATCHES.refuse_foreign()
        _OVERRIDE.revert()
        _remove_runtime(entry.on_stock_jax)
        del _stack[places[0]]
        stage_option.set_default(_stack[-1].settings if _stack else None)


@contextlib.contextmanager
def enabled(profile: ProfileOrPath, **settings: Any) -> Iterator[None]:
    """`enable` inside the block; its end, also by an exception, undoes this one and no other.

    The newest `enable` of the process decides, in every thread.
    """
    entry = _enable(profile, settings)
    try:
        yield
    finally:
        _disable(entry)


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
    with _lock:
        if not _explicit:
            _install()
            _explicit.append(True)


def _install() -> bool:
    """Put the runtime, where it is needed, and the override in place, both or none; returns whether it is needed."""
    on_stock_jax = install_runtime()
    try:
        _OVERRIDE.apply()
    except BaseException:
        _remove_runtime(on_stock_jax)
        raise
    return on_stock_jax


def _remove_runtime(on_stock_jax: bool) -> None:
    if on_stock_jax:
        leaves.PATCHES.revert()


def patches() -> Tuple[Patch, ...]:
    """Every patch of Alpa that hwaware has, for `doctor` and the tests."""
    return leaves.PATCHES.patches + _OVERRIDE.patches
