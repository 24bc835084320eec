"""The compiled inner loops of the exact search.

Numba's cache watches only the file that it compiles. After a change to `segment_end_s` or `turns_s` of
hwaware.costs.pipeline, touch this file.

The pipeline is built from its last stage to its first. A state is (first layer so far, devices used of each class,
option of the front stage); a label is one way to reach a state. Numbers of devices used are kept as one index in
mixed radix. An option is a way to build a stage: replicas of devices of certain classes, with their shares.
"""

from __future__ import annotations

from typing import Any, Tuple

import numpy as np
from numba import njit

from hwaware.costs import pipeline

# Columns of the labels' arrays.
SUM, TIME, ONCE, LOWEST = 0, 1, 2, 3  # values: S, T, U, and a lower bound on every completion
FIRST, USED, FRONT, PARENT, NEXT_IN_STATE, NEXT_IN_LAYER, ALIVE, POSITION = 0, 1, 2, 3, 4, 5, 6, 7  # integers

# How the time of a step follows from the stages.
TURNS = 0  # 1F1B: hwaware.costs.pipeline.one_f_one_b_s
SUM_AND_MAX = 1  # sum + (B - 1) (max forward + max backward): GPipe, inference and Alpa's objective

# Of a segment of stages, the formulas of `evaluate` itself.
segment_end_s = njit(cache=True)(pipeline.segment_end_s)
turns_s = njit(cache=True)(pipeline.turns_s)


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def fits_in(use: Any, sizes: Any, counts: Any) -> Any:
    """Whether the devices that an option uses are still there."""
    return (counts + use <= sizes).all()


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def relax(
    end: int, forward: Any, backward: Any, excess_bytes: Any, activation: Any, update_excess: Any, most: Any, cut: Any,
    in_flight: Any, use: Any, deltas: Any, sizes: Any, counts: Any, fewest: Any, longest: float, total: Any,
    slowest: Any, excess: Any,
) -> None:  # fmt: skip
    """Fill row `end` of what the layers before `end` cost at least, from the rows before it.

    `total`, `slowest` and `excess` are arrays [L + 1, N], for layers 0 .. end - 1 in front of a state, with the devices
    that are left and links between devices disregarded: the least sum of stage times and of the cheapest sends, the
    least slowest stage, and the least worst memory excess (bytes; negative is room).
    """
    layers, states, options = forward.shape[1], counts.shape[0], forward.shape[0]
    for state in range(states):
        send = 0.0 if end == layers else cut[end - 1]
        held = in_flight[fewest[state]]
        for k in range(options):
            if not fits_in(use[k], sizes, counts[state]):
                continue
            after = state + deltas[k]
            for first in range(end - 1, -1, -1):
                passes = excess_bytes[k, first, end] + (held - 1) * activation[k, first, end]
                own = max(passes, update_excess[k, first, end])
                over = max(own, excess[first, after])
                if over < excess[end, state]:
                    excess[end, state] = over
                if held > most[k, first, end]:
                    continue
                time = forward[k, first, end] + backward[k, first, end]
                if time > longest:
                    continue
                value = time + send + total[first, after]
                if value < total[end, state]:
                    total[end, state] = value
                value = max(time, slowest[first, after])
                if value < slowest[end, state]:
                    slowest[end, state] = value


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def dominates(mode: int, length: int, one: Any, one_matters: Any, other: Any) -> Any:
    """Whether no completion of label `one` can cost more than the same completion of `other`, by their vectors."""
    if mode == SUM_AND_MAX:
        return one[0] <= other[0] and one[1] <= other[1]
    for position in range(length):
        at = 3 * position
        if one_matters[position] and (
            one[at] > other[at] or one[at + 1] > other[at + 1] or one[at + 2] > other[at + 2]
        ):
            return False
    return True


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def step_time(
    mode: int, microbatches: int, position: int, before: float, before_time: float, forward: float, backward: float,
    send: float, back: float, vector: Any,
) -> Any:  # fmt: skip
    """Time T of the pipeline with a new front stage; `vector` holds the old segments and is brought up to date.

    For 1F1B: for each stage, counted from the last, the turn Q and the slowest stage of the segment from the front
    to it, and its ends h(f) + h(b). Else: the slowest forward and the slowest backward.
    """
    turn, link = forward + backward, send + back
    beyond = before + link
    total = beyond + turn
    if mode == SUM_AND_MAX:
        vector[0] = max(vector[0], forward, send)
        vector[1] = max(vector[1], backward, back)
        return total + (microbatches - 1) * (vector[0] + vector[1])
    time = max(before_time + turn + link, total + (microbatches - 1) * max(send, back))
    for other in range(position):
        at = 3 * other
        vector[at] += turn + link
        vector[at + 1] = max(vector[at + 1], turn)
        left, length = microbatches - other - 1, position - other + 1
        if left >= length:
            whole, rest = turns_s(vector[at], vector[at + 1], left + length, length)  # the first turn too
            time = max(time, whole + vector[at + 2] + rest)
    at = 3 * position
    vector[at] = vector[at + 1] = turn
    left = microbatches - position - 1
    end = segment_end_s(beyond, forward, backward, turn, position, microbatches)
    if left > 0:
        vector[at + 2] = end
        return max(time, turns_s(turn, turn, left + 1, 1)[0] + end)
    vector[at + 2] = 0.0
    return max(time, end)


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def mark_relevant(
    microbatches: int, position: int, time: float, room: float, slack: float, vector: Any, matters: Any
) -> None:
    """Which segments can still decide the step: those that may exceed T + X for some X <= `room` added in front.

    A stage of those added may take `slack` more than all of them add, as each can take that off the step.
    """
    for other in range(position + 1):
        at = 3 * other
        left, length = microbatches - other - 1, position - other + 2
        turns = left // length if left > 0 else 0
        if turns == 0:
            matters[other] = False
        elif room == np.inf:
            matters[other] = True
        else:
            most = (vector[at] + room) * (turns + 1) + vector[at + 2] + left * max(vector[at + 1], room + 2.0 * slack)
            matters[other] = most > time + room


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def least_completion(
    mode: int, microbatches: int, position: int, deepest: int, whole: float, time: float, once: float, rest: float,
    slowest: float, vector: Any, slack: float,
) -> Any:  # fmt: skip
    """A lower bound on the step time of every completion of a label.

    The way through any stages in front, c + a + g of each, takes no less than -`slack`, what the first one behind them
    gains by waiting (`hwaware.costs.communication.exposed_time_s`). `rest` and `slowest` are what `relax` says of the
    layers in front, `deepest` the most stages that there can be. The slowest stage in front, wherever it stands, has
    its own B turns to make.
    """
    lowest = max(time + max(once, 0.0), microbatches * slowest) - slack
    if mode == SUM_AND_MAX:
        return max(lowest, whole + rest + (microbatches - 1) * max(vector[0] + vector[1], slowest))
    lowest = max(lowest, time + rest)
    if microbatches > deepest:
        # one_f_one_b_s with i = j = that stage: fill + c + R >= whole + rest, and R >= whole - slack once more.
        lowest = max(lowest, 2 * whole + rest + (microbatches - deepest) * slowest - slack)
    return lowest


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def compare(
    mode: int, position: int, first: int, after: int, k: int, whole: float, time: float, once: float, vector: Any,
    relevant: Any, values: Any, vectors: Any, matters: Any, integers: Any, heads: Any, lengths: Any,
) -> Tuple[bool, int]:  # fmt: skip
    """Compare a new label with those of its state: whether it is kept, and which label of the state is the worst.

    Labels that the new one dominates are taken out. None of them has been expanded: the state's layer is still to come.
    """
    previous, other, worst = -1, heads[first, after, k], -1
    while other >= 0:
        following = integers[other, NEXT_IN_STATE]
        if integers[other, POSITION] != position:
            if worst < 0 or values[other, LOWEST] > values[worst, LOWEST]:
                worst = other
            previous, other = other, following
            continue
        if (
            values[other, SUM] <= whole
            and values[other, TIME] <= time
            and values[other, ONCE] <= once
            and dominates(mode, position + 1, vectors[other], matters[other], vector)
        ):
            return False, -1
        if (
            whole <= values[other, SUM]
            and time <= values[other, TIME]
            and once <= values[other, ONCE]
            and dominates(mode, position + 1, vector, relevant, vectors[other])
        ):
            integers[other, ALIVE] = 0
            lengths[first, after, k] -= 1
            if previous >= 0:
                integers[previous, NEXT_IN_STATE] = following
            else:
                heads[first, after, k] = following
        else:
            if worst < 0 or values[other, LOWEST] > values[worst, LOWEST]:
                worst = other
            previous = other
        other = following
    return True, worst


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def grown(array: Any) -> Any:
    """The array with twice the rows."""
    larger = np.empty((2 * array.shape[0], array.shape[1]), dtype=array.dtype)
    larger[: array.shape[0]] = array
    return larger


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def with_room(values: Any, vectors: Any, matters: Any, integers: Any, used_labels: int) -> Tuple[Any, Any, Any, Any]:
    """The labels' arrays with room for one label more."""
    if used_labels < values.shape[0]:
        return values, vectors, matters, integers
    return grown(values), grown(vectors), grown(matters), grown(integers)


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def expand(
    layer: int, cursor: int, budget: int, mode: int, microbatches: int, width: int, forward: Any, backward: Any,
    per_step: Any, most: Any, pairs: Any, sends: Any, backs: Any, in_flight: Any, use: Any, deltas: Any, sizes: Any,
    counts: Any, devices_left: Any, weight: Any, heavier: Any, total: Any, slowest: Any, values: Any, vectors: Any,
    matters: Any, integers: Any, used_labels: int, heads: Any, lengths: Any, layer_heads: Any, best: float,
    best_label: int, dropped: float, margin: float, slack: float,
) -> Tuple[int, Any, Any, Any, Any, int, float, int, float]:  # fmt: skip
    """Put every possible stage in front of the labels that start at `layer`, from label `cursor` on.

    At most `width` labels are kept in a state, those with the least lower bounds; `dropped` is the least lower bound
    among the others. `best` is the least objective found, `best_label` its label. The objective is the step time times
    `weight`, by the devices used; `heavier` is the least weight of a completion that has more stages.

    Returns the cursor (-1 when the layer is done), the arrays, which may have grown, and the running figures.
    """
    options = forward.shape[0]
    vector = np.empty(vectors.shape[1])
    relevant = np.empty(matters.shape[1], dtype=np.bool_)
    while cursor >= 0 and budget > 0:
        label = cursor
        cursor = integers[label, NEXT_IN_LAYER]
        if integers[label, ALIVE] == 0 or values[label, LOWEST] >= best * margin:
            continue
        used, front, position = integers[label, USED], integers[label, FRONT], integers[label, POSITION] + 1
        for k in range(options):
            if not fits_in(use[k], sizes, counts[used]):
                continue
            send = back = 0.0
            if front >= 0:
                pair = pairs[k, front]
                if pair < 0:
                    continue
                send, back = sends[pair, layer - 1], backs[pair, layer - 1]
            after = used + deltas[k]
            for first in range(layer - 1, -1, -1):
                if most[k, first, layer] < 0:
                    continue  # a rule forbids it, and may allow longer ones
                if in_flight[position] > most[k, first, layer]:
                    break
                f, b = forward[k, first, layer], backward[k, first, layer]
                if (microbatches * (f + b) - slack) * weight[after] >= best * margin:
                    break
                budget -= 1
                rest = total[first, after]
                if (values[label, TIME] + f + b + send + back + rest) * weight[after] >= best * margin:
                    continue
                vector[:] = vectors[label]
                time = step_time(
                    mode, microbatches, position, values[label, SUM], values[label, TIME], f, b, send, back, vector
                )
                whole = values[label, SUM] + f + b + send + back
                once = max(per_step[k, first, layer], values[label, ONCE] - b - back)
                if first == 0:
                    if (time + max(once, 0.0)) * weight[after] < best:
                        best = (time + max(once, 0.0)) * weight[after]
                        values, vectors, matters, integers = with_room(values, vectors, matters, integers, used_labels)
                        best_label = used_labels
                        integers[used_labels, FIRST], integers[used_labels, USED] = 0, after
                        integers[used_labels, FRONT], integers[used_labels, PARENT] = k, label
                        used_labels += 1
                    continue
                lowest = heavier[after] * least_completion(
                    mode, microbatches, position, position + 1 + min(devices_left[after], first), whole, time, once,
                    rest, slowest[first, after], vector, slack,
                )  # fmt: skip
                if lowest >= best * margin:
                    continue
                if mode == TURNS:
                    mark_relevant(microbatches, position, time, best / heavier[after] - time, slack, vector, relevant)
                kept, worst = compare(
                    mode, position, first, after, k, whole, time, once, vector, relevant, values, vectors, matters,
                    integers, heads, lengths,
                )  # fmt: skip
                if not kept:
                    continue
                if lengths[first, after, k] >= width:
                    dropped = min(dropped, max(lowest, values[worst, LOWEST]))
                    if lowest >= values[worst, LOWEST]:
                        continue
                    slot = worst  # takes the worse label's place, in the lists too
                else:
                    values, vectors, matters, integers = with_room(values, vectors, matters, integers, used_labels)
                    slot = used_labels
                    used_labels += 1
                    integers[slot, NEXT_IN_STATE] = heads[first, after, k]
                    heads[first, after, k] = slot
                    lengths[first, after, k] += 1
                    integers[slot, NEXT_IN_LAYER] = layer_heads[first]
                    layer_heads[first] = slot
                values[slot, SUM], values[slot, TIME] = whole, time
                values[slot, ONCE], values[slot, LOWEST] = once, lowest
                vectors[slot] = vector
                matters[slot] = relevant
                integers[slot, FIRST], integers[slot, USED] = first, after
                integers[slot, FRONT], integers[slot, PARENT] = k, label
                integers[slot, ALIVE], integers[slot, POSITION] = 1, position
    return cursor, values, vectors, matters, integers, used_labels, best, best_label, dropped
