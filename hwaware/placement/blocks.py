"""Cut a long model only between blocks of layers, as tables of all ranges of layers would take too much memory."""

from __future__ import annotations

import math
from typing import NamedTuple, Optional, Tuple

import msgspec
import numpy as np

from hwaware.costs.blocks import BlockCosts
from hwaware.placement.bounds import least_objective_s
from hwaware.placement.problem import Answer, Problem

# Ranges of layers in the tables of a search, times ways to build a stage: 0.5 GiB, and as much again while made.
MOST_RANGES = 8_000_000
# More blocks make a table take longer than they make a plan better: changes of the plan then move single layers.
MOST_BLOCKS = 400


class Blocks(NamedTuple):
    """A problem with blocks in place of layers, and for each block the layer after its last one."""

    problem: Problem
    ends: Tuple[int, ...]

    def of_layers(self, answer: Answer, problem: Problem) -> Answer:
        """Return an answer about blocks as one about the layers of a problem, for which it proves nothing."""
        if answer.plan is None:
            return answer._replace(bound_s=None)
        starts = (0, *self.ends)
        stages = tuple(
            msgspec.structs.replace(stage, layers=(starts[stage.layers[0]], self.ends[stage.layers[1]] - 1))
            for stage in answer.plan.stages
        )
        return Answer(msgspec.structs.replace(answer.plan, stages=stages), least_objective_s(problem))


def most_blocks(ways: float) -> int:
    """Return how many layers a search may tell apart that has so many ways to build a stage.

    Example:
        >>> most_blocks(60), most_blocks(1500)
        (365, 73)
    """
    return min(MOST_BLOCKS, max(2, math.isqrt(int(MOST_RANGES / max(1.0, ways)))))


def in_blocks(problem: Problem, most: int) -> Optional[Blocks]:
    """Return the problem with about `most` blocks of like work; None if it has no more layers than that.

    Layers that different devices may run are in different blocks, so pins may make more.
    """
    costs, pins, rule = problem.costs, problem.pins, problem.rule
    layers = len(costs.workload.layers)
    if layers <= most:
        return None
    sums = costs.sums((costs.profile.devices[0].id,))
    work = np.array(sums.forward_s) + np.array(sums.backward_s)
    # Half by work, half by number: layers without work may hold memory.
    turns = {layer for layer in range(1, layers) if pins.get(layer) != pins.get(layer - 1)} if pins else set()
    count = max(1, most - len(turns))
    reached = np.arange(layers + 1) / layers + work / (work[-1] or 1.0)
    cuts = np.searchsorted(reached, reached[-1] * np.arange(1, count) / count)
    ends = tuple(sorted({*cuts.tolist(), *turns, layers} - {0}))
    if len(ends) == layers:
        return None
    starts = (0, *ends)
    inside = {block: pins[start] for block, start in enumerate(starts[:-1]) if start in pins}
    return Blocks(
        problem._replace(
            costs=BlockCosts(costs, ends),
            pins=inside,
            rule=None if rule is None else lambda made, first, last: rule(made, starts[first], ends[last] - 1),
        ),
        ends,
    )
