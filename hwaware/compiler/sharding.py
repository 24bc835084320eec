"""Choose the dimension of each array that a stage's devices split.

A stage of DP x TP devices splits the samples of a microbatch over its DP replicas. Every replica has all weights, and
splits these over its TP devices. It splits the first of two products by columns, the next one by rows. So one sum over
the devices ends the pair (Megatron's choice). Accumulators and the optimizer's state are split like their weights.
Everything else follows along the operations.

This module decides on the arrays between programs alone. Inside a program XLA's partitioner follows these. It is right
whatever they are, so a poor choice costs time, never a result.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

from hwaware.compat.jaxprs import MARKER, Flat, Operation, Shape, flatten
from hwaware.compiler.dataflow import Links, links

DATA, TENSOR = 0, 1
# For each dimension of an array, the axis of the mesh that it is split over; None where it is whole.
Spec = Tuple[Optional[int], ...]
Mesh = Tuple[int, int]

# A product with fewer columns for each device stays whole: a router or a classifier takes less than joining its result.
_FEWEST_COLUMNS = 8
_PRODUCTS = ("dot_general", "conv_general_dilated")
_NAMES_OF_SAME_ARRAY = (MARKER, "optimization_barrier")


class StageFunction(NamedTuple):
    """Hold one program of a mesh.

    Attributes:
        jaxpr: The program's jaxpr (not closed).
        invars, outvars: Its arguments and results under the names that all programs share.
        kind: "forward", "backward" or "update" (the optimizer's).
    """

    jaxpr: Any
    invars: Sequence[Any]
    outvars: Sequence[Any]
    kind: str


def whole(shape: Shape) -> Spec:
    """Return the spec of an array that every device has whole."""
    return (None,) * len(shape)


def spec_with(dims: Sequence[Any], dim: Optional[int], axis: int) -> Spec:
    """Return a spec that splits the dimension `dim` over `axis`; it has as many dimensions as `dims`."""
    return tuple(axis if place == dim else None for place in range(len(dims)))


def follow(flat: Flat, known: Dict[int, Spec], mesh: Mesh) -> Dict[int, Spec]:
    """Return the specs of all values of a program, from those of its arguments along the operations."""
    specs = _forward(flat, known, mesh, {})
    repeated = _repeated(flat, specs)
    return _forward(flat, known, mesh, repeated) if repeated else specs


def _forward(flat: Flat, known: Dict[int, Spec], mesh: Mesh, fixed: Dict[int, Spec]) -> Dict[int, Spec]:
    specs = dict(known)
    for operation in flat.operations:
        _follow_one(operation, links(operation), specs, mesh)
        specs.update((value, fixed[value]) for value in operation.outputs if value in fixed)
    return specs


def _repeated(flat: Flat, specs: Dict[int, Spec]) -> Dict[int, Spec]:
    """Return specs that split a broadcast value (a mask for every sample) like the value it is combined with."""
    made = {
        operation.outputs[0]: links(operation)[0]
        for operation in flat.operations
        if operation.name == "broadcast_in_dim"
    }
    found: Dict[int, Spec] = {}
    for operation in flat.operations:
        if not made.keys() & set(operation.inputs) or len(operation.outputs) != 1:
            continue
        for axis, places in zip(specs[operation.outputs[0]], links(operation)[0]):
            for value, dim in ((operation.inputs[index], dim) for index, dim in places):
                if axis is not None and value in made and not made[value][dim]:
                    spec = found.get(value, specs[value])
                    found[value] = (*spec[:dim], axis, *spec[dim + 1 :])
    return found


def _follow_one(operation: Operation, linked: Links, specs: Dict[int, Spec], mesh: Mesh) -> None:
    for value, shape, sources in zip(operation.outputs, operation.output_shapes, linked):
        spec: List[Optional[int]] = []
        for size, places in zip(shape, sources):
            axes = (_axis(specs, operation, place) for place in places)
            free = (axis for axis in axes if axis is not None and axis not in spec and size % mesh[axis] == 0)
            spec.append(next(free, None))
        specs[value] = tuple(spec)


def _axis(specs: Dict[int, Spec], operation: Operation, place: Tuple[int, int]) -> Optional[int]:
    spec = specs.get(operation.inputs[place[0]])
    return spec[place[1]] if spec is not None and place[1] < len(spec) else None


def batch_dims(functions: Iterable[StageFunction], batch: Iterable[Any]) -> Dict[Any, int]:
    """Return the dimension of each variable between programs that counts the samples of a microbatch.

    Args:
        functions: All programs of all meshes; each comes after the programs whose results it uses.
        batch: The arguments that Alpa cuts into microbatches, along their first dimension.
    """
    found = dict.fromkeys(batch, 0)
    for function in functions:
        flat = flatten(function.jaxpr)
        known = {
            value: spec_with(argument.aval.shape, found.get(variable), DATA)
            for value, argument, variable in zip(flat.inputs, function.jaxpr.invars, function.invars)
        }
        specs = follow(flat, known, (1, 1))
        for value, variable in zip(flat.outputs, function.outvars):
            if DATA in specs.get(value, ()):
                found[variable] = specs[value].index(DATA)
    return found


def choose(
    functions: Sequence[StageFunction],
    batch: Dict[Any, int],
    accumulators: Dict[Any, Any],
    mesh: Mesh,
    fixed: Optional[Dict[Any, Spec]] = None,
) -> Dict[Any, Spec]:
    """Return the spec of every argument and result of the programs of one mesh.

    Args:
        functions: The programs in the order in which they run.
        batch: The dimensions that `batch_dims` found.
        accumulators: The argument that holds a sum of gradients -> the result that holds it with one more.
        mesh: (DP, TP).
        fixed: Specs that are given, not chosen.
    """
    flats = [flatten(function.jaxpr) for function in functions]
    weights: Dict[Any, Spec] = dict(fixed or {})
    if mesh[TENSOR] > 1:
        _sweep(functions, flats, batch, weights, mesh, split_weights=True)
        weights.update(_like_weights(functions, flats, weights, accumulators))
    for before, after in accumulators.items():  # both have one spec, whatever the gradient's own would be
        weights[before] = weights[after] = weights.get(before, whole(before.aval.shape))
    return _sweep(functions, flats, batch, weights, mesh, split_weights=False)


def _sweep(
    functions: Sequence[StageFunction], flats: Sequence[Flat], batch: Dict[Any, int], weights: Dict[Any, Spec],
    mesh: Mesh, split_weights: bool,
) -> Dict[Any, Spec]:  # fmt: skip
    chosen: Dict[Any, Spec] = {}
    for function, flat in zip(functions, flats):
        for variable in function.invars:
            if variable not in chosen:
                chosen[variable] = weights.get(variable) or _batch_spec(variable, batch, mesh)
        known = {value: chosen[variable] for value, variable in zip(flat.inputs, function.invars)}
        if split_weights and function.kind == "forward":
            candidates = {
                value: variable
                for value, variable in zip(flat.inputs, function.invars)
                if variable not in batch and variable.aval.shape and variable not in weights
            }
            for value, spec in _Splitter(flat, known, set(candidates), mesh).run().items():
                weights[candidates[value]] = chosen[candidates[value]] = known[value] = spec
        specs = follow(flat, known, mesh)
        for value, variable in zip(flat.outputs, function.outvars):
            if variable not in chosen:
                chosen[variable] = weights.get(variable) or specs.get(value, whole(variable.aval.shape))
    return chosen


def _batch_spec(variable: Any, batch: Dict[Any, int], mesh: Mesh) -> Spec:
    shape, dim = variable.aval.shape, batch.get(variable)
    if dim is None or shape[dim] % mesh[DATA]:
        return whole(shape)
    return spec_with(shape, dim, DATA)


class _Splitter:
    """Walk through a program, and split the weights of its products over the tensor axis.

    Args:
        flat: The program.
        known: The specs of its arguments.
        weights: The arguments that may be split.
        mesh: (DP, TP).
    """

    def __init__(self, flat: Flat, known: Dict[int, Spec], weights: Set[int], mesh: Mesh) -> None:
        self._flat = flat
        self._specs = dict(known)
        self._mesh = mesh
        self._split: Dict[int, Spec] = {}
        # A weight, perhaps transposed or converted -> (the original weight, its dimension for each of the value's).
        self._origin: Dict[int, Tuple[int, Tuple[Optional[int], ...]]] = {
            value: (value, tuple(range(len(known[value])))) for value in weights
        }

    def run(self) -> Dict[int, Spec]:
        """Return each argument that this object has split -> its spec."""
        for operation in self._flat.operations:
            linked = links(operation)
            weights = [index for index, value in enumerate(operation.inputs) if value in self._origin]
            if operation.name in _PRODUCTS and len(weights) == 1:
                self._split_product(operation, linked, weights[0])
            elif weights and len(weights) < len(operation.inputs):
                self._split_along(operation, linked, weights)
            _follow_one(operation, linked, self._specs, self._mesh)
            self._remember_origin(operation, linked, weights)
        return self._split

    def _split_product(self, operation: Operation, linked: Links, weight: int) -> None:
        other = 1 - weight
        spec = self._specs.get(operation.inputs[other], whole(operation.input_shapes[other]))
        for dims in contracted(operation):
            if spec[dims[other]] == TENSOR:
                self._set(operation, weight, dims[weight])
                return
        if TENSOR in spec:
            return
        summed = {dims[weight] for dims in contracted(operation)}
        shape = operation.input_shapes[weight]
        free = [places[0][1] for places in linked[0] if places and places[0][0] == weight and len(places) == 1]
        wide = [dim for dim in free if dim not in summed and shape[dim] >= _FEWEST_COLUMNS * self._mesh[TENSOR]]
        if wide:
            self._set(operation, weight, max(wide, key=lambda dim: (shape[dim], dim)))

    def _split_along(self, operation: Operation, linked: Links, weights: Sequence[int]) -> None:
        """Split a bias or a scale like the value that it is added to or multiplied with."""
        for places in linked[0] if linked else ():
            axes = {_axis(self._specs, operation, place) for place in places if place[0] not in weights}
            for index, dim in places:
                if index in weights and TENSOR in axes:
                    self._set(operation, index, dim)

    def _set(self, operation: Operation, index: int, dim: int) -> None:
        value = operation.inputs[index]
        weight, dims = self._origin[value]
        place, size = dims[dim], operation.input_shapes[index][dim]
        if place is None or size % self._mesh[TENSOR] or weight in self._split:
            return
        # After a reshape, the weight's dimension may be longer than this one; the tensor axis has to divide both.
        self._split[weight] = spec_with(self._specs[weight], place, TENSOR)
        self._specs[weight] = self._split[weight]
        self._specs[value] = spec_with(operation.input_shapes[index], dim, TENSOR)

    def _remember_origin(self, operation: Operation, linked: Links, weights: Sequence[int]) -> None:
        ranked = [index for index, shape in enumerate(operation.input_shapes) if shape]
        if operation.name in _NAMES_OF_SAME_ARRAY:
            pairs = [(index, index) for index in weights]
        elif len(weights) == 1 and ranked == list(weights) and len(operation.outputs) == 1:
            pairs = [(weights[0], 0)]
        else:
            return
        for index, result in pairs:
            weight, dims = self._origin[operation.inputs[index]]
            places = [next((dim for source, dim in found if source == index), None) for found in linked[result]]
            mapped = tuple(None if place is None else dims[place] for place in places)
            self._origin[operation.outputs[result]] = (weight, mapped)


def contracted(operation: Operation) -> List[Tuple[int, int]]:
    """Return the pairs of dimensions, (left, right), over which a product sums."""
    numbers = operation.params["dimension_numbers"]
    if operation.name == "dot_general":
        return list(zip(*numbers[0]))
    if operation.params["feature_group_count"] == 1 and operation.params["batch_group_count"] == 1:
        return [(numbers.lhs_spec[1], numbers.rhs_spec[1])]
    return []


def _like_weights(
    functions: Sequence[StageFunction], flats: Sequence[Flat], weights: Dict[Any, Spec], accumulators: Dict[Any, Any]
) -> Dict[Any, Spec]:
    """Return the specs of gradients, optimizer state and new weights: arrays that the optimizer combines by element."""
    groups = _Groups()
    for before, after in accumulators.items():
        groups.join(before, after)
    for number, (function, flat) in enumerate(zip(functions, flats)):
        if function.kind != "update":
            continue
        for value, variable in (*zip(flat.inputs, function.invars), *zip(flat.outputs, function.outvars)):
            if value >= 0:
                groups.join((number, value), variable)
        for operation in flat.operations:
            _join_elements(groups, number, operation)
    spec_of = {groups.find(variable): spec for variable, spec in weights.items()}
    variables = [variable for function in functions for variable in (*function.invars, *function.outvars)]
    return {variable: spec_of[groups.find(variable)] for variable in variables if groups.find(variable) in spec_of}


def _join_elements(groups: _Groups, number: int, operation: Operation) -> None:
    for index, (value, shape, sources) in enumerate(zip(operation.outputs, operation.output_shapes, links(operation))):
        for dim, places in enumerate(sources):
            for source, place in places:
                same = place == dim and operation.input_shapes[source] == shape
                if same and operation.inputs[source] >= 0 and (len(operation.outputs) == 1 or source == index):
                    groups.join((number, operation.inputs[source]), (number, value))


class _Groups:
    """Group things that belong together."""

    def __init__(self) -> None:
        self._parent: Dict[Any, Any] = {}

    def find(self, item: Any) -> Any:
        """Return the group of an item."""
        parent = self._parent.get(item, item)
        while parent != self._parent.get(parent, parent):
            parent = self._parent[parent]
        return parent

    def join(self, first: Any, second: Any) -> None:
        """Make two groups one."""
        self._parent[self.find(first)] = self.find(second)
