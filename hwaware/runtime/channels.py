"""Decide which messages a worker expects: those of channels that it has joined, in their order, each once."""

from __future__ import annotations

import re
import threading
from typing import Any, Dict, Tuple

from hwaware.transport import UnexpectedMessageError

# Prefixes of keys by which a receiver tells a blocking sender that it waits for a message, or that it has the message.
READY, DONE = "ready|", "done|"
_ROUTE = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})>([0-9]{1,9})\.([0-9]{1,9})")


def channel(group: str, source: Tuple[int, int], target: Tuple[int, int]) -> str:
    """Return the name of the channel from `source` to `target`, each a (rank, device) of the group.

    Example:
        >>> channel("g", (0, 0), (1, 2))
        'g|0.0>1.2'
    """
    return f"{group}|{source[0]}.{source[1]}>{target[0]}.{target[1]}"


class _State:
    """The connection that a channel belongs to, and the number of the channel's messages so far."""

    def __init__(self, sender: Any) -> None:
        self.sender = sender
        self.count = 0


class Incoming:
    """Know the channels to one worker, and admit their messages. Threads of several connections may call `admit`.

    Args:
        blocking: True if senders wait for this worker's answers, and it for theirs.
    """

    def __init__(self, blocking: bool) -> None:
        self._blocking = blocking
        self._groups: Dict[str, Tuple[int, int]] = {}
        self._states: Dict[str, _State] = {}
        self._lock = threading.Lock()

    def join(self, group: str, rank: int, size: int) -> None:
        """Expect messages of a group of `size` members, as its member `rank`."""
        self._groups[group] = (rank, size)

    def admit(self, key: str, nbytes: int, sender: Any) -> None:
        """Let a message in, or refuse it; called before its payload is read.

        Raises:
            UnexpectedMessageError: No channel expects this message, or not from this connection, or not now.
        """
        name, _, number = key.rpartition("#")
        state = self._states.get(name) or self._opened(name, key, sender)
        if state.sender is not sender:
            raise UnexpectedMessageError(f"{key!r} belongs to a channel of {state.sender.name}")
        if number != str(state.count + 1):
            raise UnexpectedMessageError(f"{key!r} came where number {state.count + 1} was expected")
        if nbytes and name.startswith((READY, DONE)):
            raise UnexpectedMessageError(f"{key!r} has {nbytes} bytes, expected none")
        state.count += 1

    def _opened(self, name: str, key: str, sender: Any) -> _State:
        """Return the state of a new channel, or refuse its first message."""
        answers = name.startswith((READY, DONE))
        group, _, route = (name.partition("|")[2] if answers else name).rpartition("|")
        match = _ROUTE.fullmatch(route)
        if match is None or group not in self._groups:
            raise UnexpectedMessageError(f"{key!r} belongs to no channel that this worker has joined")
        rank, size = self._groups[group]
        source, target = int(match[1]), int(match[3])
        here, there = (source, target) if answers else (target, source)
        if here != rank or there >= size or there == rank or (answers and not self._blocking):
            raise UnexpectedMessageError(f"{key!r} belongs to a channel that does not lead to this worker")
        with self._lock:  # two connections may claim the channel at once
            return self._states.setdefault(name, _State(sender))
