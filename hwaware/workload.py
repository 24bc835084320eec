"""Workload: what has to run, layer by layer. All figures of a layer are for one whole microbatch on one device."""

from __future__ import annotations

import re
from typing import ClassVar, Dict, Optional, Tuple

from hwaware.records import FileRecord, Record, require, require_count, require_finite

# Adam keeps two moments of the parameters' size (Kingma and Ba, 2015).
ADAM_MOMENTS = 2
_SHARDING = re.compile("[1-9][0-9]{0,5},[1-9][0-9]{0,5}")


class MeasuredTime(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Wall times of one layer, measured on one kind of device under one sharding.

    Attributes:
        forward_s, backward_s: One microbatch, with its tensor-parallel collectives, without gradient synchronisation.
        update_s: The optimizer's update, once per step.
        memory_bytes: Peak memory of the layer on one device.
        deviation_s: Standard deviation of one pass from the next. Replicas wait for the one that takes longest.
        spread: Standard deviation of log t to expect of times that were carried over from another kind of device;
            None where they were measured on this one.
    """

    forward_s: float
    backward_s: float
    update_s: Optional[float] = None
    memory_bytes: Optional[float] = None
    deviation_s: Optional[float] = None
    spread: Optional[float] = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None:
                require_finite(name, value)


class Layer(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One layer: the smallest part that placement does not cut.

    Attributes:
        forward_flops, backward_flops: Per microbatch; backward includes recomputation.
        parameter_bytes: Of the parameters that the layer owns.
        output_bytes: What goes to the next layer, per microbatch; as many gradient bytes come back.
        activation_bytes: What is kept for the backward pass, per microbatch in flight.
        gradient_bytes: Of the gradient accumulators; `parameter_bytes` if left out.
        optimizer_bytes: Of the optimizer state; twice `parameter_bytes` (Adam) if left out.
        batch_bytes: What it reads of a microbatch's samples. Those of all microbatches lie on the device from the start
            of a step; left out, they do not count.
        temporary_bytes: Scratch of the backward pass per microbatch, beside gradients that are not added up yet; left
            out, neither counts.
        tensor_parallel_bytes, tensor_parallel_collectives: All-reduced bytes and calls per microbatch, forward and
            backward together; a layer without them is not split.
        measured: Device kind -> "DP,TP" -> measured times, which win over the analytic model.
    """

    name: str
    forward_flops: float
    backward_flops: float
    parameter_bytes: float
    output_bytes: float
    activation_bytes: float
    gradient_bytes: Optional[float] = None
    optimizer_bytes: Optional[float] = None
    batch_bytes: Optional[float] = None
    temporary_bytes: Optional[float] = None
    tensor_parallel_bytes: Optional[float] = None
    tensor_parallel_collectives: Optional[float] = None
    measured: Optional[Dict[str, Dict[str, MeasuredTime]]] = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name not in ("name", "measured") and value is not None:
                require_finite(f"{name} of layer {self.name!r}", value)
        for kind, times in (self.measured or {}).items():
            for sharding in times:
                found = f"layer {self.name!r} was measured on {kind} with sharding {sharding!r}"
                require(bool(_SHARDING.fullmatch(sharding)), f'{found}, expected "DP,TP" as in "2,1"')

    @property
    def gradient_size_bytes(self) -> float:
        """Bytes of the gradient accumulators."""
        return self.parameter_bytes if self.gradient_bytes is None else self.gradient_bytes

    @property
    def optimizer_size_bytes(self) -> float:
        """Bytes of the optimizer state."""
        return ADAM_MOMENTS * self.parameter_bytes if self.optimizer_bytes is None else self.optimizer_bytes


class Workload(FileRecord, frozen=True, kw_only=True, omit_defaults=True):
    """A model as a chain of layers.

    Example:
        >>> layer = Layer(name="0", forward_flops=1e9, backward_flops=2e9, parameter_bytes=4e6, output_bytes=1e5,
        ...               activation_bytes=1e6)
        >>> workload = Workload(name="two", microbatch_size=4, dtype="float32", layers=(layer, layer))
        >>> workload.layers[0].optimizer_size_bytes
        8000000.0
    """

    SCHEMA: ClassVar[str] = "hwaware.workload"

    name: str
    microbatch_size: int
    dtype: str
    layers: Tuple[Layer, ...]

    def __post_init__(self) -> None:
        require_count("microbatch_size", self.microbatch_size)
        require(bool(self.layers), "the workload has no layers")
