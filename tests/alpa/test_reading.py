"""A loop that was written for plain JAX reads Alpa's arrays, on one stage or on several, as it reads JAX's."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.alpa

WIDTH = 16


def batch_of(number):
    x = np.random.default_rng(number).standard_normal((8, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x)}


def initial():
    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / 4 for key in keys]
    return {"weights": weights, "rate": jnp.float32(0.1), "step": jnp.int32(0)}


def train_step(state, batch):
    import alpa

    def loss(weights):
        x = batch["x"]
        for each in weights:
            x = jnp.tanh(x @ each)
        return jnp.mean((x - batch["y"]) ** 2)

    value, gradients = alpa.value_and_grad(loss)(state["weights"])
    step, rate = state["step"] + 1, state["rate"] * 0.9  # the updates of both stages need them
    return {
        "weights": [w - rate / step * g for w, g in zip(state["weights"], gradients)],
        "rate": rate,
        "step": step,
    }, value


@pytest.fixture
def result(pipeline):
    """The state and the loss after a step; the rate and the number of the step are on two stages."""
    run = pipeline(train_step, initial(), batch_of(0), 2)
    state, loss = run.step_function(run.state, batch_of(0))
    assert hasattr(state["step"], "replica")
    return state, loss


def test_a_step_fetches_no_value(pipeline, monkeypatch):
    from alpa.device_mesh import DistributedPhysicalDeviceMesh

    run = pipeline(train_step, initial(), batch_of(0), 2)
    state, _ = run.step_function(run.state, batch_of(0))
    own, fetched = DistributedPhysicalDeviceMesh.get_remote_buffers, []
    monkeypatch.setattr(
        DistributedPhysicalDeviceMesh, "get_remote_buffers", lambda *args: fetched.append(args) or own(*args)
    )
    state, loss = run.step_function(state, batch_of(1))
    assert not fetched
    assert loss > 0
    assert len(fetched) == 1


def test_values_are_read_as_those_of_jax(result):
    state, loss = result
    step, rate, weights = state["step"], state["rate"], state["weights"][0]
    assert step == 1
    assert step != 0
    assert not step > 1
    assert [int(step), range(3)[step], bool(step - 1), step % 1 == 0] == [1, 1, False, True]
    for array in (loss, rate):
        value = np.asarray(array)
        assert array
        assert jnp.isfinite(array)
        assert f"{array:.3f} {round(array, 3):.3f}" == "{0:.3f} {0:.3f}".format(float(value))
        assert float(array) == array.item() == value == jnp.mean(array) == jax.jit(lambda one: one)(array)
        assert isinstance(0.5 * array + jnp.float32(1), jax.Array)
        assert (array.shape, array.dtype, array.size, array.ndim) == ((), np.float32, 1, 0)
        assert jax.block_until_ready(array) is array
        assert array in {array: 0}
    value = np.asarray(weights)
    assert (len(weights), weights.ndim, float(weights[2, 3])) == (WIDTH, 2, value[2, 3])
    np.testing.assert_array_equal(list(weights), value)
    np.testing.assert_allclose(value @ weights, value @ value, rtol=1e-5)
    np.testing.assert_allclose(jnp.linalg.norm(weights), np.linalg.norm(value), rtol=1e-5)


def test_a_value_is_read_only_as_that_of_a_jax_array(result):
    import asyncio

    import alpa

    state, _ = result
    rate, (first, second, third, _) = state["rate"], state["weights"]
    alpa.prefetch([second])
    for value in (np.asarray(first), first._value, second._value, asyncio.run(third.to_np_async()), np.asarray(rate)):
        with pytest.raises(ValueError, match="read-only"):
            value *= 0.5
    np.array(first)[...] = 0  # a copy
    assert first._value.any()


def test_a_state_is_copied_and_pickled_as_arrays_of_jax(result):
    state, _ = result
    for found in (copy.deepcopy(state), pickle.loads(pickle.dumps(state)), copy.copy(state["rate"])):
        for one, other in zip(jax.tree_util.tree_leaves(found), jax.tree_util.tree_leaves(state)):
            assert isinstance(one, jax.Array)
            np.testing.assert_array_equal(one, other)
