"""Where a program that survives takes part in Alpa's calls; for every other program nothing happens here."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple, TypeVar

from hwaware.errors import WorkerFailedError

T = TypeVar("T")
# Kept on Alpa's mesh groups and meshes: the run that survives.
_RUN = "hwaware_run"
# The one that is in charge where no `enable` is in force, and those of the `enable`s.
_default: List[Any] = [None]
_rescuers: List[Any] = []
_recovering: List[Any] = []
# The runs that survive, for as long as they last.
seen: Any = weakref.WeakSet()


def current() -> Optional[Any]:
    """Return what makes programs survive that are compiled now; None while nothing does."""
    return [*_default, *_rescuers, *_recovering][-1]


def push(rescuer: Optional[Any]) -> None:
    """Let this rescuer decide from here on; None for none."""
    _rescuers.append(rescuer)


def remove(place: int) -> None:
    """Undo one `push`, by its place."""
    del _rescuers[place]


def by_default(rescuer: Any) -> None:
    """Let this rescuer decide while no other does."""
    _default[0] = rescuer


@contextlib.contextmanager
def in_charge(rescuer: Any) -> Iterator[None]:
    """Let a rescuer decide in the block, in which it recovers, whatever has been pushed since."""
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


def now(mesh: Any) -> Any:
    """Return a mesh, or the group of its run where a recovery has replaced it."""
    run = run_of(mesh)
    return mesh if run is None else run.now(mesh)


def saved(folder: str, step: int, target: Any) -> None:
    """Tell the runs whose arrays a program has saved; they may need them."""
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
    """Do work that waits for workers; where one is lost, let its run recover, and do it again.

    Raises:
        WorkerFailedError: The program does not survive.
    """
    while True:
        try:
            return work()
        except WorkerFailedError as error:
            run = getattr(error, "run", None)
            if run is None or run.is_calling:
                raise
            run.recover(error)
