"""Messages between workers over TCP: what the profiler times is what training sends through.

A worker opens one `Mailbox` and one `Connection` per peer. A message is a key and bytes; it is received in the
background as soon as it arrives, whatever its owner is computing, and waits in the mailbox until it is taken by its
key.
Only the standard library is used. Peers are trusted: as with Ray's own traffic, keep the ports inside the cluster.

Wire format, all integers little-endian: key length (u32), payload length (u64), key (UTF-8), payload.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Any, Dict, List, Optional, Tuple

from hwaware.errors import MeasurementError

Address = Tuple[str, int]

# A format, not a struct.Struct: the profiler ships this module by value to workers, and a Struct cannot be pickled.
_HEADER = "<IQ"
_HEADER_BYTES = struct.calcsize(_HEADER)
# A sender that is throttled to a fifth of a core pauses for up to 4 ms at a time (quota 1 ms); at 1.6 Gbit/s that is
# 0.8 MB, which the socket buffers must hold so that the link does not run dry.
_SOCKET_BUFFER_BYTES = 4 << 20
_LONGEST_KEY_BYTES = 1 << 16
# A message of this key ends every wait of its receiver; the payload says why.
FAILURE_KEY = "!failure"


class Mailbox:
    """Receives messages in the background and hands them out by key.

    Args:
        host: Local address to listen on; every local address if left out.
    """

    def __init__(self, host: str = "") -> None:
        self._listener = socket.create_server((host, 0), backlog=128)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
        self._changed = threading.Condition()
        self._messages: Dict[str, bytearray] = {}
        self._connections: List[socket.socket] = []
        self._failure: Optional[str] = None
        threading.Thread(target=self._accept, name="hwaware-mailbox", daemon=True).start()

    @property
    def port(self) -> int:
        """The TCP port that peers connect to."""
        return int(self._listener.getsockname()[1])

    def take(self, key: str, timeout_s: float) -> bytearray:
        """Wait for the message with that key and remove it.

        Raises:
            MeasurementError: It did not arrive within `timeout_s`, a peer's connection broke off within a message, or a
                peer said that it failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: key in self._messages or self._failure is not None, timeout_s)
            if key in self._messages:
                return self._messages.pop(key)
            raise MeasurementError(
                self._failure or f"Message {key!r} did not arrive within {timeout_s:g} s.",
                "check that the sending worker is alive and that its host reaches this one.",
            )

    def pending(self) -> int:
        """Messages that have arrived and were not taken yet."""
        with self._changed:
            return len(self._messages)

    def close(self) -> None:
        """Stop receiving; what has not been taken is lost."""
        with contextlib.suppress(OSError):  # not connected: shutdown wakes accept() where the system allows it
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._changed:
            connections, self._connections = self._connections, []
        for connection in connections:
            with contextlib.suppress(OSError):  # the peer may have closed it already
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._changed:
                self._connections.append(connection)
            threading.Thread(target=self._receive, args=(connection,), name="hwaware-receive", daemon=True).start()

    def _receive(self, connection: socket.socket) -> None:
        try:
            while True:
                message = _read_message(connection)
                if message is None:
                    return
                with self._changed:
                    if message[0] == FAILURE_KEY:
                        self._failure = message[1].decode()
                    else:
                        self._messages[message[0]] = message[1]
                    self._changed.notify_all()
        except OSError as error:
            with self._changed:
                if connection in self._connections:  # otherwise close() ended it on purpose
                    self._failure = f"A peer's connection broke off: {error}."
                    self._changed.notify_all()


class Connection:
    """Sends messages to one mailbox, in order.

    Args:
        address: Host and port of the mailbox.
        timeout_s: Limit for connecting, and for the peer to make room for more data.

    Raises:
        MeasurementError: Nobody answers at `address`.
    """

    def __init__(self, address: Address, timeout_s: float = 60.0) -> None:
        self._address = address
        self._lock = threading.Lock()
        try:
            self._socket = socket.create_connection(address, timeout=timeout_s)
        except OSError as error:
            raise MeasurementError(
                f"No worker answers at {address[0]}:{address[1]}: {error}.",
                "check that the worker is alive and that the network lets hosts reach each other on any port.",
            ) from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)

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
                _send_all(self._socket, memoryview(struct.pack(_HEADER, len(name), len(view)) + name))
                _send_all(self._socket, view)
            except OSError as error:
                raise MeasurementError(
                    f"Message {key!r} could not be sent to {self._address[0]}:{self._address[1]}: {error}.",
                    "check that the receiving worker is alive.",
                ) from error

    def close(self) -> None:
        """Close the connection; what was sent still arrives."""
        self._socket.close()


def _send_all(connection: socket.socket, view: memoryview) -> None:
    """Like `socket.sendall`, but the limit is on each wait for room, not on the whole message, however long it is."""
    while view:
        view = view[connection.send(view) :]


def _read_message(connection: socket.socket) -> Optional[Tuple[str, bytearray]]:
    """The next message, or None if the peer closed the connection between two messages."""
    header = _read_exactly(connection, _HEADER_BYTES)
    if header is None:
        return None
    key_bytes, payload_bytes = struct.unpack(_HEADER, header)
    if key_bytes > _LONGEST_KEY_BYTES:
        raise OSError(f"a key of {key_bytes} bytes: the peer does not speak this protocol")
    key = _read_exactly(connection, key_bytes)
    payload = _read_exactly(connection, payload_bytes)
    if key is None or payload is None:
        raise OSError("the peer closed the connection within a message")
    return key.decode(), payload


def _read_exactly(connection: socket.socket, count: int) -> Optional[bytearray]:
    """`count` bytes, or None if the peer closed the connection before the first one."""
    data = bytearray(count)
    view = memoryview(data)
    received = 0
    while received < count:
        step = connection.recv_into(view[received:])
        if step == 0:
            if received == 0:
                return None
            raise OSError("the peer closed the connection within a message")
        received += step
    return data
