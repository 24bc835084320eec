"""Send arrays between workers as soon as they are computed, and receive them before they are needed, in the background.

A channel leads from a device of one worker to a device of another, within a group. Both ends number its messages, so
they must agree on the order only. A limited number of messages lies unsent or untaken. `Mailbox` says why this limit
cannot lock two workers.
"""

from __future__ import annotations

import contextlib
import functools
import math
import queue
import threading
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy

from hwaware import ucx
from hwaware.errors import MeasurementError
from hwaware.greeting import Credentials
from hwaware.runtime.channels import DONE, READY, Incoming, channel
from hwaware.runtime.recorder import Recorder
from hwaware.runtime.settings import RuntimeSettings
from hwaware.transport import FAILURE_KEY, LONGEST_FAILURE_BYTES, Address, Connection, Mailbox

# Messages that may lie at either end of a connection before the sender waits. Two suffice to overlap with computation;
# a stage that receives several arrays a microbatch (skip connections) needs more.
MAILBOX_BOUND = 8
WAITING_SENDS = 8
# The purpose of a training's connections, which their greetings name.
CHANNEL = "training"
# The group of the driver, rank 0, and one worker, rank 1, to which the driver sends samples.
FROM_DRIVER = "driver"
_FLUSH_LIMIT_S = 60.0
_FAILURE_LIMIT_S = 5.0


class Outgoing(NamedTuple):
    """An array, or a part of one, that a worker is to send.

    Attributes:
        key: Key of the message.
        array: The array, maybe before it is computed.
        index: Index of the part.
        is_ready: Waits until the receiver asks for the message; None to send without a wait.
    """

    key: str
    array: Any
    index: Any
    is_ready: Optional[Callable[[], None]] = None


class Peer:
    """A thread that sends arrays to one other worker, in the order in which they were handed over.

    Args:
        address: Address of the other worker's mailbox.
        credentials: Credentials of this program.
        name: Name of this worker in the other one's errors.
        recorder: Notes when each message begins to leave.
        on_failure: Called with a sentence if sending fails.
        limit_s: Limit [s] for the other worker to make room: it may be compiling.
        wire: This worker's end of UCX, if it has one.
        bound: Messages that may wait before `send` does; 0 for any number, None for WAITING_SENDS.
    """

    def __init__(
        self, address: Address, credentials: Credentials, name: str, recorder: Recorder,
        on_failure: Callable[[str], None], limit_s: float, wire: Optional[ucx.Wire] = None, bound: Optional[int] = None,
    ) -> None:  # fmt: skip
        self._address = address
        self._where = f"{address[0]}:{address[1]}"
        self._credentials = credentials
        self._limit_s = limit_s
        self._name = name
        self._recorder = recorder
        self._on_failure = on_failure
        self._wire = wire
        self._waiting: queue.Queue[Optional[Outgoing]] = queue.Queue(maxsize=WAITING_SENDS if bound is None else bound)
        self._ended = threading.Event()
        self._opened: Optional[Connection] = None
        self._thread = threading.Thread(target=self._run, name="hwaware-send", daemon=True)
        self._thread.start()

    def send(self, outgoing: Outgoing, limit_s: float) -> None:
        """Hand over an array, which leaves once it is computed and the messages before it have left.

        Raises:
            MeasurementError: The thread had no room for the array within `limit_s`, or sending has failed.
        """
        end = time.monotonic() + limit_s
        while True:
            self._raise_if_ended()
            try:
                return self._waiting.put(outgoing, timeout=min(1.0, limit_s))
            except queue.Full:
                if time.monotonic() > end:
                    raise MeasurementError(
                        f"Nothing could be sent to {self._where} for {limit_s:g} s.", "check the network to that host."
                    ) from None

    def wait_until_sent(self) -> None:
        """Wait until everything that was handed over has left.

        Raises:
            MeasurementError: Sending has failed.
        """
        with self._waiting.all_tasks_done:  # not join(): what comes after the thread's end stays unsent
            self._waiting.all_tasks_done.wait_for(lambda: self._ended.is_set() or not self.unsent())
        self._raise_if_ended()

    def unsent(self) -> int:
        """Return the number of messages that were handed over and have not left."""
        return self._waiting.unfinished_tasks

    def close(self) -> None:
        """Send what waits, then close the connection; wait at most a minute for this."""
        with contextlib.suppress(queue.Full):  # a peer that takes nothing any more is not waited for
            self._waiting.put(None, timeout=1.0)
            self._thread.join(_FLUSH_LIMIT_S)

    def abandon(self) -> None:
        """End sending at once, and drop what waits."""
        self._ended.set()
        if self._opened is not None:
            self._opened.break_off()
        with contextlib.suppress(queue.Full):  # then the thread is not waiting for more
            self._waiting.put_nowait(None)

    def _raise_if_ended(self) -> None:
        if self._ended.is_set():
            raise MeasurementError(f"Sending to {self._where} has failed.", "see the first error of the step.")

    def _run(self) -> None:
        try:
            opened = Connection(
                self._address, self._credentials, name=self._name, room_s=self._limit_s, wire=self._wire
            )
            self._opened = opened
            with contextlib.closing(opened) as connection:
                while not self._ended.is_set():
                    item = self._waiting.get()
                    if item is None or self._ended.is_set():
                        break
                    self._send_now(connection, item)
                    self._waiting.task_done()
        # The thread must tell why it ends, whatever the reason: nobody else would learn of it.
        except Exception as error:  # noqa: BLE001
            self._on_failure(f"Sending to {self._where} failed: {error}")
        finally:
            self._ended.set()
            self._drop_waiting()

    def _send_now(self, connection: Connection, item: Outgoing) -> None:
        data = None
        if self._wire is not None and self._wire.on_gpu and ucx.is_on_device(item.array):
            data = item.array[item.index].block_until_ready()
        if data is None or not connection.takes(data.nbytes):
            array = numpy.ascontiguousarray(numpy.asarray(item.array)[item.index])  # waits until it is computed
            # bfloat16 and its like have no buffer protocol of their own, so they go as plain bytes.
            data = array.reshape(-1).view(numpy.uint8)
        if item.is_ready is not None:
            item.is_ready()
        start_s = time.monotonic()
        connection.send(item.key, data)
        self._recorder.sent(item.key, start_s)

    def _drop_waiting(self) -> None:
        """Mark messages that will never leave as done, so that nobody waits for them."""
        with contextlib.suppress(queue.Empty, ValueError):
            self._waiting.task_done()  # the message that failed
            while True:
                self._waiting.get_nowait()
                self._waiting.task_done()


class Transfers:
    """Sends and receives the arrays of one worker, by group, rank and message number.

    Args:
        mailbox: The mailbox where this worker receives.
        credentials: Credentials of this program, the same as the mailbox's.
        on_failure: Called with a sentence if a background send fails.
        name: Name of this worker in others' errors.
        settings: Order of sends, limits on waits, and use of UCX; None for the defaults.
        recorder: Notes when each message leaves and arrives; None to note nothing.
    """

    def __init__(
        self, mailbox: Mailbox, credentials: Credentials, on_failure: Callable[[str], None], name: str = "a worker",
        settings: Optional[RuntimeSettings] = None, recorder: Optional[Recorder] = None,
    ) -> None:  # fmt: skip
        self._mailbox = mailbox
        self._credentials = credentials
        self._name = name
        self._settings = settings or RuntimeSettings()
        self._recorder = recorder or Recorder()
        self._abandoned = False  # when a program starts over, sends that still run are bound to fail
        self._on_failure = lambda sentence: None if self._abandoned else on_failure(sentence)
        self._groups: Dict[str, Tuple[int, List[Address]]] = {}
        self._peers: Dict[Address, Peer] = {}
        self._asking: Dict[Address, Connection] = {}
        self._sent: Dict[str, int] = {}
        self._received: Dict[str, int] = {}
        self._wire: Optional[ucx.Wire] = None
        self._incoming = Incoming(self._settings.sends == "blocking")
        self._incoming.join(FROM_DRIVER, 1, 2)
        mailbox.on_arrival = self._recorder.arrived
        mailbox.admit = self._incoming.admit

    def open_wire(self, devices: Sequence[Any], address: str) -> None:
        """Let long messages between memories of these devices travel through UCX, if the settings allow that.

        Raises:
            UnusableInputError: The settings ask for UCX, which does not run here.
        """
        self._wire = ucx.wire_for(self._settings.transfers, self._credentials, devices, address)
        self._mailbox.wire = self._wire

    def join_group(self, name: str, rank: int, addresses: List[Address]) -> None:
        """Learn the addresses of a group's members, by rank, and this worker's rank."""
        self._groups[name] = (rank, addresses)
        self._incoming.join(name, rank, len(addresses))

    def send(
        self, group: str, target: Tuple[int, int], source_device: int, array: Any, index: Any, rendezvous: bool = True
    ) -> str:
        """Send `array[index]` from a device of this worker to `target`, a (rank, device) of the group.

        Args:
            group: Name of the group.
            target: Rank and device of the receiver.
            source_device: Index of the sending device on this worker.
            array: The array, maybe before it is computed.
            index: Index of the part to send.
            rendezvous: True if blocking sends wait for the receiver here; both ends have to agree.

        Returns:
            Key of the message. Such a blocking send has arrived by now; any other message may leave later.

        Raises:
            MeasurementError: A peer failed, or took nothing for too long.
        """
        rank, addresses = self._groups[group]
        key = numbered(self._sent, group, (rank, source_device), target)
        peer = self._peer(addresses[target[0]])
        limit_s = self._settings.receive_limit_s
        with self._mailbox.patiently():  # the peer may have to send something before it can take this
            if self._settings.sends == "overlapped" or not rendezvous:
                peer.send(Outgoing(key, array, index), limit_s)
            else:
                peer.send(Outgoing(key, array, index, lambda: self._wait_for(READY + key)), limit_s)
                peer.wait_until_sent()
                # The system takes megabytes before any of these bytes has left.
                self._wait_for(DONE + key)
        return key

    def receive(
        self, group: str, source: Tuple[int, int], target_device: int, nbytes: Optional[int] = None,
        rendezvous: bool = True,
    ) -> Tuple[str, Any]:  # fmt: skip
        """Wait for the next message from `source`, a (rank, device) of the group, to a device of this worker.

        Args:
            group: Name of the group.
            source: Rank and device of the sender.
            target_device: Index of the receiving device on this worker.
            nbytes: Expected length, if the caller knows it.
            rendezvous: As for `send`.

        Returns:
            Key of the message, and its bytes.

        Raises:
            MeasurementError: The message did not arrive in time or has another length, or a peer failed.
        """
        rank, addresses = self._groups[group]
        key = numbered(self._received, group, source, (rank, target_device))
        blocking = self._settings.sends == "blocking" and rendezvous
        if blocking:
            self._tell(addresses[source[0]], READY + key)
        data = self._mailbox.take(key, self._settings.receive_limit_s, nbytes)
        if blocking:
            self._tell(addresses[source[0]], DONE + key)
        return key, data

    def take(self, key: str, nbytes: int) -> Any:
        """Wait for a message of the driver, and return its bytes.

        Raises:
            MeasurementError: The message did not arrive in time or has another length, or a peer failed.
        """
        return self._mailbox.take(key, self._settings.receive_limit_s, nbytes)

    def tell_failure(self, sentence: str) -> None:
        """Tell every member of every group of a failure, so that nobody waits for messages that will not come."""
        if self._abandoned:
            return
        known = {address for _, addresses in self._groups.values() for address in addresses}
        _at_once([functools.partial(self._tell_one, address, sentence) for address in known], 2 * _FAILURE_LIMIT_S)

    def _tell_one(self, address: Address, sentence: str) -> None:
        with contextlib.suppress(MeasurementError):  # a member that cannot be reached has failed too
            connection = Connection(address, self._credentials, _FAILURE_LIMIT_S, self._name)
            connection.send(FAILURE_KEY, sentence.encode()[:LONGEST_FAILURE_BYTES])
            connection.close()

    def abandon(self, sentence: str) -> None:
        """End every wait and all sending at once, because the program starts over."""
        self._abandoned = True
        self._mailbox.end_waits(sentence)
        for peer in list(self._peers.values()):
            peer.abandon()

    def close_mailbox(self) -> None:
        """Close the mailbox, and drop what lies there."""
        self._mailbox.close()
        if self._wire is not None:
            self._wire.close()

    def close(self) -> None:
        """Flush and close every connection; wait at most a minute for all of these together."""
        peers, asking = self._peers.values(), self._asking.values()
        _at_once([*(peer.close for peer in peers), *(connection.close for connection in asking)], _FLUSH_LIMIT_S)
        self.close_mailbox()

    def _peer(self, address: Address) -> Peer:
        if address not in self._peers:
            limit_s = self._settings.receive_limit_s
            self._peers[address] = Peer(
                address, self._credentials, self._name, self._recorder, self._on_failure, limit_s, self._wire
            )
        return self._peers[address]

    def _tell(self, address: Address, key: str) -> None:
        if address not in self._asking:
            self._asking[address] = Connection(address, self._credentials, name=self._name)
        self._asking[address].send(key, b"")

    def _wait_for(self, key: str) -> None:
        self._mailbox.take(key, self._settings.receive_limit_s)


def _at_once(calls: Sequence[Callable[[], None]], limit_s: float) -> None:
    """Make calls beside each other, and wait for all together: a peer that hangs takes the whole limit."""
    end_s = time.monotonic() + limit_s
    threads = [threading.Thread(target=call, name="hwaware-end", daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))


def numbered(counts: Dict[str, int], group: str, source: Tuple[int, int], target: Tuple[int, int]) -> str:
    """Count the next message from `source` to `target`, and return its key."""
    name = channel(group, source, target)
    counts[name] = counts.get(name, 0) + 1
    return f"{name}#{counts[name]}"


def part_bytes(index: Sequence[Any], shape: Sequence[int], dtype: Any) -> int:
    """Return the bytes of `array[index]`, for an array of that shape and an index of one slice for each dimension.

    Example:
        >>> part_bytes((slice(0, 2), slice(1, 3)), (4, 3), "float32")
        16
    """
    edges = (len(range(*part.indices(edge))) for part, edge in zip(index, shape))
    return int(numpy.dtype(dtype).itemsize * math.prod(edges))


def assembled(parts: Sequence[Tuple[Any, Any]], shape: Sequence[int], dtype: Any) -> Any:
    """Put an array together from parts, each as (index, bytes); do not copy a part that is the whole array."""
    if any(ucx.is_on_device(data) for _, data in parts):
        return ucx.assembled(parts, shape, dtype)
    if len(parts) == 1 and len(parts[0][1]) == numpy.dtype(dtype).itemsize * int(numpy.prod(shape)):
        return numpy.frombuffer(parts[0][1], dtype).reshape(shape)
    whole = numpy.empty(shape, dtype)
    for index, data in parts:
        whole[index] = numpy.frombuffer(data, whole.dtype).reshape(whole[index].shape)
    return whole
