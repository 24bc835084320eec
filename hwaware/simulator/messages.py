"""Messages in flight: each goes as fast as the busiest of the parts that it shares with others lets it."""

from __future__ import annotations

from heapq import heappush
from typing import Callable, Dict, List, NamedTuple, Sequence, Tuple

# What the event queue holds: time, a counter that breaks ties, what ended (stage, or ~channel), version.
Queue = List[Tuple[float, int, int, int]]


class Part(NamedTuple):
    """Something that messages share: a directed link between hosts, or one direction of a network card.

    Attributes:
        name: Unique.
        slowdown: From the loads of the messages on it (their rates alone, bytes per second) to the factor by which
            all of them slow down, at least 1.
        fraction: How much of the message passes it: replicas on other hosts send the rest.
    """

    name: Tuple[str, ...]
    slowdown: Callable[[Sequence[float]], float]
    fraction: float = 1.0


class Channel(NamedTuple):
    """One direction between two stages.

    Attributes:
        seconds: Of one message that has all its parts to itself.
        load: Bytes per second of that message.
        parts: What it passes.
        hidden_s: By how much the pass that a message is for is shorter, if its stage has waited for as long.
    """

    seconds: float
    load: float = 0.0
    parts: Tuple[Part, ...] = ()
    hidden_s: float = 0.0


class Messages:
    """Starts messages and pushes their ends into the queue; at most one message of a channel at a time.

    Messages that share a part each go on at 1 / s of their speed, s the largest slowdown of their parts, from every
    start or end of another one to the next. A message whose parts no other channel passes takes its own seconds.
    """

    def __init__(self, channels: Sequence[Channel], queue: Queue) -> None:
        self._channels = channels
        self._queue = queue
        self._count = 0
        users: Dict[Tuple[str, ...], List[int]] = {}
        for index, channel in enumerate(channels):
            for part in channel.parts:
                users.setdefault(part.name, []).append(index)
        # Parts that no other channel passes never slow a message down.
        self._parts = [[part for part in channel.parts if len(users[part.name]) > 1] for channel in channels]
        self._loads: Dict[Tuple[str, ...], Dict[int, float]] = {name: {} for name in users}
        # Of each message in flight on shared parts: seconds left alone, since when, slowed down how much.
        self._left = [0.0] * len(channels)
        self._since = [0.0] * len(channels)
        self._slowdowns = [1.0] * len(channels)
        self._versions = [0] * len(channels)

    def push(self, time_s: float, ended: int, version: int = 0) -> None:
        """Put the end of something into the queue."""
        self._count += 1
        heappush(self._queue, (time_s, self._count, ended, version))

    def start(self, channel: int, now: float) -> None:
        """Start a message on a channel that has none."""
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
        """Return True if an end in the queue still holds: the message's rate has not changed since."""
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
        """Queue new ends for the messages that slow down or speed up because one started or ended."""
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
