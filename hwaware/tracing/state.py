"""Count what each layer holds of a program's state: parameters, gradients, optimizer state, new state."""

from __future__ import annotations

from typing import Dict, Hashable, List, NamedTuple, Sequence, Set, Tuple

from hwaware.workload import Shared

# Smaller values, such as the number of the step, count once in every layer: they are not worth an entry in the file.
LEAST_SHARED_BYTES = 1024

Sizes = Dict[Hashable, float]


class LayerState(NamedTuple):
    """Hold the sizes of one layer's values [bytes]; the same key in two layers is the same value.

    Attributes:
        parameters: The values that its passes read, with a gradient or without one.
        gradients: Accumulators that its passes write.
        optimizer: The values that its update reads beside those.
        update: The values beside these during the update: gradients of other layers, and new values that take over no
            old memory.
    """

    parameters: Sizes
    gradients: Sizes
    optimizer: Sizes
    update: Sizes


def total_bytes(sizes: Sizes) -> float:
    """Return the bytes of all values together."""
    return sum(sizes.values(), 0.0)


def settled(states: Sequence[LayerState]) -> List[LayerState]:
    """Return the same states, but count a parameter of one layer as a parameter in every layer that holds it.

    Example:
        >>> layers = [LayerState({"w": 8.0}, {}, {}, {}), LayerState({}, {}, {"w": 8.0, "m": 4.0}, {})]
        >>> [(layer.parameters, layer.optimizer) for layer in settled(layers)]
        [({'w': 8.0}, {}), ({'w': 8.0}, {'m': 4.0})]
    """
    parameters = {value for state in states for value in state.parameters}
    return [
        state._replace(
            parameters={**state.parameters, **{v: size for v, size in state.optimizer.items() if v in parameters}},
            optimizer={v: size for v, size in state.optimizer.items() if v not in parameters},
        )
        for state in states
    ]


def shared_bytes(states: Sequence[LayerState]) -> Tuple[Shared, ...]:
    """Return the bytes that several layers hold in common, by these layers.

    If a stage has both layers, it already holds a gradient of one that the other's update reads.

    Example:
        >>> tied = [LayerState({"w": 4096.0}, {f"g{k}": 4096.0}, {"m": 4096.0}, {f"g{1 - k}": 4096.0}) for k in (0, 1)]
        >>> shared_bytes(tied)
        (Shared(layers=(0, 1), parameter_bytes=4096.0, optimizer_bytes=4096.0, update_bytes=8192.0),)
    """
    sizes: Sizes = {}
    owners: Tuple[Dict[Hashable, Set[int]], ...] = ({}, {}, {})
    for index, state in enumerate(states):
        for holders, held in zip(owners, (state.parameters, state.optimizer, state.update)):
            sizes.update(held)
            for value in held:
                holders.setdefault(value, set()).add(index)
    for index, state in enumerate(states):
        for value in state.gradients:
            if value in owners[2]:
                owners[2][value].add(index)
    found: Dict[Tuple[int, ...], List[float]] = {}
    for kind, holders in enumerate(owners):
        for value, layers in holders.items():
            if len(layers) > 1 and sizes[value] >= LEAST_SHARED_BYTES:
                found.setdefault(tuple(sorted(layers)), [0.0, 0.0, 0.0])[kind] += sizes[value]
    return tuple(
        Shared(layers=layers, parameter_bytes=parameters, optimizer_bytes=optimizer, update_bytes=update)
        for layers, (parameters, optimizer, update) in sorted(found.items())
    )
