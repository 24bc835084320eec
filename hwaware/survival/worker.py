"""Run one stage of a program that survives: copy its arrays into vaults, and start over in the same process."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from hwaware import host_devices
from hwaware.encryption import Identity
from hwaware.errors import MeasurementError
from hwaware.greeting import Credentials
from hwaware.runtime.checkpoints import Box
from hwaware.runtime.mesh import Place
from hwaware.runtime.worker import HostWorker
from hwaware.survival import programs
from hwaware.survival.handing import Handed, Memory, is_possible, laid_out
from hwaware.survival.pieces import Name, Piece, Wanted, assembled, bytes_of, digest_of
from hwaware.survival.sending import PURPOSE, Forward, Mark, Sender, encoded, mark_key, piece_key
from hwaware.transport import Address

# Copies of two points may be on their way, and one is committed. The vault may still drop the one before it.
MOST_MEMORIES = 5


class Item(NamedTuple):
    """A block of an array that a worker copies.

    Attributes:
        name: The array's name.
        uuid, device: Where the worker has it.
        box: Where the block is in the array.
        vaults: The vaults that get it, by their places in the order; none if the driver shall have it. The worker sends
            to the first, which sends it on.
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
        spare: Serial of an order whose memory no vault reads any more; -1 for none.
    """

    epoch: int
    items: Tuple[Item, ...]
    vaults: Tuple[Address, ...]
    secret: bytes
    digests: bool
    sender: str
    beside: Optional[int]
    serial: int
    spare: int


class Copied(NamedTuple):
    """Tell what a worker has copied.

    Attributes:
        values: Arrays for the driver.
        copy_s: Seconds for which the step's thread copied.
        bytes: Bytes of the copies.
        sent_s: Processor seconds that the newest finished sending took; 0 before the first.
    """

    values: Dict[Name, Any]
    copy_s: float
    bytes: int
    sent_s: float


class SurvivingWorker(HostWorker):
    """A HostWorker that copies its arrays into vaults, and starts over where another worker was lost."""

    def __init__(self, *arguments: Any) -> None:
        self._orders: queue.SimpleQueue[Tuple[Order, List[Tuple[Item, str, Any]], Optional[Handed]]] = (
            queue.SimpleQueue()
        )
        self._memories: Dict[int, Memory] = {}  # by the serials of orders
        self._sent_s = 0.0
        # Arrays of the program before it moved, until those that stay have their new names.
        self._former: Dict[Any, Any] = {}
        super().__init__(*arguments)
        from hwaware.compat.client import keep_loaded

        keep_loaded(programs.of_host())  # after a recovery, workers compile only what is new to their hosts
        threading.Thread(target=self._send_copies, name="hwaware-copies", daemon=True).start()

    # Recovery

    def abandon(self, sentence: str) -> None:
        """End the step that runs: nobody will send what it waits for. Answers while a step runs."""
        self._transfers.abandon(sentence)

    def start_over(self, place: Place, secret: bytes, identity: Optional[Identity], keep: bool = False) -> None:
        """Forget the program's instructions, and take part in a new one; compiled programs stay.

        A new mailbox with a new secret takes no late messages of the old one.

        Args:
            place: As for a new worker.
            secret: As for a new worker.
            identity: As for a new worker.
            keep: Keep the program's arrays until `take_in` names those that stay; else forget them.
        """
        self._transfers.abandon("the program starts over")
        self._transfers.close_mailbox()
        self.buffers = self._resident
        self._former = dict(self.buffers) if keep else {}
        self.executables.clear()
        self.buffers.clear()
        self.newest = ()
        self._send_tasks.clear()
        self._receive_tasks.clear()
        self._runs.clear()
        self._failure = None
        self._open(place, secret, identity)

    def take_in(self, wanted: Sequence[Wanted], *gifts: Sequence[Tuple[Piece, Any]]) -> None:
        """Hold arrays again.

        Args:
            wanted: The arrays.
            gifts: Pieces with their bytes, by vault.

        Raises:
            MeasurementError: A piece is damaged or missing.
        """
        former, self._former = self._former, {}
        self.buffers.update({one.uuid: former[one.former] for one in wanted if one.former is not None})
        del former  # their memory is free before others come
        with host_devices.unthrottled():
            given = [pair for gift in gifts for pair in gift]
            for one in (one for one in wanted if one.former is None):
                self.buffers[one.uuid] = [self.put(block, index) for index, block in enumerate(assembled(one, given))]

    # Copies

    def copy_out(self, order: Order) -> Optional[Copied]:
        """Copy arrays between two steps; the copies leave in the background. After a failure, return None."""
        import numpy

        if self._failure is not None:  # the watch learns of it
            return None
        beside = order.beside if is_possible() else None
        values: Dict[Name, Any] = {}
        copies: List[Tuple[Item, str, Any]] = []
        near: List[Tuple[Item, Any]] = []
        arrays = [self.buffers[item.uuid][item.device] for item in order.items]
        for array in arrays:
            array.block_until_ready()
        start_s = time.monotonic()
        nbytes = 0
        for item, array in zip(order.items, arrays):
            found = numpy.asarray(array)
            if not item.vaults:
                values[item.name] = numpy.array(found, copy=True)
                continue
            nbytes += found.nbytes
            if item.vaults[0] == beside:
                near.append((item, found))
            else:
                copies.append((item, found.dtype.name, bytes_of(found)))
        handed: Optional[Handed] = None
        try:
            handed = self._handed(order, near) if near else None
        except OSError:  # no memory of this kind
            copies += [(item, found.dtype.name, bytes_of(found)) for item, found in near]
        copy_s = time.monotonic() - start_s
        self._orders.put((order, copies, handed))
        return Copied(values, copy_s, nbytes, self._sent_s)

    def _handed(self, order: Order, near: Sequence[Tuple[Item, Any]]) -> Handed:
        """Copy arrays into memory that the vault of this host reads."""
        *starts, nbytes = laid_out([found.nbytes for _, found in near])
        memory, head = self._memory(order, nbytes), f"{order.epoch}|{order.serial}"
        memory.begin(head)
        pieces = []
        for start, (item, found) in zip(starts, near):
            copy_into(memory.block(start, found.dtype, found.shape), found)
            pieces.append((Piece(item.name, item.box.start, item.box.shape, found.dtype.name, 0).text(), start))
        return Handed(memory.path, head, tuple(pieces))

    def _memory(self, order: Order, nbytes: int) -> Memory:
        """Return memory for copies: that of an older point, which no vault reads any more, or new one."""
        spare = self._memories.pop(order.spare, None)
        for serial in sorted(self._memories):
            if serial < order.spare or len(self._memories) >= MOST_MEMORIES:
                self._memories.pop(serial).close()
        if spare is not None and spare.nbytes < nbytes:
            spare.close()
            spare = None
        memory = self._memories[order.serial] = spare or Memory(nbytes)
        return memory

    def _send_copies(self) -> None:
        sending = Sender(self._where)
        while True:
            order, copies, handed = self._orders.get()
            start_s = time.thread_time()  # what it takes from the device's share; waiting takes nothing
            pieces = [
                (item, Piece(item.name, item.box.start, item.box.shape, dtype, digest_of(data)), data)
                for item, dtype, data in copies
            ]
            by_vault: Dict[int, List[Tuple[Item, Piece, Any]]] = {}
            for each in pieces:
                by_vault.setdefault(each[0].vaults[0], []).append(each)
            for first, chosen in by_vault.items():
                messages = [(piece_key(order.epoch, order.serial, piece), data) for _, piece, data in chosen]
                mark = Mark(_forwards(order, [(item, piece.text()) for item, piece, _ in chosen]))
                self._send_to(sending, order, first, messages, mark)
            if handed is not None:
                assert order.beside is not None
                near = [item for item in order.items if item.vaults[:1] == (order.beside,)]
                texts = [(item, text) for item, (text, _) in zip(near, handed.pieces)]
                self._send_to(sending, order, order.beside, [], Mark(_forwards(order, texts), handed))
            self._sent_s = time.thread_time() - start_s

    def _send_to(self, sending: Sender, order: Order, vault: int, messages: List[Tuple[str, Any]], mark: Mark) -> None:
        """Send pieces to a vault, and their mark."""
        messages = [*messages, (mark_key(order.epoch, order.serial, order.sender), encoded(mark))]
        credentials = Credentials(order.secret, PURPOSE, order.digests)
        # The driver notices a lost vault by itself, and orders the next copies elsewhere.
        with contextlib.suppress(MeasurementError):
            sending.send(order.vaults[vault], credentials, messages)


def copy_into(block: Any, array: Any) -> None:
    """Copy an array's numbers. The array itself may be donated and overwritten next."""
    block[...] = array


def _forwards(order: Order, texts: Sequence[Tuple[Item, str]]) -> Tuple[Forward, ...]:
    """Return what the first vault shall send on to the others."""
    others: Dict[int, List[str]] = {}
    for item, text in texts:
        for other in item.vaults[1:]:
            others.setdefault(other, []).append(text)
    return tuple(Forward(order.vaults[other], tuple(found)) for other, found in others.items())
