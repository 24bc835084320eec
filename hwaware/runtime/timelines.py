"""One step as it really ran: what the workers recorded, on one clock, in the simulator's own format."""

from __future__ import annotations

import time
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from hwaware.runtime.recorder import Recording
from hwaware.runtime.settings import Sends
from hwaware.runtime.worker import CONTROL
from hwaware.timeline import Event, EventKind, Timeline

_CLOCK_SAMPLES = 9
_CALL_LIMIT_S = 120.0


class Measured(NamedTuple):
    """What one worker recorded.

    Attributes:
        stage: Which stage it runs.
        recording: In its own clock.
        offset_s: To be added to its clock for the driver's.
    """

    stage: int
    recording: Recording
    offset_s: float


class StepRecorder:
    """Records every instruction of the steps between `start` and `stop`.

    Args:
        executable: Alpa's PipeshardDriverExecutable (`function.get_executable(...)`), on hwaware's workers.
        devices: The devices of each stage, as the timeline shall name them; by default HOST:INDEX.
        sends: How its workers send.
    """

    def __init__(
        self, executable: Any, devices: Optional[Sequence[Sequence[str]]] = None, sends: Sends = "overlapped"
    ) -> None:
        self._executable = executable
        self._devices = tuple(tuple(names) for names in devices or map(_names, executable.mesh_group))
        self._sends = sends
        self._workers: List[Tuple[int, Any]] = [
            (stage, worker) for stage, mesh in enumerate(executable.mesh_group) for worker in mesh.workers
        ]

    def start(self) -> None:
        """Record from now on."""
        import ray

        ray.get([worker.start_recording.remote() for _, worker in self._workers], timeout=_CALL_LIMIT_S)

    def stop(self) -> Timeline:
        """Stop recording once the step has ended; returns what ran when.

        Raises:
            MeasurementError: Nothing was being recorded.
        """
        import ray

        recordings = ray.get([worker.stop_recording.remote() for _, worker in self._workers], timeout=_CALL_LIMIT_S)
        measured = [
            Measured(stage, recording, clock_offset_s(worker))
            for (stage, worker), recording in zip(self._workers, recordings)
        ]
        return self._timeline(measured)

    def _timeline(self, measured: Sequence[Measured]) -> Timeline:
        executable = self._executable
        kinds = program_kinds(executable.executable_uuids, len(self._devices))
        events = [*program_events(measured, kinds), *message_events(measured, executable.num_batch)]
        begin_s = min((event.start_s for event in events), default=0.0)
        shifted = [
            Event(
                kind=event.kind,
                stage=event.stage,
                start_s=event.start_s - begin_s,
                end_s=event.end_s - begin_s,
                microbatch=event.microbatch,
            )
            for event in sorted(events, key=lambda event: event.end_s)
        ]
        return Timeline(
            step_s=max((event.end_s for event in shifted), default=0.0),
            schedule=_schedule_name(executable.schedule.name),
            num_microbatches=executable.num_batch,
            devices=self._devices,
            events=tuple(shifted),
            sends=self._sends,
        )


def _names(mesh: Any) -> Tuple[str, ...]:
    hosts = (info["NodeManagerAddress"] for info in mesh.host_info)
    return tuple(f"{host}:{index}" for host, indices in zip(hosts, mesh.devices) for index in indices)


def clock_offset_s(worker: Any) -> float:
    """The driver's clock minus a worker's, from the quickest of several questions; wrong by half its way at most."""
    import ray

    best = (float("inf"), 0.0)
    for _ in range(_CLOCK_SAMPLES):
        before_s = time.monotonic()
        there_s = ray.get(worker.clock_s.options(concurrency_group=CONTROL).remote(), timeout=_CALL_LIMIT_S)
        after_s = time.monotonic()
        best = min(best, (after_s - before_s, (before_s + after_s) / 2 - there_s))
    return best[1]


def program_kinds(program_of_stage: Sequence[Any], num_stages: int) -> Dict[Any, EventKind]:
    """What each program is. Alpa numbers forward stages first, then backward stages, then the updates.

    Example:
        >>> program_kinds(["f0", "f1", "b1", "b0", "u0", "u1"], 2)["b1"]
        'backward'
    """
    names: Tuple[EventKind, ...] = ("forward", "backward", "update")
    return {program: names[min(index // num_stages, 2)] for index, program in enumerate(program_of_stage)}


def program_events(measured: Sequence[Measured], kinds: Dict[Any, EventKind]) -> Iterator[Event]:
    """Every program that a stage ran, on the driver's clock; the n-th run of a program is microbatch n."""
    for stage, recording, offset_s in measured:
        runs: Dict[Any, int] = {}
        for program, start_s, end_s in recording.programs:
            if program not in kinds:
                continue  # allocations
            microbatch = runs.get(program, 0)
            runs[program] = microbatch + 1
            yield Event(
                kind=kinds[program],
                stage=stage,
                start_s=start_s + offset_s,
                end_s=end_s + offset_s,
                microbatch=-1 if kinds[program] == "update" else microbatch,
            )


def message_events(measured: Sequence[Measured], num_microbatches: int) -> Iterator[Event]:
    """Every message, from when it began to leave until all of it had arrived."""
    arrivals = {
        key: (stage, end_s + offset_s)
        for stage, recording, offset_s in measured
        for key, (_, end_s) in recording.receives.items()
    }
    for stage, recording, offset_s in measured:
        for keys in _by_channel(recording).values():
            for microbatch, key in enumerate(keys):
                if key not in arrivals:
                    continue  # it arrived after the recording had ended
                target, end_s = arrivals[key]
                start_s = recording.sends[key][1] + offset_s
                yield Event(
                    kind="activation" if stage < target else "gradient",
                    stage=stage,
                    start_s=start_s,
                    end_s=max(start_s, end_s),
                    microbatch=microbatch if len(keys) == num_microbatches else -1,
                )


def _by_channel(recording: Recording) -> Dict[Tuple[int, str], List[str]]:
    """The keys of each task and channel, in the order in which they were sent."""
    channels: Dict[Tuple[int, str], List[str]] = {}
    for key, (task, _) in recording.sends.items():
        channels.setdefault((task, key.rpartition("#")[0]), []).append(key)
    for keys in channels.values():
        keys.sort(key=lambda key: int(key.rpartition("#")[2]))
    return channels


def _schedule_name(name: str) -> Any:
    return "1f1b" if name.startswith("1f1b") else name
