"""Turn a plain JAX train step into a Workload. JAX traces the step with shapes alone, and computes nothing."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

from hwaware.errors import UnusableInputError
from hwaware.tracing.graph import BACKWARD, Graph, Operation, flatten
from hwaware.tracing.layering import Layered, layer_operations
from hwaware.tracing.programs import LayerFunctions, layer_functions
from hwaware.tracing.scratch import scratch_bytes
from hwaware.workload import Layer, Workload


def trace(
    train_step: Callable[..., Any],
    state: Any,
    batch: Any,
    num_layers: int = 8,
    microbatch_size: int = 4,
    name: Optional[str] = None,
) -> Workload:
    """Describe the work of one microbatch of a train step as a chain of layers: FLOPs, stored bytes, sent bytes.

    hwaware cuts the step in program order into layers of about equal forward FLOPs, where few bytes cross. It counts
    the FLOPs of matrix products and convolutions, without those of the optimizer, which runs once per step.

    Args:
        train_step: `train_step(state, batch)`, which calls `jax.grad` or `jax.value_and_grad` (not inside a scan) and
            returns the new state, alone or in a tuple. It may be jitted, and may use `jax.checkpoint`.
        state: Parameters and optimizer state as a pytree of arrays or shapes. A floating leaf is a parameter if the
            forward pass reads it and its new value depends on gradients. All other floating leaves count as optimizer
            state, spread over the layers like the parameters.
        batch: Pytree of arrays or shapes with the samples in axis 0.
        num_layers: Layers to cut the model into.
        microbatch_size: Samples per microbatch. The batch may have another size.
        name: Name of the workload; by default the function's name.

    Raises:
        UnusableInputError: The step cannot be traced, takes no gradient, or has too few matrix products.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def step(weights, batch):
        ...     loss = lambda w: jnp.mean((jnp.tanh(batch @ w[0]) @ w[1]) ** 2)
        ...     return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights))]
        >>> workload = trace(step, [jnp.ones((8, 8))] * 2, jnp.ones((4, 8)), num_layers=2)
        >>> [layer.backward_flops for layer in workload.layers]
        [512.0, 1024.0]

        The first layer's backward pass is half the second's: it needs no gradient of its input.
    """
    return trace_programs(train_step, state, batch, num_layers, microbatch_size, name)[0]


def trace_programs(
    train_step: Callable[..., Any],
    state: Any,
    batch: Any,
    num_layers: int = 8,
    microbatch_size: int = 4,
    name: Optional[str] = None,
) -> Tuple[Workload, Tuple[LayerFunctions, ...]]:
    """Trace a step, and return its layers also as functions that can run.

    Raises:
        UnusableInputError: As `trace`.
    """
    _check_counts(num_layers, microbatch_size)
    step = _Step(train_step, state, batch, microbatch_size)
    layered = layer_operations(step.graph, step.batch_inputs, num_layers)
    workload = Workload(
        name=name or str(getattr(train_step, "__name__", "model")),
        microbatch_size=microbatch_size,
        dtype=_main_dtype(step.graph.operations),
        layers=tuple(_layers(step, layered)),
    )
    return workload, layer_functions(step.graph, layered, step.batch_inputs)


class _Step:
    """A traced step: its flat graph, and what its inputs are."""

    def __init__(self, train_step: Callable[..., Any], state: Any, batch: Any, microbatch_size: int) -> None:
        jax = _import_jax()
        shapes = jax.eval_shape(lambda tree: tree, state)
        samples = _resize(jax, jax.eval_shape(lambda tree: tree, batch), microbatch_size)
        jaxpr, returned = _make_jaxpr(jax, train_step, shapes, samples)
        self.graph = flatten(jaxpr)
        state_size = len(jax.tree_util.tree_leaves(shapes))
        self.state_inputs = self.graph.inputs[:state_size]
        self.batch_inputs = self.graph.inputs[state_size:]
        self.new_state = _find_state(jax, returned, shapes, self.graph.outputs)
        if not any(operation.phase == BACKWARD for operation in self.graph.operations):
            raise UnusableInputError(
                "The train step takes no gradient whose result it uses: it has no backward operations.",
                "call jax.grad or jax.value_and_grad in the train step itself (not inside lax.scan or while_loop), and "
                "return what the gradients change.",
            )

    def parameters(self) -> Set[int]:
        """The floating inputs that the forward pass reads and gradients change."""
        floating = {value for value in self.state_inputs if self.graph.values[value].floating}
        if self.new_state is None:
            return floating
        changed = _reached_by_backward(self.graph)
        return {old for old, new in zip(self.state_inputs, self.new_state) if old in floating and new in changed}


def _layers(step: _Step, layered: Layered) -> List[Layer]:
    values = step.graph.values
    parameters = sorted(value for value in step.parameters() if value in layered.homes)
    owned: List[float] = [0.0] * len(layered.forward)
    for value in parameters:
        owned[min(layered.homes[value])] += values[value].nbytes
    floating = sum(values[v].nbytes for v in step.state_inputs if values[v].floating)
    spare, total = floating - sum(owned), sum(owned)
    samples = set(step.batch_inputs)
    kept = [float(sum(values[v].nbytes for v in residuals)) for residuals in layered.residuals]
    return [
        Layer(
            name=str(index),
            forward_flops=_flops(layered.forward[index]),
            backward_flops=_flops(layered.backward[index]),
            parameter_bytes=owned[index],
            output_bytes=float(sum(values[v].nbytes for v in layered.crossing[index])),
            activation_bytes=kept[index],
            temporary_bytes=scratch_bytes(kept[index], [operation.equation for operation in layered.forward[index]]),
            batch_bytes=float(sum(values[v].nbytes for v in samples if index in layered.homes.get(v, ()))),
            optimizer_bytes=spare * owned[index] / total if total else spare / len(owned),
        )
        for index in range(len(owned))
    ]


def _flops(operations: Sequence[Operation]) -> float:
    return math.fsum(operation.flops for operation in operations)


def _main_dtype(operations: Sequence[Operation]) -> str:
    """The data type of most matrix-product FLOPs."""
    totals: Dict[str, float] = {}
    for operation in operations:
        for dtype, flops in operation.product_flops:
            totals[dtype] = totals.get(dtype, 0.0) + flops
    return max(totals, key=lambda dtype: totals[dtype])


def _reached_by_backward(graph: Graph) -> Set[int]:
    """Values that backward operations make, and all that is computed from them."""
    reached: Set[int] = set()
    for operation in graph.operations:
        if operation.phase == BACKWARD or reached.intersection(operation.inputs):
            reached.update(operation.outputs)
    return reached


def _check_counts(num_layers: int, microbatch_size: int) -> None:
    for name, value in (("num_layers", num_layers), ("microbatch_size", microbatch_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UnusableInputError(f"{name} is {value!r}, expected a whole number, at least 1.", f"set {name} to it.")


def _import_jax() -> Any:
    try:
        import jax
    except ImportError as error:
        raise UnusableInputError(f"Tracing needs JAX: {error}.", "pip install jax==0.4.30 jaxlib==0.4.30") from error
    return jax


def _resize(jax: Any, batch: Any, microbatch_size: int) -> Any:
    leaves = jax.tree_util.tree_leaves(batch)
    sizes = {leaf.shape[0] if leaf.shape else None for leaf in leaves}
    if not leaves or None in sizes or len(sizes) != 1:
        found = [tuple(leaf.shape) for leaf in leaves]
        raise UnusableInputError(
            f"The arrays of the batch have shapes {found}, expected one array or more with the same axis 0.",
            "give a batch whose arrays all hold the samples in axis 0; keep everything else in the state.",
        )

    def resize(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct((microbatch_size, *leaf.shape[1:]), leaf.dtype)

    return jax.tree_util.tree_map(resize, batch)


def _make_jaxpr(jax: Any, train_step: Callable[..., Any], state: Any, batch: Any) -> Tuple[Any, Any]:
    try:
        traced: Tuple[Any, Any] = jax.make_jaxpr(train_step, return_shape=True)(state, batch)
    except (TypeError, ValueError) as error:  # JAX's own errors (concretization, shapes) are of these kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnusableInputError(
            f"The train step cannot be traced: {reason}",
            "check that jax.make_jaxpr(train_step)(state, batch) works with a batch of microbatch_size samples.",
        ) from error
    return traced


def _find_state(jax: Any, returned: Any, state: Any, outputs: Sequence[int]) -> Optional[Tuple[int, ...]]:
    """The outputs that are the new state: the first part of what the step returns that has the state's structure."""
    structure = jax.tree_util.tree_structure(state)
    parts = [returned] if not isinstance(returned, (tuple, list)) else [returned, *returned]
    start = 0
    for part in parts:
        count = len(jax.tree_util.tree_leaves(part))
        if jax.tree_util.tree_structure(part) == structure:
            return tuple(outputs[start : start + count])
        start += count if part is not returned else 0
    return None
