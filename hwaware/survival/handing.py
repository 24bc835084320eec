"""Hand copies over to the vault of the same host, through memory that both processes see.

A socket would cost the worker, and so its device, two more copies and a digest.
"""

from __future__ import annotations

import math
import mmap
import os
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

from hwaware.survival.pieces import Piece, digest_of, size_of

# Room for the first bytes, and what each piece begins at a multiple of.
_UNIT_BYTES = 64


class Handed(NamedTuple):
    """Tell a vault where pieces lie in a worker's memory.

    Attributes:
        path: File of the memory, as other processes of the host see it.
        head: First bytes of the memory. With other ones, it holds something else by now.
        pieces: Texts of the pieces, whose digests are not known yet, and where they begin.
    """

    path: str
    head: str
    pieces: Tuple[Tuple[str, int], ...]


class Memory:
    """Memory that other processes of the host can read.

    Args:
        nbytes: Its size.

    Raises:
        OSError: The system has no room.
    """

    def __init__(self, nbytes: int) -> None:
        import numpy

        self._file = os.memfd_create("hwaware-copies")
        os.posix_fallocate(self._file, 0, nbytes)
        self.nbytes, self.path = nbytes, f"/proc/{os.getpid()}/fd/{self._file}"
        self._bytes = numpy.frombuffer(mmap.mmap(self._file, nbytes), numpy.uint8)

    def begin(self, head: str) -> None:
        """Write the first bytes."""
        import numpy

        self._bytes[:_UNIT_BYTES] = numpy.frombuffer(head.encode().ljust(_UNIT_BYTES), numpy.uint8)

    def block(self, start: int, dtype: Any, shape: Sequence[int]) -> Any:
        """Return an array that lies in the memory."""
        nbytes = math.prod(shape) * dtype.itemsize
        return self._bytes[start : start + nbytes].view(dtype).reshape(shape)

    def close(self) -> None:
        """Let no other process open the memory any more."""
        os.close(self._file)


def is_possible() -> bool:
    """Return True if the system has memory of this kind."""
    return hasattr(os, "memfd_create")


def laid_out(sizes_bytes: Sequence[int]) -> List[int]:
    """Return where blocks of these sizes begin, and the size of the memory.

    Example:
        >>> laid_out([4, 65])
        [64, 128, 256]
    """
    found = [_UNIT_BYTES]
    for nbytes in sizes_bytes:
        found.append(found[-1] + -(-nbytes // _UNIT_BYTES) * _UNIT_BYTES)
    return found


def taken(handed: Handed) -> Dict[str, Tuple[Piece, Any]]:
    """Copy pieces out of a worker's memory; return them with their digests and their bytes, by their texts.

    Raises:
        OSError: The memory is gone, or holds something else, or this process may not read it.
        ValueError: The file is none of a worker's.
    """
    import numpy

    found = {}
    # By the number of a file that was closed, another kind of file may answer, such as a pipe.
    with open(os.open(handed.path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        for text, start in handed.pieces:
            piece = Piece.of(text)
            data = numpy.empty(size_of(piece), numpy.uint8)
            file.seek(start)  # and no map of the file: its pages would be mapped one by one for each point
            if file.readinto(data) < len(data):
                raise FileNotFoundError(handed.path)
            found[text] = (piece._replace(digest=digest_of(data)), data)
        # A worker writes the head first, so these are the pieces that it meant.
        if os.pread(file.fileno(), _UNIT_BYTES, 0) != handed.head.encode().ljust(_UNIT_BYTES):
            raise FileNotFoundError(handed.path)
    return found
