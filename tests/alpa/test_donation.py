"""Donated memory: updates replace the parameters in place, and accumulators do not pile up with the microbatches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hwaware.errors import AlpaError, UnusableInputError
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


def with_leaves_between(state):
    pairs = zip(state["params"], state["momentum"])
    return {**state, "params": [leaf for weights, momentum in pairs for leaf in (-momentum, weights)]}


def backwards(state):
    return {name: leaves[::-1] for name, leaves in state.items()}


@pytest.mark.parametrize(
    ("returned", "back"),
    [
        (lambda state: state, lambda state: state),
        (backwards, backwards),
        (with_leaves_between, lambda state: {**state, "params": state["params"][1::2]}),
    ],
    ids=["loss first", "backwards", "leaves between"],
)
def test_a_donated_state_stays_on_its_stages_wherever_the_step_returns_it(pipeline, returned, back):
    def loss_first(state, batch):
        state, loss = train_step(state, batch)
        return loss, returned(state)

    run = pipeline(loss_first, fresh_state(), batch_of(16), 2, 4, donate=(0,))
    _, state = run.step_function(run.state, batch_of(16))
    arrays = jax.tree_util.tree_leaves(back(state))
    for mesh, arguments in zip(run.executable.mesh_group, run.executable.mesh_arg_indices):
        assert all(arrays[place].device_mesh is mesh for place in arguments if place < len(arrays))


def test_a_leaf_that_a_step_returns_twice_is_two_arrays(pipeline):
    def twice(state, batch):
        state, loss = train_step(state, batch)
        return {"params": state["params"], "momentum": state["params"]}, loss

    run, expected = pipeline(twice, fresh_state(), batch_of(16), 2, 4, donate=(0,)), fresh_state()
    for _ in range(3):
        expected, loss = jax.jit(twice)(expected, batch_of(16))
        np.testing.assert_allclose(run.step(batch_of(16))[0], loss, rtol=1e-5)


def test_a_donated_array_may_be_two_leaves_of_the_state(pipeline):
    run, expected = pipeline(train_step, fresh_state(), batch_of(16), 2, 4, donate=(0,)), fresh_state()
    run.state = fresh_state()
    for _ in range(2):  # arrays of the driver, then those of workers
        run.state, expected = ({**one, "momentum": one["params"]} for one in (run.state, expected))
        for _ in range(2):
            expected, loss = jax.jit(train_step)(expected, batch_of(16))
            np.testing.assert_allclose(run.step(batch_of(16))[0], loss, rtol=1e-5)


def test_a_created_state_may_have_a_value_at_several_places(pipeline):
    import alpa

    def create():
        params = fresh_state()["params"]
        return {"params": params, "momentum": [*params[:1], *params[:0:-1]]}  # also on the other stage

    run, expected = pipeline(train_step, fresh_state(), batch_of(16), 2, 2, donate=(0,)), create()
    run.state = alpa.parallelize(create, method=alpa.CreateStateParallel(run.step_function, batch_of(16)))()
    for _ in range(2):
        expected, loss = jax.jit(train_step)(expected, batch_of(16))
        np.testing.assert_allclose(run.step(batch_of(16))[0], loss, rtol=1e-5)


def test_a_created_state_that_needs_other_values_is_refused_before_workers_start(pipeline):
    import alpa

    def scaled(factor):
        return {name: [factor * leaf for leaf in leaves] for name, leaves in fresh_state().items()}

    run, factor = pipeline(train_step, fresh_state(), batch_of(16), 1), jnp.float32(2)
    step = alpa.parallelize(train_step, method=run.step_function.method)
    method = alpa.CreateStateParallel(step, batch_of(16))
    for create, args, what in (
        (scaled, (factor,), "an argument"),
        (lambda: scaled(factor), (), "an array from outside"),
    ):
        with pytest.raises(AlpaError, match=rf"reads {what} \(float32\[\]\).*To fix: make keys and arrays inside"):
            alpa.parallelize(create, method=method)(*args)
    assert step.get_last_executable() is None


def test_donated_arguments_without_a_like_result_stay(pipeline):
    run = pipeline(lambda *given: train_step(*given)[1], fresh_state(), batch_of(16), 2, 4, donate=(0, 1))
    first, again = (run.step_function(run.state, batch_of(16)) for _ in range(2))
    np.testing.assert_array_equal(first._value, again._value)


def test_a_donated_array_is_named_and_the_training_goes_on(pipeline):
    run = pipeline(train_step, fresh_state(), batch_of(16), 2, 2, donate=(0,))
    first = run.step(batch_of(16))
    old = run.state
    run.step(batch_of(16))
    for use in (lambda: old["params"][0]._value, lambda: run.step_function(old, batch_of(16))):
        with pytest.raises(UnusableInputError, match=r"donated to a step, which took its memory\. To fix: use what"):
            use()
    assert run.step(batch_of(16)) < first


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_served_program_keeps_arguments_like_its_results(pipeline, microbatches):
    def serve(state, batch):
        return jnp.tanh(batch["x"] @ state["params"][0]) @ state["params"][1]

    batch = batch_of(microbatches * WIDTH)  # each microbatch gives a result of the shape of the weights
    run = pipeline(serve, fresh_state(), batch, 2, microbatches, donate=(0,), pipeline_schedule="inference")
    first, again = (run.step_function(run.state, batch) for _ in range(2))
    np.testing.assert_array_equal(first._value, again._value)
    np.testing.assert_allclose(first._value, serve(fresh_state(), batch), rtol=1e-4, atol=1e-4)


def extend(cache, batch, reads_others=False):
    """Serve one token a call: each layer adds a row to its own cache, and all count the rows."""
    x, kept = batch["x"], []
    for weights, rows in zip(batch["params"], cache["rows"]):
        rows = jax.lax.dynamic_update_slice(rows, x.mean(0, keepdims=True), (cache["count"], 0))
        x = jnp.tanh((x + rows.sum(0) + (kept[-1].sum(0) if kept and reads_others else 0)) @ weights)
        kept.append(rows)
    return {"rows": kept, "count": cache["count"] + 1}, x


@pytest.mark.parametrize(
    "order",
    [lambda rows: rows, lambda rows: rows[::-1], lambda rows: [*rows[1:], rows[1]]],
    ids=["as given", "backwards", "one twice"],
)
def test_a_served_cache_is_extended_in_its_memory(pipeline, order):
    def serve(cache, batch):
        cache, x = extend(cache, batch)
        return {**cache, "rows": order(cache["rows"])}, x

    cache = {"rows": [jnp.zeros((8, WIDTH)) for _ in range(LAYERS)], "count": jnp.int32(0)}
    batch = {**batch_of(WIDTH), "params": fresh_state()["params"]}
    run = pipeline(serve, cache, batch, 2, 1, donate=(0,), pipeline_schedule="inference")
    stays = order([0, 1]) == [0, 1]
    for call in range(3):
        given, (cache, expected) = run.state, jax.jit(serve)(cache, batch)
        np.testing.assert_allclose(run.step(batch)[0], expected, rtol=1e-4, atol=1e-5)
        for mine, others in zip(jax.tree_util.tree_leaves(run.state), jax.tree_util.tree_leaves(cache)):
            np.testing.assert_allclose(mine._value, others, rtol=1e-4, atol=1e-5)
        if call and stays:
            assert all(rows.remote_ref.is_deleted_on_workers for rows in given["rows"])
            np.testing.assert_array_equal(given["count"]._value, call)  # layers of both stages read it


def test_a_served_program_keeps_arguments_that_it_returns(pipeline):
    def serve(state, batch):
        return state, jnp.tanh(batch["x"] @ state["params"][0]) @ state["params"][1]

    run = pipeline(serve, fresh_state(), batch_of(8), 2, 1, donate=(0,), pipeline_schedule="inference")
    state, first = run.step_function(run.state, batch_of(8))
    _, again = run.step_function(state, batch_of(8))
    _, third = run.step_function(state, batch_of(8))
    np.testing.assert_array_equal(first._value, again._value)
    np.testing.assert_array_equal(first._value, third._value)


def test_a_served_cache_that_the_next_layer_reads_is_copied(pipeline):
    cache = {"rows": [jnp.zeros((8, WIDTH)) for _ in range(LAYERS)], "count": jnp.int32(0)}
    batch = {**batch_of(WIDTH), "params": fresh_state()["params"]}
    serve = functools.partial(extend, reads_others=True)
    run = pipeline(lambda *given: serve(*given), cache, batch, 2, 1, donate=(0,), pipeline_schedule="inference")
    for _ in range(2):
        given, (cache, expected) = run.state, jax.jit(serve)(cache, batch)
        np.testing.assert_allclose(run.step(batch)[0], expected, rtol=1e-4, atol=1e-5)
    # The first stage sends the rows of its second layer to the second stage.
    assert not given["rows"][1].remote_ref.is_deleted_on_workers
    assert given["rows"][-1].remote_ref.is_deleted_on_workers


def test_which_result_takes_over_which_argument():
    from alpa.pipeline_parallel.primitive_def import mark_gradient

    from hwaware.patching.donation import places_of_results

    small, large, whole = jnp.ones(2), jnp.ones(3), jnp.ones((), int)

    def pairs(function, *arguments):
        def step(*given):
            return function(*given, *mark_gradient((jnp.ones(2),)))

        found = places_of_results(jax.make_jaxpr(step)(*arguments), [True] * len(arguments))
        return {argument: result for argument, result in enumerate(found) if result is not None}

    assert pairs(lambda a, b, _: (a.sum(), a + 1, b + 1), small, large) == {0: 1, 1: 2}
    assert pairs(lambda a, b, _: (b + 1, a.sum(), a + 1), small, large) == {0: 2, 1: 0}
    assert pairs(lambda a, b, _: (3.0, a + 1, a + 1), small, whole) == {0: 1}
    assert pairs(lambda a, _: a.sum(), whole) == {0: 0}
    assert pairs(lambda a, _: a / 2, whole) == {}  # of another type
    assert pairs(lambda a, b, _: (b + 1, a + 1), small, small) == {0: 1, 1: 0}
    assert pairs(lambda a, b, _: (b + a, a + 1), small, small) == {0: 1, 1: 0}  # b is an average of a
    assert pairs(lambda a, b, _: (a + 1, a + 2), small, small) == {0: 0, 1: 1}
    assert pairs(lambda a, g: (g, a - g), small) == {0: 1}  # a stage makes g while others still read a


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
