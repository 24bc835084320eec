"""Turn a large cluster into arrays: like devices of a host as units, stages of whole units or parts."""

from __future__ import annotations

import itertools
import math
from typing import Dict, List, NamedTuple, Sequence, Tuple

import msgspec
import numpy as np

from hwaware.cluster import Link
from hwaware.costs import PreparedCosts
from hwaware.costs.cards import ROLES, Cards
from hwaware.costs.curves import FloatArray, IntArray
from hwaware.costs.links import BestOfKinds, send_time_s
from hwaware.costs.memory import all_in_flight
from hwaware.costs.prepared import device_row
from hwaware.costs.stages import StageTable, in_groups
from hwaware.placement.problem import Problem
from hwaware.placement.scale_kernels import Stages, Units, Ways
from hwaware.placement.ways import splits, with_tables

# Stages of any number of whole units are listed up to so many units of a type; beyond, of so many and then ever fewer.
MOST_LISTED, FEW_LISTED = 64, 16
# Larger clusters than this are searched part by part, each part so many times as large as the one before, and at first
# no smaller than this. Parts with more types of devices than this are not searched.
MOST_AT_ONCE, PART, LEAST_PART, MOST_TYPES = 512, 4, 64, 512
# More classes of sends than this are made fewer: links whose seconds differ by less than this logarithm are one.
MOST_CLASSES, LIKE_LINKS = 4096, 0.1


class Template(NamedTuple):
    """Build a stage of like devices: `replicas` groups of `group`, from part of one unit or several whole ones."""

    kind: int  # index of the type of the devices
    devices: int  # how many
    whole: int  # whole units that it takes; 0 for a part of one
    replicas: int  # data-parallel
    group: int  # tensor-parallel
    across: bool = False  # takes its devices from the units by turns, not unit by unit


class Fleet(NamedTuple):
    """Hold units, templates, and their costs.

    Sends count while all replicas of a unit send through its shared cards. That is a guess for stages of several units
    and for tensor-parallel groups. All else, and so every bound, disregards cards, which only add to prices. Head
    starts, which only take from them, count nowhere.
    """

    units: Tuple[Tuple[str, ...], ...]  # device ids of each unit, in the profile's order
    counts: IntArray  # devices of each type
    templates: Tuple[Template, ...]  # ways to build a stage
    tables: StageTable  # costs of the templates, on the first units of their type
    ways: Ways  # the templates as the kernels read them
    stages: Stages  # that have as much memory as one microbatch needs
    of_units: Units  # the units as the kernels read them
    least_s: FloatArray  # [there or back, ports, ports, L] the least between templates
    sizes_alike: bool  # all units of a type have equally many devices
    complete: bool  # the templates are all that exist


def make_fleet(problem: Problem, until: float = math.inf) -> Fleet:
    """Return the problem's cluster as units and templates; price none of these after `until` (`time.monotonic()`)."""
    types = _types(problem)
    units = [unit for own in types for unit in own]
    kinds = np.repeat(np.arange(len(types)), [len(own) for own in types])
    cards, costs = problem.costs.cards, problem.costs.without_head_starts
    if cards:
        costs = costs.on(msgspec.structs.replace(costs.profile, shared_cards=()), costs.links, costs.measured_groups)
    problem = problem._replace(costs=costs)
    shapes = ((template, in_groups(names, template.group)) for template, names in _shapes(problem, types))
    templates, tables, every = with_tables(shapes, problem, True, until)
    replicas = sorted({template.replicas for template in templates})
    ports = sorted({(template.kind, template.replicas) for template in templates})
    sends = _sends(costs, cards, units, kinds, replicas)
    sizes_alike = all(len({len(unit) for unit in own}) == 1 for own in types)
    uniform = sends.alike and sizes_alike and not costs.measured_groups
    (sends_s, backs_s), least_s = sends.crowded_s, _least_sends(ports, replicas, kinds, sends)
    if problem.objective == "alpa":  # counts neither sends nor what happens once a step
        tables = tables._replace(per_step_s=np.zeros_like(tables.per_step_s))
        sends_s = backs_s = np.where(np.isfinite(sends_s), 0.0, np.inf)
        least_s = np.where(np.isfinite(least_s), 0.0, np.inf)
    size = np.array([len(unit) for unit in units])
    held = all_in_flight(costs.schedule, problem.num_microbatches, len(costs.workload.layers) + 1)
    return Fleet(
        units=tuple(units),
        counts=np.bincount(kinds, weights=size).astype(np.int64),
        templates=tuple(templates),
        tables=tables,
        ways=Ways(
            link=least_s.sum(axis=0),
            port=np.array([ports.index((t.kind, t.replicas)) for t in templates], dtype=np.int64),
            kind=np.array([t.kind for t in templates], dtype=np.int64),
            devices=np.array([t.devices for t in templates], dtype=np.int64),
            whole=np.array([t.whole for t in templates], dtype=np.int64),
            share=np.array([replicas.index(t.replicas) for t in templates], dtype=np.int64),
            in_flight=np.array(held[::-1], dtype=np.float64),
        ),
        stages=_stages(tables),
        of_units=Units(
            kind=kinds,
            size=size,
            like=np.unique([kinds, size], axis=1, return_inverse=True)[1].reshape(-1),
            first=np.searchsorted(kinds, np.arange(len(types) + 1)),
            between=sends.of_units,
            there=sends_s,
            back=backs_s,
            alike=uniform,
        ),
        least_s=least_s,
        sizes_alike=sizes_alike,
        complete=every and max(map(len, types)) <= MOST_LISTED,
    )


def _stages(tables: StageTable) -> Stages:
    """Return all stages that have as much memory as one microbatch needs."""
    o, first, end = np.nonzero(np.triu(tables.most_in_flight >= 1, 1))
    order = np.argsort(end, kind="stable")  # for each layer after the last, by template
    own = o[order], first[order], end[order]
    f, b, once, most = tables.forward_s[own], tables.backward_s[own], tables.per_step_s[own], tables.most_in_flight[own]
    at = np.searchsorted(own[2], np.arange(tables.forward_s.shape[2] + 1))
    rows = np.stack([own[1], own[2], own[0]], axis=1)
    return Stages(at, rows, f + b, np.maximum(f, b), most, np.where(own[1] == 0, once, 0.0))


def fastest_inside_hosts(costs: PreparedCosts) -> bool:
    """Return True if each host's inner links send outputs and gradients no slower than links between hosts.

    Replicas and groups then belong inside hosts. Measured collectives may say otherwise, so with any it is False.
    """
    if costs.measured_groups:
        return False
    names = list(costs.devices)
    places, links = costs.links.numbered(names)
    np.fill_diagonal(places, -1)
    same = costs.links.on_one_host(names)
    inside, between = (np.unique(places[(places >= 0) & one]).tolist() for one in (same, ~same))
    return all(
        max((_whole_s(links[place], nbytes) for place in inside), default=0.0)
        <= min((_whole_s(links[place], nbytes) for place in between), default=np.inf)
        for nbytes in (costs.outputs_bytes, costs.summed_bytes(1))
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

    Each part also has as many devices for each pin. More devices cost communication, so throughput per device is best
    on few devices; memory decides how few.
    """
    everything = [device.id for device in problem.costs.profile.devices]
    left_out: Dict[Tuple[str, ...], None] = {}
    for own in _types(problem):
        wanted = [tuple(name for unit in own for name in unit), *problem.pins.values()]
        for k in range(max(map(len, wanted)).bit_length() + 1):
            kept = {name for names in wanted for name in names[: 1 << k]}
            left_out[tuple(name for name in everything if name not in kept)] = None
    return [part for gone in sorted(left_out, key=len, reverse=True) for part in _without(problem, gone)]


def _without(problem: Problem, gone: Sequence[str]) -> List[Problem]:
    """Return the problem without these hosts or devices; no problem if the rest is not connected."""
    try:
        return [problem._replace(costs=problem.costs.on(problem.costs.profile.without(tuple(gone))))]
    except ValueError:
        return []


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
        row = tuple((costs.devices[name].kind, costs.devices[name].memory_bytes) for name in names)
        types.setdefault(row, []).append(host)
    by_turns = itertools.zip_longest(*sorted(types.values(), key=lambda names: costs.whole_s(hosts[names[0]][0])))
    pinned_to = {costs.devices[name].host for names in problem.pins.values() for name in names}
    ordered = [*pinned_to, *(host for turn in by_turns for host in turn if host is not None and host not in pinned_to)]
    reached = np.cumsum([len(hosts[host]) for host in ordered])
    parts, size = [problem], len(costs.devices) // PART
    while size >= LEAST_PART:
        count = max(int(np.searchsorted(reached, size, side="right")), len(pinned_to), 1)
        parts += _without(problem, ordered[count:])
        size //= PART
    return [part for part in reversed(parts) if len(_types(part)) <= MOST_TYPES] or [problem]


def _types(problem: Problem) -> List[List[Tuple[str, ...]]]:
    """Return the units of each type of device."""
    found: Dict[object, Dict[str, List[str]]] = {}
    for device in problem.costs.profile.devices:
        row = (*device_row(device, problem.costs.workload.dtype), *problem.pin_row(device.id))
        found.setdefault(row, {}).setdefault(device.host, []).append(device.id)
    return [[tuple(names) for names in hosts.values()] for hosts in found.values()]


def ways_to_build(problem: Problem) -> int:
    """Return the most templates that the fleet can have."""
    return len(_shapes(problem, _types(problem)))


def _shapes(problem: Problem, types: Sequence[Sequence[Tuple[str, ...]]]) -> List[Tuple[Template, Tuple[str, ...]]]:
    """Return all templates that the rules of stages allow, each with the first devices of its type."""
    costs = problem.costs
    samples, split = costs.workload.microbatch_size, splits(costs)
    found = []
    for kind, units in enumerate(types):
        own = sorted(units, key=lambda unit: -len(unit))
        as_fast = _as_fast_between(costs, own)
        # Tensor-parallel groups are runs of these names: across units where that is faster than inside one. Alpa
        # goes through its hosts one after the other.
        across = problem.target == "any" and as_fast
        alike = [unit for unit in own if len(unit) == len(own[0])]
        shapes = [(count, 0) for count in range(1, len(own[0]) + 1)]
        for whole in range(2, len(alike) + 1):  # ever fewer numbers of units above `MOST_LISTED`
            if len(alike) <= MOST_LISTED or whole <= FEW_LISTED or whole % (1 << (whole.bit_length() - 4)) == 0:
                shapes.append((whole * len(own[0]), whole))
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


def _as_fast_between(costs: PreparedCosts, units: Sequence[Tuple[str, ...]]) -> bool:
    """Return True if a link joins the first units of a type that is no slower than those inside."""
    if len(units) < 2:
        return False
    sends_s = costs.without_head_starts.sends_s  # a head start hides which link is faster
    between = sends_s(units[0][0], units[1][0])
    inside = sends_s(units[0][0], units[0][1]) if len(units[0]) > 1 else None
    return between is not None and (inside is None or sum(between) <= sum(inside))


class _Sends(NamedTuple):
    """Hold sends between units, like ones as one class."""

    of_units: IntArray  # [units, units] class of the sends from one unit to another; on the diagonal, inside a unit
    alone_s: Tuple[FloatArray, FloatArray]  # there and back, [shares, L, classes]; infinite without a link
    crowded_s: Tuple[FloatArray, FloatArray]  # while as many devices of a unit as replicas send through its cards
    alike: bool  # they do not tell units of one type apart


def _sends(
    costs: PreparedCosts, cards: Cards, units: Sequence[Tuple[str, ...]], kind: IntArray, replicas: Sequence[int]
) -> _Sends:
    """Return the sends between the first devices of units (inside: the first two of one)."""
    firsts = [unit[0] for unit in units]
    numbers = costs.link_numbers(firsts)
    np.fill_diagonal(numbers, -1)
    backs = numbers.T.copy()
    for u, unit in enumerate(units):
        if len(unit) > 1 and costs.links.between(unit[0], unit[1]) is not None:
            numbers[u, u], backs[u, u] = (costs.link_number(costs.link(*pair)) for pair in (unit[:2], unit[1::-1]))
    apart = ~costs.links.on_one_host(firsts)
    # [roles, shares, units] seconds a byte on cards while as many of a unit's devices as replicas send.
    crowds = np.array([
        [[cards.crowd_s_per_byte(role, unit[0], min(n, len(unit)), 1.0 / n) for unit in units] for n in replicas]
        for role in ROLES
    ])  # fmt: skip
    more: List[IntArray] = []
    if cards:
        alike_cards = np.unique(crowds.reshape(-1, len(units)), axis=1, return_inverse=True)[1].reshape(-1)
        more = [alike_cards[:, None], alike_cards[None, :], apart.astype(np.int64)]
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
    for one, other in itertools.product(range(int(kind.max()) + 1), repeat=2):
        block = of_units[np.ix_(np.flatnonzero(kind == one), np.flatnonzero(kind == other))]
        diagonal = np.eye(len(block), block.shape[1], dtype=np.bool_) & (one == other)
        # By links, not seconds: outputs without bytes would hide unlike rates, which gradient sums feel.
        alike = alike and max(len(np.unique(block[diagonal])), len(np.unique(block[~diagonal]))) < 2
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
    least, most = np.full(len(units) ** 2, np.iinfo(np.int64).max), np.full(len(units) ** 2, -1)
    np.minimum.at(least, blocks, numbers[apart])
    np.maximum.at(most, blocks, numbers[apart])
    return not np.any(least < most)


def _least_sends(
    ports: Sequence[Tuple[int, int]], replicas: Sequence[int], kinds: IntArray, sends: _Sends
) -> FloatArray:
    """Return the least sends there and the least back, [2, ports, ports, L]."""
    both = np.stack(sends.alone_s)
    least = np.full((2, len(ports), len(ports), both.shape[2]), np.inf)
    where = [np.flatnonzero(kinds == kind) for kind in range(int(kinds.max()) + 1)]
    classes = [[np.unique(sends.of_units[np.ix_(a, b)]) for b in where] for a in where]
    for i, (one, parts) in enumerate(ports):
        for j, (other, others) in enumerate(ports):
            # Replicas in order of their samples: some pair exchanges the whole of the smaller share.
            share = replicas.index(max(parts, others))
            least[:, i, j] = both[:, share][..., classes[one][other]].min(axis=-1)
    return least
