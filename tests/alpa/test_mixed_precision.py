"""bfloat16, and float16 with Alpa's dynamic loss scale: equal to the same computation by plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from builders import chosen
from flax import linen as nn

pytestmark = pytest.mark.alpa

WIDTH, SAMPLES = 16, 8


class Mlp(nn.Module):
    dtype: type

    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = nn.tanh(nn.Dense(WIDTH, dtype=self.dtype, param_dtype=jnp.float32)(x))
        return x


def batch_of(step, factor=1.0):
    x = np.random.default_rng(step).standard_normal((SAMPLES, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(3 * x) * np.float32(factor)}


def scaled_state():
    import alpa  # noqa: F401
    from alpa.model.model_util import DynamicScale, TrainState

    module = Mlp(jnp.float16)
    params = module.init(jax.random.PRNGKey(0), jnp.ones((1, WIDTH)))
    return TrainState.create(
        apply_fn=module.apply,
        params=params,
        tx=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
        use_master_copy=True,
        dynamic_scale=DynamicScale(growth_interval=1, scale=jnp.float32(1024.0), fin_steps=jnp.int32(0)),
    )


def scaled_step(state, batch):
    """As in Alpa's own examples: an update with gradients that overflowed is skipped."""

    def loss(params):
        return jnp.mean((state.apply_fn(params, batch["x"]).astype(jnp.float32) - batch["y"]) ** 2)

    scale, finite, value, gradients = state.dynamic_scale.value_and_grad(loss)(state.params)
    new = state.apply_gradients(grads=gradients)
    keep = lambda a, b: jax.tree_util.tree_map(lambda x, y: jnp.where(finite, x, y), a, b)  # noqa: E731
    new = new.replace(
        opt_state=keep(new.opt_state, state.opt_state),
        params=keep(new.params, state.params),
        master_copy=keep(new.master_copy, state.master_copy),
        dynamic_scale=scale,
    )
    return new, value, finite


BATCHES = [batch_of(0), batch_of(1), batch_of(2, factor=1e9), batch_of(3), batch_of(4)]


@pytest.mark.parametrize("stages", chosen([1, 2, 4], 1))
def test_float16_with_dynamic_loss_scale(stages, pipeline):
    state = scaled_state()
    run = pipeline(scaled_step, state, batch_of(0), stages)
    scales, finites, losses = [], [], []
    for batch in BATCHES:
        before = [np.asarray(leaf._value) if hasattr(leaf, "_value") else leaf for leaf in masters(run.state)]
        loss, finite = run.step(batch)
        losses.append(float(loss))
        finites.append(bool(finite))
        scales.append(float(run.state.dynamic_scale.scale._value))
        after = [leaf._value for leaf in masters(run.state)]
        assert all(np.array_equal(a, b) for a, b in zip(before, after)) is not bool(finite)
        assert all(leaf.dtype == np.float32 for leaf in after)
    assert finites == [True, True, False, True, True]
    assert scales == [1024, 2048, 1024, 1024, 2048]
    np.testing.assert_allclose(losses, expected_losses(), rtol=2e-3)


def masters(state):
    return jax.tree_util.tree_leaves(state.master_copy)


def expected_losses():
    """Plain JAX without microbatches and without a scale, in float32 where float16 would round, updates as above."""
    module = Mlp(jnp.float16)
    params = module.init(jax.random.PRNGKey(0), jnp.ones((1, WIDTH)))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    state, losses = optimizer.init(params), []

    @jax.jit
    def loss_of(params, batch):
        return jnp.mean((module.apply(params, batch["x"]).astype(jnp.float32) - batch["y"]) ** 2)

    for index, batch in enumerate(BATCHES):
        halves = jax.tree_util.tree_map(lambda x: jnp.asarray(x, jnp.float16), params)
        value, gradients = jax.value_and_grad(loss_of)(halves, batch)
        losses.append(float(value))
        if index != 2:  # its gradients overflow
            gradients = jax.tree_util.tree_map(lambda g: g.astype(jnp.float32), gradients)
            updates, state = optimizer.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
    return losses


@pytest.mark.thorough
@pytest.mark.parametrize("stages", chosen([2, 4], 1))
def test_bfloat16_with_float32_weights(stages, pipeline):
    import alpa

    module = Mlp(jnp.bfloat16)
    optimizer = optax.adam(1e-2)
    params = module.init(jax.random.PRNGKey(0), jnp.ones((1, WIDTH)))

    def step(value_and_grad):
        def train_step(state, batch):
            def loss(params):
                return jnp.mean((module.apply(params, batch["x"]).astype(jnp.float32) - batch["y"]) ** 2)

            value, gradients = value_and_grad(loss)(state[0])
            updates, optimizer_state = optimizer.update(gradients, state[1], state[0])
            return (optax.apply_updates(state[0], updates), optimizer_state), value

        return train_step

    state = (params, optimizer.init(params))
    run = pipeline(step(alpa.value_and_grad), state, batch_of(0), stages)
    sent = {str(spec.dtype) for task in run.executable.resharding_tasks for spec in [task.task_spec.aval]}
    assert sent == {"bfloat16"}
    losses = [run.step(batch_of(number))[0] for number in range(4)]
    expected = []
    for number in range(4):
        state, value = jax.jit(step(jax.value_and_grad))(state, batch_of(number))
        expected.append(float(value))
    np.testing.assert_allclose(losses, expected, rtol=1e-2)
    assert all(leaf.aval.dtype == np.float32 for leaf in jax.tree_util.tree_leaves(run.state[0]))


@pytest.fixture
def wide_numbers():
    """Let this process compute in float64."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def test_workers_compute_in_float64_as_their_driver_does(wide_numbers, pipeline):
    import alpa

    drawn = np.random.default_rng(0)
    weights = [drawn.standard_normal((WIDTH, WIDTH)) for _ in range(2)]
    batch = {"x": drawn.standard_normal((SAMPLES, WIDTH))}

    def step(value_and_grad):
        def train_step(weights, batch):
            def loss(weights):
                return jnp.mean((jnp.tanh(batch["x"] @ weights[0]) @ weights[1]) ** 2)

            value, gradients = value_and_grad(loss)(weights)
            return [weight - gradient for weight, gradient in zip(weights, gradients)], value

        return train_step

    run = pipeline(step(alpa.value_and_grad), weights, batch, 2, donate=(0,))
    (found,) = run.step(batch)
    new, expected = step(jax.value_and_grad)(weights, batch)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    for mine, theirs in zip(run.state, new):
        np.testing.assert_allclose(np.asarray(mine._value), theirs, rtol=1e-12, atol=1e-12)
