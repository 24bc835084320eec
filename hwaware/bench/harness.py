"""Measure mappings that take turns step by step, with a short reference around each round.

The machine's speed drifts by up to 1.6 times within seconds. Mappings that take turns meet the same drift. The
reference shows how fast the machine was during a round.
"""

from __future__ import annotations

import statistics
from typing import Any, Callable, Dict, List, NamedTuple, Protocol, Sequence, Tuple

from hwaware.plans import Plan
from hwaware.reference_kernel import Reading, Reference
from hwaware.result import Mapping


class StepTimes(NamedTuple):
    """The times of one step [s].

    Attributes:
        wall_s: From its dispatch until every worker has ended it.
        pipeline_s: The part from the start of the first program to the end of the last one.
    """

    wall_s: float
    pipeline_s: float


class Contender(Protocol):
    """Anything that can take a timed step and keeps its losses."""

    name: str
    plan: Plan
    losses: List[float]

    def timed_step(self) -> StepTimes:
        """Take one step and time it."""
        ...


def measure(
    contenders: Sequence[Contender],
    repeats: int,
    warmup: int,
    reference: Reference,
    predicted_step_s: Dict[str, float],
    on_round: Callable[[int, int], None] = lambda done, total: None,
    goes_on: Callable[[int], bool] = lambda done: True,
) -> Tuple[Mapping, ...]:
    """Let every contender take `warmup` + `repeats` steps; they take turns, one step each.

    The order rotates from round to round, so that no contender always follows the same neighbour. The harness times
    the reference before and after each round, and keeps the mean of both beside each step.

    Args:
        contenders: Contenders with different names.
        repeats: Number of measured steps of each.
        warmup: Number of steps of each that come first and do not count.
        reference: Times the machine's speed.
        predicted_step_s: The prediction for each name.
        on_round: Called with (rounds done, rounds in all) after each round.
        goes_on: Called with the number of counted rounds after each; False ends the measurement.

    Returns:
        One record per contender, in the given order.
    """
    steps: Dict[str, List[StepTimes]] = {contender.name: [] for contender in contenders}
    references: List[Tuple[Reading, Reading]] = []
    before = reference.now()
    for index in range(warmup + repeats):
        for position in range(len(contenders)):
            contender = contenders[(index + position) % len(contenders)]
            times = contender.timed_step()
            if index >= warmup:
                steps[contender.name].append(times)
        after = reference.now()
        if index >= warmup:
            references.append((before, after))
        before = after
        on_round(index + 1, warmup + repeats)
        if index >= warmup and not goes_on(index + 1 - warmup):
            break
    return tuple(
        Mapping(
            name=contender.name,
            plan=contender.plan,
            predicted_step_s=predicted_step_s[contender.name],
            step_s=tuple(times.wall_s for times in steps[contender.name]),
            pipeline_s=tuple(times.pipeline_s for times in steps[contender.name]),
            **_kept(references),
            loss=tuple(contender.losses),
        )
        for contender in contenders
    )


def _kept(references: Sequence[Tuple[Reading, Reading]]) -> Dict[str, Any]:
    """Return the mean of the readings before and after each round, as fields of `Mapping`."""
    return {
        "reference_s": tuple(statistics.mean(one.seconds for one in around) for around in references),
        "slowdowns": {
            kind: tuple(statistics.mean(one.of_kinds[kind] for one in around) for around in references)
            for kind in references[0][0].of_kinds
        },
    }
