"""The layers of a traced train step as functions that can be run, to be timed."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from hwaware.tracing.graph import Graph, Operation
from hwaware.tracing.layering import Layered


class Function(NamedTuple):
    """A part of the step.

    Attributes:
        run: From arrays to the arrays that other parts need.
        arguments: Anything with the shape and dtype of each array that it takes.
        takes, gives: The numbers of these values in the step's graph.
    """

    run: Callable[..., List[Any]]
    arguments: Tuple[Any, ...]
    takes: Tuple[int, ...]
    gives: Tuple[int, ...]


class LayerFunctions(NamedTuple):
    """The forward and the backward pass of one layer; None where it computes nothing."""

    forward: Optional[Function]
    backward: Optional[Function]


def layer_functions(graph: Graph, layered: Layered) -> Tuple[LayerFunctions, ...]:
    """The layers of a step, each reading what other layers, parameters and the batch give it, and keeping what they
    read of it. Gradients are handed out, not added up over microbatches."""
    readers: Dict[int, int] = {}
    for operation in graph.operations:
        for value in set(operation.inputs):
            readers[value] = readers.get(value, 0) + 1
    wanted = set(graph.outputs)
    return tuple(
        LayerFunctions(_function(forward, readers, wanted), _function(backward, readers, wanted))
        for forward, backward in zip(layered.forward, layered.backward)
    )


def _function(operations: Sequence[Operation], readers: Dict[int, int], wanted: Set[int]) -> Optional[Function]:
    if not operations:
        return None
    kinds: Dict[int, Any] = {}
    inside: Dict[int, int] = {}
    for operation in operations:
        atoms = [atom for atom in operation.equation.invars if not hasattr(atom, "val")]
        kinds.update(zip(operation.inputs, (atom.aval for atom in atoms)))
        for value in set(operation.inputs):
            inside[value] = inside.get(value, 0) + 1
    made = dict.fromkeys(value for operation in operations for value in operation.outputs)
    takes = [value for value in kinds if value not in made]
    gives = [value for value in made if value in wanted or readers.get(value, 0) > inside.get(value, 0)]

    def run(*arrays: Any) -> List[Any]:
        values = dict(zip(takes, arrays))
        for operation in operations:
            values.update(zip(operation.outputs, _results(operation, values)))
        return [values[value] for value in gives]

    return Function(run, tuple(kinds[value] for value in takes), tuple(takes), tuple(gives))


def _results(operation: Operation, values: Dict[int, Any]) -> Sequence[Any]:
    equation, numbers = operation.equation, iter(operation.inputs)
    arrays = [atom.val if hasattr(atom, "val") else values[next(numbers)] for atom in equation.invars]
    functions, parameters = equation.primitive.get_bind_params(equation.params)
    results = equation.primitive.bind(*functions, *arrays, **parameters)
    return results if equation.primitive.multiple_results else [results]
