"""Run the compiled search layer by layer: watch the clock, and widen the beam until the best plan is proved."""

from __future__ import annotations

import math
import time
from typing import Any, List, NamedTuple, Optional, Tuple

import numpy as np

from hwaware.costs.memory import all_in_flight
from hwaware.placement import kernels
from hwaware.placement.ways import Arrays, count_states

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

Stages = List[Tuple[int, int, int]]


class Found(NamedTuple):
    """Hold the outcome of a search."""

    stages: Optional[Stages]  # (first layer, last layer, option) in pipeline order; None if no plan was found
    objective_s: float  # its price; infinite without a plan
    bound_s: float  # no plan costs less; infinity proves that no plan exists


def make_tables(arrays: Arrays) -> kernels.Tables:
    """Return the arrays as the kernels read them."""
    stage, mode, problem = arrays.tables, kernels.SUM_AND_MAX, arrays.problem
    sizes = np.array([len(names) for names in arrays.members], dtype=np.int64)
    schedule, objective, microbatches = problem.costs.schedule, problem.objective, problem.num_microbatches
    messages, devices = arrays.messages_s, problem.costs.devices
    ahead = np.array([devices[names[0]].head_start_s or 0.0 for names in arrays.members])
    if objective == "alpa":
        nothing = np.zeros_like(stage.backward_s)
        stage = stage._replace(forward_s=stage.forward_s + stage.backward_s, backward_s=nothing, per_step_s=nothing)
        messages, ahead = np.zeros_like(messages), np.zeros_like(ahead)
    elif schedule == "inference":
        messages = messages * np.array([1.0, 0.0, 1.0, 0.0])[:, None, None]
    elif schedule == "1f1b":
        mode = kernels.TURNS
    known = np.unique(arrays.pairs[arrays.pairs >= 0])
    both = messages[2:, known].sum(axis=0) if len(known) else np.zeros((1, messages.shape[2]))
    strides = np.cumprod(np.concatenate([[1], sizes[:-1] + 1])).astype(np.int64)
    states = np.arange(count_states(arrays.members), dtype=np.int64)
    counts = (states[:, None] // strides[None, :]) % (sizes + 1)[None, :]
    used = counts.sum(axis=1)
    per_device = objective == "per-device"
    counted = used.astype(np.float64) if per_device else np.ones(len(used))
    held = all_in_flight(schedule, microbatches, int(sizes.sum()) + 1)
    return kernels.Tables(
        mode=mode,
        microbatches=microbatches,
        stage=stage,
        pairs=arrays.pairs,
        messages_s=messages,
        use=arrays.use,
        ahead_s=np.where(arrays.use > 0, ahead, 0.0).max(axis=1),
        cut_s=np.ascontiguousarray(both.min(axis=0)),
        in_flight=np.array(held[::-1], dtype=np.float64),
        sizes=sizes,
        deltas=(arrays.use @ strides).astype(np.int64),
        counts=counts,
        devices_left=int(sizes.sum()) - used,
        fewest=-(-used // int(arrays.use.sum(axis=1).max())),
        weight=np.maximum(counted, 1.0),
        heavier=counted + 1.0 if per_device else counted,
        # The stage in question, and the one behind it, each gain by waiting before one pass.
        slack_s=0.0 if objective == "alpa" else 2.0 * arrays.most_gained_s,
    )


def relaxed(t: kernels.Tables, deadline: float, longest: float = math.inf) -> Optional[Tuple[Any, Any, float]]:
    """Return for every state the bounds of `kernels.relax` on the layers before it, and a bound on every plan.

    Return None if time would run out. The bound is the least sum, or B times the least slowest stage.
    """
    layers = len(t.cut_s)
    total, slowest = (np.full((layers + 1, len(t.counts)), np.inf) for _ in range(2))
    total[0] = slowest[0] = 0.0
    started = time.monotonic()
    for end in range(1, layers + 1):
        # A row's time grows with its number of layers. So the finished rows predict when the last row ends.
        done = (end - 1) * end / (layers * (layers + 1))
        if done > 0 and started + (time.monotonic() - started) / done > deadline:
            return None
        kernels.relax(end, t, longest, total, slowest)
    return total, slowest, float(max(total[-1, 0], t.microbatches * slowest[-1, 0] - t.slack_s))


class _Pass:
    """Sweep once over the layers; keep at most `width` labels a state, and `height` that start at one layer."""

    def __init__(self, t: kernels.Tables, total: Any, slowest: Any, width: int, height: int, best: float) -> None:
        layers, states, options = len(t.cut_s), len(t.counts), len(t.use)
        self.tables, self.total, self.slowest, self.width, self.height = t, total, slowest, width, height
        self.best, self.best_label, self.dropped, self.used = best, -1, math.inf, 1
        rows, positions = 1 << 12, min(layers, int(t.sizes.sum()))
        self.labels = kernels.Labels(
            values=np.zeros((rows, 4)),
            vectors=np.zeros((rows, 3 * positions if t.mode == kernels.TURNS else 3)),
            matters=np.zeros((rows, positions), dtype=np.bool_),
            integers=np.full((rows, 8), -1, dtype=np.int64),
            heads=np.full((layers + 1, states, options), -1, dtype=np.int32),
            lengths=np.zeros((layers + 1, states, options), dtype=np.int32),
            layer_heads=np.full(layers + 1, -1, dtype=np.int64),
        )
        self.labels.layer_heads[layers] = 0
        self.labels.integers[0] = (layers, 0, -1, -1, -1, -1, 1, -1)

    def run(self, deadline: float) -> None:
        """Sweep; count as dropped the labels left at the deadline or at the limit of memory."""
        row_bytes = sum(array[0].nbytes for array in self.labels[:4])
        for layer in range(len(self.tables.cut_s), 0, -1):
            self._thin_out(layer)
            cursor, most = int(self.labels.layer_heads[layer]), len(self.tables.use) * layer
            while cursor >= 0:
                if time.monotonic() > deadline or self.used * row_bytes > LABEL_MEMORY_BYTES:
                    self._give_up(layer, cursor)
                    return
                if self.used + most > len(self.labels.values):
                    rooms = (np.empty((self.used + most, one.shape[1]), dtype=one.dtype) for one in self.labels[:4])
                    grown = [np.concatenate(both) for both in zip(self.labels[:4], rooms)]
                    self.labels = kernels.Labels(*(grown + list(self.labels[4:])))
                cursor, self.used, self.best, self.best_label, self.dropped = kernels.expand(
                    layer, cursor, CHUNK, self.width, self.tables, self.total, self.slowest, self.labels, self.used,
                    self.best, self.best_label, self.dropped, MARGIN,
                )  # fmt: skip

    def _thin_out(self, layer: int) -> None:
        """Drop all labels that start at this layer but the `height` with the least lower bounds."""
        here = self.labels.integers[: self.used]
        labels = np.flatnonzero((here[:, kernels.FIRST] == layer) & (here[:, kernels.ALIVE] == 1))
        if len(labels) <= self.height:
            return
        lowest = self.labels.values[labels, kernels.LOWEST]
        order = np.argsort(lowest, kind="stable")
        here[labels[order[self.height :]], kernels.ALIVE] = 0
        self.dropped = min(self.dropped, float(lowest[order[self.height]]))

    def _give_up(self, layer: int, cursor: int) -> None:
        """Count the labels that were not expanded as dropped: the rest of this layer and all layers in front."""
        here = self.labels.integers[: self.used]
        firsts = here[:, kernels.FIRST]
        waiting = np.flatnonzero((firsts < layer) & (firsts > 0) & (here[:, kernels.ALIVE] == 1)).tolist()
        while cursor >= 0:
            waiting.append(cursor)
            cursor = int(here[cursor, kernels.NEXT_IN_LAYER])
        if waiting:
            self.dropped = min(self.dropped, float(self.labels.values[waiting, kernels.LOWEST].min()))

    def stages(self) -> Stages:
        """Return the stages of the best plan of this pass, in pipeline order."""
        made, label = [], self.best_label
        while label > 0:
            row = self.labels.integers[label].tolist()
            label = row[kernels.PARENT]
            end = int(self.labels.integers[label, kernels.FIRST])
            made.append((row[kernels.FIRST], end - 1, row[kernels.FRONT]))
        return made


def search(arrays: Arrays, deadline: float, best: float = math.inf) -> Optional[Found]:
    """Return the best plan, with a bound that proves it unless time or memory ran out; None without bounds in time.

    It looks only for plans better than the price `best`. `deadline` is a time of `time.monotonic()`.
    """
    t = make_tables(arrays)
    size = len(t.counts) * len(arrays.options) * len(t.cut_s) ** 2
    in_front = relaxed(t, deadline if size > SHORT_RELAXATION else math.inf)
    if in_front is None:
        return None
    total, slowest, bound = in_front
    stages = None
    for index, (width, height) in enumerate(PASSES):
        # Also when both are infinite, which proves that no plan exists.
        if not bound < best * MARGIN or (index > 0 and time.monotonic() > deadline):
            break
        one = _Pass(t, total, slowest, width, height, best)
        one.run(deadline if index > 0 or (size > SHORT_RELAXATION and math.isfinite(best)) else math.inf)
        bound = max(bound, min(one.best * MARGIN, one.dropped))
        if one.best_label >= 0:
            best, stages = one.best, one.stages()
            # Every stage works B times, so none that is slower than this belongs to a better plan.
            in_front = relaxed(t, deadline, (best + t.slack_s) / t.microbatches)
            if in_front is not None:
                total, slowest, least = in_front
                bound = max(bound, min(best * MARGIN, least))
    return Found(stages, best, max(0.0, min(bound, best)))
