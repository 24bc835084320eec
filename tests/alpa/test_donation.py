"""Donated memory: updates replace the parameters in place, and accumulators do not pile up with the microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hwaware.runtime.memory import MemoryAccount
from hwaware.runtime.recorder import Recorder

pytestmark = pytest.mark.alpa

WIDTH, LAYERS = 256, 4


def batch_of(samples):
    x = np.random.default_rng(0).standard_normal((samples, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x)}


def fresh_state():
    keys = jax.random.split(jax.random.PRNGKey(0), LAYERS)
    params = [jax.random.normal(key, (WIDTH, WIDTH)) / 16 for key in keys]
    return {"params": params, "momentum": [0 * p for p in params]}


def train_step(state, batch):
    import alpa

    def loss(params):
        x = batch["x"]
        for weights in params:
            x = jnp.tanh(x @ weights)
        return jnp.mean((x - batch["y"]) ** 2)

    value, gradients = alpa.value_and_grad(loss)(state["params"])
    momentum = [0.9 * m + g for m, g in zip(state["momentum"], gradients)]
    return {"params": [p - 0.1 * m for p, m in zip(state["params"], momentum)], "momentum": momentum}, value


STATE_BYTES = 2 * LAYERS * WIDTH * WIDTH * 4


def live_bytes(run):
    import ray

    return sum(ray.get([worker.get_memory_allocated.remote() for worker in run.workers]))


def test_after_a_step_only_the_new_state_lives(pipeline):
    samples, microbatches = 16, 8
    run = pipeline(train_step, fresh_state(), batch_of(samples), 2, microbatches, donate=(0,))
    for _ in range(3):
        run.step(batch_of(samples))
        # Beside the state: two losses and their like, and the microbatches, which Alpa keeps for the arguments' owner.
        assert STATE_BYTES <= live_bytes(run) <= 1.1 * STATE_BYTES


def test_a_donated_state_stays_on_its_stages_wherever_the_step_returns_it(pipeline):
    def loss_first(state, batch):
        state, loss = train_step(state, batch)
        return loss, state

    run = pipeline(loss_first, fresh_state(), batch_of(16), 2, 4, donate=(0,))
    _, state = run.step_function(run.state, batch_of(16))
    arrays = jax.tree_util.tree_leaves(state)
    for mesh, arguments in zip(run.executable.mesh_group, run.executable.mesh_arg_indices):
        assert all(arrays[place].device_mesh is mesh for place in arguments if place < len(arrays))


def test_donated_arguments_without_a_like_result_stay(pipeline):
    run = pipeline(lambda *given: train_step(*given)[1], fresh_state(), batch_of(16), 2, 4, donate=(0, 1))
    first, again = (run.step_function(run.state, batch_of(16)) for _ in range(2))
    np.testing.assert_array_equal(first._value, again._value)


def test_which_result_takes_over_which_argument():
    from hwaware.patching.donation import taken_over

    small, large, whole = jnp.ones(2), jnp.ones(3), jnp.ones((), int)

    def pairs(function, *arguments):
        jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
        found = taken_over(jaxpr.invars, [True] * len(jaxpr.invars), jaxpr.outvars)
        return {jaxpr.invars.index(value): jaxpr.outvars.index(result) for value, result in found.items()}

    assert pairs(lambda a, b: (a.sum(), a + 1, b + 1), small, large) == {0: 1, 1: 2}
    assert pairs(lambda a, b: (b + 1, a.sum(), a + 1), small, large) == {0: 2, 1: 0}
    assert pairs(lambda a, b: (3.0, a + 1, a + 1), small, whole) == {0: 1}
    assert pairs(lambda a: a.sum(), whole) == {0: 0}
    assert pairs(lambda a: a / 2, whole) == {}  # of another type


@pytest.mark.thorough
def test_what_is_not_donated_stays(pipeline):
    run = pipeline(train_step, fresh_state(), batch_of(16), 2, 4, donate=())
    before = run.state
    first, again = run.step(batch_of(16)), run.step_function(before, batch_of(16))[1]
    np.testing.assert_array_equal(first[0], again._value)


@pytest.mark.thorough
def test_a_batch_may_be_overwritten_once_its_step_is_launched(pipeline):
    run = pipeline(train_step, fresh_state(), batch_of(512), 1, 2, donate=())
    before, batch = run.state, batch_of(512)  # so large that Ray shares its memory, which JAX does not copy
    expected = run.step(batch_of(512))[0]
    loss = run.step_function(before, batch)[1]
    for array in batch.values():
        array[...] = np.nan
    np.testing.assert_array_equal(expected, loss._value)


class Worker:
    """What an executable needs of a worker."""

    def __init__(self):
        self.all_devices = jax.devices()[:1]
        self.buffers = {}
        self.newest = ()
        self.account = MemoryAccount(None)
        self.recorder = Recorder()

    def stores(self):
        return (self.buffers,)

    def held(self, uuids):
        return [self.buffers[uuid] for uuid in uuids]

    def put(self, array):
        return jax.device_put(array)


def test_a_result_takes_over_the_memory_of_the_input_it_replaces():
    from hwaware.compiler.programs import lower
    from hwaware.runtime.executables import StageExecutable

    array = jnp.ones((64, 64))
    program = lower(jax.make_jaxpr(lambda a, b: (a + b, a * b))(array, array), "add", {0: 0})
    worker = Worker()
    given, other = jnp.ones((64, 64)), jnp.ones((64, 64))
    where = given.unsafe_buffer_pointer()
    worker.buffers.update({1: [given], 2: [other]})
    StageExecutable(worker, 0, program).execute_on_worker([1, 2], [3, 4])
    assert sorted(worker.buffers) == [2, 3, 4]
    assert given.is_deleted()
    assert not other.is_deleted()
    assert worker.buffers[3][0].unsafe_buffer_pointer() == where
    np.testing.assert_array_equal(worker.buffers[3][0], np.full((64, 64), 2.0))


@pytest.mark.parametrize("source", ["numpy", "read-only numpy", "viewed"])
def test_memory_that_somebody_else_sees_is_not_written_to(source):
    from hwaware.compiler.programs import lower
    from hwaware.runtime.executables import StageExecutable

    seen = np.ones((512, 512), np.float32)
    seen.flags.writeable = source != "read-only numpy"
    given = jax.device_put(seen)
    if source == "viewed":
        given = jnp.ones((512, 512))
        seen = np.asarray(given)
    worker = Worker()
    worker.buffers[1] = [given]
    program = lower(jax.make_jaxpr(lambda a: (a + 1,))(given), "add", {0: 0})
    StageExecutable(worker, 0, program).execute_on_worker([1], [2])
    assert np.asarray(worker.buffers[2][0])[0, 0] == 2
    assert (seen == 1).all()


def test_types_that_differ_are_freed_instead():
    from hwaware.compiler.programs import lower
    from hwaware.runtime.executables import StageExecutable

    given = jnp.ones((64,))
    program = lower(jax.make_jaxpr(lambda a: (a.astype(jnp.float16),))(given), "halve", {0: 0})
    assert "aliasing_output" not in program.stablehlo
    worker = Worker()
    worker.buffers[1] = [given]
    StageExecutable(worker, 0, program).execute_on_worker([1], [2])
    assert list(worker.buffers) == [2]
