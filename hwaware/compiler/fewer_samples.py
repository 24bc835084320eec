"""Make the program that one of several data-parallel replicas runs, on its part of the samples alone.

A jaxpr contains shapes, so this module makes another jaxpr with smaller ones. The result is for timing: its sums over
samples are those of one replica, and nobody adds them up.
"""

from __future__ import annotations

import logging
from typing import Any, Dict, List, Optional, Sequence, Tuple

import jax

from hwaware.compat.jaxprs import LOOPS, Flat, Operation, Shape, flatten
from hwaware.compiler.dataflow import Sources, evaluate, links, results_of, scattered_dims
from hwaware.compiler.sharding import DATA, Spec, contracted, follow, spec_with

LOG = logging.getLogger("hwaware")
# The parameters of primitives that hold the shape of their result, or of a part of their operand.
_RESULT_SHAPES = ("shape", "new_sizes", "limit_indices")
_PART_SHAPES = ("slice_sizes",)


def with_part_of_samples(closed_jaxpr: Any, dims: Sequence[Optional[int]], replicas: int) -> Optional[Any]:
    """Return the program on one replica's samples.

    Args:
        closed_jaxpr: The program on all samples.
        dims: The dimension of each argument that counts samples; None for an argument without samples.
        replicas: The number of replicas that share the samples equally.

    Returns:
        A closed jaxpr. None if no argument has samples, the replicas cannot share these equally, or an operation fails
        on fewer.
    """
    if all(dim is None for dim in dims) or any(
        aval.shape[dim] % replicas for aval, dim in zip(closed_jaxpr.in_avals, dims) if dim is not None
    ):
        return None
    flat = flatten(closed_jaxpr.jaxpr)
    specs = [spec_with(aval.shape, dim, DATA) for aval, dim in zip(closed_jaxpr.in_avals, dims)]
    smaller = _Smaller(flat, dict(zip(flat.inputs, specs)), replicas)
    avals = [
        jax.ShapeDtypeStruct(smaller.shape(aval.shape, spec), aval.dtype)
        for aval, spec in zip(closed_jaxpr.in_avals, specs)
    ]
    try:
        return jax.make_jaxpr(lambda *arguments: smaller.run(arguments, closed_jaxpr.consts))(*avals)
    # Every primitive, also of other libraries, has its own error for shapes that do not fit. hwaware then scales times.
    except Exception as error:  # noqa: BLE001
        LOG.debug("A layer is not timed with 1/%d of its samples: %s: %s", replicas, type(error).__name__, error)
        return None


class _Smaller:
    """Run a program's operations on smaller arrays.

    Args:
        flat: The program.
        known: The specs of its arguments, which tell the dimension that counts samples.
        replicas: The factor by which the samples shrink.
    """

    def __init__(self, flat: Flat, known: Dict[int, Spec], replicas: int) -> None:
        self._flat = flat
        self._replicas = replicas
        self._specs = follow(flat, known, (replicas, 1))

    def shape(self, shape: Shape, spec: Spec) -> Shape:
        """Return the smaller shape."""
        return tuple(size // self._replicas if axis == DATA else size for size, axis in zip(shape, spec))

    def run(self, arguments: Sequence[Any], constants: Sequence[Any]) -> List[Any]:
        """Return the program's results."""
        values = evaluate(self._flat, constants, arguments, self._results)
        return [values[value] for value in self._flat.outputs]

    def _results(self, operation: Operation, operands: List[Any]) -> Sequence[Any]:
        results = results_of(self._resized(operation), self._cut_alike(operation, operands))
        for value, shape, result in zip(operation.outputs, operation.output_shapes, results):
            expected = self.shape(shape, self._spec(value))
            if result.shape != expected:
                raise ValueError(f"{operation.name} gives {result.shape}, expected {expected}")
        return results

    def _spec(self, value: int) -> Spec:
        return self._specs.get(value, ())

    def _cut_alike(self, operation: Operation, operands: List[Any]) -> List[Any]:
        """Cut constants, and values made of constants, to the size of the other operands."""
        if operation.name in LOOPS and any(DATA in self._spec(value) for value in operation.inputs):
            raise ValueError(f"{operation.name} has a program of its own")
        for places in _of_one_size(operation):
            if any(self._spec(operation.inputs[index])[dim : dim + 1] == (DATA,) for index, dim in places):
                for index, dim in places:
                    size = operation.input_shapes[index][dim]
                    if operands[index].shape[dim] == size:
                        operands[index] = jax.lax.slice_in_dim(operands[index], 0, size // self._replicas, axis=dim)
        return operands

    def _resized(self, operation: Operation) -> Operation:
        """Return the operation with smaller shapes among its parameters."""
        if not operation.outputs:
            return operation
        params = dict(operation.params)
        ends: List[Tuple[Sequence[str], int, Shape]] = [
            (_RESULT_SHAPES, operation.outputs[0], operation.output_shapes[0])
        ]
        if operation.inputs:
            ends.append((_PART_SHAPES, operation.inputs[0], operation.input_shapes[0]))
        for names, value, shape in ends:
            spec = self._spec(value)
            for name in names:
                sizes = params.get(name)
                if sizes is not None and len(sizes) == len(spec):
                    params[name] = self._whole_ones(tuple(sizes), shape, spec)
        outputs = (self.shape(operation.output_shapes[0], self._spec(operation.outputs[0])),)
        return operation._replace(params=params, output_shapes=(*outputs, *operation.output_shapes[1:]))

    def _whole_ones(self, sizes: Tuple[int, ...], shape: Shape, spec: Spec) -> Tuple[int, ...]:
        """Return these sizes, but smaller where a size is a whole dimension of samples."""
        return tuple(
            size // self._replicas if axis == DATA and size == whole else size
            for size, whole, axis in zip(sizes, shape, spec)
        )


def _of_one_size(operation: Operation) -> List[Sources]:
    """Return the dimensions of the operands that must have the same size."""
    found = [places for sources in links(operation) for places in sources]
    if operation.name == "dot_general":
        found += [[(0, left), (1, right)] for left, right in contracted(operation)]
    if operation.name == "scatter-add":
        found += [[(1, place), (2, dim)] for place, dim in enumerate(scattered_dims(operation))]
    return found
