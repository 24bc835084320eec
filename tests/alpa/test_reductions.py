"""Values that several stages combine: clipping by the global norm, on any number of stages, equals plain JAX."""

import functools

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


def _norm(values):
    return jnp.sqrt(sum(jnp.sum(jnp.square(one)) for one in jax.tree_util.tree_leaves(values)))


def _parts(params):
    """Each layer's weights, in order."""
    return [params["params"][name] for name in sorted(params["params"])]


def _over_updates(params, gradients, updates):
    first, *_, last = norms = list(map(_norm, _parts(gradients)))
    return _norm(updates), sum(norms), first, last, first + last


def _over_parts(params, gradients, updates):
    parts = _parts(gradients)
    smallest = [jnp.min(one["kernel"]) for one in parts]
    extremes = [functools.reduce(pick, smallest) for pick in (jnp.maximum, jnp.minimum)]
    return _norm(parts[2:]), _norm(parts[:3]), _norm(parts[1:]), _norm(params), extremes


def _in_turn(params, gradients, updates):
    before = _norm(_parts(updates)[:2])
    scaled = jax.tree_util.tree_map(lambda g: g / before, _parts(gradients)[2])
    is_bad = [~jnp.all(jnp.isfinite(one["bias"])) for one in _parts(updates)[1:]]
    return _norm([scaled, _parts(updates)[3]]), functools.reduce(jnp.logical_or, is_bad)


# Figures that some or all stages combine.
FIGURES = {"of updates": _over_updates, "of parts of the stages": _over_parts, "one after the other": _in_turn}
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.clip_by_global_norm(0.05), optax.sgd(1.0))
HALVES = optax.multi_transform(
    {"front": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0)), "behind": CLIPPED},
    lambda params: {"params": {name: "front" if name < "Dense_2" else "behind" for name in params["params"]}},
)


def figures_step(figures):
    def make(value_and_grad):
        def step(state, batch):
            loss, gradients = value_and_grad(loss_of(state, batch))(state.params)
            updates, slots = state.tx.update(gradients, state.opt_state, state.params)
            found = figures(state.params, gradients, updates)
            params = optax.apply_updates(state.params, updates)
            return state.replace(step=state.step + 1, params=params, opt_state=slots), (loss, found)

        return step

    return make


@pytest.mark.parametrize(("stages", "logical"), chosen([(3, (1, 1)), (4, (1, 1)), (2, (1, 2)), (2, (2, 1))], 0))
@pytest.mark.parametrize("optimizer", chosen([CLIPPED, HALVES], 1))
@pytest.mark.parametrize("name", FIGURES)
def test_figures_that_some_stages_combine(name, optimizer, stages, logical, pipeline):
    import alpa

    state, make = state_of(optimizer), figures_step(FIGURES[name])
    run = pipeline(make(alpa.value_and_grad), state, batch_of(0), stages, logical=logical)
    seen = [jax.tree_util.tree_leaves(run.step(batch_of(number))) for number in range(3)]
    after, expected = plain(make, state, 3)
    for mine, theirs in zip(seen, expected):
        np.testing.assert_allclose(mine, jax.tree_util.tree_leaves(theirs), rtol=1e-5)
    for mine, theirs in zip(jax.tree_util.tree_leaves(run.state.params), jax.tree_util.tree_leaves(after.params)):
        np.testing.assert_allclose(mine._value, theirs, rtol=1e-5, atol=1e-6)


def gated_step(value_and_grad):
    """A model with one scalar gate a layer, whose sum and gradients' sum the step returns."""

    def step(state, batch):
        def loss(params):
            x = batch["x"]
            for weight, gate in zip(params["weights"], params["gates"]):
                x = x + gate * jnp.tanh(x @ weight)
            return jnp.mean((x - batch["y"]) ** 2)

        value, gradients = value_and_grad(loss)(state)
        new = jax.tree_util.tree_map(lambda w, g: w - 0.1 * g, state, gradients)
        return new, (value, sum(state["gates"]) / 4, sum(gradients["gates"]), gradients["gates"][1], sum(new["gates"]))

    return step


def test_scalar_weights_of_several_stages_are_summed(pipeline):
    import alpa

    generator = np.random.default_rng(0)
    weights = [0.1 * generator.standard_normal((WIDTH, WIDTH)).astype(np.float32) for _ in range(4)]
    state = {"weights": weights, "gates": [np.float32(1 + 0.1 * k) for k in range(4)]}
    run = pipeline(gated_step(alpa.value_and_grad), state, batch_of(0), 3)
    seen = [jax.tree_util.tree_leaves(run.step(batch_of(number))) for number in range(3)]
    _, expected = plain(gated_step, state, 3)
    for mine, theirs in zip(seen, expected):
        np.testing.assert_allclose(mine, jax.tree_util.tree_leaves(theirs), rtol=1e-5)
