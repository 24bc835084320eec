"""Compile the inner loops of the search for large clusters, in one file: numba's cache watches no other."""

from __future__ import annotations

from typing import Any, NamedTuple, Tuple

import numpy as np
from numba import njit


class Ways(NamedTuple):
    """Hold ways to build a stage from like devices ("templates"), and the sends between them.

    Sends depend on a port: the kind of the devices and the number of replicas.
    """

    link: Any  # [front port, port behind, layer in front of the cut] least of a microbatch there and back
    port: Any  # [template]
    kind: Any  # [template] this and the next three as in `hwaware.placement.fleet`
    devices: Any  # [template]
    whole: Any  # [template]
    share: Any  # [template]
    in_flight: Any  # microbatches that a stage has in flight, by the stages behind it


class Stages(NamedTuple):
    """Hold stages that a pipeline may have, in order of the layer after their last."""

    at: Any  # [L + 2] first stage of each such layer, and behind them the number of stages
    rows: Any  # [stage] (first layer, layer after the last, template)
    turn: Any  # [stage] f + b, in s
    longer: Any  # [stage] max(f, b)
    most: Any  # [stage] microbatches in flight that fit into its memory
    once: Any  # [stage] once a step of a stage with the first layer, 0 for all others

    def only(self, kept: Any) -> Stages:
        """Return the stages of this mask."""
        _, rows, *values = (column[kept] if k else column for k, column in enumerate(self))
        return Stages(np.searchsorted(rows[:, 1], np.arange(len(self.at))), rows, *values)


class Units(NamedTuple):
    """Hold like devices of one host each ("units"), and the sends between them."""

    kind: Any  # [unit] type of its devices
    size: Any  # [unit] number of its devices
    like: Any  # [unit] equal for units of equal kind and size
    first: Any  # [kind] first unit of each kind, and behind them the number of units
    between: Any  # [unit, unit] class of the sends from one to another
    there: Any  # [share, L, class] of a microbatch's outputs
    back: Any  # [share, L, class] of its gradients
    alike: bool  # units of one kind cannot be told apart: tables and least sends hold for all


class BeamLabels(NamedTuple):
    """Hold rear parts of pipelines; those that begin at a cut have `room` rows from cut x room."""

    integers: Any  # [label] (first, end, template, unit, parent, stages)
    sums: Any  # [label] of its stages, sends and prices of devices
    score: Any  # [label] the sum, and the least cost still to come
    used: Any  # [label, unit] devices that it uses
    counts: Any  # [L + 1] labels of each cut
    worst: Any  # [L + 1] score from which on a cut keeps no label


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def least_priced(w: Ways, s: Stages, price: Any, low: float, high: float, rules: Any) -> Tuple[float, Any, Any]:
    """Return the least bound on the step over all pipelines, devices at their prices, slowest stage in [low, high].

    `rules` says how stages count. One in front of the slowest counts c + sends, one behind it `weight` (c + sends) -
    `less`. The slowest counts `bottleneck` + `per_longer` x max(f, b). `price` is that of all devices of each template.

    Returns:
        The value, the stages as rows of (first, end, template), and the least cost in front of each cut. The last
            includes the send: [without or with the slowest stage, L + 1, ports behind].
    """
    layers, ports, fewest = s.at.shape[0] - 2, w.link.shape[0], _fewest_behind(s, high)
    value, came_from = np.full((2, layers + 1, ports), np.inf), np.zeros((2, layers + 1, ports), dtype=np.int64)
    at_port = np.full((2, layers + 1, ports), np.inf)  # the best with a stage of this port behind
    at_port[0, 0] = 0.0
    for end in range(1, layers + 1):
        for k in range(s.at[end], s.at[end + 1]):
            if s.turn[k] <= high and s.most[k] >= w.in_flight[fewest[end]]:
                first, o = s.rows[k, 0], s.rows[k, 2]
                own, (before, slowest, behind) = w.port[o], _added(s, k, price[o], low, rules)
                for phase, then, added in ((0, 0, before), (0, 1, slowest), (1, 1, behind)):
                    if at_port[phase, first, own] + added < value[then, end, own]:
                        value[then, end, own] = at_port[phase, first, own] + added
                        came_from[then, end, own] = 2 * k + phase
        for phase in range(2 if end < layers else 0):
            for front in range(ports):
                if value[phase, end, front] < np.inf:
                    send = (rules[0] if phase else 1.0) * w.link[front, :, end - 1]
                    at_port[phase, end] = np.minimum(at_port[phase, end], value[phase, end, front] + send)
    port = int(np.argmin(value[1, layers]))
    best, stages = value[1, layers, port], np.empty((layers, 3), dtype=np.int64)
    count, end, phase = 0, layers, 1
    while end > 0 and best < np.inf:
        k, phase = came_from[phase, end, port] // 2, came_from[phase, end, port] % 2
        stages[count] = s.rows[k]
        count, end = count + 1, s.rows[k, 0]
        if end > 0:
            weight = rules[0] if phase else 1.0
            port = int(np.argmin(value[phase, end] + weight * w.link[:, port, end - 1]))
    return best, stages[:count][::-1].copy(), at_port


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def _fewest_behind(s: Stages, high: float) -> Any:
    """Return the fewest stages that follow each cut."""
    layers = s.at.shape[0] - 2
    fewest = np.full(layers + 1, layers)
    fewest[layers] = 0
    for k in range(s.turn.shape[0] - 1, -1, -1):
        first, end = s.rows[k, 0], s.rows[k, 1]
        if s.turn[k] <= high and fewest[end] + 1 < fewest[first]:
            fewest[first] = fewest[end] + 1
    return fewest


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def _added(s: Stages, k: int, price: float, low: float, rules: Any) -> Tuple[float, float, float]:
    """Return what a stage adds in front of the slowest, as the slowest, and behind it; see `least_priced`."""
    (weight, less, bottleneck, per_longer), c, once = rules, s.turn[k], price + s.once[k]
    slowest = once + bottleneck + per_longer * s.longer[k] if c >= low else np.inf
    return once + c, slowest, once + weight * c - less


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def least_through(w: Ways, s: Stages, price: Any, low: float, high: float, rules: Any, at_port: Any) -> Any:
    """Return for each stage the least of `least_priced` over the pipelines that have it."""
    layers, ports, fewest = s.at.shape[0] - 2, w.link.shape[0], _fewest_behind(s, high)
    least, value = np.full(s.turn.shape[0], np.inf), np.full((2, layers + 1, ports), np.inf)
    at_front = value.copy()  # the least cost behind each cut, without or with the slowest stage, and the send to it
    at_front[0, layers] = 0.0
    for end in range(layers, 0, -1):
        for phase in range(2 if end < layers else 0):
            for port in range(ports):
                if value[phase, end, port] < np.inf:
                    send = (1.0 if phase else rules[0]) * w.link[:, port, end - 1]
                    at_front[phase, end] = np.minimum(at_front[phase, end], value[phase, end, port] + send)
        for k in range(s.at[end], s.at[end + 1]):
            if s.turn[k] <= high and s.most[k] >= w.in_flight[fewest[end]]:
                first, o = s.rows[k, 0], s.rows[k, 2]
                port, (before, slowest, behind) = w.port[o], _added(s, k, price[o], low, rules)
                with_it = min(before + at_front[1, end, port], slowest + at_front[0, end, port])
                behind += at_front[0, end, port]
                least[k] = min(at_port[0, first, port] + with_it, at_port[1, first, port] + behind)
                value[0, first, port] = min(value[0, first, port], behind)
                value[1, first, port] = min(value[1, first, port], with_it)
    return least


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def pipelines_below(
    limit: float, most: int, w: Ways, s: Stages, prices: Any, counts: Any, low: float, high: float, rules: Any,
    at_port: Any,
) -> Tuple[Any, Any, Any]:  # fmt: skip
    """Return all pipelines below `limit` that have enough devices, built from the last stage to the first.

    Rear parts grow while their costs, prices and the costs in front by `at_port` of `least_priced` stay below it.

    Returns:
        The bound of each pipeline without prices, its last added part, and all parts. Column 1 of a part is its first
            stage, column 2 the part behind. More than `most` parts give one bound, -infinity, and no pipeline.
    """
    layers, paid, spent = s.at.shape[0] - 2, prices[w.kind] * w.devices, (prices * counts).sum()
    parts, last, fill = np.empty((most, 5), dtype=np.int64), np.full(layers + 1, -1), 1
    used, value = np.empty((most, len(counts)), dtype=np.int64), np.empty(most)
    parts[0], used[0], value[0], last[layers] = (-1, -1, -1, 0, 0), 0, 0.0, 0
    for cut in range(layers, 0, -1):
        part = last[cut]
        while part >= 0:
            phase, position = parts[part, 3], parts[part, 4]
            for k in range(s.at[cut], s.at[cut + 1]):
                first, o = s.rows[k, 0], s.rows[k, 2]
                kind, port, total = w.kind[o], w.port[o], value[part]
                enough = used[part, kind] + w.devices[o] <= counts[kind] and s.most[k] >= w.in_flight[position]
                if not enough or s.turn[k] > high:
                    continue
                if cut < layers:
                    total += (1.0 if phase else rules[0]) * w.link[port, w.port[s.rows[parts[part, 1], 2]], cut - 1]
                before, slowest, behind = _added(s, k, paid[o], low, rules)
                for then in range(phase, 2):
                    after = total + (before if phase == 1 else slowest if then == 1 else behind)
                    if after + at_port[1 - then, first, port] - spent < limit:
                        if fill == most:
                            return np.full(1, -np.inf), last[:0], parts
                        parts[fill] = (last[first], k, part, then, position + 1)
                        used[fill], value[fill] = used[part], after
                        used[fill, kind] += w.devices[o]
                        last[first], fill = fill, fill + 1
            part = parts[part, 0]
    done, count, part = np.empty(fill, dtype=np.int64), 0, last[0]
    while part >= 0:
        done[count], count, part = part, count + 1, parts[part, 0]
    done = done[:count]
    return value[done] - (used[done] * prices).sum(axis=1), done, parts


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def _thin_out(labels: BeamLabels, cut: int) -> None:
    """Keep two thirds of a cut's full room: the labels with the least scores."""
    room = labels.sums.shape[0] // labels.counts.shape[0]
    best = cut * room + np.argsort(labels.score[cut * room : (cut + 1) * room])[: 2 * room // 3]
    kept = slice(cut * room, cut * room + len(best))
    labels.integers[kept], labels.used[kept] = labels.integers[best], labels.used[best]
    labels.sums[kept], labels.score[kept] = labels.sums[best], labels.score[best]
    labels.counts[cut], labels.worst[cut] = len(best), labels.score[kept.stop - 1]


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def _distinct(labels: BeamLabels, cut: int, u: Units, width: int) -> Any:
    """Return the `width` labels of a cut with the least scores, each with another use of devices."""
    chosen, seen = np.empty(width, dtype=np.int64), np.empty(width, dtype=np.int64)
    count, places, start = 0, np.arange(1, u.kind.shape[0] + 1), cut * (labels.sums.shape[0] // labels.counts.shape[0])
    weights = (u.kind + 1) * 1000003 if u.alike else places * 1000003 + 7919 * (places - 1) ** 2
    for label in start + np.argsort(labels.score[start : start + labels.counts[cut]]):
        taken = labels.used[label].astype(np.int64)
        signature = np.int64(labels.integers[label, 2]) * 31 + (taken * weights + taken * taken * 17).sum()
        if (seen[:count] == signature).any():
            continue
        if count == width:
            break
        chosen[count], seen[count] = label, signature
        count += 1
    return chosen[:count]


def beam_labels(room: int, layers: int, units: int) -> BeamLabels:
    """Return the labels of a `beam`, with only the empty pipeline."""
    rows, root = room * (layers + 1), room * layers
    labels = BeamLabels(
        integers=np.empty((rows, 6), dtype=np.int32),
        sums=np.zeros(rows),
        score=np.zeros(rows),
        used=np.zeros((rows, units), dtype=np.int16),
        counts=np.zeros(layers + 1, dtype=np.int64),
        worst=np.full(layers + 1, np.inf),
    )
    labels.integers[root], labels.counts[layers] = (layers, layers, -1, -1, -1, 0), 1
    return labels


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def beam(
    cut: int, w: Ways, s: Stages, u: Units, price: Any, front: Any, high: float, width: int, labels: BeamLabels
) -> None:
    """Build on the pipelines that begin at a cut, with all stages and sends within `high`, on real units.

    A label is a pipeline's rear part; those of cut 0 are complete. Cuts come from the last to the first. Each cut keeps
    the labels with the least sums and costs still to come by `front` (of `least_priced`). It builds on `width` labels.
    """
    units, room = u.kind.shape[0], labels.sums.shape[0] // labels.counts.shape[0]
    integers, used = labels.integers, labels.used
    untouched, like_counts = np.empty(units, dtype=np.int64), np.empty(units, dtype=np.int64)
    for label in _distinct(labels, cut, u, width):
        template, behind, position = integers[label, 2], integers[label, 3], integers[label, 5]
        like_counts[:] = 0
        for unit in range(units - 1, -1, -1):  # how many units from this one on are like it and not used at all
            if used[label, unit] == 0:
                like_counts[u.like[unit]] += 1
            untouched[unit] = like_counts[u.like[unit]]
        stop = s.at[cut]
        while stop < s.at[cut + 1]:
            begin, o = stop, s.rows[stop, 2]
            while stop < s.at[cut + 1] and s.rows[stop, 2] == o:
                stop += 1
            fullest, least_free, whole = -1, 0, w.whole[o]
            for unit in range(u.first[w.kind[o]], u.first[w.kind[o] + 1]):
                free = u.size[unit] - used[label, unit]
                # Of units alike the first that has room, fuller ones after it, and the one of the stage behind.
                if u.alike and fullest >= 0 and (whole > 1 or (unit != behind and free >= least_free)):
                    continue
                if whole > 1:
                    like = u.size[unit] * whole == w.devices[o]
                    if used[label, unit] > 0 or not like or untouched[unit] < whole:
                        continue
                elif free < w.devices[o]:
                    continue
                fullest, least_free = unit, free
                send = slow = 0.0
                if template >= 0:
                    of = max(w.share[o], w.share[template]), cut - 1, u.between[unit, behind]
                    send, slow = u.there[of] + u.back[of], max(u.there[of], u.back[of])
                if slow > high:
                    continue
                for k in range(begin, stop):
                    if s.turn[k] > high or s.most[k] < w.in_flight[position]:
                        continue
                    first = s.rows[k, 0]
                    total = labels.sums[label] + s.turn[k] + send + price[o]
                    score = total + (s.once[k] if first == 0 else front[first, w.port[o]])
                    if not score < labels.worst[first]:
                        continue
                    if labels.counts[first] == room:
                        _thin_out(labels, first)
                    slot = first * room + labels.counts[first]
                    labels.counts[first] += 1
                    integers[slot, 0], integers[slot, 1], integers[slot, 2] = first, cut, o
                    integers[slot, 3], integers[slot, 4], integers[slot, 5] = unit, label, position + 1
                    labels.sums[slot], labels.score[slot] = total, score
                    used[slot] = used[label]
                    if whole <= 1:
                        used[slot, unit] += w.devices[o]
                    else:  # this unit and the next ones like it that are free
                        left = whole
                        for v in range(unit, units):
                            if left > 0 and u.like[v] == u.like[unit] and used[slot, v] == 0:
                                used[slot, v] = u.size[v]
                                left -= 1
