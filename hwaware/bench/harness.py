"""The measuring harness: mappings interleaved step by step, each step beside a short reference kernel.

The machine's speed drifts by up to 1.6 times within seconds. Mappings that took turns met the same drift, and the
reference kernel beside each step tells how fast the machine was just then.
"""

from __future__ import annotations

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
    before and after each step; the mean of both is kept beside it.

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
        for position in range(len(contenders)):
            contender = contenders[(index + position) % len(contenders)]
            before = reference_s()
            elapsed = contender.step()
            if index >= warmup:
                steps[contender.name].append(elapsed)
                references[contender.name].append((before + reference_s()) / 2)
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
