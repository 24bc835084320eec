"""Hold the inputs of a comparison: a model on a running cluster, traced once, with its layers timed there."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import hwaware
from hwaware.bench.alpa_mapping import identity
from hwaware.bench.mappings import OURS, Candidate, Wanted
from hwaware.bench.training import TrainingRun
from hwaware.calibration.timers import timers_kept
from hwaware.cluster import ClusterProfile
from hwaware.costs.own_times import with_own_kinds
from hwaware.errors import InfeasibleError
from hwaware.reference_kernel import Reference, kernel_reference
from hwaware.workload import Workload

Say = Callable[[str], None]


class Effort(NamedTuple):
    """How much to measure.

    Attributes:
        num_layers: Number of layers that Alpa cuts the model into.
        num_microbatches: Microbatches per step.
        microbatch_size: Samples per microbatch.
        repeats: Measured steps of each mapping after each start of its processes.
        starts: Number of starts of each mapping's processes.
        checked_losses: Steps of training on one device, to compare losses.
        deadline_s: Time by which steps must end, in `time.monotonic`; cuts steps and starts. None for no limit.
        together: Largest number of mappings that are ready at a time. More are measured in groups, and hwaware's
            mapping is in each group.
        wanted: The mappings.
    """

    num_layers: int
    num_microbatches: int
    microbatch_size: int
    repeats: int = 20
    starts: int = 1
    checked_losses: int = 5
    deadline_s: Optional[float] = None
    together: int = 6
    wanted: Wanted = Wanted()


class Task(NamedTuple):
    """A model on a running cluster, ready to compare mappings.

    Attributes:
        model: A built-in model.
        profile: Profile of the running cluster.
        workload: The model in Alpa's layers, timed on the cluster.
        effort: How much to measure.
        say: Called with each line of progress.
        reference: The reference to time beside steps.
        first: The run that timed the layers, so that its mapping need not compile again.
    """

    model: Any
    profile: ClusterProfile
    workload: Workload
    effort: Effort
    say: Say
    reference: Reference
    first: Optional[TrainingRun] = None

    def start(self, candidate: Candidate) -> TrainingRun:
        """Start the run of a mapping; it compiles in the background."""
        return TrainingRun(candidate.name, self.model, self.profile, *_sizes(self.effort), candidate.plan)


def _sizes(effort: Effort) -> Tuple[int, int, int]:
    return effort.num_layers, effort.num_microbatches, effort.microbatch_size


@contextlib.contextmanager
def opened_task(model: Any, profile: ClusterProfile, effort: Effort, say: Say) -> Iterator[Task]:
    """Compile the model once and time its layers on the cluster; close that run at the block's end."""
    say("compiling hwaware's mapping (Alpa traces the model, its layers are timed, hwaware places them) ...")
    with contextlib.ExitStack() as stack:
        stack.enter_context(timers_kept())  # the reference times the same layers again, beside the steps
        try:
            first = stack.enter_context(
                contextlib.closing(TrainingRun(OURS, model, profile, *_sizes(effort), measure=True))
            )
        except InfeasibleError as error:  # the model of memory may be too strict, and other mappings fit
            say(f"  {error}")
            stack.close()  # memory is short: free that of the timers
            yield Task(model, profile, _traced(model, effort), effort, say, kernel_reference(profile.environment))
            return
        workload, profile = with_own_kinds(first.workload, profile)
        reference = stack.enter_context(first.reference(workload, profile))
        yield Task(model, profile, workload, effort, say, reference, first)


def _traced(model: Any, effort: Effort) -> Workload:
    """Trace the same layers without Alpa and without times."""
    batch, layers = model.batch(step=0, size=1), effort.num_layers
    state, samples = model.abstract_state(), effort.microbatch_size
    return hwaware.trace(model.train_step, state, batch, layers, samples, model.config.NAME)


def reusable(task: Task, chosen: Sequence[Candidate]) -> List[TrainingRun]:
    """Return the task's first run, renamed after the candidate with the same plan; empty if none has it."""
    same = [one for one in chosen if task.first is not None and identity(one.plan) == identity(task.first.plan)]
    if not same or task.first is None:
        return []
    task.first.name = same[0].name
    return [task.first]
