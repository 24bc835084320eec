"""Run one stage of a program that survives: copy its arrays into vaults, and start over in the same process."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from hwaware import host_devices
from hwaware.encryption import Identity
from hwaware.errors import MeasurementError
from hwaware.greeting import Credentials
from hwaware.runtime.feeding import Promised
from hwaware.runtime.mesh import Place
from hwaware.runtime.worker import HostWorker
from hwaware.survival.copier import ORDERS, Batch, Copied, Copying, Item, Memories, Order
from hwaware.survival.handing import Part
from hwaware.survival.pieces import Piece, Wanted, assembled
from hwaware.survival.sending import PURPOSE, Forward, Mark, Sender, encoded, mark_key, messages_of

# After so long without a step, copies hold up none.
_PAUSE_S = 0.05


class SurvivingWorker(HostWorker):
    """A HostWorker that copies its arrays into vaults, and starts over where another worker was lost."""

    def __init__(self, *arguments: Any) -> None:
        self._orders: queue.SimpleQueue[Copying] = queue.SimpleQueue()
        self._memories = Memories()
        self._copying: Optional[Copying] = None  # the newest
        self._waits = threading.Event()  # set while a step waits for a message
        self._copy_s, self._sent_s = 0.0, 0.0
        # Arrays of the program before it moved, until those that stay have their new names.
        self._former: Dict[Any, Any] = {}
        super().__init__(*arguments)
        from hwaware.compat.client import keep_loaded

        keep_loaded()  # after a recovery, this process compiles only what is new to it
        self._sending = Sender(self._where)
        threading.Thread(target=self._send_copies, name="hwaware-copies", daemon=True).start()

    # Recovery

    def abandon(self, sentence: str) -> None:
        """End the running step, because nobody will send what it waits for; call this in the group `CONTROL`."""
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
        self._give_up_copies()
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

    def _give_up_copies(self) -> None:
        """Forget what is ordered and not sent yet: it would wait for hosts that are lost, and holds old arrays."""
        if self._copying is not None:
            self._copying.give_up()
            self._copying = None
        with contextlib.suppress(queue.Empty):
            while True:
                self._orders.get_nowait()
        self._sending.break_off()

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

    def copy_out(self, encoded_order: bytes) -> Optional[Copied]:
        """Note arrays to copy; the worker copies them while later steps wait, and before these overwrite them.

        Args:
            encoded_order: An Order, by `Order.encoded`.

        Returns:
            The bytes of these copies, and times of the newest finished ones; None after a failure.
        """
        if self._failure is not None:  # the watch learns of it
            return None
        try:
            self._finish_copies()
            order = ORDERS.decode(encoded_order)
            arrays = [(item, self.buffers[item.uuid][item.device]) for item in order.items]
        except Exception as error:  # noqa: BLE001, such as too little memory: every later call raises it
            self._keep_failure(error)
            return None
        self._copying = Copying(order, arrays, self._memories.of)
        self._orders.put(self._copying)
        return Copied(self._copy_s, sum(array.nbytes for _, array in arrays), self._sent_s)

    def run_executable(self, uuid: int, *args: Any, **kwargs: Any) -> None:
        """Run an executable; if it overwrites arrays that are not copied yet, copy them before."""
        if self._copying is not None and self._copying.reads(self._overwritten(uuid, *args)):
            self._finish_copies()
        super().run_executable(uuid, *args, **kwargs)

    def _overwritten(self, uuid: int, input_uuids: Any = (), *_: Any) -> List[Any]:
        """Return the arrays that a program takes over; none for a whole step, whose programs follow."""
        donated = getattr(self.executables.get(uuid), "donated", ())
        return [array for index in donated for array in self.buffers.get(input_uuids[index], ())]

    def run_resharding_recv_task(self, *args: Any) -> None:
        """Receive arrays of another stage, and copy while they have not arrived."""
        with self._waiting():
            super().run_resharding_recv_task(*args)

    def _fill(self, promised: Promised) -> None:
        with self._waiting():
            super()._fill(promised)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self._waits.set()
        try:
            yield
        finally:
            self._waits.clear()

    def _finish_copies(self) -> None:
        if self._copying is not None:
            self._copying.finish()
            self._copying = None

    def _copy_idly(self, copying: Copying) -> None:
        """Copy while the device has nothing to compute: the step waits for a message, or none runs."""
        while not copying.is_done:
            self._waits.wait(_PAUSE_S)
            newest = self.newest
            for array in newest:
                # A later program may have taken it over: then `newest` is another list by now.
                with contextlib.suppress(RuntimeError, ValueError):
                    array.block_until_ready()
            while self.newest is newest and (self._waits.is_set() or self.buffers is self._resident):
                copying.copy_one()
                if copying.is_done:
                    break

    def _send_copies(self) -> None:
        while True:
            copying = self._orders.get()
            try:
                self._copy_idly(copying)
                self._copy_s, order = copying.held_up_s, copying.order
                start_s = time.thread_time()  # what it takes from the device's share; waiting takes nothing
                for vault, batch in copying.batches.items():
                    self._send_to(order, vault, batch)
                self._sent_s = time.thread_time() - start_s
            except Exception as error:  # noqa: BLE001, such as too little memory: every later call raises it
                self._keep_failure(error)

    def _send_to(self, order: Order, vault: int, batch: Batch) -> None:
        """Give a vault its copies."""
        forwards = _forwards(order, [item for item, _, _, _ in batch.copies])
        if batch.handed is None:
            parts = [(piece, Part(batch.data, start, nbytes, order.serial)) for _, piece, start, nbytes in batch.copies]
            told = messages_of(order.epoch, order.serial, order.sender, parts, forwards)
        else:
            mark = Mark(tuple((piece, 0, start) for _, piece, start, _ in batch.copies), forwards, batch.handed)
            told = [(mark_key(order.epoch, order.serial, order.sender), encoded(mark))]
        credentials = Credentials(order.secret, PURPOSE, order.digests)
        # The driver notices a lost vault by itself, and orders the next copies elsewhere.
        with contextlib.suppress(MeasurementError):
            self._sending.send(order.vaults[vault], credentials, told)


def _forwards(order: Order, items: Sequence[Item]) -> Tuple[Forward, ...]:
    """Return what the first vault shall send on to the others."""
    others: Dict[int, List[int]] = {}
    for place, item in enumerate(items):
        for other in item.vaults[1:]:
            others.setdefault(other, []).append(place)
    return tuple(Forward(order.vaults[other], tuple(found), order.send_s) for other, found in others.items())
