"""Record a training step on all workers, in the format of the simulator."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

from hwaware.ray_cluster import fetched
from hwaware.runtime.settings import Sends
from hwaware.runtime.timelines import (
    CALL_LIMIT_S,
    Measured,
    clock_offset_s,
    message_events,
    program_events,
    program_kinds,
)
from hwaware.timeline import Event, Timeline


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
        fetched([worker.start_recording.remote() for _, worker in self._workers], CALL_LIMIT_S, "Starting to record")

    def stop(self) -> Timeline:
        """Stop after the step has ended, and return its timeline.

        Raises:
            MeasurementError: `start` was not called, or a worker did not answer.
        """
        calls = [worker.stop_recording.remote() for _, worker in self._workers]
        recordings = fetched(calls, CALL_LIMIT_S, "Fetching the record of a step")
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


def _schedule_name(name: str) -> Any:
    return "1f1b" if name.startswith("1f1b") else name
