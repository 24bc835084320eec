"""Shardings in the words of Alpa (`pxla.ShardingSpec`) and of XLA (the text of an HLO sharding).

Alpa's words are the single truth between programs: its resharding, its inputs and outputs read them, and the text for
XLA is made from them.
"""

from __future__ import annotations

import itertools
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from hwaware.runtime.sharding import Mesh, Spec


def alpa_spec(spec: Spec, mesh: Mesh) -> Any:
    """Alpa's sharding spec of an array over the devices of a mesh, replica by replica."""
    from jax.interpreters import pxla

    used = [axis for axis in spec if axis is not None and mesh[axis] > 1]
    if not used:
        devices = mesh[0] * mesh[1]
        return pxla.ShardingSpec((pxla.NoSharding(),) * len(spec), (pxla.Replicated(devices),))
    dims = tuple(pxla.Chunked([mesh[axis]]) if axis in used else pxla.NoSharding() for axis in spec)
    mapping = tuple(
        pxla.ShardedAxis(used.index(axis)) if axis in used else pxla.Replicated(size)
        for axis, size in enumerate(mesh)
        if size > 1
    )
    return pxla.ShardingSpec(dims, mapping)


def spec_of(given: Any, rank: int, mesh: Mesh) -> Optional[Spec]:
    """The spec of an array of that many dimensions behind Alpa's words for it; None if it is none of this mesh."""
    places = [None, *range(rank)]
    for split in itertools.product(places, places):  # the dimension along each axis of the mesh
        if split[0] is None or split[0] != split[1]:
            spec = tuple(split.index(dim) if dim in split else None for dim in range(rank))
            if alpa_spec(spec, mesh) == given:
                return spec
    return None


def stacked_spec(spec: Spec, mesh: Mesh) -> Any:
    """The Alpa sharding spec of one array for each replica, one below the other: each replica has its own."""
    from jax.interpreters import pxla

    first = [mesh[0]] + [mesh[1]] * (spec[0] == 1 and mesh[1] > 1)
    rest = [pxla.Chunked([mesh[1]]) if axis == 1 and mesh[1] > 1 else pxla.NoSharding() for axis in spec[1:]]
    split = 1 in spec and mesh[1] > 1
    mapping = (pxla.ShardedAxis(0), pxla.ShardedAxis(1) if split else pxla.Replicated(mesh[1]))
    return pxla.ShardingSpec((pxla.Chunked(first), *rest), mapping[: 1 + (mesh[1] > 1)])


# The HLO sharding of an array of which every device has all.
COPIES = "{replicated}"


class Layout(NamedTuple):
    """How a program's arrays are split over several devices.

    Attributes:
        num_devices: Of the stage.
        inputs, outputs: The HLO sharding of each argument and result.
        shapes: What one device has of each argument.
    """

    num_devices: int
    inputs: Tuple[str, ...]
    outputs: Tuple[str, ...]
    shapes: Tuple[Tuple[int, ...], ...]

    def with_number(self) -> Layout:
        """The same with one more argument, a number that every device has."""
        return self._replace(inputs=(*self.inputs, COPIES), shapes=(*self.shapes, ()))


def layout(num_devices: int, inputs: Sequence[Any], outputs: Sequence[Any], shapes: Sequence[Any]) -> Layout:
    """The layout of a program whose arguments, of these whole shapes, and results have these Alpa sharding specs."""
    parts = [
        tuple(size // count for size, count in zip(shape, tiles(spec).tile_assignment_dimensions))
        for spec, shape in zip(inputs, shapes)
    ]
    return Layout(num_devices, tuple(map(hlo_sharding, inputs)), tuple(map(hlo_sharding, outputs)), tuple(parts))


class Tiles(NamedTuple):
    """Which device has which tile of an array; Alpa reads it under these names of XLA's message.

    Attributes:
        tile_assignment_dimensions: Tiles along each dimension of the array, and, if there are several, copies of each.
        tile_assignment_devices: The device of each copy of each tile, the last dimension fastest.
    """

    tile_assignment_dimensions: List[int]
    tile_assignment_devices: List[int]


def tiles(spec: Any) -> Tiles:
    """The tiles of an Alpa sharding spec."""
    import numpy

    chunks = [list(getattr(dim, "chunks", ())) for dim in spec.sharding]
    sizes, places = _mesh_axes(spec, [count for counts in chunks for count in counts])
    order = [places[index] for index in sorted(places)]
    copied = [axis for axis in range(len(sizes)) if axis not in order]
    copies = int(numpy.prod([sizes[axis] for axis in copied]))
    devices = numpy.arange(numpy.prod(sizes)).reshape(sizes).transpose(order + copied)
    dimensions = [int(numpy.prod(counts)) for counts in chunks] + [copies] * (copies > 1)
    return Tiles(dimensions, [int(device) for device in devices.reshape(-1)])


def hlo_sharding(spec: Any) -> str:
    """The text of XLA's sharding that says what an Alpa sharding spec says.

    Example (2 devices; a matrix split by columns):
        >>> hlo_sharding(alpa_spec((None, 1), (1, 2)))
        '{devices=[1,2]0,1}'
    """
    dimensions, devices = tiles(spec)
    rank = len(spec.sharding)
    if all(count == 1 for count in dimensions[:rank]):
        return COPIES
    last = " last_tile_dim_replicate" if len(dimensions) > rank else ""
    return f"{{devices=[{','.join(map(str, dimensions))}]{','.join(map(str, devices))}{last}}}"


def _mesh_axes(spec: Any, chunks: List[int]) -> Tuple[List[int], Dict[int, int]]:
    """The sizes of the mesh's axes, and for each chunk the axis that it lies along."""
    sizes, places = [], {}
    for axis, mapping in enumerate(spec.mesh_mapping):
        if hasattr(mapping, "replicas"):
            sizes.append(mapping.replicas)
        else:
            sizes.append(chunks[mapping.axis])
            places[mapping.axis] = axis
    return sizes, places
