"""Send messages between workers over TCP; training uses the same transport that the profiler times.

A worker opens one `Mailbox`, and one `Connection` per peer. A message is a key and bytes. The mailbox receives it in
the background while its owner computes. The owner takes it by its key.

A mailbox trusts its peers: as with Ray's own traffic, keep the ports inside the cluster.

Wire format, all integers little-endian: key length (u32), payload length (u64), key (UTF-8), payload.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import struct
import threading
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy

from hwaware.errors import MeasurementError

Address = Tuple[str, int]

# A format, not a struct.Struct: the profiler ships this module to workers by value, and no Struct can be pickled.
_HEADER = "<IQ"
_HEADER_BYTES = struct.calcsize(_HEADER)
# A sender with a fifth of a core pauses for up to 16 ms at a time (quota 4 ms). At 1.6 Gbit/s the socket buffers must
# hold 3.2 MB for that time, or the link runs dry.
_SOCKET_BUFFER_BYTES = 4 << 20
_LONGEST_KEY_BYTES = 1 << 16
# No array of a training step is longer. A corrupt header could otherwise ask for any amount of memory.
_LONGEST_PAYLOAD_BYTES = 1 << 38
_ALIVE_FIX = "check that the sending worker is alive and that its host reaches this one."
# Messages with these keys are for the mailbox itself. A failure ends every wait of its receiver, and its payload says
# why. A greeting names the sender. A farewell announces the end of the connection.
FAILURE_KEY, _HELLO_KEY, _BYE_KEY = "!failure", "!hello", "!bye"
# A peer on a vanished host stays silent. After this silence the system probes it, so often, at this interval.
_SILENCE_S, _PROBE_INTERVAL_S, _PROBES = 5, 3, 4
# select() takes no file descriptor above 1023; Windows has no poll().
_SELECTOR = getattr(selectors, "PollSelector", selectors.SelectSelector)


class PeerFailedError(MeasurementError):
    """A peer failed, so an awaited message will not come; the error carries the peer's own message."""


class Sender:
    """The other end of a mailbox's connection.

    Attributes:
        socket: The connection.
        name: Its name, for errors.
        said_hello: True once it has named itself.
        said_bye: True once it has announced the end of the connection.
        lying: Number of its messages that the owner has not taken.
    """

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.socket = connection
        self.name = name
        self.said_hello = False
        self.said_bye = False
        self.lying = 0


class Mailbox:
    """A receiver of messages, which collects them in the background and hands them out by key.

    Args:
        host: Local address to listen on; every local address if left out.
        bound: Most messages of one connection that may lie here. The mailbox then reads no more from it, so its sender
            waits. The bound does not hold while the owner waits (in `take` or `patiently`): the awaited message may
            stand behind others.
        peers_stay: True if a peer that ends its connection without a farewell has failed, which ends every wait here.
            Connections without a name, such as port scans, are no peers.
        on_arrival: Function to call with the key and the time (`time.monotonic`) of each arrived message.
        ports: Ports to listen on; the mailbox takes the first free one, and 0 is any.

    Raises:
        MeasurementError: None of the ports is free.
    """

    def __init__(
        self,
        host: str = "",
        bound: Optional[int] = None,
        peers_stay: bool = False,
        on_arrival: Optional[Callable[[str, float], None]] = None,
        ports: Sequence[int] = (0,),
    ) -> None:
        self._listener = _listen(host, ports)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
        self._bound = bound
        self._peers_stay = peers_stay
        self.on_arrival = on_arrival
        self._changed = threading.Condition()
        self._messages: Dict[str, Tuple[memoryview, Sender]] = {}
        self._senders: List[Sender] = []
        self._failure: Optional[str] = None
        self._waiting = 0
        self._closed = False
        threading.Thread(target=self._accept, name="hwaware-mailbox", daemon=True).start()

    @property
    def port(self) -> int:
        """Return the TCP port that peers connect to."""
        return int(self._listener.getsockname()[1])

    def take(self, key: str, timeout_s: float) -> memoryview:
        """Wait for the message with this key, remove it and return its payload.

        Raises:
            MeasurementError: The message did not arrive within `timeout_s`.
            PeerFailedError: A peer reported a failure, or its connection broke off.
        """
        with self.patiently(), self._changed:
            self._changed.wait_for(lambda: key in self._messages or self._failure is not None, timeout_s)
            if key in self._messages:
                payload, sender = self._messages.pop(key)
                sender.lying -= 1
                self._changed.notify_all()
                return payload
            if self._failure is not None:
                raise PeerFailedError(self._failure, _ALIVE_FIX)
            raise MeasurementError(f"Message {key!r} did not arrive within {timeout_s:g} s.", _ALIVE_FIX)

    @contextlib.contextmanager
    def patiently(self) -> Iterator[None]:
        """Read on beyond the bound while the owner waits for a peer, as the peer may wait for room here."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1

    def pending(self) -> int:
        """Return the number of messages that have arrived and that nobody took yet."""
        with self._changed:
            return len(self._messages)

    @property
    def failure(self) -> Optional[str]:
        """Return the message of a failed peer, or the cause of its loss; None while all is well."""
        with self._changed:
            return self._failure

    def close(self) -> None:
        """Stop receiving, and drop all messages that the owner did not take."""
        with self._changed:
            self._closed = True
            senders, self._senders = self._senders, []
            self._changed.notify_all()
        with contextlib.suppress(OSError):  # shutdown wakes accept(), but some systems refuse it on a listener
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sender in senders:
            with contextlib.suppress(OSError):  # the peer may have closed it already
                sender.socket.shutdown(socket.SHUT_RDWR)
            sender.socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                with self._changed:
                    if not self._closed:
                        self._failure = self._failure or f"The mailbox takes no more connections ({error})."
                        self._changed.notify_all()
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _keep_asking(connection)
            sender = Sender(connection, f"the worker at {address[0]}")
            with self._changed:
                if self._closed:  # close() came while this one connected
                    connection.close()
                    return
                self._senders.append(sender)
            threading.Thread(target=self._receive, args=(sender,), name="hwaware-receive", daemon=True).start()

    def _receive(self, sender: Sender) -> None:
        try:
            while True:
                message = _read_message(sender.socket)
                if message is None:
                    if self._peers_stay and not sender.said_bye:
                        self._fail(sender, f"Lost {sender.name}: its process ended.")
                    return
                self._sort(sender, *message)
                self._wait_for_room(sender)
        except (OSError, MemoryError, ValueError) as error:  # ValueError: a name or key that is no text
            self._fail(sender, f"Lost {sender.name}: its connection broke off ({error}).")
        finally:
            with self._changed:
                if sender in self._senders:
                    self._senders.remove(sender)
            sender.socket.close()

    def _sort(self, sender: Sender, key: str, payload: memoryview) -> None:
        if self.on_arrival is not None:
            self.on_arrival(key, time.monotonic())
        with self._changed:
            if key == FAILURE_KEY:
                self._failure = self._failure or str(payload, "utf-8")
            elif key == _HELLO_KEY:
                sender.name, sender.said_hello = str(payload, "utf-8"), True
            elif key == _BYE_KEY:
                sender.said_bye = True
            else:
                self._messages[key] = payload, sender
                sender.lying += 1
            self._changed.notify_all()

    def _wait_for_room(self, sender: Sender) -> None:
        bound = self._bound
        if bound is None:
            return
        with self._changed:
            # No limit: the sender's own wait for room has one, and close() ends this one.
            self._changed.wait_for(lambda: sender.lying < bound or self._waiting > 0 or self._closed)

    def _fail(self, sender: Sender, sentence: str) -> None:
        with self._changed:
            # Where peers stay, each names itself first. A port scan or a health check does not, and is no peer.
            is_peer = sender.said_hello or not self._peers_stay
            if is_peer and sender in self._senders:  # otherwise close() ended the connection on purpose
                self._failure = self._failure or sentence
                self._changed.notify_all()


class Connection:
    """A sender of messages to one mailbox, in order.

    Args:
        address: Host and port of the mailbox.
        timeout_s: Limit for connecting, and for the peer to make room for more data.
        name: Name of this end in the peer's errors.
        room_s: Limit for the peer to make room, if it differs from `timeout_s`.

    Raises:
        MeasurementError: No program answers at `address`.
    """

    def __init__(
        self, address: Address, timeout_s: float = 60.0, name: Optional[str] = None, room_s: Optional[float] = None
    ) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._lost: Optional[str] = None
        try:
            self._socket = socket.create_connection(address, timeout=timeout_s)
        except OSError as error:
            raise MeasurementError(
                f"No worker answers at {address[0]}:{address[1]}: {error}.",
                "check that the worker is alive and that the network lets hosts reach each other on any port.",
            ) from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        _keep_asking(self._socket)
        if room_s is not None:
            self._socket.settimeout(room_s)
        if name is not None:
            self.send(_HELLO_KEY, name.encode())

    def send(self, key: str, payload: Any) -> None:
        """Send a message, and return once the system has taken it.

        Args:
            key: Name of the message, by which the peer takes it.
            payload: Any object with a contiguous buffer.

        Raises:
            MeasurementError: The connection broke, or the peer took no data for `timeout_s` (or `room_s`).
        """
        name = key.encode()
        view = memoryview(payload)
        view = view.cast("B") if view.nbytes else memoryview(b"")  # an empty array cannot be cast
        with self._lock:
            try:
                _send_all(self._socket, memoryview(struct.pack(_HEADER, len(name), len(view)) + name), view)
            except OSError as error:
                raise MeasurementError(
                    f"Message {key!r} could not be sent to {self._address[0]}:{self._address[1]}: {error}.",
                    "check that the receiving worker is alive.",
                ) from error

    def close(self) -> None:
        """Announce the end and close the connection; sent messages still arrive."""
        with contextlib.suppress(MeasurementError):  # a peer that has gone needs no farewell
            self.send(_BYE_KEY, b"")
        self._socket.close()

    def is_lost(self) -> Optional[str]:
        """Return the cause of the peer's loss, or None while it is there.

        A mailbox never sends, so readable data means the end of its connection.
        """
        if self._lost is None:  # the system reports an error only once
            self._lost = self._find_loss()
        return self._lost

    def _find_loss(self) -> Optional[str]:
        try:
            with _SELECTOR() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                return "its process ended" if selector.select(0) and not self._socket.recv(1) else None
        except OSError as error:
            return f"it cannot be reached ({error})"


def _listen(host: str, ports: Sequence[int]) -> socket.socket:
    for port in ports:
        try:
            return socket.create_server((host, port), backlog=128)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):  # EACCES: ports below 1024 need privileges
                raise
            refused = error
    raise MeasurementError(
        f"This worker cannot listen on any of the ports {ports[0]} to {ports[-1]}: {refused.strerror}.",
        "declare more ports (HWAWARE_DEVICES), or end the programs that listen there (ss -tlnp).",
    )


def _keep_asking(connection: socket.socket) -> None:
    """Let the system probe a silent peer, so that a vanished host ends the connection in seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _SILENCE_S),
        ("TCP_KEEPINTVL", _PROBE_INTERVAL_S),
        ("TCP_KEEPCNT", _PROBES),
    ):
        if hasattr(socket, option):  # macOS before Python 3.10 lacks these
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _send_all(connection: socket.socket, head: memoryview, body: memoryview) -> None:
    """Send all data as `socket.sendall` does, but limit each wait for room instead of the whole message."""
    sent = connection.sendmsg([head, body])
    head, body = head[sent:], body[max(0, sent - len(head)) :]
    for view in (head, body):
        while view:
            view = view[connection.send(view) :]


def _read_message(connection: socket.socket) -> Optional[Tuple[str, memoryview]]:
    """Read the next message; return None if the peer closed the connection between two messages."""
    header = _read_exactly(connection, _HEADER_BYTES)
    if header is None:
        return None
    key_bytes, payload_bytes = struct.unpack(_HEADER, header)
    if key_bytes > _LONGEST_KEY_BYTES or payload_bytes > _LONGEST_PAYLOAD_BYTES:
        raise OSError(
            f"a key of {key_bytes} bytes, a payload of {payload_bytes}: the peer does not speak this protocol"
        )
    key = _read_exactly(connection, key_bytes)
    payload = _read_exactly(connection, payload_bytes)
    if key is None or payload is None:
        raise OSError("the peer closed the connection within a message")
    return str(key, "utf-8"), payload


def _read_exactly(connection: socket.socket, count: int) -> Optional[memoryview]:
    """Read `count` bytes; return None if the peer closed the connection before the first one."""
    # Not a bytearray, which Python fills with zeros: that took 28 to 32 ms for 32 MiB on a slow machine. A link of
    # 2 Gbit/s fills the socket's buffer in 16 ms and stops.
    view = memoryview(numpy.empty(count, numpy.uint8).data)
    received = 0
    while received < count:
        # MSG_WAITALL lets the kernel collect all bytes: each wake-up would cost a throttled receiver time.
        step = connection.recv_into(view[received:], 0, socket.MSG_WAITALL)
        if step == 0:
            if received == 0:
                return None
            raise OSError("the peer closed the connection within a message")
        received += step
    return view
