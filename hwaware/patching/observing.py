"""Where a training that adapts takes part in Alpa's calls; for every other program nothing happens here."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Callable, Dict, Iterator, List, Optional

# The one that is in charge where no `enable` is in force, and those of the `enable`s.
_default: List[Any] = [None]
_observers: List[Any] = []
# Kept on Alpa's executables: their adapter; on its handlers of outputs: how to make one; on groups: the first adapter.
_ADAPTER, _MAKE = "hwaware_adapter", "hwaware_make_adapter"


def push(observer: Optional[Any]) -> None:
    """Let this observer decide from here on; None for none."""
    _observers.append(observer)


def remove(place: int) -> None:
    """Undo one `push`, by its place."""
    del _observers[place]


def by_default(observer: Any) -> None:
    """Let this observer decide while no other does."""
    _default[0] = observer


def compiled(arguments: Dict[str, Any], compile_now: Callable[[Dict[str, Any]], Any]) -> Any:
    """Compile a program; an observer may remember what it needs to adapt it."""
    observer = [*_default, *_observers][-1]
    begin_s = time.monotonic()
    config = compile_now(arguments)
    make = None if observer is None else observer.compiled(arguments, time.monotonic() - begin_s)
    if make is not None:
        setattr(config.outs_handler, _MAKE, make)
    return config


@contextlib.contextmanager
def a_call_of(executable: Any) -> Iterator[None]:
    """Let the adapter of a compiled function act before and after a call."""
    adapter = _adapter_of(executable)
    if adapter is not None:
        adapter.before_call(executable)
    yield
    if adapter is not None:
        adapter.after_call()


def _adapter_of(executable: Any) -> Optional[Any]:
    """Return the adapter of a compiled function; None for one that does not adapt."""
    known = vars(executable)
    if _ADAPTER not in known:
        make = vars(executable.outs_handler).get(_MAKE)
        # The first training step on a group of workers is the one that is watched.
        is_watched = make is not None and _ADAPTER not in vars(executable.mesh_group)
        known[_ADAPTER] = make(executable.mesh_group) if is_watched else None
    return known[_ADAPTER]


def watched(group: Any, adapter: Any) -> None:
    """Remember that an adapter watches a group of workers."""
    setattr(group, _ADAPTER, adapter)
