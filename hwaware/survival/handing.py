"""Hand copies over to the vault of the same host, through memory that both processes see.

A socket would cost the worker, and so its device, two more copies and a digest.
"""

from __future__ import annotations

import math
import mmap
import os
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

from hwaware.survival.pieces import Piece, digest_of, size_of
from hwaware.transport import read_part

# Room for the first bytes, and what each piece begins at a multiple of.
_UNIT_BYTES = 64
# A digest reads this much at a time, which stays in the processor's cache.
_CHUNK_BYTES = 1 << 18


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


class Lent:
    """Hold a part of a worker's memory, which stays after the worker has ended.

    Args:
        file: The memory, as this process has opened it.
        start: Where the part begins.
        nbytes: Its size.
        serial: Serial of the order by which the worker wrote it.
    """

    def __init__(self, file: Any, start: int, nbytes: int, serial: int) -> None:
        self.file, self.start, self.serial = file, start, serial
        self._nbytes = nbytes

    def __len__(self) -> int:
        return self._nbytes

    def read(self) -> Any:
        """Return a copy of the part as bytes.

        Raises:
            OSError: The memory is shorter.
        """
        import numpy

        data = numpy.empty(len(self), numpy.uint8)
        read_part(self.file, self.start, memoryview(data))
        return data

    def digest(self) -> int:
        """Return the digest of the part, without a copy of it.

        Raises:
            OSError: The memory is shorter.
        """
        chunk, found = memoryview(bytearray(min(_CHUNK_BYTES, len(self)))), 0
        for place in range(0, len(self), _CHUNK_BYTES):
            part = chunk[: len(self) - place]
            read_part(self.file, self.start + place, part)  # no map of the file: mapping its pages takes longer
            found = digest_of(part, found)
        return found


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


def taken(handed: Handed, serial: int) -> Dict[str, Tuple[Piece, Lent]]:
    """Take pieces out of a worker's memory; return them with their digests, by their texts.

    Args:
        handed: Where they are.
        serial: Serial of the order by which the worker wrote them.

    Raises:
        OSError: The memory is gone, or holds something else, or this process may not read it.
        ValueError: The file is none of a worker's.
    """
    found = {}
    # By the number of a file that was closed, another kind of file may answer, such as a pipe.
    file = open(os.open(handed.path, os.O_RDONLY | os.O_NONBLOCK), "rb")  # noqa: SIM115, closed with its last part
    for text, start in handed.pieces:
        piece = Piece.of(text)
        part = Lent(file, start, size_of(piece), serial)
        found[text] = (piece._replace(digest=part.digest()), part)
    # A worker writes the head first, so these are the pieces that it meant.
    if os.pread(file.fileno(), _UNIT_BYTES, 0) != handed.head.encode().ljust(_UNIT_BYTES):
        raise FileNotFoundError(handed.path)
    return found
