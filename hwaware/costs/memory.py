"""What a stage keeps in device memory."""

from __future__ import annotations

from hwaware.costs.compute import is_split, measured_time
from hwaware.errors import UnusableInputError
from hwaware.plans import Schedule
from hwaware.workload import Layer


def microbatches_in_flight(schedule: Schedule, num_microbatches: int, later_stages: int) -> int:
    """Microbatches whose activations a stage holds at once.

    1F1B: min(B, n - i) for stage i of n, that is one more than the stages after it. GPipe: B. Inference: 1.

    Example:
        >>> [microbatches_in_flight("1f1b", 8, later) for later in (0, 3, 11)]
        [1, 4, 8]
        >>> microbatches_in_flight("gpipe", 8, 0), microbatches_in_flight("inference", 8, 3)
        (8, 1)

    Source: Narayanan et al., "Memory-efficient pipeline-parallel DNN training", 2021 (1F1B with flush).
    """
    if schedule == "inference":
        return 1
    return num_microbatches if schedule == "gpipe" else min(num_microbatches, later_stages + 1)


def resident_bytes(layer: Layer, schedule: Schedule, group: int = 1) -> float:
    """Bytes that a layer keeps on each device whatever is in flight: p + g + o, for inference p alone, over TP.

    A layer that is not split keeps all of it on every device of the group.

    Example:
        >>> layer = Layer(name="0", forward_flops=1, backward_flops=2, parameter_bytes=10, output_bytes=0,
        ...               activation_bytes=5)
        >>> resident_bytes(layer, "1f1b"), resident_bytes(layer, "inference")
        (40.0, 10.0)
    """
    kept = layer.parameter_bytes
    if schedule != "inference":
        kept += layer.gradient_size_bytes + layer.optimizer_size_bytes
    return float(kept) / (group if is_split(layer) else 1)


def layer_resident_bytes(layer: Layer, kind: str, schedule: Schedule, share: float, replicas: int, group: int) -> float:
    """`resident_bytes`, or what was measured: the measured peak, with one microbatch in flight, less its activations.

    Example:
        >>> from hwaware.workload import MeasuredTime
        >>> times = MeasuredTime(forward_s=1, backward_s=2, memory_bytes=60)
        >>> layer = Layer(name="0", forward_flops=1, backward_flops=2, parameter_bytes=10, output_bytes=0,
        ...               activation_bytes=5, measured={"cpu": {"1,1": times}})
        >>> layer_resident_bytes(layer, "cpu", "1f1b", 1.0, 1, 1), layer_resident_bytes(layer, "gpu", "1f1b", 1.0, 1, 1)
        (55.0, 40.0)
    """
    measured = measured_time(layer, kind, replicas, group)
    if measured is None or measured.memory_bytes is None or schedule == "inference":
        return resident_bytes(layer, schedule, group)
    return max(0.0, measured.memory_bytes - layer.activation_bytes * share)


def stage_memory_bytes(resident: float, activations: float, in_flight: int) -> float:
    """Memory of a stage on one device: what stays, plus activations times microbatches in flight.

    M = sum (p + g + o) / TP + k  sum (activations x share)

    Example:
        >>> stage_memory_bytes(40.0, 5.0, 3)
        55.0
    """
    if in_flight < 1:
        raise UnusableInputError(f"{in_flight} microbatches in flight, expected at least 1.", "give 1 or more.")
    return resident + in_flight * activations
