"""Copy arrays out of a worker, one by one: while its step waits for messages, copies hold nothing up."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import Any, Callable, Collection, Deque, Dict, List, NamedTuple, Optional, Sequence, Tuple

import msgspec

from hwaware.runtime.checkpoints import Box
from hwaware.survival.handing import Handed, Memory, is_possible, laid_out
from hwaware.survival.pieces import Name, Piece, digest_of
from hwaware.transport import Address

# Copies of two points may be on their way, and one is committed. The vault may still drop the one before it.
MOST_MEMORIES = 5


class Item(NamedTuple):
    """A block of an array that a worker copies.

    Attributes:
        name: The array's name.
        uuid, device: Where the worker has it.
        box: Where the block is in the array.
        vaults: The vaults that get it, by their places in the order. The worker sends to the first, which sends it on.
    """

    name: Name
    uuid: Any
    device: int
    box: Box
    vaults: Tuple[int, ...]


class Order(NamedTuple):
    """Tell a worker what to copy at one point.

    Attributes:
        epoch: Number of the program's epoch.
        items: The blocks.
        vaults: Addresses, to which the items refer.
        secret, digests: As the vaults have them.
        sender: The vaults' name for this worker.
        beside: The vault of the worker's own host, which takes copies out of its memory; None for messages to all.
        serial: Number of the order, the same for all workers.
        spares: Serials of orders whose memory no vault reads any more.
        send_s: Seconds over which the first vault spreads what it sends on; 0 to send as fast as possible.
    """

    epoch: int
    items: Tuple[Item, ...]
    vaults: Tuple[Address, ...]
    secret: bytes
    digests: bool
    sender: str
    beside: Optional[int]
    serial: int
    spares: Tuple[int, ...]
    send_s: float

    @property
    def encoded(self) -> bytes:
        """Return the order as bytes. Ray would pickle item by item, which takes the driver much longer."""
        return msgspec.msgpack.encode(self)


#: Decodes what `Order.encoded` returns.
ORDERS = msgspec.msgpack.Decoder(Order)


class Copied(NamedTuple):
    """Tell what a worker copies.

    Attributes:
        copy_s: Seconds for which the newest finished copies held up steps; 0 before the first.
        bytes: Bytes of the copies.
        sent_s: Processor seconds that the newest finished sending took; 0 before the first.
    """

    copy_s: float
    bytes: int
    sent_s: float


class Memories:
    """Memory for copies that the vault of this host reads, by the serials of orders."""

    def __init__(self) -> None:
        self.by_serial: Dict[int, Memory] = {}

    def of(self, order: Order, nbytes: int) -> Memory:
        """Return memory for an order: that of a point which no vault reads any more, or else new memory.

        Raises:
            OSError: The system has no room.
        """
        kept, newest = self.by_serial, max(order.spares, default=-1)
        spares = [serial for serial in order.spares if serial in kept and kept[serial].nbytes >= nbytes]
        found = kept.pop(spares[0]) if spares else None
        for serial in sorted(kept):
            if (serial <= newest and serial not in spares) or len(kept) >= MOST_MEMORIES:
                kept.pop(serial).close()
        kept[order.serial] = found or Memory(nbytes)
        return kept[order.serial]


class Batch:
    """Holds the copies for one vault.

    Attributes:
        data: Bytes of all copies.
        starts: Start of each copy that is not made yet, in `data`.
        copies: Item, piece, start and number of bytes of each copy.
        handed: Where the vault finds the bytes; None if the worker sends them.
    """

    def __init__(self, data: Any, starts: Sequence[int], handed: Optional[Handed]) -> None:
        self.data, self.starts, self.handed = data, deque(starts), handed
        self.copies: List[Tuple[Item, Piece, int, int]] = []


class Copying:
    """Copies the arrays of one order.

    Args:
        order: The order.
        arrays: The order's blocks, with their arrays in the device's memory.
        memory: Gives memory that the vault of this host reads.

    Attributes:
        order: The order.
        batches: The copies for each vault to which this worker gives some, by the vault's place in the order.
        held_up_s: Seconds for which a step waited.
    """

    def __init__(
        self, order: Order, arrays: Sequence[Tuple[Item, Any]], memory: Callable[[Order, int], Memory]
    ) -> None:
        self.order, self.held_up_s = order, 0.0
        self.batches: Dict[int, Batch] = {}
        self._left: Deque[Tuple[Item, Any]] = deque(arrays)
        self._memory = memory
        self._lock = threading.Lock()

    @property
    def is_done(self) -> bool:
        """Return True if no block is left, and no copy is under way."""
        with self._lock:
            return not self._left

    def reads(self, arrays: Collection[Any]) -> bool:
        """Return True if one of these arrays is still to be copied."""
        left = {id(array) for _, array in list(self._left)}
        return any(id(array) in left for array in arrays)

    def copy_one(self) -> None:
        """Copy the next array, if one is left."""
        with self._lock:
            self._copy_one()

    def finish(self) -> None:
        """Copy all arrays that are left; the caller's step waits."""
        start_s = time.monotonic()
        with self._lock:
            while self._left:
                self._copy_one()
        self.held_up_s += time.monotonic() - start_s

    def give_up(self) -> None:
        """Copy nothing more, and forget what was copied."""
        with self._lock:
            self._left.clear()
            self.batches = {}

    def _copy_one(self) -> None:
        import numpy

        if not self._left:
            return
        item, array = self._left[0]
        batch = self.batches.get(item.vaults[0])
        if batch is None:
            batch = self.batches[item.vaults[0]] = self._batch_for(item.vaults[0])
        found, start = numpy.asarray(array), batch.starts.popleft()
        data = batch.data[start : start + found.nbytes]
        copy_into(data.view(found.dtype).reshape(found.shape), found)
        # The copy is in the processor's cache now, where its digest costs least.
        piece = Piece(item.name, item.box.start, item.box.shape, found.dtype.name, digest_of(data))
        batch.copies.append((item, piece, start, found.nbytes))
        self._left.popleft()  # only now: until here, nobody may overwrite the array

    def _batch_for(self, vault: int) -> Batch:
        """Find memory for the copies that a vault gets."""
        import numpy

        order = self.order
        *starts, nbytes = laid_out([array.nbytes for item, array in self._left if item.vaults[0] == vault])
        if vault == order.beside and is_possible():
            with contextlib.suppress(OSError):  # no memory of this kind: the worker sends its copies
                memory, head = self._memory(order, nbytes), f"{order.epoch}|{order.serial}"
                memory.begin(head)
                return Batch(memory.data, starts, Handed(memory.path, head))
        return Batch(numpy.empty(nbytes, numpy.uint8), starts, None)


def copy_into(block: Any, array: Any) -> None:
    """Copy an array's numbers. The array itself may be donated and overwritten next."""
    block[...] = array
