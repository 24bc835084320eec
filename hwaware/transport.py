"""Send messages between workers over TCP; training uses the same transport that the profiler times.

A worker opens one `Mailbox`, and one `Connection` per peer. A message is a key and bytes. The mailbox receives it in
the background while its owner computes. The owner takes it by its key.

Both ends of a connection first prove that they belong to one program: see `hwaware.greeting`. Until then, nothing that
a caller sends counts, and little of it is kept. If the program encrypts, TLS's handshake comes before the greeting.

Wire format after the greeting, all integers little-endian: key length (u32), payload length (u64), key (UTF-8),
payload. If the program uses digests, the message's digest follows.

Where both ends have a wire (`hwaware.ucx`), a long payload travels there. The highest bit of its length then is set.
In the payload's place stands its tag on the wire (u64). So order, bounds and failures are those of all messages.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import secrets
import select
import socket
import ssl
import struct
import sys
import threading
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy

from hwaware import greeting
from hwaware.errors import MeasurementError
from hwaware.greeting import Credentials, Seal

Address = Tuple[str, int]

# A format, not a struct.Struct: the profiler ships this module to workers by value, and no Struct can be pickled.
_HEADER = "<IQ"
_HEADER_BYTES = struct.calcsize(_HEADER)
_TAG, _OFFER_LENGTH = "<Q", "<I"
_ON_WIRE = 1 << 63
_LONGEST_OFFER_BYTES = 1 << 16
# A sender with a fifth of a core pauses for up to 16 ms at a time (quota 4 ms). At 1.6 Gbit/s the socket buffers must
# hold 3.2 MB for that time, or the link runs dry.
_SOCKET_BUFFER_BYTES = 4 << 20
# ssl limits the time for a whole write instead of each wait for room.
_WRITE_BYTES = 1 << 18
# ssl reads less than 2 GiB at once.
_READ_BYTES = 1 << 30
# So many bytes of a long message wake its receiver.
_RARE_BYTES = 1 << 19
_LONGEST_KEY_BYTES = 1 << 16
# No array of a training step is longer. A corrupt header could otherwise ask for any amount of memory.
_LONGEST_PAYLOAD_BYTES = 1 << 38
_ALIVE_FIX = "check that the sending worker is alive and that its host reaches this one."
# Messages with these keys are for the mailbox itself. A failure ends every wait of its receiver, and its payload says
# why. A farewell announces the end of the connection. A question for the mailbox's wire is answered at once.
FAILURE_KEY, _BYE_KEY, _WIRE_KEY = "!failure", "!bye", "!wire"
LONGEST_FAILURE_BYTES = 1 << 16
# The objects that hold an untaken message take about this much beside its payload.
_MESSAGE_BYTES = 1024
# An owner that waits while its mailbox is full of other messages gets the awaited one within this time, or never.
_FULL_LIMIT_S = 30.0
# A peer on a vanished host stays silent. After this silence the system probes it, so often, at this interval.
_SILENCE_S, _PROBE_INTERVAL_S, _PROBES = 5, 3, 4
# The same for a connection that is asked often; the peer's system answers, however busy the peer is.
_OFTEN = (1, 1, 3)
# A greeting takes two round trips, and milliseconds of a busy worker.
_GREETING_LIMIT_S = 10.0
# A program's own workers are rarely more that greet at once, and a process may often have only 1,024 files.
_MOST_STRANGERS = 64
# A mailbox accepts so much later for each caller that proved nothing: a flood of strangers takes little from training.
_STRANGER_PAUSE_S = 0.005
# After an error of accept(), such as too many open files.
_ACCEPT_PAUSE_S = 0.1
# These errors of accept() mean that the listener itself is unusable; all others pass.
_UNUSABLE = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)
_SHORTER = "the file is shorter"
# RFC 8622's code point 1, above the two bits of congestion notification; and TC_PRIO_FILLER (linux/pkt_sched.h).
_LOWER_EFFORT, _FILLER = 1 << 2, 1
# Linux's limit of a socket's rate (asm-generic/socket.h) [bytes/s], its value for no limit, and the least that is set.
_SO_MAX_PACING_RATE, _UNLIMITED, _SLOWEST = 47, (1 << 32) - 1, 1_000_000
# A mailbox under attack may drop a caller of its own program, too; the caller comes again after these pauses.
_AGAIN_S = (0.05, 0.1, 0.2, 0.4, 0.8)


class PeerFailedError(MeasurementError):
    """A peer failed, so an awaited message will not come; the error carries the peer's own message."""


class UnexpectedMessageError(Exception):
    """A peer of this program sent a message that its receiver cannot expect; the text says why."""


class Sender:
    """The other end of a mailbox's connection.

    Attributes:
        socket: The connection.
        address: Its host's address.
        name: Its name, for errors.
        seal: For the digests of its messages, if they carry any.
        said_bye: True once it has announced the end of the connection.
        lying: Number of its messages that the owner has not taken.
        arriving_bytes: Memory that is set aside for the message that it is sending.
    """

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.socket = connection
        self.address = address
        self.name = f"the worker at {address}"
        self.seal: Optional[Seal] = None
        self.said_bye = False
        self.lying = 0
        self.arriving_bytes = 0


class Mailbox:
    """A receiver of messages, which collects them in the background and hands them out by key.

    Args:
        host: Local address to listen on.
        credentials: Callers must prove that they have the same.
        bound: Most messages of one connection that may lie here. The mailbox then reads no more from it, so its sender
            waits. The bound does not hold while the owner waits (in `take` or `patiently`): the awaited message may
            stand behind others.
        peers_stay: True if a peer that ends its connection without a farewell has failed, which ends every wait here.
        on_arrival: Function to call with the key and the time (`time.monotonic`) of each arrived message.
        ports: Ports to listen on; the mailbox takes the first free one, and 0 is any.
        most_bytes: Most memory that untaken messages may take; half of this machine's if left out.
        strict: Keys with this prefix keep to the bound while the owner waits for other messages; None if none do. Their
            sender then gets no room for more, but the owner may wait for nothing behind these messages.

    Attributes:
        admit: Function to call before the mailbox reads a payload, with the key, the payload's length and the sender.
            It may raise `UnexpectedMessageError`, which ends every wait here.
        wire: End of `hwaware.ucx` that collects long payloads; None if they come on their connections.

    Raises:
        MeasurementError: None of the ports is free, or the machine does not have the address.
    """

    def __init__(
        self,
        host: str,
        credentials: Credentials,
        bound: Optional[int] = None,
        peers_stay: bool = False,
        on_arrival: Optional[Callable[[str, float], None]] = None,
        ports: Sequence[int] = (0,),
        most_bytes: Optional[int] = None,
        strict: Optional[str] = None,
    ) -> None:
        self._listener = _listen(host, ports)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
        self._address = (host, self.port)
        self._credentials = credentials
        self._bound = bound
        self._peers_stay = peers_stay
        self.on_arrival = on_arrival
        self.admit: Optional[Callable[[str, int, Sender], None]] = None
        self.wire: Any = None
        self._most_bytes = _half_of_memory() if most_bytes is None else most_bytes
        self._changed = threading.Condition()
        self._messages: Dict[str, Tuple[Any, Sender]] = {}
        self._lying_bytes = 0
        self._senders: List[Sender] = []
        self._strangers: List[Sender] = []
        self._refused = 0
        self._failure: Optional[str] = None
        self._waiting = 0
        self._strict = strict
        self._awaited: Optional[str] = None
        self._closed = False
        threading.Thread(target=self._accept, name="hwaware-mailbox", daemon=True).start()

    @property
    def port(self) -> int:
        """Return the TCP port that peers connect to."""
        return int(self._listener.getsockname()[1])

    def take(self, key: str, timeout_s: float, nbytes: Optional[int] = None) -> Any:
        """Wait for the message with this key, remove it and return its payload: memory of the wire, or a memoryview.

        Args:
            key: Name of the message.
            timeout_s: Limit for its arrival.
            nbytes: Expected length of the payload, if the owner knows it.

        Raises:
            MeasurementError: The message did not arrive within `timeout_s`.
            PeerFailedError: A peer reported a failure, its connection broke off, or the length is another.
        """
        with self.patiently(), self._changed:
            if key not in self._messages:
                self._awaited = key
                self._changed.notify_all()
                self._changed.wait_for(lambda: key in self._messages or self._failure is not None, timeout_s)
                self._awaited = None
            if key in self._messages:
                payload, sender = self._messages.pop(key)
                self._release(sender, len(payload))
                if nbytes is not None and len(payload) != nbytes:
                    raise PeerFailedError(
                        f"Message {key!r} of {sender.name} has {len(payload)} bytes, expected {nbytes}.", _ALIVE_FIX
                    )
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

    def end_waits(self, sentence: str) -> None:
        """End every wait here, now and later, as a peer's failure does."""
        with self._changed:
            self._failure = self._failure or sentence
            self._changed.notify_all()

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
            # Only its own thread closes a socket: it might else go on to read from the next socket with that number.
            for sender in (*self._senders, *self._strangers):
                _hang_up(sender.socket)
            self._senders, self._strangers = [], []
            self._changed.notify_all()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        except OSError:  # some systems refuse it on a listener
            self._listener.close()

    # Strangers

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    connection, address = self._listener.accept()
                except OSError as error:
                    if not self._goes_on(error):
                        return
                    continue
                if not self._meet(connection, address[0]):
                    return
                time.sleep(self._take_pause_s())

    def _goes_on(self, error: OSError) -> bool:
        """Make room for the next caller after an error of accept(); return False if the listener has ended."""
        with self._changed:
            if self._closed:
                return False
            if error.errno in _UNUSABLE:
                self._failure = self._failure or f"The mailbox takes no more connections ({error})."
                self._changed.notify_all()
                return False
            self._drop_one_stranger()  # it may be the one with too many files
        time.sleep(_ACCEPT_PAUSE_S)
        return True

    def _take_pause_s(self) -> float:
        with self._changed:
            refused, self._refused = self._refused, 0
        return min(refused, _MOST_STRANGERS) * _STRANGER_PAUSE_S

    def _meet(self, connection: socket.socket, address: str) -> bool:
        """Let a caller greet in the background; return False if the mailbox has been closed."""
        sender = Sender(connection, address)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _keep_asking(connection)
            with self._changed:
                if self._closed:  # close() came while this one connected
                    connection.close()
                    return False
                self._strangers.append(sender)
                if len(self._strangers) > _MOST_STRANGERS:
                    self._drop_one_stranger()
            threading.Thread(target=self._serve, args=(sender,), name="hwaware-receive", daemon=True).start()
        except (OSError, RuntimeError):  # it has gone already; or the system starts no more threads
            self._forget(sender)
        return True

    def _drop_one_stranger(self) -> None:
        """End the oldest of the host that has most: who greets at once stays, whatever the others do."""
        if self._strangers:
            counts = collections.Counter(stranger.address for stranger in self._strangers)
            most = max(counts.values())
            dropped = next(stranger for stranger in self._strangers if counts[stranger.address] == most)
            self._strangers.remove(dropped)
            _hang_up(dropped.socket)  # its own thread closes it

    def _serve(self, sender: Sender) -> None:
        try:
            if self._let_in(sender):
                self._receive(sender)
        finally:
            self._forget(sender)

    def _let_in(self, sender: Sender) -> bool:
        """Return True once the caller has proved itself; nothing that others say counts."""
        try:
            if self._credentials.encryption is not None:
                with self._changed:  # who drops the caller finds its connection
                    sender.socket = wrapped = self._credentials.encryption.wrapped(sender.socket, True)
                _shake_hands(wrapped, _GREETING_LIMIT_S)
            caller = greeting.hear(sender.socket, self._credentials, self._address, _GREETING_LIMIT_S)
            with self._changed:
                if sender not in self._strangers:  # dropped, or the mailbox was closed
                    return False
                self._strangers.remove(sender)
                self._senders.append(sender)
            sender.name, sender.seal = caller.name or sender.name, caller.seal
            sender.socket.sendall(caller.answer)
            sender.socket.settimeout(None)
            return True
        except OSError:  # a port scan, a health check, another program
            with self._changed:
                self._refused += 1
            return False

    def _forget(self, sender: Sender) -> None:
        with self._changed:
            for known in (self._senders, self._strangers):
                if sender in known:
                    known.remove(sender)
            self._lying_bytes -= sender.arriving_bytes
            sender.arriving_bytes = 0
        sender.socket.close()

    # Peers

    def _receive(self, sender: Sender) -> None:
        try:
            while True:
                header = _read_header(sender.socket)
                if header is None:
                    if self._peers_stay and not sender.said_bye:
                        self._fail(sender, f"Lost {sender.name}: its process ended.")
                    return
                key, nbytes, is_on_wire = header
                if key == _WIRE_KEY and not nbytes:
                    offer = self.wire.offer if self.wire is not None else b""
                    sender.socket.sendall(struct.pack(_OFFER_LENGTH, len(offer)) + offer)
                    continue
                self._require_expected(sender, key, nbytes)
                self._set_aside(sender, key, nbytes)
                payload = self._collected(sender, key, nbytes) if is_on_wire else _read_payload(sender.socket, nbytes)
                if sender.seal is not None:
                    self._require_digest(sender, sender.seal, key, payload)
                self._sort(sender, key, payload)
        except UnexpectedMessageError as error:
            self._fail(sender, f"Unexpected message of {sender.name}: {error}.")
            self._drop_messages(sender)
        except (OSError, MemoryError, ValueError) as error:  # ValueError: a key that is no text
            self._fail(sender, f"Lost {sender.name}: its connection broke off ({error}).")
        except Exception as error:
            self._fail(sender, f"Lost {sender.name}: its messages cannot be taken ({type(error).__name__}: {error}).")
            raise

    def _require_expected(self, sender: Sender, key: str, nbytes: int) -> None:
        longest = {FAILURE_KEY: LONGEST_FAILURE_BYTES, _BYE_KEY: 0}.get(key)
        if longest is not None:
            if nbytes > longest:
                raise UnexpectedMessageError(f"{key} has {nbytes} bytes, expected at most {longest}")
        elif key in self._messages:
            raise UnexpectedMessageError(f"{key!r} came twice")
        elif self.admit is not None:
            self.admit(key, nbytes, sender)

    def _set_aside(self, sender: Sender, key: str, nbytes: int) -> None:
        """Wait for room for a message. While the owner computes, only the sender's own wait has a limit."""
        if key in (FAILURE_KEY, _BYE_KEY):
            return
        needed = nbytes + _MESSAGE_BYTES

        def fits() -> bool:
            return self._lying_bytes + needed <= self._most_bytes

        def is_free() -> bool:
            if self._bound is None or sender.lying < self._bound:
                return True
            if self._strict is None or not key.startswith(self._strict):
                return self._waiting > 0
            return self._awaited is not None and self._awaited.startswith(self._strict)

        with self._changed:
            while not self._changed.wait_for(lambda: self._closed or (fits() and is_free()), _FULL_LIMIT_S):
                if self._waiting > 0 and not fits():
                    raise UnexpectedMessageError(
                        f"{key!r} has {nbytes} bytes, and {self._lying_bytes} of the {self._most_bytes} bytes for "
                        "untaken messages are in use"
                    )
            if self._closed:
                raise OSError("the mailbox was closed")
            sender.arriving_bytes = needed
            self._lying_bytes += needed

    def _collected(self, sender: Sender, key: str, nbytes: int) -> Any:
        """Return a payload that travels on the wire; until it is whole, its sender says nothing here."""
        if self.wire is None or key in (FAILURE_KEY, _BYE_KEY):
            raise UnexpectedMessageError(f"{key!r} travels on a wire that this worker does not offer")
        (tag,) = struct.unpack(_TAG, _read_payload(sender.socket, struct.calcsize(_TAG)))
        return self.wire.receive(key, nbytes, tag, lambda: _cause_of_end(sender.socket))

    def _require_digest(self, sender: Sender, seal: Seal, key: str, payload: memoryview) -> None:
        found = _read_payload(sender.socket, greeting.PROOF_BYTES)
        if not seal.is_right(found, _head(key.encode(), len(payload)), payload):
            raise UnexpectedMessageError(f"the digest of {key!r} does not fit: somebody changed it on its way")

    def _sort(self, sender: Sender, key: str, payload: Any) -> None:
        if self.on_arrival is not None:
            self.on_arrival(key, time.monotonic())
        with self._changed:
            if key == FAILURE_KEY:
                self._failure = self._failure or str(payload, "utf-8", "replace")
            elif key == _BYE_KEY:
                sender.said_bye = True
            else:
                self._messages[key] = payload, sender
                sender.arriving_bytes = 0
                sender.lying += 1
            self._changed.notify_all()

    def _release(self, sender: Sender, nbytes: int) -> None:
        sender.lying -= 1
        self._lying_bytes -= nbytes + _MESSAGE_BYTES
        self._changed.notify_all()

    def _drop_messages(self, sender: Sender) -> None:
        with self._changed:
            for key in [key for key, (_, source) in self._messages.items() if source is sender]:
                self._release(sender, len(self._messages.pop(key)[0]))

    def _fail(self, sender: Sender, sentence: str) -> None:
        with self._changed:
            if sender in self._senders:  # otherwise close() ended the connection on purpose
                self._failure = self._failure or sentence
                self._changed.notify_all()


class Connection:
    """A sender of messages to one mailbox, in order.

    Args:
        address: Host and port of the mailbox.
        credentials: The mailbox must prove that it has the same.
        timeout_s: Limit for connecting and greeting, and for the peer to make room for more data.
        name: Name of this end in the peer's errors.
        room_s: Limit for the peer to make room, if it differs from `timeout_s`.
        wire: End of `hwaware.ucx` for long payloads, if the mailbox has one too.

    Raises:
        MeasurementError: No program answers at `address`, or one that does not belong to this program.
    """

    def __init__(
        self,
        address: Address,
        credentials: Credentials,
        timeout_s: float = 60.0,
        name: str = "",
        room_s: Optional[float] = None,
        wire: Any = None,
    ) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._ending = threading.Lock()  # `break_off` cannot wait for a message that hangs, whose thread has the other
        self._rate = _UNLIMITED
        self._lost: Optional[str] = None
        self._socket, self._seal = _connected(address, credentials, name, timeout_s)
        self._room_s = timeout_s if room_s is None else room_s
        self._socket.settimeout(self._room_s)
        self._wire = wire
        self._endpoint: Optional[int] = None
        if wire is not None:
            with self._told(_WIRE_KEY):
                self._endpoint = self._found_endpoint()

    def _found_endpoint(self) -> Optional[int]:
        _send_all(self._socket, (_head(_WIRE_KEY.encode(), 0),))
        (length,) = struct.unpack(_OFFER_LENGTH, _read_payload(self._socket, struct.calcsize(_OFFER_LENGTH)))
        if length > _LONGEST_OFFER_BYTES:
            raise OSError(f"an offer of {length} bytes: the peer does not speak this protocol")
        endpoint: Optional[int] = None
        if length:
            endpoint = self._wire.connected(bytes(_read_payload(self._socket, length)))
        return endpoint

    def takes(self, nbytes: int) -> bool:
        """Return True if a payload of that length travels on the wire, where it may come from a device's memory."""
        return self._endpoint is not None and nbytes >= int(self._wire.least_bytes)

    def send(self, key: str, payload: Any) -> None:
        """Send a message, and return once the system has taken it.

        Args:
            key: Name of the message, by which the peer takes it.
            payload: Any object with a contiguous buffer; or one of JAX's arrays, if the wire takes its length.

        Raises:
            MeasurementError: The connection broke, or the peer took no data for `timeout_s` (or `room_s`).
        """
        if self._endpoint is not None and self.takes(nbytes := _length(payload)):
            return self._send_on_wire(key, payload, nbytes)
        view = memoryview(payload)
        view = view.cast("B") if view.nbytes else memoryview(b"")  # an empty array cannot be cast
        head = _head(key.encode(), len(view))
        with self._lock, self._told(key):
            digest = () if self._seal is None else (memoryview(self._seal.digest(head, view)),)
            _send_all(self._socket, (head, view, *digest))
        return None

    def _send_on_wire(self, key: str, payload: Any, nbytes: int) -> None:
        tag = secrets.randbits(64)
        with self._lock, self._told(key):
            head = _head(key.encode(), nbytes | _ON_WIRE)
            _send_all(self._socket, (head, memoryview(struct.pack(_TAG, tag))))
            self._wire.send(self._endpoint, tag, payload, lambda: _cause_of_end(self._socket), self._room_s)

    def send_file(self, key: str, file: Any, start: int, nbytes: int) -> None:
        """Send a part of a file as `send` does; a plain connection needs no copy of it.

        Until the peer has the message, nobody may change the part.

        Raises:
            MeasurementError: As for `send`, or the file is shorter.
        """
        if self._seal is not None or isinstance(self._socket, ssl.SSLSocket):
            with self._told(key):
                read_part(file, start, memoryview(payload := bytearray(nbytes)))
            return self.send(key, payload)
        with self._lock, self._told(key):
            _send_all(self._socket, (_head(key.encode(), nbytes),))
            if nbytes and self._socket.sendfile(file, start, nbytes) < nbytes:
                raise OSError(_SHORTER)
        return None

    @contextlib.contextmanager
    def _told(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.break_off()  # the mailbox would take whatever comes next for the rest of this message
            raise MeasurementError(
                f"Message {key!r} could not be sent to {self._address[0]}:{self._address[1]}: {error}.",
                "check that the receiving worker is alive.",
            ) from error

    def give_way(self) -> None:
        """Let the messages of other connections pass first, where queues of the system or the network tell them apart.

        Linux's default queue does, and networks that know the class "lower effort" (RFC 8622).
        """
        is_ipv6 = self._socket.family == socket.AF_INET6
        level, name = (socket.IPPROTO_IPV6, "IPV6_TCLASS") if is_ipv6 else (socket.IPPROTO_IP, "IP_TOS")
        # In this order: the class of service sets a priority, too. Only Linux has the last option.
        for of, option, value in ((level, name, _LOWER_EFFORT), (socket.SOL_SOCKET, "SO_PRIORITY", _FILLER)):
            if hasattr(socket, option):
                self._socket.setsockopt(of, getattr(socket, option), value)

    def pace(self, bytes_per_s: Optional[float]) -> None:
        """Send no faster than this from now on; None for no limit. Only Linux can limit the rate of a connection."""
        rate = _UNLIMITED if bytes_per_s is None else max(_SLOWEST, min(_UNLIMITED, int(bytes_per_s)))
        if rate != self._rate and sys.platform == "linux":
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("I", rate))
            self._rate = rate

    def ask_often(self) -> None:
        """Notice a vanished host within 4 s instead of 17 s."""
        _keep_asking(self._socket, *_OFTEN)

    def break_off(self) -> None:
        """End the connection in the middle of a message, from any thread; what is being sent fails."""
        with self._ending:
            _hang_up(self._socket)

    def close(self) -> None:
        """Announce the end and close the connection; sent messages still arrive."""
        with contextlib.suppress(MeasurementError):  # a peer that has gone needs no farewell
            self.send(_BYE_KEY, b"")
        with self._lock, self._ending:  # the system gives the number of a closed socket to the next one
            self._socket.close()
        if self._endpoint is not None:
            self._wire.disconnect(self._endpoint)

    def is_lost(self) -> Optional[str]:
        """Return the cause of the peer's loss, or None while it is there.

        A mailbox sends nothing after its greeting, so readable data means the end of its connection.
        """
        if self._lost is None:  # the system reports an error only once
            self._lost = self._find_loss()
        return self._lost

    def _find_loss(self) -> Optional[str]:
        with self._lock:
            limit_s = self._socket.gettimeout()
            try:
                self._socket.settimeout(0.0)
                try:
                    return None if self._socket.recv(1) else "its process ended"
                finally:
                    self._socket.settimeout(limit_s)
            except (BlockingIOError, ssl.SSLWantReadError):
                return None
            except OSError as error:
                return f"it cannot be reached ({error})"


def _connected(
    address: Address, credentials: Credentials, name: str, timeout_s: float
) -> Tuple[socket.socket, Optional[Seal]]:
    """Connect and greet; come again where the mailbox hung up, as one that strangers besiege may do."""
    end_s = time.monotonic() + timeout_s

    def left_s() -> float:
        return max(0.001, end_s - time.monotonic())

    for pause_s in (*_AGAIN_S, None):
        try:
            connection = socket.create_connection(address, timeout=left_s())
        except OSError as error:
            raise MeasurementError(
                f"No worker answers at {address[0]}:{address[1]}: {error}.",
                "check that the worker is alive and that the network lets hosts reach each other on any port.",
            ) from error
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
            _keep_asking(connection)
            if credentials.encryption is not None:
                connection = wrapped = credentials.encryption.wrapped(connection, False)
                _shake_hands(wrapped, left_s())
            return connection, greeting.introduce(connection, credentials, address, name, left_s())
        except OSError as error:
            connection.close()
            if not isinstance(error, ConnectionError) or pause_s is None or time.monotonic() + pause_s > end_s:
                raise MeasurementError(
                    f"The program at {address[0]}:{address[1]} did not greet as a worker of this program: {error}.",
                    "check that the worker is alive, and that no other program has taken its port.",
                ) from error
        time.sleep(pause_s)
    raise AssertionError("the last pause is None")


def _shake_hands(connection: ssl.SSLSocket, limit_s: float) -> None:
    connection.settimeout(limit_s)
    try:
        connection.do_handshake()
    except ssl.SSLEOFError as error:
        raise ConnectionResetError("the other end closed the connection within the handshake of TLS") from error


def _cause_of_end(connection: socket.socket) -> Optional[str]:
    """Return why the other end says nothing more; None while it may. Reads nothing."""
    poller = select.poll()
    try:
        poller.register(connection, select.POLLIN)
        ended = bool(poller.poll(0)) and not connection.recv(1, socket.MSG_PEEK)
    except (OSError, ValueError) as error:  # ValueError: this end was closed
        return str(error)
    return "the peer closed the connection within a message" if ended else None


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the peer may have closed it already
        # Not that of ssl, after which an encrypted connection would be read as a plain one.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _half_of_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _listen(host: str, ports: Sequence[int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports:
        try:
            return socket.create_server((host, port), family=family, backlog=512)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise MeasurementError(
                    f"This host does not have the address {host}, by which the cluster knows it: {error.strerror}.",
                    "start Ray on this host with an address of its own (ray start --node-ip-address=...).",
                ) from error
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):  # EACCES: ports below 1024 need privileges
                raise
            refused = error
    raise MeasurementError(
        f"This worker cannot listen on any of the ports {ports[0]} to {ports[-1]}: {refused.strerror}.",
        "declare more ports (HWAWARE_DEVICES), or end the programs that listen there (ss -tlnp).",
    )


def _keep_asking(
    connection: socket.socket, silence_s: int = _SILENCE_S, interval_s: int = _PROBE_INTERVAL_S, probes: int = _PROBES
) -> None:
    """Let the system probe a silent peer, so that a vanished host ends the connection in seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", silence_s),
        ("TCP_KEEPINTVL", interval_s),
        ("TCP_KEEPCNT", probes),
    ):
        if hasattr(socket, option):  # macOS before Python 3.10 lacks these
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _length(payload: Any) -> int:
    return int(payload.nbytes) if hasattr(payload, "nbytes") else len(payload)


def _head(key: bytes, payload_bytes: int) -> memoryview:
    return memoryview(struct.pack(_HEADER, len(key), payload_bytes) + key)


def read_part(file: Any, start: int, part: memoryview) -> None:
    """Fill `part` from a file, which may serve other threads meanwhile.

    Raises:
        OSError: The file is shorter.
    """
    while part:
        count = os.preadv(file.fileno(), [part], start)
        if not count:
            raise OSError(_SHORTER)
        part, start = part[count:], start + count


def _send_all(connection: socket.socket, parts: Sequence[memoryview]) -> None:
    """Send all data as `socket.sendall` does, but limit each wait for room instead of the whole message."""
    if isinstance(connection, ssl.SSLSocket):
        for part in parts:
            for start in range(0, len(part), _WRITE_BYTES):
                connection.sendall(part[start : start + _WRITE_BYTES])
        return
    sent = connection.sendmsg(parts)
    for part in parts:
        left, sent = part[sent:], max(0, sent - len(part))
        while left:
            left = left[connection.send(left) :]


def _read_header(connection: socket.socket) -> Optional[Tuple[str, int, bool]]:
    """Read the next message's key, the length of its payload, and whether that travels on the wire.

    Returns:
        None if the peer closed the connection.
    """
    header = _read_exactly(connection, _HEADER_BYTES)
    if header is None:
        return None
    key_bytes, payload_bytes = struct.unpack(_HEADER, header)
    is_on_wire, payload_bytes = bool(payload_bytes & _ON_WIRE), payload_bytes & ~_ON_WIRE
    if key_bytes > _LONGEST_KEY_BYTES or payload_bytes > _LONGEST_PAYLOAD_BYTES:
        raise OSError(
            f"a key of {key_bytes} bytes, a payload of {payload_bytes}: the peer does not speak this protocol"
        )
    return str(_read_payload(connection, key_bytes), "utf-8"), payload_bytes, is_on_wire


def _read_payload(connection: socket.socket, count: int) -> memoryview:
    payload = _read_exactly(connection, count)
    if payload is None:
        raise OSError("the peer closed the connection within a message")
    return payload


def _read_exactly(connection: socket.socket, count: int) -> Optional[memoryview]:
    """Read `count` bytes; return None if the peer closed the connection before the first one."""
    # Not a bytearray, which Python fills with zeros: that took 28 to 32 ms for 32 MiB on a slow machine. A link of
    # 2 Gbit/s fills the socket's buffer in 16 ms and stops.
    view = memoryview(numpy.empty(count, numpy.uint8).data)
    # MSG_WAITALL lets the kernel collect all bytes: each wake-up would cost a throttled receiver time. TLS takes none.
    flags = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL
    rests = _RARE_BYTES if flags and count > 2 * _RARE_BYTES and hasattr(socket, "SO_RCVLOWAT") else 0
    if rests:
        # Else Linux wakes the thread for each packet, all the same: 15 ms instead of 11 ms of a core for 20 MB.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, rests)
    received = 0
    while received < count:
        left = count - received
        if rests and left <= rests:  # the last bytes are fewer, and have to wake it
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            rests = 0
        step = connection.recv_into(view[received:], min(left - rests, _READ_BYTES), flags)
        if step == 0:
            if received == 0:
                return None
            raise OSError("the peer closed the connection within a message")
        received += step
    return view
