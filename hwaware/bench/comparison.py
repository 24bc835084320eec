"""Mappings compared on one running cluster: trace, plan, train each, measure in turn."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import msgspec

import hwaware
from hwaware.bench.alpa_mapping import identity
from hwaware.bench.environment import environment
from hwaware.bench.harness import measure
from hwaware.bench.mappings import OURS, Candidate, Candidates, Wanted, candidates
from hwaware.bench.summary import LOSS_TOLERANCE
from hwaware.bench.training import TrainingRun, single_device_losses
from hwaware.cluster import ClusterProfile
from hwaware.costs import PreparedCosts
from hwaware.errors import HwawareError, InfeasibleError, MeasurementError, OutOfDeviceMemoryError
from hwaware.reference_kernel import Reference, kernel_reference
from hwaware.result import BenchmarkResult, Mapping, Unmeasured
from hwaware.timeline import Timeline
from hwaware.workload import Workload

Say = Callable[[str], None]
# Beyond this the machine ran at another speed beside the steps than beside the profile, which a reader should know.
_DRIFT = 1.15
# A worker's memory is accounted for in its first two steps: the second has what the first one leaves.
TRIAL_STEPS = 2


class Effort(NamedTuple):
    """How much is measured.

    Attributes:
        num_layers: How many layers Alpa cuts the model into.
        num_microbatches: Per step.
        microbatch_size: Samples per microbatch.
        repeats: Measured steps of each mapping, after each start of its processes.
        starts: How many times each mapping's processes are started.
        warmup: Steps of each mapping that come first and do not count, after those that show that it runs at all.
        checked_losses: Steps of training on one device to compare losses with.
        together: Mappings that are ready to run at a time; more are measured in groups, hwaware's in each of them.
        wanted: The mappings.
    """

    num_layers: int
    num_microbatches: int
    microbatch_size: int
    repeats: int = 20
    starts: int = 1
    warmup: int = 0
    checked_losses: int = 5
    together: int = 6
    wanted: Wanted = Wanted()


class Task(NamedTuple):
    """What is compared where.

    Attributes:
        model: A built-in model.
        profile: Of the running cluster.
        workload: The model's, cut into the layers that Alpa cuts it into, timed on the cluster.
        effort: How much is measured.
        say: Told what goes on.
        reference: What is timed beside its steps.
        first: The run for which the layers were timed; its mapping need not be compiled again.
    """

    model: Any
    profile: ClusterProfile
    workload: Workload
    effort: Effort
    say: Say
    reference: Reference
    first: Optional[TrainingRun] = None

    def start(self, candidate: Candidate) -> TrainingRun:
        """The run of a mapping, compiling."""
        return TrainingRun(candidate.name, self.model, self.profile, *_sizes(self.effort), candidate.plan)


def _sizes(effort: Effort) -> Tuple[int, int, int]:
    return effort.num_layers, effort.num_microbatches, effort.microbatch_size


@contextlib.contextmanager
def opened_task(model: Any, profile: ClusterProfile, effort: Effort, say: Say) -> Iterator[Task]:
    """Compile the model once, and time its layers on the cluster; what that takes ends with the block."""
    from hwaware.patching.measuring import timers_kept

    say("compiling hwaware's mapping (Alpa traces the model, its layers are timed, hwaware places them) ...")
    with contextlib.ExitStack() as stack:
        stack.enter_context(timers_kept())  # the same layers are timed again, beside the steps
        try:
            first = stack.enter_context(
                contextlib.closing(TrainingRun(OURS, model, profile, *_sizes(effort), measure=True))
            )
        except InfeasibleError as error:  # other mappings may fit, where the price of memory is too high
            say(f"  {error}")
            stack.close()  # memory is short: the timers' goes to the mappings
            yield Task(model, profile, _traced(model, effort), effort, say, kernel_reference(profile.environment))
            return
        reference = stack.enter_context(first.reference(profile))
        yield Task(model, profile, first.workload, effort, say, reference, first)


def _traced(model: Any, effort: Effort) -> Workload:
    """The same layers without Alpa and without their times."""
    batch, layers = model.batch(step=0, size=1), effort.num_layers
    state, samples = model.abstract_state(), effort.microbatch_size
    return hwaware.trace(model.train_step, state, batch, layers, samples, model.config.NAME)


def reusable(task: Task, chosen: Sequence[Candidate]) -> List[TrainingRun]:
    """The task's first run under the name of the candidate that has the same mapping, if there is one."""
    same = [one for one in chosen if task.first is not None and identity(one.plan) == identity(task.first.plan)]
    if not same or task.first is None:
        return []
    task.first.name = same[0].name
    return [task.first]


def compare(task: Task, scenario: str, label: str) -> BenchmarkResult:
    """Train a model by every wanted mapping, step by step in turn.

    Raises:
        HwawareError: No mapping could be measured, or a worker failed in the middle.
    """
    found = plan_all(task)
    measured = measure_groups(task, found.chosen, reusable(task, found.chosen))
    return make_result(task, scenario, label, found, *measured)


def plan_all(task: Task) -> Candidates:
    """The candidates of a task."""
    task.say("placing it: " + ", ".join(task.effort.wanted.names) + " ...")
    return candidates(task.workload, task.profile, task.effort.num_microbatches, task.effort.wanted)


def make_result(
    task: Task,
    scenario: str,
    label: str,
    found: Candidates,
    measured: Sequence[Mapping],
    unmeasured: Sequence[Unmeasured],
    loads: Sequence[float],
) -> BenchmarkResult:
    """The record of what was measured, with the losses of a single device beside it.

    Raises:
        MeasurementError: Nothing was measured.
    """
    diverged = [one for one in measured if not all(math.isfinite(loss) for loss in one.loss)]
    measured = [one for one in measured if one not in diverged]
    everything = (*found.unmeasured, *unmeasured, *map(_diverged, diverged))
    if not measured:
        reasons = " ".join(f"{one.name}: {one.reason}" for one in everything)
        raise MeasurementError(f"No mapping could be measured. {reasons}", "see the first reason.")
    task.say("training on a single device to compare losses ...")
    effort = task.effort
    about = environment(task.reference)
    about["load_average_during"] = [round(load, 2) for load in loads]
    return BenchmarkResult(
        environment=about,
        scenario=scenario,
        model=label,
        num_microbatches=effort.num_microbatches,
        repeats=effort.repeats,
        mappings=tuple(measured),
        single_device_loss=_expected_losses(
            task.model.config, effort.num_microbatches * effort.microbatch_size, effort.checked_losses
        ),
        unmeasured=everything,
        alpa_orders=found.orders,
        profile=task.profile,
        workload=task.workload,
        ideal_step_s=ideal_step_s(task, found.bound_s),
        notes=tuple(_notes(measured, about["profile_reference_s"])),
    )


def _diverged(mapping: Mapping) -> Unmeasured:
    """What is said of a mapping whose training left the numbers."""
    reason = f"its losses are not finite: {', '.join(f'{loss:g}' for loss in mapping.loss[:8])} ..."
    return Unmeasured(name=mapping.name, reason=reason, plan=mapping.plan, also=mapping.also)


@functools.lru_cache(maxsize=None)  # the same in every scenario
def _expected_losses(config: Any, batch_size: int, steps: int) -> Tuple[float, ...]:
    import hwaware.models

    return single_device_losses(hwaware.models.make(config), batch_size, steps)


def ideal_step_s(task: Task, bound_s: Optional[float]) -> Optional[float]:
    """What no plan can beat, by the profile: all work spread over all devices by speed, or the search's own bound.

    None where waiting before its first passes may gain a stage as much as all of that.
    """
    costs = PreparedCosts(task.workload, task.profile)
    sums = [costs.sums((device.id,)) for device in task.profile.devices]
    work_s = task.effort.num_microbatches / sum(1.0 / (one.forward_s[-1] + one.backward_s[-1]) for one in sums)
    # A stage works B times, and may gain by waiting before its first passes.
    return max(0.0, work_s - 2.0 * costs.most_gained_s, bound_s or 0.0) or None


def _notes(measured: Sequence[Mapping], profile_reference_s: Optional[float]) -> Iterator[str]:
    references = sorted(reference for mapping in measured for reference in mapping.reference_s)
    if not references or not profile_reference_s:
        return
    drift = references[len(references) // 2] / profile_reference_s
    if not 1 / _DRIFT < drift < _DRIFT:
        yield (
            f"Beside the steps the reference took {drift:.2f} times as long as at the speed of the profile: the "
            "machine changed its speed, and predictions are corrected by that."
        )


Measured = Tuple[List[Mapping], List[Unmeasured], List[float]]


def measure_groups(task: Task, chosen: Sequence[Candidate], started: Sequence[TrainingRun] = ()) -> Measured:
    """Measure all candidates, a few at a time; those that cannot run are left out, with the reason.

    Args:
        task: What is compared.
        chosen: With different names; the first one is measured in every group.
        started: Runs of the first ones of them that are ready already; they stay open, but for those whose processes
            are to be started again.

    Returns:
        The mappings, those left out, and the load averages seen.

    Raises:
        MeasurementError: After another start of its processes a mapping has other losses.
    """
    ready = {run.name: run for run in started}
    found: Dict[str, Mapping] = {}
    left_out: List[Unmeasured] = []
    loads: List[float] = []
    for start in range(1, task.effort.starts + 1):
        if start > 1:
            task.say(f"starting all processes again, {start} of {task.effort.starts} ...")
            for run in ready.values():
                run.close()
            ready = {}
        missing = {one.name for one in left_out}
        constant, others = ([one for one in part if one.name not in missing] for part in (chosen[:1], chosen[1:]))
        for mapping in _measured_in_groups(task, constant, others, ready, left_out, loads):
            if task.effort.starts > 1:
                mapping = msgspec.structs.replace(mapping, starts=(start,) * len(mapping.step_s))
            found[mapping.name] = _joined(found.get(mapping.name), mapping, task.effort.checked_losses)
    missing = {one.name for one in left_out}  # also what ran after one start and not after another
    return [found[one.name] for one in chosen if one.name in found and one.name not in missing], left_out, loads


def _measured_in_groups(
    task: Task,
    constant: Sequence[Candidate],
    others: Sequence[Candidate],
    ready: Dict[str, TrainingRun],
    left_out: List[Unmeasured],
    loads: List[float],
) -> Iterator[Mapping]:
    """What is measured of each candidate after one start of its processes; the constant one's comes once a group."""
    size = max(1, task.effort.together - len(constant))
    groups = [others[at : at + size] for at in range(0, len(others), size)] or [()]
    with contextlib.ExitStack() as stack:
        first = _ready_runs(task, constant, ready, stack, left_out)
        for group in groups:
            with contextlib.ExitStack() as inner:
                runs = first + _ready_runs(task, group, ready, inner, left_out)
                yield from _measured(task, runs, [*constant, *group], loads)


def _ready_runs(
    task: Task,
    group: Sequence[Candidate],
    ready: Dict[str, TrainingRun],
    stack: contextlib.ExitStack,
    left_out: List[Unmeasured],
) -> List[TrainingRun]:
    """The runs of a group that can take a step; the stack ends them. One compiles while the next one is traced."""
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
    """What a mapping that cannot run raises becomes a record of that; whatever else goes wrong does not end here."""
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
    """Whether a program needed more memory than its device has; a worker's error has it in words only."""
    return isinstance(error, OutOfDeviceMemoryError) or "Out of memory" in str(error)


def _measured(
    task: Task, runs: Sequence[TrainingRun], group: Sequence[Candidate], loads: List[float]
) -> Tuple[Mapping, ...]:
    if not runs:
        return ()
    repeats, by_name = task.effort.repeats, {one.name: one for one in group}
    task.say(f"measuring {repeats} steps of each of {len(runs)} mappings, one each in turn ...")
    tell = _progress(task.say)

    def on_round(done: int, total: int) -> None:
        loads.append(os.getloadavg()[0])
        tell(done, total)

    predictions = {run.name: by_name[run.name].predicted_step_s for run in runs}
    mappings = measure(runs, repeats, task.effort.warmup, task.reference, predictions, on_round)
    recorded = [recorded_step(run) for run in runs]
    return tuple(
        msgspec.structs.replace(
            mapping, also=by_name[mapping.name].also, hosts=by_name[mapping.name].hosts, timeline=timeline
        )
        for mapping, timeline in zip(mappings, recorded)
    )


def recorded_step(run: TrainingRun) -> Timeline:
    """One step more, recorded."""
    timelines: List[Timeline] = []
    with run.recorded(timelines):
        run.step()
    return timelines[0]


def _joined(earlier: Optional[Mapping], later: Mapping, checked_losses: int) -> Mapping:
    """What was measured of a mapping in several groups, or after several starts."""
    if earlier is None:
        return later
    losses = [one.loss[:checked_losses] for one in (earlier, later)]
    if any(abs(a - b) > LOSS_TOLERANCE * abs(a) for a, b in zip(*losses)):
        raise MeasurementError(
            f"{later.name} trained differently after its processes were started again: losses {losses[0]} and "
            f"{losses[1]}.",
            "look for what differs from run to run: random numbers without a key, or a device that computes wrong.",
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
    """Says each round, and from the second on how long the others will take."""
    started = time.monotonic()

    def told(done: int, total: int) -> None:
        left_s = (time.monotonic() - started) / done * (total - done)
        say(f"  round {done} of {total}" + (f", about {left_s:.0f} s left" if 1 < done < total else ""))

    return told
