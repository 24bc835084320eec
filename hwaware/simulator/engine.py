"""Run the event loop: stages work through their orders, and messages travel between stages."""

from __future__ import annotations

from heapq import heappop
from typing import List, NamedTuple, Sequence, Tuple

from hwaware.plans import Schedule
from hwaware.schedules import pass_order
from hwaware.simulator.messages import Channel, Messages
from hwaware.simulator.orders import RUN, alpa_instructions, channel_ends, channel_in, channel_out


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
    n = len(forward)
    messages = Messages(channels)
    orders = [pass_order(schedule, stage, n, count) for stage in range(n)]
    at, started, ends, idle = [0] * n, [0.0] * n, [0.0] * n, [True] * n
    # Channels carry one message for each microbatch, in the order of the microbatches.
    handed_over, arrived = [0] * len(channels), [0] * len(channels)
    events: List[Tuple[float, float, int, int]] = []

    def start_pass(stage: int, now: float) -> None:
        if not idle[stage] or at[stage] == len(orders[stage]):
            return
        number = orders[stage][at[stage]]
        channel = channel_in(stage, n, number)
        if channel >= 0 and arrived[channel] <= number // 2:
            return
        idle[stage], started[stage] = False, now
        seconds = (backward if number % 2 else forward)[stage]
        messages.push(now + _pass_s(seconds, channels, channel, now - ends[stage]), stage)

    for stage in range(n):
        start_pass(stage, 0.0)
    while messages.queue:
        now, _, who, version = heappop(messages.queue)
        if who >= 0:
            number = orders[who][at[who]]
            events.append((started[who], now, who, number))
            at[who] += 1
            idle[who], ends[who] = True, now
            channel = channel_out(who, n, number)
            if channel >= 0:
                handed_over[channel] += 1
                if handed_over[channel] == arrived[channel] + 1:  # no other message is on its way
                    messages.start(channel, now)
            start_pass(who, now)
        elif messages.ends(~who, version, now):
            channel = ~who
            sender, receiver = channel_ends(channel, n)
            events.append((messages.began[channel], now, who, 2 * arrived[channel] + (receiver < sender)))
            arrived[channel] += 1
            if arrived[channel] < handed_over[channel]:
                messages.start(channel, now)
            start_pass(receiver, now)
    return Run(events, ends)


def run_blocking(
    schedule: Schedule, forward: Sequence[float], backward: Sequence[float], channels: Sequence[Channel], count: int
) -> Run:
    """Run a step in Alpa's own order of messages. The arguments are those of `run_overlapped`.

    A message starts when sender and receiver have both come to it. Both wait until it ends.
    """
    n = len(forward)
    messages = Messages(channels)
    lists = alpa_instructions(schedule, n, count)
    at, started, passed, ends = [0] * n, [0.0] * n, [0.0] * n, [0.0] * n
    is_awaited = [False] * len(channels)
    events: List[Tuple[float, float, int, int]] = []

    def proceed(stage: int, now: float) -> None:
        if at[stage] == len(lists[stage]):
            return
        what, number, channel = lists[stage][at[stage]]
        if what == RUN:
            started[stage] = now
            seconds = (backward if number % 2 else forward)[stage]
            waited_s = now - passed[stage]
            messages.push(now + _pass_s(seconds, channels, channel_in(stage, n, number), waited_s), stage)
        elif is_awaited[channel]:
            is_awaited[channel] = False
            messages.start(channel, now)
        else:
            is_awaited[channel] = True

    for stage in range(n):
        proceed(stage, 0.0)
    while messages.queue:
        now, _, who, version = heappop(messages.queue)
        if who >= 0:
            events.append((started[who], now, who, lists[who][at[who]].number))
            at[who] += 1
            ends[who] = passed[who] = now
            proceed(who, now)
        elif messages.ends(~who, version, now):
            pair = sorted(channel_ends(~who, n))
            events.append((messages.began[~who], now, who, lists[pair[0]][at[pair[0]]].number))
            for stage in pair:
                at[stage] += 1
                ends[stage] = now
            for stage in pair:
                proceed(stage, now)
    return Run(events, ends)


def _pass_s(seconds: float, channels: Sequence[Channel], channel: int, waited_s: float) -> float:
    """Return the time of a pass [s]. After a wait for a message, a pass is shorter, but at most by the wait."""
    return max(0.0, seconds - min(channels[channel].hidden_s, waited_s)) if channel >= 0 else seconds
