"""Run every valid mapping of a small case, to know how far a plan is from the best one measured.

The first round measures all mappings briefly. The second round measures the fastest few again at full length, beside
the other candidates. So the mapping called best is not merely the luckiest.
"""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Iterator, List, Sequence

import msgspec

from hwaware.bench.alpa_mapping import identity
from hwaware.bench.comparison import make_result, plan_all
from hwaware.bench.groups import measure_groups
from hwaware.bench.mappings import BEST_MEASURED, Candidate
from hwaware.bench.task import Task, reusable
from hwaware.cluster import ClusterProfile
from hwaware.costs import PreparedCosts, evaluate
from hwaware.errors import PlanError, UnusableInputError
from hwaware.plans import Plan, Replica, Stage
from hwaware.result import BenchmarkResult, Mapping
from hwaware.workload import Workload

# Each mapping takes some ten seconds to compile; three hosts and five layers have 63.
MOST_MAPPINGS = 100
# Steps of each mapping in the first round, and the number of mappings in the second.
_STEPS = 5
_AGAIN = 3


def require_few(devices: int, layers: int) -> None:
    """Refuse a cluster and a model that have too many mappings to measure each.

    Raises:
        UnusableInputError: The mappings are too many.
    """
    stages = range(1, min(devices, layers) + 1)
    if sum(math.comb(layers - 1, count - 1) * math.perm(devices, count) for count in stages) > MOST_MAPPINGS:
        raise UnusableInputError(
            f"{devices} devices and {layers} layers have more than {MOST_MAPPINGS} mappings: {BEST_MEASURED} would "
            "take too long to measure each.",
            "use fewer layers (--layers) or a smaller cluster; 3 hosts and 5 layers have 63 mappings.",
        )


def every_mapping(workload: Workload, profile: ClusterProfile, num_microbatches: int) -> List[Candidate]:
    """Return every mapping with one device a stage, the fastest predicted first; devices may stay idle.

    Raises:
        UnusableInputError: The mappings are too many to measure.
    """
    require_few(len(profile.devices), len(workload.layers))
    costs = PreparedCosts(workload, profile)
    found: List[Candidate] = []
    for plan in _plans(len(workload.layers), [device.id for device in profile.devices], num_microbatches):
        try:
            step_s = evaluate(plan, workload, profile, costs).step_s
        except PlanError:  # no link joins two neighbours, so it cannot run
            continue
        found.append(Candidate(f"each-{len(found) + 1}", plan, step_s))
    return sorted(found, key=lambda one: one.predicted_step_s)


def _plans(layers: int, devices: Sequence[str], num_microbatches: int) -> Iterator[Plan]:
    for count in range(1, min(layers, len(devices)) + 1):
        for cuts in itertools.combinations(range(1, layers), count - 1):
            edges = (0, *cuts, layers)
            for order in itertools.permutations(devices, count):
                stages = tuple(
                    Stage(layers=(edges[k], edges[k + 1] - 1), replicas=(Replica(devices=(device,)),))
                    for k, device in enumerate(order)
                )
                yield Plan(num_microbatches=num_microbatches, stages=stages)


def compare_with_each(task: Task, scenario: str, label: str) -> BenchmarkResult:
    """Compare as `compare` does, and measure every mapping too; the fastest is also called best-measured.

    Args:
        task: The model, its cluster and the effort.
        scenario: Name of the scenario in the result.
        label: Name of the model in the result.

    Raises:
        UnusableInputError: The mappings are too many to measure.
        HwawareError: No mapping could be measured, or a worker failed in the middle.
    """
    candidates = every_mapping(task.workload, task.profile, task.effort.num_microbatches)
    found = plan_all(task)
    task.say(f"measuring each of {len(candidates)} mappings briefly ...")
    brief = task._replace(effort=task.effort._replace(repeats=_STEPS, starts=1))
    each, unmeasured, _ = measure_groups(brief, candidates, reusable(task, candidates))
    fastest = {mapping.name for mapping in sorted(each, key=_median)[:_AGAIN]}
    chosen = with_fastest(found.chosen, [one for one in candidates if one.name in fastest])
    measured, left_out, loads = measure_groups(task, chosen, reusable(task, chosen))
    result = make_result(task, scenario, label, found, name_best(measured), [*unmeasured, *left_out], loads)
    return msgspec.structs.replace(
        result, enumerated=tuple(msgspec.structs.replace(one, timeline=None) for one in each)
    )


def with_fastest(chosen: Sequence[Candidate], fastest: Sequence[Candidate]) -> List[Candidate]:
    """Return the candidates, followed by those of the fastest mappings that are not among the candidates."""
    known = {identity(one.plan) for one in chosen}
    return [*chosen, *(one for one in fastest if identity(one.plan) not in known)]


def name_best(measured: Sequence[Mapping]) -> List[Mapping]:
    """Return the mappings, and give the fastest the second name best-measured."""
    best = min(measured, key=_median, default=None)
    return [msgspec.structs.replace(one, also=(*one.also, BEST_MEASURED)) if one is best else one for one in measured]


def _median(mapping: Mapping) -> float:
    return statistics.median(mapping.relative_steps)
