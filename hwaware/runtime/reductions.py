"""All-reduces between meshes, of values that every stage needs, such as the norm of all gradients.

A reduction is a message from every mesh to every worker of the others. All add up in the order of the meshes, so that
every stage gets the same result, bit for bit.
"""

from __future__ import annotations

import functools
from typing import Any, Dict, List, Tuple

import numpy

from hwaware.errors import MeasurementError

_OPERATIONS: Dict[str, Any] = {"add": numpy.add, "and": numpy.bitwise_and, "or": numpy.bitwise_or}


class Reducer:
    """One worker's side of the reductions.

    Args:
        transfers: What it sends and receives through.
    """

    def __init__(self, transfers: Any) -> None:
        self._transfers = transfers
        self._groups: Dict[str, Tuple[int, List[List[int]]]] = {}

    def join(self, group: str, rank: int, meshes: List[List[int]], addresses: List[Any]) -> None:
        """Learn who takes part.

        Args:
            group: See `group_name`.
            rank: This worker's among all workers of the group.
            meshes: The ranks of each mesh's workers; the first speaks for its mesh, whose workers have equal values.
            addresses: Of every worker's mailbox, by rank.
        """
        self._groups[group] = (rank, meshes)
        self._transfers.join_group(group, rank, addresses)

    def reduce(self, group: str, operation: str, value: Any) -> Any:
        """What the meshes' values come to, as a NumPy array; waits for them.

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
        return numpy.asarray(data).view(like.dtype).reshape(like.shape)  # they may be on a device
