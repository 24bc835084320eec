"""Name the arrays of a program, and cut them into the pieces that vaults hold.

Arrays never change once a call has made them. So an array is the output of a call, by its number, whatever stage made
it on whatever devices.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Iterable, List, NamedTuple, Sequence, Tuple

from hwaware.errors import MeasurementError
from hwaware.runtime.checkpoints import Box, overlaps

# (number of the call, place among its outputs); the call 0 "made" what the program brought along.
Name = Tuple[int, int]


class Piece(NamedTuple):
    """A block of an array in a vault.

    Attributes:
        name: The array's name.
        start, shape: The block's place in the array, in every dimension.
        dtype: Data type of its numbers.
        digest: `digest_of` its bytes.
    """

    name: Name
    start: Tuple[int, ...]
    shape: Tuple[int, ...]
    dtype: str
    digest: int


class Wanted(NamedTuple):
    """An array that a worker shall hold again.

    Attributes:
        name: The array's name.
        uuid: The worker's name for it.
        dtype: Data type of its numbers.
        boxes: The block of each of the worker's devices.
        former: The worker's name for the same blocks so far; None if it has others, or none.
    """

    name: Name
    uuid: Any
    dtype: Any
    boxes: Tuple[Box, ...]
    former: Any = None


def digest_of(data: Any) -> int:
    """Return a digest of bytes, of 64 bits: it shows damage, but not forgery.

    Args:
        data: The bytes.

    Example:
        >>> digest_of(b"abcdefgh") == digest_of(b"abcdefgh"), digest_of(b"abcdefgh") == digest_of(b"abcdefgH")
        (True, False)
    """
    import xxhash

    return int(xxhash.xxh3_64_intdigest(data))


def bytes_of(array: Any) -> Any:
    """Return a true copy of an array's numbers as bytes. The array itself may be donated and overwritten next."""
    import numpy

    return numpy.array(array, copy=True, order="C").reshape(-1).view(numpy.uint8)


def size_of(piece: Piece) -> int:
    """Return the bytes of a piece.

    Example:
        >>> size_of(Piece((1, 0), (0,), (2, 3), "float32", 0))
        24
    """
    from hwaware.runtime.manifests import dtype_of

    return math.prod(piece.shape) * int(dtype_of(piece.dtype).itemsize)


def covers(pieces: Iterable[Piece], shape: Sequence[int]) -> bool:
    """Return True if pieces of one array cover it; pieces of several cuts may overlap.

    Example:
        >>> halves = [Piece((1, 0), (start,), (2,), "float32", 0) for start in (0, 2)]
        >>> covers(halves, (4,)), covers(halves[:1], (4,))
        (True, False)
        >>> covers([halves[0], Piece((1, 0), (1,), (2,), "float32", 0)], (4,))
        False
    """
    found = list(pieces)
    return bool(found) and _numbers_in(found, Box((0,) * len(shape), tuple(shape))) == math.prod(shape)


def _numbers_in(pieces: Iterable[Piece], box: Box) -> int:
    """Return how many numbers of a block are in any of these pieces."""
    import numpy

    cuts = {_common(piece, box) for piece in pieces if overlaps(piece, box)}
    # The pieces' edges cut the block into cells: each cell is in a piece as a whole, or not at all.
    edges = [sorted({edge for cut in cuts for edge in cut[axis]}) for axis in range(len(box.shape))]
    is_in = numpy.zeros([max(0, len(each) - 1) for each in edges], bool)
    for cut in cuts:
        is_in[tuple(slice(each.index(a), each.index(b)) for each, (a, b) in zip(edges, cut))] = True
    sizes: Any = numpy.ones((), numpy.int64)
    for each in edges:
        sizes = numpy.multiply.outer(sizes, numpy.diff(each))
    return int(sizes[is_in].sum())


def _common(piece: Piece, box: Box) -> Tuple[Tuple[int, int], ...]:
    """Return begin and end of what a piece and a block have in common, in every dimension."""
    places = zip(piece.start, piece.shape, box.start, box.shape)
    return tuple((max(a, b), min(a + m, b + n)) for a, m, b, n in places)


def assembled(wanted: Wanted, given: Sequence[Tuple[Piece, Any]]) -> List[Any]:
    """Put an array's blocks together from pieces, as NumPy arrays of their own.

    Args:
        wanted: The array.
        given: Pieces, also of other arrays, with their bytes.

    Raises:
        MeasurementError: A piece is not as it was copied, or pieces are missing.
    """
    import numpy

    own = [(piece, data) for piece, data in given if piece.name == wanted.name]
    for piece, data in own:
        if digest_of(data) != piece.digest:
            raise MeasurementError(
                f"A copy of output {piece.name[1]} of call {piece.name[0]} is damaged: its digest is "
                f"{digest_of(data):016x}, expected {piece.digest:016x}.",
                "look at the memory of the host that held it, and start the program again from a checkpoint.",
            )
    done: Dict[Box, Any] = {}
    for box in wanted.boxes:
        if box in done:
            continue
        whole = numpy.empty(box.shape, wanted.dtype)
        for piece, data in {(piece.start, piece.shape): (piece, data) for piece, data in own}.values():
            if overlaps(piece, box):
                _copy(piece, data, box, whole)
        filled = _numbers_in((piece for piece, _ in own), box)
        if filled < math.prod(box.shape):
            raise MeasurementError(
                f"The vaults gave {filled} of {math.prod(box.shape)} numbers of output {wanted.name[1]} of call "
                f"{wanted.name[0]}.",
                "start the program again from a checkpoint.",
            )
        done[box] = whole
    return [done[box] for box in wanted.boxes]


def _copy(piece: Piece, data: Any, box: Box, whole: Any) -> None:
    """Copy the elements that a piece and a block have in common."""
    import numpy

    from hwaware.runtime.manifests import dtype_of

    block = numpy.frombuffer(data, dtype_of(piece.dtype), count=math.prod(piece.shape)).reshape(piece.shape)
    common = _common(piece, box)
    source = tuple(slice(a - start, b - start) for (a, b), start in zip(common, piece.start))
    target = tuple(slice(a - start, b - start) for (a, b), start in zip(common, box.start))
    whole[target] = block[source]
