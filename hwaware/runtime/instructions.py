"""Alpa's emitted instruction lists, put in an order in which a stage's output leaves as soon as it exists, and without
what nobody reads.

Alpa emits a SEND at its consumer's tick. With blocking sends that is where it has to stand; here sends run in the
background, so the place of a SEND only decides how late the message may leave. Moving it up to the instruction that
produces its array is always safe: nothing waits for a SEND, and messages between two devices keep their order.
"""

from __future__ import annotations

from typing import Any, Collection, Dict, Hashable, List, Mapping, Sequence, Set

RUN, SEND, RECV = "RUN", "SEND", "RECV"
# What Alpa calls the description of an executable that makes zeros.
_ALLOCATION = "AllocateZeroWorkerExecutableConfig"


def eager_sends(instructions: Sequence[Any], targets_of: Mapping[int, Collection[Hashable]]) -> List[Any]:
    """The same instructions with every SEND directly after what produces its array.

    A SEND never overtakes an earlier one to the same target, because a target counts the messages that it gets.

    Args:
        instructions: One worker's list; each has `opcode` (an enum), `task_uuid`, `input_uuids`, `output_uuids`.
        targets_of: The task of a SEND -> whom it sends to: one, several, or nobody where other workers send the array.

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
    """The same instructions without the allocations that a RECV overwrites before anything reads them.

    Alpa's own RECV writes into memory that is there, so a zero buffer is made for every message. Here it puts an array
    in its place, and zeros are only work (a small GPT's on a share of 0.3 of a slow core: 3.5 ms for every message).
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
    """The executables to make, as Alpa describes them, without the allocations that no instruction runs any more."""
    run = {instruction.task_uuid for instruction in instructions if instruction.opcode.name == RUN}
    return [one for one in configs if type(one).__name__ != _ALLOCATION or one.exec_uuid in run]


def _read(instruction: Any) -> Sequence[Any]:
    return () if instruction.input_uuids is None else instruction.input_uuids


def _written(instruction: Any, opcode: str) -> Sequence[Any]:
    return instruction.output_uuids if opcode in (RUN, RECV) and instruction.output_uuids is not None else ()
