"""Price steps by closed forms for 1F1B, GPipe and inference, from the times of stages and links.

f_s and b_s are the forward and backward times of stage s = 0 .. n - 1 for one of B microbatches, and c_s = f_s + b_s.
A_s and G_s, the arguments `on_link`, are the times to send activations to stage s + 1 and gradients back. a_s and g_s
are these times less what the receivers gain by waiting, see `hwaware.costs.links.exposed_time_s`. They may be below 0.
Without `on_link`, A = a and G = g. A message leaves as soon as its data exist, and computation does not wait for it.
Messages of one direction between two stages follow each other.
"""

from __future__ import annotations

import math
from typing import Optional, Sequence, Tuple

from hwaware.plans import Schedule

Times = Sequence[float]
BothTimes = Tuple[Times, Times]


def one_f_one_b_s(
    forward: Times, backward: Times, activations: Times, gradients: Times, num_microbatches: int,
    on_link: Optional[BothTimes] = None,
) -> Tuple[float, float]:  # fmt: skip
    """Return the time of one 1F1B step until the first stage's last backward pass, and the period.

    Stage j runs w_j = min(B, n - j) forwards before its first backward, then alternates. The step is as long as the
    longest chain of dependent work. These chains can be the longest:

        a link s that is never idle:            S + (B - 1) max(A_s, G_s),      S = sum c + sum (a + g)
        a segment of stages i <= j that turns:  fill_i + Q k' + h_j(f) + h_j(b) + r max_{i<=s<=j} c_s

        fill_i = sum_{s<i} (c_s + a_s + g_s)                            the way to stage i and back
        Q = sum_{s=i..j} c_s + sum_{s=i..j-1} (a_s + g_s)               one turn
        k' = k + 1,  B - w_j = k L + r,  L = j - i + 1                  turns, and microbatches left
        h_j(t) = max(R_j, (w_j - 1) t'_j)                               once to fill, once to drain
        R_j = sum_{s>j} c_s + sum_{s>=j} (a_s + g_s)                    beyond the segment
        f'_j = max(f_j, A_{j-1}),  b'_j = max(b_j, G_{j-1})             the link in front may be slower than stage j

    Stage i admits microbatch k + n - i only after the backward of k, so one turn brings L microbatches. Stage j does
    not wait for what lies beyond if it has enough to do. With B <= w_j, it runs all forwards before its first backward:

        fill_j + c_j + max(R_j + (B - 1) max(f'_j, b'_j), (B - 1) (f'_j + b'_j))

    Every chain exists, so the result is never above the exact time. It is exact for equal stages without communication,
    S + (B - 1) c. tests/unit/test_costs_pipeline.py holds random uneven stages to limits against a simulation.

    Example:
        >>> one_f_one_b_s([1, 1, 1, 1], [2, 2, 2, 2], [0, 0, 0], [0, 0, 0], 32)
        (105.0, 3.0)
        >>> one_f_one_b_s([1, 1, 1, 1], [2, 2, 2, 2], [0, 2, 0], [0, 2, 0], 32)
        (169.0, 5.0)

    Source: longest path in the schedule's dependency graph. Schedule: Narayanan et al., 2021, and Alpa 0.2.3's
    PipeDreamFlush, whose own schedule objects give 105 and 169 for the two examples.
    """
    # The period tells the segments that cannot be the longest.
    # A segment's first turn and the way to it take fill_i + Q = sum_{s<=j} c_s + sum_{s<j} (a_s + g_s) = F_j for any i,
    # so its chain is F_j + h_j(f) + h_j(b) + k Q + r max c_s. Let z be the slowest stage, the first of several.
    # With z in the segment, k Q + r max c_s <= (B - w_j) P + e_j: P is the period, e_j <= 0 the largest Q - L P of such
    # segments. Without, k Q + r max c_s <= (B - w_j) q_j: q_j is the largest max(0, a_{s-1} + g_{s-1}) + c_s before or
    # behind z. Most often only z's own segment comes near.
    n = len(forward)
    turn = [f + b for f, b in zip(forward, backward)]
    link = [a + g for a, g in zip(activations, gradients)]
    on_link = on_link or (activations, gradients)
    busiest = max([0.0, *on_link[0], *on_link[1]])
    period, slowest = _largest_mean_s(turn, link, busiest), max(turn)
    longest = sum(turn) + sum(link) + (num_microbatches - 1) * busiest
    ends, beyond = [], 0.0
    in_front = (*reversed(on_link[0]), 0.0), (*reversed(on_link[1]), 0.0)
    from_the_end = zip(reversed(forward), reversed(backward), *in_front, reversed(turn), (0.0, *reversed(link)))
    for behind, (own_forward, own_backward, there, back, own, sent) in enumerate(from_the_end):
        beyond += sent
        ends.append(segment_end_s(beyond, own_forward, own_backward, there, back, behind, num_microbatches))
        beyond += own
    ends.reverse()
    candidates = []
    left, reached, gap, beside, met = num_microbatches - n, 0.0, 0.0, 0.0, False
    # Plain comparisons, no calls and no indices: this is a fifth of the time of pricing a plan.
    for own, end, sent in zip(turn, ends, (0.0, *link)):
        reached += sent + own
        gap += sent
        if gap < 0.0 and not met:  # the segment that begins here has the largest Q - L P of all that end here
            gap = 0.0
        gap += own - period
        if own == slowest and not met:
            met, beside = True, 0.0
        elif own > beside or sent + own > beside:
            beside = own if sent < 0.0 else sent + own  # a segment may begin here, where sends are below 0
        once = reached + end
        if left > 0:
            chain = once + left * own
            if chain > longest:
                longest = chain
            most = left * period + gap if met else 0.0
            if left * beside > most:
                most = left * beside
            if once + most > longest:
                candidates.append((once + most, left, once))
        elif once - own > longest:  # all forwards first: `end` is all of it but the fill
            longest = once - own
        left += 1
    for most, left, once in candidates:
        if most > longest:
            turns = _longest_turns_s(turn, link, left, num_microbatches)
            if once + turns > longest:
                longest = once + turns
    return float(longest), float(period)


def _longest_turns_s(turn: Times, link: Times, left: int, num_microbatches: int) -> float:
    """Return the largest k Q + r max c of the segments that end at the stage with `left` microbatches left."""
    first = len(turn) - num_microbatches
    last = first + left
    segment = slowest = turn[last]
    longest = left * segment
    for i in range(last - 1, max(-1, first), -1):
        own = turn[i]
        segment += own + link[i]
        if own > slowest:
            slowest = own
        whole, rest = turns_s(segment, slowest, left, last - i + 1)
        if whole + rest > longest:
            longest = whole + rest
    return longest


def turns_s(segment: float, slowest: float, left: int, length: int) -> Tuple[float, float]:
    """Return k Q and r max c of a segment of that many stages, with k L + r microbatches left.

    Numba compiles this function and `segment_end_s` for the exact search.
    """
    return left // length * segment, left % length * slowest


def segment_end_s(
    beyond: float, forward: float, backward: float, there: float, back: float, behind: int, num_microbatches: int
) -> float:
    """Return h_j(f) + h_j(b) of a stage with `behind` stages and R_j = `beyond` seconds behind it.

    `there` and `back` are the sends over the link in front, 0 without one. For a stage that runs all forwards first,
    the result is the whole time without the fill.
    """
    fill = there if there > forward else forward
    drain = back if back > backward else backward
    if num_microbatches > behind + 1:
        fill, drain = behind * fill, behind * drain
        return (fill if fill > beyond else beyond) + (drain if drain > beyond else beyond)
    repeats = num_microbatches - 1
    return forward + backward + max(beyond + repeats * max(fill, drain), repeats * (fill + drain))


def pipeline_and_period_s(
    schedule: Schedule, forward: Times, backward: Times, activations: Times, gradients: Times, num_microbatches: int,
    on_link: Optional[BothTimes] = None,
) -> Tuple[float, float]:  # fmt: skip
    """Return the time of a step until the first stage's last backward pass, and the time P between two microbatches.

        1F1B:       `one_f_one_b_s`
                    P = max( max A, max G, max_{i<=j} (sum_{s=i..j} c_s + sum_{s=i..j-1} (a_s + g_s)) / (j - i + 1) )
        inference:  sum f + sum a + (B - 1) P,    P = max(f, A)
        GPipe:      as inference for forward and for backward passes, b with g, and both added up

    P is of the steady state. For 1F1B, it is the largest mean over the simple cycles of the dependency graph.

    Example:
        >>> pipeline_and_period_s("1f1b", [1, 1], [2, 2], [2], [2], 4)
        (23.0, 5.0)
        >>> pipeline_and_period_s("gpipe", [1, 1], [2, 2], [0], [0], 3)
        (12.0, 3.0)

    Source: Huang et al., "GPipe", 2019. Baccelli et al., "Synchronization and Linearity", 1992 (cycle time of an event
    graph). Dinkelbach, 1967 (the largest ratio by repeated differences).
    """
    if schedule == "1f1b":
        return one_f_one_b_s(forward, backward, activations, gradients, num_microbatches, on_link)
    step = period = 0.0
    there, back = on_link or (activations, gradients)
    both_ways = (forward, activations, there), (backward, gradients, back)
    for passes, sends, whole in both_ways[: 1 if schedule == "inference" else 2]:
        slowest = max([*passes, *whole])
        step += float(sum(passes) + sum(sends) + (num_microbatches - 1) * slowest)
        period += float(slowest)
    return step, period


def _largest_mean_s(turn: Times, link: Times, busiest: float) -> float:
    """Return the largest of `busiest` and the means of all segments: turns and links between, over their length."""
    longest = max(turn)
    if busiest > longest:
        longest = busiest
    pairs = list(zip(turn, (0.0, *link)))
    # Kadane's scan finds a segment above the mean so far, if there is one; repeated until there is none.
    while True:
        mean = longest
        segment, length, above = 0.0, 0, 0.0
        for own, sent in pairs:
            above += sent
            if above <= 0.0:  # what came before is not above the mean: begin here
                segment, length, above = 0.0, 0, 0.0
                sent = 0.0
            segment += sent + own
            above += own - mean
            length += 1
            if above > 0.0 and segment > longest * length:
                longest = segment / length
        if longest <= mean:
            return longest


def tail_s(
    schedule: Schedule, backward: Times, gradients: Times, once: Times, num_microbatches: int,
    on_link: Optional[Times] = None,
) -> float:  # fmt: skip
    """Return the time from the first stage's last backward to the end of the last update.

        tail = max(0, max_i (once_i - lead_i)),    lead_i = sum_{s<i} (b_s + g_s)
        GPipe:  lead_i = sum_{s<i} (b_s + g_s) + (B - 1) (max_s max(b_s, G_s) - max_{s>=i} max(b_s, G_s))

    once_i is gradient synchronisation plus update of stage i. Later stages end their last backward earlier, by lead_i
    at least, which hides a part of it. For GPipe, lead_i is exact.

    Example:
        >>> tail_s("1f1b", [2, 2], [1], [0.5, 4], 8), tail_s("gpipe", [3, 2], [1], [0.5, 6], 2)
        (1.0, 1.0)

    Source: the difference of the two stages' backward times by `pipeline_and_period_s`.
    """
    repeats = num_microbatches - 1 if schedule == "gpipe" else 0
    latest, slowest = -math.inf, 0.0
    messages = (0.0, *reversed(gradients)), (0.0, *reversed(gradients if on_link is None else on_link))
    for seconds, own, exposed, whole in zip(reversed(once), reversed(backward), *messages):
        behind, slowest = slowest, max(slowest, own, whole)
        latest = max(seconds, latest - own - exposed - repeats * (slowest - behind))
    return float(max(0.0, latest))


def alpa_objective_s(forward: Times, backward: Times, num_microbatches: int) -> float:
    """Return Alpa's objective: sum t + (B - 1) max t with t = f + b; no communication.

    Example:
        >>> alpa_objective_s([1, 1, 1, 1], [2, 2, 2, 2], 32)
        105.0

    Source: Zheng et al., "Alpa", 2022, equation 2; `training_dp` in Alpa 0.2.3.
    """
    turn = [f + b for f, b in zip(forward, backward)]
    return float(sum(turn) + (num_microbatches - 1) * max(turn))
