"""Shardings in Alpa's words, which JAX had until 0.9: `ShardingSpec` and its parts; the same on all versions."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import numpy


@dataclasses.dataclass(frozen=True)
class NoSharding:
    """A dimension that is not cut."""


@dataclasses.dataclass(frozen=True)
class Chunked:
    """A dimension cut into as many parts as the product of `chunks`, each of which lies along an axis of the mesh."""

    chunks: List[int]  # Alpa adds lists to it

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunks", list(map(int, self.chunks)))

    def __hash__(self) -> int:
        return hash(tuple(self.chunks))


@dataclasses.dataclass(frozen=True)
class ShardedAxis:
    """A mesh axis along which the parts of one chunk lie, by the chunk's number."""

    axis: int


@dataclasses.dataclass(frozen=True)
class Replicated:
    """A mesh axis of copies."""

    replicas: int


class Tiles(NamedTuple):
    """Which device has which tile of an array; Alpa reads it under these names of XLA's message.

    Attributes:
        tile_assignment_dimensions: Tiles along each dimension of the array, and, if there are several, copies of each.
        tile_assignment_devices: The device of each copy of each tile, the last dimension fastest.
    """

    tile_assignment_dimensions: List[int]
    tile_assignment_devices: List[int]


@dataclasses.dataclass(frozen=True)
class ShardingSpec:
    """How an array is cut, and onto which axes of a mesh of devices."""

    sharding: Tuple[Any, ...]
    mesh_mapping: Tuple[Any, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sharding", tuple(self.sharding))
        object.__setattr__(self, "mesh_mapping", tuple(self.mesh_mapping))

    def __reduce__(self) -> Any:
        # Alpa replaces how its processes read and write specs; others have to read them too.
        return ShardingSpec, (self.sharding, self.mesh_mapping)

    def sharding_proto(self) -> Tiles:
        """Return the tiles of an array."""
        chunks = [list(getattr(dim, "chunks", ())) for dim in self.sharding]
        sizes, places = self._mesh_axes([count for counts in chunks for count in counts])
        order = [places[index] for index in sorted(places)]
        copied = [axis for axis in range(len(sizes)) if axis not in order]
        copies = math.prod(sizes[axis] for axis in copied)
        devices = numpy.arange(math.prod(sizes)).reshape(sizes).transpose(order + copied)
        dimensions = [math.prod(counts) for counts in chunks] + [copies] * (copies > 1)
        return Tiles(dimensions, [int(device) for device in devices.reshape(-1)])

    def _mesh_axes(self, chunks: List[int]) -> Tuple[List[int], Dict[int, int]]:
        """Return the sizes of the mesh's axes, and for each chunk the axis that it lies along."""
        sizes, places = [], {}
        for axis, mapping in enumerate(self.mesh_mapping):
            if isinstance(mapping, Replicated):
                sizes.append(mapping.replicas)
            else:
                sizes.append(chunks[mapping.axis])
                places[mapping.axis] = axis
        return sizes, places

    def indices(self, shape: Sequence[int]) -> Any:
        """Return the slices of the array that each device has, in an array with one element for each device."""
        dimensions, devices = self.sharding_proto()
        counts = dimensions[: len(shape)]
        copies = math.prod(dimensions[len(shape) :])
        found = numpy.empty(len(devices), dtype=object)
        for place, device in enumerate(devices):
            tile = numpy.unravel_index(place // copies, counts) if counts else ()
            found[device] = tuple(
                slice(None) if isinstance(how, NoSharding) else slice(at * size // count, (at + 1) * size // count)
                for how, at, size, count in zip(self.sharding, map(int, tile), shape, counts)
            )
        return found


def spec_to_indices(shape: Sequence[int], spec: ShardingSpec) -> Tuple[Any, ...]:
    """Return the slices of an array that each device has, in the order of the devices."""
    return _indices(tuple(shape), spec)


@functools.lru_cache(maxsize=4096)
def _indices(shape: Tuple[int, ...], spec: ShardingSpec) -> Tuple[Any, ...]:
    return tuple(spec.indices(shape))
