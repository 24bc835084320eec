"""From stage and link times to the time of a step: closed forms for 1F1B, GPipe and inference.

Everywhere: f_s, b_s are the forward and backward times of stage s = 0 .. n - 1 for one microbatch, c_s = f_s + b_s;
a_s, g_s the times to send activations from stage s to s + 1 and gradients back; B microbatches. Sends are eager and
overlapped: they start as soon as there is something to send, computation does not wait for them, and messages of one
direction between two stages follow each other.
"""

from __future__ import annotations

from typing import Sequence

from hwaware.plans import Schedule

Times = Sequence[float]


def one_f_one_b_s(
    forward: Times, backward: Times, activations: Times, gradients: Times, num_microbatches: int
) -> float:
    """Time of one 1F1B step until the first stage's last backward, without gradient synchronisation and update.

    In 1F1B, stage j runs w_j = min(B, n - j) forwards before its first backward, then alternates. The step is as long
    as the longest chain of dependent work; the closed form takes the maximum over the chains that can be longest:

    * one link s that is never idle:         S + (B - 1) max(a_s, g_s),      S = sum c + sum (a + g)
    * one segment of stages i <= j that turns:  fill_i + Q k' + h_j(f) + h_j(b) + r max_{i<=s<=j} c_s

    fill_i = sum_{s<i} (c_s + a_s + g_s) is the way to stage i and back. One turn through the segment takes
    Q = sum_{s=i..j} c_s + sum_{s=i..j-1} (a_s + g_s). Stage i admits microbatch k + n - i only after the backward of
    k, so one turn brings L = j - i + 1 microbatches; with B - w_j = k L + r of them left after the first turn,
    k' = k + 1. Beyond the segment lie R_j = sum_{s>j} c_s + sum_{s>=j} (a_s + g_s) seconds, paid once when the
    pipeline fills and once when it drains, each time unless stage j has enough to do: h_j(t) = max(R_j, (w_j - 1) t_j).

    The segment i = j is the slowest stage, the segment of all stages the round trip over all microbatches in flight.
    A stage with B <= w_j runs all forwards before its first backward:
    fill_j + c_j + max(R_j + (B - 1) max(f_j, b_j), (B - 1) c_j).

    Every chain is one that exists, so the result is never above the exact time of these rules, and it is exact for
    equal stages without communication (S + (B - 1) c). tests/unit/test_costs_pipeline.py compares random uneven stages
    with a simulation and holds the differences to limits.

    Args:
        forward, backward: f and b, n values each.
        activations, gradients: a and g, n - 1 values each.
        num_microbatches: B, at least 1.

    Returns:
        Seconds.

    Example:
        >>> one_f_one_b_s([1, 1, 1, 1], [2, 2, 2, 2], [0, 0, 0], [0, 0, 0], 32)
        105.0
        >>> one_f_one_b_s([1, 1, 1, 1], [2, 2, 2, 2], [0, 2, 0], [0, 2, 0], 32)
        169.0

    Source: longest path in the schedule's dependency graph; schedule as in Narayanan et al., 2021, and in Alpa 0.2.3's
    PipeDreamFlush, whose own schedule objects give 105 and 169 for the two examples.
    """
    n, b_count = len(forward), num_microbatches
    turn = [forward[s] + backward[s] for s in range(n)]
    link = [*(activations[s] + gradients[s] for s in range(n - 1)), 0.0]
    longest = sum(turn) + sum(link) + (b_count - 1) * max([0.0, *activations, *gradients])
    ends = _segment_ends(forward, backward, turn, link, b_count)
    most = _most_from(turn, link, ends, b_count)
    stages = list(zip(turn, link, ends, range(b_count - n, b_count)))
    fill = 0.0
    for i in range(n):
        turns = b_count - n + i > 0  # B - w_j >= L is the same for all j
        if not turns:
            longest = max(longest, fill + ends[i])
        segment = slowest = 0.0
        # Plain comparisons and no indices: this loop is a quarter of the time of pricing a plan.
        begun = stages[i:] if turns and fill + most[i] > longest else ()
        for length, (own, sent, end, left) in enumerate(begun, 1):
            segment += own
            if own > slowest:
                slowest = own
            chain = fill + segment * (left // length + 1) + end + (left % length) * slowest
            if chain > longest:
                longest = chain
            segment += sent
        fill += turn[i] + link[i]
    return float(longest)


def _most_from(turn: Times, link: Times, ends: Times, num_microbatches: int) -> Sequence[float]:
    """For each stage i, more than any segment that begins with it can take, the fill left out.

    Q + max h_j + (B - 1) max (c_s + a_s + g_s), of all stages from i on: k L + r < B, Q <= L max (c_s + a_s + g_s).
    """
    n = len(turn)
    most = [0.0] * n
    whole = slowest = end = 0.0
    for i in range(n - 1, -1, -1):
        period = turn[i] + link[i]
        whole += period
        if period > slowest:
            slowest = period
        if ends[i] > end:
            end = ends[i]
        most[i] = whole + end + (num_microbatches - 1) * slowest
    return most


def _segment_ends(forward: Times, backward: Times, turn: Times, link: Times, num_microbatches: int) -> Sequence[float]:
    """For each stage j, h_j(f) + h_j(b); for a stage that runs all forwards first, its whole time without the fill."""
    n = len(forward)
    ends = [0.0] * n
    beyond = 0.0
    for j in range(n - 1, -1, -1):
        beyond += link[j]
        warm_up = n - j - 1
        if num_microbatches > n - j:
            ends[j] = max(beyond, warm_up * forward[j]) + max(beyond, warm_up * backward[j])
        else:
            repeats = num_microbatches - 1
            ends[j] = turn[j] + max(beyond + repeats * max(forward[j], backward[j]), repeats * turn[j])
        beyond += turn[j]
    return ends


def gpipe_s(forward: Times, backward: Times, activations: Times, gradients: Times, num_microbatches: int) -> float:
    """Time of one GPipe step: all forwards, then all backwards, each a pipeline of its own.

    T = sum f + sum a + (B - 1) max(f, a)  +  sum b + sum g + (B - 1) max(b, g)

    Example:
        >>> gpipe_s([1, 1], [2, 2], [0], [0], 3)
        12.0

    Source: Huang et al., "GPipe", 2019; exact for in-order stages and links, with the backward pass starting once the
    last forward has ended on the last stage.
    """
    return inference_s(forward, activations, num_microbatches) + inference_s(backward, gradients, num_microbatches)


def inference_s(forward: Times, activations: Times, num_microbatches: int) -> float:
    """Time of B microbatches through forward stages: T = sum f + sum a + (B - 1) max(f, a).

    Example:
        >>> inference_s([1, 3], [2], 5)
        18.0

    Source: flow shop with one order of jobs that are all alike.
    """
    slowest = max([*forward, *activations])
    return float(sum(forward) + sum(activations) + (num_microbatches - 1) * slowest)


def pipeline_s(
    schedule: Schedule, forward: Times, backward: Times, activations: Times, gradients: Times, num_microbatches: int
) -> float:
    """The schedule's own closed form: `one_f_one_b_s`, `gpipe_s` or `inference_s`.

    Example:
        >>> pipeline_s("inference", [1, 3], [9, 9], [2], [9], 5)
        18.0
    """
    if schedule == "inference":
        return inference_s(forward, activations, num_microbatches)
    closed_form = gpipe_s if schedule == "gpipe" else one_f_one_b_s
    return closed_form(forward, backward, activations, gradients, num_microbatches)


def period_s(schedule: Schedule, forward: Times, backward: Times, activations: Times, gradients: Times) -> float:
    """Time between two microbatches in the steady state, for a long step.

    1F1B:  P = max( max a, max g, max_{i<=j} (sum_{s=i..j} c_s + sum_{s=i..j-1} (a_s + g_s)) / (j - i + 1) )
    GPipe: P = max(f, a) + max(b, g).   Inference: P = max(f, a).

    For 1F1B it is the largest mean over the cycles of the dependency graph: these segments are its only simple cycles.

    Example:
        >>> period_s("1f1b", [1, 1], [2, 2], [2], [2])
        5.0

    Source: Baccelli et al., "Synchronization and Linearity", 1992 (cycle time of an event graph); Dinkelbach, 1967 (the
    largest ratio by repeated differences).
    """
    if schedule == "inference":
        return float(max([*forward, *activations]))
    if schedule == "gpipe":
        return float(max([*forward, *activations]) + max([*backward, *gradients]))
    n = len(forward)
    turn = [forward[s] + backward[s] for s in range(n)]
    link = [*(activations[s] + gradients[s] for s in range(n - 1)), 0.0]
    longest = max([*turn, *activations, *gradients])
    # Kadane's scan finds a segment above the mean so far, if there is one; repeated until there is none.
    while True:
        mean = longest
        segment, first = 0.0, 0
        for j in range(n):
            if segment <= mean * (j - first):
                segment, first = 0.0, j
            segment += turn[j]
            if segment > longest * (j - first + 1):
                longest = segment / (j - first + 1)
            segment += link[j]
        if longest <= mean:
            return float(longest)


def tail_s(backward: Times, gradients: Times, once: Times) -> float:
    """Time from the first stage's last backward to the end of the last update.

    tail = max(0, max_i (once_i - sum_{s<i} (b_s + g_s)))

    once_i is gradient synchronisation plus update of stage i. Later stages end their last backward earlier by the time
    that the last gradients take to travel to the first stage, so what they do once per step is hidden in part.

    Example:
        >>> tail_s([2, 2], [1], [0.5, 4])
        1.0
    """
    latest = lead = 0.0
    for seconds, own, sent in zip(once, backward, (*gradients, 0.0)):
        if seconds - lead > latest:
            latest = seconds - lead
        lead += own + sent
    return float(latest)


def alpa_objective_s(forward: Times, backward: Times, num_microbatches: int) -> float:
    """What Alpa minimises: sum t + (B - 1) max t with t = f + b; no communication.

    Example:
        >>> alpa_objective_s([1, 1, 1, 1], [2, 2, 2, 2], 32)
        105.0

    Source: Zheng et al., "Alpa", 2022, equation 2; `training_dp` in Alpa 0.2.3.
    """
    turn = [f + b for f, b in zip(forward, backward)]
    return float(sum(turn) + (num_microbatches - 1) * max(turn))
