"""The same work cut into microbatches of another size, for plans that leave the number of microbatches open."""

from __future__ import annotations

from typing import Dict, Optional

import msgspec
import numpy as np

from hwaware.cluster import ClusterProfile, Device
from hwaware.costs.compute import analytic_time_s, is_split
from hwaware.errors import UnusableInputError
from hwaware.workload import Layer, MeasuredTime, Workload


def with_microbatch_size(workload: Workload, profile: ClusterProfile, samples: int) -> Workload:
    """The workload with microbatches of that many samples.

    FLOPs, outputs, activations and tensor-parallel bytes are in proportion to the samples; parameters stay. Measured
    times are scaled by analytic / analytic of both sizes on the kind that they were measured on, as for shares of a
    microbatch; kinds that are not in the profile are left out.

    Args:
        workload: As it was traced.
        profile: Whose devices' curves scale measured times.
        samples: The new microbatch size, at least 1.

    Raises:
        UnusableInputError: A value of that size is beyond its bound.

    Example:
        >>> half = with_microbatch_size(Workload.uniform(parameter_bytes=10), ClusterProfile.uniform(), 2)
        >>> half.microbatch_size, half.layers[0].forward_flops, half.layers[0].parameter_bytes
        (2, 500000000.0, 10)
    """
    if samples == workload.microbatch_size:
        return workload
    factor = samples / workload.microbatch_size
    kinds: Dict[str, Device] = {}
    for device in profile.devices:
        kinds.setdefault(device.kind, device)
    try:
        layers = tuple(_resized(layer, factor, kinds, workload.dtype) for layer in workload.layers)
        return msgspec.structs.replace(workload, microbatch_size=samples, layers=layers)
    except ValueError as error:
        raise UnusableInputError(
            f"no model has microbatches of {samples} samples like those of {workload.name!r}: {error}.",
            "correct the workload, or give a smaller global batch.",
        ) from error


def _resized(layer: Layer, factor: float, kinds: Dict[str, Device], dtype: str) -> Layer:
    return msgspec.structs.replace(
        layer,
        forward_flops=layer.forward_flops * factor,
        backward_flops=layer.backward_flops * factor,
        output_bytes=layer.output_bytes * factor,
        activation_bytes=layer.activation_bytes * factor,
        batch_bytes=None if layer.batch_bytes is None else layer.batch_bytes * factor,
        temporary_bytes=None if layer.temporary_bytes is None else layer.temporary_bytes * factor,
        tensor_parallel_bytes=None if layer.tensor_parallel_bytes is None else layer.tensor_parallel_bytes * factor,
        measured=_measured(layer, factor, kinds, dtype),
    )


def _measured(
    layer: Layer, factor: float, kinds: Dict[str, Device], dtype: str
) -> Optional[Dict[str, Dict[str, MeasuredTime]]]:
    if layer.measured is None:
        return None
    return {
        kind: {sharding: _scaled(layer, factor, kinds[kind], dtype, sharding, time) for sharding, time in times.items()}
        for kind, times in layer.measured.items()
        if kind in kinds
    }


def _scaled(layer: Layer, factor: float, device: Device, dtype: str, sharding: str, time: MeasuredTime) -> MeasuredTime:
    replicas, group = (int(part) for part in sharding.split(","))
    owned = 1.0 / (group if is_split(layer) else 1)
    part, weights = owned / replicas, np.array([owned])

    def ratio(backward: bool) -> float:
        if dtype not in device.throughput:
            return factor
        parts = (np.array([part]), np.array([part * factor]))
        before, after = (float(analytic_time_s([layer], device, dtype, p, backward, weights)[0]) for p in parts)
        return after / before if before > 0 else factor

    memory = time.memory_bytes
    return msgspec.structs.replace(
        time,
        forward_s=time.forward_s * ratio(False),
        backward_s=time.backward_s * ratio(True),
        memory_bytes=None if memory is None else max(0.0, memory + layer.activation_bytes * (factor - 1) / replicas),
    )
