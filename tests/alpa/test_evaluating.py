"""Evaluate what another function has trained: arrays of one function's workers go to those of the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.alpa

WIDTH = 8


def batch_of(samples):
    return {"x": np.random.default_rng(1).standard_normal((samples, WIDTH)).astype(np.float32)}


def encoded(weights, x):
    """A model whose first weights decode, too: both stages have these weights."""
    return jnp.tanh(x @ weights["tied"]) @ weights["tied"].T


def train_step(weights, batch):
    import alpa

    loss, gradients = alpa.value_and_grad(lambda w: jnp.mean((encoded(w, batch["x"]) - batch["x"]) ** 2))(weights)
    return jax.tree_util.tree_map(lambda w, g: w - 0.1 * g, weights, gradients), loss


@pytest.mark.parametrize("stages", [1, 2])
def test_tied_weights_are_evaluated_on_other_workers(pipeline, stages):
    weights = {"tied": jax.random.normal(jax.random.PRNGKey(0), (WIDTH, WIDTH))}
    training = pipeline(train_step, weights, batch_of(8), 2, donate=(0,))

    def evaluate(weights, batch):
        return encoded(weights, batch["x"])

    serving = pipeline(evaluate, weights, batch_of(8), stages, donate=(), pipeline_schedule="inference")
    for _ in range(2):
        training.step(batch_of(8))
        found = serving.step_function(training.state, batch_of(8))
        trained = {"tied": np.asarray(training.state["tied"].replica._value)}
        np.testing.assert_allclose(found._value, evaluate(trained, batch_of(8)), rtol=1e-5, atol=1e-5)
