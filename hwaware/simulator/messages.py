"""Simulate messages in flight. The busiest shared part on a message's way limits its speed."""

from __future__ import annotations

from heapq import heappush
from typing import Callable, Dict, List, NamedTuple, Sequence, Tuple


class Part(NamedTuple):
    """Something that messages share: a directed link between hosts, or one direction of a network card.

    Attributes:
        name: Unique name.
        slowdown: Maps the loads of all messages on the part to the factor by which they slow down, at least 1. The load
            of a message is its rate without other messages [bytes/s].
        fraction: Fraction of the message that passes the part. Replicas on other hosts send the rest.
    """

    name: Tuple[str, ...]
    slowdown: Callable[[Sequence[float]], float]
    fraction: float = 1.0


class Channel(NamedTuple):
    """One direction between two stages.

    Attributes:
        seconds: Time of one message without other messages [s].
        load: Rate of that message [bytes/s].
        parts: Parts that the message passes.
        hidden_s: Time by which the receiver's pass is shorter if the receiver has waited at least as long [s].
    """

    seconds: float
    load: float = 0.0
    parts: Tuple[Part, ...] = ()
    hidden_s: float = 0.0


class Messages:
    """Start messages and queue their ends. A channel carries at most one message at a time.

    A message that shares parts travels at 1 / s of its speed. Here s is the largest slowdown of its parts, until the
    next message starts or ends there. If no other channel passes its parts, a message takes its channel's `seconds`.

    Attributes:
        queue: The ends to come: (time, a counter that breaks ties, the stage or ~channel, a version).
        began: For each channel, the start of its newest message.
    """

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = channels
        self.queue: List[Tuple[float, int, int, int]] = []
        self.began = [0.0] * len(channels)
        self._count = 0
        users: Dict[Tuple[str, ...], List[int]] = {}
        for index, channel in enumerate(channels):
            for part in channel.parts:
                users.setdefault(part.name, []).append(index)
        # Parts that no other channel passes never slow a message down.
        self._parts = [[part for part in channel.parts if len(users[part.name]) > 1] for channel in channels]
        self._loads: Dict[Tuple[str, ...], Dict[int, float]] = {name: {} for name in users}
        # For each message on shared parts: its remaining time without others, the moment of that value, its slowdown.
        self._left = [0.0] * len(channels)
        self._since = [0.0] * len(channels)
        self._slowdowns = [1.0] * len(channels)
        self._versions = [0] * len(channels)

    def push(self, time_s: float, ended: int, version: int = 0) -> None:
        """Queue the end of a pass of stage `ended`, or of a message on channel ~`ended`."""
        self._count += 1
        heappush(self.queue, (time_s, self._count, ended, version))

    def start(self, channel: int, now: float) -> None:
        """Start a message on an idle channel."""
        self.began[channel] = now
        seconds = self._channels[channel].seconds
        parts = self._parts[channel]
        if not parts:
            self.push(now + seconds, ~channel)
            return
        for part in parts:
            self._loads[part.name][channel] = self._channels[channel].load * part.fraction
        self._left[channel], self._since[channel], self._slowdowns[channel] = seconds, now, 0.0
        self._share(channel, now)

    def ends(self, channel: int, version: int, now: float) -> bool:
        """End a message and return True; return False if its speed has changed since the queue got this end."""
        parts = self._parts[channel]
        if not parts:
            return True
        if version != self._versions[channel]:
            return False
        for part in parts:
            del self._loads[part.name][channel]
        self._share(channel, now)
        return True

    def _share(self, changed: int, now: float) -> None:
        """Queue new ends for messages whose speed changes because one started or ended on channel `changed`."""
        touched = {channel for part in self._parts[changed] for channel in self._loads[part.name]}
        for channel in sorted(touched):
            slowdown = max([part.slowdown(list(self._loads[part.name].values())) for part in self._parts[channel]])
            before = self._slowdowns[channel]
            if slowdown == before:
                continue
            if before > 0:
                self._left[channel] = max(0.0, self._left[channel] - (now - self._since[channel]) / before)
            self._since[channel], self._slowdowns[channel] = now, slowdown
            self._versions[channel] += 1
            self.push(now + self._left[channel] * slowdown, ~channel, self._versions[channel])
