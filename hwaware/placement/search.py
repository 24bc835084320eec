"""Runs the compiled search layer by layer: keeps time, widens the beam until the best plan is proved."""

from __future__ import annotations

import math
import time
from typing import Any, List, NamedTuple, Optional, Tuple

import numpy as np
import numpy.typing as npt

from hwaware.costs.curves import FloatArray
from hwaware.costs.memory import all_in_flight
from hwaware.placement import kernels
from hwaware.placement.arrays import Arrays
from hwaware.placement.options import count_states

# Labels kept in a state, and of all labels that start at one layer, pass after pass. The narrow passes find good plans,
# which lets the last one, which drops nothing, prune. The first one is short enough to ignore the time limit.
UNLIMITED = 1 << 30
PASSES = ((2, 500), (4, 20_000), (32, UNLIMITED), (UNLIMITED, UNLIMITED))
# A completion that is not better by this much is not looked for; it keeps rounding out of the comparisons.
MARGIN = 1.0 - 1e-10
# Labels of one pass take at most this much memory; a pass that needs more is given up, and its bound kept.
LABEL_MEMORY_BYTES = 1 << 29
# Relaxations of fewer steps than this take a tenth of a second and do not look at the clock before they are done.
SHORT_RELAXATION = 10_000_000
# Expansions between two looks at the clock, some tens of milliseconds.
CHUNK = 300_000

IntArray = npt.NDArray[np.int64]
Stages = List[Tuple[int, int, int]]


class Found(NamedTuple):
    """The outcome of a search.

    Attributes:
        stages: (first layer, last layer, option) in pipeline order; None if no plan was found.
        objective_s: Its price; infinite if none was found.
        bound_s: No plan costs less; infinite if it is proved that there is none.
        labels: Partial plans that were kept, over all passes.
    """

    stages: Optional[Stages]
    objective_s: float
    bound_s: float
    labels: int


class Tables:
    """The arrays as the kernels read them."""

    def __init__(self, arrays: Arrays) -> None:
        tables = arrays.tables
        layers, sizes = arrays.num_layers, arrays.sizes
        self.arrays = arrays
        self.mode = kernels.SUM_AND_MAX
        self.forward, self.backward, self.per_step = tables.forward_s, tables.backward_s, tables.per_step_s
        self.sends, self.backs = arrays.sends_s, arrays.backs_s
        if arrays.objective == "alpa":
            self.forward, self.backward = self.forward + self.backward, np.zeros_like(self.backward)
            self.per_step = np.zeros_like(self.per_step)
            self.sends = self.backs = np.zeros_like(self.sends)
        elif arrays.schedule == "inference":
            self.backs = np.zeros_like(self.backs)
        elif arrays.schedule == "1f1b":
            self.mode = kernels.TURNS
        # Sends there and back over the cheapest pair, for each cut: what any two neighbours pay at least.
        known = np.unique(arrays.pairs[arrays.pairs >= 0])
        both = (self.sends + self.backs)[known] if len(known) else np.zeros((1, layers))
        self.cut = np.ascontiguousarray(both.min(axis=0))
        self.sizes = sizes
        self.strides = np.cumprod(np.concatenate([[1], self.sizes[:-1] + 1])).astype(np.int64)
        self.deltas = (arrays.use @ self.strides).astype(np.int64)
        states = np.arange(count_states(arrays.members), dtype=np.int64)
        self.counts = (states[:, None] // self.strides[None, :]) % (self.sizes + 1)[None, :]
        devices_used = self.counts.sum(axis=1)
        self.devices_left = int(sizes.sum()) - devices_used
        # The objective is the step time times this, for complete plans and for those that still get stages.
        counted = _weights(arrays, devices_used)
        self.weight: FloatArray = np.maximum(counted, 1.0)
        self.heavier: FloatArray = counted + 1.0 if arrays.objective == "per-device" else counted
        # No fewer stages than this are behind a state.
        largest = int(arrays.use.sum(axis=1).max())
        self.fewest = -(-devices_used // largest)
        held = all_in_flight(arrays.schedule, arrays.num_microbatches, int(sizes.sum()) + 1)
        self.in_flight = np.array(held[::-1], dtype=np.float64)  # by the stages behind
        # What stages put in front of others can take off a step: what the front one of the others then gains by
        # waiting, and the stage in question, each before a pass of one direction. Alpa's objective has no waiting.
        self.slack = 0.0 if arrays.objective == "alpa" else 2.0 * arrays.most_gained_s
        positions = min(layers, int(sizes.sum()))
        self.columns = 3 * positions if self.mode == kernels.TURNS else 2
        self.positions = positions

    def relax(self, deadline: float = math.inf, longest: float = math.inf) -> Optional[Tuple[Any, Any, Any]]:
        """Bounds on what the layers in front of a state cost, see `kernels.relax`; None where time will run out."""
        t, layers, states = self.arrays.tables, self.arrays.num_layers, self.counts.shape[0]
        total, slowest, excess = (np.full((layers + 1, states), np.inf) for _ in range(3))
        total[0] = slowest[0] = 0.0
        excess[0] = -np.inf
        started = time.monotonic()
        for end in range(1, layers + 1):
            # A row takes as long as it has layers: what the rows so far took says when the last one will be done.
            done = (end - 1) * end / (layers * (layers + 1))
            if done > 0 and started + (time.monotonic() - started) / done > deadline:
                return None
            kernels.relax(
                end, self.forward, self.backward, t.excess_bytes, t.activation_bytes, t.update_excess_bytes,
                t.most_in_flight, self.cut, self.in_flight, self.arrays.use, self.deltas, self.sizes, self.counts,
                self.fewest, longest, total, slowest, excess,
            )  # fmt: skip
        return total, slowest, excess


def _weights(arrays: Arrays, devices_used: IntArray) -> FloatArray:
    """By what the step time of each state counts: its devices for throughput per device, else once."""
    return devices_used.astype(np.float64) if arrays.objective == "per-device" else np.ones(len(devices_used))


def root_bound_s(tables: Tables, total: Any, slowest: Any) -> float:
    """A bound on every plan: the least sum, and the least slowest stage B times."""
    microbatches = tables.arrays.num_microbatches
    return float(max(total[-1, 0], microbatches * slowest[-1, 0] - tables.slack))


class _Pass:
    """One sweep over the layers that keeps at most `width` labels in a state and `height` that start at one layer."""

    def __init__(self, tables: Tables, total: Any, slowest: Any, width: int, height: int, best: float) -> None:
        layers, states, options = tables.arrays.num_layers, tables.counts.shape[0], len(tables.arrays.options)
        self.tables, self.total, self.slowest, self.width, self.height = tables, total, slowest, width, height
        self.best, self.best_label, self.dropped, self.used = best, -1, math.inf, 1
        rows = 1 << 12
        self.values = np.zeros((rows, 4))
        self.vectors = np.zeros((rows, tables.columns))
        self.matters = np.zeros((rows, tables.positions), dtype=np.bool_)
        self.integers = np.full((rows, 8), -1, dtype=np.int64)
        self.heads = np.full((layers + 1, states, options), -1, dtype=np.int32)
        self.lengths = np.zeros((layers + 1, states, options), dtype=np.int32)
        self.layer_heads = np.full(layers + 1, -1, dtype=np.int64)
        self.layer_heads[layers] = 0
        self.integers[0] = (layers, 0, -1, -1, -1, -1, 1, -1)

    def run(self, deadline: float) -> None:
        """Sweep; what is left undone at the deadline, or out of memory, counts as dropped."""
        row_bytes = self.values.itemsize * (4 + 8 + self.vectors.shape[1]) + self.matters.shape[1]
        for layer in range(self.tables.arrays.num_layers, 0, -1):
            self._thin_out(layer)
            cursor = int(self.layer_heads[layer])
            while cursor >= 0:
                if time.monotonic() > deadline or self.used * row_bytes > LABEL_MEMORY_BYTES:
                    self._give_up(layer, cursor)
                    return
                cursor = self._expand(layer, cursor)

    def _thin_out(self, layer: int) -> None:
        """Drop all labels that start at this layer but the `height` with the least lower bounds."""
        if self.height == UNLIMITED:
            return
        here = self.integers[: self.used]
        labels = np.flatnonzero((here[:, kernels.FIRST] == layer) & (here[:, kernels.ALIVE] == 1))
        if len(labels) <= self.height:
            return
        lowest = self.values[labels, kernels.LOWEST]
        order = np.argsort(lowest, kind="stable")
        self.integers[labels[order[self.height :]], kernels.ALIVE] = 0
        self.dropped = min(self.dropped, float(lowest[order[self.height]]))

    def _expand(self, layer: int, cursor: int) -> int:
        t, p = self.tables, self.tables.arrays
        (
            cursor, self.values, self.vectors, self.matters, self.integers, self.used, self.best, self.best_label,
            self.dropped,
        ) = kernels.expand(
            layer, cursor, CHUNK, t.mode, p.num_microbatches, self.width, t.forward, t.backward, t.per_step,
            p.tables.most_in_flight, p.pairs, t.sends, t.backs, t.in_flight, p.use, t.deltas, t.sizes, t.counts,
            t.devices_left, t.weight, t.heavier, self.total, self.slowest, self.values, self.vectors, self.matters,
            self.integers, self.used, self.heads, self.lengths, self.layer_heads, self.best, self.best_label,
            self.dropped, MARGIN, t.slack,
        )  # fmt: skip
        return cursor

    def _give_up(self, layer: int, cursor: int) -> None:
        """Count the labels that were not expanded as dropped: the rest of this layer and all layers in front."""
        labels = np.arange(self.used)
        firsts = self.integers[: self.used, kernels.FIRST]
        waiting = labels[(firsts < layer) & (firsts > 0) & (self.integers[: self.used, kernels.ALIVE] == 1)].tolist()
        while cursor >= 0:
            waiting.append(cursor)
            cursor = int(self.integers[cursor, kernels.NEXT_IN_LAYER])
        if waiting:
            self.dropped = min(self.dropped, float(self.values[waiting, kernels.LOWEST].min()))

    def stages(self) -> Stages:
        """The stages of the best plan of this pass, in pipeline order."""
        made, label = [], self.best_label
        while label > 0:
            parent = int(self.integers[label, kernels.PARENT])
            first, end = int(self.integers[label, kernels.FIRST]), int(self.integers[parent, kernels.FIRST])
            made.append((first, end - 1, int(self.integers[label, kernels.FRONT])))
            label = parent
        return made


def search(arrays: Arrays, deadline: float, best: float = math.inf) -> Optional[Found]:
    """The best plan, and a bound that proves it unless time or memory ran out; None if it ran out before any plan.

    Args:
        arrays: What to place.
        deadline: By `time.monotonic()`.
        best: Price of a plan that is known already; only better ones are looked for.
    """
    tables = Tables(arrays)
    size = tables.counts.shape[0] * len(arrays.options) * arrays.num_layers**2
    relaxed = tables.relax(deadline if size > SHORT_RELAXATION else math.inf)
    if relaxed is None:
        return None
    total, slowest, _ = relaxed
    bound = root_bound_s(tables, total, slowest)
    stages, labels = None, 0
    for index, (width, height) in enumerate(PASSES):
        # Also when both are infinite: it is proved that there is no plan.
        if not bound < best * MARGIN or (index > 0 and time.monotonic() > deadline):
            break
        one = _Pass(tables, total, slowest, width, height, best)
        one.run(deadline if index > 0 or (size > SHORT_RELAXATION and math.isfinite(best)) else math.inf)
        labels += one.used
        bound = max(bound, min(one.best * MARGIN, one.dropped))
        if one.best_label >= 0:
            best, stages = one.best, one.stages()
            # Every stage works B times, so none that is slower than this belongs to a better plan.
            relaxed = tables.relax(deadline, (best + tables.slack) / arrays.num_microbatches)
            if relaxed is not None:
                total, slowest, _ = relaxed
                bound = max(bound, min(best * MARGIN, root_bound_s(tables, total, slowest)))
    return Found(stages, best, max(0.0, min(bound, best)), labels)
