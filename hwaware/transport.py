"""Messages between workers over TCP: what the profiler times is what training sends through.

A worker opens one `Mailbox` and one `Connection` per peer. A message is a key and bytes; it is received in the
background as soon as it arrives, whatever its owner is computing, and waits in the mailbox until it is taken by its
key.
Peers are trusted: as with Ray's own traffic, keep the ports inside the cluster.

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

# A format, not a struct.Struct: the profiler ships this module by value to workers, and a Struct cannot be pickled.
_HEADER = "<IQ"
_HEADER_BYTES = struct.calcsize(_HEADER)
# A sender that is throttled to a fifth of a core pauses for up to 16 ms at a time (quota 4 ms); at 1.6 Gbit/s that is
# 3.2 MB, which the socket buffers must hold so that the link does not run dry.
_SOCKET_BUFFER_BYTES = 4 << 20
_LONGEST_KEY_BYTES = 1 << 16
# No array of a training step is longer; a header that was changed on the way would ask for any amount of memory.
_LONGEST_PAYLOAD_BYTES = 1 << 38
_ALIVE_FIX = "check that the sending worker is alive and that its host reaches this one."
# Messages of these keys are for the mailbox itself. A failure ends every wait of its receiver, the payload says why; a
# greeting says who sends; a farewell says that the end of the connection is meant.
FAILURE_KEY, _HELLO_KEY, _BYE_KEY = "!failure", "!hello", "!bye"
# A peer whose host vanished says nothing at all: after this silence the system asks it, that often, at these intervals.
_SILENCE_S, _PROBE_INTERVAL_S, _PROBES = 5, 3, 4
# select() takes no file descriptor above 1023; Windows has no poll().
_SELECTOR = getattr(selectors, "PollSelector", selectors.SelectSelector)


class PeerFailedError(MeasurementError):
    """A peer failed, so that what was waited for will not come; the message is the peer's own."""


class Sender:
    """Who is at the other end of a mailbox's connection.

    Attributes:
        socket: The connection.
        name: What it calls itself.
        said_hello: Whether it said who it is.
        said_bye: Whether it said that it would end the connection.
        lying: How many of its messages have not been taken.
    """

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.socket = connection
        self.name = name
        self.said_hello = False
        self.said_bye = False
        self.lying = 0


class Mailbox:
    """Receives messages in the background and hands them out by key.

    Args:
        host: Local address to listen on; every local address if left out.
        bound: How many messages of one connection may lie here; then nothing more is read from it, so that its sender
            has to wait. While the owner waits (in `take` or `patiently`) the bound does not hold: what it waits for may
            stand behind what it does not need yet.
        peers_stay: A peer that ends its connection without a farewell has failed, which ends every wait here. Peers
            have names: who connects without one is none of them.
        on_arrival: Called with the key and the time (`time.monotonic`) of each message that has arrived.
        ports: It listens on the first of them that is free; 0 is any.

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
        """The TCP port that peers connect to."""
        return int(self._listener.getsockname()[1])

    def take(self, key: str, timeout_s: float) -> memoryview:
        """Wait for the message with that key and remove it.

        Raises:
            MeasurementError: It did not arrive within `timeout_s`, a peer's connection broke off within a message, or a
                peer said that it failed.
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
        """While its owner waits for a peer, the mailbox reads on beyond its bound: the peer may be waiting for that."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1

    def pending(self) -> int:
        """Messages that have arrived and were not taken yet."""
        with self._changed:
            return len(self._messages)

    @property
    def failure(self) -> Optional[str]:
        """What a peer said of its failure, or what became of it; None while all is well."""
        with self._changed:
            return self._failure

    def close(self) -> None:
        """Stop receiving; what has not been taken is lost."""
        with self._changed:
            self._closed = True
            senders, self._senders = self._senders, []
            self._changed.notify_all()
        with contextlib.suppress(OSError):  # not connected: shutdown wakes accept() where the system allows it
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
                if self._closed:  # while this one was on its way in
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
        except (OSError, MemoryError, ValueError) as error:  # ValueError: no text where one has to be
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
            # Where peers stay they say who they are first: whoever did not is none (a scan of ports, a health check).
            is_peer = sender.said_hello or not self._peers_stay
            if is_peer and sender in self._senders:  # otherwise close() ended the connection on purpose
                self._failure = self._failure or sentence
                self._changed.notify_all()


class Connection:
    """Sends messages to one mailbox, in order.

    Args:
        address: Host and port of the mailbox.
        timeout_s: Limit for connecting, and for the peer to make room for more data.
        name: What the peer's errors call this end.
        room_s: Limit for the peer to make room, where that is another one.

    Raises:
        MeasurementError: Nobody answers at `address`.
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
        """Send a message; `payload` is anything with a contiguous buffer. Returns when the system took it.

        Raises:
            MeasurementError: The connection broke, or the peer took no data for `timeout_s`.
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
        """Say goodbye and close the connection; what was sent still arrives."""
        with contextlib.suppress(MeasurementError):  # a peer that has gone needs no farewell
            self.send(_BYE_KEY, b"")
        self._socket.close()

    def is_lost(self) -> Optional[str]:
        """Why the peer is not there any more; None if it is. A mailbox never sends, so an end is all one can read."""
        if self._lost is None:  # the system tells an error once only
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
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):  # those below 1024 are not for everybody
                raise
            refused = error
    raise MeasurementError(
        f"This worker cannot listen on any of the ports {ports[0]} to {ports[-1]}: {refused.strerror}.",
        "declare more of them (HWAWARE_DEVICES), or end the programs that listen there (ss -tlnp).",
    )


def _keep_asking(connection: socket.socket) -> None:
    """Let the system ask a silent peer whether it is there, so that a vanished host ends the connection in seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _SILENCE_S),
        ("TCP_KEEPINTVL", _PROBE_INTERVAL_S),
        ("TCP_KEEPCNT", _PROBES),
    ):
        if hasattr(socket, option):  # macOS before Python 3.10 has none of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _send_all(connection: socket.socket, head: memoryview, body: memoryview) -> None:
    """Like `socket.sendall`, but the limit is on each wait for room, not on the whole message, however long it is."""
    sent = connection.sendmsg([head, body])
    head, body = head[sent:], body[max(0, sent - len(head)) :]
    for view in (head, body):
        while view:
            view = view[connection.send(view) :]


def _read_message(connection: socket.socket) -> Optional[Tuple[str, memoryview]]:
    """The next message, or None if the peer closed the connection between two messages."""
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
    """`count` bytes, or None if the peer closed the connection before the first one."""
    # A bytearray is filled with zeros first. In that time, 28 to 32 ms for 32 MiB on a slow machine, a link of 2 Gbit/s
    # fills the socket's buffer (16 ms) and stops.
    view = memoryview(numpy.empty(count, numpy.uint8).data)
    received = 0
    while received < count:
        # The kernel collects all of it: fewer wake-ups, which a throttled receiver would pay for.
        step = connection.recv_into(view[received:], 0, socket.MSG_WAITALL)
        if step == 0:
            if received == 0:
                return None
            raise OSError("the peer closed the connection within a message")
        received += step
    return view
