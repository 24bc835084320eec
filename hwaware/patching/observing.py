"""Let a training that adapts take part in Alpa's calls. For every other program, nothing happens here."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Callable, Dict, Iterator, List, Optional

# The observer in charge, if any.
_default: List[Any] = [None]
# Attributes. Alpa's executables keep their adapter, its handlers of outputs the way to make one, groups the first one.
_ADAPTER, _MAKE = "hwaware_adapter", "hwaware_make_adapter"


def set_default(observer: Optional[Any]) -> None:
    """Let this observer decide from here on; with None, no observer decides."""
    _default[0] = observer


def compiled(arguments: Dict[str, Any], compile_now: Callable[[Dict[str, Any]], Any]) -> Any:
    """Compile a program. The observer in charge may remember what it needs to adapt the program."""
    (observer,) = _default
    begin_s, is_launched = time.monotonic(), arguments["virtual_mesh"].launched_physical_mesh_group is not None
    config = compile_now(arguments)
    make = None if observer is None else observer.compiled(arguments, time.monotonic() - begin_s, is_launched)
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
        # An adapter watches only the first training step on a group of workers.
        is_watched = make is not None and _ADAPTER not in vars(executable.mesh_group)
        known[_ADAPTER] = make(executable.mesh_group) if is_watched else None
    return known[_ADAPTER]


def watched(group: Any, adapter: Any) -> None:
    """Remember that an adapter watches a group of workers."""
    setattr(group, _ADAPTER, adapter)
