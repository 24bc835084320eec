"""Define `Workload`, a model layer by layer; a layer's figures are for one whole microbatch on one device."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Dict, Optional, Tuple

from hwaware.records import (
    MOST_BYTES,
    MOST_COUNT,
    MOST_FLOPS,
    MOST_LAYERS,
    MOST_SECONDS,
    FileRecord,
    Record,
    require,
    require_amount,
    require_count,
    require_name,
    require_printable,
    require_unique,
)

# Adam keeps two moments of the parameters' size (Kingma and Ba, 2015).
ADAM_MOMENTS = 2
_SHARDING = re.compile("[1-9][0-9]{0,5},[1-9][0-9]{0,5}")


# Standard deviation of log t: a factor of e^20 either way.
_MOST_SPREAD = 20.0


def _most(name: str) -> float:
    """Return the largest value of a field, by the unit in its name; fields without a unit are counts."""
    units = {"_s": MOST_SECONDS, "_flops": MOST_FLOPS, "_bytes": MOST_BYTES, "spread": _MOST_SPREAD}
    return next((most for unit, most in units.items() if name.endswith(unit)), float(MOST_COUNT))


class MeasuredTime(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Wall times of one layer, measured on one kind of device under one sharding.

    Attributes:
        forward_s, backward_s: Time of one microbatch, with tensor-parallel collectives but without gradient
            synchronisation.
        update_s: Time of the optimizer's update, once per step.
        memory_bytes: Peak memory of the layer on one device.
        deviation_s: Standard deviation between passes. Replicas wait for the slowest of their passes.
        spread: Expected standard deviation of log t for times converted from another device, or computed by formulas;
            None for measured times.
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
                require_amount(name, value, _most(name))


class Layer(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One layer, which placement never cuts.

    Attributes:
        name: The layer's name, for tables and pins.
        forward_flops, backward_flops: FLOPs per microbatch; backward includes recomputation.
        parameter_bytes: Size of the parameters that the layer reads, frozen ones included.
        output_bytes: Activations to the next layer, per microbatch; as many bytes of gradients come back.
        activation_bytes: Memory kept for the backward pass, per microbatch in flight.
        gradient_bytes: Size of the gradient accumulators; `parameter_bytes` if left out, less if some are frozen.
        optimizer_bytes: Size of the optimizer state; twice `parameter_bytes` (Adam) if left out.
        update_bytes: Memory that the update takes beside what stays; 0 if left out. It holds gradients of
            other layers, and the new state if the program does not donate the old one.
        batch_bytes: Samples that the layer reads, per microbatch. All microbatches of a step may lie on the device
            from its start; left out, they do not count.
        temporary_bytes: Scratch memory of the backward pass, per microbatch. Left out, neither this counts nor the
            gradients that are not yet added up.
        tensor_parallel_bytes, tensor_parallel_collectives: All-reduced bytes and calls per microbatch, forward and
            backward together; no replica splits a layer without them.
        measured: Device kind -> "DP,TP" -> measured times, which take precedence over the analytic model.
    """

    name: str
    forward_flops: float
    backward_flops: float
    parameter_bytes: float
    output_bytes: float
    activation_bytes: float
    gradient_bytes: Optional[float] = None
    optimizer_bytes: Optional[float] = None
    update_bytes: Optional[float] = None
    batch_bytes: Optional[float] = None
    temporary_bytes: Optional[float] = None
    tensor_parallel_bytes: Optional[float] = None
    tensor_parallel_collectives: Optional[float] = None
    measured: Optional[Dict[str, Dict[str, MeasuredTime]]] = None

    def __post_init__(self) -> None:
        require_name("layer name", self.name)
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name not in ("name", "measured") and value is not None:
                require_amount(f"{name} of layer {self.name!r}", value, _most(name), why=": no model has that")
        for kind, times in (self.measured or {}).items():
            for sharding in times:
                found = f"layer {self.name!r} was measured on {kind} with sharding {sharding!r}"
                require(bool(_SHARDING.fullmatch(sharding)), f'{found}, expected "DP,TP" as in "2,1"')

    @property
    def gradient_size_bytes(self) -> float:
        """Return the bytes of the gradient accumulators."""
        return self.parameter_bytes if self.gradient_bytes is None else self.gradient_bytes

    @property
    def optimizer_size_bytes(self) -> float:
        """Return the bytes of the optimizer state."""
        return ADAM_MOMENTS * self.parameter_bytes if self.optimizer_bytes is None else self.optimizer_bytes


class Shared(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Bytes that several layers count, each in its own figures; a stage with several of these layers has them once.

    An example is a weight that is both embedding and head. Each layer has gradients of its own, which stay apart.

    Attributes:
        layers: Numbers of the layers, two or more, in ascending order.
        parameter_bytes, optimizer_bytes, update_bytes: The common part of the layers' figures of these names.

    Example:
        >>> Shared(layers=(0, 7), parameter_bytes=4e6).parameter_bytes
        4000000.0
    """

    layers: Tuple[int, ...]
    parameter_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    update_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("parameter_bytes", "optimizer_bytes", "update_bytes"):
            require_amount(f"{name} that layers share", getattr(self, name), MOST_BYTES, why=": no model has that")
        found = f"layers {list(self.layers)} share bytes"
        require(len(self.layers) >= 2, f"{found}, expected at least two layers")
        require_unique("layer that shares bytes", self.layers)
        require(list(self.layers) == sorted(self.layers), f"{found}, expected ascending numbers")


class Workload(FileRecord, frozen=True, kw_only=True, omit_defaults=True):
    """A model as a chain of layers.

    Attributes:
        name: Name of the model.
        microbatch_size: Samples per microbatch.
        dtype: Data type of the matrix products, e.g. "float32"; it selects throughput curves of devices.
        layers: The layers, first to last.
        shared: The bytes that several layers have in common.

    Example:
        >>> from hwaware import Workload
        >>> from hwaware.workload import Layer
        >>> layer = Layer(name="0", forward_flops=1e9, backward_flops=2e9, parameter_bytes=4e6, output_bytes=1e5,
        ...               activation_bytes=1e6)
        >>> workload = Workload(name="two", microbatch_size=4, dtype="float32", layers=(layer, layer))
        >>> workload.layers[0].optimizer_size_bytes
        8000000.0
    """

    SCHEMA: ClassVar[str] = "hwaware.workload"
    MOST: ClassVar[Dict[str, Tuple[int, str]]] = {
        "layers": (MOST_LAYERS, "join neighbouring layers, such as those of a block.")
    }

    name: str
    microbatch_size: int
    dtype: str
    layers: Tuple[Layer, ...]
    shared: Tuple[Shared, ...] = ()

    @classmethod
    def uniform(
        cls, *, layers: int = 1, microbatch_size: int = 4, dtype: str = "float32", **of_layers: Any
    ) -> Workload:
        """Make up a model of equal layers, for a first trial, a test or an example.

        Args:
            layers: Number of layers. They are called 0, 1 and so on.
            microbatch_size: Samples per microbatch.
            dtype: Data type of the matrix products.
            of_layers: Fields of each layer. By default it takes 1 GFLOP forward and 2 GFLOP backward, and has no bytes.

        Example:
            >>> from hwaware import Workload
            >>> Workload.uniform(layers=2, parameter_bytes=4e6).layers[1].optimizer_size_bytes
            8000000.0
        """
        require_count("layers", layers, most=MOST_LAYERS)
        flops = {"forward_flops": 1e9, "backward_flops": 2e9}
        given = {**flops, "parameter_bytes": 0, "output_bytes": 0, "activation_bytes": 0, **of_layers}
        made = tuple(Layer(name=str(number), **given) for number in range(layers))
        return cls(name="uniform", microbatch_size=microbatch_size, dtype=dtype, layers=made)

    def __post_init__(self) -> None:
        require_count("microbatch_size", self.microbatch_size)
        require_name("dtype", self.dtype)
        require_printable("name", self.name)
        require(bool(self.layers), "the workload has no layers")
        require_count("the number of layers", len(self.layers), most=MOST_LAYERS)
        self._check_shared()

    def _check_shared(self) -> None:
        """Refuse layers that do not exist, and common parts that are more than what a layer counts."""
        places = sum(len(shared.layers) for shared in self.shared)
        require(places <= MOST_LAYERS, f"shared names {places} layers, expected at most {MOST_LAYERS}")
        common: Dict[Tuple[int, str], float] = {}
        for shared in self.shared:
            found = f"layers {list(shared.layers)} share bytes, and the workload has {len(self.layers)} layers"
            inside = shared.layers[0] >= 0 and shared.layers[-1] < len(self.layers)
            require(inside, f"{found}, expected numbers from 0 to {len(self.layers) - 1}")
            for number in shared.layers:
                for name in ("parameter_bytes", "optimizer_bytes"):
                    common[number, name] = common.get((number, name), 0.0) + getattr(shared, name)
            # A gradient that another layer sends counts where it arrives, so not in each of the layers.
            updates = sum(self.layers[number].update_bytes or 0.0 for number in shared.layers)
            _require_part(f"layers {list(shared.layers)} share", shared.update_bytes, "update_bytes", updates)
        for (number, name), part in common.items():
            layer = self.layers[number]
            whole = layer.parameter_bytes if name == "parameter_bytes" else layer.optimizer_size_bytes
            _require_part(f"layer {layer.name!r} shares", part, name, whole)


def _require_part(who: str, common: float, name: str, whole: float) -> None:
    # Sums of floats in another order may differ in their last digits.
    require(common <= whole * (1 + 1e-9), f"{who} {common:g} {name}, expected at most their own {whole:g}")
