"""Hold copies of training state beside the workers: one vault a host, in a process of its own.

Objects that Ray holds for a worker end with the worker. So the vault keeps the memory open into which the workers of
its host copy pieces of arrays. It sends these pieces on to the vault of another host, which has them in its own memory.
If the vault cannot open this memory, workers send their pieces. Vaults give pieces back through Ray. Late messages of
workers from before a recovery carry an older epoch, and are dropped.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import traceback
from typing import Any, Callable, Collection, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from hwaware import host_devices
from hwaware.errors import MeasurementError
from hwaware.greeting import Credentials
from hwaware.runtime.backend import keep_freed_memory
from hwaware.survival.handing import Part, opened
from hwaware.survival.pieces import Name, Piece, size_of
from hwaware.survival.sending import MARK, PURPOSE, Forward, Mark, Sender, decoded, forwarder, messages_of, unreadable
from hwaware.transport import Address, Mailbox, PeerFailedError

# Serial of a piece that is alone in its memory.
_FOR_GOOD = 1 << 62
# A message lies in the mailbox at once after its arrival was told.
_TAKE_LIMIT_S = 10.0


class Drained(NamedTuple):
    """How a program has left a host or a device.

    Attributes:
        done: True if the program uses none of it any more.
        is_known: False if the program's cluster has no such host or device.
        what: A sentence about it.
        moved: A sentence about the move, for those that waited for the move; "" without one.
    """

    done: bool
    is_known: bool
    what: str
    moved: str = ""


def _or_end(work: Callable[[], None]) -> None:
    """Do work that never ends; after an unexpected error, end the process, so that another vault takes its place."""
    try:
        work()
    except BaseException:  # noqa: BLE001, whatever it is: the vault would answer, but take no copies any more
        traceback.print_exc()
        os._exit(1)


class Vault:
    """A Ray actor that holds pieces of arrays.

    Args:
        address: Address of the host.
        secret: Secret of the program's vaults.
        digests: True if messages carry keyed digests.
        notice: A file; once the host has it, the program shall leave the host. None for none.
    """

    def __init__(self, address: str, secret: bytes, digests: bool, notice: Optional[str] = None) -> None:
        # For good: no device's share pays for copies.
        self._outside_share = contextlib.ExitStack()
        self._outside_share.enter_context(host_devices.unthrottled())
        keep_freed_memory()  # each point's pieces are as large as the last one's
        self._lock = threading.Condition()
        self._epoch = 0
        self._pieces: Dict[Piece, Part] = {}
        self._blocks: Dict[Tuple[int, int, str], Any] = {}  # messages before their mark, by serial, number and sender
        self._marks: Set[Tuple[int, str]] = set()
        self._kept = -1
        self._notice = notice
        # Hosts and devices that the program shall leave, and how that ended.
        self._drains: Dict[str, Optional[Drained]] = {}
        self._arrived: queue.SimpleQueue[str] = queue.SimpleQueue()
        # Pieces to send on: epoch, serial of the order, name of the first sender, target and pace, and the pieces.
        self._forwards: queue.SimpleQueue[Tuple[int, int, str, Forward, List[Tuple[Piece, Part]]]] = queue.SimpleQueue()
        self._credentials = Credentials(secret, PURPOSE, digests)
        self._sending = Sender(f"the vault on {address}")
        self._mailbox = Mailbox(address, self._credentials, on_arrival=lambda key, _: self._arrived.put(key))
        self._address = (address, self._mailbox.port)
        for work in (self._collect, self._send_on):
            threading.Thread(target=_or_end, args=(work,), name="hwaware-vault", daemon=True).start()

    def mailbox_address(self) -> Address:
        """Return where workers send to; also the sign that the vault is up."""
        return self._address

    def process_id(self) -> int:
        """Return the id of the vault's process on its host."""
        return os.getpid()

    def begin(self, epoch: int, names: Collection[Name]) -> None:
        """Begin an epoch: keep the arrays of these names, and drop what older epochs still send."""
        with self._lock:
            self._epoch = epoch
            self._blocks.clear()
            self.keep(names)
            self._lock.notify_all()
        self._sending.break_off()  # it may wait for a host that is lost

    def keep(self, names: Collection[Name], number: Optional[int] = None, serial: int = 0) -> None:
        """Drop what a committed point does not need, but keep the arrays of these names.

        From here on, workers may overwrite their memory of older points.

        Args:
            names: The arrays of the point.
            number: Number of the point's call: drop arrays of calls up to it; None to drop those of all calls.
            serial: Serial of the order by which the point was copied: drop marks up to it.
        """
        kept = set(names)
        with self._lock:
            self._pieces = {
                piece: data
                for piece, data in self._pieces.items()
                # the next point's pieces may arrive before this call
                if piece.name in kept or (number is not None and piece.name[0] > number)
            }
            self._marks = {mark for mark in self._marks if number is not None and mark[0] > serial}
            if number is not None:
                # Their connection broke before their mark.
                self._blocks = {key: data for key, data in self._blocks.items() if key[0] > serial}
                for piece, part in self._pieces.items():
                    if part.serial < serial:  # the rest of its memory or message is of no use any more
                        self._pieces[piece] = Part(part.read(), 0, len(part), _FOR_GOOD)
                self._kept = serial

    def marks(self) -> Set[Tuple[int, str]]:
        """Return (serial of the order, sender) of all that has arrived as a whole."""
        with self._lock:
            return set(self._marks)

    def news(self) -> Tuple[Set[Tuple[int, str]], Set[str], int]:
        """Return `marks`, what the program shall leave and has not answered about, and the newest serial of `keep`."""
        if self._notice is not None and os.path.exists(self._notice):
            self.drain(self._address[0])
        with self._lock:
            asked = {what for what, outcome in self._drains.items() if outcome is None}
        return self.marks(), asked, self._kept

    def drain(self, what: str, again: bool = False) -> Optional[Drained]:
        """Ask the program to leave a host or a device; return how that ended, once it has.

        Args:
            what: The host or device.
            again: Let the program try again if it could not leave.
        """
        with self._lock:
            known = self._drains.setdefault(what, None)
            if again and known is not None and not known.done:
                self._drains[what] = known = None
            return known

    def tell(self, what: str, outcome: Drained) -> None:
        """Keep how the program has left a host or a device, for those that ask."""
        with self._lock:
            self._drains[what] = outcome

    def forget(self, whats: Collection[str]) -> None:
        """Forget that the program was asked to leave these hosts and devices."""
        with self._lock:
            for what in whats:
                self._drains.pop(what, None)

    def listing(self) -> List[Piece]:
        """Return the pieces that the vault has."""
        with self._lock:
            return list(self._pieces)

    def give(self, pieces: Sequence[Piece]) -> List[Tuple[Piece, Any]]:
        """Return pieces with their bytes."""
        with self._lock:
            found = [(piece, self._pieces[piece]) for piece in pieces]
        return [(piece, part.read()) for piece, part in found]

    def _collect(self) -> None:
        while True:
            key = self._arrived.get()
            if not key.startswith("!"):  # a connection's farewell is for the mailbox alone
                self._sort(key, self._taken(key))

    def _taken(self, key: str) -> Any:
        """Take a message that has arrived, also if another worker's connection has broken meanwhile."""
        end_s = time.monotonic() + _TAKE_LIMIT_S
        while True:
            try:
                return self._mailbox.take(key, _TAKE_LIMIT_S)
            except PeerFailedError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.001)

    def _sort(self, key: str, data: Any) -> None:
        epoch, _, rest = key.partition("|")
        with self._lock:
            # A worker may send before Ray lets this actor begin the epoch.
            self._lock.wait_for(lambda: self._epoch >= int(epoch), _TAKE_LIMIT_S)
        if int(epoch) != self._epoch:
            return
        if rest.startswith(MARK):
            _, serial, sender = rest.split("|", 2)
            self._end_of(int(epoch), int(serial), sender, decoded(data))
            return
        serial, number, sender = rest.split("|", 2)
        with self._lock:
            if int(epoch) == self._epoch:
                self._blocks[int(serial), int(number), sender] = data

    def _end_of(self, epoch: int, serial: int, sender: str, mark: Mark) -> None:
        """Take what the sender has sent or hands over, note that this is all, and send it on."""
        pieces: Sequence[Tuple[Piece, int, int]] = mark.pieces
        numbers = {number for _, number, _ in pieces}
        with self._lock:
            if epoch != self._epoch:
                return
            sources = {number: self._blocks.pop((serial, number, sender), None) for number in numbers}
        if mark.handed is not None:
            try:
                sources = dict.fromkeys(numbers, opened(mark.handed))
            except OSError:
                pieces, mark, sender = (), Mark(), unreadable(sender)
        elif any(source is None for source in sources.values()):
            return  # dropped, for example with a point that was given up
        parts = [Part(sources[number], start, size_of(piece), serial) for piece, number, start in pieces]
        with self._lock:
            if epoch != self._epoch:
                return
            self._pieces.update({piece: part for (piece, _, _), part in zip(pieces, parts)})
            self._marks.add((serial, sender))
        for forward in mark.forwards:
            given = [(mark.pieces[place][0], parts[place]) for place in forward.places]
            self._forwards.put((epoch, serial, sender, forward, given))

    def _send_on(self) -> None:
        while True:
            epoch, serial, sender, forward, pieces = self._forwards.get()
            if epoch != self._epoch or serial < self._kept:
                continue  # a newer epoch has begun, or a newer point is committed
            # The driver notices a lost vault by itself, and orders the next copies elsewhere.
            with contextlib.suppress(MeasurementError):
                self._sending.send(
                    forward.address,
                    self._credentials,
                    messages_of(epoch, serial, forwarder(sender), pieces),
                    sum(len(part) for _, part in pieces) / forward.send_s if forward.send_s else None,
                )
