"""A stage of several layers runs one program a layer: the same results, alike layers compiled once, memory let go."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hwaware.runtime.memory import MemoryAccount
from hwaware.runtime.recorder import Recorder

pytestmark = pytest.mark.alpa

SIZE = (32, 32)


class Worker:
    """What an executable needs of a worker."""

    def __init__(self, limit_bytes=None):
        self.all_devices = jax.devices()[:1]
        self.buffers, self.newest = {}, ()
        self.account, self.recorder = MemoryAccount(limit_bytes and [limit_bytes]), Recorder()
        self.account.is_on = True
        self.num_devices = 1

    def stores(self):
        return (self.buffers,)

    def held(self, uuids):
        return [self.buffers[uuid] for uuid in uuids]

    def put(self, array, index=0):
        return jax.device_put(array)


@pytest.fixture
def call():
    """Calls a function as Alpa calls a layer."""
    from hwaware.activation import install_runtime

    install_runtime()
    from hwaware.compat.programs import named_call_primitive

    def called(function, *arguments, name):
        closed = jax.make_jaxpr(lambda *a: tuple(function(*a)))(*arguments)
        return named_call_primitive().bind(*arguments, name=name, call_jaxpr=closed.jaxpr)

    return called


def block(activation, weights):
    return [jnp.tanh(activation @ weights), activation]


def forward(call):
    def stage(x, first, second, third):
        y, kept = call(block, x, first, name="stage0")
        z, kept_too = call(block, y, second, name="stage1")
        last, _ = call(block, z, third, name="stage2")
        return last, kept, kept_too

    return stage


def stage_of(function, arguments):
    closed = jax.make_jaxpr(function)(*arguments)
    return types.SimpleNamespace(
        name="3", closed_jaxpr=lambda: closed, invars=closed.jaxpr.invars, outvars=closed.jaxpr.outvars
    )


def lowered(function, arguments, donated=(), split=None):
    from hwaware.compiler.layerwise import lower_by_layer

    donated = [*donated, *[False] * (len(arguments) - len(donated))]
    return lower_by_layer(stage_of(function, arguments), donated, microbatched=True, split=split)


def executed(program, arguments, worker=None):
    from hwaware.runtime.executables import SplitExecutable

    worker = worker or Worker()
    worker.buffers.update({index: [jnp.asarray(value)] for index, value in enumerate(arguments)})
    outputs = [f"out {index}" for index in range(len(program.outputs))]
    executable = SplitExecutable(worker, 7, program)
    executable.execute_on_worker(range(len(arguments)), outputs)
    return executable, worker, [np.asarray(worker.buffers[name][0]) for name in outputs]


def arrays(count):
    rng = np.random.default_rng(0)
    return [rng.normal(size=SIZE).astype(np.float32) for _ in range(count)]


def test_a_part_a_layer_computes_what_the_whole_computes(call):
    arguments = arrays(4)
    program = lowered(forward(call), arguments)
    assert [step.program.name for step in program.steps] == ["3 part 0", "3 part 1", "3 part 2"]
    _, _, found = executed(program, arguments)
    for one, expected in zip(found, jax.jit(forward(lambda f, *a, name: f(*a)))(*arguments)):
        np.testing.assert_allclose(one, expected, rtol=1e-3, atol=1e-5)


def test_what_nobody_reads_is_not_computed(call):
    program = lowered(forward(call), arrays(4))
    assert [len(step.outputs) for step in program.steps] == [2, 2, 1]


def test_alike_layers_are_compiled_once(call):
    program = lowered(forward(call), arrays(4))
    first, second, third = (step.program.stablehlo for step in program.steps)
    assert first == second != third  # the last one keeps nothing
    executable, _, _ = executed(program, arrays(4))
    assert len(executable._executables) == 3
    assert len(set(map(id, executable._executables))) == 2


def test_layers_inside_a_merged_stage_are_found(call):
    def merged(*arguments):
        return call(forward(call), *arguments, name="3")

    arguments = arrays(4)
    program = lowered(merged, arguments)
    assert len(program.steps) == 3
    _, _, found = executed(program, arguments)
    np.testing.assert_allclose(found[0], forward(lambda f, *a, name: f(*a))(*arguments)[0], rtol=1e-3, atol=1e-5)


def test_one_layer_or_a_stage_that_also_computes_itself_stays_whole(call):
    def one(x, weights):
        return call(block, x, weights, name="stage0")

    def more(x, weights):
        y, kept = call(block, x + 1, weights, name="stage0")
        return call(block, y, kept, name="stage1")

    assert lowered(one, arrays(2)) is None
    assert lowered(more, arrays(2)) is None


def test_sums_are_overwritten_by_the_layer_that_adds_to_them(call):
    def add(total, x):
        return [total + x @ x, x + 1]

    def stage(total, other, x):
        total, y = call(add, total, x, name="stage0")
        other, _ = call(add, other, y, name="stage1")
        return total, other

    arguments = arrays(3)
    program = lowered(stage, arguments, donated=(True, True))
    assert all("tf.aliasing_output" in step.program.stablehlo for step in program.steps)
    _, worker, found = executed(program, arguments)
    assert set(worker.buffers) == {2, "out 0", "out 1"}
    total, other, x = arguments
    np.testing.assert_allclose(found[0], total + x @ x, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found[1], other + (x + 1) @ (x + 1), rtol=1e-4, atol=1e-4)


def test_what_a_later_layer_reads_is_not_overwritten(call):
    def add(total, x):
        return [total + x]

    def stage(total, x):
        (more,) = call(add, total, x, name="stage0")
        (again,) = call(add, total, x, name="stage1")
        return more, again

    arguments = arrays(2)
    program = lowered(stage, arguments, donated=(True,))
    assert not any("tf.aliasing_output" in step.program.stablehlo for step in program.steps)
    _, _, (more, again) = executed(program, arguments)
    np.testing.assert_array_equal(more, again)


def test_memory_is_accounted_for_layer_by_layer(call):
    from hwaware.errors import OutOfDeviceMemoryError

    arguments = arrays(4)
    one = arguments[0].nbytes
    program = lowered(forward(call), arguments)
    # Four arguments and three results before the last layer, whose own count where XLA says (jax 0.4.30); the first
    # layer alone would need less.
    _, worker, _ = executed(program, arguments, Worker(limit_bytes=100 * one))
    assert 7 * one <= worker.account.peak_bytes <= 10 * one
    with pytest.raises(OutOfDeviceMemoryError, match="program 3 needs"):
        executed(program, arguments, Worker(limit_bytes=worker.account.peak_bytes - 1))


def test_a_recording_shows_one_program_and_a_stage_can_be_timed_alone(call):
    arguments = arrays(4)
    program = lowered(forward(call), arguments, donated=(False, False, False, True))
    worker = Worker()
    worker.recorder.start()
    executable, _, _ = executed(program, arguments, worker)
    recording = worker.recorder.stop()
    assert [number for number, _, _ in recording.programs] == [7]
    times = executable.profile_with_dummy_inputs()
    assert len(times) >= 4
    assert all(0 < seconds < 10 for seconds in times)


@pytest.mark.parametrize("shares_a_weight", [False, True])
def test_replicas_run_layer_by_layer_unless_a_sum_goes_through_several(call, shares_a_weight):
    """A gradient that one layer begins and the next one adds to is no sum over samples to the next one."""
    from hwaware.compiler.programs import SplitProgram
    from hwaware.compiler.stages import MeshPlan
    from hwaware.patching.stages import lowered_stage

    def later(total, x, error):
        part = x.T @ error
        return [part, error] if shares_a_weight else [total + part, error]

    def earlier(total, x, error, *part):
        return [total + sum(part, (x + 1).T @ error)]

    def backward(first, second, x, error):
        part, handed = call(later, first, x, error, name="stage1")
        (total,) = call(earlier, second, x, handed, *[part] * shares_a_weight, name="stage0")
        return (first, total) if shares_a_weight else (part, total)

    stage = stage_of(backward, arrays(4))
    first, second, x, error = stage.invars
    apart = {second: stage.outvars[1]} if shares_a_weight else dict(zip((first, second), stage.outvars))
    plan = MeshPlan((2, 1), {x: (0, None), error: (0, None)}, apart)
    program = lowered_stage(stage, [True, True, False, False], plan).program
    assert isinstance(program, SplitProgram) is not shares_a_weight
    parts = [step.program for step in program.steps] if not shares_a_weight else [program]
    assert [part.num_devices for part in parts] == [2] * len(parts)
    rows = SIZE[0] // 2
    shapes = [shape for part in parts for shape, _ in part.arguments]
    if shares_a_weight:
        assert shapes == [SIZE, SIZE, (rows, SIZE[1]), (rows, SIZE[1])]
    else:  # each replica has a whole sum of its own and half of the samples, also of those that layers hand on
        assert sorted(set(shapes)) == [(rows, SIZE[1]), SIZE]
        assert [shape for shape, _ in parts[1].arguments].count((rows, SIZE[1])) == 2
