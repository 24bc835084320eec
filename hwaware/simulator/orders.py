"""Define the channels between stages, and the instructions of Alpa's own order of messages."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Tuple

from hwaware.plans import Schedule
from hwaware.schedules import Pass, pass_order

RUN, SEND, RECEIVE = 0, 1, 2


class Instruction(NamedTuple):
    """An instruction of a stage: `RUN` a pass, or `SEND` or `RECEIVE` over `channel` the message for that pass."""

    what: int
    number: Pass
    channel: int = -1


def channel_in(stage: int, stages: int, number: Pass) -> int:
    """Return the channel that a pass waits for, or -1 for none.

    Channel i leads from stage i to i + 1. With n stages, channel n - 1 + i leads from stage i + 1 to i.

    Example:
        >>> [channel_in(stage, 3, 0) for stage in range(3)], [channel_in(stage, 3, 1) for stage in range(3)]
        ([-1, 0, 1], [2, 3, -1])
    """
    if number % 2 == 0:
        return stage - 1
    return stages - 1 + stage if stage < stages - 1 else -1


def channel_out(stage: int, stages: int, number: Pass) -> int:
    """Return the channel that a pass sends over, or -1 for none. `channel_in` numbers the channels.

    Example:
        >>> [channel_out(stage, 3, 0) for stage in range(3)], [channel_out(stage, 3, 1) for stage in range(3)]
        ([0, 1, -1], [-1, 2, 3])
    """
    if number % 2 == 0:
        return stage if stage < stages - 1 else -1
    return stages - 1 + stage - 1 if stage > 0 else -1


def channel_ends(channel: int, stages: int) -> Tuple[int, int]:
    """Return the stages from which and to which a channel leads.

    Example:
        >>> [channel_ends(channel, 3) for channel in range(4)]
        [(0, 1), (1, 2), (1, 0), (2, 1)]
    """
    above = channel % (stages - 1)
    return (above, above + 1) if channel < stages - 1 else (above + 1, above)


def alpa_instructions(schedule: Schedule, stages: int, microbatches: int) -> List[List[Instruction]]:
    """Return Alpa's instruction list of each stage.

    In each tick of the schedule, stages first exchange the messages that the tick needs, then run its passes. So the
    sender sends a message only at its receiver's tick, long after it could. Both stages block meanwhile.

    Example:
        >>> [instruction.what for instruction in alpa_instructions("inference", 2, 2)[0]]  # RUN, SEND, RUN, SEND
        [0, 1, 0, 1]

    Source: the emission loop of Alpa 0.2.3's runtime_emitter.py.
    """
    ticks: Dict[int, List[Tuple[int, Pass]]] = {}
    for stage, found in enumerate(_ticks(schedule, stages, microbatches)):
        for number, tick in found.items():
            ticks.setdefault(tick, []).append((stage, number))
    lists: List[List[Instruction]] = [[] for _ in range(stages)]
    for tick in sorted(ticks):
        for stage, number in ticks[tick]:
            channel = channel_in(stage, stages, number)
            if channel >= 0:
                lists[stage + 1 if number % 2 else stage - 1].append(Instruction(SEND, number, channel))
                lists[stage].append(Instruction(RECEIVE, number, channel))
        for stage, number in ticks[tick]:
            lists[stage].append(Instruction(RUN, number))
    return lists


def _ticks(schedule: Schedule, stages: int, microbatches: int) -> List[Dict[Pass, int]]:
    """Return the tick of each stage's passes, if every pass takes one tick and messages take none."""
    orders = [pass_order(schedule, stage, stages, microbatches) for stage in range(stages)]
    found: List[Dict[Pass, int]] = [{} for _ in range(stages)]
    at = [0] * stages
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                number = order[at[stage]]
                before = stage - 1 if number % 2 == 0 else stage + 1
                needed = found[before].get(number, -1) if 0 <= before < stages else 0
                if needed < 0:
                    break
                last = found[stage][order[at[stage] - 1]] + 1 if at[stage] else stage
                waits = needed + 1 if 0 <= before < stages else 0
                found[stage][number] = max(last, waits)
                at[stage] += 1
                moved = True
    return found
