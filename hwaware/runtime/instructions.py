"""Reorder Alpa's instruction lists, so that a stage's output leaves as soon as it exists, and drop unread zeros.

Alpa emits a SEND at its consumer's tick, where a blocking send has to stand. Here sends run in the background, so the
place of a SEND only decides how late its message may leave. A SEND may always move up to the instruction that produces
its array. Nothing waits for a SEND, and messages between two devices keep their order.
"""

from __future__ import annotations

from typing import Any, Collection, Dict, Hashable, List, Mapping, Sequence, Set

RUN, SEND, RECV = "RUN", "SEND", "RECV"
# Name of Alpa's class for the description of an executable that makes zeros.
_ALLOCATION = "AllocateZeroWorkerExecutableConfig"


def eager_sends(instructions: Sequence[Any], targets_of: Mapping[int, Collection[Hashable]]) -> List[Any]:
    """Return the same instructions with every SEND directly after the instruction that produces its array.

    A SEND never overtakes an earlier one to the same target, because a target counts the messages that it gets.

    Args:
        instructions: One worker's list; each has `opcode` (an enum), `task_uuid`, `input_uuids`, `output_uuids`.
        targets_of: Number of a SEND's task -> its targets; none where other workers send the array.

    Returns:
        A new list with the same instructions.
    """
    ordered: List[Any] = []
    produced_at: Dict[Any, int] = {}
    last_send_at: Dict[Hashable, int] = {}
    sends_after: Dict[int, List[Any]] = {}
    for instruction in instructions:
        opcode = instruction.opcode.name
        if opcode == SEND:
            targets = targets_of[instruction.task_uuid]
            earlier = [last_send_at.get(target, -1) for target in targets]  # none where other workers send the array
            place = max([produced_at.get(instruction.input_uuids[0], -1), *earlier])
            last_send_at.update(dict.fromkeys(targets, place))
            sends_after.setdefault(place, []).append(instruction)
            continue
        ordered.append(instruction)
        for array in _written(instruction, opcode):
            produced_at[array] = len(ordered) - 1
    result = list(sends_after.get(-1, ()))
    for index, instruction in enumerate(ordered):
        result.append(instruction)
        result.extend(sends_after.get(index, ()))
    return result


def without_unread_zeros(instructions: Sequence[Any]) -> List[Any]:
    """Return the same instructions without the allocations that a RECV overwrites before anything reads them.

    Alpa's own RECV writes into existing memory, so Alpa makes a zero buffer for every message. Here a RECV puts an
    array in place of the buffer, so zeros are wasted work. On 0.3 of a slow core, they took a small GPT 3.5 ms a
    message.
    """
    unread: Set[Any] = set()
    kept: List[Any] = []
    for instruction in reversed(instructions):
        opcode = instruction.opcode.name
        written, read = _written(instruction, opcode), _read(instruction)
        if opcode == RUN and not len(read) and len(written) and unread.issuperset(written):
            continue
        kept.append(instruction)
        if opcode == RECV:
            unread.update(written)
        else:
            unread.difference_update(written)
        unread.difference_update(read)
    kept.reverse()
    return kept


def only_run(configs: Sequence[Any], instructions: Sequence[Any]) -> List[Any]:
    """Return Alpa's descriptions of the executables to make, without allocations that no instruction runs any more."""
    run = {instruction.task_uuid for instruction in instructions if instruction.opcode.name == RUN}
    return [one for one in configs if type(one).__name__ != _ALLOCATION or one.exec_uuid in run]


def _read(instruction: Any) -> Sequence[Any]:
    return () if instruction.input_uuids is None else instruction.input_uuids


def _written(instruction: Any, opcode: str) -> Sequence[Any]:
    return instruction.output_uuids if opcode in (RUN, RECV) and instruction.output_uuids is not None else ()
