"""Draw small random placement problems, and find their best plan by trying every one."""

from __future__ import annotations

import itertools
import math
import random
from typing import Callable, Iterator, List, NamedTuple, Sequence, Tuple

import msgspec

from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct
from hwaware.costs import PreparedCosts, evaluate
from hwaware.errors import PlanError
from hwaware.plans import Objective, Plan, Replica, Schedule, Stage
from hwaware.workload import Layer, Shared, Workload

MICROBATCHES = (1, 2, 3, 5, 8, 16, 32)


class Instance(NamedTuple):
    """A placement problem: a workload, its cluster and the number of microbatches."""

    workload: Workload
    profile: ClusterProfile
    num_microbatches: int


def single_device_stages(
    rng: random.Random, max_layers: int = 7, max_devices: int = 5, alike: bool = False
) -> Instance:
    """Draw a problem whose stages have one device each.

    Devices differ, each on a host of its own. Some directed links are missing. Memory often binds.

    Args:
        rng: The source of randomness.
        max_layers, max_devices: The largest sizes to draw.
        alike: Draw devices in identical pairs, and equal links.
    """
    layers, devices = rng.randint(1, max_layers), rng.randint(1, max_devices)
    scale, memory = rng.choice([0.0, 0.1, 1.0, 10.0]), rng.choice([0.3, 0.5, 0.8, 10.0])  # of sends; of the model
    made = _layers(rng, layers, scale)
    whole = sum(4 * layer.parameter_bytes + 2 * layer.activation_bytes for layer in made)
    kinds = [(rng.uniform(0.2, 2), rng.uniform(0.1, 1.2)) for _ in range(devices)]
    if alike:
        kinds = [kinds[k // 2] for k in range(devices)]
    boxes = tuple(
        Device(
            id=f"d{k}",
            host=f"h{k}",
            kind=str(speed),
            memory_bytes=max(1, int(memory * room * whole)),
            memory_bandwidth_bytes_per_s=1e9 * speed,
            throughput={"float32": (MatrixProduct(flops=1e9, seconds=speed),)},
        )
        for k, (speed, room) in enumerate(kinds)
    )
    links = []
    for k, m in itertools.permutations(range(devices), 2):
        # Join consecutive devices always, so that the cluster is connected.
        if abs(k - m) == 1 or alike or rng.random() < 0.6:
            rate = 1e9 if alike else rng.uniform(0.1, 3) * 1e9
            links.append(Link(source=f"h{k}", target=f"h{m}", latency_s=0.01, bandwidth_bytes_per_s=rate))
    profile = ClusterProfile(hosts=tuple(Host(name=box.host) for box in boxes), devices=boxes, links=tuple(links))
    workload = Workload(name="random", microbatch_size=1, dtype="float32", layers=made)
    return Instance(workload, profile, rng.choice(MICROBATCHES))


def replicated_stages(rng: random.Random, max_layers: int = 5, max_devices: int = 4) -> Instance:
    """Draw a problem with replicas: one or two kinds of devices on one or two hosts; some layers can be split."""
    layers, devices = rng.randint(1, max_layers), rng.randint(min(2, max_devices), max_devices)
    samples = rng.choice([1, 2, 3, 4])
    scale, memory = rng.choice([0.0, 0.05, 0.5]), rng.choice([0.4, 0.8, 10.0])
    made = _layers(rng, layers, scale, splittable=True)
    whole = sum(4 * layer.parameter_bytes + 2 * layer.activation_bytes for layer in made)
    boxes = _like_boxes(rng, devices, max(1, int(memory * whole)))
    hosts = sorted({box.host for box in boxes})
    ends = [(h, h) for h in hosts] + ([("h0", "h1")] if len(hosts) > 1 else [])
    if rng.random() < 0.5:
        ends += [(f"d{a}", f"d{b}") for a, b in itertools.permutations(range(devices), 2) if rng.random() < 0.5]
    links = tuple(
        Link(source=a, target=b, latency_s=0.01, bandwidth_bytes_per_s=rng.uniform(0.2, 3) * 1e9) for a, b in ends
    )
    profile = ClusterProfile(hosts=tuple(Host(name=h) for h in hosts), devices=boxes, links=links)
    workload = Workload(name="random", microbatch_size=samples, dtype="float32", layers=made)
    return Instance(workload, profile, rng.choice((1, 2, 5, 16)))


def with_state(one: Instance, rng: random.Random) -> Instance:
    """Give a problem frozen layers, updates that take memory, and weights that several layers share."""
    made = []
    for layer in one.workload.layers:
        gradients = rng.choice([None, 0.0, 0.3 * layer.parameter_bytes])
        optimizer = 0.0 if gradients == 0.0 else rng.choice([None, layer.parameter_bytes])
        update = rng.choice([None, rng.uniform(0, 6) * layer.parameter_bytes])
        changes = {"gradient_bytes": gradients, "optimizer_bytes": optimizer, "update_bytes": update}
        made.append(msgspec.structs.replace(layer, **changes))
    shared = []
    for _ in range(rng.randint(0, 2) if len(made) > 1 else 0):
        numbers = tuple(sorted(rng.sample(range(len(made)), rng.randint(2, len(made)))))
        layers = [made[number] for number in numbers]
        part = rng.uniform(0, 0.5)  # two of them at most
        shared.append(
            Shared(
                layers=numbers,
                parameter_bytes=part * min(layer.parameter_bytes for layer in layers),
                optimizer_bytes=part * min(layer.optimizer_size_bytes for layer in layers),
                update_bytes=part * min(layer.update_bytes or 0.0 for layer in layers),
            )
        )
    return one._replace(workload=msgspec.structs.replace(one.workload, layers=tuple(made), shared=tuple(shared)))


def _layers(rng: random.Random, count: int, scale: float, splittable: bool = False) -> Tuple[Layer, ...]:
    return tuple(
        Layer(
            name=str(index),
            forward_flops=rng.uniform(0.2, 2) * 1e9,
            backward_flops=rng.uniform(0.2, 4) * 1e9,
            parameter_bytes=rng.uniform(0, 1e8),
            output_bytes=scale * rng.uniform(0, 1e9),
            activation_bytes=rng.uniform(0, 1e8),
            tensor_parallel_bytes=rng.choice([None, scale * rng.uniform(0, 1e8)]) if splittable else None,
        )
        for index in range(count)
    )


def _like_boxes(rng: random.Random, devices: int, memory_bytes: int) -> Tuple[Device, ...]:
    kinds, boxes = [rng.uniform(0.3, 2) for _ in range(rng.randint(1, 2))], []
    for k in range(devices):
        speed = rng.choice(kinds)
        points = tuple(MatrixProduct(flops=f, seconds=speed * (f / 1e9) ** 0.9) for f in (1e8, 1e9, 4e9))
        boxes.append(
            Device(
                id=f"d{k}",
                host=f"h{rng.randint(0, 1) if k else 0}",
                kind=str(speed),
                memory_bytes=memory_bytes,
                memory_bandwidth_bytes_per_s=1e9,
                throughput={"float32": points},
            )
        )
    return tuple(boxes)


# Maps devices, in order, to every way to form a stage of them.
Arrangements = Callable[[Tuple[str, ...]], Sequence[Tuple[Replica, ...]]]


def alone(devices: Tuple[str, ...]) -> Sequence[Tuple[Replica, ...]]:
    """Allow stages of one device only."""
    return [(Replica(devices=devices),)] if len(devices) == 1 else []


def arrangements(instance: Instance, target: str) -> Arrangements:
    """Return a function that divides devices into replicas in every way that the target allows."""
    by_id = {device.id: device for device in instance.profile.devices}
    samples = instance.workload.microbatch_size

    def arranged(devices: Tuple[str, ...]) -> Sequence[Tuple[Replica, ...]]:
        found = []
        for parts in range(1, min(len(devices), samples) + 1):
            for widths, shares in itertools.product(_compositions(len(devices), parts), _compositions(samples, parts)):
                if target == "alpa":
                    hosts = [by_id[name].host for name in devices]
                    kinds = {by_id[name].kind for name in devices}
                    unequal = len(set(shares)) > 1 or len(set(widths)) > 1
                    torn = len(list(itertools.groupby(hosts))) > len(set(hosts))
                    if unequal or torn or len(kinds) > 1 or len({hosts.count(host) for host in hosts}) > 1:
                        continue
                ends = list(itertools.accumulate(widths))
                groups = [devices[end - width : end] for end, width in zip(ends, widths)]
                found.append(tuple(Replica(devices=g, share=s / samples) for g, s in zip(groups, shares)))
        return found

    return arranged


def _compositions(total: int, parts: int) -> Iterator[Tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in _compositions(total - first, parts - 1):
            yield (first, *rest)


def every_plan(instance: Instance, arranged: Arrangements, schedule: Schedule = "1f1b") -> Iterator[Plan]:
    """Yield every plan: contiguous stages on any devices in any order; some devices may stay idle."""
    layers = len(instance.workload.layers)
    names = [device.id for device in instance.profile.devices]
    for used in range(1, len(names) + 1):
        for count in range(1, min(layers, used) + 1):
            for widths in _compositions(used, count):
                ends = list(itertools.accumulate(widths))
                for order in itertools.permutations(names, used):
                    built = [arranged(order[end - width : end]) for end, width in zip(ends, widths)]
                    if not all(built):
                        continue
                    for cuts in itertools.combinations(range(1, layers), count - 1):
                        yield from _with_cuts(instance, (0, *cuts, layers), built, schedule)


def _with_cuts(
    instance: Instance, edges: Sequence[int], built: List[Sequence[Tuple[Replica, ...]]], schedule: Schedule
) -> Iterator[Plan]:
    for chosen in itertools.product(*built):
        stages = tuple(
            Stage(layers=(edges[k], edges[k + 1] - 1), replicas=replicas) for k, replicas in enumerate(chosen)
        )
        yield Plan(num_microbatches=instance.num_microbatches, schedule=schedule, stages=stages)


def brute_force(
    instance: Instance,
    arranged: Arrangements = alone,
    schedule: Schedule = "1f1b",
    objective: Objective = "step",
    keeps: Callable[[Plan], bool] = lambda plan: True,
) -> float:
    """Return the least objective of all plans that fit in memory; infinite if none fits.

    Args:
        instance: The problem.
        arranged: Yields the stages that devices can form.
        schedule, objective: As in `hwaware.plan`.
        keeps: Returns True for a plan that counts, for example one that respects pins.
    """
    costs, best = PreparedCosts(instance.workload, instance.profile, schedule), math.inf
    for candidate in every_plan(instance, arranged, schedule):
        try:
            cost = evaluate(candidate, instance.workload, instance.profile, costs)
        except PlanError:  # no link between neighbours
            continue
        if cost.fits and keeps(candidate):
            best = min(best, cost.objective_s(objective))
    return best
