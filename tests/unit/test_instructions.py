"""Sends move up to what produces their array and keep their order; zeros that are overwritten are not made."""

import enum
from typing import NamedTuple, Optional, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwaware.runtime.instructions import eager_sends, only_run, without_unread_zeros


class Opcode(enum.Enum):
    RUN = 0
    SEND = 1
    RECV = 2
    FREE = 3


class Instruction(NamedTuple):
    opcode: Opcode
    task_uuid: Optional[int] = None
    input_uuids: Optional[Tuple[int, ...]] = None
    output_uuids: Optional[Tuple[int, ...]] = None


def run(*outputs):
    return Instruction(Opcode.RUN, output_uuids=outputs)


def send(array, task=0):
    return Instruction(Opcode.SEND, task_uuid=task, input_uuids=(array,))


def test_a_send_moves_up_to_its_run():
    first, second = run(1), run(2)
    assert eager_sends([first, second, send(1)], {0: {"b"}}) == [first, send(1), second]


def test_a_send_of_an_input_moves_to_the_front():
    assert eager_sends([run(1), send(7)], {0: {"b"}}) == [send(7), run(1)]


def test_a_received_array_is_forwarded_when_it_is_there():
    receive = Instruction(Opcode.RECV, task_uuid=5, output_uuids=(3,))
    assert eager_sends([receive, run(1), send(3)], {0: {"b"}}) == [receive, send(3), run(1)]


def test_sends_of_one_channel_keep_their_order():
    # The array of the first send is made last: the second must not overtake it, one to somebody else may.
    program = [run(1), run(2), send(2), send(1), send(1, task=1)]
    assert eager_sends(program, {0: {"b"}, 1: {"c"}}) == [run(1), send(1, task=1), run(2), send(2), send(1)]


def test_sends_to_some_of_the_same_keep_their_order():
    program = [run(1), run(2), send(2), send(1, task=1)]
    assert eager_sends(program, {0: {"b", "c"}, 1: {"c"}}) == [run(1), run(2), send(2), send(1, task=1)]


def receive(*arrays):
    return Instruction(Opcode.RECV, task_uuid=5, output_uuids=arrays)


def reading(*arrays, makes=()):
    return Instruction(Opcode.RUN, input_uuids=arrays, output_uuids=makes)


def free(*arrays):
    return Instruction(Opcode.FREE, input_uuids=arrays)


def test_zeros_that_a_message_overwrites_are_not_made():
    rest = [receive(1), reading(1, makes=(2,)), receive(3), send(2), free(1)]
    assert without_unread_zeros([run(1), *rest[:2], run(3), *rest[2:]]) == rest
    assert without_unread_zeros([run(1, 2), receive(2), receive(1)]) == [receive(2), receive(1)]


@pytest.mark.parametrize(
    "program",
    [
        [run(1), reading(1), receive(1)],  # gradients are summed into them first
        [run(1), send(1), receive(1)],
        [run(1), free(1), receive(1)],
        [run(1, 2), receive(1), reading(2)],  # one of them is not overwritten
        [run(1), run(1), reading(1)],
        [reading(7, makes=(1,)), receive(1)],  # made of something
        [run(), receive(1)],
        [receive(1), run(1)],
    ],
)
def test_what_is_read_or_kept_is_made(program):
    assert without_unread_zeros(program) == program


class AllocateZeroWorkerExecutableConfig(NamedTuple):
    exec_uuid: int


class PartialGradWorkerExecutableConfig(NamedTuple):
    exec_uuid: int


def test_allocations_that_nothing_runs_are_not_compiled():
    allocations = [AllocateZeroWorkerExecutableConfig(number) for number in (1, 2, 5)]
    stage = PartialGradWorkerExecutableConfig(3)
    instructions = [Instruction(Opcode.RUN, task_uuid=2), Instruction(Opcode.RECV, task_uuid=5)]
    assert only_run([*allocations, stage], instructions) == [allocations[1], stage]


@st.composite
def programs(draw):
    made, program = [0], []
    for number in range(1, draw(st.integers(1, 25))):
        if draw(st.booleans()):
            program.append(run(number))
            made.append(number)
        else:
            program.append(send(draw(st.sampled_from(made)), task=draw(st.integers(0, 3))))
    return program


@given(programs())
def test_any_program_stays_the_same_program(program):
    targets = {0: {"b"}, 1: {"c"}, 2: {"b", "c"}, 3: set()}
    result = eager_sends(program, targets)
    assert sorted(map(repr, result)) == sorted(map(repr, program))
    assert [i for i in result if i.opcode is Opcode.RUN] == [i for i in program if i.opcode is Opcode.RUN]
    for target in ("b", "c"):
        sent = [[i for i in p if i.opcode is Opcode.SEND and target in targets[i.task_uuid]] for p in (result, program)]
        assert sent[0] == sent[1]
    made = {0}
    for instruction in result:
        if instruction.opcode is Opcode.RUN:
            made.update(instruction.output_uuids)
        else:
            assert set(instruction.input_uuids) <= made
