"""Define `Timeline`: one simulated or recorded step, event by event, also as a Chrome or Perfetto trace."""

from __future__ import annotations

from typing import Any, ClassVar, Dict, List, Literal, Tuple

import msgspec

from hwaware.errors import RecordError
from hwaware.plans import Schedule
from hwaware.records import (
    MOST_PREDICTED,
    MOST_SECONDS,
    FileRecord,
    PathLike,
    Record,
    converted,
    require,
    require_amount,
    require_count,
    write_bytes,
)

EventKind = Literal["forward", "backward", "activation", "gradient", "synchronisation", "update"]
Sends = Literal["overlapped", "blocking"]

# Threads of a stage in the trace: its own work, and its messages in each direction.
_THREADS = {"forward": 0, "backward": 0, "synchronisation": 0, "update": 0, "activation": 1, "gradient": 2}
_THREAD_NAMES = ("compute", "activations out", "gradients out")


class Event(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A pass, a message or an update of one stage.

    Attributes:
        kind: Passes are "forward" and "backward". Messages are "activation", to the next stage, and "gradient", to the
            stage before. Once per step, a stage does "synchronisation" and "update".
        stage: Index of the stage that computes or sends.
        start_s, end_s: Seconds from the start of the step.
        microbatch: Index of the microbatch; -1 for events that come once per step.
    """

    kind: EventKind
    stage: int
    start_s: float
    end_s: float
    microbatch: int = -1

    def __post_init__(self) -> None:
        # A recorded event may begin before the step does, by the error of two hosts' clocks.
        require_amount("start_s", self.start_s, MOST_PREDICTED, least=-MOST_SECONDS)
        require_amount("end_s", self.end_s, MOST_PREDICTED, least=-MOST_SECONDS)
        require_count("microbatch", self.microbatch, least=-1)
        require(self.end_s >= self.start_s, f"end_s is {self.end_s}, expected at least start_s, {self.start_s}")


class Timeline(FileRecord, frozen=True, kw_only=True, omit_defaults=True):
    """One step of a plan, event by event.

    Attributes:
        step_s: End of the last event.
        schedule, num_microbatches: As in the plan.
        sends: "overlapped" (computation goes on while messages travel) or "blocking" (Alpa's own order).
        devices: The devices of each stage.
        events: The events, by their end.
        recorded: True for a step that ran, False for a simulated one.

    Example:
        >>> from hwaware import Timeline
        >>> from hwaware.timeline import Event
        >>> event = Event(kind="forward", stage=0, start_s=0.0, end_s=0.5, microbatch=0)
        >>> timeline = Timeline(step_s=0.5, schedule="inference", num_microbatches=1, devices=(("a:0",),),
        ...                     events=(event,))
        >>> timeline.busy_s(0), timeline.trace()["traceEvents"][-1]["dur"]
        (0.5, 500000.0)
    """

    SCHEMA: ClassVar[str] = "hwaware.timeline"

    step_s: float
    schedule: Schedule
    num_microbatches: int
    devices: Tuple[Tuple[str, ...], ...]
    events: Tuple[Event, ...]
    sends: Sends = "overlapped"
    recorded: bool = False

    def __post_init__(self) -> None:
        require_amount("step_s", self.step_s, MOST_PREDICTED)
        require_count("num_microbatches", self.num_microbatches)
        require(bool(self.devices), "the timeline has no stages")
        for index, event in enumerate(self.events):
            if not 0 <= event.stage < len(self.devices):
                what = f"event {index} is of stage {event.stage}"
                raise ValueError(f"{what}, expected 0 to {len(self.devices) - 1}: the timeline has no other")

    @property
    def title(self) -> str:
        """Return the name of its pictures and tables."""
        return "Recorded step" if self.recorded else "Simulated step"

    def busy_s(self, stage: int) -> float:
        """Return the seconds that a stage spends on forward and backward passes."""
        return self.spent_s(stage, "forward", "backward")

    def spent_s(self, stage: int, *kinds: EventKind) -> float:
        """Return the seconds in which at least one event of these kinds runs on a stage.

        A recorded step holds the passes of every replica, which overlap: a sum would count them twice.
        """
        events = [event for event in self.events if event.stage == stage and event.kind in kinds]
        total_s, until_s = 0.0, 0.0
        for event in sorted(events, key=lambda one: one.start_s):
            total_s += max(0.0, event.end_s - max(event.start_s, until_s))
            until_s = max(until_s, event.end_s)
        return total_s

    def trace(self) -> Dict[str, Any]:
        """Return the timeline in Chrome's trace event format: one process a stage, times in microseconds.

        Source: "Trace Event Format", Google; chrome://tracing and ui.perfetto.dev read it.
        """
        events: List[Dict[str, Any]] = []
        for stage, devices in enumerate(self.devices):
            name = f"stage {stage}: {', '.join(devices)}"
            args = {"name": name, "devices": devices}
            events.append({"ph": "M", "name": "process_name", "pid": stage, "tid": 0, "args": args})
            for thread, label in enumerate(_THREAD_NAMES):
                events.append({"ph": "M", "name": "thread_name", "pid": stage, "tid": thread, "args": {"name": label}})
        events.extend(
            {
                "ph": "X",
                "name": event.kind if event.microbatch < 0 else f"{event.kind} {event.microbatch}",
                "cat": event.kind,
                "pid": event.stage,
                "tid": _THREADS[event.kind],
                "ts": event.start_s * 1e6,
                "dur": (event.end_s - event.start_s) * 1e6,
            }
            for event in self.events
        )
        about = {
            "step_s": self.step_s,
            "schedule": self.schedule,
            "num_microbatches": self.num_microbatches,
            "sends": self.sends,
            "recorded": self.recorded,
        }
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}

    @classmethod
    def from_trace(cls, document: Dict[str, Any], name: str = "the document") -> Timeline:
        """Read a timeline back from a trace that `trace` made; messages call it `name`.

        Raises:
            RecordError: The document is no such trace.
        """
        try:
            trace = converted(document, _Trace)
            body = {**trace.otherData, "devices": _devices_of(trace), "events": _events_of(trace)}
            return converted(body, cls)
        except (ValueError, msgspec.ValidationError) as error:
            raise RecordError(
                f"{name} is not a trace that hwaware wrote: {error}.",
                "give the file that `hwaware simulate ... -o` wrote; other traces open in ui.perfetto.dev.",
            ) from error

    def save_trace(self, path: PathLike) -> None:
        """Write `trace()` to `path` as JSON."""
        write_bytes(path, msgspec.json.encode(self.trace()) + b"\n")


class _TraceEvent(Record, frozen=True, kw_only=True):
    """An event of a trace, as `Timeline.trace` writes it; times are in microseconds."""

    ph: str
    name: str
    pid: int
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: Dict[str, Any] = {}

    def __post_init__(self) -> None:
        require_amount("ts", self.ts, MOST_PREDICTED, least=-MOST_SECONDS * 1e6)
        require_amount("dur", self.dur, MOST_PREDICTED)


class _Trace(Record, frozen=True, kw_only=True):
    traceEvents: Tuple[_TraceEvent, ...]
    otherData: Dict[str, Any]


def _devices_of(trace: _Trace) -> List[Any]:
    """Return the devices of each stage. Older traces have them only in names such as "stage 0: a, b"."""
    named = [event for event in trace.traceEvents if event.name == "process_name"]
    named.sort(key=lambda event: event.pid)
    return [event.args.get("devices", str(event.args.get("name")).partition(": ")[2].split(", ")) for event in named]


def _events_of(trace: _Trace) -> List[Dict[str, Any]]:
    return [
        {
            "kind": event.cat,
            "stage": event.pid,
            "start_s": event.ts / 1e6,
            "end_s": (event.ts + event.dur) / 1e6,
            # "forward 3" is microbatch 3; events that come once per step have no number.
            "microbatch": int(event.name.rpartition(" ")[2][:20]) if " " in event.name else -1,
        }
        for event in trace.traceEvents
        if event.ph == "X"
    ]
