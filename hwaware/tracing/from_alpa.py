"""Turn Alpa's layers into a Workload. This module reads attributes of Alpa's objects, and does not import Alpa."""

from __future__ import annotations

import types
from typing import Any, Dict, Hashable, Iterable, List, Mapping, NamedTuple, Sequence, Set

from hwaware.compat.jaxprs import variables
from hwaware.errors import UnusableInputError
from hwaware.tracing.flops import jaxpr_flops, main_dtype, product_flops
from hwaware.tracing.graph import value_of
from hwaware.tracing.scratch import scratch_bytes
from hwaware.tracing.state import LayerState, settled, shared_bytes, total_bytes
from hwaware.workload import ADAM_MOMENTS, Layer, Workload

NO_DONATIONS: Mapping[Any, Any] = types.MappingProxyType({})


def workload_from_alpa_layers(
    layers: Sequence[Any], accumulator_mapping: Mapping[Any, Any], microbatch_size: int, name: str,
    optimizer_multiple: float = ADAM_MOMENTS, inference: bool = False, updates: Sequence[Any] = (),
    donations: Mapping[Any, Any] = NO_DONATIONS, returned: Sequence[Any] = (),
) -> Workload:  # fmt: skip
    """Return the input of Alpa's stage construction as a Workload.

    A layer holds each parameter that it reads, frozen or trained: Alpa gives every stage its own copy. The layer's
    optimizer state is all that its update reads beside parameters and gradients.

    Args:
        layers: The layers that `cluster_layers_and_slice_mesh` gets: n forward layers, then their n backward layers in
            reverse order. For inference, the forward layers alone. Each has `invars`, `outvars`, `eqns`, `consts_dir`.
        accumulator_mapping: Gradient accumulator read -> accumulator written. It is empty if Alpa runs a single
            microbatch: the gradients are then what layers make and updates read.
        microbatch_size: The number of samples with which Alpa traced the layers.
        name: The name of the workload.
        optimizer_multiple: Bytes of optimizer state per byte of gradients, if no updates tell it.
        inference: True if the program has no backward layers.
        updates: Alpa's layers that apply gradients (some may be None), one for each forward layer. They tell the
            samples: see `samples_of`. Without updates, the samples' bytes are unknown, and floating samples count as
            parameters. They also do in inference.
        donations: Input -> the output that takes over its memory.
        returned: The values that the program returns.

    Raises:
        UnusableInputError: Alpa gave no layers, or an odd number in training.
    """
    if not layers or (not inference and len(layers) % 2):
        raise UnusableInputError(
            f"Alpa gave {len(layers)} layers, expected as many backward as forward layers, and at least one.",
            "use alpa.grad or alpa.value_and_grad in the train step, or pipeline_schedule='inference'.",
        )
    count = len(layers) if inference else len(layers) // 2
    forward = list(layers[:count])
    backward = [] if inference else list(reversed(layers[count:]))
    samples = samples_of(forward, backward, updates, microbatch_size, returned)
    program = _Program(forward, backward, accumulator_mapping, [each for each in updates if each is not None], samples)
    updates = [*updates, *[None] * count]
    states = settled([_state(program, index, updates[index], donations, microbatch_size) for index in range(count)])
    optimizer = [total_bytes(state.optimizer) for state in states]
    if not program.updates:
        optimizer = [optimizer_multiple * total_bytes(state.gradients) for state in states]
    kept = [_residual_bytes(forward, layer) for layer in backward] or [0.0] * count
    return Workload(
        name=name,
        microbatch_size=microbatch_size,
        dtype=main_dtype(
            product[1:] for layer in layers for equation in layer.eqns for product in product_flops(equation)
        ),
        layers=tuple(
            Layer(
                name=str(index),
                forward_flops=jaxpr_flops(forward[index]),
                backward_flops=jaxpr_flops(backward[index]) if backward else 0.0,
                parameter_bytes=total_bytes(states[index].parameters),
                output_bytes=_output_bytes(forward, index),
                activation_bytes=kept[index],
                temporary_bytes=None if inference else scratch_bytes(kept[index], forward[index].eqns),
                batch_bytes=_bytes(samples.intersection(forward[index].invars)) if samples else None,
                gradient_bytes=total_bytes(states[index].gradients),
                optimizer_bytes=optimizer[index],
                update_bytes=total_bytes(states[index].update) or None,
            )
            for index in range(count)
        ),
        shared=shared_bytes(states),
    )


class _Program(NamedTuple):
    """Hold a program's layers, accumulators and updates, and the variables that are samples."""

    forward: List[Any]
    backward: List[Any]
    accumulators: Mapping[Any, Any]
    updates: List[Any]
    samples: Set[Any]

    def passes(self, index: int) -> List[Any]:
        return [self.forward[index], *self.backward[index : index + 1]]

    def made(self) -> Set[Any]:
        return {variable for layer in (*self.forward, *self.backward) for variable in layer.outvars}

    def summed(self) -> Set[Any]:
        """Return the values that Alpa adds up over the microbatches for the update."""
        return set(self.accumulators.values()) or {variable for each in self.updates for variable in each.invars}


class _Constant(NamedTuple):
    """An array that the function closes over. It is a part of each program that reads it."""

    layer: int
    part: int
    variable: Any


def _state(
    program: _Program, index: int, update: Any, donations: Mapping[Any, Any], microbatch_size: int
) -> LayerState:
    """Return the sizes of the variables that layer `index` holds [bytes]."""
    made, passes = program.made(), program.passes(index)
    own = {variable for each in passes for variable in each.outvars}
    read = {variable for each in passes for variable in each.invars} - made - program.samples
    read -= set(program.accumulators)
    gradients = own & program.summed()
    if not program.updates:  # the values left out may be samples of integers
        read = {one for one in read if value_of(one).floating or tuple(one.aval.shape)[:1] != (microbatch_size,)}
        if program.backward and not program.accumulators:  # a single microbatch, and nothing says what is trained
            gradients = {variable for variable in read if value_of(variable).floating}
    asked, new = (set(), set()) if update is None else (set(update.invars), set(update.outvars))
    donors = {output: given for given, output in donations.items()}
    beside = {variable for variable in new if not _takes_over(variable, donors)} | ((asked & made) - own)
    constants: Dict[Hashable, float] = {
        _Constant(index, part, variable): float(getattr(value, "nbytes", 0))
        for part, each in enumerate(passes)
        for variable, value in each.consts_dir.items()
    }
    return LayerState(
        parameters={**_sizes(read), **constants},
        gradients=_sizes(gradients),
        optimizer=_sizes(asked - made - read - program.samples),
        update=_sizes(beside),
    )


def _takes_over(output: Any, donors: Mapping[Any, Any]) -> bool:
    """Return True if an output takes an input's memory, as `hwaware.compiler.programs.lower` arranges it."""
    given = donors.get(output)
    if given is None:
        return False
    return bool((given.aval.shape, given.aval.dtype) == (output.aval.shape, output.aval.dtype))


def _sizes(variables: Iterable[Any]) -> Dict[Hashable, float]:
    return {variable: float(value_of(variable).nbytes) for variable in variables}


def samples_of(
    forward: Sequence[Any],
    backward: Sequence[Any],
    updates: Sequence[Any],
    microbatch_size: int,
    returned: Sequence[Any] = (),
) -> Set[Any]:
    """Return the variables that are a microbatch's samples.

    Forward layers read these. No layer makes them, no update reads them, and the program does not return them.

    Args:
        forward: Alpa's forward layers.
        backward: Alpa's backward layers. Values that only these read are accumulators, of any shape.
        updates: Alpa's layers that apply gradients. Without any, this function returns no samples.
        microbatch_size: The size of axis 0 of the samples.
        returned: The values that the program returns. Frozen parameters are returned as they came, samples are not.
    """
    if all(update is None for update in updates):
        return set()
    known = {variable for layer in (*forward, *backward) for variable in layer.outvars}
    known |= {variable for update in updates if update is not None for variable in update.invars}
    known |= {*variables(returned)}
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
