"""Describe shardings in Alpa's words, which JAX had until 0.9: `ShardingSpec` and its parts, for all versions."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import numpy


@dataclasses.dataclass(frozen=True)
class NoSharding:
    """A dimension that is not cut."""


@dataclasses.dataclass(frozen=True)
class Chunked:
    """A dimension cut into as many parts as the product of `chunks`. Each chunk lies along an axis of the mesh."""

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
    """Say which device has which tile of an array; Alpa reads this under the names of XLA's message.

    Attributes:
        tile_assignment_dimensions: The number of tiles along each dimension of the array, then that of copies if not 1.
        tile_assignment_devices: The device of each copy of each tile, the last dimension fastest.
    """

    tile_assignment_dimensions: List[int]
    tile_assignment_devices: List[int]


@dataclasses.dataclass(frozen=True)
class ShardingSpec:
    """Describe how an array is cut, and onto which axes of a mesh of devices."""

    sharding: Tuple[Any, ...]
    mesh_mapping: Tuple[Any, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sharding", tuple(self.sharding))
        object.__setattr__(self, "mesh_mapping", tuple(self.mesh_mapping))

    def __reduce__(self) -> Any:
        # Alpa changes how its processes pickle specs, but other processes have to read them too.
        return ShardingSpec, (self.sharding, self.mesh_mapping)

    def sharding_proto(self) -> Tiles:
        """Return the tiles of an array."""
        chunks, sizes, places = self._mesh_axes()
        order = [places[index] for index in sorted(places)]
        copied = [axis for axis in range(len(sizes)) if axis not in order]
        copies = math.prod(sizes[axis] for axis in copied)
        devices = numpy.arange(math.prod(sizes)).reshape(sizes).transpose(order + copied)
        dimensions = [math.prod(counts) for counts in chunks] + [copies] * (copies > 1)
        return Tiles(dimensions, [int(device) for device in devices.reshape(-1)])

    def _mesh_axes(self) -> Tuple[List[List[int]], List[int], Dict[int, int]]:
        """Return the chunks of each dimension, the sizes of the mesh's axes, and for each chunk its axis."""
        chunks = [list(getattr(dim, "chunks", ())) for dim in self.sharding]
        counts = [count for each in chunks for count in each]
        sizes, places = [], {}
        for axis, mapping in enumerate(self.mesh_mapping):
            if isinstance(mapping, Replicated):
                sizes.append(mapping.replicas)
            else:
                sizes.append(counts[mapping.axis])
                places[mapping.axis] = axis
        return chunks, sizes, places

    def gspmd(self) -> str:
        """Return the text of the HLO sharding, which GSPMD reads.

        Example (a matrix split by columns over two devices):
            >>> ShardingSpec((NoSharding(), Chunked([2])), (ShardedAxis(0),)).gspmd()
            '{devices=[1,2]0,1}'
        """
        dimensions, devices = self.sharding_proto()
        rank = len(self.sharding)
        if all(count == 1 for count in dimensions[:rank]):
            return "{replicated}"
        last = " last_tile_dim_replicate" if len(dimensions) > rank else ""
        return f"{{devices=[{','.join(map(str, dimensions))}]{','.join(map(str, devices))}{last}}}"

    def shardy(self) -> str:
        """Return the text that Shardy reads: the dimensions lie along parts of one axis, which all devices make up.

        Example (rows over replicas of two devices each; `(1)2` is the first factor of the axis, of size two):
            >>> ShardingSpec((Chunked([2]), NoSharding()), (ShardedAxis(0), Replicated(2))).shardy()
            '<mesh<["device"=4]>, [{"device":(1)2}, {}]>'
        """
        chunks, sizes, places = self._mesh_axes()
        number, dims = itertools.count(), []
        for counts in chunks:
            factors: List[Tuple[int, int]] = []  # (product of the factors before, size)
            for size in counts:
                before = math.prod(sizes[: places[next(number)]])
                if factors and math.prod(factors[-1]) == before:  # Shardy wants neighbours as one
                    before, size = factors[-1][0], factors.pop()[1] * size
                factors.append((before, size))
            names = [f'"device":({before}){size}' for before, size in factors if size > 1]
            dims.append("{" + ('"device"' if factors == [(1, math.prod(sizes))] else ", ".join(names)) + "}")
        return f'<mesh<["device"={math.prod(sizes)}]>, [{", ".join(dims)}]>'

    def part(self, shape: Sequence[int]) -> Tuple[int, ...]:
        """Return the shape of each device's part of an array."""
        return tuple(size // count for size, count in zip(shape, self.sharding_proto().tile_assignment_dimensions))

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
