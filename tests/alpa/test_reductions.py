"""Values that several stages combine: clipping by the global norm, on any number of stages, equals plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from builders import chosen
from flax import linen as nn
from flax.training.train_state import TrainState

pytestmark = pytest.mark.alpa

WIDTH, SAMPLES = 16, 8


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = nn.tanh(nn.Dense(WIDTH)(x))
        return x


def state_of(optimizer):
    module = Mlp()
    params = module.init(jax.random.PRNGKey(0), jnp.ones((1, WIDTH)))
    return TrainState.create(apply_fn=module.apply, params=params, tx=optimizer)


def batch_of(step):
    generator = np.random.default_rng(step)
    x = generator.standard_normal((SAMPLES, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(3 * x)}


def loss_of(state, batch):
    return lambda params: jnp.mean((state.apply_fn(params, batch["x"]) - batch["y"]) ** 2)


def optax_step(value_and_grad):
    def step(state, batch):
        loss, gradients = value_and_grad(loss_of(state, batch))(state.params)
        return state.apply_gradients(grads=gradients), loss

    return step


def norm_step(value_and_grad):
    """Clips by hand and returns the norm, which Alpa itself then has on every stage."""

    def step(state, batch):
        loss, gradients = value_and_grad(loss_of(state, batch))(state.params)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree_util.tree_leaves(gradients)))
        scale = jnp.minimum(1.0, 0.01 / norm)
        return state.apply_gradients(grads=jax.tree_util.tree_map(lambda g: g * scale, gradients)), loss, norm

    return step


OPTIMIZERS = {"sgd": optax.sgd(0.5), "adam": optax.adam(1e-2)}


def plain(make_step, state, steps):
    step, seen = jax.jit(make_step(jax.value_and_grad)), []
    for number in range(steps):
        state, *rest = step(state, batch_of(number))
        seen.append(rest)
    return state, seen


@pytest.mark.parametrize(
    ("stages", "logical"), chosen([(1, (1, 1)), (2, (1, 1)), (4, (1, 1)), (2, (2, 1)), (2, (1, 2))], 2)
)
def test_clipping_by_global_norm(stages, logical, pipeline):
    import alpa

    state = state_of(optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(5.0)))
    run = pipeline(optax_step(alpa.value_and_grad), state, batch_of(0), stages, logical=logical)
    seen = [run.step(batch_of(number)) for number in range(4)]
    after, expected = plain(optax_step, state, 4)
    np.testing.assert_allclose(seen, expected, rtol=1e-5)
    for mine, theirs in zip(jax.tree_util.tree_leaves(run.state.params), jax.tree_util.tree_leaves(after.params)):
        np.testing.assert_allclose(mine._value, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stages", chosen([2, 4], 0))
def test_a_norm_by_hand_is_the_same_on_every_stage(stages, pipeline):
    import alpa

    state = state_of(OPTIMIZERS["adam"])
    run = pipeline(norm_step(alpa.value_and_grad), state, batch_of(0), stages, pipeline_schedule="gpipe")
    seen = [run.step(batch_of(number)) for number in range(3)]
    _, expected = plain(norm_step, state, 3)
    np.testing.assert_allclose(seen, expected, rtol=1e-4)
