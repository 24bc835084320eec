"""List ways to build one stage, and turn a search problem into arrays of their costs.

A way (`Option`) says which devices a stage has, in which replicas, with which shares of the microbatch. Devices that
cannot be told apart form a class, and a way names classes. With few devices, every arrangement of every set is listed.
With more, replicas of like devices keep the profile's order. Tensor-parallel groups take the devices with the fastest
links, wherever they stand. For target "any", unlike devices also become data-parallel replicas, with shares in
proportion to their speed.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import time
from typing import Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, TypeVar

import numpy as np
import numpy.typing as npt

from hwaware.cluster import Device
from hwaware.costs import PreparedCosts
from hwaware.costs.compute import is_split
from hwaware.costs.curves import FloatArray, IntArray
from hwaware.costs.prepared import device_row
from hwaware.costs.stages import LocatedStage, Replicas, SharedReplica, StageTable, boundaries_s, stage_table
from hwaware.errors import PlanError
from hwaware.placement.problem import Problem
from hwaware.plans import Plan

W = TypeVar("W")
# Ids of the devices of each class.
Members = Sequence[Sequence[str]]
# With so many devices every order of devices, and for target "any" every division into replicas, is listed.
EVERY_ARRANGEMENT = 4
# Beyond this many options the rest is left out, and what a search over them proves does not hold for all plans.
MAX_OPTIONS = 1500
# So many options are priced in less than a second, whatever the time limit.
FEW_OPTIONS = 64


class Option(NamedTuple):
    """Build a stage in one way."""

    replicas: Tuple[Tuple[int, ...], ...]  # for each replica, the class of each of its devices
    samples: Tuple[int, ...]  # samples of each microbatch that each replica takes

    def use(self, classes: int) -> List[int]:
        """Return the devices of each class that the option takes."""
        flat = [c for replica in self.replicas for c in replica]
        return [flat.count(c) for c in range(classes)]

    def placed(self, members: Members, taken: Sequence[int] = ()) -> Replicas:
        """Return the replicas on devices: the first ones of each class after those that are taken."""
        following, total, placed = list(taken or [0] * len(members)), sum(self.samples), []
        for replica, samples in zip(self.replicas, self.samples):
            names = []
            for c in replica:
                names.append(members[c][following[c]])
                following[c] += 1
            placed.append(SharedReplica(tuple(names), samples / total))
        return tuple(placed)


class Space(NamedTuple):
    """Hold options, and if they are all that the target allows."""

    options: Tuple[Option, ...]
    complete: bool

    def fits(self, classes: Members, layers: int, most_states: int, most_pairs: int) -> bool:
        """Return True if an exact search has no more states, and no more pairs of options that may be neighbours."""
        if count_states(classes) * (layers + 1) * len(self.options) > most_states:
            return False
        sizes = np.array([len(members) for members in classes])
        use, times = np.unique([one.use(len(classes)) for one in self.options], axis=0, return_counts=True)
        fit = (use[:, None, :] + use[None, :, :] <= sizes).all(axis=2)
        return bool(times @ fit @ times <= most_pairs)


def spaces(problem: Problem, classes: Members) -> Iterator[Space]:
    """Yield all ways to build a stage, then only stages of like devices, for when all are too many.

    For target "alpa", devices of one kind may share a stage even if their own layer times differ.
    """
    costs, free = problem.costs, problem.target == "any"
    # Unlike shares suit devices with unlike layer times; Alpa has equal shares, on one kind of hardware.
    yield _space(problem, classes, costs.devices if free else costs.hardware, free)
    if free or costs.own_kinds:
        yield _space(problem, classes, costs.devices, False)._replace(complete=False)


def _space(problem: Problem, names: Members, known: Mapping[str, Device], unlike: bool) -> Space:
    """Return the ways to build a stage from classes of the known devices; `unlike` ones share one if that is given."""
    costs, samples, target = problem.costs, problem.costs.workload.microbatch_size, problem.target
    classes = [[known[name] for name in members] for members in names]
    sizes, split = [len(members) for members in classes], splits(costs)
    devices, speed = sum(sizes), 1.0 / np.maximum([costs.whole_s(members[0]) for members in names], 1e-30)
    most, every = min(devices, problem.most_devices or devices), devices <= EVERY_ARRANGEMENT
    between_s = None if every else _between_s(costs, names)
    # Devices of each class that sets may have: of any kind, or of one kind each.
    kinds = [sizes]
    if not (every or unlike):
        names_of = dict.fromkeys(own[0].kind for own in classes)
        kinds = [[len(own) if own[0].kind == kind else 0 for own in classes] for kind in names_of]
    options: List[Option] = [Option(((c,),), (samples,)) for c in range(len(sizes))]
    # One sample that cannot be divided and layers that cannot be split: stages have one device.
    complete = every or target == "alpa" or most == 1 or (samples == 1 and not split)
    for count in range(2, most + 1):
        for chosen in (one for own in kinds for one in _sets(own, count)):
            hosts = (device.host for c in dict.fromkeys(chosen) for device in classes[c][: chosen.count(c)])
            if target == "alpa" and len(set(collections.Counter(hosts).values())) > 1:
                continue  # Alpa needs equally many devices of each host
            if between_s is None or len({classes[c][0].kind for c in chosen}) == 1:
                found = _arranged(chosen, samples, target, split, between_s)
            elif count <= samples:  # unlike replicas of one device, with whole samples in proportion to their speed
                shares = whole_shares(speed[list(chosen)], samples)
                found = iter((Option(tuple((c,) for c in chosen), shares),))
            else:
                continue
            for option in found:
                if target == "alpa" and not alpa_runs(option.placed(names), known):
                    continue
                if len(options) == MAX_OPTIONS:
                    return Space(tuple(options), False)
                options.append(option)
                # Like devices with unlike links: other orders may be better.
                complete = complete and (every or len(set(chosen)) == 1)
    return Space(tuple(options), complete)


def _sets(sizes: Sequence[int], count: int) -> Iterator[Tuple[int, ...]]:
    """Yield every way to take `count` devices from the classes, as a sorted sequence of classes."""
    if not sizes:
        if count == 0:
            yield ()
        return
    for last in range(min(sizes[-1], count) + 1):
        for rest in _sets(sizes[:-1], count - last):
            yield (*rest, *([len(sizes) - 1] * last))


def whole_shares(speed: FloatArray, samples: int) -> Tuple[int, ...]:
    """Return whole samples in proportion to speed, at least one each, so that the slowest ends early.

    Example:
        >>> whole_shares(np.array([1.0, 3.0]), 4), whole_shares(np.array([1.0, 1.0, 100.0]), 5)
        ((1, 3), (1, 1, 3))
    """
    shares = np.maximum(1, np.floor(speed * samples / speed.sum())).astype(np.int64)
    while shares.sum() < samples:
        shares[int(np.argmin((shares + 1) / speed))] += 1
    while shares.sum() > samples:
        shares[int(np.argmax(np.where(shares > 1, shares / speed, -1.0)))] -= 1
    return tuple(shares.tolist())


def _nearest(chosen: Tuple[int, ...], group: int, between_s: FloatArray) -> Tuple[int, ...]:
    """Order the devices so that each run of `group` devices has fast links inside, found greedily."""
    left, ordered = list(chosen), []  # type: Tuple[List[int], List[int]]
    while left:
        members = [left.pop(0)]
        while len(members) < group:
            slowest = [max(between_s[member, c] for member in members) for c in left]
            members.append(left.pop(int(np.argmin(slowest))))
        ordered += members
    return tuple(ordered)


def _arranged(
    chosen: Tuple[int, ...], samples: int, target: str, split: bool, between_s: Optional[FloatArray]
) -> Iterator[Option]:
    """Yield devices in replicas: without `between_s` in every order, and for target "any" in every division."""
    free = between_s is None and target == "any"
    for order in sorted(set(itertools.permutations(chosen))) if between_s is None else [chosen]:
        count = len(order)
        equal = [(count // parts,) * parts for parts in range(1, count + 1) if count % parts == 0]
        every = (widths for parts in range(1, count + 1) for widths in _compositions(count, parts))
        for widths in every if free else equal:
            if not split and max(widths) > 1:
                continue
            parts, ends = len(widths), list(itertools.accumulate(widths))
            shares = [(samples // parts,) * parts] if samples % parts == 0 else []
            arrangements = {order: None}
            if between_s is not None and max(widths) > 1:
                arrangements[_nearest(order, widths[0], between_s)] = None
            for share in _compositions(samples, parts) if free else shares:
                for arrangement in arrangements:
                    replicas = tuple(arrangement[end - width : end] for end, width in zip(ends, widths))
                    yield Option(replicas, share)


def _compositions(total: int, parts: int) -> Iterator[Tuple[int, ...]]:
    """Yield every way to write `total` as an ordered sum of `parts` positive numbers."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(edges[k + 1] - edges[k] for k in range(parts))


def alpa_runs(replicas: Replicas, devices: Mapping[str, Device]) -> bool:
    """Return True if Alpa can run a stage: devices of one kind, equally many of each host, in equal replicas.

    A mesh of Alpa takes one host after the other, so no host's devices may stand between another one's.
    """
    used = [devices[name] for replica in replicas for name in replica.devices]
    hosts = [device.host for device in used]
    return (
        len({device.kind for device in used}) == 1
        and len({len(replica.devices) for replica in replicas}) == 1
        and len({replica.share for replica in replicas}) == 1
        and len({hosts.count(host) for host in hosts}) == 1
        and len([host for host, _ in itertools.groupby(hosts)]) == len(set(hosts))
    )


def count_states(classes: Members) -> int:
    """Return the number of sets of used devices where the devices of a class are alike."""
    return math.prod(len(names) + 1 for names in classes)


def _between_s(costs: PreparedCosts, members: Members) -> FloatArray:
    """Return the seconds of messages between the classes' first devices (inside: the first two), there and back.

    They are infinite without a link.
    """
    between = np.full((len(members), len(members)), np.inf)
    both_ways_s = costs.without_head_starts.both_ways_s  # a head start hides which link is faster
    for i, one in enumerate(members):
        for j, other in enumerate(members):
            if i == j and len(one) == 1:
                continue
            both = both_ways_s(one[0], other[1 if i == j else 0])
            if both is not None:
                between[i, j] = sum(both[0]) + sum(both[1])
    return between


class Arrays(NamedTuple):
    """Hold the inputs of a search; K classes of devices, O options, L layers."""

    members: Tuple[Tuple[str, ...], ...]  # device ids of each class, in the profile's order
    options: Tuple[Option, ...]  # ways to build a stage
    complete: bool  # the options are all that the target allows
    use: IntArray  # [O, K] devices that an option takes
    tables: StageTable  # costs of the options
    pairs: npt.NDArray[np.int32]  # [O, O] place in `messages_s` of an option in front of another; -1: no neighbours
    messages_s: FloatArray  # [4, pairs, L] `boundaries_s` there and back, and both without head starts
    problem: Problem  # what to place
    most_gained_s: float = 0.0  # most that a stage's pass gets shorter because it waited

    def plan(self, stages: List[Tuple[int, int, int]]) -> Plan:
        """Return the plan of stages (first layer, last layer, option) in pipeline order; take members in order."""
        taken = np.zeros(len(self.members), dtype=np.int64)
        made = []
        for first, last, k in stages:
            replicas = self.options[k].placed(self.members, taken.tolist())
            made.append(LocatedStage(first, last, replicas))
            taken += self.use[k]
        return self.problem.plan(made)


def splits(costs: PreparedCosts) -> bool:
    """Return True if a tensor-parallel group does anything in less time than one of its devices."""
    layers = costs.of_layers.workload.layers
    shardings = [name for layer in layers for times in (layer.measured or {}).values() for name in times]
    return any(is_split(layer) for layer in layers) or any(not name.endswith(",1") for name in shardings)


def device_classes(problem: Problem) -> List[List[str]]:
    """Group the devices that can be swapped without changing any number. Swaps compose: one stands for all."""
    costs = problem.costs
    devices = [device.id for device in costs.profile.devices]
    rows: Dict[Tuple[object, ...], List[List[int]]] = {}
    links, hosts = costs.link_numbers(devices), collections.Counter(device.host for device in costs.profile.devices)
    np.fill_diagonal(links, -1)
    classes: List[List[int]] = []
    for index, name in enumerate(devices):
        # Its hosts decide if Alpa runs a stage, its gradient sums, and the bytes that pass a card.
        host = costs.devices[name].host
        place = (
            costs.cards.of(name) if costs.cards else (),
            host if hosts[host] > 1 else "",
            costs.measured_groups.tells_apart(name),
        )
        row = (*device_row(costs.devices[name], costs.workload.dtype), *place, *problem.pin_row(name))
        candidates = rows.setdefault(row, [])
        own = next((known for known in candidates if _swappable(links, index, known[0])), [])
        if not own:
            candidates.append(own)
            classes.append(own)
        own.append(index)
    return [[devices[index] for index in members] for members in classes]


def _swappable(links: IntArray, i: int, j: int) -> bool:
    """Return True if all links of two devices are alike."""
    swapped = np.arange(len(links))
    swapped[[i, j]] = j, i
    return np.array_equal(links[i, swapped], links[j]) and np.array_equal(links[swapped, i], links[:, j])


def prepare(
    problem: Problem, classes: Optional[Members] = None, space: Optional[Space] = None, until: float = math.inf
) -> Optional[Arrays]:
    """Return the problem as arrays, in the numbers that `evaluate` uses; None if time runs out.

    Args:
        problem: The workload, the cluster and the limits of the search.
        classes: The result of `device_classes(problem)`, if the caller already has this result.
        space: The ways to build a stage that the search considers; by default the first of `spaces`.
        until: When to give up, a time of `time.monotonic()`; a few ways are priced in any case.
    """
    members = tuple(tuple(names) for names in classes or device_classes(problem))
    space = space or next(spaces(problem, members))
    until = until if len(space.options) > FEW_OPTIONS else math.inf
    options, tables, in_time = with_tables(((one, one.placed(members)) for one in space.options), problem, until=until)
    use = np.array([option.use(len(members)) for option in options], dtype=np.int64)
    found = _boundaries(problem.costs, members, options, use, until) if in_time else None
    if found is None:
        return None
    most_gained_s = problem.costs.most_gained_s
    return Arrays(members, tuple(options), space.complete, use, tables, *found, problem, most_gained_s)


def with_tables(
    ways: Iterable[Tuple[W, Replicas]], problem: Problem, replicas_alike: bool = False, until: float = math.inf
) -> Tuple[List[W], StageTable, bool]:
    """Return the ways whose devices have the links of a stage, their costs, and if time sufficed (at least one)."""
    kept: List[W] = []
    made: List[StageTable] = []
    for way, placed in ways:
        if kept and time.monotonic() >= until:
            return kept, StageTable.stacked(made), False
        with contextlib.suppress(PlanError):  # devices of one stage that have no link
            table = stage_table(placed, problem.costs, problem.num_microbatches, replicas_alike)
            made.append(_pinned(table, problem, placed))
            kept.append(way)
    return kept, StageTable.stacked(made), True


def _pinned(tables: StageTable, problem: Problem, placed: Replicas) -> StageTable:
    """Return the tables without ranges of layers that pins or a rule forbid on these devices."""
    names = [name for replica in placed for name in replica.devices]
    forbidden = [layer for layer, allowed in problem.pins.items() if not set(names) <= set(allowed)]
    if not forbidden and problem.rule is None:
        return tables
    layers = tables.forward_s.shape[0]
    before = np.cumsum([0, *(layer in forbidden for layer in range(layers))])
    gone, ruled_out = before[None, :] > before[:-1, None], np.zeros((layers, layers + 1), dtype=np.bool_)
    if problem.rule is not None:
        for i, j in itertools.combinations_with_replacement(range(layers), 2):
            ruled_out[i, j + 1] = not problem.allows(LocatedStage(i, j, placed))
    return tables._replace(
        most_in_flight=np.where(ruled_out, -1.0, np.where(gone, 0.0, tables.most_in_flight)),
        excess_bytes=np.where(gone | ruled_out, np.inf, tables.excess_bytes),
        update_excess_bytes=np.where(gone | ruled_out, np.inf, tables.update_excess_bytes),
    )


def _boundaries(
    costs: PreparedCosts, members: Members, options: Sequence[Option], use: IntArray, until: float
) -> Optional[Tuple[npt.NDArray[np.int32], FloatArray]]:
    """Return the messages between every two options that can be neighbours; like ones share a row."""
    sizes = np.array([len(names) for names in members])
    layers = len(costs.workload.layers)
    pairs = np.full((len(options), len(options)), -1, dtype=np.int32)
    rows: Dict[bytes, int] = {}
    tables = [np.zeros((4, layers))]
    first_placed = [option.placed(members) for option in options]
    for i in range(len(options)):
        if time.monotonic() > until:
            return None
        for j in np.flatnonzero(((use[i] + use) <= sizes).all(axis=1)).tolist():
            try:
                both = first_placed[i], options[j].placed(members, use[i].tolist())
                found = boundaries_s(*both, costs)
            except PlanError:  # no link
                continue
            on_link = found if costs.without_head_starts is costs else boundaries_s(*both, costs.without_head_starts)
            vectors = np.array([*found, *on_link])
            key = vectors.tobytes()
            if key not in rows:
                rows[key] = len(tables)
                tables.append(vectors)
            pairs[i, j] = rows[key]
    return pairs, np.ascontiguousarray(np.array(tables).transpose(1, 0, 2))
