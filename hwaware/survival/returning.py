"""Decide to which point a program returns: the newest in the vaults, or else a checkpoint on disk."""

from __future__ import annotations

import logging
from typing import Any, Collection, Dict, List, NamedTuple, Optional, Tuple

from hwaware.errors import HwawareError, RecordError
from hwaware.formatting import counted
from hwaware.history import HistoryEvent
from hwaware.patching import checkpoints
from hwaware.survival import messages
from hwaware.survival.calls import Calls, name_of
from hwaware.survival.copying import Copies
from hwaware.survival.pieces import Name, Piece
from hwaware.survival.points import Point, missing

LOG = logging.getLogger("hwaware")


class Disk(NamedTuple):
    """A checkpoint that the program has saved, and its path for each output of one call."""

    folder: str
    step: int
    function: Any
    call: int
    paths: Dict[int, Tuple[str, ...]]


def saved(calls: Calls, folder: str, step: int, leaves: Dict[Tuple[str, ...], Any]) -> Optional[Disk]:
    """Return a checkpoint of the program's state; None if the arrays are not the program's."""
    names = {path: name_of(leaf) for path, leaf in leaves.items() if calls.is_own(leaf)}
    made = {path: name for path, name in names.items() if name is not None and name[0] > 0}
    if not made:
        return None
    call = max(number for number, _ in made.values())
    paths = {place: path for path, (number, place) in made.items() if number == call}
    return Disk(folder, step, calls.functions[call], call, paths)


def newest(calls: Calls, copies: Copies, listings: Dict[str, List[Piece]], disk: Optional[Disk]) -> Point:
    """Return the newest point to which a program can return; it is committed.

    Raises:
        HwawareError: Arrays are lost with every host that held a copy, and no checkpoint that can be read has them.
    """
    held = [piece for pieces in listings.values() for piece in pieces]
    for later in copies.given_up():  # they may have arrived since the last look
        if not missing(later, held, copies.values, calls.needed(later)):
            copies.committed = later
            break
    point = copies.committed or Point(0, {})
    calls.forget(point.number)
    needed = calls.needed(point)
    lost = missing(point, held, copies.values, needed)
    paths = {} if disk is None else _places_on(disk, calls, needed)
    if disk is not None and lost and set(lost) <= set(paths):
        try:
            return _from_disk(calls, copies, disk, paths, point)
        except RecordError as error:
            what = f"{messages.arrays_lost(lost)} No checkpoint can take their place: {error.what}"
            raise HwawareError(what, messages.START_AGAIN) from error
    if lost:
        raise HwawareError(messages.arrays_lost(lost), messages.START_AGAIN)
    return point


def _places_on(disk: Disk, calls: Calls, needed: Collection[Name]) -> Dict[Name, Tuple[str, ...]]:
    """Return a checkpoint's paths for results of the newest call of its function; older results have none there."""
    made = [name for name in needed if name[0] > 0 and calls.functions.get(name[0]) is disk.function]
    newest_call = max((number for number, _ in made), default=0)
    return {name: disk.paths[name[1]] for name in made if name[0] == newest_call and name[1] in disk.paths}


def _from_disk(calls: Calls, copies: Copies, disk: Disk, paths: Dict[Name, Tuple[str, ...]], point: Point) -> Point:
    """Return the point with the state of a checkpoint, and say so: what was trained since then is lost."""
    found = checkpoints.values(disk.folder, disk.step, set(paths.values()))
    what = f"every host that held a copy of the state is lost: it is step {disk.step} of {disk.folder} again"
    LOG.warning("%s; the work of %s is lost.", what, counted(max(0, point.number - disk.call), "call"))
    copies.events.append(HistoryEvent(kind="disk", call=calls.number, what=what))
    copies.values = {**copies.values, **{name: found[path] for name, path in paths.items()}}
    shapes = {**point.shapes, **{name: tuple(copies.values[name].shape) for name in paths}}
    copies.committed = Point(point.number, shapes)
    return copies.committed
