"""Make the programs of a model's layers as a step runs them, on a microbatch or on one replica's samples."""

from __future__ import annotations

import functools
import hashlib
from typing import Any, Dict, List, Mapping, Optional, Sequence

import jax

from hwaware.calibration.programs import LayerPrograms, LayerSource
from hwaware.calibration.timing import Repeated
from hwaware.compat.programs import jaxpr_as_fun
from hwaware.compiler import splitting
from hwaware.compiler.fewer_samples import with_part_of_samples
from hwaware.compiler.programs import lower, lower_function
from hwaware.compiler.sharding import StageFunction, batch_dims
from hwaware.tracing.digest import jaxpr_digest
from hwaware.tracing.from_alpa import samples_of
from hwaware.tracing.programs import Function, LayerFunctions

# The most shares of the samples that hwaware times beside the whole.
MOST_PARTS = 2


def function_programs(functions: Sequence[LayerFunctions], microbatch_size: int) -> List[LayerPrograms]:
    """Return the programs of traced layers, for all samples of a microbatch and for replicas' shares."""
    passes = [layer.forward for layer in functions] + [layer.backward for layer in reversed(functions)]
    made = [None if function is None else _Traced(function) for function in passes]
    known = [traced for traced in made if traced is not None]
    samples = {value for function in passes if function is not None for value in function.samples}
    dims = batch_dims([traced.named() for traced in known], samples)

    def programs(forward: Optional[_Traced], backward: Optional[_Traced]) -> LayerPrograms:
        made_whole = [traced.program() if traced else None for traced in (forward, backward)]
        whole = LayerPrograms(made_whole[0], made_whole[1], None)
        for replicas in replica_counts(microbatch_size):
            parts = [traced.part(dims, replicas) if traced else None for traced in (forward, backward)]
            whole = whole.with_part(replicas, parts[0], parts[1])
        return whole

    return [programs(*both) for both in zip(made, reversed(made[len(functions) :]))]


class _Traced:
    """Hold one pass of a traced layer."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._closed_jaxpr = jax.make_jaxpr(function.run)(*function.arguments)

    def named(self) -> StageFunction:
        """Return the computation, with the numbers of the step's graph as names."""
        takes = [*self._function.takes, *(("sum", place) for place, _ in self._function.sums)]
        return StageFunction(self._closed_jaxpr.jaxpr, takes, self._function.gives, "")

    def program(self, closed_jaxpr: Any = None) -> Repeated:
        """Return the program of the pass, or of another jaxpr with the same arguments and results."""
        closed_jaxpr, sums = closed_jaxpr or self._closed_jaxpr, self._function.sums
        return Repeated(
            lower_function(jaxpr_as_fun(closed_jaxpr), closed_jaxpr.in_avals, "layer", None, dict(sums)), sums
        )

    def part(self, dims: Mapping[Any, int], replicas: int) -> Optional[Repeated]:
        """Return the program on one replica's samples; None if hwaware cannot make it smaller."""
        places = [dims.get(name) for name in self.named().invars]
        smaller = with_part_of_samples(self._closed_jaxpr, places, replicas)
        return None if smaller is None else self.program(smaller)


def replica_counts(microbatch_size: int) -> List[int]:
    """Return the fewest replicas that share a microbatch equally, and the fewest that are at least twice as many.

    Example:
        >>> [replica_counts(size) for size in (1, 2, 6, 9, 32)]
        [[], [2], [2, 6], [3, 9], [2, 4]]
    """
    found: List[int] = []
    for count in range(2, microbatch_size + 1):
        if len(found) < MOST_PARTS and microbatch_size % count == 0 and count >= 2 * (found or [1])[-1]:
            found.append(count)
    return found


def layer_sources(arguments: Mapping[str, Any], microbatch_size: int) -> List[LayerSource]:
    """Return the source of each layer's programs. As in a step, the programs overwrite accumulators and states.

    Layers that are alike have one source, so hwaware lowers them once.

    Args:
        arguments: The arguments of Alpa's stage construction.
        microbatch_size: The number of samples per microbatch.
    """
    layers = arguments["layers"]
    inference = arguments["pipeline_schedule"] == "inference"
    count = len(layers) if inference else len(layers) // 2
    updates = [None] * count if inference else arguments["jax_apply_layers"]
    sums, (states, returned) = arguments["accumulator_mapping"], arguments["apply_grad_global_info"]

    @functools.lru_cache(maxsize=None)
    def dims() -> Dict[Any, int]:
        functions = [
            StageFunction(layer.closed_jaxpr().jaxpr, list(layer.invars), list(layer.outvars), "") for layer in layers
        ]
        return batch_dims(functions, samples_of(layers[:count], layers[count:], updates, microbatch_size, returned))

    def source(key: str, forward: Any, backward: Any, update: Any) -> LayerSource:
        @functools.lru_cache(maxsize=None)
        def make(with_parts: bool) -> LayerPrograms:
            if not with_parts:
                passes = _repeated(forward, {}), backward and _repeated(backward, sums)
                return LayerPrograms(*passes, _update(update, states))
            whole = make(False)
            for replicas in replica_counts(microbatch_size):
                parts = (_part(forward, {}, dims(), replicas), backward and _part(backward, sums, dims(), replicas))
                whole = whole.with_part(replicas, *parts)
            return whole

        return LayerSource(key, make)

    found: Dict[str, LayerSource] = {}
    keys = []
    for index in range(count):
        passes = (layers[index], None if inference else layers[-1 - index], updates[index])
        taken_over: Sequence[Mapping[Any, Any]] = ({}, sums, states)
        text = "\n".join(_text(layer, pairs) for layer, pairs in zip(passes, taken_over) if layer is not None)
        keys.append(hashlib.sha256(f"{microbatch_size}\n{text}".encode()).hexdigest())
        found.setdefault(keys[-1], source(keys[-1], *passes))
    return [found[key] for key in keys]


def _text(layer: Any, takes_over: Mapping[Any, Any]) -> str:
    """Return text that says what a layer computes. Like layers share it, and so do later starts of the program."""
    return f"{sorted(_pairs(layer, takes_over).items())} {jaxpr_digest(layer.closed_jaxpr().jaxpr)}"


def _part(layer: Any, takes_over: Mapping[Any, Any], dims: Mapping[Any, int], replicas: int) -> Optional[Repeated]:
    """Return a layer's program on one replica's samples; None if hwaware cannot make it smaller."""
    smaller = with_part_of_samples(layer.closed_jaxpr(), [dims.get(variable) for variable in layer.invars], replicas)
    return None if smaller is None else _repeated(layer, takes_over, smaller)


def _update(layer: Any, states: Mapping[Any, Any]) -> Optional[Repeated]:
    """Return the update of one layer's parameters; None if the layer has none, or if it waits for other meshes."""
    if layer is None or splitting.has_reductions(layer.closed_jaxpr()):
        return None
    return _repeated(layer, states, microbatched=False)


def _repeated(
    layer: Any, takes_over: Mapping[Any, Any], closed_jaxpr: Any = None, microbatched: bool = True
) -> Repeated:
    """Return the program of a layer, or of another jaxpr with the same arguments and results."""
    pairs = _pairs(layer, takes_over)
    # All layers have one name. So layers that are alike have the same text, and hwaware times them once.
    program = lower(closed_jaxpr or layer.closed_jaxpr(), "layer", pairs, microbatched=microbatched)
    return Repeated(program, tuple(pairs.items()))


def _pairs(layer: Any, takes_over: Mapping[Any, Any]) -> Dict[int, int]:
    """Return input -> output that takes over its memory, by their places."""
    places = {variable: place for place, variable in enumerate(layer.outvars)}
    return {
        place: places[takes_over[variable]]
        for place, variable in enumerate(layer.invars)
        if variable in takes_over and takes_over[variable] in places
    }
