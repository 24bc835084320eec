"""Slow hosts down midway, then measure the old mapping again beside mappings planned for the new speeds."""

from __future__ import annotations

import contextlib
from typing import Callable, Dict, List, Optional, Sequence

import msgspec

from hwaware.bench.alpa_mapping import identity
from hwaware.bench.comparison import make_result, plan_all
from hwaware.bench.groups import TRIAL_STEPS, measure_groups
from hwaware.bench.harness import measure
from hwaware.bench.mappings import OURS, Candidate
from hwaware.bench.task import Task, opened_task, reusable
from hwaware.bench.testbed.manager import Testbed
from hwaware.bench.testbed.scenarios import Later
from hwaware.bench.training import TrainingRun
from hwaware.cluster import ClusterProfile
from hwaware.costs import evaluate
from hwaware.errors import InfeasibleError
from hwaware.result import BenchmarkResult, Mapping

# hwaware's mapping measured before the change, and the same mapping after it. "hwaware" is the one planned afterwards.
BEFORE = "hwaware-before"
KEPT = "hwaware-kept"


def compare_midway(
    task: Task, bed: Testbed, later: Later, scenario: str, label: str, measure_again: Callable[[], ClusterProfile]
) -> BenchmarkResult:
    """Train by hwaware's mapping, slow hosts down, profile and plan again, and compare all mappings.

    hwaware planned only the kept mapping with the old profile. All other mappings use the new profile.

    Args:
        task: The task on the cluster before the change.
        bed: The testbed.
        later: The change.
        scenario: Name of the scenario in the result.
        label: Name of the model in the result.
        measure_again: Profiles the testbed after the change.

    Raises:
        HwawareError: hwaware finds no mapping, no mapping could be measured, or a worker failed in the middle.
    """
    first = _ours(plan_all(task).chosen)
    if first is None:
        raise InfeasibleError(
            "hwaware has no mapping to start with.",
            "name hwaware in --mappings, or choose a model that fits the cluster.",
        )
    with contextlib.ExitStack() as stack:
        (run,) = reusable(task, [first]) or [task.start(first)]
        stack.callback(run.close)
        run.name = KEPT
        run.wait_until_compiled()
        before = _before(task, run, first, max(1, later.after_steps - TRIAL_STEPS))
        _slow_down(task, bed, later.shares)
        profile = measure_again()
        new = stack.enter_context(opened_task(task.model, profile, task.effort, task.say))
        found = plan_all(new)
        kept = Candidate(KEPT, first.plan, evaluate(first.plan, new.workload, profile).step_s)
        chosen = with_kept(found.chosen, kept)
        differs = kept in chosen
        started = [*([run] if differs else []), *reusable(new, chosen)]
        result = make_result(new, scenario, label, found, *measure_groups(new, chosen, started))
    result = msgspec.structs.replace(result, mappings=(before, *result.mappings))
    return msgspec.structs.replace(result, notes=(*result.notes, _note(later, differs)))


def _ours(chosen: Sequence[Candidate]) -> Optional[Candidate]:
    return next((one for one in chosen if OURS in (one.name, *one.also)), None)


def with_kept(chosen: Sequence[Candidate], kept: Candidate) -> List[Candidate]:
    """Put the kept mapping second; if a candidate has the same plan, give that one its name instead.

    The first one is hwaware's new mapping, which every group measures.
    """
    if all(identity(one.plan) != identity(kept.plan) for one in chosen):
        return [*chosen[:1], kept, *chosen[1:]]
    return [
        one._replace(also=(*one.also, kept.name)) if identity(one.plan) == identity(kept.plan) else one
        for one in chosen
    ]


def _note(later: Later, differs: bool) -> str:
    changed = ", ".join(f"{host} to {share:g} of a core" for host, share in later.shares.items())
    words = (
        f"After {later.after_steps} steps the cluster changed ({changed}). {BEFORE} was measured before the change, "
        f"all others after it. {KEPT} kept the mapping from before; a new profile gave {OURS} and the others."
    )
    return words if differs else f"{words} One of the new mappings equals the mapping from before."


def _before(task: Task, run: TrainingRun, first: Candidate, steps: int) -> Mapping:
    """Measure hwaware's mapping before the change."""
    for _ in range(TRIAL_STEPS):
        run.step()
    task.say(f"measuring {steps} steps before the change ...")
    (mapping,) = measure([run], steps, 0, task.reference, {run.name: first.predicted_step_s})
    return msgspec.structs.replace(mapping, name=BEFORE, profile_reference_s=task.reference.usual_s)


def _slow_down(task: Task, bed: Testbed, shares: Dict[str, float]) -> None:
    for host, share in shares.items():
        task.say(f"host {host} slows down to {share:g} of a core; measuring the cluster again ...")
        bed.set_share(host, share)
