"""Compare the memory of a stage under ZeRO and offloading.

The runtime keeps whole states on every replica, so `evaluate` prices level 0 alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional, Tuple

from hwaware.costs import memory
from hwaware.errors import UnusableInputError
from hwaware.workload import Workload

LEVELS = (0, 1, 2, 3)


def zero_resident_bytes(
    parameters: float, gradients: float, optimizer: float, replicas: int, level: int = 0, offload: bool = False
) -> float:
    """Return the bytes that one of N data-parallel devices keeps under ZeRO; level 0 is plain data parallelism.

        level 0: p + g + o     1: p + g + o / N     2: p + (g + o) / N     3: (p + g + o) / N

    With `offload`, the host keeps the optimizer state.

    Raises:
        UnusableInputError: No such level.

    Example:
        >>> [zero_resident_bytes(10.0, 10.0, 20.0, 4, level) for level in (0, 1, 2, 3)]
        [40.0, 25.0, 17.5, 10.0]
        >>> zero_resident_bytes(10.0, 10.0, 20.0, 4, 1, offload=True)
        20.0

    Source: Rajbhandari et al., "ZeRO", 2020; Ren et al., "ZeRO-Offload", 2021.
    """
    if level not in LEVELS:
        raise UnusableInputError(f"ZeRO level {level}, expected 0, 1, 2 or 3.", "choose one of them.")
    state = 0.0 if offload else optimizer / (replicas if level >= 1 else 1)
    return parameters / (replicas if level >= 3 else 1) + gradients / (replicas if level >= 2 else 1) + state


def zero_traffic_bytes(parameters: float, gradients: float, replicas: int, level: int = 0, passes: int = 1) -> float:
    """Return the bytes that each of N devices sends for one step of k microbatches under ZeRO.

        level 0: 2 (N - 1) / N g    1: (N - 1) / N (g + p)    2: (N - 1) / N (k g + p)    3: (N - 1) / N k (g + 2 p)

    Levels 1 and 2 reduce-scatter gradients and all-gather parameters. Level 3 gathers the parameters for every pass.
    From level 2 on, no device keeps whole gradients, so every microbatch reduce-scatters its own.

    Example:
        >>> [zero_traffic_bytes(8.0, 8.0, 4, level, passes=2) for level in (0, 1, 2, 3)]
        [12.0, 12.0, 18.0, 36.0]

    Source: Rajbhandari et al., "ZeRO", 2020, section 7.
    """
    ring = (replicas - 1) / replicas
    if level == 0:
        return 2 * ring * gradients
    return ring * (gradients * (passes if level > 1 else 1) + parameters * (2 * passes if level > 2 else 1))


class ZeroStage(NamedTuple):
    """Hold a stage that is one replica on each of N devices."""

    workload: Workload
    layers: Tuple[int, int]  # first and last, inclusive
    replicas: int
    num_microbatches: int = 1
    later_stages: int = 0  # behind this one; they decide how many microbatches it holds


class ZeroCost(NamedTuple):
    """Hold the memory that a level of ZeRO takes on the fullest device."""

    memory_bytes: float
    state_bytes: float  # the part for parameters, gradients and optimizer state
    sent_bytes: float  # by each device in a step
    offload_s: Optional[float]  # of a step, to the host and back; None without offloading or a rate


def zero_cost(
    stage: ZeroStage, level: int, offload: bool = False, kind: str = "", host_bytes_per_s: Optional[float] = None
) -> ZeroCost:
    """Price a stage under a level of ZeRO.

    At level 0 the memory is that of `evaluate`. A level saves by `zero_resident_bytes`, and divides the update's memory
    too. A replica has at most the ceiling of m / N of the m samples of a microbatch. With `offload`, gradients go to
    the host and parameters back, at `host_bytes_per_s`. Memory that was measured on devices of the `kind` wins.

    Raises:
        UnusableInputError: No such level or layers, or fewer samples than replicas.

    Example:
        >>> stage = ZeroStage(Workload.uniform(parameter_bytes=10, activation_bytes=8), (0, 0), 4)
        >>> [zero_cost(stage, level).memory_bytes for level in (0, 1, 2, 3)]
        [42.0, 27.0, 19.5, 12.0]
    """
    workload, (first, last), n = stage.workload, stage.layers, stage.replicas
    samples, count, later = workload.microbatch_size, stage.num_microbatches, stage.later_stages
    if not 0 <= first <= last < len(workload.layers):
        raise UnusableInputError(
            f"the stage has layers {first} to {last}, and the workload has layers 0 to {len(workload.layers) - 1}.",
            "give the first and the last layer, such as --layers 0-3.",
        )
    if not 1 <= n <= samples:
        raise UnusableInputError(
            f"{n} devices share microbatches of {samples} samples, expected 1 to {samples} devices.",
            "give fewer devices, or trace the model with larger microbatches.",
        )
    if count < 1 or later < 0:
        said = f"{count} microbatches and {later} later stages, expected at least 1 and 0."
        raise UnusableInputError(said, "correct the numbers.")
    layers = workload.layers[first : last + 1]
    share = math.ceil(samples / n) / samples
    parts = [memory.layer_memory_bytes(layer, kind, "1f1b", share, n, 1) for layer in layers]
    twice, twice_new = memory.counted_twice(memory.common_bytes(workload, "1f1b"), first, last + 1)
    again = [(shared, max(0, sum(first <= k <= last for k in shared.layers) - 1)) for shared in workload.shared]
    parameters = sum(x.parameter_bytes for x in layers) - sum(shared.parameter_bytes * k for shared, k in again)
    optimizer = sum(x.optimizer_size_bytes for x in layers) - sum(shared.optimizer_bytes * k for shared, k in again)
    gradients = sum(x.gradient_size_bytes for x in layers)
    state = zero_resident_bytes(parameters, gradients, optimizer, n, level, offload)
    saved = zero_resident_bytes(parameters, gradients, optimizer, n) - state
    update = sum(new for _, _, new in parts) - twice_new
    both_bytes = memory.stage_memory_bytes(
        max(0.0, sum(stay for stay, _, _ in parts) - twice - saved),
        sum(x.activation_bytes for x in layers) * share,
        memory.in_flight("1f1b", count, later + 1),
        count * sum(x.batch_bytes or 0.0 for x in layers) * share,
        max(scratch for _, scratch, _ in parts),
        0.0 if offload else update / (n if level else 1),
    )
    offload_s = None
    if offload and host_bytes_per_s is not None:
        offload_s = (gradients + parameters) / host_bytes_per_s / (n if level else 1)
    sent = zero_traffic_bytes(parameters, gradients, n, level, count)
    return ZeroCost(max(both_bytes), state, sent, offload_s)
