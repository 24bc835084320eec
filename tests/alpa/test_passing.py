"""A step may return parts of its state as it got them: keys, frozen weights, values that it never reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import chosen

pytestmark = pytest.mark.alpa

WIDTH = 16


def batch_of(step):
    x = np.random.default_rng(step).standard_normal((8, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x)}


def train_step(value_and_grad):
    def step(state, batch):
        def loss(weights):
            x = batch["x"]
            for frozen, learnt in zip(state["frozen"], weights):
                x = jnp.tanh(jnp.tanh(x @ frozen) @ learnt)
            x = jnp.where(jax.random.bernoulli(jax.random.fold_in(state["key"], state["step"]), 0.5, x.shape), x, 0)
            return jnp.mean((x - batch["y"]) ** 2)

        value, gradients = value_and_grad(loss)(state["weights"])
        weights = [w - 0.5 * g for w, g in zip(state["weights"], gradients)]
        return {**state, "weights": weights, "step": state["step"] + 1}, value

    return step


@pytest.mark.parametrize("stages", chosen([1, 2], 1))
def test_what_is_returned_unchanged(stages, pipeline):
    import alpa

    keys = jax.random.split(jax.random.PRNGKey(0), 8)
    matrices = [jax.random.normal(key, (WIDTH, WIDTH)) / 4 for key in keys]
    state = {
        "weights": matrices[:4],
        "frozen": matrices[4:],
        "key": jax.random.PRNGKey(1),
        "step": jnp.zeros((), jnp.int32),
        "never read": jnp.arange(3.0),
    }
    run = pipeline(train_step(alpa.value_and_grad), state, batch_of(0), stages, microbatches=1)
    losses = [run.step(batch_of(step))[0] for step in range(3)]
    plain, before, expected = jax.jit(train_step(jax.value_and_grad)), state, []
    for step in range(3):
        before, loss = plain(before, batch_of(step))
        expected.append(float(loss))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for name in ("frozen", "key", "never read"):
        for mine, given in zip(jax.tree_util.tree_leaves(run.state[name]), jax.tree_util.tree_leaves(state[name])):
            np.testing.assert_array_equal(mine._value, given)


def test_a_step_of_one_microbatch_returns_bools(pipeline):
    import alpa

    def step(value_and_grad):
        def train(weights, batch):
            def loss(weights):
                wrong = (jnp.tanh(batch["x"] @ weights[0]) @ weights[1] - batch["y"]) ** 2
                return jnp.mean(wrong), (wrong[:, 0] > 1, jnp.all(wrong < 9))

            (value, found), gradients = value_and_grad(loss, has_aux=True)(weights)
            return [w - 0.5 * g for w, g in zip(weights, gradients)], value, found

        return train

    weights = [np.eye(WIDTH, dtype=np.float32), np.eye(WIDTH, dtype=np.float32) * 2]
    run = pipeline(step(alpa.value_and_grad), weights, batch_of(0), 2, microbatches=1)
    value, found = run.step(batch_of(0))
    _, expected, bools = jax.jit(step(jax.value_and_grad))(weights, batch_of(0))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for mine, plain in zip(found, bools):
        assert mine.dtype == bool
        np.testing.assert_array_equal(mine, plain)
