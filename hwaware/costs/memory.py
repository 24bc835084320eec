"""Count what a stage keeps in device memory."""

from __future__ import annotations

import functools
from typing import Any, List, NamedTuple, Sequence, Tuple

from hwaware.costs.compute import is_split, measured_time
from hwaware.plans import Schedule
from hwaware.workload import Layer, Workload


def in_flight(schedule: Schedule, num_microbatches: int, stages: int) -> int:
    """Return the microbatches whose activations the first of some stages holds at once.

        1F1B: min(B, n) for the first of n stages        GPipe: B        inference: 1

    Example:
        >>> in_flight("1f1b", 8, 3), in_flight("gpipe", 8, 3), in_flight("inference", 8, 3)
        (3, 8, 1)

    Source: Narayanan et al., "Memory-efficient pipeline-parallel DNN training", 2021 (1F1B with flush).
    """
    return {"1f1b": min(num_microbatches, stages), "gpipe": num_microbatches, "inference": 1}[schedule]


@functools.lru_cache(maxsize=256)
def all_in_flight(schedule: Schedule, num_microbatches: int, stages: int) -> Tuple[int, ...]:
    """Return `in_flight` of each stage of a pipeline, the first stage first.

    Example:
        >>> all_in_flight("1f1b", 2, 3)
        (2, 2, 1)
    """
    return tuple(in_flight(schedule, num_microbatches, left) for left in range(stages, 0, -1))


def resident_bytes(layer: Layer, schedule: Schedule, group: int = 1) -> float:
    """Return the bytes that a layer always keeps on each device of a group: (p + g + o) / TP.

    For inference, that is p / TP. TP is 1 for a layer that is not split.

    Example:
        >>> layer = Workload.uniform(parameter_bytes=10, activation_bytes=5).layers[0]
        >>> resident_bytes(layer, "1f1b"), resident_bytes(layer, "inference")
        (40.0, 10.0)
    """
    kept = layer.parameter_bytes
    if schedule != "inference":
        kept += layer.gradient_size_bytes + layer.optimizer_size_bytes
    return float(kept) / (group if is_split(layer) else 1)


class CommonBytes(NamedTuple):
    """Hold bytes that two layers both count, and that a stage with both has once: what stays, and the update's."""

    first: int
    last: int
    resident_bytes: float
    update_bytes: float


def common_bytes(workload: Workload, schedule: Schedule, group: int = 1) -> List[CommonBytes]:
    """Return what each two neighbours among layers that share bytes have in common, on one device of a group.

    A stage counts the bytes of each such pair in it once too often.

    Example:
        >>> import msgspec
        >>> from hwaware.workload import Shared
        >>> tied = (Shared(layers=(0, 2), parameter_bytes=10, optimizer_bytes=20),)
        >>> workload = msgspec.structs.replace(Workload.uniform(layers=3, parameter_bytes=10), shared=tied)
        >>> common_bytes(workload, "1f1b"), common_bytes(workload, "inference")[0].resident_bytes
        ([CommonBytes(first=0, last=2, resident_bytes=30.0, update_bytes=0.0)], 10.0)
    """
    trains, found = schedule != "inference", []
    for shared in workload.shared:
        parts = group if all(is_split(workload.layers[number]) for number in shared.layers) else 1
        kept = (shared.parameter_bytes + (shared.optimizer_bytes if trains else 0.0)) / parts
        update = shared.update_bytes / parts if trains else 0.0
        pairs = zip(shared.layers, shared.layers[1:])
        found += [CommonBytes(first, last, float(kept), float(update)) for first, last in pairs]
    return found


def counted_twice(common: Sequence[CommonBytes], first: Any, end: Any) -> Tuple[Any, Any]:
    """Return the bytes that layers first .. end - 1 count too often: what stays, and the update's. Arrays give arrays.

    Example:
        >>> pairs = [CommonBytes(0, 2, 30.0, 5.0), CommonBytes(1, 3, 4.0, 0.0)]
        >>> counted_twice(pairs, 0, 3), counted_twice(pairs, 0, 4), counted_twice(pairs, 1, 3)
        ((30.0, 5.0), (34.0, 5.0), (0.0, 0.0))
    """
    kept = update = 0.0
    for pair in common:
        both = (first <= pair.first) & (pair.last < end)
        kept = kept + both * pair.resident_bytes
        update = update + both * pair.update_bytes
    return kept, update


def layer_memory_bytes(
    layer: Layer, kind: str, schedule: Schedule, share: float, replicas: int, group: int
) -> Tuple[float, float, float]:
    """Return the bytes of a layer on each device of a group: what stays, and what backward and update take.

        (p + g + o) / TP        (g + s x share) / TP, 0 if s is not known        u / TP

    s is `temporary_bytes`, beside which lie the gradients g of one microbatch. Inference keeps p / TP alone. Where a
    peak was measured with one microbatch in flight, all of it stays but the activations.

    Example:
        >>> from hwaware.workload import MeasuredTime
        >>> times = MeasuredTime(forward_s=1, backward_s=2, memory_bytes=60)
        >>> given = {"parameter_bytes": 10, "activation_bytes": 5, "temporary_bytes": 2, "update_bytes": 30}
        >>> layer = Workload.uniform(**given, measured={"cpu": {"1,1": times}}).layers[0]
        >>> layer_memory_bytes(layer, "cpu", "1f1b", 1.0, 1, 1), layer_memory_bytes(layer, "gpu", "1f1b", 0.5, 2, 1)
        ((55.0, 0.0, 30.0), (40.0, 11.0, 30.0))

    Source: XLA's analysis of the programs of benchmarks/memory_limits.py.
    """
    stays, parts = resident_bytes(layer, schedule, group), group if is_split(layer) else 1
    if schedule == "inference":
        return stays, 0.0, 0.0
    measured, update = measured_time(layer, kind, replicas, group), float(layer.update_bytes or 0.0) / parts
    if measured is not None and measured.memory_bytes is not None:
        return max(0.0, measured.memory_bytes - layer.activation_bytes * share), 0.0, update
    if layer.temporary_bytes is None:
        return stays, 0.0, update
    return stays, (layer.gradient_size_bytes + layer.temporary_bytes * share) / parts, update


def stage_memory_bytes(
    resident: Any, activations: Any, in_flight: Any, batches: Any = 0.0, scratch: Any = 0.0, update: Any = 0.0
) -> Tuple[Any, Any]:
    """Return a stage's memory on one device during its passes, and during its update: the larger M counts.

        M = sum (p + g + o) / TP + B  sum (batch x share) + max(scratch + k  sum (activations x share), sum u / TP)

    A stage runs layer by layer, so its scratch is that of the layer with most. The update runs after all passes, when
    no activations are left. u is the new state beside an old one that is not donated. The caller leaves out what
    `counted_twice` says. The samples of all B microbatches arrive before a step's first microbatch runs. Arguments may
    be arrays.

    Example:
        >>> stage_memory_bytes(40.0, 5.0, 3), stage_memory_bytes(40.0, 5.0, 3, batches=8.0)
        ((55.0, 40.0), (63.0, 48.0))
        >>> stage_memory_bytes(40.0, 5.0, 3, scratch=10.0, update=30.0)
        (65.0, 70.0)
    """
    return resident + scratch + batches + in_flight * activations, resident + batches + update
