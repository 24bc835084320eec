"""What is compared where: a model on a running cluster, traced once, its layers timed there."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import hwaware
from hwaware.bench.alpa_mapping import identity
from hwaware.bench.mappings import OURS, Candidate, Wanted
from hwaware.bench.training import TrainingRun
from hwaware.cluster import ClusterProfile
from hwaware.errors import InfeasibleError
from hwaware.reference_kernel import Reference, kernel_reference
from hwaware.workload import Workload

Say = Callable[[str], None]


class Effort(NamedTuple):
    """How much is measured.

    Attributes:
        num_layers: How many layers Alpa cuts the model into.
        num_microbatches: Per step.
        microbatch_size: Samples per microbatch.
        repeats: Measured steps of each mapping, after each start of its processes.
        starts: How many times each mapping's processes are started.
        checked_losses: Steps of training on one device to compare losses with.
        deadline_s: When measuring shall have ended, by `time.monotonic`, with fewer steps or starts if it must.
        together: Mappings that are ready to run at a time; more are measured in groups, hwaware's in each of them.
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
