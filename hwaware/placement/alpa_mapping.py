"""Find the mapping that Alpa 0.2.3 would choose, by its own objective, submesh shapes and slicing.

Alpa takes all devices and all links of a kind as equal, as its estimates from a profiling database do. A range of
layers on a submesh takes its time at the devices' mean speed. The gradients' all-reduce runs over mean links, spread
over the microbatches. Memory does not bind in this search.

Alpa takes hosts in the order in which Ray lists them. Here that is the profile's order.
"""

from __future__ import annotations

import math
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from hwaware.cluster import ClusterProfile, Link
from hwaware.costs import PreparedCosts
from hwaware.costs.curves import FloatArray
from hwaware.costs.gradient_sync import ring_all_reduces_s
from hwaware.costs.stages import LocatedStage, in_groups
from hwaware.errors import PlanError
from hwaware.placement.alpa_dp import DpResult, training_dp
from hwaware.placement.blocks import in_blocks, most_blocks
from hwaware.placement.choices import with_reserve
from hwaware.placement.problem import Answer, Problem, Solver, StageRule
from hwaware.placement.ways import splits
from hwaware.plans import Plan, Schedule
from hwaware.workload import Workload

# (hosts, devices of each host)
Shape = Tuple[int, int]
# Alpa's search takes each layer on each number of devices: a device counts as so many ways to build a stage. Models of
# up to 128 layers are never joined in blocks on 1,024 devices.
ALPA_WEIGHT = 0.4
# Alpa's INFINITY_N_STAGES: memory does not bind.
UNLIMITED_SUCCESSORS = 2**20
# Layers (first, last) and shape of each stage.
Chosen = List[Tuple[Tuple[int, int], Shape]]


def alpas_plan(
    workload: Workload,
    profile: ClusterProfile,
    num_microbatches: int,
    schedule: Schedule = "1f1b",
    rule: Optional[StageRule] = None,
    reserve_bytes: float = 0.0,
) -> Plan:
    """Return Alpa's mapping with its price, for hosts in the profile's order; arguments are as in `hwaware.plan`."""
    costs = PreparedCosts(workload, with_reserve(profile, reserve_bytes), schedule)
    return Solver("alpa", __name__, "alpa").solve(Problem(costs, num_microbatches, rule=rule))


def baseline(problem: Problem) -> Answer:
    """Return the mapping of Alpa at its best, a baseline for searches."""
    return alpa(problem, at_best=True)


def alpa(problem: Problem, at_best: bool = False) -> Answer:
    """Return Alpa's mapping: all devices are used, equal submeshes get hosts in reverse order.

    Each device stands alone where Alpa refuses the hosts: their numbers of devices are unequal, or no powers of two.
    `at_best` is Alpa as if it divided work between devices for nothing: n devices take 1 / n of the time. Hosts may
    then have any number of devices, and submeshes that need tensor parallelism count too. Without it, Alpa is as
    programs and benchmarks run it, with measured times of shares and the gradients' all-reduce.
    """
    costs = problem.costs
    blocks = in_blocks(problem, most_blocks(ALPA_WEIGHT * len(costs.devices)))
    if blocks is not None:
        return blocks.of_layers(alpa(blocks.problem, at_best), problem)._replace(bound_s=None)
    chosen = choose(problem, at_best)
    if chosen is None:
        return Answer(
            None,
            None,
            f"Alpa uses all devices, and finds no way to give {len(costs.workload.layers)} layers to "
            f"{len(costs.devices)} of them. To fix: exclude some, or use the exact solver.",
        )
    return Answer(placed(chosen, problem, at_best))


def choose(problem: Problem, at_best: bool = False, search: Callable[..., DpResult] = training_dp) -> Optional[Chosen]:
    """Return the layers and submesh shape of each stage by Alpa's `search`; None if no mapping uses all devices."""
    workload, profile = problem.costs.workload, problem.costs.profile
    split = at_best and splits(problem.costs)
    shapes = submesh_shapes(profile, workload.microbatch_size, problem.most_devices, at_best, split)
    cost = np.stack([_stage_costs_s(problem, shape, at_best) for shape in shapes], axis=-1)[..., None]
    limits = np.full(cost.shape, UNLIMITED_SUCCESSORS)
    _, found = search(len(workload.layers), len(profile.devices), problem.num_microbatches, shapes, 1, cost, limits)
    return None if found is None else [((int(first), int(end) - 1), shapes[shape]) for (first, end), shape, _ in found]


def placed(chosen: Chosen, problem: Problem, at_best: bool = False, order: Optional[Sequence[str]] = None) -> Plan:
    """Return the plan for an answer of `choose`: the largest submesh first, equal ones from last stage to first.

    `order` names the hosts as Ray lists them; the profile's order if left out.
    """
    workload = problem.costs.workload
    hosts, _ = _hosts(problem.costs.profile, at_best, order)
    split = at_best and splits(problem.costs)
    names, width, taken = [name for host in hosts for name in host], len(hosts[0]), 0
    stages = {}
    for k in sorted(range(len(chosen)), key=lambda k: math.prod(chosen[k][1]))[::-1]:
        layers, shape = chosen[k]
        own, taken = names[taken : taken + math.prod(shape)], taken + math.prod(shape)
        group = _logical_group(len(own), workload.microbatch_size, split, width)
        stages[k] = LocatedStage(*layers, in_groups(own, group))
    return problem.plan(stages[k] for k in range(len(chosen)))


def submesh_shapes(
    profile: ClusterProfile,
    samples: int,
    most_devices: Optional[int] = None,
    at_best: bool = False,
    split: bool = False,
) -> Tuple[Shape, ...]:
    """Return Alpa's "power_of_two" shapes, less those that have no logical shape here.

    Replicas must share `samples` equally. `split` takes shapes that need tensor parallelism too.
    """
    hosts, refused = _hosts(profile, at_best)
    width = len(hosts[0])
    shapes = [(1, 1 << k) for k in range(width.bit_length())]
    if shapes[-1][1] != width:
        shapes.append((1, width))
    if not refused:
        shapes += [(1 << k, width) for k in range(1, len(hosts).bit_length())]
    most = most_devices or len(profile.devices)
    return tuple(
        (h, d)
        for h, d in shapes
        if h * d <= most and (h * d == 1 or _logical_group(h * d, samples, split, width) <= width)
    )


def _hosts(
    profile: ClusterProfile, at_best: bool, order: Optional[Sequence[str]] = None
) -> Tuple[List[List[str]], bool]:
    """Return the devices of each host, or one device a host where Alpa refuses the hosts; and if it does."""
    of_hosts: Dict[str, List[str]] = {name: [] for name in order or [host.name for host in profile.hosts]}
    for device in profile.devices:
        of_hosts[device.host].append(device.id)
    hosts = [names for names in of_hosts.values() if names]
    width = len(hosts[0])
    refused = len(set(map(len, hosts))) > 1 or (not at_best and width & (width - 1) != 0)
    return ([[name] for names in hosts for name in names] if refused else hosts), refused


def _logical_group(devices: int, samples: int, split: bool, width: int) -> int:
    """Return the smallest tensor-parallel group that leaves a number of replicas that divides the samples."""
    groups = (n for n in range(1, devices + 1) if devices % n == 0 and samples % (devices // n) == 0)
    return next((group for group in groups if group == 1 or split), width + 1)


def _stage_costs_s(problem: Problem, shape: Shape, at_best: bool) -> FloatArray:
    """Return seconds per microbatch of layers first .. last on a submesh, [L, L]; infinite for last < first."""
    costs, devices = problem.costs, math.prod(shape)
    layers = costs.workload.layers
    replicas = 1 if at_best else devices
    sums = [costs.sums((device.id,), 1 / replicas, replicas) for device in costs.profile.devices]
    rates = [1.0 / np.maximum(np.diff(s.forward_s) + np.diff(s.backward_s), 1e-30) for s in sums]
    seconds = _ranges(1.0 / np.mean(rates, axis=0))
    if at_best:
        seconds = seconds / devices
    elif devices > 1:
        nbytes = np.maximum(0.0, _ranges(costs.summed_bytes(1)))
        link = _mean_link(costs, inside=shape[0] == 1)
        summed = ring_all_reduces_s(nbytes.reshape(-1), devices, [link]).reshape(nbytes.shape)
        seconds = seconds + summed / problem.num_microbatches
    return np.where(np.tri(len(layers), k=-1) > 0, np.inf, seconds)


def _ranges(values: FloatArray) -> FloatArray:
    """Return sums over layers first .. last, [L, L]."""
    running = np.concatenate([[0.0], np.cumsum(values)])
    result: FloatArray = running[None, 1:] - running[:-1, None]
    return result


def _mean_link(costs: PreparedCosts, inside: bool) -> Link:
    """Return the mean of all measured links inside hosts, or of all links between hosts.

    Raises:
        PlanError: The profile has no such link.
    """
    names = [device.id for device in costs.profile.devices]
    places, links = costs.links.numbered(names)
    np.fill_diagonal(places, -1)
    known = places[(places >= 0) & (costs.links.on_one_host(names) == inside)]
    if not len(known):
        where = "inside hosts" if inside else "between hosts"
        raise PlanError(f"The profile has no link {where}.", "measure the links (hwaware profile).")
    return Link(
        source=names[0],
        target=names[-1],
        latency_s=float(np.mean(np.array([link.latency_s for link in links])[known])),
        bandwidth_bytes_per_s=float(np.mean(np.array([link.bandwidth_bytes_per_s for link in links])[known])),
    )
