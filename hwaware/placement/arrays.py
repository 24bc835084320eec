"""A search problem as arrays: contiguous layers on stage options, devices that cannot be told apart in one class."""

from __future__ import annotations

import collections
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import numpy.typing as npt

from hwaware.cluster import Device
from hwaware.costs import PreparedCosts
from hwaware.costs.compute import is_split
from hwaware.costs.curves import FloatArray
from hwaware.costs.stages import LocatedStage, Replicas, StageTable, boundaries_s, stage_table
from hwaware.errors import PlanError
from hwaware.placement.options import Hints, Option, Space, stage_options
from hwaware.placement.problem import Problem
from hwaware.plans import Objective, Plan, Schedule
from hwaware.workload import Workload

IntArray = npt.NDArray[np.int64]


class Arrays(NamedTuple):
    """What a search needs to know; K classes of devices, O options, L layers.

    Attributes:
        members: The device ids of each class, in the profile's order.
        options: Ways to build a stage.
        complete: Whether the options are all that the target allows.
        use: [O, K] devices that an option takes.
        tables: What the options cost.
        pairs: [O, O] row of `sends_s` for an option in front of another one; -1 if they cannot be neighbours.
        sends_s, backs_s: [pairs, L] time to send the output of a layer, and its gradient back; may be below 0.
        limit_bytes: [K] memory of one device.
        num_microbatches: B.
        schedule, objective: What is minimised.
        most_gained_s: By no more than this is a stage's pass shorter because it waited.
    """

    members: Tuple[Tuple[str, ...], ...]
    options: Tuple[Option, ...]
    complete: bool
    use: IntArray
    tables: StageTable
    pairs: npt.NDArray[np.int32]
    sends_s: FloatArray
    backs_s: FloatArray
    limit_bytes: FloatArray
    num_microbatches: int
    schedule: Schedule
    objective: Objective
    most_gained_s: float = 0.0

    @property
    def num_layers(self) -> int:
        """L."""
        return self.tables.forward_s.shape[1]

    @property
    def sizes(self) -> IntArray:
        """Devices in each class."""
        return np.array([len(members) for members in self.members], dtype=np.int64)

    def plan(self, stages: List[Tuple[int, int, int]]) -> Plan:
        """The plan of stages (first layer, last layer, option) in pipeline order; members are taken in order."""
        taken = np.zeros(len(self.members), dtype=np.int64)
        made = []
        for first, last, k in stages:
            replicas = self.options[k].placed(self.members, taken.tolist())
            made.append(LocatedStage(first, last, replicas).plan_stage())
            taken += self.use[k]
        return Plan(num_microbatches=self.num_microbatches, schedule=self.schedule, stages=tuple(made))


def splits(workload: Workload) -> bool:
    """Whether a tensor-parallel group does anything in less time than one of its devices."""
    shardings = [name for layer in workload.layers for times in (layer.measured or {}).values() for name in times]
    return any(is_split(layer) for layer in workload.layers) or any(not name.endswith(",1") for name in shardings)


def device_classes(problem: Problem) -> List[List[str]]:
    """Devices that can be swapped without changing any number, grouped. Swaps compose: one stands for all."""
    costs = problem.costs
    devices = [device.id for device in costs.profile.devices]
    rows: Dict[Tuple[object, ...], List[int]] = {}
    sends, hosts = _SendKeys(costs, devices), collections.Counter(device.host for device in costs.profile.devices)
    classes: List[List[int]] = []
    for index, name in enumerate(devices):
        # On which hosts a stage is decides whether Alpa runs it, what sums of gradients cost, and what passes a card.
        host = costs.devices[name].host
        place = (
            costs.cards.of(name) if costs.cards else (),
            host if hosts[host] > 1 else "",
            costs.measured_groups.tells_apart(name),
        )
        row = (*device_row(costs.devices[name], costs.workload.dtype), *place, *problem.pin_row(name))
        candidates = rows.setdefault(row, [])
        for k in candidates:
            if sends.swappable(index, classes[k][0]):
                classes[k].append(index)
                break
        else:
            candidates.append(len(classes))
            classes.append([index])
    return [[devices[index] for index in members] for members in classes]


def device_row(device: Device, dtype: str) -> Tuple[object, ...]:
    """All that a device's own costs depend on, links and whom it shares a card with aside."""
    curve = tuple((point.flops, point.seconds) for point in device.throughput.get(dtype, ()))
    return (
        device.kind,
        device.memory_bytes,
        device.memory_bandwidth_bytes_per_s,
        device.pass_s,
        device.sum_bytes_per_s,
        device.head_start_s,
        curve,
    )


class _SendKeys:
    """Which links are alike, as small numbers."""

    def __init__(self, costs: PreparedCosts, devices: Sequence[str]) -> None:
        places, links = costs.links.numbered(devices)
        np.fill_diagonal(places, -1)
        self.keys = np.array([*map(costs.link_number, links), -1], dtype=np.int64)[places]

    def swappable(self, i: int, j: int) -> bool:
        others = np.ones(len(self.keys), dtype=np.bool_)
        others[[i, j]] = False
        return bool(
            np.array_equal(self.keys[i, others], self.keys[j, others])
            and np.array_equal(self.keys[others, i], self.keys[others, j])
            and self.keys[i, j] == self.keys[j, i]
        )


def spaces(problem: Problem, classes: Sequence[Sequence[str]]) -> Iterator[Space]:
    """Ways to build a stage: all of them, then only stages of like devices, for when all are too many."""
    costs = problem.costs
    devices = [[costs.devices[name] for name in names] for names in classes]
    for unlike in (True, False) if problem.target == "any" else (True,):
        yield stage_options(
            devices,
            costs.workload.microbatch_size,
            problem.target,
            problem.most_devices,
            splits(costs.workload),
            _hints(costs, classes),
            unlike,
        )


def prepare(
    problem: Problem, classes: Optional[Sequence[Sequence[str]]] = None, space: Optional[Space] = None
) -> Arrays:
    """The problem as arrays, in the very numbers that `evaluate` uses.

    Args:
        problem: What to place.
        classes: `device_classes` of the problem, from a caller that has them.
        space: The ways to build a stage that count; all of them if left out.

    Raises:
        UnusableInputError: A device was not measured with the workload's data type.
    """
    costs = problem.costs
    members = tuple(tuple(names) for names in classes or device_classes(problem))
    space = space or next(spaces(problem, members))
    none_taken = [0] * len(members)
    options, made = [], []
    for option in space.options:
        try:
            placed = option.placed(members, none_taken)
            made.append(pinned(stage_table(placed, costs, problem.num_microbatches), problem, placed))
            options.append(option)
        except PlanError:  # devices of one stage that have no link
            continue
    use = np.array([option.use(len(members)) for option in options], dtype=np.int64)
    pairs, sends, backs = _boundaries(costs, members, options, use)
    return Arrays(
        members=members,
        options=tuple(options),
        complete=space.complete,
        use=use,
        tables=StageTable.stacked(made),
        pairs=pairs,
        sends_s=sends,
        backs_s=backs,
        limit_bytes=np.array([float(costs.devices[names[0]].memory_bytes) for names in members]),
        num_microbatches=problem.num_microbatches,
        schedule=costs.schedule,
        objective=problem.objective,
        most_gained_s=costs.most_gained_s,
    )


def _hints(costs: PreparedCosts, members: Sequence[Sequence[str]]) -> Hints:
    """Links between the classes' first devices (of one class: its first two), and the speed of the whole model."""
    between = np.full((len(members), len(members)), np.inf)
    sends_s = costs.without_head_starts.sends_s  # a head start hides which link is faster
    for i, one in enumerate(members):
        for j, other in enumerate(members):
            if i == j and len(one) == 1:
                continue
            source, target = one[0], other[1 if i == j else 0]
            there, back = sends_s(source, target), sends_s(target, source)
            if there is not None and back is not None:
                between[i, j] = sum(there) + sum(back)
    sums = [costs.sums((names[0],)) for names in members]
    whole = np.array([s.forward_s[-1] + s.backward_s[-1] for s in sums])
    return Hints(between, 1.0 / np.maximum(whole, 1e-30))


def pinned(tables: StageTable, problem: Problem, placed: Replicas) -> StageTable:
    """The tables without the ranges that hold a layer which not all of these devices may run, or that are no stage."""
    names = [name for replica in placed for name in replica.devices]
    forbidden = [layer for layer, allowed in problem.pins.items() if not set(names) <= set(allowed)]
    if not forbidden and problem.rule is None:
        return tables
    layers = tables.forward_s.shape[0]
    first, end = np.arange(layers)[:, None], np.arange(layers + 1)[None, :]
    gone, ruled_out = (np.zeros((layers, layers + 1), dtype=np.bool_) for _ in range(2))
    for layer in forbidden:
        gone |= (first <= layer) & (layer < end)
    if problem.rule is not None:
        for i in range(layers):
            for j in range(i, layers):
                ruled_out[i, j + 1] = not problem.allows(LocatedStage(i, j, placed))
    return tables._replace(
        most_in_flight=np.where(ruled_out, -1.0, np.where(gone, 0.0, tables.most_in_flight)),
        excess_bytes=np.where(gone | ruled_out, np.inf, tables.excess_bytes),
        update_excess_bytes=np.where(gone | ruled_out, np.inf, tables.update_excess_bytes),
    )


def _boundaries(
    costs: PreparedCosts, members: Sequence[Sequence[str]], options: Sequence[Option], use: IntArray
) -> Tuple[npt.NDArray[np.int32], FloatArray, FloatArray]:
    """For every two options that can be neighbours, the sends between them; like ones share a row."""
    sizes = np.array([len(names) for names in members])
    layers = len(costs.workload.layers)
    pairs = np.full((len(options), len(options)), -1, dtype=np.int32)
    rows: Dict[bytes, int] = {}
    there, back = [np.zeros(layers)], [np.zeros(layers)]
    none_taken = [0] * len(members)
    first_placed = [option.placed(members, none_taken) for option in options]
    for i in range(len(options)):
        for j in np.flatnonzero(((use[i] + use) <= sizes).all(axis=1)).tolist():
            try:
                vectors = boundaries_s(first_placed[i], options[j].placed(members, use[i].tolist()), costs)
            except PlanError:  # no link
                continue
            key = vectors[0].tobytes() + vectors[1].tobytes()
            if key not in rows:
                rows[key] = len(there)
                there.append(vectors[0])
                back.append(vectors[1])
            pairs[i, j] = rows[key]
    return pairs, np.array(there), np.array(back)
