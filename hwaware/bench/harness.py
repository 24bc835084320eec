"""The measuring harness: mappings interleaved step by step, each step beside a short reference kernel.

The machine's speed drifts by up to 1.6 times within seconds. Mappings that took turns met the same drift, and the
reference kernel, run around each step, tells how fast the machine was in that round.
"""

from __future__ import annotations

import statistics
from typing import Callable, Dict, List, Protocol, Sequence, Tuple

from hwaware.plans import Plan
from hwaware.result import Mapping


class Contender(Protocol):
    """What is measured: anything that can take a step and knows its losses."""

    name: str
    plan: Plan
    losses: List[float]

    def step(self) -> float:
        """Take one step; returns its wall time [s]."""
        ...


def measure(
    contenders: Sequence[Contender],
    repeats: int,
    warmup: int,
    reference_s: Callable[[], float],
    predicted_step_s: Dict[str, float],
    on_round: Callable[[int, int], None] = lambda done, total: None,
) -> Tuple[Mapping, ...]:
    """Let every contender take `warmup` + `repeats` steps, one each in turn.

    The order rotates from round to round, so that nobody always follows the same neighbour. The reference kernel runs
    before and after each step, and the mean of a round is kept beside each of its steps: one run of 25 ms tells of a
    moment only, and scatters more (by 15 %) than the steps that it would be set against (10 %).

    Args:
        contenders: With different names.
        repeats: Measured steps of each.
        warmup: Steps of each that are taken first and not kept.
        reference_s: Runs the reference kernel once and returns its wall time [s].
        predicted_step_s: The prediction for each name.
        on_round: Called with (rounds done, rounds in all) after each round.

    Returns:
        One record per contender, in their order.
    """
    steps: Dict[str, List[float]] = {contender.name: [] for contender in contenders}
    references: Dict[str, List[float]] = {contender.name: [] for contender in contenders}
    for index in range(warmup + repeats):
        beside = [reference_s()]
        for position in range(len(contenders)):
            contender = contenders[(index + position) % len(contenders)]
            elapsed = contender.step()
            beside.append(reference_s())
            if index >= warmup:
                steps[contender.name].append(elapsed)
        if index >= warmup:
            for kept in references.values():
                kept.append(statistics.mean(beside))
        on_round(index + 1, warmup + repeats)
    return tuple(
        Mapping(
            name=contender.name,
            plan=contender.plan,
            predicted_step_s=predicted_step_s[contender.name],
            step_s=tuple(steps[contender.name]),
            reference_s=tuple(references[contender.name]),
            loss=tuple(contender.losses),
        )
        for contender in contenders
    )
