"""The compiled inner loops of the search for large clusters, in one file: numba's cache only watches that file.

Templates are ways to build a stage from like devices, units the like devices of one host; a port is what sends depend
on: the kind of the devices and the number of replicas. What all searches take:

    turn, longer    [template, first, end]: f + b and max(f, b) of a stage of the layers first to end - 1, in s
    most            the same shape: how many microbatches in flight fit into its memory; -1: a rule forbids it
    first_step      [template, end]: once a step, of the front stage of the layers 0 to end - 1
    link, busy      [front port, port behind, layer in front of the cut]: a microbatch there and back, and the longer
    price           [template]: of all devices of the template
    held            the fewest microbatches that a stage which is not the last has in flight
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
    it count `after_weight` (c + sends) - `after_less`.

    Returns the value, the stages in pipeline order, rows of (first, end, template), and for each cut and port of the
    stage behind it the least cost in front with the send, [without or with the slowest stage, L + 1, ports].
    """
    templates, layers = turn.shape[0], turn.shape[1]
    ports = link.shape[0]
    value = np.full((2, layers + 1, templates), np.inf)
    came = np.full((2, layers + 1, templates, 3), -1, dtype=np.int32)  # first, phase before, template before
    at_port = np.full((2, layers + 1, ports), np.inf)  # the best with a stage of this port behind
    who = np.full((2, layers + 1, ports), -1, dtype=np.int32)
    for end in range(1, layers + 1):
        need = 1 if end == layers else held
        for o in range(templates):
            own = port[o]
            for first in range(end - 1, -1, -1):
                c = turn[o, first, end]
                if c > high or 0 <= most[o, first, end] < need:
                    break
                if most[o, first, end] < 0:
                    continue  # a rule forbids it, and may allow longer ones
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
            _behind_cut(
                value[phase, end], port, weight, link, busy, end - 1, high, at_port[phase, end], who[phase, end]
            )
    last = np.argmin(value[1, layers])
    best = value[1, layers, last]
    return best, _stages_back(came, last if best < np.inf else -1), at_port


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def _behind_cut(
    value: Any, port: Any, weight: float, link: Any, busy: Any, layer: int, high: float, at_port: Any, who: Any
) -> None:
    """Fill `at_port` and `who` [ports]: the least of `value` [templates] with a send to each port, and whose it is."""
    ports = link.shape[0]
    best_of = np.full(ports, np.inf)
    best_who = np.full(ports, -1, dtype=np.int32)
    for o in range(value.shape[0]):
        if value[o] < best_of[port[o]]:
            best_of[port[o]] = value[o]
            best_who[port[o]] = o
    for behind in range(ports):
        for front in range(ports):
            if busy[front, behind, layer] > high:
                continue
            at = best_of[front] + weight * link[front, behind, layer]
            if at < at_port[behind]:
                at_port[behind] = at
                who[behind] = best_who[front]


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def _stages_back(came: Any, template: int) -> Any:
    """The stages that lead to the last one, of this template (-1: none), as rows of (first, end, template)."""
    layers = came.shape[1] - 1
    stages = np.empty((layers, 3), dtype=np.int64)
    count, end, phase = 0, layers, 1
    while template >= 0:
        row = came[phase, end, template]
        stages[count, 0], stages[count, 1], stages[count, 2] = row[0], end, template
        count += 1
        end, phase, template = row[0], row[1], row[2]
    return stages[:count][::-1].copy()


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def cost_in_front(turn: Any, most: Any, held: int, port: Any, link: Any, price: Any, high: float) -> Any:
    """[L + 1, ports]: the least turns, sends and prices of the layers in front of a stage of each port.

    Without what comes once a step.
    """
    templates, layers, ports = turn.shape[0], turn.shape[1], link.shape[0]
    least = np.full((layers + 1, ports), np.inf)
    least[0, :] = 0.0
    best_of = np.empty(ports)
    for end in range(1, layers):
        best_of[:] = np.inf
        for o in range(templates):
            for first in range(end - 1, -1, -1):
                if turn[o, first, end] > high or 0 <= most[o, first, end] < held:
                    break
                if most[o, first, end] < 0:
                    continue
                at = least[first, port[o]] + turn[o, first, end] + price[o]
                best_of[port[o]] = min(best_of[port[o]], at)
        for behind in range(ports):
            for front in range(ports):
                at = best_of[front] + link[front, behind, end - 1]
                least[end, behind] = min(least[end, behind], at)
    return least


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def _insert(pool_score: Any, pool_label: Any, counts: Any, cut: int, score: float, label: int) -> None:
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
        return
    if score >= scores[0]:
        return
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


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def _distinct(labels: Any, scores: Any, template: Any, used: Any, weights: Any, width: int) -> Any:
    """The `width` labels with the least scores, without those that use the same as a better one."""
    chosen = np.empty(width, dtype=np.int64)
    seen = np.empty(width, dtype=np.int64)
    count = 0
    for rank in np.argsort(scores):
        label = labels[rank]
        signature = np.int64(template[label]) * 31
        for u in range(weights.shape[0]):
            signature += used[label, u] * weights[u] + used[label, u] * used[label, u] * 17
        repeated = False
        for k in range(count):
            if seen[k] == signature:
                repeated = True
                break
        if repeated:
            continue
        if count == width:
            break
        chosen[count], seen[count] = label, signature
        count += 1
    return chosen[:count]


@njit(cache=True, inline="always")  # type: ignore[misc]  # numba carries no types
def _take(u: int, devices: int, whole: int, unit_kind: Any, unit_size: Any, used: Any, label: int) -> None:
    """Count the devices of a stage that fits on unit `u` as used."""
    if whole <= 1:
        used[label, u] += devices
        return
    for v in range(u, unit_kind.shape[0]):
        if whole > 0 and unit_kind[v] == unit_kind[u] and unit_size[v] == unit_size[u] and used[label, v] == 0:
            used[label, v] = unit_size[v]
            whole -= 1


def beam_labels(capacity: int, layers: int, units: int) -> Tuple[Any, ...]:
    """The labels of a `beam`, with only the empty pipeline, and of each cut which ones are kept.

    Labels are (first, end, template, unit, parent, stages), with their sums, the prices of the devices that their
    stages use, and how many devices they use of each unit.
    """
    rows = 1 + capacity * (layers + 1)
    integers, sums, paid = np.empty((rows, 6), dtype=np.int32), np.zeros(rows), np.zeros(rows)
    used = np.zeros((rows, units), dtype=np.int16)
    pool_score = np.empty((layers + 1, capacity))
    pool_label = np.empty((layers + 1, capacity), dtype=np.int32)
    counts = np.zeros(layers + 1, dtype=np.int64)
    integers[0] = (layers, layers, -1, -1, -1, 0)
    pool_score[layers, 0], pool_label[layers, 0], counts[layers] = 0.0, 0, 1
    return integers, sums, paid, used, pool_score, pool_label, counts


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def _untouched(used: Any, like_units: Any, counts: Any, untouched: Any) -> None:
    """Fill `untouched` [units]: how many units from this one on are like it and not used at all."""
    counts[:] = 0
    for u in range(like_units.shape[0] - 1, -1, -1):
        if used[u] == 0:
            counts[like_units[u]] += 1
        untouched[u] = counts[like_units[u]]


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def beam(
    cut: int, turn: Any, first_step: Any, most: Any, in_flight: Any, port: Any, share: Any, between: Any, sends: Any,
    busy: Any, kind: Any, devices: Any, whole: Any, unit_kind: Any, unit_size: Any, like_units: Any, first_unit: Any,
    price: Any, front: Any, high: float, width: int, alike: bool, integers: Any, sums: Any, paid: Any, used: Any,
    pool_score: Any, pool_label: Any, counts: Any, fill: int,
) -> int:  # fmt: skip
    """Build on the pipelines that begin at a cut, all stages and sends within `high`, on real units.

    A label is such a pipeline's rear part; cuts come from the last to the first. At each cut the labels with the least
    sums and prices are kept, with what `front` (of `cost_in_front`) says of the layers still to come, and `width` are
    built on. `share` is the number of each template's replicas as an index; sends and busy are [share, L, class]: there
    and back, and the longer of both, by the class `between` two units. Units from `first_unit` of a kind on, up to that
    of the next one, are of that kind. `alike`: units of one kind need not be told apart.

    Returns how many labels there are now; the complete ones are those of cut 0.
    """
    templates, units, rows, capacity = turn.shape[0], unit_kind.shape[0], integers.shape[0], pool_score.shape[1]
    weights = np.empty(units, dtype=np.int64)
    for u in range(units):
        weights[u] = (unit_kind[u] + 1) * 1000003 if alike else (u + 1) * 1000003 + 7919 * u * u
    untouched, like_counts = np.empty(units, dtype=np.int64), np.empty(units, dtype=np.int64)
    held = counts[cut]
    for label in _distinct(pool_label[cut, :held], pool_score[cut, :held], integers[:, 2], used, weights, width):
        template, unit, position = integers[label, 2], integers[label, 3], integers[label, 5]
        _untouched(used[label], like_units, like_counts, untouched)
        for o in range(templates):
            if turn[o, cut - 1, cut] > high:
                continue
            fullest, least_free = -1, 0
            for u in range(first_unit[kind[o]], first_unit[kind[o] + 1]):
                free = unit_size[u] - used[label, u]
                # Of units alike the first that has room, fuller ones after it, and the one of the stage behind.
                if alike and fullest >= 0 and (whole[o] > 1 or (u != unit and free >= least_free)):
                    continue
                if whole[o] > 1:
                    if used[label, u] > 0 or unit_size[u] * whole[o] != devices[o] or untouched[u] < whole[o]:
                        continue
                elif free < devices[o]:
                    continue
                fullest, least_free = u, free
                send = slow = 0.0
                if template >= 0:
                    s = max(share[o], share[template])
                    send, slow = sends[s, cut - 1, between[u, unit]], busy[s, cut - 1, between[u, unit]]
                if slow > high:
                    continue
                for first in range(cut - 1, -1, -1):
                    c = turn[o, first, cut]
                    if c > high or 0 <= most[o, first, cut] < in_flight[position]:
                        break
                    if most[o, first, cut] < 0:
                        continue
                    total = sums[label] + c + send
                    score = total + front[first, port[o]]
                    if first == 0:
                        score += first_step[o, cut]
                    if score == np.inf or fill >= rows:
                        continue
                    score += paid[label] + price[o]
                    slot = fill
                    if counts[first] == capacity:
                        if score >= pool_score[first, 0]:
                            continue
                        slot = pool_label[first, 0]  # the worst one's place
                    else:
                        fill += 1
                    integers[slot, 0], integers[slot, 1], integers[slot, 2] = first, cut, o
                    integers[slot, 3], integers[slot, 4], integers[slot, 5] = u, label, position + 1
                    sums[slot], paid[slot] = total, paid[label] + price[o]
                    used[slot] = used[label]
                    _take(u, devices[o], whole[o], unit_kind, unit_size, used, slot)
                    _insert(pool_score, pool_label, counts, first, score, slot)
    return fill


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def _slot(table: Any, keys: Any, key: int) -> Any:
    """Where `table`, a power of two long, has the row of `keys` with this key (linear probing), or would put it."""
    last = table.shape[0] - 1
    at = (key * 0x9E3779B97F4A7C1) & last
    while table[at] >= 0 and keys[table[at]] != key:
        at = (at + 1) & last
    return at


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def _strides(sizes: Any) -> Any:
    """[kinds]: what one device of each kind adds to the one number that stands for how many of each are used."""
    strides = np.ones(sizes.shape[0], dtype=np.int64)
    for r in range(1, sizes.shape[0]):
        strides[r] = strides[r - 1] * (sizes[r - 1] + 1)
    return strides


def proof_labels(capacity: int, kinds: int, layers: int) -> Tuple[Any, ...]:
    """The labels of a proof, with only the empty pipeline, the table that finds them, and the first one of each cut."""
    table = np.full(1 << (2 * capacity - 1).bit_length(), -1, dtype=np.int64)
    keys, cost, paid = np.empty(capacity, dtype=np.int64), np.zeros(capacity), np.zeros(capacity)
    used = np.zeros((capacity, kinds), dtype=np.int32)
    state = np.empty((capacity, 3), dtype=np.int64)  # port (-1: none), slowest seen, next label of the cut
    heads = np.full(layers + 1, -1, dtype=np.int64)
    state[0] = (-1, 0, -1)
    heads[layers] = 0
    return table, keys, cost, paid, used, state, heads


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def prove(
    cut: int, turn: Any, longer: Any, first_step: Any, most: Any, held: int, port: Any, link: Any, at_port: Any,
    price: Any, unpriced: float, kind: Any, devices: Any, sizes: Any, low: float, high: float, after_weight: float,
    after_less: float, bottleneck: float, per_longer: float, table: Any, keys: Any, cost: Any, paid: Any, used: Any,
    state: Any, heads: Any, fill: int, bound: float,
) -> Tuple[int, float]:  # fmt: skip
    """One cut of the bound of `least_priced` with the devices counted one by one: no pipeline in it costs less.

    Partial pipelines from the last stage on, the cheapest for each cut, numbers of devices used of each kind, port of
    the front stage, and whether the slowest stage is in it already; those that cannot get below the bound, at first
    the best plan, are dropped. `at_port` comes from `least_priced` at the same prices, `unpriced` is the price of all
    devices of the cluster. Where there is no room for more, the least bound of those that find no place counts.

    Returns how many labels there are now, and the bound, which holds after cut 1.
    """
    templates, layers = turn.shape[0], turn.shape[1]
    kinds, ports, capacity = sizes.shape[0], link.shape[0], keys.shape[0]
    strides = _strides(sizes)
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
                if c > high or 0 <= most[o, first, cut] < (1 if cut == layers else held):
                    break
                if most[o, first, cut] < 0:
                    continue
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
                    at = _slot(table, keys, key)
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
    return fill, bound
