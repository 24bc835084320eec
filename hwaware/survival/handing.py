"""Hand copies over to the vault of the same host, through memory that both processes see.

A socket would cost the worker, and so its device, two more copies.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, List, NamedTuple, Sequence, Tuple

from hwaware.transport import read_part

# Room for the first bytes; each piece begins at a multiple of this.
_UNIT_BYTES = 64
# A mailbox has room for messages of this size on every machine.
_MOST_BLOCK_BYTES = 1 << 26


class Handed(NamedTuple):
    """Tell a vault where a worker's memory is.

    Attributes:
        path: File of the memory, as other processes of the host see it.
        head: First bytes of the memory. If they differ, it holds something else by now.
    """

    path: str
    head: str


class Part:
    """Hold a part of a message, or of a worker's memory, which stays after the worker has ended.

    Args:
        source: The message's bytes, or the memory as a file that this process has opened.
        start: Where the part begins.
        nbytes: Its size.
        serial: Serial of the order by which the worker wrote it.
    """

    def __init__(self, source: Any, start: int, nbytes: int, serial: int) -> None:
        self.source, self.start, self.serial = source, start, serial
        self.is_in_file = hasattr(source, "fileno")
        self._nbytes = nbytes

    def __len__(self) -> int:
        return self._nbytes

    @property
    def view(self) -> memoryview:
        """Return the part of a message, without a copy."""
        return memoryview(self.source)[self.start : self.start + len(self)]

    def read(self) -> Any:
        """Return a copy of the part as bytes.

        Raises:
            OSError: The memory is shorter.
        """
        import numpy

        data = numpy.empty(len(self), numpy.uint8)
        if self.is_in_file:
            read_part(self.source, self.start, memoryview(data))
        else:
            data[:] = numpy.frombuffer(self.view, numpy.uint8)
        return data


def joined(parts: Sequence[Part]) -> Tuple[List[Part], List[Tuple[int, int]]]:
    """Join parts that lie beside each other into blocks, one a message; return these, and each part's place in them.

    Example:
        >>> blocks, places = joined([Part(b"", start, 60, 1) for start in (64, 128, 512)])
        >>> [(block.start, len(block)) for block in blocks], places
        ([(64, 124), (512, 60)], [(0, 0), (0, 64), (1, 0)])
    """
    blocks: List[Part] = []
    places = []
    for part in parts:
        last, end = blocks[-1] if blocks else part, part.start + len(part)
        is_beside = last.source is part.source and 0 <= part.start - (last.start + len(last)) < _UNIT_BYTES
        if blocks and is_beside and end - last.start <= _MOST_BLOCK_BYTES:
            blocks[-1] = Part(last.source, last.start, end - last.start, last.serial)
        else:
            blocks.append(part)
        places.append((len(blocks) - 1, part.start - blocks[-1].start))
    return blocks, places


class Memory:
    """Memory that other processes of the host can read.

    Args:
        nbytes: Its size.

    Attributes:
        data: Its bytes.

    Raises:
        OSError: The system has no room.
    """

    def __init__(self, nbytes: int) -> None:
        import numpy

        self._file = os.memfd_create("hwaware-copies")
        try:
            os.posix_fallocate(self._file, 0, nbytes)
        except OSError:
            os.close(self._file)
            raise
        self.nbytes, self.path = nbytes, f"/proc/{os.getpid()}/fd/{self._file}"
        self.data = numpy.frombuffer(mmap.mmap(self._file, nbytes), numpy.uint8)

    def begin(self, head: str) -> None:
        """Write the first bytes."""
        import numpy

        self.data[:_UNIT_BYTES] = numpy.frombuffer(head.encode().ljust(_UNIT_BYTES), numpy.uint8)

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


def opened(handed: Handed) -> Any:
    """Open a worker's memory.

    Raises:
        OSError: The memory is gone, or holds something else, or this process may not read it.
    """
    # By the number of a file that was closed, another kind of file may answer, such as a pipe.
    file = open(os.open(handed.path, os.O_RDONLY | os.O_NONBLOCK), "rb")  # noqa: SIM115, closed with its last part
    # A worker writes the head first, so this is the memory that it meant.
    if os.pread(file.fileno(), _UNIT_BYTES, 0) != handed.head.encode().ljust(_UNIT_BYTES):
        raise FileNotFoundError(handed.path)
    return file
