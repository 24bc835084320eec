"""Tell which dimension of an operation's result is which dimension of its operands.

`links` says, for each dimension of each result, from which operands' dimensions it comes unchanged. Links serve only
to find good shardings. XLA's partitioner decides on unknown dimensions, and is right for every sharding.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence, Tuple

from hwaware.compat.jaxprs import MARKER, Flat, Operation, Shape, scan_counts

# Where a dimension of a result comes from: (index of the operand, dimension of that operand).
Sources = List[Tuple[int, int]]
Links = List[List[Sources]]


def function_of(operation: Operation) -> Callable[..., Any]:
    """Return the operation as a function of its operands."""
    from hwaware.compat.programs import bind

    if operation.name == "reshape":
        return lambda array: array.reshape(operation.output_shapes[0])
    return lambda *arguments: bind(operation.equation.primitive, dict(operation.params), arguments)


def arguments_of(operation: Operation, values: Dict[int, Any]) -> List[Any]:
    """Return the operands of an operation, from all values so far."""
    return [operation.literals[place] if value < 0 else values[value] for place, value in enumerate(operation.inputs)]


def results_of(operation: Operation, arguments: Sequence[Any]) -> Sequence[Any]:
    """Return the results of an operation on these operands."""
    if operation.name == MARKER:
        return arguments
    results = function_of(operation)(*arguments)
    return results if operation.equation.primitive.multiple_results else [results]


def evaluate(
    flat: Flat,
    constants: Sequence[Any],
    arguments: Sequence[Any],
    results: Callable[[Operation, List[Any]], Sequence[Any]] = results_of,
) -> Dict[int, Any]:
    """Return all values of a program, given its own constants and arguments; `results` applies an operation."""
    values = {**flat.constants, **flat.literals}
    values.update(zip((*flat.own_constants, *flat.inputs), (*constants, *arguments)))
    for operation in flat.operations:
        values.update(zip(operation.outputs, results(operation, arguments_of(operation, values))))
    return values


def links(operation: Operation) -> Links:
    """Return, for each dimension of each result, the operands' dimensions that it is; none if it is unknown."""
    rule = _RULES.get(operation.name, _same_shape)
    if operation.name.startswith("reduce_") and "axes" in operation.params:
        rule = _reduced
    return rule(operation)


def _same_shape(operation: Operation) -> Links:
    """Link an elementwise operation: operands have the result's dimensions, or one element that repeats along it."""
    found: Links = []
    for shape in operation.output_shapes:
        fitting = [
            (index, operand)
            for index, operand in enumerate(operation.input_shapes)
            if len(operand) == len(shape) and all(size in (1, whole) for size, whole in zip(operand, shape))
        ]
        found.append([[(index, dim) for index, one in fitting if one[dim] == size] for dim, size in enumerate(shape)])
    return found


def _one_by_one(operation: Operation) -> Links:
    """Let result i be operand i (markers and barriers)."""
    return [[[(index, dim)] for dim in range(len(shape))] for index, shape in enumerate(operation.output_shapes)]


def _reduced(operation: Operation) -> Links:
    axes = operation.params["axes"]
    kept = [dim for dim in range(len(operation.input_shapes[0])) if dim not in axes]
    return [[[(0, dim)] for dim in kept] for _ in operation.outputs]


def _squeezed(operation: Operation) -> Links:
    rank = len(operation.input_shapes[0])
    removed = {dim % rank for dim in operation.params["dimensions"]}
    return [[[(0, dim)] for dim in range(rank) if dim not in removed]]


def _broadcast(operation: Operation) -> Links:
    shape, (result,) = operation.input_shapes[0], operation.output_shapes
    found: List[Sources] = [[] for _ in result]
    for dim, place in enumerate(operation.params["broadcast_dimensions"]):
        if shape[dim] == result[place]:
            found[place].append((0, dim))
    return [found]


def _reshaped(operation: Operation) -> Links:
    """Link the first dimension of each group that a reshape splits or joins; leave the others unknown."""
    shape, (result,) = operation.input_shapes[0], operation.output_shapes
    found: List[Sources] = [[] for _ in result]
    i = j = 0
    while i < len(shape) and j < len(result):
        first, second, left, right = i, j, shape[i], result[j]
        while left != right and left and right:
            if left < right:
                i += 1
                left *= shape[i]
            else:
                j += 1
                right *= result[j]
        first = _first_wide(shape, first, i)
        second = _first_wide(result, second, j)
        found[second].append((0, first))
        i, j = i + 1, j + 1
    return [found]


def _first_wide(shape: Shape, first: int, last: int) -> int:
    return next((dim for dim in range(first, last + 1) if shape[dim] > 1), first)


def _product(operation: Operation) -> Links:
    (left, right), (left_batch, right_batch) = operation.params["dimension_numbers"]
    dims: List[Sources] = [[(0, a), (1, b)] for a, b in zip(left_batch, right_batch)]
    for index, used in enumerate(((*left, *left_batch), (*right, *right_batch))):
        dims += [[(index, dim)] for dim in range(len(operation.input_shapes[index])) if dim not in used]
    return [dims]


def _convolution(operation: Operation) -> Links:
    numbers = operation.params["dimension_numbers"]
    found: List[Sources] = [[] for _ in operation.output_shapes[0]]
    if operation.params["batch_group_count"] == 1:
        found[numbers.out_spec[0]].append((0, numbers.lhs_spec[0]))
    if operation.params["feature_group_count"] == 1:
        found[numbers.out_spec[1]].append((1, numbers.rhs_spec[0]))
    return [found]


def _joined(operation: Operation) -> Links:
    (result,) = operation.output_shapes
    axis = operation.params["dimension"]
    count = len(operation.inputs)
    return [[[(index, dim) for index in range(count)] if dim != axis else [] for dim in range(len(result))]]


def _equal_sizes(operation: Operation, index: int = 0) -> Links:
    """Link slices, pads and windows: a dimension of the operand `index` that keeps its size is taken whole."""
    shape = operation.input_shapes[index]
    return [
        [[(index, dim)] if dim < len(shape) and shape[dim] == size else [] for dim, size in enumerate(result)]
        for result in operation.output_shapes
    ]


def _gathered(operation: Operation) -> Links:
    numbers, sizes = operation.params["dimension_numbers"], operation.params["slice_sizes"]
    shape, indices = operation.input_shapes[:2]
    hidden = {*numbers.collapsed_slice_dims, *getattr(numbers, "operand_batching_dims", ())}
    windows = [dim for dim in range(len(shape)) if dim not in hidden]
    together = _batching_dims(operation)
    found: List[Sources] = []
    taken = 0
    for dim in range(len(operation.output_shapes[0])):
        if dim in numbers.offset_dims:
            window = windows.pop(0)
            found.append([(0, window)] if sizes[window] == shape[window] else [])
        else:
            own = [(0, together[taken])] if taken in together else []
            found.append([*own, (1, taken)] if taken < len(indices) - 1 else [])
            taken += 1
    return [found]


def _scattered(operation: Operation) -> Links:
    """Link a scatter to its operand. A batching dimension is also that of the indices and of the updates."""
    (found,) = _equal_sizes(operation)
    scattered = scattered_dims(operation)
    for place, dim in _batching_dims(operation).items():
        found[dim] += [(1, place), (2, scattered[place])]
    return [found]


def scattered_dims(operation: Operation) -> List[int]:
    """Return the dimensions of a scatter's updates that come from the indices, in their order."""
    windows = operation.params["dimension_numbers"].update_window_dims
    return [dim for dim in range(len(operation.input_shapes[2])) if dim not in windows]


def _batching_dims(operation: Operation) -> Dict[int, int]:
    """Return dimension of a gather's or scatter's indices -> the operand's dimension that it goes along with."""
    numbers = operation.params["dimension_numbers"]
    ours, theirs = ("start_indices" if operation.name == "gather" else "scatter_indices"), "operand"
    return dict(zip(*(getattr(numbers, f"{name}_batching_dims", ()) for name in (ours, theirs))))


def _carried(operation: Operation) -> Links:
    """Link a loop: carried values keep their dimensions; those of stacked values stay unknown."""
    constants, carried = scan_counts(operation.params)
    return [
        [[(constants + index, dim)] if index < carried else [] for dim in range(len(shape))]
        for index, shape in enumerate(operation.output_shapes)
    ]


def _unknown(operation: Operation) -> Links:
    return [[[] for _ in shape] for shape in operation.output_shapes]


_RULES: Dict[str, Callable[[Operation], Links]] = {
    MARKER: _one_by_one,
    "optimization_barrier": _one_by_one,
    "argmax": _reduced,
    "argmin": _reduced,
    "squeeze": _squeezed,
    "transpose": lambda operation: [[[(0, dim)] for dim in operation.params["permutation"]]],
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "dot_general": _product,
    "conv_general_dilated": _convolution,
    "concatenate": _joined,
    "pad": _equal_sizes,
    "slice": _equal_sizes,
    "dynamic_slice": _equal_sizes,
    "dynamic_update_slice": _equal_sizes,
    "reduce_window_sum": _equal_sizes,
    "reduce_window_max": _equal_sizes,
    "reduce_window_min": _equal_sizes,
    "scatter-add": _scattered,
    "scatter": _scattered,
    "select_and_scatter_add": lambda operation: _equal_sizes(operation, len(operation.inputs) - 1),
    "gather": _gathered,
    "scan": _carried,
    "while": _unknown,
    "cond": _unknown,
}
