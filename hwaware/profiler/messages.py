"""Timing messages between two workers through the transport that training uses.

Only the source's clock is used, so clocks need not agree: the source sends n bytes, the target answers with one byte.
With T(n) the time until the answer is there, a message of n bytes takes T(n) - T(1) / 2 one way.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, Dict, List, Tuple

from hwaware.profiler.policy import MIB, Policy
from hwaware.transport import Address, Connection, Mailbox

_TINY = b"\0"
# A message that is long enough for a rate limiter's burst (64 KiB and more) not to matter, and a rate that changed less
# than this since the size before: larger messages would tell nothing new.
_STEADY_BYTES = 4 * MIB
_STEADY_S = 0.15
_STEADY = 0.02
_TINY_WARM_UPS = 5
# Opening the congestion window takes some round trips: a message longer than this hardly notices.
_WARM_UP_S = 0.1


class LinkEnd:
    """One worker's end of its links: times messages to others, and answers theirs."""

    def __init__(self) -> None:
        self._mailbox = Mailbox()

    @property
    def port(self) -> int:
        """The TCP port that other ends send to."""
        return self._mailbox.port

    def close(self) -> None:
        """Stop listening."""
        self._mailbox.close()

    def answer(self, name: str, source: Address, limit_s: float) -> int:
        """Answer the messages of the timing called `name` until it ends; how many there were.

        Raises:
            MeasurementError: The next message did not arrive within `limit_s`.
        """
        connection = Connection(source, timeout_s=limit_s)
        answered = 0
        try:
            while len(self._mailbox.take(f"{name}/{answered}", limit_s)) > 0:
                connection.send(f"{name}/{answered}/answer", _TINY)
                answered += 1
        finally:
            connection.close()
        return answered

    def time_messages(self, name: str, target: Address, policy: Policy, limit_s: float) -> Dict[str, Any]:
        """Time messages of growing size to an end that runs `answer` with the same name.

        Returns:
            "tiny_s": the round trips of one byte; "messages": (bytes, one-way seconds of each repeat) by size.

        Raises:
            MeasurementError: The target does not answer within `limit_s`.
        """
        connection = Connection(target, timeout_s=limit_s)
        try:
            timing = _Timing(name, connection, self._mailbox, limit_s)
            result = timing.run(policy)
            timing.end()
        finally:
            connection.close()
        return result


class _Timing:
    """The messages of one directed pair, numbered from 0."""

    def __init__(self, name: str, connection: Connection, mailbox: Mailbox, limit_s: float) -> None:
        self._name = name
        self._connection = connection
        self._mailbox = mailbox
        self._limit_s = limit_s
        self._count = 0

    def run(self, policy: Policy) -> Dict[str, Any]:
        for _ in range(_TINY_WARM_UPS):
            self._round_trip_s(_TINY)  # the connection and both processors wake up
        tiny = [self._round_trip_s(_TINY) for _ in range(policy.tiny_repeats)]
        back_s = statistics.median(tiny) / 2
        messages: List[Tuple[int, List[float]]] = []
        for nbytes in policy.message_bytes:
            if messages and _enough(messages, nbytes, policy):
                break
            payload = memoryview(bytearray(nbytes))
            # No message is faster than an empty one; small ones scatter around it.
            seconds = [max(t - back_s, back_s) for t in self._repeated(payload, policy, _next_s(messages, nbytes))]
            messages.append((nbytes, seconds))
        return {"tiny_s": tiny, "messages": messages}

    def end(self) -> None:
        """An empty message: nothing follows."""
        self._connection.send(f"{self._name}/{self._count}", b"")

    def _repeated(self, payload: Any, policy: Policy, expected_s: float) -> List[float]:
        if expected_s < _WARM_UP_S:
            self._round_trip_s(payload)  # the sender's congestion window opens
        times: List[float] = []
        while len(times) < policy.repeats:
            if len(times) >= policy.large_repeats and sum(times) >= policy.message_s:
                break
            times.append(self._round_trip_s(payload))
        return times

    def _round_trip_s(self, payload: Any) -> float:
        name = f"{self._name}/{self._count}"
        self._count += 1
        start = time.perf_counter()
        self._connection.send(name, payload)
        self._mailbox.take(f"{name}/answer", self._limit_s)
        return time.perf_counter() - start


def _next_s(messages: List[Tuple[int, List[float]]], next_bytes: int) -> float:
    """About how long a message of `next_bytes` takes, from the largest so far; 0 if there was none."""
    if not messages:
        return 0.0
    nbytes, seconds = messages[-1]
    return statistics.median(seconds) * next_bytes / nbytes


def _enough(messages: List[Tuple[int, List[float]]], next_bytes: int, policy: Policy) -> bool:
    """Whether messages of `next_bytes` would take too long, or tell nothing new."""
    if _next_s(messages, next_bytes) > policy.longest_message_s:
        return True
    nbytes, seconds = messages[-1][0], statistics.median(messages[-1][1])
    if len(messages) < 2 or nbytes < _STEADY_BYTES or seconds < _STEADY_S:
        return False
    rate, rate_before = (size / statistics.median(times) for size, times in (messages[-1], messages[-2]))
    return abs(rate / rate_before - 1) < _STEADY
