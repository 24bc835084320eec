"""Measure mappings on one running cluster, a few at a time, in one or more starts of their processes."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import msgspec

from hwaware.bench.harness import measure
from hwaware.bench.mappings import Candidate
from hwaware.bench.pace import Pace
from hwaware.bench.summary import LOSS_TOLERANCE
from hwaware.bench.task import Effort, Say, Task
from hwaware.bench.training import TrainingRun
from hwaware.errors import HwawareError, MeasurementError, OutOfDeviceMemoryError
from hwaware.result import Mapping, Unmeasured
from hwaware.timeline import Timeline

# A worker's memory is full only in its second step, which also holds what the first one leaves.
TRIAL_STEPS = 2
Measured = Tuple[List[Mapping], List[Unmeasured], List[float]]


def measure_groups(task: Task, chosen: Sequence[Candidate], started: Sequence[TrainingRun] = ()) -> Measured:
    """Measure all candidates, a few at a time; list those that cannot run with the reason.

    Args:
        task: The model, its cluster and the effort.
        chosen: Candidates with different names; every group measures the first one again.
        started: Runs of candidates that are ready already. They stay open, unless a second start closes them.

    Returns:
        The mappings, those that could not run, and the load averages during the measurement.

    Raises:
        MeasurementError: A mapping has other losses after its processes were started again.
    """
    ready = {run.name: run for run in started}
    pace = Pace(task.effort.deadline_s, task.effort.starts, len(_groups(chosen[1:], task.effort)))
    found: Dict[str, Mapping] = {}
    left_out: List[Unmeasured] = []
    loads: List[float] = []
    for start in range(1, task.effort.starts + 1):
        if start > 1 and not pace.has_time_to_start():
            task.say("no time is left to start all processes again.")
            break
        if start > 1:
            task.say(f"starting all processes again, {start} of {task.effort.starts} ...")
            for run in ready.values():
                run.close()
            ready = {}
        missing = {one.name for one in left_out}
        constant, others = ([one for one in part if one.name not in missing] for part in (chosen[:1], chosen[1:]))
        for mapping in _measured_in_groups(task, constant, others, ready, left_out, loads, pace):
            if task.effort.starts > 1:
                mapping = msgspec.structs.replace(mapping, starts=(start,) * len(mapping.step_s))
            found[mapping.name] = _joined(found.get(mapping.name), mapping, task.effort.checked_losses)
    missing = {one.name for one in left_out}  # includes mappings that ran in one start but not in another
    return [found[one.name] for one in chosen if one.name in found and one.name not in missing], left_out, loads


def _measured_in_groups(
    task: Task,
    constant: Sequence[Candidate],
    others: Sequence[Candidate],
    ready: Dict[str, TrainingRun],
    left_out: List[Unmeasured],
    loads: List[float],
    pace: Pace,
) -> Iterator[Mapping]:
    """Yield the measurement of each candidate in one start; the constant candidate's comes once a group."""
    with contextlib.ExitStack() as stack:
        first: List[TrainingRun] = []
        for number, group in enumerate(_groups(others, task.effort)):
            pace.begin()
            if number == 0:
                first = _ready_runs(task, constant, ready, stack, left_out)
            with contextlib.ExitStack() as inner:
                runs = first + _ready_runs(task, group, ready, inner, left_out)
                pace.ready()
                yield from _measured(task, runs, [*constant, *group], loads, pace)


def _groups(others: Sequence[Candidate], effort: Effort) -> List[Sequence[Candidate]]:
    """Divide candidates into groups that leave room for the constant one."""
    size = max(1, effort.together - 1)
    return [others[at : at + size] for at in range(0, len(others), size)] or [()]


def _ready_runs(
    task: Task,
    group: Sequence[Candidate],
    ready: Dict[str, TrainingRun],
    stack: contextlib.ExitStack,
    left_out: List[Unmeasured],
) -> List[TrainingRun]:
    """Start a group's runs and return those that can take a step; the stack closes them.

    A run compiles while the driver traces the next one.
    """
    started: List[Tuple[Candidate, TrainingRun]] = []
    for candidate in group:
        if candidate.name in ready:
            started.append((candidate, ready[candidate.name]))
            continue
        task.say(f"compiling {', '.join((candidate.name, *candidate.also))} ...")
        with _leaving_out(task, candidate, left_out):
            run = task.start(candidate)
            stack.callback(run.close)
            started.append((candidate, run))
    runs = []
    for candidate, run in started:
        with _leaving_out(task, candidate, left_out):
            run.wait_until_compiled()
            while len(run.losses) < TRIAL_STEPS:
                run.step()
            runs.append(run)
    return runs


@contextlib.contextmanager
def _leaving_out(task: Task, candidate: Candidate, left_out: List[Unmeasured]) -> Iterator[None]:
    """Record a candidate as left out if the block raises `HwawareError`; other errors pass."""
    try:
        yield
    except HwawareError as error:
        memory = is_out_of_memory(error)
        task.say(f"  {candidate.name} cannot run: " + ("out of memory." if memory else str(error)))
        left_out.append(
            Unmeasured(
                name=candidate.name,
                reason=str(error),
                out_of_memory=memory,
                plan=candidate.plan,
                also=candidate.also,
            )
        )


def is_out_of_memory(error: HwawareError) -> bool:
    """Return True if a program needed more memory than its device has; workers report that only in words."""
    return isinstance(error, OutOfDeviceMemoryError) or "Out of memory" in str(error)


def _measured(
    task: Task, runs: Sequence[TrainingRun], group: Sequence[Candidate], loads: List[float], pace: Pace
) -> Tuple[Mapping, ...]:
    if not runs:
        return ()
    repeats, by_name = task.effort.repeats, {one.name: one for one in group}
    most = "" if task.effort.deadline_s is None else "up to "
    task.say(f"measuring {most}{repeats} steps of each of {len(runs)} mappings, one each in turn ...")
    tell = _progress(task.say)

    def on_round(done: int, total: int) -> None:
        loads.append(os.getloadavg()[0])
        tell(done, total)

    predictions = {run.name: by_name[run.name].predicted_step_s for run in runs}
    mappings = measure(runs, repeats, 0, task.reference, predictions, on_round, pace.goes_on)
    recorded = [recorded_step(run) for run in runs]
    return tuple(
        msgspec.structs.replace(
            mapping, also=by_name[mapping.name].also, hosts=by_name[mapping.name].hosts, timeline=timeline
        )
        for mapping, timeline in zip(mappings, recorded)
    )


def recorded_step(run: TrainingRun) -> Timeline:
    """Take one more step and return its timeline."""
    timelines: List[Timeline] = []
    with run.recorded(timelines):
        run.step()
    return timelines[0]


def _joined(earlier: Optional[Mapping], later: Mapping, checked_losses: int) -> Mapping:
    """Join two measurements of a mapping, from several groups or starts.

    Raises:
        MeasurementError: Their losses differ.
    """
    if earlier is None:
        return later
    losses = [one.loss[:checked_losses] for one in (earlier, later)]
    if any(abs(a - b) > LOSS_TOLERANCE * abs(a) for a, b in zip(*losses)):
        raise MeasurementError(
            f"{later.name} trained differently after a new start of its processes: losses {losses[0]}, then "
            f"{losses[1]}.",
            "find what differs between runs: random numbers without a key, or a device that computes wrong results.",
        )
    return msgspec.structs.replace(
        later,
        step_s=earlier.step_s + later.step_s,
        reference_s=earlier.reference_s + later.reference_s,
        slowdowns={kind: values + later.slowdowns[kind] for kind, values in earlier.slowdowns.items()},
        pipeline_s=earlier.pipeline_s + later.pipeline_s,
        starts=earlier.starts + later.starts,
    )


def _progress(say: Say) -> Callable[[int, int], None]:
    """Return a function that reports each round, and from the second on the time left."""
    started = time.monotonic()

    def told(done: int, total: int) -> None:
        left_s = (time.monotonic() - started) / done * (total - done)
        say(f"  round {done} of {total}" + (f", about {left_s:.0f} s left" if 1 < done < total else ""))

    return told
