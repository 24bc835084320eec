"""Dropout under the pipeline: every microbatch has its own masks, forward and backward pass share them, runs repeat."""

import functools
import inspect
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import chosen
from flax import linen as nn

pytestmark = pytest.mark.alpa

WIDTH, SAMPLES, MICROBATCHES, RATE = 16, 16, 4, 0.02


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = nn.tanh(nn.Dense(WIDTH)(x))
            x = nn.Dropout(0.5, deterministic=False)(x)
        return x


def batch_of(step):
    x = np.random.default_rng(step).standard_normal((SAMPLES, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x)}


def fresh_state():
    module = Mlp()
    keys = {"params": jax.random.PRNGKey(0), "dropout": jax.random.PRNGKey(1)}
    params = module.init(keys, jnp.ones((1, WIDTH)))
    return {"params": params, "key": jax.random.PRNGKey(2), "step": jnp.zeros((), jnp.int32)}


def loss_of(params, key, step, batch):
    out = Mlp().apply(params, batch["x"], rngs={"dropout": jax.random.fold_in(key, step)})
    return jnp.mean((out - batch["y"]) ** 2)


def train_step(state, batch):
    import alpa

    used = jax.random.split(state["key"])[0]
    loss, gradients = alpa.value_and_grad(lambda p: loss_of(p, used, state["step"], batch))(state["params"])
    return updated(state, gradients), loss


def updated(state, gradients):
    params = jax.tree_util.tree_map(lambda p, g: p - RATE * g, state["params"], gradients)
    # Alpa wants what is not part of the loss after the gradients.
    return {"params": params, "key": jax.random.split(state["key"])[1], "step": state["step"] + 1}


def expected_losses(steps):
    """Plain JAX, a microbatch at a time, with the microbatch's number folded into each draw's key."""
    plain_bernoulli, state, losses = jax.random.bernoulli, fresh_state(), []
    size = SAMPLES // MICROBATCHES

    @functools.partial(jax.jit, static_argnums=4)
    def value_and_grad(params, key, step, part, number):
        def bernoulli(key, p, shape):
            return plain_bernoulli(jax.random.fold_in(key, 0x68770000 + number) if number else key, p, shape)

        jax.random.bernoulli = bernoulli
        try:
            return jax.value_and_grad(loss_of)(params, key, step, part)
        finally:
            jax.random.bernoulli = plain_bernoulli

    for step in range(steps):
        batch, results = batch_of(step), []
        used = jax.random.split(state["key"])[0]
        for number in range(MICROBATCHES):
            part = {name: rows[size * number : size * (number + 1)] for name, rows in batch.items()}
            results.append(value_and_grad(state["params"], used, state["step"], part, number))
        loss, gradients = jax.tree_util.tree_map(lambda *parts: sum(parts) / MICROBATCHES, *results)
        losses.append(float(loss))
        state = updated(state, gradients)
    return losses


@pytest.mark.parametrize(
    ("stages", "remat", "schedule"), chosen([(1, False, "1f1b"), (2, True, "gpipe"), (4, True, "1f1b")], 1)
)
def test_dropout(stages, remat, schedule, pipeline):
    run = pipeline(
        train_step, fresh_state(), batch_of(0), stages, MICROBATCHES, remat=remat, pipeline_schedule=schedule
    )
    losses = [float(run.step(batch_of(step))[0]) for step in range(3)]
    np.testing.assert_allclose(losses, expected_losses(3), rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("logical", [(2, 1), (1, 2)])
def test_dropout_on_several_devices_is_that_of_one(logical, pipeline):
    run = pipeline(train_step, fresh_state(), batch_of(0), 2, MICROBATCHES, remat=True, logical=logical)
    losses = [float(run.step(batch_of(step))[0]) for step in range(3)]
    np.testing.assert_allclose(losses, expected_losses(3), rtol=1e-5)


def traced(function, *arguments):
    """The program as Alpa would trace it."""
    from hwaware.activation import install_runtime

    install_runtime()
    from alpa import monkey_patch

    monkey_patch.monkey_patch_random()
    try:
        with jax.disable_jit():
            return jax.make_jaxpr(function)(*arguments)
    finally:
        monkey_patch.restore_random()


def test_another_thread_draws_as_ever_while_alpa_traces():
    """Such as one that augments the next batch."""
    from hwaware.activation import install_runtime

    install_runtime()
    from alpa import monkey_patch

    drawn = []

    def augment():
        key = jax.random.PRNGKey(3)
        drawn.append(jax.jit(lambda key: jax.random.uniform(key, (7,), minval=2.0))(key))
        drawn.append(jax.jit(lambda key: jax.random.truncated_normal(key, -1.0, 2.0, (7,)))(key))
        drawn.append(jax.random.bernoulli(key, 0.3, (7,)))

    for traces in (False, True):
        if traces:
            monkey_patch.monkey_patch_random()
        try:
            thread = threading.Thread(target=augment)
            thread.start()
            thread.join(60)
        finally:
            monkey_patch.restore_random()
    assert len(drawn) == 6
    for stock, found in zip(drawn[:3], drawn[3:]):
        np.testing.assert_array_equal(stock, found)


KEY = np.array([0, 7], np.uint32)  # PRNGKey(7), without waking JAX before Ray forks
SAMPLERS = {
    "uniform": lambda key: jax.random.uniform(key, (5,), minval=-1.0, maxval=3.0),
    "normal": lambda key: jax.random.normal(key, (5,)),
    "randint": lambda key: jax.random.randint(key, (50,), -3, 90),
    "randint of bytes": lambda key: jax.random.randint(key, (5, 2), 0, 256, "uint8"),
    "choice": lambda key: jax.random.choice(key, 1000, (5,)),
    "truncated": lambda key: jax.random.truncated_normal(key, -1.0, 1.0, (5,)),
    "bernoulli": lambda key: jax.random.bernoulli(key, 0.3, (50,)),
    "bernoulli of chances": lambda key: jax.random.bernoulli(key, jnp.linspace(0.2, 0.8, 50)),
    "bfloat16": lambda key: jax.random.normal(key, (5,), jnp.bfloat16),
    "gumbel": lambda key: jax.random.gumbel(key, (5,)),
    "categorical": lambda key: jax.random.categorical(key, jnp.zeros((30, 5))),
    "many": lambda key: jax.vmap(lambda key: jax.random.normal(key, (2, 3)))(jax.random.split(key, 4)),
    "rematerialised": jax.checkpoint(lambda key: jnp.tanh(jax.random.normal(key, (5,)))),
}


if "mode" in inspect.signature(jax.random.gumbel).parameters:
    SAMPLERS["bernoulli in high mode"] = lambda key: jax.random.bernoulli(key, 0.3, (50,), mode="high")
    SAMPLERS["gumbel in high mode"] = lambda key: jax.random.gumbel(key, (5,), mode="high")


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_first_microbatch_draws_what_plain_jax_draws_and_others_draw_other_numbers(name):
    from hwaware.compat.programs import jaxpr_as_fun
    from hwaware.compiler import randomness

    program = traced(SAMPLERS[name], KEY)
    assert randomness.draws(program)
    run = jax.jit(jaxpr_as_fun(randomness.resolved(program, microbatched=True)))
    first, second, again = (np.asarray(run(KEY, number)[0]) for number in (0, 1, 1))
    expected = np.asarray(SAMPLERS[name](KEY))
    np.testing.assert_allclose(first.astype(float), expected.astype(float), rtol=1e-5)
    np.testing.assert_array_equal(second, again)
    assert not np.array_equal(first, second)
    once = jaxpr_as_fun(randomness.resolved(program, microbatched=False))(KEY)[0]
    np.testing.assert_allclose(np.asarray(once).astype(float), expected.astype(float), rtol=1e-5)


@pytest.mark.parametrize("wrap", [lambda function: function, jax.checkpoint], ids=["plain", "rematerialised"])
def test_keys_of_the_samples_draw_what_plain_jax_draws_in_each_microbatch(wrap):
    from hwaware.compat.programs import jaxpr_as_fun
    from hwaware.compiler import randomness

    def function(key, ids):
        def of_samples(keys):
            return jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys)

        own = wrap(of_samples)(jax.vmap(lambda each: jax.random.fold_in(key, each))(ids))
        return own, wrap(of_samples)(jax.random.split(key, 4)), jax.random.normal(ids[:2].astype("uint32"), (4,))

    ids = np.arange(4)
    program = randomness.with_keys_of_samples(traced(function, KEY, ids), [False, True])
    found = jax.jit(jaxpr_as_fun(randomness.resolved(program, microbatched=True)))(KEY, ids, 1)
    own, *shared = zip(found, function(KEY, ids))
    np.testing.assert_allclose(*own, rtol=1e-5)
    assert not any(np.allclose(*pair) for pair in shared)


def test_a_sharding_of_random_numbers_is_refused():
    from hwaware.errors import AlpaError

    with pytest.raises(AlpaError, match=r"jax.random.normal is given out_sharding=.*To fix: leave out_sharding out"):
        traced(lambda key: jax.random.normal(key, (4,), out_sharding="x"), KEY)


def test_a_draw_inside_a_loop_and_a_bound_that_is_learnt_are_refused():
    from hwaware.compiler import randomness
    from hwaware.errors import AlpaError

    def loop(key):
        return jax.lax.while_loop(lambda x: x < 0.9, lambda x: jax.random.uniform(key), 0.0)

    from hwaware.activation import install_runtime

    install_runtime()
    from alpa import monkey_patch

    monkey_patch.monkey_patch_random()
    try:
        program = jax.make_jaxpr(loop)(KEY)
        with pytest.raises(AlpaError, match="depend on what is differentiated"):
            jax.make_jaxpr(jax.grad(lambda top: jax.random.uniform(KEY, (), maxval=top)))(1.0)
    finally:
        monkey_patch.restore_random()
    with pytest.raises(AlpaError, match="drawn inside a while"):
        randomness.resolved(program, microbatched=True)
