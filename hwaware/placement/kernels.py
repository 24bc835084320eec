"""Compile the inner loops of the exact search.

Numba's cache watches only the file that it compiles. After a change to `segment_end_s` or `turns_s` of
hwaware.costs.pipeline, touch this file.

The search builds a pipeline from its last stage to its first. A state has the first layer so far, the devices used of
each class, and the front stage's option. A label is one way to reach a state. One index in mixed radix stands for the
devices used. An option is a way to build a stage: replicas of devices of certain classes, with their shares.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Tuple

import numpy as np
from numba import njit

from hwaware.costs import pipeline

# Columns of the labels' arrays.
SUM, TIME, ONCE, LOWEST = 0, 1, 2, 3  # values: S, T, U, and a lower bound on every completion
FIRST, USED, FRONT, PARENT, NEXT_IN_STATE, NEXT_IN_LAYER, ALIVE, POSITION = 0, 1, 2, 3, 4, 5, 6, 7  # integers

# How the time of a step follows from the stages.
TURNS = 0  # 1F1B: hwaware.costs.pipeline.one_f_one_b_s
SUM_AND_MAX = 1  # sum + (B - 1) (max forward + max backward): GPipe, inference and Alpa's objective


class Tables(NamedTuple):
    """Hold the arrays that the loops read; N numbers of devices used, O options, K classes of devices, L layers."""

    mode: int  # how the time of a step follows from the stages
    microbatches: int  # B
    stage: Any  # costs of stages, a `StageTable` of O options
    pairs: Any  # this and the next one as in `hwaware.placement.ways.Arrays`
    messages_s: Any  # [4, pairs, L]
    use: Any  # [O, K]
    ahead_s: Any  # [O] most that a pass gains by waiting
    cut_s: Any  # [L] messages there and back over the cheapest pair, which any two neighbours pay
    in_flight: Any  # microbatches in flight, by the stages behind
    sizes: Any  # [K] devices of each class
    deltas: Any  # [O] step of the index of used devices when an option takes its devices
    counts: Any  # [N, K] devices used of each class
    devices_left: Any  # [N] devices of all classes that are left
    fewest: Any  # [N] least number of stages behind
    weight: Any  # [N] factor from step time to objective, of a complete plan
    heavier: Any  # [N] the same of a plan that still gets stages
    slack_s: float  # most that stages put in front can take off a step


class Labels(NamedTuple):
    """Hold one row for each label, and lists of the labels of each state and of each first layer."""

    values: Any
    vectors: Any
    matters: Any
    integers: Any
    heads: Any
    lengths: Any
    layer_heads: Any


# Of a segment of stages, the formulas of `evaluate` itself.
segment_end_s = njit(cache=True)(pipeline.segment_end_s)
turns_s = njit(cache=True)(pipeline.turns_s)


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def relax(end: int, t: Tables, longest: float, total: Any, slowest: Any) -> None:
    """Fill row `end` of bounds on the layers before `end`, from the rows before it.

    Each array is [L + 1, N], for layers 0 .. end - 1 in front of a state. `total` is the least sum of stage times, less
    what passes gain by waiting, and cheapest messages. `slowest` is the least slowest stage. The bounds disregard links
    between devices.
    """
    s, layers = t.stage, t.cut_s.shape[0]
    for state in range(t.counts.shape[0]):
        send = 0.0 if end == layers else t.cut_s[end - 1]
        held = t.in_flight[t.fewest[state]]
        for k in range(t.use.shape[0]):
            if (t.counts[state] + t.use[k] > t.sizes).any():
                continue
            after = state + t.deltas[k]
            for first in range(end - 1, -1, -1):
                if held > s.most_in_flight[k, first, end]:
                    continue
                forward, backward = s.forward_s[k, first, end], s.backward_s[k, first, end]
                time = forward + backward
                if time > longest:
                    continue
                least = time - min(forward, t.ahead_s[k]) - min(backward, t.ahead_s[k])
                value = least + send + total[first, after]
                if value < total[end, state]:
                    total[end, state] = value
                value = max(time, slowest[first, after])
                if value < slowest[end, state]:
                    slowest[end, state] = value


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def dominates(mode: int, length: int, one: Any, one_matters: Any, other: Any, gap: float) -> Any:
    """Return True if no completion costs label `one` more than `other`, whose front may gain `gap` more by waiting."""
    if mode == SUM_AND_MAX:
        return one[0] <= other[0] and one[1] <= other[1]
    for position in range(length):
        at = 3 * position
        if one_matters[position] and (
            one[at] + (gap if position < length - 1 else 0.0) > other[at]
            or one[at + 1] > other[at + 1]
            or one[at + 2] > other[at + 2]
        ):
            return False
    return True


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def step_time(
    mode: int, microbatches: int, position: int, before: float, before_time: float, forward: float, backward: float,
    send: float, back: float, there: float, home: float, vector: Any,
) -> Any:  # fmt: skip
    """Return the time T of the pipeline with a new front stage, and update the segments in `vector`.

    For 1F1B, `vector` describes the segment from the front to each stage, counted from the last. Its three numbers are
    the turn Q, the slowest stage, and the ends h(f) + h(b). Those of the front stage are c, f and b, as its ends depend
    on the link in front. Else `vector` has the slowest forward, the slowest backward, and f. `there` and `home` are the
    times on the link. `send` and `back` are less by what their receivers gain by waiting.
    """
    turn, link = forward + backward, send + back
    beyond = before + link
    total = beyond + turn
    if mode == SUM_AND_MAX:
        vector[0] = max(vector[0], forward, there)
        vector[1] = max(vector[1], backward, home)
        vector[2] = forward
        return total + (microbatches - 1) * (vector[0] + vector[1])
    time = max(before_time + turn + link, total + (microbatches - 1) * max(there, home))
    if position > 0:  # the link in front of the stage behind is known now
        at, left = 3 * (position - 1), microbatches - position
        own = vector[at]
        end = segment_end_s(before - own, vector[at + 1], vector[at + 2], there, home, position - 1, microbatches)
        time = max(time, turn + link + ((left + 1) * own + end if left > 0 else end))
        vector[at + 1], vector[at + 2] = own, end
    for other in range(position):
        at = 3 * other
        vector[at] += turn + link
        vector[at + 1] = max(vector[at + 1], turn)
        left, length = microbatches - other - 1, position - other + 1
        if left >= length:
            whole, rest = turns_s(vector[at], vector[at + 1], left + length, length)  # the first turn too
            time = max(time, whole + vector[at + 2] + rest)
    at = 3 * position
    vector[at], vector[at + 1], vector[at + 2] = turn, forward, backward
    end = segment_end_s(beyond, forward, backward, 0.0, 0.0, position, microbatches)
    return max(time, (microbatches - position) * turn + end if microbatches - position > 1 else end)


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def mark_relevant(
    microbatches: int, position: int, time: float, room: float, slack: float, vector: Any, matters: Any
) -> None:
    """Mark the segments that can still decide the step: they may exceed T + X for an X <= `room`.

    X is what stages in front add. One such stage may take `slack` more than all add, as each can take that off the
    step. The front stage always counts, because the link in front may still lengthen its ends.
    """
    matters[position] = True
    for other in range(position):
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
    """Return a lower bound on the step time of every completion of a label.

    Stages in front add c + a + g >= -`slack`, as the stage behind them gains by waiting
    (`hwaware.costs.links.exposed_time_s`). `rest` and `slowest` come from `relax`; `deepest` is the most stages
    possible. The slowest stage in front makes its own B turns, wherever it stands.
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
def compare(mode: int, new: int, vector: Any, relevant: Any, labels: Labels, ahead: float) -> Tuple[bool, int]:
    """Compare a new label with those of its state. Return if it is kept, and the state's worst label.

    It removes the labels that the new one dominates. The search has expanded none of these, as their layer comes later.
    By waiting for a message, the front stage's forward pass gains `ahead`, but at most its own time.
    """
    values, vectors, integers, matters = labels.values, labels.vectors, labels.integers, labels.matters
    first, after, k = integers[new, FIRST], integers[new, USED], integers[new, FRONT]
    position, whole, time, once = integers[new, POSITION], values[new, SUM], values[new, TIME], values[new, ONCE]
    previous, other, worst = -1, labels.heads[first, after, k], -1
    at = 2 if mode == SUM_AND_MAX else 3 * position + 1
    gained = min(vector[at], ahead)
    while other >= 0:
        following = integers[other, NEXT_IN_STATE]
        alike = integers[other, POSITION] == position
        gap = gained - min(vectors[other, at], ahead)  # of the new label, or else of the other one
        own, its = max(gap, 0.0), max(-gap, 0.0)
        less = values[other, SUM] + own <= whole and values[other, TIME] + own <= time and values[other, ONCE] <= once
        more = whole + its <= values[other, SUM] and time + its <= values[other, TIME] and once <= values[other, ONCE]
        if alike and less and dominates(mode, position + 1, vectors[other], matters[other], vector, own):
            return False, -1
        if alike and more and dominates(mode, position + 1, vector, relevant, vectors[other], its):
            integers[other, ALIVE] = 0
            labels.lengths[first, after, k] -= 1
            if previous >= 0:
                integers[previous, NEXT_IN_STATE] = following
            else:
                labels.heads[first, after, k] = following
        else:
            if worst < 0 or values[other, LOWEST] > values[worst, LOWEST]:
                worst = other
            previous = other
        other = following
    return True, worst


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def expand(
    layer: int, cursor: int, budget: int, width: int, t: Tables, total: Any, slowest: Any, labels: Labels,
    used_labels: int, best: float, best_label: int, dropped: float, margin: float,
) -> Tuple[int, int, float, int, float]:  # fmt: skip
    """Put every possible stage in front of the labels that start at `layer`, from label `cursor` on.

    A state keeps the `width` labels with the least lower bounds; `dropped` is the least bound of the others. `best` is
    the least objective found, `best_label` its label. Return the cursor (-1 after the layer's last label) and the
    running figures. It also returns before a label whose stages may find no room in `labels`.
    """
    s, values, integers, vectors = t.stage, labels.values, labels.integers, labels.vectors
    vector, relevant = np.empty(vectors.shape[1]), np.empty(labels.matters.shape[1], dtype=np.bool_)
    while cursor >= 0 and budget > 0 and used_labels + t.use.shape[0] * layer <= values.shape[0]:
        label = cursor
        cursor = integers[label, NEXT_IN_LAYER]
        if integers[label, ALIVE] == 0 or values[label, LOWEST] >= best * margin:
            continue
        used, front, position = integers[label, USED], integers[label, FRONT], integers[label, POSITION] + 1
        whole_behind, time_behind, once_behind = values[label, SUM], values[label, TIME], values[label, ONCE]
        for k in range(t.use.shape[0]):
            if (t.counts[used] + t.use[k] > t.sizes).any():
                continue
            send = most_back = there = home = 0.0
            if front >= 0:
                pair = t.pairs[k, front]
                if pair < 0:
                    continue
                cell = t.messages_s[:, pair, layer - 1]
                most_back, there, home = cell[1], cell[2], cell[3]
                send = max(cell[0], there - vectors[label, 2 if t.mode == SUM_AND_MAX else 3 * position - 2])
            after = used + t.deltas[k]
            for first in range(layer - 1, -1, -1):
                if s.most_in_flight[k, first, layer] < 0:
                    continue  # a rule forbids it, and may allow longer ones
                if t.in_flight[position] > s.most_in_flight[k, first, layer]:
                    break
                f, b = s.forward_s[k, first, layer], s.backward_s[k, first, layer]
                if (t.microbatches * (f + b) - t.slack_s) * t.weight[after] >= best * margin:
                    break
                budget -= 1
                back = max(most_back, home - b)
                rest = total[first, after] - min(f, t.ahead_s[k])
                if (time_behind + f + b + send + back + rest) * t.weight[after] >= best * margin:
                    continue
                vector[:] = vectors[label]
                time = step_time(
                    t.mode, t.microbatches, position, whole_behind, time_behind, f, b, send, back, there, home, vector
                )
                whole = whole_behind + f + b + send + back
                hidden = b + back
                if t.mode == SUM_AND_MAX:  # as in hwaware.costs.pipeline.tail_s
                    hidden += (t.microbatches - 1) * (vector[1] - vectors[label, 1])
                once = max(s.per_step_s[k, first, layer], once_behind - hidden)
                if first == 0:  # complete
                    lowest, needed = (time + max(once, 0.0)) * t.weight[after], best
                else:
                    needed = best * margin
                    lowest = t.heavier[after] * least_completion(
                        t.mode, t.microbatches, position, position + 1 + min(t.devices_left[after], first), whole, time,
                        once, rest, slowest[first, after], vector, t.slack_s,
                    )  # fmt: skip
                if lowest >= needed:
                    continue
                new = used_labels  # a free row, which the label gets if it is kept
                integers[new, FIRST], integers[new, USED], integers[new, FRONT] = first, after, k
                integers[new, PARENT], integers[new, ALIVE], integers[new, POSITION] = label, 1, position
                if first == 0:
                    best, best_label = lowest, new
                    used_labels += 1
                    continue
                values[new, SUM], values[new, TIME], values[new, ONCE], values[new, LOWEST] = whole, time, once, lowest
                if t.mode == TURNS:
                    room = best / t.heavier[after] - time
                    mark_relevant(t.microbatches, position, time, room, t.slack_s, vector, relevant)
                kept, worst = compare(t.mode, new, vector, relevant, labels, t.ahead_s[k])
                if not kept:
                    continue
                if labels.lengths[first, after, k] < width:
                    vectors[new], labels.matters[new] = vector, relevant
                    integers[new, NEXT_IN_STATE] = labels.heads[first, after, k]
                    labels.heads[first, after, k] = new
                    labels.lengths[first, after, k] += 1
                    integers[new, NEXT_IN_LAYER] = labels.layer_heads[first]
                    labels.layer_heads[first] = new
                    used_labels += 1
                    continue
                dropped = min(dropped, max(lowest, values[worst, LOWEST]))
                if lowest < values[worst, LOWEST]:  # the new label takes the worse one's place, in the lists too
                    values[worst], vectors[worst], labels.matters[worst] = values[new], vector, relevant
                    integers[worst, PARENT], integers[worst, POSITION] = label, position
    return cursor, used_labels, best, best_label, dropped
