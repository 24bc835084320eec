"""Define the order in which stages compute their passes, and simulate steps whose passes vary."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

from hwaware.plans import Schedule

# A pass is 2 x microbatch, plus 1 for the backward pass.
Pass = int
# For forward and for backward passes, a number for each stage or boundary, or a column with one for each pipeline.
Both = Any


def pass_order(schedule: Schedule, stage: int, stages: int, microbatches: int) -> List[Pass]:
    """Return the passes of one stage in order.

    1F1B: min(B, n - i) forwards, then backward and forward alternate. GPipe: all forwards, then all backwards.
    Inference: all forwards.

    Example:
        >>> pass_order("1f1b", 0, 2, 3), pass_order("gpipe", 0, 2, 2)
        ([0, 2, 1, 4, 3, 5], [0, 2, 1, 3])

    Source: PipeDreamFlush and GpipeSchedule of Alpa 0.2.3.
    """
    forward = [2 * k for k in range(microbatches)]
    if schedule == "inference":
        return forward
    if schedule == "gpipe":
        return forward + [2 * k + 1 for k in range(microbatches)]
    ahead = min(microbatches, stages - stage)
    order = forward[:ahead]
    for k in range(microbatches):
        order.append(2 * k + 1)
        if k + ahead < microbatches:
            order.append(2 * (k + ahead))
    return order


def varied_steps_s(
    schedule: Schedule,
    microbatches: int,
    passes_s: Both,
    deviations_s: Any,
    messages_s: Both,
    ahead_s: Both,
    steps: int,
) -> Any:
    """Simulate steps whose passes vary, and return the time [s] from the first pass of each step to its last.

    A pass takes a normally distributed time. A message leaves when its pass ends, and after the one before it. Columns
    in place of numbers, [k, 1], simulate k pipelines, with the same random numbers for all.

    Args:
        schedule: Gives the order of the passes.
        microbatches: Number of microbatches of a step.
        passes_s: Mean time of a pass of each of n stages.
        deviations_s: Standard deviation of the passes of each stage.
        messages_s: Time of a message between stages i and i + 1, in n - 1 entries.
        ahead_s: Time by which such a message's receiver computes faster if it has waited.
        steps: Number of steps.

    Returns:
        A NumPy array with a time for each step, or [k, steps]; the same for the same arguments.

    Example:
        >>> varied_steps_s("1f1b", 2, ([1.0, 1.0], [2.0, 2.0]), [0.0, 0.0], ([0.5], [0.5]), ([0.0], [0.0]), 1)
        array([10.])
    """
    import numpy as np

    rng, stages = np.random.default_rng(0), len(deviations_s)
    left = [pass_order(schedule, stage, stages, microbatches)[::-1] for stage in range(stages)]
    ends_s: List[Any] = [np.zeros(steps) for _ in left]
    arrived_s: Dict[Tuple[int, Pass], Any] = {}  # by the stage that waits for it
    sent_s: Dict[Tuple[int, int], Any] = {}  # when a channel is free, by its ends
    while any(left):
        for stage, passes in enumerate(left):
            while passes:
                number, backward = passes[-1], passes[-1] % 2
                before, after = (stage + 1, stage - 1) if backward else (stage - 1, stage + 1)
                waits = 0 <= before < stages
                if waits and (stage, number) not in arrived_s:
                    break
                passes.pop()
                takes_s = passes_s[backward][stage] + deviations_s[stage] * rng.standard_normal(steps)
                takes_s = np.maximum(0.0, takes_s)
                end_s = ends_s[stage] + takes_s
                if waits:
                    faster_s = np.maximum(0.0, takes_s - ahead_s[backward][min(stage, before)])
                    end_s = np.maximum(end_s, arrived_s.pop((stage, number)) + faster_s)
                ends_s[stage] = end_s
                if 0 <= after < stages:
                    free_s = np.maximum(end_s, sent_s.get((stage, after), 0.0))
                    sent_s[stage, after] = free_s + messages_s[backward][min(stage, after)]
                    arrived_s[after, number] = sent_s[stage, after]
    return np.max(ends_s, axis=0)
