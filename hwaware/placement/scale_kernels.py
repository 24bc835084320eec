"""Compile the inner loops of the search for large clusters, in one file: numba's cache watches no other."""

from __future__ import annotations

from typing import Any, NamedTuple, Tuple

import numpy as np
from numba import njit


class Ways(NamedTuple):
    """Hold ways to build a stage from like devices ("templates"), and the sends between them.

    Sends depend on a port: the kind of the devices and the number of replicas.
    """

    turn: Any  # [template, first, end] f + b of a stage of layers first .. end - 1, in s
    longer: Any  # [template, first, end] max(f, b)
    most: Any  # [template, first, end] microbatches in flight that fit into its memory; -1 if a rule forbids it
    first_step: Any  # [template, end] once a step, of a front stage of layers 0 .. end - 1
    link: Any  # [front port, port behind, layer in front of the cut] least of a microbatch there and back
    port: Any  # [template]
    kind: Any  # [template] this and the next three as in `hwaware.placement.fleet`
    devices: Any  # [template]
    whole: Any  # [template]
    share: Any  # [template]
    in_flight: Any  # microbatches that a stage has in flight, by the stages behind it
    quickest: Any  # [first, end] least f + b of a stage


class Units(NamedTuple):
    """Hold like devices of one host each ("units"), and the sends between them."""

    kind: Any  # [unit] type of its devices
    size: Any  # [unit] number of its devices
    like: Any  # [unit] equal for units of equal kind and size
    first: Any  # [kind] first unit of each kind, and behind them the number of units
    between: Any  # [unit, unit] class of the sends from one to another
    both: Any  # [share, L, class] of a microbatch there and back, the sum
    slower: Any  # [share, L, class] the longer of both
    alike: bool  # units of one kind cannot be told apart: tables and least sends hold for all


class BeamLabels(NamedTuple):
    """Hold rear parts of pipelines, and for each cut the kept ones."""

    integers: Any  # [label] (first, end, template, unit, parent, stages)
    sums: Any  # [label] of its stages and sends
    paid: Any  # [label] prices of its devices
    used: Any  # [label, unit] devices that it uses
    pool_score: Any  # [L + 1] of each cut a heap of labels, the worst one first
    pool_label: Any  # [L + 1] the heap's labels
    counts: Any  # [L + 1] size of the heap


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def least_priced(w: Ways, price: Any, low: float, high: float, rules: Any, after: Any) -> Tuple[float, Any, Any]:
    """Return the least bound on the step over all pipelines, devices at their prices, slowest stage in [low, high].

    `rules` says how stages count. One in front of the slowest counts `weight` (c + sends) - `less`, one behind it
    `after_weight` (c + sends) - `after_less`. The slowest counts `bottleneck` + `per_longer` x max(f, b). `price` is
    that of all devices of each template. A state stands for the devices that are used. `after` [template, state] is
    the state behind a stage from that in front; -1 if too few devices are left.

    Returns:
        The value, the stages as rows of (first, end, template), and the least cost in front of each cut. The last
            includes the send: [without or with the slowest stage, L + 1, ports behind, states].
    """
    templates, layers, ports, states = w.turn.shape[0], w.turn.shape[1], w.link.shape[0], after.shape[1]
    value = np.full((2, layers + 1, ports, states), np.inf)
    at_port = np.full((2, layers + 1, ports, states), np.inf)  # the best with a stage of this port behind
    at_port[0, 0, :, 0] = 0.0
    fewest = np.full(layers + 1, layers)  # stages behind a cut
    fewest[layers] = 0
    for first in range(layers - 1, 0, -1):
        for end in range(first + 1, layers + 1):
            if w.quickest[first, end] <= high:
                fewest[first] = min(fewest[first], 1 + fewest[end])
    for end in range(1, layers + 1):
        need = w.in_flight[fewest[end]]
        for o in range(templates):
            own = w.port[o]
            for first in range(end - 1, -1, -1):
                if w.turn[o, first, end] > high or 0 <= w.most[o, first, end] < need:
                    break
                if w.most[o, first, end] < 0:
                    continue  # a rule forbids it, and may allow longer ones
                before, slowest, behind = _added(w, o, first, end, price[o], low, rules)
                for state in range(states):
                    to = after[o, state]
                    if to >= 0:
                        front0, front1 = at_port[0, first, own, state], at_port[1, first, own, state]
                        value[0, end, own, to] = min(value[0, end, own, to], front0 + before)
                        value[1, end, own, to] = min(value[1, end, own, to], front0 + slowest, front1 + behind)
        for phase in range(2 if end < layers else 0):
            for front in range(ports):
                if value[phase, end, front].min() == np.inf:
                    continue
                for port in range(ports):
                    send = rules[2 * phase] * w.link[front, port, end - 1]
                    for state in range(states):  # no call of min: the compiler makes it one instruction for several
                        at, least = value[phase, end, front, state] + send, at_port[phase, end, port, state]
                        at_port[phase, end, port, state] = at if at < least else least
    place = np.argmin(value[1, layers])
    port, state = place // states, place % states
    best, stages = value[1, layers, port, state], np.empty((layers, 3), dtype=np.int64)
    count, end, phase = 0, layers, 1
    while end > 0 and best < np.inf:
        first, o, phase, state = _came_from(
            w, value[phase, end, port, state], at_port, end, port, phase, state, price, low, rules, after
        )
        stages[count, 0], stages[count, 1], stages[count, 2] = first, end, o
        count, end = count + 1, first
        if end > 0:
            port = int(np.argmin(value[phase, end, :, state] + rules[2 * phase] * w.link[:, port, end - 1]))
    return best, stages[:count][::-1].copy(), at_port


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def _added(w: Ways, o: int, first: int, end: int, price: float, low: float, rules: Any) -> Tuple[float, float, float]:
    """Return what a stage adds in front of the slowest, as the slowest, and behind it; see `least_priced`."""
    weight, less, after_weight, after_less, bottleneck, per_longer = rules
    c, once = w.turn[o, first, end], price + (w.first_step[o, end] if first == 0 else 0.0)
    slowest = once + bottleneck + per_longer * w.longer[o, first, end] if c >= low else np.inf
    return once + weight * c - less, slowest, once + after_weight * c - after_less


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def _came_from(
    w: Ways, value: float, at_port: Any, end: int, port: int, phase: int, state: int, price: Any, low: float,
    rules: Any, after: Any,
) -> Tuple[int, int, int, int]:  # fmt: skip
    """Return the first layer and template of the stage that makes this value, and the phase and state before it."""
    for o in range(w.turn.shape[0]):
        if w.port[o] == port:
            for first in range(end):
                before, slowest, behind = _added(w, o, first, end, price[o], low, rules)
                for one in range(after.shape[1]):
                    if after[o, one] == state:
                        if at_port[0, first, port, one] + (before if phase == 0 else slowest) == value:
                            return first, o, 0, one
                        if phase == 1 and at_port[1, first, port, one] + behind == value:
                            return first, o, 1, one
    return 0, -1, 0, 0


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def _insert(labels: BeamLabels, cut: int, score: float, label: int) -> None:
    """Keep the label among those of its cut. A full heap gives up its root, the label with the worst score."""
    scores, kept = labels.pool_score[cut], labels.pool_label[cut]
    k = labels.counts[cut]
    if k < len(scores):  # the place rises from the end
        labels.counts[cut] += 1
        while k > 0 and scores[(k - 1) // 2] < score:
            scores[k], kept[k] = scores[(k - 1) // 2], kept[(k - 1) // 2]
            k = (k - 1) // 2
    else:  # the worst one's place sinks from the root
        k, child = 0, 1
        while child < len(scores):
            if child + 1 < len(scores) and scores[child + 1] > scores[child]:
                child += 1
            if scores[child] <= score:
                break
            scores[k], kept[k] = scores[child], kept[child]
            k, child = child, 2 * child + 1
    scores[k], kept[k] = score, label


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def _distinct(labels: BeamLabels, cut: int, u: Units, width: int) -> Any:
    """Return the `width` labels of a cut with the least scores, each with another use of devices."""
    chosen, seen = np.empty(width, dtype=np.int64), np.empty(width, dtype=np.int64)
    count, places = 0, np.arange(1, u.kind.shape[0] + 1)
    weights = (u.kind + 1) * 1000003 if u.alike else places * 1000003 + 7919 * (places - 1) ** 2
    for rank in np.argsort(labels.pool_score[cut, : labels.counts[cut]]):
        label = labels.pool_label[cut, rank]
        taken = labels.used[label].astype(np.int64)
        signature = np.int64(labels.integers[label, 2]) * 31 + (taken * weights + taken * taken * 17).sum()
        if (seen[:count] == signature).any():
            continue
        if count == width:
            break
        chosen[count], seen[count] = label, signature
        count += 1
    return chosen[:count]


def beam_labels(capacity: int, layers: int, units: int) -> BeamLabels:
    """Return the labels of a `beam`, with only the empty pipeline."""
    rows = 1 + capacity * (layers + 1)
    labels = BeamLabels(
        integers=np.empty((rows, 6), dtype=np.int32),
        sums=np.zeros(rows),
        paid=np.zeros(rows),
        used=np.zeros((rows, units), dtype=np.int16),
        pool_score=np.empty((layers + 1, capacity)),
        pool_label=np.empty((layers + 1, capacity), dtype=np.int32),
        counts=np.zeros(layers + 1, dtype=np.int64),
    )
    labels.integers[0] = (layers, layers, -1, -1, -1, 0)
    labels.pool_score[layers, 0], labels.pool_label[layers, 0], labels.counts[layers] = 0.0, 0, 1
    return labels


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def beam(
    cut: int, w: Ways, u: Units, price: Any, front: Any, high: float, width: int, labels: BeamLabels, fill: int
) -> int:
    """Build on the pipelines that begin at a cut, with all stages and sends within `high`, on real units.

    A label is a pipeline's rear part; cuts come from the last to the first. Each cut keeps the labels with the least
    sums, prices, and costs still to come by `front` (of `least_priced`). It builds on `width` labels. Return the number
    of labels; those of cut 0 are complete.
    """
    units, rows, capacity = u.kind.shape[0], labels.integers.shape[0], labels.pool_score.shape[1]
    integers, used = labels.integers, labels.used
    untouched, like_counts = np.empty(units, dtype=np.int64), np.empty(units, dtype=np.int64)
    for label in _distinct(labels, cut, u, width):
        template, behind, position = integers[label, 2], integers[label, 3], integers[label, 5]
        like_counts[:] = 0
        for unit in range(units - 1, -1, -1):  # how many units from this one on are like it and not used at all
            if used[label, unit] == 0:
                like_counts[u.like[unit]] += 1
            untouched[unit] = like_counts[u.like[unit]]
        for o in range(w.turn.shape[0]):
            if w.turn[o, cut - 1, cut] > high:
                continue
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
                    s, between = max(w.share[o], w.share[template]), u.between[unit, behind]
                    send, slow = u.both[s, cut - 1, between], u.slower[s, cut - 1, between]
                if slow > high:
                    continue
                for first in range(cut - 1, -1, -1):
                    c = w.turn[o, first, cut]
                    if c > high or 0 <= w.most[o, first, cut] < w.in_flight[position]:
                        break
                    if w.most[o, first, cut] < 0:
                        continue
                    total, paid = labels.sums[label] + c + send, labels.paid[label] + price[o]
                    score = total + (w.first_step[o, cut] if first == 0 else front[first, w.port[o]])
                    if score == np.inf or fill >= rows:
                        continue
                    score += paid
                    slot = fill
                    if labels.counts[first] == capacity:
                        if score >= labels.pool_score[first, 0]:
                            continue
                        slot = labels.pool_label[first, 0]  # the worst one's place
                    else:
                        fill += 1
                    integers[slot, 0], integers[slot, 1], integers[slot, 2] = first, cut, o
                    integers[slot, 3], integers[slot, 4], integers[slot, 5] = unit, label, position + 1
                    labels.sums[slot], labels.paid[slot] = total, paid
                    used[slot] = used[label]
                    if whole <= 1:
                        used[slot, unit] += w.devices[o]
                    else:  # this unit and the next ones like it that are free
                        left = whole
                        for v in range(unit, units):
                            if left > 0 and u.like[v] == u.like[unit] and used[slot, v] == 0:
                                used[slot, v] = u.size[v]
                                left -= 1
                    _insert(labels, first, score, slot)
    return fill
