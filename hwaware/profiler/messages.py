"""Time messages between two workers through the transport that training uses, and check every byte.

Only the source's clock counts, so clocks need not agree. The source sends n bytes, and the target answers with one
byte. If the answer arrives after T(n), a message of n bytes takes T(n) - T(1) / 2 one way. After the answer, untimed,
the target compares the message with its expected content and reports the result.
"""

from __future__ import annotations

import contextlib
import importlib
import statistics
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import numpy

from hwaware.greeting import Credentials
from hwaware.profiler.clock import Watch, read
from hwaware.profiler.policy import KIB, MIB, Policy
from hwaware.profiler.rings import Group, time_collective
from hwaware.transport import Address, Connection, Mailbox, Sender, UnexpectedMessageError

_TINY = b"\0"
# In a message of this size, the burst of a rate limiter (64 KiB and more) does not matter.
_STEADY_BYTES = 4 * MIB
_TINY_WARM_UPS = 5
# The time of a shorter message shows the latency and the machine's other work, not the rate.
_TELLING_BYTES = 64 * KIB
# Opening the congestion window takes some round trips, which hardly matter to a message that takes this long.
_WARM_UP_S = 0.1
# If the interquartile range of a size's times is a larger part of their median, the source sends more messages.
_SCATTERED = 0.04
_MOST_REPEATS = 40
# A mailbox may hold four messages of 64 MiB at once, more than the longest collective needs. So this is enough.
_MOST_BYTES = 1 << 30
# Ray starts both ends of a timing at about the same time. The first message of the earlier end waits for the other end.
_EARLY_LIMIT_S = 60.0
# 251 is prime, so no power-of-two block of a message repeats, and the check also notices a block in a wrong place.
_PATTERN = bytes(range(251))


def pattern(nbytes: int) -> bytes:
    r"""Return the content of a message of `nbytes` bytes.

    Example:
        >>> pattern(253)[-3:]
        b'\xfa\x00\x01'
    """
    return (_PATTERN * (nbytes // len(_PATTERN) + 1))[:nbytes]


def first_difference(found: Any, expected: bytes) -> Optional[int]:
    """Return the index of the first byte that differs, or None if all are equal.

    Example:
        >>> first_difference(b"abXd", b"abcd"), first_difference(b"abcd", b"abcd")
        (2, None)
    """
    length = min(len(found), len(expected))
    for start in range(0, length, MIB):
        parts = [numpy.frombuffer(each, numpy.uint8, min(MIB, length - start), start) for each in (found, expected)]
        differing = numpy.flatnonzero(parts[0] != parts[1])
        if len(differing):
            return start + int(differing[0])
    return None if len(found) == len(expected) else length


class Expected:
    """Admit only messages of an end's current timings, and each message once. Other messages wait at their sender."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._seen: Dict[str, Set[str]] = {}
        self._closed = False

    @contextlib.contextmanager
    def messages_of(self, name: str) -> Iterator[None]:
        """Admit messages of the timing called `name` while the block runs."""
        with self._changed:
            self._seen[name] = set()
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                del self._seen[name]

    def admit(self, key: str, nbytes: int, sender: Sender) -> None:
        """Wait until a message's timing has begun here, then admit the message.

        Raises:
            UnexpectedMessageError: The timing did not begin, or the message came a second time.
        """
        del nbytes, sender  # the mailbox limits the memory
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._name(key) is not None, _EARLY_LIMIT_S)
            name = self._name(key)
            if name is None:
                raise UnexpectedMessageError(f"{key!r} belongs to no timing of this worker")
            if key in self._seen[name]:
                raise UnexpectedMessageError(f"{key!r} came twice")
            self._seen[name].add(key)

    def close(self) -> None:
        """Stop waiting: from now on, refuse messages of unknown timings at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _name(self, key: str) -> Optional[str]:
        return next((name for name in self._seen if key.startswith(f"{name}/")), None)


class LinkEnd:
    """A worker's end of its links, which times messages to other ends and answers theirs.

    Args:
        address: The host's address, at which other ends reach this one.
        secret: Secret of the measurement, which all ends share.

    Attributes:
        wire: End of UCX for long messages; None if they travel on their connections.
        put: Function that puts a long payload where training keeps its payloads, such as a GPU's memory.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self._address = address
        self.wire: Any = None
        self.put: Callable[[bytes], Any] = memoryview
        self._credentials = Credentials(secret, "links")
        self._ports: Sequence[int] = (0,)
        self._opened()

    def _opened(self) -> None:
        self._expected = Expected()
        self._mailbox = Mailbox(self._address, self._credentials, ports=self._ports, most_bytes=_MOST_BYTES)
        self._mailbox.admit = self._expected.admit
        self._mailbox.wire = self.wire

    def use(self, transfers: str, device: Any) -> None:
        """Let long messages travel as they will in training between such devices.

        Args:
            transfers: See `hwaware.runtime_settings`.
            device: The JAX device of this end.

        Raises:
            HwawareError: The setting asks for UCX, which does not run here.
        """
        self.wire, self.put = wire_for(transfers, self._credentials, self._address, device)
        self._mailbox.wire = self.wire

    @property
    def port(self) -> int:
        """Return the TCP port that other ends send to."""
        return self._mailbox.port

    def listen(self, ports: Sequence[int]) -> None:
        """Listen on one of these ports from now on."""
        self._ports = ports
        self.reopen()

    def reopen(self) -> int:
        """Start afresh after a failure: forget all messages, listen on another port, and return this port."""
        mailbox, expected = self._mailbox, self._expected
        self._opened()
        mailbox.close()  # only now, so that the new port differs
        expected.close()
        return self.port

    def close(self) -> None:
        """Stop listening."""
        self._mailbox.close()
        self._expected.close()
        if self.wire is not None:
            self.wire.close()

    def answer(self, name: str, source: Address, limit_s: float) -> int:
        """Answer and check the messages of the timing called `name` until it ends. Return their number.

        Raises:
            MeasurementError: The next message did not arrive within `limit_s`.
        """
        expected = b""
        answered = 0
        with self._connected(name, source, limit_s) as connection:
            while True:
                message = self._mailbox.take(f"{name}/{answered}", limit_s)
                if not len(message):
                    return answered
                connection.send(f"{name}/{answered}/answer", _TINY)
                expected = expected if len(expected) == len(message) else pattern(len(message))
                place = first_difference(numpy.asarray(message), expected)
                connection.send(f"{name}/{answered}/checked", b"" if place is None else str(place).encode())
                answered += 1

    def time_messages(self, name: str, target: Address, policy: Policy, limit_s: float) -> Dict[str, Any]:
        """Time messages of growing size to an end that runs `answer` with the same name.

        Returns:
            "tiny_s": the round trips of one byte. "messages": (bytes, one-way times of all repeats [s]) of each size.
            "corrupt": (bytes, place) of each message that arrived changed. "clock_jumps_s": see `Watch`.

        Raises:
            MeasurementError: The target does not answer within `limit_s`.
        """
        with self._connected(name, target, limit_s) as connection:
            timing = _Timing(name, connection, self._mailbox, limit_s, self.put)
            result = timing.run(policy)
            timing.end()
        return result

    def exchange(
        self, name: str, role: int, target: Address, out_bytes: int, in_bytes: int, count: int, limit_s: float
    ) -> Dict[str, Any]:
        """Send `count` messages to an end that runs `exchange` with the same name and sends as many back.

        Args:
            name: Unique name of the exchange, the same at both ends.
            role: 0 at one end, 1 at the other.
            target: Address of the other end.
            out_bytes: Size of each message to the other end; 0 sends none.
            in_bytes: Size of each message from the other end; 0 expects none.
            count: Number of messages each way.
            limit_s: Limit of each wait [s].

        Returns:
            "seconds": time until the other end had everything, or None if a clock jumped. "corrupt" and
            "clock_jumps_s": as in `time_messages`.

        Raises:
            MeasurementError: The other end did not send in time.
        """
        own, other = f"{name}/{role}", f"{name}/{1 - role}"
        content, expected = pattern(out_bytes), pattern(in_bytes)
        with self._connected(name, target, limit_s) as connection:
            payload = self.put(content) if connection.takes(out_bytes) else content
            connection.send(f"{own}/ready", _TINY)
            self._mailbox.take(f"{other}/ready", limit_s)
            watch, start = Watch(), read()
            for number in range(count if out_bytes else 0):
                connection.send(f"{own}/{number}", payload)
            received = [self._mailbox.take(f"{other}/{number}", limit_s) for number in range(count if in_bytes else 0)]
            connection.send(f"{own}/done", _TINY)
            self._mailbox.take(f"{other}/done", limit_s)
            seconds = watch.elapsed_s(start)
        differences = [first_difference(numpy.asarray(message), expected) for message in received]
        corrupt = [(in_bytes, place) for place in differences if place is not None]
        return {"seconds": seconds, "corrupt": corrupt, "clock_jumps_s": watch.take_jumps()}

    def collective(self, group: Group, op: str, nbytes: int, repeats: int) -> Dict[str, Any]:
        """See `time_collective`."""
        with self._expected.messages_of(group.name):
            return time_collective(self._mailbox, self._credentials, group, op, nbytes, repeats)

    @contextlib.contextmanager
    def _connected(self, name: str, other: Address, limit_s: float) -> Iterator[Connection]:
        """Connect to the other end of the timing called `name`, and admit its messages."""
        with self._expected.messages_of(name), contextlib.closing(
            Connection(other, self._credentials, timeout_s=limit_s, wire=self.wire)
        ) as connection:
            yield connection


class _Timing:
    """Time the messages of one directed pair, numbered from 0."""

    def __init__(
        self, name: str, connection: Connection, mailbox: Mailbox, limit_s: float, put: Callable[[bytes], Any]
    ) -> None:
        self._name = name
        self._connection = connection
        self._mailbox = mailbox
        self._limit_s = limit_s
        self._put = put
        self._count = 0
        self._watch = Watch()
        self._corrupt: List[Tuple[int, int]] = []

    def run(self, policy: Policy) -> Dict[str, Any]:
        for _ in range(_TINY_WARM_UPS):
            self._round_trip_s(_TINY)  # the connection and both processors wake up
        tiny = [self._round_trip_s(_TINY) for _ in range(policy.tiny_repeats)]
        back_s = statistics.median(tiny) / 2
        messages: List[Tuple[int, List[float]]] = []
        for nbytes in policy.message_bytes:
            if messages and _enough(messages, nbytes, back_s, policy):
                break
            content = pattern(nbytes)
            payload = self._put(content) if self._connection.takes(nbytes) else memoryview(content)
            times = self._repeated(payload, policy, _next_s(messages, nbytes, back_s))
            # No message is faster than an empty one; small ones scatter around it.
            messages.append((nbytes, [max(t - back_s, back_s) for t in times]))
            if _is_last(messages, back_s, policy):  # the times of this size give the bandwidth
                times = self._until_settled(payload, policy, times)
                messages[-1] = nbytes, [max(t - back_s, back_s) for t in times]
        return {
            "tiny_s": tiny,
            "messages": messages,
            "corrupt": self._corrupt,
            "clock_jumps_s": self._watch.take_jumps(),
        }

    def end(self) -> None:
        """Send an empty message, which ends the timing."""
        self._connection.send(f"{self._name}/{self._count}", b"")

    def _repeated(self, payload: Any, policy: Policy, expected_s: float) -> List[float]:
        if expected_s < _WARM_UP_S:
            for _ in range(policy.message_warm_ups):
                self._round_trip_s(payload)  # the sender's congestion window opens
        times: List[float] = []
        while len(times) < policy.large_repeats or (len(times) < policy.repeats and sum(times) < policy.message_s):
            times.append(self._round_trip_s(payload))
        return times

    def _until_settled(self, payload: Any, policy: Policy, times: List[float]) -> List[float]:
        """Repeat one size while its times scatter, and return all times [s]."""
        times = list(times)
        while _scattered(times) and len(times) < _MOST_REPEATS and sum(times) < policy.scattered_s:
            times.append(self._round_trip_s(payload))
        return times

    def _round_trip_s(self, payload: Any) -> float:
        # Wait for the check, untimed, so that no check runs while the next message travels.
        return self._watch.timed(lambda: self._there_and_back(payload), lambda: self._note_check(len(payload)))

    def _there_and_back(self, payload: Any) -> None:
        name = f"{self._name}/{self._count}"
        self._count += 1
        self._connection.send(name, payload)
        self._mailbox.take(f"{name}/answer", self._limit_s)

    def _note_check(self, nbytes: int) -> None:
        place = self._mailbox.take(f"{self._name}/{self._count - 1}/checked", self._limit_s)
        if place:
            self._corrupt.append((nbytes, int(str(place, "utf-8"))))


def wire_for(transfers: str, credentials: Credentials, address: str, device: Any) -> Tuple[Any, Callable[[bytes], Any]]:
    """Return this host's end of UCX, or None, and a function that puts a payload where training keeps it.

    UCX and the module hwaware.ucx belong to the host: the profiler ships neither.
    """
    import jax

    try:
        ucx = importlib.import_module("hwaware.ucx")
    except ImportError:
        return None, memoryview
    wire = ucx.wire_for(transfers, credentials, [device], address)

    def put(content: bytes) -> Any:
        return jax.device_put(numpy.frombuffer(content, numpy.uint8), device).block_until_ready()

    return wire, put if wire is not None and wire.on_gpu else memoryview


def _scattered(times: List[float]) -> bool:
    if len(times) < 2:
        return False
    low, middle, high = statistics.quantiles(times, n=4)
    return high - low > _SCATTERED * middle


def _next_s(messages: List[Tuple[int, List[float]]], next_bytes: int, latency_s: float) -> float:
    """Return the expected time of `next_bytes` without the latency [s]; 0 while no message tells the rate."""
    if not messages or messages[-1][0] < _TELLING_BYTES:
        return 0.0
    nbytes, seconds = messages[-1]
    return max(0.0, statistics.median(seconds) - latency_s) * next_bytes / nbytes


def _is_last(messages: List[Tuple[int, List[float]]], latency_s: float, policy: Policy) -> bool:
    """Return True if no larger messages will follow."""
    larger = [nbytes for nbytes in policy.message_bytes if nbytes > messages[-1][0]]
    return not larger or _enough(messages, larger[0], latency_s, policy)


def _enough(messages: List[Tuple[int, List[float]]], next_bytes: int, latency_s: float, policy: Policy) -> bool:
    """Return True if messages of `next_bytes` would take too long, or tell nothing new."""
    if _next_s(messages, next_bytes, latency_s) > policy.longest_message_s:
        return True
    nbytes, seconds = messages[-1][0], statistics.median(messages[-1][1])
    if len(messages) < 2 or nbytes < _STEADY_BYTES or seconds < policy.steady_s:
        return False
    rate, rate_before = (size / statistics.median(times) for size, times in (messages[-1], messages[-2]))
    return abs(rate / rate_before - 1) < policy.steady
