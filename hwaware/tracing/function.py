"""Turn a plain JAX train step into a Workload. JAX traces the step with shapes alone, and computes nothing."""

from __future__ import annotations

import contextlib
import math
from numbers import Integral
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

from hwaware.compat.packages import INSTALL_JAX
from hwaware.errors import UnusableInputError
from hwaware.formatting import counted
from hwaware.tracing.flops import main_dtype
from hwaware.tracing.graph import BACKWARD, FORWARD, OTHER, Graph, Operation, flatten
from hwaware.tracing.layering import Layered, depends_on, layer_operations
from hwaware.tracing.programs import LayerFunctions, layer_functions
from hwaware.tracing.scratch import scratch_bytes
from hwaware.tracing.state import LEAST_SHARED_BYTES, LayerState, settled, shared_bytes, total_bytes
from hwaware.workload import Layer, Workload

# A message names so many different shapes.
_MOST_SHAPES = 5


def trace(
    train_step: Callable[..., Any], state: Any, batch: Any, num_layers: int = 8, microbatch_size: int = 4,
    name: Optional[str] = None, donate: bool = True,
) -> Workload:  # fmt: skip
    """Describe the work of one microbatch of a train step as a chain of layers: FLOPs, stored bytes, sent bytes.

    Each layer is a range of the program, with about equal forward FLOPs. hwaware cuts where few bytes pass. It counts
    the FLOPs of matrix products and convolutions, without those of the optimizer, which runs once per step.

    Args:
        train_step: `train_step(state, batch)`, which calls `jax.grad` or `jax.value_and_grad` (not inside a scan) and
            returns the new state, alone or in a tuple. It may be jitted, and may use `jax.checkpoint`.
        state: Parameters and optimizer state as a pytree of arrays or shapes. A leaf that the forward pass reads is a
            parameter of all layers that read it. It has a gradient if its new value depends on gradients, else it is
            frozen. All other leaves are optimizer state, and belong to the layers of the parameters that they change.
        batch: Pytree of arrays or shapes with the samples in axis 0.
        num_layers: Layers to cut the model into.
        microbatch_size: Samples per microbatch. The batch may have another size.
        name: Name of the workload; by default the function's name.
        donate: True if the new state takes over the memory of the old one. Otherwise both lie beside each other.

    Raises:
        UnusableInputError: The step cannot be traced, takes no gradient, or has too few matrix products.

    Example:
        >>> from hwaware import trace
        >>> import jax, jax.numpy as jnp
        >>> def step(weights, batch):
        ...     loss = lambda w: jnp.mean((jnp.tanh(batch @ w[0]) @ w[1]) ** 2)
        ...     return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights))]
        >>> workload = trace(step, [jnp.ones((8, 8))] * 2, jnp.ones((4, 8)), num_layers=2)
        >>> [layer.backward_flops for layer in workload.layers]
        [512.0, 1024.0]

        The first layer's backward pass is half the second's: it needs no gradient of its input.
    """
    return trace_programs(train_step, state, batch, num_layers, microbatch_size, name, donate)[0]


def trace_programs(
    train_step: Callable[..., Any], state: Any, batch: Any, num_layers: int = 8, microbatch_size: int = 4,
    name: Optional[str] = None, donate: bool = True,
) -> Tuple[Workload, Tuple[LayerFunctions, ...]]:  # fmt: skip
    """Trace a step, and return its layers also as functions that can run.

    Raises:
        UnusableInputError: As `trace`.
    """
    num_layers = _count("number of layers", num_layers)
    microbatch_size = _count("number of samples per microbatch", microbatch_size)
    step = _Step(train_step, state, batch, microbatch_size)
    layered = layer_operations(step.graph, step.batch_inputs, num_layers)
    states = settled(_states(step, layered, donate))
    workload = Workload(
        name=name or str(getattr(train_step, "__name__", "model")),
        microbatch_size=microbatch_size,
        dtype=main_dtype(product for each in step.graph.operations for product in each.product_flops),
        layers=tuple(_layers(step, layered, states)),
        shared=shared_bytes(states),
    )
    return workload, layer_functions(step.graph, layered, step.batch_inputs)


class _Step:
    """Hold a traced step: its flat graph, and which inputs are its state and its batch."""

    def __init__(self, train_step: Callable[..., Any], state: Any, batch: Any, microbatch_size: int) -> None:
        jax = _import_jax()
        with _says_why():
            shapes = jax.eval_shape(lambda tree: tree, state)
            samples = _resize(jax, jax.eval_shape(lambda tree: tree, batch), microbatch_size)
            jaxpr, returned = jax.make_jaxpr(train_step, return_shape=True)(shapes, samples)
        self.graph: Graph = flatten(jaxpr)
        state_size = len(jax.tree_util.tree_leaves(shapes))
        self.state_inputs = self.graph.inputs[:state_size]
        self.batch_inputs: Sequence[int] = self.graph.inputs[state_size:]
        made = self._made(BACKWARD)
        self._changed = made | depends_on(self.graph.operations, made)
        # Beside the new state, a step may return the old one, or statistics of the same form.
        found = _like_the_state(jax, returned, shapes, self.graph.outputs)
        self.new_state = max(found, key=lambda values: len(self._changed.intersection(values)), default=None)
        if not made:
            raise UnusableInputError(
                "The train step takes no gradient whose result it uses: it has no backward operations.",
                "call jax.grad or jax.value_and_grad in the train step itself (not inside lax.scan or while_loop), and "
                "return what the gradients change.",
            )

    def trained(self) -> Set[int]:
        """Return the floating inputs that gradients change; all floating inputs if the step returns no state."""
        floating = {value for value in self.state_inputs if self.graph.values[value].floating}
        if self.new_state is None:
            return floating
        return {old for old, new in zip(self.state_inputs, self.new_state) if old in floating and new in self._changed}

    def summed(self) -> Set[int]:
        """Return inputs whose new values Alpa adds up over microbatches, such as batch statistics; no gradients."""
        made = self._made(FORWARD)
        return {old for old, new in zip(self.state_inputs, self.new_state or ()) if new in made}

    def _made(self, phase: str) -> Set[int]:
        return {value for each in self.graph.operations if each.phase == phase for value in each.outputs}


def _states(step: _Step, layered: Layered, donate: bool) -> List[LayerState]:
    """Return each layer's share of the state, and of the arrays that the step closes over.

    Without donation, Alpa updates a parameter that several layers share on the last of their stages alone.
    """
    nbytes = {number: float(value.nbytes) for number, value in enumerate(step.graph.values)}
    count, trained, summed = len(layered.forward), step.trained(), step.summed()
    states = [LayerState({}, {}, {}, {}) for _ in range(count)]
    read = {
        value: sorted(layered.readers.get(value) or layered.homes.get(value) or ())
        for value in (*step.state_inputs, *step.graph.constants)
    }
    for value, readers in read.items():
        for index in readers:
            states[index].parameters[value] = nbytes[value]
            if value in trained or value in summed:
                states[index].gradients[value, index] = nbytes[value]
        if value not in trained or not readers:
            continue
        updating = readers if donate else readers[-1:]
        for index in updating:
            others = {(value, other): nbytes[value] for other in readers if other != index}
            states[index].update.update(others)
            if not donate:
                states[index].update[value] = nbytes[value]
    owners = _owners(step, {value for value in trained if read[value]})
    for value in step.state_inputs:
        if read[value]:
            continue
        homes = sorted({home for one in owners[value] for home in (read[one] if donate else read[one][-1:])})
        for index, size in _spread(nbytes[value], homes, len(owners[value]), states).items():
            # Parts of a value are no copies of each other.
            key = value if size == nbytes[value] else (value, index, "part")
            states[index].optimizer[key] = size
            if not donate:
                states[index].update[key] = size
    return states


def _owners(step: _Step, trained: Set[int]) -> Dict[int, Set[int]]:
    """Return input -> the trained parameters whose new values depend on it; else those that its own new value reads."""
    inputs, new_state = step.state_inputs, step.new_state
    owners: Dict[int, Set[int]] = {value: set() for value in inputs}
    if new_state is None:
        return owners
    reached = {value: 1 << place for place, value in enumerate(inputs)}  # value -> the inputs behind it, as bits
    for operation in step.graph.operations:
        if operation.phase == OTHER:
            behind = 0
            for value in operation.inputs:
                behind |= reached.get(value, 0)
            for value in operation.outputs:
                reached[value] = behind
    for place, new in enumerate(new_state):
        if inputs[place] in trained:
            for value in _bits(reached.get(new, 0), inputs):
                owners[value].add(inputs[place])
    for place, new in enumerate(new_state):
        if not owners[inputs[place]]:  # such as averages of weights, which change no parameter
            owners[inputs[place]].update(value for value in _bits(reached.get(new, 0), inputs) if value in trained)
    return owners


def _bits(mask: int, inputs: Sequence[int]) -> Iterable[int]:
    return [value for place, value in enumerate(inputs) if mask >> place & 1]


def _spread(nbytes: float, homes: Sequence[int], owners: int, states: Sequence[LayerState]) -> Dict[int, float]:
    """Return layer -> the bytes that it holds of a value, which belongs to parameters at home in `homes`.

    All these layers hold the whole value if it is small (the step's number), or belongs to one parameter.
    Other values are spread by the size of the gradients, such as the joined accumulators of `optax.MultiSteps`. So are
    values that belong to no known parameter.
    """
    if homes and (owners == 1 or nbytes < LEAST_SHARED_BYTES):
        return dict.fromkeys(homes, nbytes)
    places = homes or range(len(states))
    weights = [total_bytes(states[index].gradients) for index in places]
    total = sum(weights)
    if not total:
        return {index: nbytes / len(places) for index in places}
    return {index: nbytes * weight / total for index, weight in zip(places, weights)}


def _layers(step: _Step, layered: Layered, states: Sequence[LayerState]) -> List[Layer]:
    values, samples = step.graph.values, set(step.batch_inputs)
    kept = [float(sum(values[v].nbytes for v in residuals)) for residuals in layered.residuals]
    return [
        Layer(
            name=str(index),
            forward_flops=_flops(layered.forward[index]),
            backward_flops=_flops(layered.backward[index]),
            parameter_bytes=total_bytes(state.parameters),
            output_bytes=float(sum(values[v].nbytes for v in layered.crossing[index])),
            activation_bytes=kept[index],
            temporary_bytes=scratch_bytes(kept[index], [operation.equation for operation in layered.forward[index]]),
            batch_bytes=float(sum(values[v].nbytes for v in samples if index in layered.homes.get(v, ()))),
            gradient_bytes=total_bytes(state.gradients),
            optimizer_bytes=total_bytes(state.optimizer),
            update_bytes=total_bytes(state.update) or None,
        )
        for index, state in enumerate(states)
    ]


def _flops(operations: Sequence[Operation]) -> float:
    return math.fsum(operation.flops for operation in operations)


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise UnusableInputError(f"The {name} is {value!r}, expected a whole number above 0.", "correct it.")
    return int(value)


def _import_jax() -> Any:
    try:
        import jax
    except ImportError as error:
        raise UnusableInputError(f"Tracing needs JAX: {error}.", INSTALL_JAX) from error
    return jax


def _resize(jax: Any, batch: Any, microbatch_size: int) -> Any:
    leaves = jax.tree_util.tree_leaves(batch)
    sizes = {leaf.shape[0] if leaf.shape else None for leaf in leaves}
    if not leaves or None in sizes or len(sizes) != 1:
        shapes = list(dict.fromkeys(str(tuple(leaf.shape)) for leaf in leaves))
        found = ", ".join([*shapes[:_MOST_SHAPES], *["..."][: len(shapes) - _MOST_SHAPES]])
        raise UnusableInputError(
            f"The arrays of the batch ({counted(len(leaves), 'array')}) have shapes [{found}], expected one array or "
            "more with the same axis 0.",
            "give a batch whose arrays all hold the samples in axis 0, and arrays in place of lists of numbers. Keep "
            "everything else in the state.",
        )
    return jax.tree_util.tree_map(
        lambda leaf: jax.ShapeDtypeStruct((microbatch_size, *leaf.shape[1:]), leaf.dtype), batch
    )


@contextlib.contextmanager
def _says_why() -> Iterator[None]:
    """Turn an error of JAX (types, shapes), or of the step itself, into one of input."""
    try:
        yield
    except UnusableInputError:
        raise
    except Exception as error:  # a user's step may raise anything
        reason = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
        raise UnusableInputError(
            f"The train step cannot be traced: {reason}",
            "check that jax.make_jaxpr(train_step)(state, batch) works with a batch of microbatch_size samples.",
        ) from error


def _like_the_state(jax: Any, returned: Any, state: Any, outputs: Sequence[int]) -> Iterator[Tuple[int, ...]]:
    """Yield the values of each result with the state's structure and shapes."""

    def form(tree: Any) -> Tuple[Any, List[Any]]:
        leaves, structure = jax.tree_util.tree_flatten(tree)
        return structure, [leaf.shape for leaf in leaves]

    parts = [returned] if not isinstance(returned, (tuple, list)) else [returned, *returned]
    start = 0
    for part in parts:
        count = len(jax.tree_util.tree_leaves(part))
        if form(part) == form(state):
            yield tuple(outputs[start : start + count])
        start += count if part is not returned else 0
