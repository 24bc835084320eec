"""A host that slows down midway: what was right before is measured again after, with and without placing anew."""

from __future__ import annotations

import contextlib
from typing import Dict

import msgspec

from hwaware import profiler
from hwaware.bench.alpa_mapping import identity
from hwaware.bench.comparison import TRIAL_STEPS, Task, make_result, measure_groups, plan_all
from hwaware.bench.harness import measure
from hwaware.bench.mappings import OURS, Candidate
from hwaware.bench.testbed.manager import Testbed
from hwaware.bench.testbed.scenarios import Later
from hwaware.bench.training import TrainingRun
from hwaware.costs import evaluate
from hwaware.errors import InfeasibleError
from hwaware.reference_kernel import reference_s
from hwaware.result import BenchmarkResult, Mapping

# hwaware's mapping before the change, and the same mapping, kept, after it. "hwaware" is then the one placed anew.
BEFORE = "hwaware-before"
KEPT = "hwaware-kept"


def compare_midway(task: Task, bed: Testbed, later: Later, scenario: str, label: str, quick: bool) -> BenchmarkResult:
    """Train by hwaware's mapping, slow the host down, profile again, place anew, and compare all mappings.

    All mappings but the kept one are those of the new profile: Alpa's, even and proportional get what they can out of
    it too.

    Raises:
        HwawareError: As `compare`.
    """
    first = next((one for one in plan_all(task).chosen if OURS in (one.name, *one.also)), None)
    if first is None:
        raise InfeasibleError("hwaware finds no mapping to begin with.", "ask for hwaware among the mappings.")
    with contextlib.ExitStack() as stack:
        task.say("compiling hwaware's mapping from before the change ...")
        run = task.start(first._replace(name=KEPT))
        stack.callback(run.close)
        run.wait_until_compiled()
        before = _before(task, run, first, max(1, later.after_steps - TRIAL_STEPS))
        _slow_down(task, bed, later.shares)
        profile = profiler.profile(bed.address, quick=quick)
        new = task._replace(profile=profile)
        found = plan_all(new)
        kept = Candidate(KEPT, first.plan, evaluate(first.plan, task.workload, profile).step_s)
        same = any(identity(one.plan) == identity(first.plan) for one in found.chosen if OURS in (one.name, *one.also))
        chosen = list(found.chosen) if same else [kept, *found.chosen]
        if same:
            task.say("  the mapping is still the best one: nothing to place anew.")
            run.close()
        measured, unmeasured, loads = measure_groups(new, chosen, [] if same else [run])
        result = make_result(new, scenario, label, found, [before, *measured], unmeasured, loads)
    changed = ", ".join(f"{host} to {share:g} of a core" for host, share in later.shares.items())
    note = (
        f"After {later.after_steps} steps the cluster changed ({changed}). {BEFORE} was measured before; all others "
        f"after it, {KEPT} with the same mapping, the others placed from a new profile."
    )
    if same:
        note += f" Placing anew gave the same mapping: there is no {KEPT} beside {OURS}."
    return msgspec.structs.replace(result, notes=(*result.notes, note))


def _before(task: Task, run: TrainingRun, first: Candidate, steps: int) -> Mapping:
    """The mapping as it runs before the change."""
    for _ in range(TRIAL_STEPS):
        run.step()
    task.say(f"measuring {steps} steps before the change ...")
    (mapping,) = measure([run], steps, 0, lambda: reference_s(repeats=1), {run.name: first.predicted_step_s})
    reference = (task.profile.environment or {}).get("reference_s")
    return msgspec.structs.replace(mapping, name=BEFORE, profile_reference_s=reference)


def _slow_down(task: Task, bed: Testbed, shares: Dict[str, float]) -> None:
    for host, share in shares.items():
        task.say(f"host {host} slows down to {share:g} of a core; measuring the cluster again ...")
        bed.set_share(host, share)
