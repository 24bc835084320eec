"""Run the event loop: stages work through their orders, and messages travel between stages."""

from __future__ import annotations

from heapq import heappop
from typing import List, NamedTuple, Sequence, Tuple

from hwaware.plans import Schedule
from hwaware.schedules import pass_order
from hwaware.simulator.messages import Channel, Messages, Queue
from hwaware.simulator.orders import RUN, alpa_instructions, channel_in, channel_out


class Run(NamedTuple):
    """Result of the event loop.

    Attributes:
        events: (start, end, who, pass) of each pass and message; `who` is the stage, or ~channel for a message.
        ends: Time at which each stage finished [s].
    """

    events: List[Tuple[float, float, int, int]]
    ends: List[float]


def run_overlapped(
    schedule: Schedule, forward: Sequence[float], backward: Sequence[float], channels: Sequence[Channel], count: int
) -> Run:
    """Run a step in which computing and sending overlap.

    Every stage runs its passes in order. A message leaves as soon as its pass has ended, and only its receiver waits
    for it. Messages of one channel follow each other.

    Args:
        schedule: The plan's schedule.
        forward: Time of one forward pass of each of the n stages [s].
        backward: Time of one backward pass of each stage [s].
        channels: The 2 (n - 1) channels, numbered as in `channel_in`.
        count: Number of microbatches.
    """
    n, queue = len(forward), _empty_queue()
    messages = Messages(channels, queue)
    orders = [pass_order(schedule, stage, n, count) for stage in range(n)]
    seconds = [(forward[stage], backward[stage]) for stage in range(n)]
    waits = [(channel_in(stage, n, 0), channel_in(stage, n, 1)) for stage in range(n)]
    sends = [(channel_out(stage, n, 0), channel_out(stage, n, 1)) for stage in range(n)]
    at, started, ends, idle = [0] * n, [0.0] * n, [0.0] * n, [True] * n
    arrived = [0] * len(channels)
    # For each channel: the passes that have a message for it, in order, and the number of messages that have arrived.
    lined: List[List[int]] = [[] for _ in channels]
    sent, began, travelling = [0] * len(channels), [0.0] * len(channels), [False] * len(channels)
    receiver = [channel + 1 if channel < n - 1 else channel - (n - 1) for channel in range(len(channels))]
    events: List[Tuple[float, float, int, int]] = []

    def start(stage: int, now: float) -> None:
        if not idle[stage] or at[stage] == len(orders[stage]):
            return
        kind = orders[stage][at[stage]] % 2
        channel = waits[stage][kind]
        if channel >= 0:
            if not arrived[channel]:
                return
            arrived[channel] -= 1
        idle[stage], started[stage] = False, now
        ahead = channels[channel].hidden_s if channel >= 0 else 0.0
        messages.push(now + _pass_s(seconds[stage][kind], ahead, now - ends[stage]), stage)

    def send(channel: int, now: float) -> None:
        travelling[channel], began[channel] = True, now
        messages.start(channel, now)

    for stage in range(n):
        start(stage, 0.0)
    while queue:
        now, _, who, version = heappop(queue)
        if who >= 0:
            number = orders[who][at[who]]
            events.append((started[who], now, who, number))
            at[who] += 1
            idle[who], ends[who] = True, now
            channel = sends[who][number % 2]
            if channel >= 0:
                lined[channel].append(number)
                if not travelling[channel]:
                    send(channel, now)
            start(who, now)
        elif messages.ends(~who, version, now):
            channel = ~who
            events.append((began[channel], now, who, lined[channel][sent[channel]]))
            sent[channel] += 1
            arrived[channel] += 1
            travelling[channel] = False
            if sent[channel] < len(lined[channel]):
                send(channel, now)
            start(receiver[channel], now)
    return Run(events, ends)


def run_blocking(
    schedule: Schedule, forward: Sequence[float], backward: Sequence[float], channels: Sequence[Channel], count: int
) -> Run:
    """Run a step in Alpa's own order of messages. The arguments are those of `run_overlapped`.

    A message starts when sender and receiver have both come to it. Both wait until it ends.
    """
    n, queue = len(forward), _empty_queue()
    messages = Messages(channels, queue)
    lists = alpa_instructions(schedule, n, count)
    seconds = [(forward[stage], backward[stage]) for stage in range(n)]
    at, ends, started, passed = [0] * n, [0.0] * n, [0.0] * n, [0.0] * n
    met, began = [0] * len(channels), [0.0] * len(channels)
    partners = [(c, c + 1) if c < n - 1 else (c - (n - 1), c - (n - 1) + 1) for c in range(len(channels))]
    events: List[Tuple[float, float, int, int]] = []

    def proceed(stage: int, now: float) -> None:
        if at[stage] == len(lists[stage]):
            return
        instruction = lists[stage][at[stage]]
        if instruction.what == RUN:
            started[stage] = now
            channel = channel_in(stage, n, instruction.number)
            ahead = channels[channel].hidden_s if channel >= 0 else 0.0
            messages.push(now + _pass_s(seconds[stage][instruction.number % 2], ahead, now - passed[stage]), stage)
            return
        channel = instruction.channel
        met[channel] += 1
        if met[channel] == 2:
            met[channel], began[channel] = 0, now
            messages.start(channel, now)

    for stage in range(n):
        proceed(stage, 0.0)
    while queue:
        now, _, who, version = heappop(queue)
        if who >= 0:
            events.append((started[who], now, who, lists[who][at[who]].number))
            at[who] += 1
            ends[who] = passed[who] = now
            proceed(who, now)
        elif messages.ends(~who, version, now):
            pair = partners[~who]
            events.append((began[~who], now, who, lists[pair[0]][at[pair[0]]].number))
            for stage in pair:
                at[stage] += 1
            for stage in pair:
                ends[stage] = now
                proceed(stage, now)
    return Run(events, ends)


def _pass_s(seconds: float, hidden_s: float, waited_s: float) -> float:
    """Return the time of a pass [s]. After a wait, it is shorter by `hidden_s`, but at most by the wait."""
    return max(0.0, seconds - min(hidden_s, waited_s))


def _empty_queue() -> Queue:
    return []
