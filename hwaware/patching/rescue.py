"""Let a program that survives failures take part in Alpa's calls. For every other program, nothing happens here."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple, TypeVar

from hwaware.errors import WorkerFailedError

T = TypeVar("T")
# Attribute of Alpa's mesh groups and meshes: their run, if it survives.
_RUN = "hwaware_run"
# The rescuer in charge, if any; and those that recover, before which it steps back.
_default: List[Any] = [None]
_recovering: List[Any] = []
# The runs that survive, for as long as they last.
seen: Any = weakref.WeakSet()


def current() -> Optional[Any]:
    """Return the rescuer that makes newly compiled programs survive; None while none is in charge."""
    return [*_default, *_recovering][-1]


def set_default(rescuer: Optional[Any]) -> None:
    """Let this rescuer decide from here on; with None, no rescuer decides."""
    _default[0] = rescuer


@contextlib.contextmanager
def in_charge(rescuer: Any) -> Iterator[None]:
    """Let a rescuer decide in the block in which it recovers, in spite of later `set_default` calls."""
    _recovering.append(rescuer)
    try:
        yield
    finally:
        _recovering.pop()


def attach(mesh: Any, run: Any) -> None:
    """Remember the run of a mesh, or of a group of meshes."""
    setattr(mesh, _RUN, run)
    seen.add(run)


def run_of(mesh: Any) -> Optional[Any]:
    """Return the run of a mesh, or of a group of meshes, if it survives."""
    return vars(mesh).get(_RUN)


def compiled(executable: Any) -> None:
    """Tell the run of a compiled function about the function: a loss may come before its first call."""
    run = run_of(executable.mesh_group)
    if run is not None:
        run.calls.executables.add(executable)


def now(mesh: Any) -> Any:
    """Return a mesh, or the group of its run if a recovery has replaced the mesh."""
    run = run_of(mesh)
    return mesh if run is None else run.now(mesh)


def saved(folder: str, step: int, target: Any) -> None:
    """Tell all runs that survive about a checkpoint. A run remembers it if it holds the run's state."""
    from flax.serialization import to_state_dict

    from hwaware.runtime.manifests import flattened

    leaves = flattened(to_state_dict(target)) if seen else {}
    for run in seen:
        run.saved(folder, step, leaves)


def brought(arrays: Sequence[Tuple[Any, Any]]) -> None:
    """Tell the runs of some mesh groups which arrays a program has restored onto them."""
    runs: Any = {run_of(group) for group, _ in arrays} - {None}
    for run in runs:
        run.brought([array for group, array in arrays if run_of(group) is run])


def retried(work: Callable[[], T]) -> T:
    """Do work that waits for workers. If a worker is lost, let its run recover, and do the work again.

    Raises:
        WorkerFailedError: A worker failed, and its program does not survive this.
    """
    while True:
        try:
            return work()
        except WorkerFailedError as error:
            run = getattr(error, "run", None)
            if run is None or run.is_calling:
                raise
            run.recover(error)
