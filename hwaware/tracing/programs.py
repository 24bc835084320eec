"""Turn the layers of a traced train step into functions that can be run and timed."""

from __future__ import annotations

import collections
from typing import Any, Callable, Counter, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from hwaware.compat.jaxprs import is_literal
from hwaware.tracing.graph import OTHER, Graph, Operation
from hwaware.tracing.layering import Layered


class Function(NamedTuple):
    """Hold a part of the step as a function.

    Attributes:
        run: A function from arrays to the arrays that other parts need.
        arguments: Anything with the shape and dtype of each array that it takes; the sums of gradients come last.
        takes, gives: The numbers, in the step's graph, of its arguments without the sums, and of its results.
        samples: The values of the batch among `takes`.
        sums: (place of a sum of gradients among the arguments, place of the sum with one more among the results).
    """

    run: Callable[..., List[Any]]
    arguments: Tuple[Any, ...]
    takes: Tuple[int, ...]
    gives: Tuple[int, ...]
    samples: Tuple[int, ...] = ()
    sums: Tuple[Tuple[int, int], ...] = ()


class LayerFunctions(NamedTuple):
    """Hold the forward and the backward pass of one layer; None where it computes nothing."""

    forward: Optional[Function]
    backward: Optional[Function]


def layer_functions(graph: Graph, layered: Layered, batch: Sequence[int]) -> Tuple[LayerFunctions, ...]:
    """Return the layers of a step as functions.

    Each layer reads values of other layers, parameters and the batch, and returns values that others read. If the
    optimizer reads a value of the backward pass, the function adds it to a sum over microbatches.

    Args:
        graph: The graph of the step.
        layered: The graph's operations, layer by layer.
        batch: The values of the graph that are the batch.
    """
    readers = _readers(graph.operations)
    wanted = set(graph.outputs)
    summed = {value for operation in graph.operations if operation.phase == OTHER for value in operation.inputs}

    def function(operations: Sequence[Operation], added_up: Set[int]) -> Optional[Function]:
        made = _function(operations, readers, wanted, added_up)
        return made and made._replace(samples=tuple(value for value in made.takes if value in batch))

    return tuple(
        LayerFunctions(function(forward, set()), function(backward, summed))
        for forward, backward in zip(layered.forward, layered.backward)
    )


def _readers(operations: Sequence[Operation]) -> Counter[int]:
    """Return the number of operations that read each value."""
    return collections.Counter(value for operation in operations for value in set(operation.inputs))


def _function(
    operations: Sequence[Operation], readers: Counter[int], wanted: Set[int], summed: Set[int]
) -> Optional[Function]:
    if not operations:
        return None
    inside = _readers(operations)
    kinds: Dict[int, Any] = {}
    made: Dict[int, Any] = {}
    for operation in operations:
        atoms = [atom for atom in operation.equation.invars if not is_literal(atom)]
        kinds.update(zip(operation.inputs, (atom.aval for atom in atoms)))
        made.update(zip(operation.outputs, (variable.aval for variable in operation.equation.outvars)))
    takes = [value for value in kinds if value not in made]
    gives = [value for value in made if value in wanted or readers[value] > inside[value]]
    sums = [place for place, value in enumerate(gives) if value in summed]

    def run(*arrays: Any) -> List[Any]:
        values = dict(zip(takes, arrays))
        for operation in operations:
            values.update(zip(operation.outputs, _results(operation, values)))
        results = [values[value] for value in gives]
        for place, array in zip(sums, arrays[len(takes) :]):
            results[place] = results[place] + array
        return results

    return Function(
        run,
        (*(kinds[value] for value in takes), *(made[gives[place]] for place in sums)),
        tuple(takes),
        tuple(gives),
        sums=tuple((len(takes) + index, place) for index, place in enumerate(sums)),
    )


def _results(operation: Operation, values: Dict[int, Any]) -> Sequence[Any]:
    from hwaware.compat.programs import results_of

    equation, numbers = operation.equation, iter(operation.inputs)
    arrays = [atom.val if is_literal(atom) else values[next(numbers)] for atom in equation.invars]
    return results_of(equation.primitive, equation.params, arrays)
