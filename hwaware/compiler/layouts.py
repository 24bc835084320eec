"""Shardings in the words of Alpa (`ShardingSpec`) and of XLA (the text of an HLO sharding).

Alpa's words are the single truth between programs: its resharding, its inputs and outputs read them, and the text for
XLA is made from them.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, Optional, Sequence, Tuple

from hwaware.compat.specs import Chunked, NoSharding, Replicated, ShardedAxis, ShardingSpec
from hwaware.compiler.sharding import Mesh, Spec


def alpa_spec(spec: Spec, mesh: Mesh) -> Any:
    """Alpa's sharding spec of an array over the devices of a mesh, replica by replica."""
    used = [axis for axis in spec if axis is not None and mesh[axis] > 1]
    if not used:
        devices = mesh[0] * mesh[1]
        return ShardingSpec((NoSharding(),) * len(spec), (Replicated(devices),))
    dims = tuple(Chunked([mesh[axis]]) if axis in used else NoSharding() for axis in spec)
    mapping = tuple(
        ShardedAxis(used.index(axis)) if axis in used else Replicated(size)
        for axis, size in enumerate(mesh)
        if size > 1
    )
    return ShardingSpec(dims, mapping)


def spec_of(given: Any, rank: int, mesh: Mesh) -> Optional[Spec]:
    """Return the spec that Alpa's words describe, of an array of that rank; None if it is none of this mesh."""
    places = [None, *range(rank)]
    for split in itertools.product(places, places):  # the dimension along each axis of the mesh
        if split[0] is None or split[0] != split[1]:
            spec = tuple(split.index(dim) if dim in split else None for dim in range(rank))
            if alpa_spec(spec, mesh) == given:
                return spec
    return None


def stacked_spec(spec: Spec, mesh: Mesh) -> Any:
    """Return the Alpa sharding spec of one array for each replica, one below the other: each replica has its own."""
    first = [mesh[0]] + [mesh[1]] * (spec[0] == 1 and mesh[1] > 1)
    rest = [Chunked([mesh[1]]) if axis == 1 and mesh[1] > 1 else NoSharding() for axis in spec[1:]]
    split = 1 in spec and mesh[1] > 1
    mapping = (ShardedAxis(0), ShardedAxis(1) if split else Replicated(mesh[1]))
    return ShardingSpec((Chunked(first), *rest), mapping[: 1 + (mesh[1] > 1)])


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
        """Return the same with one more argument, a number that every device has."""
        return self._replace(inputs=(*self.inputs, COPIES), shapes=(*self.shapes, ()))


def layout(num_devices: int, inputs: Sequence[Any], outputs: Sequence[Any], shapes: Sequence[Any]) -> Layout:
    """Return the layout of a program from Alpa's specs of its arguments, of these whole shapes, and of its results."""
    parts = [
        tuple(size // count for size, count in zip(shape, spec.sharding_proto().tile_assignment_dimensions))
        for spec, shape in zip(inputs, shapes)
    ]
    return Layout(num_devices, tuple(map(hlo_sharding, inputs)), tuple(map(hlo_sharding, outputs)), tuple(parts))


def hlo_sharding(spec: Any) -> str:
    """Return the text of XLA's sharding that says what an Alpa sharding spec says.

    Example (2 devices; a matrix split by columns):
        >>> hlo_sharding(alpa_spec((None, 1), (1, 2)))
        '{devices=[1,2]0,1}'
    """
    dimensions, devices = spec.sharding_proto()
    rank = len(spec.sharding)
    if all(count == 1 for count in dimensions[:rank]):
        return COPIES
    last = " last_tile_dim_replicate" if len(dimensions) > rank else ""
    return f"{{devices=[{','.join(map(str, dimensions))}]{','.join(map(str, devices))}{last}}}"
