"""Record a training step on all workers, as events on the driver's clock in the simulator's format."""

from __future__ import annotations

import time
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from msgspec.structs import replace

from hwaware.plans import schedule_of
from hwaware.ray_cluster import fetched
from hwaware.runtime.recorder import Recording
from hwaware.runtime.settings import Sends
from hwaware.runtime.worker import CONTROL
from hwaware.timeline import Event, EventKind, Timeline

_CLOCK_SAMPLES = 9
_CALL_LIMIT_S = 120.0


class Measured(NamedTuple):
    """Hold the recording of one worker.

    Attributes:
        stage: The stage that it runs.
        recording: Its recording, on its own clock.
        offset_s: Offset from its clock to the driver's.
    """

    stage: int
    recording: Recording
    offset_s: float


def clock_offset_s(worker: Any) -> float:
    """Return the driver's clock minus a worker's, from the quickest of several questions.

    The error is at most half the time of that question and its answer.
    """
    best = (float("inf"), 0.0)
    for _ in range(_CLOCK_SAMPLES):
        before_s = time.monotonic()
        call = worker.clock_s.options(concurrency_group=CONTROL).remote()
        (there_s,) = fetched([call], _CALL_LIMIT_S, "Reading a worker's clock")
        after_s = time.monotonic()
        best = min(best, (after_s - before_s, (before_s + after_s) / 2 - there_s))
    return best[1]


def program_kinds(program_of_stage: Sequence[Any], num_stages: int) -> Dict[Any, EventKind]:
    """Return the kind of each program. Alpa numbers forward stages first, then backward stages, then updates.

    Example:
        >>> program_kinds(["f0", "f1", "b1", "b0", "u0", "u1"], 2)["b1"]
        'backward'
    """
    names: Tuple[EventKind, ...] = ("forward", "backward", "update")
    return {program: names[min(index // num_stages, 2)] for index, program in enumerate(program_of_stage)}


def program_events(measured: Sequence[Measured], kinds: Dict[Any, EventKind]) -> Iterator[Event]:
    """Yield every program that a stage ran, on the driver's clock; the n-th run of a program is microbatch n."""
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
    """Yield every message, from the start of its send until its last byte arrived."""
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
    """Return the keys of each task and channel, in the order of sends."""
    channels: Dict[Tuple[int, str], List[str]] = {}
    for key, (task, _) in recording.sends.items():
        channels.setdefault((task, key.rpartition("#")[0]), []).append(key)
    for keys in channels.values():
        keys.sort(key=lambda key: int(key.rpartition("#")[2]))
    return channels


class StepRecorder:
    """Record every program and message of a training step, as a Timeline.

    Args:
        executable: Alpa's PipeshardDriverExecutable (`function.get_executable(...)`), on hwaware's workers.
        devices: Names of each stage's devices in the timeline; by default HOST:INDEX.
        sends: The workers' order of sends, "overlapped" or "blocking", for the timeline.

    Example:
        Record one step and keep it for Perfetto or `hwaware show`::

            executable = train_step.get_executable(state, batch)
            recorder = hwaware.StepRecorder(executable)
            recorder.start()
            state, loss = train_step(state, batch)
            executable.sync()
            recorder.stop().save_trace("step.json")
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
        """Start to record.

        Raises:
            MeasurementError: A worker did not answer.
        """
        fetched([worker.start_recording.remote() for _, worker in self._workers], _CALL_LIMIT_S, "Starting to record")

    def stop(self) -> Timeline:
        """Stop after the step has ended, and return its timeline.

        Raises:
            MeasurementError: `start` was not called, or a worker did not answer.
        """
        calls = [worker.stop_recording.remote() for _, worker in self._workers]
        recordings = fetched(calls, _CALL_LIMIT_S, "Fetching the record of a step")
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
            replace(event, start_s=event.start_s - begin_s, end_s=event.end_s - begin_s)
            for event in sorted(events, key=lambda event: event.end_s)
        ]
        return Timeline(
            step_s=max((event.end_s for event in shifted), default=0.0),
            schedule=schedule_of(executable.schedule.name),
            num_microbatches=executable.num_batch,
            devices=self._devices,
            events=tuple(shifted),
            sends=self._sends,
            recorded=True,
        )


def _names(mesh: Any) -> Tuple[str, ...]:
    hosts = (info["NodeManagerAddress"] for info in mesh.host_info)
    return tuple(f"{host}:{index}" for host, indices in zip(hosts, mesh.devices) for index in indices)
