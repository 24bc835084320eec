"""Alpa's layers as a Workload. Alpa's objects are used by their shape alone; Alpa itself is not imported."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterable, List, Mapping, Sequence, Set

from hwaware.errors import UnusableInputError
from hwaware.tracing.flops import equation_flops, product_flops
from hwaware.tracing.graph import value_of
from hwaware.tracing.scratch import scratch_bytes
from hwaware.workload import ADAM_MOMENTS, Layer, Workload


def workload_from_alpa_layers(
    layers: Sequence[Any],
    accumulator_mapping: Mapping[Any, Any],
    microbatch_size: int,
    name: str,
    optimizer_multiple: float = ADAM_MOMENTS,
    inference: bool = False,
    updates: Sequence[Any] = (),
) -> Workload:
    """What Alpa's stage construction is given, as a Workload.

    Args:
        layers: As `cluster_layers_and_slice_mesh` gets them: n forward layers, then their n backward layers in
            reverse order (for inference the forward layers alone). Each has `invars`, `outvars` and `eqns`.
        accumulator_mapping: Gradient accumulator read -> accumulator written. A layer owns the parameters whose
            gradients its backward part accumulates. It is empty if Alpa runs a single microbatch: then a layer owns
            the floating inputs that no layer makes (a floating batch counts as a parameter there, and in inference).
        microbatch_size: Samples with which Alpa traced the layers.
        name: Of the workload.
        optimizer_multiple: Bytes of optimizer state per byte of parameters.
        inference: There are no backward layers.
        updates: Alpa's layers that apply gradients (some may be None). The samples are told by them: what forward
            layers read, no layer makes, the updates do not read, and has `microbatch_size` in axis 0. Left out, the
            samples' bytes are not known.

    Raises:
        UnusableInputError: There are no layers, or an odd number of them in training.
    """
    if not layers or (not inference and len(layers) % 2):
        raise UnusableInputError(
            f"Alpa gave {len(layers)} layers, expected as many backward as forward layers, and at least one.",
            "use alpa.grad or alpa.value_and_grad in the train step, or pipeline_schedule='inference'.",
        )
    count = len(layers) if inference else len(layers) // 2
    forward = list(layers[:count])
    backward = [] if inference else list(reversed(layers[count:]))
    samples = samples_of(forward, backward, updates, microbatch_size)
    owners = _owned_parameters(forward, backward, {} if inference else accumulator_mapping)
    kept = [_residual_bytes(forward, layer) for layer in backward] or [0.0] * count
    return Workload(
        name=name,
        microbatch_size=microbatch_size,
        dtype=_main_dtype(layers),
        layers=tuple(
            Layer(
                name=str(index),
                forward_flops=_flops(forward[index]),
                backward_flops=_flops(backward[index]) if backward else 0.0,
                parameter_bytes=owners[index],
                output_bytes=_output_bytes(forward, index),
                activation_bytes=kept[index],
                temporary_bytes=None if inference else scratch_bytes(kept[index], forward[index].eqns),
                batch_bytes=_bytes(samples.intersection(forward[index].invars)) if samples else None,
                gradient_bytes=0.0 if inference else None,
                optimizer_bytes=0.0 if inference else optimizer_multiple * owners[index],
            )
            for index in range(count)
        ),
    )


def _owned_parameters(forward: List[Any], backward: List[Any], accumulators: Mapping[Any, Any]) -> List[float]:
    written = set(accumulators.values())
    if written:
        return [_bytes(written.intersection(layer.outvars)) for layer in backward]
    made = {variable for layer in (*forward, *backward) for variable in layer.outvars}
    owned: List[float] = []
    for layer in forward:
        taken = {variable for variable in layer.invars if variable not in made and value_of(variable).floating}
        owned.append(_bytes(taken))
        made |= taken  # a shared parameter belongs to its first reader
    return owned


def samples_of(
    forward: Sequence[Any], backward: Sequence[Any], updates: Sequence[Any], microbatch_size: int
) -> Set[Any]:
    """The variables that are a microbatch's samples, as `workload_from_alpa_layers` tells them.

    Args:
        forward, backward: Alpa's layers. What only backward layers read are accumulators, of any shape.
        updates: Those that apply gradients; without any, no samples are told.
        microbatch_size: In axis 0 of the samples.
    """
    if all(update is None for update in updates):
        return set()
    known = {variable for layer in (*forward, *backward) for variable in layer.outvars}
    known |= {variable for update in updates if update is not None for variable in update.invars}
    read = {variable for layer in forward for variable in layer.invars} - known
    return {variable for variable in read if tuple(variable.aval.shape)[:1] == (microbatch_size,)}


def _output_bytes(forward: List[Any], index: int) -> float:
    made = {variable for layer in forward[: index + 1] for variable in layer.outvars}
    return _bytes(made.intersection(variable for layer in forward[index + 1 :] for variable in layer.invars))


def _residual_bytes(forward: List[Any], backward_layer: Any) -> float:
    made = {variable for layer in forward for variable in layer.outvars}
    return _bytes(made.intersection(backward_layer.invars))


def _bytes(variables: Iterable[Any]) -> float:
    return float(sum(value_of(variable).nbytes for variable in variables))


def _flops(layer: Any) -> float:
    return math.fsum(equation_flops(equation) for equation in layer.eqns)


def _main_dtype(layers: Sequence[Any]) -> str:
    totals: Dict[str, float] = {}
    for layer in layers:
        for equation in layer.eqns:
            for _, dtype, flops in product_flops(equation):
                totals[dtype] = totals.get(dtype, 0.0) + flops
    # Layers without products (none is known) are priced as float32.
    return max(totals, key=lambda dtype: totals[dtype], default="float32")
