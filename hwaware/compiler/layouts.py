"""Describe shardings in the words of Alpa (`ShardingSpec`).

They are the single truth between programs: Alpa's resharding, its inputs and outputs read them. hwaware also makes
the text for XLA's partitioner from them.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, Optional, Tuple

from hwaware.compat.specs import Chunked, NoSharding, Replicated, ShardedAxis, ShardingSpec
from hwaware.compiler.sharding import Mesh, Spec


def alpa_spec(spec: Spec, mesh: Mesh) -> Any:
    """Return Alpa's sharding spec of an array over the devices of a mesh, replica by replica."""
    used = [axis for axis in spec if axis is not None and mesh[axis] > 1]
    if not used:
        return copied_spec(len(spec), mesh[0] * mesh[1])
    dims = tuple(Chunked([mesh[axis]]) if axis in used else NoSharding() for axis in spec)
    mapping = tuple(
        ShardedAxis(used.index(axis)) if axis in used else Replicated(size)
        for axis, size in enumerate(mesh)
        if size > 1
    )
    return ShardingSpec(dims, mapping)


def spec_of(given: Any, rank: int, mesh: Mesh) -> Optional[Spec]:
    """Return the Spec behind Alpa's sharding spec of an array of that rank; None if this mesh has no such Spec."""
    places = [None, *range(rank)]
    for split in itertools.product(places, places):  # the dimension along each axis of the mesh
        if split[0] is None or split[0] != split[1]:
            spec = tuple(split.index(dim) if dim in split else None for dim in range(rank))
            if alpa_spec(spec, mesh) == given:
                return spec
    return None


def stacked_spec(spec: Spec, mesh: Mesh) -> Any:
    """Return Alpa's sharding spec of the replicas' arrays, one below the other: each replica has its own."""
    first = [mesh[0]] + [mesh[1]] * (spec[0] == 1 and mesh[1] > 1)
    rest = [Chunked([mesh[1]]) if axis == 1 and mesh[1] > 1 else NoSharding() for axis in spec[1:]]
    split = 1 in spec and mesh[1] > 1
    mapping = (ShardedAxis(0), ShardedAxis(1) if split else Replicated(mesh[1]))
    return ShardingSpec((Chunked(first), *rest), mapping[: 1 + (mesh[1] > 1)])


def copied_spec(rank: int, num_devices: int) -> Any:
    """Return Alpa's sharding spec of an array that every device has whole."""
    return ShardingSpec((NoSharding(),) * rank, (Replicated(num_devices),))


class Layout(NamedTuple):
    """Describe how several devices split a program's arrays.

    Attributes:
        num_devices: The number of devices of the stage.
        inputs, outputs: Alpa's sharding spec of each argument and result.
    """

    num_devices: int
    inputs: Tuple[ShardingSpec, ...]
    outputs: Tuple[ShardingSpec, ...]
