"""The compiled inner loops of the search for large clusters, in one file: numba's cache only watches that file.

Templates are ways to build a stage from like devices, units the like devices of one host. Ranges of layers are
[template, first, end]; a port is what sends depend on: the type of the devices and the number of replicas.
"""

from __future__ import annotations

from typing import Any, Tuple

import numpy as np
from numba import njit


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def least_priced(
    turn: Any, longer: Any, first_step: Any, most: Any, held: int, port: Any, link: Any, busy: Any, price: Any,
    low: float, high: float, after_weight: float, after_less: float, bottleneck: float, per_longer: float,
) -> Tuple[float, Any, Any]:  # fmt: skip
    """The least bound on the step over all pipelines, devices at their prices, slowest stage in [low, high].

    Stages in front of the slowest one count c + sends, it counts `bottleneck` + `per_longer` x max(f, b), those behind
    it count `after_weight` (c + sends) - `after_less`. `held` is what a stage that is not the last has in flight.

    Returns the value, the stages in pipeline order, rows of (first, end, template), and for each cut and port of the
    stage behind it the least cost in front, [without or with the slowest stage, L + 1, ports].
    """
    templates, layers = turn.shape[0], turn.shape[1]
    ports = link.shape[0]
    value = np.full((2, layers + 1, templates), np.inf)
    came = np.full((2, layers + 1, templates, 3), -1, dtype=np.int32)  # first, phase before, template before
    at_port = np.full((2, layers + 1, ports), np.inf)  # the best with a stage of this port behind
    who = np.full((2, layers + 1, ports), -1, dtype=np.int32)
    best_of = np.empty(ports)
    best_who = np.empty(ports, dtype=np.int32)
    for end in range(1, layers + 1):
        need = 1 if end == layers else held
        for o in range(templates):
            own = port[o]
            for first in range(end - 1, -1, -1):
                c = turn[o, first, end]
                if c > high or most[o, first, end] < need:
                    break
                front0 = first_step[o, end] if first == 0 else at_port[0, first, own]
                front1 = np.inf if first == 0 else at_port[1, first, own]
                if front0 + c + price[o] < value[0, end, o]:
                    value[0, end, o] = front0 + c + price[o]
                    came[0, end, o, 0], came[0, end, o, 1], came[0, end, o, 2] = first, 0, who[0, first, own]
                if c >= low:
                    at = front0 + bottleneck + per_longer * longer[o, first, end] + price[o]
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
            best_of[:] = np.inf
            best_who[:] = -1
            for o in range(templates):
                if value[phase, end, o] < best_of[port[o]]:
                    best_of[port[o]] = value[phase, end, o]
                    best_who[port[o]] = o
            for behind in range(ports):
                for front in range(ports):
                    if busy[front, behind, end - 1] > high:
                        continue
                    at = best_of[front] + weight * link[front, behind, end - 1]
                    if at < at_port[phase, end, behind]:
                        at_port[phase, end, behind] = at
                        who[phase, end, behind] = best_who[front]
    best, template = np.inf, -1
    for o in range(templates):
        if value[1, layers, o] < best:
            best, template = value[1, layers, o], o
    stages = np.empty((layers, 3), dtype=np.int64)
    count, end, phase = 0, layers, 1
    while template >= 0:
        first, before = came[phase, end, template, 0], came[phase, end, template, 1]
        previous = came[phase, end, template, 2]
        stages[count, 0], stages[count, 1], stages[count, 2] = first, end, template
        count += 1
        end, phase, template = first, before, previous
    return best, stages[:count][::-1].copy(), at_port


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def cost_in_front(turn: Any, most: Any, held: int, port: Any, link: Any, price: Any, high: float) -> Any:
    """[L + 1, ports]: the least sum and device prices of the layers in front of a stage of each port."""
    templates, layers, ports = turn.shape[0], turn.shape[1], link.shape[0]
    least = np.full((layers + 1, ports), np.inf)
    least[0, :] = 0.0
    best_of = np.empty(ports)
    for end in range(1, layers):
        best_of[:] = np.inf
        for o in range(templates):
            for first in range(end - 1, -1, -1):
                if turn[o, first, end] > high or most[o, first, end] < held:
                    break
                at = least[first, port[o]] + turn[o, first, end] + price[o]
                best_of[port[o]] = min(best_of[port[o]], at)
        for behind in range(ports):
            for front in range(ports):
                at = best_of[front] + link[front, behind, end - 1]
                least[end, behind] = min(least[end, behind], at)
    return least


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def _insert(pool_score: Any, pool_label: Any, counts: Any, cut: int, score: float, label: int) -> bool:
    """Keep the label among those of its cut with the least scores; the root of the heap is the worst."""
    capacity = pool_score.shape[1]
    scores, labels = pool_score[cut], pool_label[cut]
    if counts[cut] < capacity:
        k = counts[cut]
        counts[cut] += 1
        scores[k], labels[k] = score, label
        while k > 0 and scores[(k - 1) // 2] < scores[k]:
            p = (k - 1) // 2
            scores[k], scores[p] = scores[p], scores[k]
            labels[k], labels[p] = labels[p], labels[k]
            k = p
        return True
    if score >= scores[0]:
        return False
    scores[0], labels[0] = score, label
    k = 0
    while True:
        c = 2 * k + 1
        if c >= capacity:
            break
        if c + 1 < capacity and scores[c + 1] > scores[c]:
            c += 1
        if scores[c] <= scores[k]:
            break
        scores[k], scores[c] = scores[c], scores[k]
        labels[k], labels[c] = labels[c], labels[k]
        k = c
    return True


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def beam(
    turn: Any, first_step: Any, most: Any, in_flight: Any, port: Any, share: Any, sends: Any, busy: Any, kind: Any,
    devices: Any, whole: Any, unit_kind: Any, unit_size: Any, price: Any, front: Any, high: float, width: int,
    capacity: int, alike: bool,
) -> Tuple[Any, Any, Any]:  # fmt: skip
    """Pipelines with all stages and sends within `high`, built from the last stage to the first on real units.

    `share` is the number of each template's replicas as an index; sends and busy are [share, L, unit, unit]: there and
    back, and the longer of both. `alike`: units of one kind need not be told apart.

    Returns the labels (first, end, template, unit, parent, stages), and the complete labels' numbers and scores.
    """
    templates, layers, units = turn.shape[0], turn.shape[1], unit_kind.shape[0]
    rows = 1 + capacity * (layers + 1)
    integers = np.empty((rows, 6), dtype=np.int32)
    sums = np.empty(rows)
    paid = np.zeros(rows)  # prices of the devices that the label's stages use
    used = np.zeros((rows, units), dtype=np.int16)
    pool_score = np.empty((layers + 1, capacity))
    pool_label = np.empty((layers + 1, capacity), dtype=np.int32)
    counts = np.zeros(layers + 1, dtype=np.int64)
    integers[0, :] = -1
    integers[0, 0], integers[0, 1], integers[0, 5] = layers, layers, 0
    sums[0] = 0.0
    fill = 1
    _insert(pool_score, pool_label, counts, layers, 0.0, 0)
    seen = np.empty(width, dtype=np.int64)
    weights = np.empty(units, dtype=np.int64)
    for u in range(units):
        weights[u] = (unit_kind[u] + 1) * 1000003 if alike else (u + 1) * 1000003 + 7919 * u * u
    for cut in range(layers, 0, -1):
        order = np.argsort(pool_score[cut, : counts[cut]])
        expanded = 0
        for rank in range(order.shape[0]):
            label = pool_label[cut, order[rank]]
            signature = np.int64(integers[label, 2]) * 31
            for u in range(units):
                signature += used[label, u] * weights[u] + used[label, u] * used[label, u] * 17
            repeated = False
            for k in range(expanded):
                if seen[k] == signature:
                    repeated = True
                    break
            if repeated:
                continue
            if expanded == width:
                break
            seen[expanded] = signature
            expanded += 1
            template, unit, position = integers[label, 2], integers[label, 3], integers[label, 5]
            for o in range(templates):
                if turn[o, cut - 1, cut] > high:
                    continue
                best_fit = -1
                for u in range(units):
                    if unit_kind[u] != kind[o]:
                        continue
                    free = unit_size[u] - used[label, u]
                    if whole[o] > 1:
                        # Whole units: as many untouched ones as are needed, counted from this one on.
                        if used[label, u] > 0 or (best_fit >= 0 and alike):
                            continue
                        left = 0
                        for v in range(u, units):
                            if unit_kind[v] == kind[o] and used[label, v] == 0:
                                left += 1
                        if left < whole[o]:
                            continue
                    elif free < devices[o] or (
                        # The fullest unit that has room, and the front stage's own.
                        alike and best_fit >= 0 and u != unit and free >= unit_size[best_fit] - used[label, best_fit]
                    ):
                        continue
                    best_fit = u
                    send = slow = 0.0
                    if template >= 0:
                        s = max(share[o], share[template])
                        send, slow = sends[s, cut - 1, u, unit], busy[s, cut - 1, u, unit]
                    if slow > high:
                        continue
                    for first in range(cut - 1, -1, -1):
                        c = turn[o, first, cut]
                        if c > high or most[o, first, cut] < in_flight[position]:
                            break
                        total = sums[label] + c + send
                        score = total + front[first, port[o]]
                        if first == 0:
                            score += first_step[o, cut]
                        if score == np.inf or fill >= rows:
                            continue
                        score += paid[label] + price[o]
                        if counts[first] == capacity and score >= pool_score[first, 0]:
                            continue
                        reuse = -1
                        if counts[first] == capacity:
                            reuse = pool_label[first, 0]
                        slot = fill if reuse < 0 else reuse
                        if reuse < 0:
                            fill += 1
                        integers[slot, 0], integers[slot, 1], integers[slot, 2] = first, cut, o
                        integers[slot, 3], integers[slot, 4], integers[slot, 5] = u, label, position + 1
                        sums[slot], paid[slot] = total, paid[label] + price[o]
                        used[slot] = used[label]
                        if whole[o] > 1:
                            left = whole[o]
                            for v in range(u, units):
                                if left > 0 and unit_kind[v] == kind[o] and used[label, v] == 0:
                                    used[slot, v] = unit_size[v]
                                    left -= 1
                        else:
                            used[slot, u] += devices[o]
                        _insert(pool_score, pool_label, counts, first, score, slot)
    done = counts[0]
    return integers, pool_label[0, :done].copy(), pool_score[0, :done].copy()


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def prove(
    turn: Any, longer: Any, first_step: Any, most: Any, held: int, port: Any, link: Any, at_port: Any, price: Any,
    unpriced: float, kind: Any, devices: Any, sizes: Any, low: float, high: float, after_weight: float,
    after_less: float, bottleneck: float, per_longer: float, threshold: float, capacity: int,
) -> float:  # fmt: skip
    """The bound of `least_priced` with the devices counted one by one: no pipeline in the interval costs less.

    Partial pipelines from the last stage on, one for each set of devices used, port of the front stage, and whether the
    slowest stage is in it already; those that cannot get below `threshold` are dropped. `at_port` comes from
    `least_priced` at the same prices, `unpriced` is the price of all devices. At most `capacity` are kept: the least
    bound of those that find no place counts.
    """
    templates, layers = turn.shape[0], turn.shape[1]
    kinds, ports = sizes.shape[0], link.shape[0]
    slots = 1
    while slots < 2 * capacity:
        slots *= 2
    table = np.full(slots, -1, dtype=np.int64)
    keys = np.empty(capacity, dtype=np.int64)
    cost = np.empty(capacity)
    paid = np.empty(capacity)
    used = np.zeros((capacity, kinds), dtype=np.int32)
    state = np.empty((capacity, 3), dtype=np.int64)  # port (-1: none), slowest seen, next label of the cut
    heads = np.full(layers + 1, -1, dtype=np.int64)
    strides = np.ones(kinds, dtype=np.int64)
    for r in range(1, kinds):
        strides[r] = strides[r - 1] * (sizes[r - 1] + 1)
    cost[0], paid[0] = 0.0, 0.0
    state[0, 0], state[0, 1], state[0, 2] = -1, 0, -1
    heads[layers] = 0
    fill, bound = 1, threshold
    for cut in range(layers, 0, -1):
        label = heads[cut]
        while label >= 0:
            behind, seen = state[label, 0], state[label, 1]
            following = state[label, 2]
            index = 0
            for r in range(kinds):
                index += used[label, r] * strides[r]
            for o in range(templates):
                if used[label, kind[o]] + devices[o] > sizes[kind[o]]:
                    continue
                join = 0.0 if behind < 0 else link[port[o], behind, cut - 1]
                for first in range(cut - 1, -1, -1):
                    c = turn[o, first, cut]
                    if c > high or most[o, first, cut] < (1 if cut == layers else held):
                        break
                    once = first_step[o, cut] if first == 0 else 0.0
                    # As the slowest stage, and as any other one.
                    for phase in range(2):
                        if phase == 0 and (seen == 1 or c < low):
                            continue
                        now = 1 if phase == 0 else seen
                        if seen == 1:
                            step = c + join
                        elif phase == 0:
                            step = bottleneck + per_longer * longer[o, first, cut] + after_weight * join
                        else:
                            step = after_weight * (c + join) - after_less
                        total = cost[label] + step
                        if first == 0:
                            if now == 1:
                                bound = min(bound, total + once)
                            continue
                        money = paid[label] + price[o]
                        # What is in front either holds the slowest stage (1) or has only stages before it (0).
                        lowest = total + money - unpriced + at_port[1 - now, first, port[o]]
                        if lowest >= bound:
                            continue
                        after = index + devices[o] * strides[kind[o]]
                        key = ((after * ports + port[o]) * 2 + now) * (layers + 1) + first
                        at = (key * 0x9E3779B97F4A7C1) & (slots - 1)
                        while table[at] >= 0 and keys[table[at]] != key:
                            at = (at + 1) & (slots - 1)
                        other = table[at]
                        if other >= 0:
                            cost[other] = min(cost[other], total)
                            continue
                        if fill == capacity:
                            bound = min(bound, lowest)
                            continue
                        table[at], keys[fill] = fill, key
                        cost[fill], paid[fill] = total, money
                        used[fill] = used[label]
                        used[fill, kind[o]] += devices[o]
                        state[fill, 0], state[fill, 1], state[fill, 2] = port[o], now, heads[first]
                        heads[first] = fill
                        fill += 1
            label = following
    return bound
