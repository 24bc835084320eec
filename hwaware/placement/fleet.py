"""A large cluster as arrays: like devices of one host as units, and stages built from whole units or parts of one."""

from __future__ import annotations

import math
from typing import Dict, List, NamedTuple, Sequence, Tuple

import msgspec
import numpy as np
import numpy.typing as npt

from hwaware.cluster import ClusterProfile, Link, LinkTable
from hwaware.costs import PreparedCosts
from hwaware.costs.cards import ROLES
from hwaware.costs.curves import FloatArray
from hwaware.errors import PlanError
from hwaware.placement.arrays import Placed, StageTables, device_row, pinned, splits, stage_tables
from hwaware.placement.options import Option
from hwaware.placement.problem import Problem

IntArray = npt.NDArray[np.int64]


class Template(NamedTuple):
    """A way to build a stage from like devices: `replicas` groups of `group`, part of one unit or several whole ones.

    Attributes:
        kind: Index of the type of the devices.
        devices: How many.
        whole: Whole units that it takes; 0 for a part of one.
        replicas, group: Data- and tensor-parallel.
        across: Whether its devices are taken in turn from the units, not unit by unit.
    """

    kind: int
    devices: int
    whole: int
    replicas: int
    group: int
    across: bool = False

    def placed(self, names: Sequence[str]) -> Placed:
        """The devices of each replica, group by group."""
        return tuple(tuple(names[k * self.group : (k + 1) * self.group]) for k in range(self.replicas))


class Fleet(NamedTuple):
    """Units, templates, and what they cost.

    Attributes:
        units: Device ids of each unit, in the profile's order.
        unit_kind: Type of each unit.
        counts: Devices of each type.
        templates: Ways to build a stage.
        tables: Their costs, on the first units of their type.
        port: For each template what its sends depend on, (type, replicas), as a number.
        share: For each template the index of its share of a microbatch.
        link_s, busy_s: [ports, ports, L] the least sends there and back, and the least longer of both.
        sends_s, backs_s: [shares, L, units, units], through shared cards with all replicas of a unit at once: a guess,
            as a stage of several units has fewer of its replicas on each, and a tensor-parallel group sends more. All
            else, and so every bound, is without cards, which only add to the price of a plan.
        uniform: Whether units of one type cannot be told apart, so that the tables and least sends hold for all.
        sizes_alike: Whether all units of a type have equally many devices.
    """

    units: Tuple[Tuple[str, ...], ...]
    unit_kind: IntArray
    counts: IntArray
    templates: Tuple[Template, ...]
    tables: StageTables
    port: IntArray
    share: IntArray
    link_s: FloatArray
    busy_s: FloatArray
    sends_s: FloatArray
    backs_s: FloatArray
    uniform: bool
    sizes_alike: bool

    def column(self, name: str) -> IntArray:
        """One attribute of all templates."""
        return np.array([getattr(template, name) for template in self.templates], dtype=np.int64)


def make_fleet(problem: Problem) -> Fleet:
    """The problem's cluster as units and templates.

    Raises:
        UnusableInputError: A device was not measured with the workload's data type.
    """
    units, kinds = _units(problem)
    with_cards, problem = problem.costs, _without_cards(problem)
    costs = problem.costs
    templates, tables = _templates(problem, units, kinds)
    replicas = sorted({template.replicas for template in templates})
    ports = sorted({(template.kind, template.replicas) for template in templates})
    sends, backs, alike = _sends(costs, units, kinds, replicas)
    if costs.schedule == "inference":
        backs = np.where(np.isfinite(backs), 0.0, np.inf)
    link, busy = _least_sends(ports, replicas, kinds, sends, backs)
    sends, backs = _crowded(with_cards, units, replicas, sends, backs)
    sizes = [{len(unit) for unit, k in zip(units, kinds) if k == kind} for kind in range(max(kinds) + 1)]
    return Fleet(
        units=tuple(units),
        unit_kind=np.array(kinds, dtype=np.int64),
        counts=np.array([sum(len(u) for u, k in zip(units, kinds) if k == kind) for kind in range(max(kinds) + 1)]),
        templates=tuple(templates),
        tables=tables,
        port=np.array([ports.index((t.kind, t.replicas)) for t in templates], dtype=np.int64),
        share=np.array([replicas.index(t.replicas) for t in templates], dtype=np.int64),
        link_s=link,
        busy_s=busy,
        sends_s=sends,
        backs_s=backs,
        uniform=alike and all(len(found) == 1 for found in sizes),
        sizes_alike=all(len(found) == 1 for found in sizes),
    )


def fastest_inside_hosts(costs: PreparedCosts) -> bool:
    """Whether sends inside every host take no longer than any send between hosts: groups belong inside hosts then."""
    inside, between = 0.0, math.inf
    for one in costs.profile.devices:
        for other in costs.profile.devices:
            sends = costs.without_head_starts.sends_s(one.id, other.id) if one is not other else None
            if sends is not None and one.host == other.host:
                inside = max(inside, sum(sends))
            elif sends is not None:
                between = min(between, sum(sends))
    return inside <= between


def optimistic(profile: ClusterProfile, inside_hosts_apart: bool = True) -> ClusterProfile:
    """The profile with every link as good as the best one between devices of the same two kinds.

    Links inside hosts and between them are kept apart, or not. No pipeline takes longer on it than on the profile; what
    stages but the first one do once a step may be hidden less (see `hwaware.placement.kinds.monotone`).
    """
    kinds = {device.id: device.kind for device in profile.devices}
    hosts: Dict[str, List[str]] = {}
    for device in profile.devices:
        hosts.setdefault(device.host, []).append(device.id)
    table, best = LinkTable(profile), {}  # type: Tuple[LinkTable, Dict[Tuple[str, str, bool], Link]]
    pairs = [(a, b) for a in kinds for b in kinds if a != b]
    inside = {name: host for host, names in hosts.items() for name in names}

    def key_of(a: str, b: str) -> Tuple[str, str, bool]:
        return kinds[a], kinds[b], inside_hosts_apart and inside[a] == inside[b]

    for a, b in pairs:
        link = table.between(a, b)
        if link is None:
            continue
        key = key_of(a, b)
        known = best.get(key)
        rate = max([link.bandwidth_bytes_per_s, *(x.bytes / x.seconds for x in link.samples)])
        latency = 0.0 if link.samples else link.latency_s
        if known is not None:
            rate, latency = max(rate, known.bandwidth_bytes_per_s), min(latency, known.latency_s)
        best[key] = Link(source=a, target=b, latency_s=latency, bandwidth_bytes_per_s=rate)
    links = []
    for a, b in pairs:
        found = best.get(key_of(a, b))
        if found is not None:
            links.append(msgspec.structs.replace(found, source=a, target=b))
    return msgspec.structs.replace(profile, links=tuple(links))


def like_parts(problem: Problem) -> List[Problem]:
    """The problem on 1, 2, 4 ... like devices, host by host, and on all devices of each type; the smallest first.

    Devices that something is pinned to are in every part. Each device more costs communication, so throughput per
    device is best on few devices; how many it takes is a matter of memory.
    """
    units, kinds = _units(problem)
    everything = [device.id for device in problem.costs.profile.devices]
    needed = {name for allowed in problem.pins.values() for name in allowed}
    chosen: Dict[Tuple[str, ...], None] = {}
    for kind in range(max(kinds) + 1):
        names = [name for unit, k in zip(units, kinds) if k == kind for name in unit]
        counts = {min(len(names), 1 << k) for k in range(len(names).bit_length() + 1)}
        for count in counts:
            kept = {*names[:count], *needed}
            chosen[tuple(name for name in everything if name in kept)] = None
    parts = []
    for kept_names in sorted(chosen, key=len):
        try:
            profile = problem.costs.profile.without(tuple(name for name in everything if name not in kept_names))
        except ValueError:  # what remains is not connected
            continue
        costs = PreparedCosts(problem.costs.workload, profile, problem.costs.schedule)
        parts.append(problem._replace(costs=costs))
    return parts


def _units(problem: Problem) -> Tuple[List[Tuple[str, ...]], List[int]]:
    costs = problem.costs
    rows: List[object] = []
    found: Dict[Tuple[int, str], List[str]] = {}
    for device in costs.profile.devices:
        row = (*device_row(device, costs.workload.dtype), *problem.pin_row(device.id))
        if row not in rows:
            rows.append(row)
        found.setdefault((rows.index(row), device.host), []).append(device.id)
    ordered = sorted(found.items(), key=lambda item: item[0][0])
    return [tuple(names) for _, names in ordered], [key[0] for key, _ in ordered]


def _templates(
    problem: Problem, units: Sequence[Tuple[str, ...]], kinds: Sequence[int]
) -> Tuple[List[Template], StageTables]:
    """All templates that can be built, with their costs on the first units of their type."""
    costs = problem.costs
    samples, split = costs.workload.microbatch_size, splits(costs.workload)
    templates, made = [], []
    for kind in range(max(kinds) + 1):
        own = sorted((unit for unit, k in zip(units, kinds) if k == kind), key=lambda unit: -len(unit))
        shapes = [(count, 0, own[0][:count], False) for count in range(1, len(own[0]) + 1)]
        alike = [unit for unit in own if len(unit) == len(own[0])]
        for whole in range(2, len(alike) + 1):
            # Tensor-parallel groups are runs of these names: across units where that is faster than inside one. Alpa
            # goes through its hosts one after the other.
            faster = problem.target == "any" and _as_fast_between(costs, own)
            rows = list(zip(*alike[:whole])) if faster else alike[:whole]
            names = tuple(name for row in rows for name in row)
            shapes.append((len(names), whole, names, faster))
        for count, whole, names, across in shapes:
            for replicas in range(1, count + 1):
                group = count // replicas
                if count % replicas or samples % replicas or (group > 1 and not split):
                    continue
                if group > len(own[0]) and not _as_fast_between(costs, own):
                    continue
                if problem.most_devices is not None and count > problem.most_devices:
                    continue
                template = Template(kind, count, whole, replicas, group, across)
                try:
                    placed = tuple(tuple(names[k : k + group]) for k in range(0, count, group))
                    made.append(pinned(_like_tables(problem, template, samples, names), problem, placed))
                except PlanError:  # no link between devices of the stage
                    continue
                templates.append(template)
    return templates, StageTables(*(np.ascontiguousarray(np.stack(column)) for column in zip(*made)))


def _as_fast_between(costs: PreparedCosts, units: Sequence[Tuple[str, ...]]) -> bool:
    """Whether the first units of a type are joined by a link that is no slower than those inside them.

    A tensor-parallel group stays inside a group of fast links; that need not be a host.
    """
    if len(units) < 2:
        return False
    sends_s = costs.without_head_starts.sends_s  # a head start hides which link is faster
    between = sends_s(units[0][0], units[1][0])
    inside = sends_s(units[0][0], units[0][1]) if len(units[0]) > 1 else None
    return between is not None and (inside is None or sum(between) <= sum(inside))


def _like_tables(problem: Problem, template: Template, samples: int, names: Sequence[str]) -> StageTables:
    option = Option(((0,) * template.group,) * template.replicas, (samples // template.replicas,) * template.replicas)
    return stage_tables(problem, option, template.placed(names), replicas_alike=True)


def _sends(
    costs: PreparedCosts, units: Sequence[Tuple[str, ...]], kinds: Sequence[int], replicas: Sequence[int]
) -> Tuple[FloatArray, FloatArray, bool]:
    """Sends between the first devices of units (on the diagonal: the first two of one), there and back."""
    layers, count = len(costs.workload.layers), len(units)
    sends = np.full((len(replicas), layers, count, count), np.inf)
    backs = np.full_like(sends, np.inf)
    for index, parts in enumerate(replicas):
        for u, front in enumerate(units):
            for v, behind in enumerate(units):
                if u == v and len(front) == 1:
                    continue
                source, target = front[0], behind[1 if u == v else 0]
                there = costs.sends_s(source, target, round(1.0 / parts, 12))
                back = costs.sends_s(target, source, round(1.0 / parts, 12))
                if there is not None and back is not None:
                    sends[index, :, u, v], backs[index, :, u, v] = there, back
    whole = sends[0]
    alike = True
    for one in set(kinds):
        for other in set(kinds):
            rows = [u for u, k in enumerate(kinds) if k == one]
            columns = [v for v, k in enumerate(kinds) if k == other]
            block = whole[:, rows][:, :, columns]
            diagonal = np.eye(len(rows), len(columns), dtype=np.bool_) & (one == other)
            for values in (block[:, diagonal], block[:, ~diagonal]):
                alike = alike and (values.shape[1] == 0 or bool(np.all(values == values[:, :1])))
    return sends, backs, alike and _interchangeable(costs, units)


def _interchangeable(costs: PreparedCosts, units: Sequence[Tuple[str, ...]]) -> bool:
    """Whether all devices of a unit have the same links, those within it among them: the first ones stand for all."""
    if not any(link.source in costs.devices or link.target in costs.devices for link in costs.profile.links):
        return True  # every link is one of hosts
    for front in units:
        for behind in units:
            pairs = [(a, b) for a in front for b in behind if a != b]
            if any(costs.both_ways_s(*pair) != costs.both_ways_s(*pairs[0]) for pair in pairs[1:]):
                return False
    return True


def _without_cards(problem: Problem) -> Problem:
    costs = problem.costs
    if not costs.cards:
        return problem
    profile = msgspec.structs.replace(costs.profile, shared_cards=())
    return problem._replace(costs=PreparedCosts(costs.workload, profile, costs.schedule))


def _crowded(
    costs: PreparedCosts,
    units: Sequence[Tuple[str, ...]],
    replicas: Sequence[int],
    sends: FloatArray,
    backs: FloatArray,
) -> Tuple[FloatArray, FloatArray]:
    """The sends between units of two hosts while as many of their devices as there are replicas send at once."""
    if not costs.cards:
        return sends, backs
    outputs = np.array([layer.output_bytes for layer in costs.workload.layers])[None, :, None, None]
    out, into = (
        np.array(
            [
                [costs.cards.crowd_s_per_byte(role, unit[0], min(parts, len(unit)), 1.0 / parts) for unit in units]
                for parts in replicas
            ]
        )
        for role in ROLES
    )
    hosts = np.array([costs.devices[unit[0]].host for unit in units])
    apart = hosts[:, None] != hosts[None, :]
    there = np.maximum(out[:, :, None], into[:, None, :]) * apart
    back = np.maximum(into[:, :, None], out[:, None, :]) * apart
    sends = np.maximum(sends, outputs * there[:, None])
    return sends, backs if costs.schedule == "inference" else np.maximum(backs, outputs * back[:, None])


def _least_sends(
    ports: Sequence[Tuple[int, int]],
    replicas: Sequence[int],
    kinds: Sequence[int],
    sends: FloatArray,
    backs: FloatArray,
) -> Tuple[FloatArray, FloatArray]:
    layers = sends.shape[1]
    link = np.full((len(ports), len(ports), layers), np.inf)
    busy = np.full_like(link, np.inf)
    where = {kind: np.flatnonzero(np.array(kinds) == kind) for kind in set(kinds)}
    both, longer = sends + backs, np.maximum(sends, backs)
    for i, (one, parts) in enumerate(ports):
        for j, (other, others) in enumerate(ports):
            # Replicas in order of their samples: some pair exchanges the whole of the smaller share.
            share = replicas.index(max(parts, others))
            block = np.ix_(np.arange(layers), where[one], where[other])
            link[i, j] = both[share][block].reshape(layers, -1).min(axis=1)
            busy[i, j] = longer[share][block].reshape(layers, -1).min(axis=1)
    return link, busy
