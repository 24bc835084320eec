"""The measuring harness: mappings interleaved step by step, each round beside a short reference.

The machine's speed drifts by up to 1.6 times within seconds. Mappings that took turns met the same drift, and a
reference, timed around each round of steps, tells how fast the machine was in it.
"""

from __future__ import annotations

import statistics
from typing import Any, Callable, Dict, List, NamedTuple, Protocol, Sequence, Tuple

from hwaware.plans import Plan
from hwaware.reference_kernel import Reading, Reference
from hwaware.result import Mapping


class StepTimes(NamedTuple):
    """What one step took [s].

    Attributes:
        wall_s: From its dispatch until every worker has ended it.
        pipeline_s: The part of it from the first program's start to the last one's end.
    """

    wall_s: float
    pipeline_s: float


class Contender(Protocol):
    """What is measured: anything that can take a step and knows its losses."""

    name: str
    plan: Plan
    losses: List[float]

    def timed_step(self) -> StepTimes:
        """Take one step."""
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
    """Let every contender take `warmup` + `repeats` steps, one each in turn.

    The order rotates from round to round, so that nobody always follows the same neighbour. The reference is timed
    before and after each round, and the mean of the two is kept beside each of its steps.

    Args:
        contenders: With different names.
        repeats: Measured steps of each.
        warmup: Steps of each that are taken first and not kept.
        reference: Tells how fast the machine is.
        predicted_step_s: The prediction for each name.
        on_round: Called with (rounds done, rounds in all) after each round.
        goes_on: Called with the rounds that are kept so far after each of them; where it says no, it was the last one.

    Returns:
        One record per contender, in their order.
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
    """What is kept of the readings before and after each round: the means of the two."""
    return {
        "reference_s": tuple(statistics.mean(one.seconds for one in around) for around in references),
        "slowdowns": {
            kind: tuple(statistics.mean(one.of_kinds[kind] for one in around) for around in references)
            for kind in references[0][0].of_kinds
        },
    }
