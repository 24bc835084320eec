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


class ProofLabels(NamedTuple):
    """Hold rear parts of pipelines by the devices of each kind that they use, found by a hash table."""

    table: Any  # rows by hash
    keys: Any  # of each row
    cost: Any  # [label] as in `least_priced`
    paid: Any  # [label] prices of its devices
    used: Any  # [label, kind] devices that it uses
    state: Any  # [label] (port of the front stage or -1, 1 with the slowest stage, next label of its cut)
    heads: Any  # [L + 1] first label of each cut


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def least_priced(w: Ways, price: Any, low: float, high: float, rules: Any) -> Tuple[float, Any, Any]:
    """Return the least bound on the step over all pipelines, devices at their prices, slowest stage in [low, high].

    `rules` says how stages count. One in front of the slowest counts c + sends. The slowest counts `bottleneck` +
    `per_longer` x max(f, b). One behind it counts `after_weight` (c + sends) - `after_less`. `price` is that of all
    devices of each template.

    Returns:
        The value, the stages as rows of (first, end, template), and the least cost in front of each cut. The last
            includes the send: [without or with the slowest stage, L + 1, ports behind].
    """
    after_weight, after_less, bottleneck, per_longer = rules
    templates, layers, ports = w.turn.shape[0], w.turn.shape[1], w.link.shape[0]
    value = np.full((2, layers + 1, templates), np.inf)
    came = np.full((2, layers + 1, templates, 3), -1, dtype=np.int32)  # first, phase before, template before
    at_port = np.full((2, layers + 1, ports), np.inf)  # the best with a stage of this port behind
    who = np.full((2, layers + 1, ports), -1, dtype=np.int32)
    at_port[0, 0] = 0.0
    for end in range(1, layers + 1):
        need = 1 if end == layers else w.in_flight[1]
        for o in range(templates):
            own = w.port[o]
            for first in range(end - 1, -1, -1):
                c = w.turn[o, first, end]
                if c > high or 0 <= w.most[o, first, end] < need:
                    break
                if w.most[o, first, end] < 0:
                    continue  # a rule forbids it, and may allow longer ones
                front0 = w.first_step[o, end] if first == 0 else at_port[0, first, own]
                front1 = at_port[1, first, own]
                if front0 + c + price[o] < value[0, end, o]:
                    value[0, end, o] = front0 + c + price[o]
                    came[0, end, o, 0], came[0, end, o, 1], came[0, end, o, 2] = first, 0, who[0, first, own]
                if c >= low:
                    at = front0 + bottleneck + per_longer * w.longer[o, first, end] + price[o]
                    if at < value[1, end, o]:
                        value[1, end, o] = at
                        came[1, end, o, 0], came[1, end, o, 1], came[1, end, o, 2] = first, 0, who[0, first, own]
                at = front1 + after_weight * c - after_less + price[o]
                if at < value[1, end, o]:
                    value[1, end, o] = at
                    came[1, end, o, 0], came[1, end, o, 1], came[1, end, o, 2] = first, 1, who[1, first, own]
        if end == layers:
            break
        for phase in range(2):
            weight = 1.0 if phase == 0 else after_weight
            _behind_cut(w, value[phase, end], weight, end - 1, at_port[phase, end], who[phase, end])
    template = np.argmin(value[1, layers])
    best, stages = value[1, layers, template], np.empty((layers, 3), dtype=np.int64)
    count, end, phase = 0, layers, 1
    while template >= 0 and best < np.inf:
        row = came[phase, end, template]
        stages[count] = np.int64(row[0]), end, template
        count += 1
        end, phase, template = row[0], row[1], row[2]
    return best, stages[:count][::-1].copy(), at_port


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def _behind_cut(w: Ways, value: Any, weight: float, layer: int, at_port: Any, who: Any) -> None:
    """Fill `at_port` and `who` [ports]: the least of `value` [templates] with a send to each port, and its template."""
    ports = w.link.shape[0]
    best_of = np.full(ports, np.inf)
    best_who = np.full(ports, -1, dtype=np.int32)
    for o in range(value.shape[0]):
        if value[o] < best_of[w.port[o]]:
            best_of[w.port[o]] = value[o]
            best_who[w.port[o]] = o
    for behind in range(ports):
        for front in range(ports):
            at = best_of[front] + weight * w.link[front, behind, layer]
            if at < at_port[behind]:
                at_port[behind] = at
                who[behind] = best_who[front]


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


def proof_labels(capacity: int, kinds: int, layers: int) -> ProofLabels:
    """Return the labels of a proof, with only the empty pipeline."""
    labels = ProofLabels(
        table=np.full(1 << (2 * capacity - 1).bit_length(), -1, dtype=np.int64),
        keys=np.empty(capacity, dtype=np.int64),
        cost=np.zeros(capacity),
        paid=np.zeros(capacity),
        used=np.zeros((capacity, kinds), dtype=np.int32),
        state=np.empty((capacity, 3), dtype=np.int64),
        heads=np.full(layers + 1, -1, dtype=np.int64),
    )
    labels.state[0] = (-1, 0, -1)
    labels.heads[layers] = 0
    return labels


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def prove(
    cut: int, w: Ways, at_port: Any, price: Any, unpriced: float, sizes: Any, low: float, high: float, rules: Any,
    labels: ProofLabels, fill: int, bound: float,
) -> Tuple[int, float]:  # fmt: skip
    """Take one cut of the bound of `least_priced`, with the devices counted one by one.

    A label is a rear part. It is the cheapest for its cut, devices of each kind, front port, and slowest stage in it or
    not. It drops labels that cannot get below the bound, at first the best plan. `at_port` comes from `least_priced` at
    the same prices. `unpriced` is the price of all devices of the cluster, `sizes` their numbers by kind. The bound
    also counts labels that find no room. Return the number of labels, and the bound, which holds after cut 1.
    """
    after_weight, after_less, bottleneck, per_longer = rules
    layers, kinds, ports, capacity = w.turn.shape[1], sizes.shape[0], w.link.shape[0], labels.keys.shape[0]
    strides = np.ones(kinds, dtype=np.int64)  # of the one number that stands for how many of each kind are used
    for r in range(1, kinds):
        strides[r] = strides[r - 1] * (sizes[r - 1] + 1)
    cost, used, state = labels.cost, labels.used, labels.state
    label = labels.heads[cut]
    while label >= 0:
        behind, seen, following = state[label, 0], state[label, 1], state[label, 2]
        index = (used[label] * strides).sum()
        for o in range(w.turn.shape[0]):
            kind, own = w.kind[o], w.port[o]
            if used[label, kind] + w.devices[o] > sizes[kind]:
                continue
            join = 0.0 if behind < 0 else w.link[own, behind, cut - 1]
            for first in range(cut - 1, -1, -1):
                c = w.turn[o, first, cut]
                if c > high or 0 <= w.most[o, first, cut] < (1 if cut == layers else w.in_flight[1]):
                    break
                if w.most[o, first, cut] < 0:
                    continue
                # As the slowest stage, and as any other one.
                for phase in range(2):
                    if phase == 0 and (seen == 1 or c < low):
                        continue
                    now = 1 if phase == 0 else seen
                    if seen == 1:
                        step = c + join
                    elif phase == 0:
                        step = bottleneck + per_longer * w.longer[o, first, cut] + after_weight * join
                    else:
                        step = after_weight * (c + join) - after_less
                    total = cost[label] + step
                    if first == 0:
                        if now == 1:
                            bound = min(bound, total + w.first_step[o, cut])
                        continue
                    money = labels.paid[label] + price[o]
                    # What is in front either holds the slowest stage (1) or has only stages before it (0).
                    lowest = total + money - unpriced + at_port[1 - now, first, own]
                    if lowest >= bound:
                        continue
                    after = index + w.devices[o] * strides[kind]
                    key = ((after * ports + own) * 2 + now) * (layers + 1) + first
                    at = (key * 0x9E3779B97F4A7C1) & (labels.table.shape[0] - 1)  # linear probing of 2^n rows
                    while labels.table[at] >= 0 and labels.keys[labels.table[at]] != key:
                        at = (at + 1) & (labels.table.shape[0] - 1)
                    other = labels.table[at]
                    if other >= 0:
                        cost[other] = min(cost[other], total)
                        continue
                    if fill == capacity:
                        bound = min(bound, lowest)
                        continue
                    labels.table[at], labels.keys[fill] = fill, key
                    cost[fill], labels.paid[fill] = total, money
                    used[fill] = used[label]
                    used[fill, kind] += w.devices[o]
                    state[fill, 0], state[fill, 1], state[fill, 2] = own, now, labels.heads[first]
                    labels.heads[first] = fill
                    fill += 1
        label = following
    return fill, bound
