"""All-reduce values between meshes that every stage needs, such as the norm of all gradients.

Every mesh sends its value to every worker of the other meshes. All workers combine the values in the order of the
meshes, so every stage gets the same bits.
"""

from __future__ import annotations

import functools
from typing import Any, Dict, List, Tuple

import numpy

from hwaware.errors import MeasurementError

_OPERATIONS: Dict[str, Any] = {
    "add": numpy.add, "and": numpy.bitwise_and, "or": numpy.bitwise_or, "max": numpy.maximum, "min": numpy.minimum,
}  # fmt: skip


class Reducer:
    """One worker's side of the reductions.

    Args:
        transfers: The worker's `Transfers`.
    """

    def __init__(self, transfers: Any) -> None:
        self._transfers = transfers
        self._groups: Dict[str, Tuple[int, List[List[int]]]] = {}

    def join(self, group: str, rank: int, meshes: List[List[int]], addresses: List[Any]) -> None:
        """Learn the members of a group of meshes.

        Args:
            group: Name of the group, by `compiler.programs.group_name`.
            rank: This worker's rank among all workers of the group.
            meshes: The ranks of each mesh's workers; the first speaks for its mesh, whose workers have equal values.
            addresses: Addresses of all workers' mailboxes, by rank.
        """
        self._groups[group] = (rank, meshes)
        self._transfers.join_group(group, rank, addresses)

    def reduce(self, group: str, operation: str, value: Any) -> Any:
        """Wait for the other meshes' values, and return all values combined, as a NumPy array.

        Raises:
            MeasurementError: This worker is not in the group, or a value did not arrive in time.
        """
        if group not in self._groups:
            raise MeasurementError(
                f"The group {group!r} of meshes that combine values was never formed.",
                "compile the program again with hwaware.enable() in place.",
            )
        rank, meshes = self._groups[group]
        own = next(ranks for ranks in meshes if rank in ranks)
        if rank == own[0]:
            for target in (target for ranks in meshes if ranks is not own for target in ranks):
                self._transfers.send(group, (target, 0), 0, value, ..., rendezvous=False)
        values = [value if ranks is own else self._received(group, ranks[0], value) for ranks in meshes]
        return functools.reduce(_OPERATIONS[operation], values)

    def _received(self, group: str, source: int, like: Any) -> Any:
        nbytes = numpy.dtype(like.dtype).itemsize * int(numpy.prod(like.shape))
        _, data = self._transfers.receive(group, (source, 0), 0, nbytes, rendezvous=False)
        return numpy.asarray(data).view(like.dtype).reshape(like.shape)  # the data may be on a device
