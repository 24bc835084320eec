"""Turn a large cluster into arrays: like devices of a host as units, stages of whole units or parts."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from typing import Dict, List, NamedTuple, Sequence, Tuple

import msgspec
import numpy as np
import numpy.typing as npt

from hwaware.cluster import Link
from hwaware.costs import PreparedCosts
from hwaware.costs.cards import ROLES, Cards
from hwaware.costs.curves import FloatArray
from hwaware.costs.links import BestOfKinds, send_time_s
from hwaware.costs.prepared import device_row
from hwaware.costs.stages import StageTable, in_groups, stage_table
from hwaware.errors import PlanError
from hwaware.placement.problem import Problem
from hwaware.placement.ways import pinned, splits

IntArray = npt.NDArray[np.int64]
# Stages of any number of whole units are listed up to so many units of a type; beyond, of so many and then ever fewer.
MOST_LISTED, FEW_LISTED = 64, 16
# Larger clusters than this are searched part by part, each part so many times as large as the one before, and at first
# no smaller than this. Parts with more types of devices than this are not searched.
MOST_AT_ONCE, PART, LEAST_PART, MOST_TYPES = 512, 4, 64, 512
# More classes of sends than this are made fewer: links whose seconds differ by less than this logarithm are one.
MOST_CLASSES, LIKE_LINKS = 4096, 0.1


class Template(NamedTuple):
    """Build a stage of like devices: `replicas` groups of `group`, from part of one unit or several whole ones.

    Attributes:
        kind: Index of the type of the devices.
        devices: Number of devices.
        whole: Whole units that it takes; 0 for a part of one.
        replicas, group: Data- and tensor-parallel sizes.
        across: True if it takes its devices from the units by turns, not unit by unit.
    """

    kind: int
    devices: int
    whole: int
    replicas: int
    group: int
    across: bool = False


class Fleet(NamedTuple):
    """Hold units, templates, and their costs.

    Attributes:
        units: Device ids of each unit, in the profile's order.
        unit_kind: Type of each unit.
        counts: Devices of each type.
        templates: Ways to build a stage.
        tables: Costs of the templates, on the first units of their type.
        port: Number of each template's (type, replicas), on which its sends depend.
        share: Index of each template's share of a microbatch.
        link_s: [ports, ports, L] least sends there and back.
        between: [units, units] class of the sends from one unit to another.
        sends_s, backs_s: [shares, L, classes] while all replicas of a unit send through its shared cards. It is a guess
            for stages of several units and for tensor-parallel groups. All else, and so every bound, disregards cards,
            which only add to prices.
        uniform: True if units of one type cannot be told apart, so that tables and least sends hold for all.
        sizes_alike: True if all units of a type have equally many devices.
        complete: True if the templates are all that exist.
    """

    units: Tuple[Tuple[str, ...], ...]
    unit_kind: IntArray
    counts: IntArray
    templates: Tuple[Template, ...]
    tables: StageTable
    port: IntArray
    share: IntArray
    link_s: FloatArray
    between: IntArray
    sends_s: FloatArray
    backs_s: FloatArray
    uniform: bool
    sizes_alike: bool
    complete: bool

    def column(self, name: str) -> IntArray:
        """Return one attribute of all templates."""
        return np.array([getattr(template, name) for template in self.templates], dtype=np.int64)


def make_fleet(problem: Problem, until: float = math.inf) -> Fleet:
    """Return the problem's cluster as units and templates.

    Args:
        problem: The workload on the cluster.
        until: Time of `time.monotonic()` after which no further template is priced.

    Raises:
        UnusableInputError: A device was not measured with the workload's data type.
    """
    units, kinds = _units(problem)
    cards, costs = problem.costs.cards, problem.costs
    if cards:
        costs = costs.on(msgspec.structs.replace(costs.profile, shared_cards=()), costs.links, costs.measured_groups)
        problem = problem._replace(costs=costs)
    templates, tables, every = _templates(problem, _shapes(problem, units, kinds), until)
    replicas = sorted({template.replicas for template in templates})
    ports = sorted({(template.kind, template.replicas) for template in templates})
    sends = _sends(costs, cards, units, kinds, replicas)
    sizes = [{len(unit) for unit, k in zip(units, kinds) if k == kind} for kind in range(max(kinds) + 1)]
    return Fleet(
        units=tuple(units),
        unit_kind=np.array(kinds, dtype=np.int64),
        counts=np.array([sum(len(u) for u, k in zip(units, kinds) if k == kind) for kind in range(max(kinds) + 1)]),
        templates=tuple(templates),
        tables=tables,
        port=np.array([ports.index((t.kind, t.replicas)) for t in templates], dtype=np.int64),
        share=np.array([replicas.index(t.replicas) for t in templates], dtype=np.int64),
        link_s=_least_sends(ports, replicas, kinds, sends),
        between=sends.of_units,
        sends_s=sends.crowded_s[0],
        backs_s=sends.crowded_s[1],
        uniform=sends.alike and all(len(found) == 1 for found in sizes) and not costs.measured_groups,
        sizes_alike=all(len(found) == 1 for found in sizes),
        complete=every and int(np.bincount(kinds).max()) <= MOST_LISTED,
    )


def fastest_inside_hosts(costs: PreparedCosts) -> bool:
    """Return True if each host's inner links send outputs and gradients no slower than links between hosts.

    Replicas and groups then belong inside hosts. Measured collectives may say otherwise, so with any it is False.
    """
    if costs.measured_groups:
        return False
    names = list(costs.devices)
    places, links = costs.links.numbered(names)
    np.fill_diagonal(places, -1)
    _, hosts = np.unique([device.host for device in costs.profile.devices], return_inverse=True)
    same = hosts.reshape(-1)[:, None] == hosts.reshape(-1)[None, :]
    inside, between = (np.unique(places[(places >= 0) & one]).tolist() for one in (same, ~same))
    layers = costs.workload.layers
    sent_bytes = costs.outputs_bytes, np.array([float(layer.gradient_size_bytes) for layer in layers])
    return all(
        max((_whole_s(links[place], nbytes) for place in inside), default=0.0)
        <= min((_whole_s(links[place], nbytes) for place in between), default=np.inf)
        for nbytes in sent_bytes
    )


def _whole_s(link: Link, nbytes: FloatArray) -> float:
    """Return the seconds of one message a layer, one after the other, head starts aside."""
    if not link.samples:  # clusters have such links by the hundred thousand
        return len(nbytes) * link.latency_s + float(nbytes.sum()) / link.bandwidth_bytes_per_s
    return float(send_time_s(link, nbytes).sum())


def optimistic(costs: PreparedCosts) -> PreparedCosts:
    """Return the costs with every link as good as the best one between devices of the same two kinds.

    Links inside hosts and between them stay apart. No pipeline takes longer on it; once-per-step work of stages but the
    first may be hidden less (see `hwaware.placement.kinds.monotone`).
    """
    return costs.on(costs.profile, BestOfKinds(costs.profile), costs.measured_groups.least())


def like_parts(problem: Problem) -> List[Problem]:
    """Return the problem on 1, 2, 4 ... like devices, host by host, and on all of each type; the smallest first.

    Each part has the devices that something is pinned to. More devices cost communication, so throughput per device is
    best on few devices; memory decides how few.
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
        parts.append(problem._replace(costs=problem.costs.on(profile)))
    return parts


def growing_parts(problem: Problem) -> List[Problem]:
    """Return the problem on ever larger parts of a large cluster, each inside the next, and on all of it.

    A part takes hosts of all types by turns, fast types first, so that it has the cluster's mix.
    """
    costs = problem.costs
    if len(costs.devices) <= MOST_AT_ONCE:
        return [problem]
    hosts: Dict[str, List[str]] = {}
    for device in costs.profile.devices:
        hosts.setdefault(device.host, []).append(device.id)
    types: Dict[object, List[str]] = {}
    for host, names in hosts.items():
        records = [costs.devices[name] for name in names]
        types.setdefault(tuple((device.kind, device.memory_bytes) for device in records), []).append(host)

    by_turns = itertools.zip_longest(*sorted(types.values(), key=lambda names: costs.whole_s(hosts[names[0]][0])))
    pinned_to = {costs.devices[name].host for names in problem.pins.values() for name in names}
    ordered = [*pinned_to, *(host for turn in by_turns for host in turn if host is not None and host not in pinned_to)]
    reached = np.cumsum([len(hosts[host]) for host in ordered])
    parts = []
    size = len(costs.devices) // PART
    while size >= LEAST_PART:
        count = max(int(np.searchsorted(reached, size, side="right")), len(pinned_to), 1)
        with contextlib.suppress(ValueError):  # what remains is not connected
            parts.append(problem._replace(costs=costs.on(costs.profile.without(tuple(ordered[count:])))))
        size //= PART
    searchable = [part for part in (*reversed(parts), problem) if len(set(_units(part)[1])) <= MOST_TYPES]
    return searchable or [problem]


def _units(problem: Problem) -> Tuple[List[Tuple[str, ...]], List[int]]:
    costs = problem.costs
    rows: Dict[object, int] = {}
    found: Dict[Tuple[int, str], List[str]] = {}
    for device in costs.profile.devices:
        row = (*device_row(device, costs.workload.dtype), *problem.pin_row(device.id))
        found.setdefault((rows.setdefault(row, len(rows)), device.host), []).append(device.id)
    ordered = sorted(found.items(), key=lambda item: item[0][0])
    return [tuple(names) for _, names in ordered], [key[0] for key, _ in ordered]


def ways_to_build(problem: Problem) -> int:
    """Return the most templates that the fleet can have."""
    return len(_shapes(problem, *_units(problem)))


def _shapes(
    problem: Problem, units: Sequence[Tuple[str, ...]], kinds: Sequence[int]
) -> List[Tuple[Template, Tuple[str, ...]]]:
    """Return all templates that the rules of stages allow, each with the first devices of its type."""
    costs = problem.costs
    samples, split = costs.workload.microbatch_size, splits(costs.workload)
    found = []
    for kind in range(max(kinds) + 1):
        own = sorted((unit for unit, k in zip(units, kinds) if k == kind), key=lambda unit: -len(unit))
        as_fast = _as_fast_between(costs, own)
        # Tensor-parallel groups are runs of these names: across units where that is faster than inside one. Alpa
        # goes through its hosts one after the other.
        across = problem.target == "any" and as_fast
        alike = [unit for unit in own if len(unit) == len(own[0])]
        shapes = [(count, 0) for count in range(1, len(own[0]) + 1)]
        shapes += [(whole * len(own[0]), whole) for whole in range(2, len(alike) + 1) if _counts(whole, len(alike))]
        for count, whole in shapes:
            rows: Sequence[Tuple[str, ...]] = alike[: max(1, whole)]
            names = tuple(name for row in (zip(*rows) if across and whole else rows) for name in row)[:count]
            for replicas in range(1, min(count, samples) + 1):
                group = count // replicas
                if count % replicas or samples % replicas or (group > 1 and not split):
                    continue
                if group > len(own[0]) and not as_fast:
                    continue
                if problem.most_devices is None or count <= problem.most_devices:
                    found.append((Template(kind, count, whole, replicas, group, across and whole > 0), names))
    return found


def _counts(whole: int, units: int) -> bool:
    """Return True if the search lists stages of so many units: ever fewer numbers above `MOST_LISTED`."""
    return units <= MOST_LISTED or whole <= FEW_LISTED or whole % (1 << (whole.bit_length() - 4)) == 0


def _templates(
    problem: Problem, shapes: Sequence[Tuple[Template, Tuple[str, ...]]], until: float
) -> Tuple[List[Template], StageTable, bool]:
    """Return all templates that can be built, their costs, and if time sufficed."""
    every = True
    templates: List[Template] = []
    made = []
    for template, names in shapes:
        every = not templates or time.monotonic() < until
        if not every:
            break
        try:
            placed = in_groups(names, template.group)
            table = stage_table(placed, problem.costs, problem.num_microbatches, replicas_alike=True)
            made.append(pinned(table, problem, placed))
        except PlanError:  # no link between devices of the stage
            continue
        templates.append(template)
    return templates, StageTable.stacked(made), every


def _as_fast_between(costs: PreparedCosts, units: Sequence[Tuple[str, ...]]) -> bool:
    """Return True if a link joins the first units of a type that is no slower than those inside."""
    if len(units) < 2:
        return False
    sends_s = costs.without_head_starts.sends_s  # a head start hides which link is faster
    between = sends_s(units[0][0], units[1][0])
    inside = sends_s(units[0][0], units[0][1]) if len(units[0]) > 1 else None
    return between is not None and (inside is None or sum(between) <= sum(inside))


class _Sends(NamedTuple):
    """Hold sends between units, like ones as one class.

    Attributes:
        of_units: [units, units] class of the sends from one unit to another; on the diagonal, inside a unit.
        alone_s: There and back, [shares, L, classes]; infinite without a link.
        crowded_s: The same while as many devices of a unit as replicas send through its shared cards.
        alike: True if they do not tell units of one type apart.
    """

    of_units: IntArray
    alone_s: Tuple[FloatArray, FloatArray]
    crowded_s: Tuple[FloatArray, FloatArray]
    alike: bool


def _sends(
    costs: PreparedCosts,
    cards: Cards,
    units: Sequence[Tuple[str, ...]],
    kinds: Sequence[int],
    replicas: Sequence[int],
) -> _Sends:
    """Return the sends between the first devices of units (inside: the first two of one)."""
    firsts, kind = [unit[0] for unit in units], np.array(kinds, dtype=np.int64)
    numbers = costs.link_numbers(firsts)
    np.fill_diagonal(numbers, -1)
    backs = numbers.T.copy()
    for u, unit in enumerate(units):
        if len(unit) > 1 and costs.links.between(unit[0], unit[1]) is not None:
            numbers[u, u], backs[u, u] = (costs.link_number(costs.link(*pair)) for pair in (unit[:2], unit[1::-1]))
    # A message is exposed by what its target gains by waiting, which differs by type.
    more = [kind[:, None], kind[None, :]] if any(d.head_start_s for d in costs.profile.devices) else []
    hosts = np.array([costs.devices[name].host for name in firsts])
    apart = hosts[:, None] != hosts[None, :]
    # [roles, shares, units] what cards need for a byte while as many of a unit's devices send as there are replicas.
    crowds = np.array([
        [[cards.crowd_s_per_byte(role, unit[0], min(n, len(unit)), 1.0 / n) for unit in units] for n in replicas]
        for role in ROLES
    ])  # fmt: skip
    if cards:
        alike_cards = np.unique(crowds.reshape(-1, len(units)), axis=1, return_inverse=True)[1].reshape(-1)
        more += [alike_cards[:, None], alike_cards[None, :], apart]
    of_units, ends = _classes([numbers, backs, *more])
    alike = len(ends) <= MOST_CLASSES
    if not alike:
        # Links by their seconds, those within a tenth of each other as one.
        links = costs.links.numbered(firsts)[1]
        seconds = {costs.link_number(link): _whole_s(link, costs.outputs_bytes) for link in links}
        lookup = np.full(max(seconds) + 2, np.iinfo(np.int64).min, dtype=np.int64)
        for number, whole_s in seconds.items():
            lookup[number] = round(math.log(max(whole_s, 1e-12)) / LIKE_LINKS)
        of_units, ends = _classes([lookup[numbers], lookup[backs], *more])
    there, back = (np.full((len(replicas), len(costs.workload.layers), len(ends)), np.inf) for _ in range(2))
    for number, (u, v) in enumerate(ends.tolist()):
        if u == v and len(units[u]) == 1:
            continue
        source, target = units[u][0], units[v][1 if u == v else 0]
        for index, parts in enumerate(replicas):
            both = costs.both_ways_s(source, target, round(1.0 / parts, 12))
            if both is not None:
                there[index, :, number], back[index, :, number] = both
    for one in set(kinds):
        for other in set(kinds):
            block = of_units[np.ix_(np.flatnonzero(kind == one), np.flatnonzero(kind == other))]
            diagonal = np.eye(len(block), block.shape[1], dtype=np.bool_) & (one == other)
            for classes in (np.unique(block[diagonal]), np.unique(block[~diagonal])):
                values = there[0][:, classes]
                alike = alike and (values.shape[1] == 0 or bool(np.all(values == values[:, :1])))
    crowded, crowded_back = there, back
    if cards:
        (out, into), (u, v) = crowds[:, :, None], ends.T
        outputs = costs.outputs_bytes[None, :, None] * apart[u, v]
        crowded = np.maximum(there, outputs * np.maximum(out[..., u], into[..., v]))
        crowded_back = np.maximum(back, outputs * np.maximum(into[..., u], out[..., v]))
    if costs.schedule == "inference":
        back = crowded_back = np.where(np.isfinite(back), 0.0, np.inf)
    return _Sends(of_units, (there, back), (crowded, crowded_back), alike and _interchangeable(costs, units))


def _classes(keys: Sequence[IntArray]) -> Tuple[IntArray, IntArray]:
    """Give pairs of units with equal keys one number, [units, units]; return a pair of each number too."""
    classes = np.zeros((len(keys[0]), len(keys[0])), dtype=np.int64)
    for key in keys:
        numbers = np.unique(key, return_inverse=True)[1].reshape(key.shape)
        _, firsts, inverse = np.unique(
            classes * (int(numbers.max()) + 1) + numbers, return_index=True, return_inverse=True
        )
        classes = inverse.reshape(classes.shape)
    return classes, np.stack(np.unravel_index(firsts, classes.shape), axis=1)


def _interchangeable(costs: PreparedCosts, units: Sequence[Tuple[str, ...]]) -> bool:
    """Return True if all devices of a unit have the same links, so that the first ones stand for all."""
    if not costs.links.by_device:
        return True
    numbers = costs.link_numbers([name for unit in units for name in unit])
    of = np.repeat(np.arange(len(units)), [len(unit) for unit in units])
    apart = ~np.eye(len(of), dtype=np.bool_)
    blocks = (of[:, None] * len(units) + of[None, :])[apart]
    for one in (numbers[apart], numbers.T[apart]):
        least, most = np.full(len(units) ** 2, np.iinfo(np.int64).max), np.full(len(units) ** 2, -1)
        np.minimum.at(least, blocks, one)
        np.maximum.at(most, blocks, one)
        if np.any((least < most) & (most >= 0)):
            return False
    return True


def _least_sends(
    ports: Sequence[Tuple[int, int]], replicas: Sequence[int], kinds: Sequence[int], sends: _Sends
) -> FloatArray:
    """Return the least sends there and back, [ports, ports, L]."""
    both = np.add(*sends.alone_s)
    link = np.full((len(ports), len(ports), both.shape[1]), np.inf)
    where = {kind: np.flatnonzero(np.array(kinds) == kind) for kind in set(kinds)}
    classes = {(a, b): np.unique(sends.of_units[np.ix_(where[a], where[b])]) for a in where for b in where}
    for i, (one, parts) in enumerate(ports):
        for j, (other, others) in enumerate(ports):
            # Replicas in order of their samples: some pair exchanges the whole of the smaller share.
            share = replicas.index(max(parts, others))
            link[i, j] = both[share][:, classes[one, other]].min(axis=1)
    return link
