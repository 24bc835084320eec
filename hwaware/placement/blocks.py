"""Cut a long model only between blocks of layers, as tables of all its ranges would take too much memory.

A block costs the same as its layers inside one stage, so prices of plans stay.
"""

from __future__ import annotations

import bisect
import math
from typing import Any, NamedTuple, Optional, Sequence, Tuple

import msgspec
import numpy as np

from hwaware.cluster import ClusterProfile
from hwaware.costs.curves import FloatArray
from hwaware.costs.prepared import PreparedCosts, ReplicaSums
from hwaware.placement.bounds import least_objective_s
from hwaware.placement.problem import Answer, Problem

# Ranges of layers in the tables of a search, times ways to build a stage: 0.5 GiB, and twice as much while
# they are built.
MOST_RANGES = 8_000_000
# More blocks cost more time than they gain. Changes of the finished plan then move single layers.
MOST_BLOCKS = 400
# Fields of `ReplicaSums` that are prefix sums over the layers.
RUNNING = ("forward_s", "backward_s", "update_s", "activation_bytes", "batch_bytes", "update_bytes")


class Blocks(NamedTuple):
    """Hold a problem with blocks in place of layers, and for each block the layer after its last one."""

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


class BlockCosts(PreparedCosts):
    """Hold the costs of blocks of neighbouring layers.

    Args:
        layers: The costs of the layers.
        ends: For each block the layer after its last one.

    Example:
        >>> from hwaware.cluster import ClusterProfile
        >>> from hwaware.workload import Workload
        >>> layers = PreparedCosts(Workload.uniform(layers=3), ClusterProfile.uniform(hosts=1, flops_per_s=1e10))
        >>> [round(seconds, 6) for seconds in BlockCosts(layers, (2, 3)).sums(("h0:0",)).forward_s]
        [0.0, 0.2, 0.3]
    """

    def __init__(self, layers: PreparedCosts, ends: Sequence[int]) -> None:
        # The last layer of a block stands for it, as its output leaves the block. Sums are made of those of the layers.
        last = tuple(layers.workload.layers[end - 1] for end in ends)
        workload = msgspec.structs.replace(layers.workload, layers=last, shared=())
        super().__init__(
            workload, layers.profile, layers.schedule, layers.links, layers.measured_groups, kinds=layers.kinds
        )
        self._layers, self._edges, self.of_layers = layers, [0, *ends], layers.of_layers

    def on(self, profile: ClusterProfile, *changed: Any, **named: Any) -> PreparedCosts:
        """Return the costs of the same blocks on another cluster."""
        return BlockCosts(self._layers.on(profile, *changed, **named), self._edges[1:])

    def summed_bytes(self, group: int) -> FloatArray:
        """Return the bytes of gradients of each block."""
        return np.add.reduceat(self._layers.summed_bytes(group), self._edges[:-1])

    def _make_sums(self, devices: Tuple[str, ...], share: float, replicas: int) -> ReplicaSums:
        s, edges = self._layers.sums(devices, share, replicas), self._edges
        running: Any = {name: np.take(getattr(s, name), edges).tolist() for name in RUNNING}
        return s._replace(
            **running,
            resident_bytes=[np.take(resident, edges).tolist() for resident in s.resident_bytes],
            scratch_bytes=np.maximum.reduceat(s.scratch_bytes, edges[:-1]).tolist(),
            common=[pair._replace(first=self._block(pair.first), last=self._block(pair.last)) for pair in s.common],
        )

    def _block(self, layer: int) -> int:
        """Return the number of the block that has the layer."""
        return bisect.bisect_right(self._edges, layer) - 1
