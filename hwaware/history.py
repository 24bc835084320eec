"""Define `History`: what happened to a program that survives or adapts."""

from __future__ import annotations

from typing import ClassVar, Dict, Literal, Optional, Tuple

import msgspec

from hwaware.records import (
    MOST_BYTES,
    MOST_PREDICTED,
    MOST_SECONDS,
    FileRecord,
    Record,
    require,
    require_amount,
    require_count,
)

EventKind = Literal["recovered", "moved", "vault", "disk", "noticed", "decided", "undone", "joined"]


class HistoryEvent(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened to a program.

    Attributes:
        kind: After "recovered", the program goes on on what is left. "vault" is the loss of a vault alone.
            "moved" is a change of the plan, in which nothing is lost. "disk" is a return to a checkpoint. "noticed" is
            a device or a link whose times have changed. "decided" is a decision about another placement. "undone" ends
            a move that brought nothing. "joined" is a host that the program may use from now on.
        call: Number of the newest call at that time; 0 is before the first.
        what: The event in words.
        mapping: The placement from here on, or the other one of a decision; None if it stays.
        took_s: Seconds from the notice until the program has caught up.
        phases: Seconds of each phase, in their order.
        made_again: Number of calls that were made again.
        moved_bytes: Bytes of state that vaults gave to workers.
        tries: Number of attempts; more than one if more was lost meanwhile.
        numbers: Numbers behind a decision, by name: seconds for names that end in "_s", else factors.
    """

    kind: EventKind
    call: int
    what: str
    mapping: Optional[str] = None
    took_s: float = 0.0
    phases: Dict[str, float] = msgspec.field(default_factory=dict)
    made_again: int = 0
    moved_bytes: int = 0
    tries: int = 1
    numbers: Dict[str, float] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        require_count("call", self.call, least=0)
        require_count("made_again", self.made_again, least=0)
        require_count("tries", self.tries)
        require_amount("moved_bytes", self.moved_bytes, MOST_BYTES)
        require_amount("took_s", self.took_s, MOST_SECONDS)
        for name, seconds in self.phases.items():
            require_amount(f"phases.{name}", seconds, MOST_SECONDS)
        for name, number in self.numbers.items():
            require_amount(f"numbers.{name}", number, MOST_PREDICTED)


class History(FileRecord, frozen=True, kw_only=True, omit_defaults=True):
    """The calls, copies and losses of a program so far.

    Attributes:
        calls: Number of calls of its compiled functions.
        points: Number of points to which it could return, each as long as it was the newest.
        copied_bytes: Bytes that workers have copied for these points.
        copy_s: Seconds that steps waited for copies, those of the slowest worker at each point.
        every: Number of calls from one point to the next, at present.
        events: The events, in order.

    Example:
        >>> from hwaware import History
        >>> from hwaware.history import HistoryEvent
        >>> event = HistoryEvent(kind="recovered", call=7, what="host b is lost", took_s=4.0, made_again=1)
        >>> History(calls=20, points=19, events=(event,)).lost_s
        4.0
    """

    SCHEMA: ClassVar[str] = "hwaware.history"

    calls: int
    points: int = 0
    copied_bytes: int = 0
    copy_s: float = 0.0
    every: int = 1
    events: Tuple[HistoryEvent, ...] = ()

    def __post_init__(self) -> None:
        for name in ("calls", "points"):
            require_count(name, getattr(self, name), least=0)
        require_count("every", self.every)
        require_amount("copied_bytes", self.copied_bytes, MOST_BYTES)
        require_amount("copy_s", self.copy_s, MOST_SECONDS)
        calls = [event.call for event in self.events]
        require(calls == sorted(calls), "the events are not in the order of their calls")

    @property
    def lost_s(self) -> float:
        """Return the seconds that all recoveries took together, without planned moves."""
        return sum(event.took_s for event in self.events if event.kind != "moved")
