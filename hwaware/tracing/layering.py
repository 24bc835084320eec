"""Give each operation of a train step to a layer.

This module cuts the forward pass in program order; the backward pass follows by data flow. A backward operation
transposes or repeats some forward operation. So it reads values that its own layer made or read. Its layer is the
highest that all these values share, at or below the layer that its gradient comes from.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Collection, Dict, FrozenSet, Iterable, List, Sequence, Set, Tuple

from hwaware.errors import UnusableInputError
from hwaware.tracing.cutting import cut_chain
from hwaware.tracing.graph import BACKWARD, FORWARD, Graph, Operation


@dataclasses.dataclass(frozen=True)
class Layered:
    """Hold the operations and crossing values of each layer.

    Attributes:
        forward, backward: Operations, layer by layer.
        crossing: For each layer i, the values made in layer i or before that later forward layers read.
        residuals: Forward values that depend on the batch and that the layer's backward operations read.
        homes: Forward value or input -> layers that make or read it in the forward pass.
        readers: Value without a maker -> layers that compute with it and the batch, even if cast or transposed before.
    """

    forward: Tuple[Tuple[Operation, ...], ...]
    backward: Tuple[Tuple[Operation, ...], ...]
    crossing: Tuple[FrozenSet[int], ...]
    residuals: Tuple[FrozenSet[int], ...]
    homes: Dict[int, FrozenSet[int]]
    readers: Dict[int, FrozenSet[int]]


def layer_operations(graph: Graph, batch_inputs: Collection[int], num_layers: int) -> Layered:
    """Cut the forward pass into `num_layers` layers, and give each backward operation to a layer.

    Raises:
        UnusableInputError: The forward pass has fewer matrix products and convolutions than layers.
    """
    forward = [operation for operation in graph.operations if operation.phase == FORWARD]
    varying = depends_on(graph.operations, batch_inputs)
    forward = _sink(forward, varying)
    pieces = _cut_forward(forward, graph, varying, num_layers)
    homes = _homes(pieces)
    backward = _assign_backward([op for op in graph.operations if op.phase == BACKWARD], homes, num_layers)
    made_forward = {value for operation in forward for value in operation.outputs} & varying
    return Layered(
        forward=tuple(tuple(piece) for piece in pieces),
        backward=tuple(tuple(piece) for piece in backward),
        crossing=tuple(_crossing(pieces, cut, varying) for cut in range(1, num_layers + 1)),
        residuals=tuple(frozenset(_reads(piece) & made_forward) for piece in backward),
        homes={value: frozenset(layers) for value, layers in homes.items()},
        readers={value: frozenset(layers) for value, layers in _readers(pieces, backward, varying).items()},
    )


def _reads(operations: Iterable[Operation]) -> Set[int]:
    return {value for operation in operations for value in operation.inputs}


def depends_on(operations: Iterable[Operation], sources: Collection[int]) -> Set[int]:
    """Return the values computed from `sources`, themselves excluded."""
    tainted = set(sources)
    for operation in operations:
        if tainted.intersection(operation.inputs):
            tainted.update(operation.outputs)
    return tainted.difference(sources)


def _sink(forward: Sequence[Operation], varying: Set[int]) -> List[Operation]:
    """Move cheap operations on parameters and constants alone to just before their first reader.

    Casts of all parameters at the top of a step, and masks, would otherwise all belong to the first layer.
    """
    waiting: Dict[int, int] = {}  # value -> place of its maker in `forward`
    order: List[Operation] = []
    for place, operation in enumerate(forward):
        if not operation.flops and not varying.intersection(operation.outputs):
            waiting.update(dict.fromkeys(operation.outputs, place))
        else:
            order.extend(forward[index] for index in _take(operation, forward, waiting))
            order.append(operation)
    order.extend(forward[index] for index in sorted(set(waiting.values())))  # read by the backward pass only
    return order


def _take(reader: Operation, forward: Sequence[Operation], waiting: Dict[int, int]) -> List[int]:
    """Remove from `waiting` all that `reader` needs, directly or not; return its places in program order."""
    places: List[int] = []
    readers = [reader]
    while readers:
        for value in readers.pop().inputs:
            if value in waiting:
                maker = forward[waiting[value]]
                places.append(waiting[value])
                for output in maker.outputs:
                    del waiting[output]
                readers.append(maker)
    return sorted(places)


def _cut_forward(forward: List[Operation], graph: Graph, varying: Set[int], num_layers: int) -> List[List[Operation]]:
    heavy = [index for index, operation in enumerate(forward) if operation.flops]
    if len(heavy) < num_layers:
        raise UnusableInputError(
            f"The number of layers is {num_layers}, but the forward pass has only {len(heavy)} matrix products and "
            "convolutions to cut between (a scan counts as one).",
            f"ask for at most {len(heavy)} layers, or unroll the scan over the model's blocks.",
        )
    sizes = _crossing_sizes(forward, graph, varying)
    # Between two heavy operations all cuts balance alike, so take the one that the fewest bytes cross.
    gaps = [_best_gap(forward, sizes, varying, a + 1, b) for a, b in zip(heavy, heavy[1:])]
    starts = cut_chain([forward[i].flops for i in heavy], [sizes[gap] for gap in gaps], num_layers)
    edges = [0] + [gaps[start - 1] for start in starts[1:]] + [len(forward)]
    return [forward[a:b] for a, b in zip(edges, edges[1:])]


def _best_gap(forward: Sequence[Operation], sizes: Sequence[float], varying: Set[int], first: int, last: int) -> int:
    """Return the last of the lightest cuts, so that activations stay with their product."""
    cut = min(range(first, last + 1), key=lambda place: (sizes[place], -place))
    while cut > first and not varying.intersection(forward[cut - 1].outputs):
        cut -= 1
    return cut


def _crossing_sizes(forward: Sequence[Operation], graph: Graph, varying: Set[int]) -> List[float]:
    """Return the bytes that cross the cut before operation i, for each i."""
    last_read = {value: index for index, operation in enumerate(forward) for value in operation.inputs}
    change = [0.0] * (len(forward) + 2)
    for index, operation in enumerate(forward):
        for value in operation.outputs:
            if value in varying and last_read.get(value, -1) > index:
                change[index + 1] += graph.values[value].nbytes
                change[last_read[value] + 1] -= graph.values[value].nbytes
    return list(itertools.accumulate(change[: len(forward) + 1]))


def _crossing(pieces: Sequence[Sequence[Operation]], cut: int, varying: Set[int]) -> FrozenSet[int]:
    made = {value for piece in pieces[:cut] for operation in piece for value in operation.outputs}
    read = {value for piece in pieces[cut:] for value in _reads(piece)}
    return frozenset(made & read & varying)


def _homes(pieces: Sequence[Sequence[Operation]]) -> Dict[int, Set[int]]:
    homes: Dict[int, Set[int]] = {}
    for layer, piece in enumerate(pieces):
        for operation in piece:
            for value in (*operation.inputs, *operation.outputs):
                homes.setdefault(value, set()).add(layer)
    return homes


def _readers(
    forward: Sequence[Sequence[Operation]], backward: Sequence[Sequence[Operation]], varying: Set[int]
) -> Dict[int, Set[int]]:
    """Return `Layered.readers`: the forward pass decides; the backward pass decides for values that only it reads."""
    behind: Dict[int, Set[int]] = {}  # value made of parameters and constants alone -> these
    readers: Dict[int, Set[int]] = {}
    for layer, piece in enumerate(forward):
        for operation in piece:
            found = {root for value in operation.inputs if value not in varying for root in behind.get(value, {value})}
            if varying.intersection(operation.outputs):
                for root in found:
                    readers.setdefault(root, set()).add(layer)
            else:
                behind.update(dict.fromkeys(operation.outputs, found))
    late: Dict[int, Set[int]] = {}
    for layer, piece in enumerate(backward):
        for value in _reads(piece):
            for root in behind.get(value, {value}):
                late.setdefault(root, set()).add(layer)
    return {**late, **readers}


def _assign_backward(
    backward: Sequence[Operation], homes: Dict[int, Set[int]], num_layers: int
) -> List[List[Operation]]:
    """Give each backward operation to a layer, walking in program order from the loss down.

    Values that the backward pass recomputes (remat) get homes as forward values have. Values that carry gradients get
    the layer that made them. `lowest` is the lowest layer reached so far: recomputation of the next block starts there.
    """
    homes = {value: set(layers) for value, layers in homes.items()}
    reached: Dict[int, int] = {}  # gradient value -> layer that made it
    pieces: List[List[Operation]] = [[] for _ in range(num_layers)]
    lowest = num_layers - 1
    for operation in backward:
        gradients = [reached[value] for value in operation.inputs if value in reached]
        known = [homes[value] for value in operation.inputs if value in homes]
        ceiling = min(gradients) if gradients else lowest
        layer = _nearest(known, ceiling) if known else ceiling
        pieces[layer].append(operation)
        if operation.inside_remat and known and not gradients:
            for value in (*operation.inputs, *operation.outputs):
                homes.setdefault(value, set()).add(layer)
        else:
            reached.update(dict.fromkeys(operation.outputs, layer))
            lowest = min(lowest, layer)
    return pieces


def _nearest(known: Sequence[Set[int]], ceiling: int) -> int:
    """Return the highest layer up to `ceiling` that all `known` sets share (that any has, if none)."""
    layers = set.intersection(*known) or set.union(*known)
    below = [layer for layer in layers if layer <= ceiling]
    return max(below) if below else min(layers)
