"""Steps as users write them, with what Alpa alone does not know: they train like plain JAX, however they are cut.

A loss may be no farther from the exact one, plain JAX's in float64, than plain JAX's own in float32 is for some order
of the samples: a batch has no order, so each order is a draw of the rounding.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from builders import chosen, enable_x64

import hwaware

pytestmark = pytest.mark.alpa
STEPS, SAMPLES, WIDTH, CLASSES, BLOCKS, ORDERS = 3, 16, 16, 8, 4, 8


class OfAlpa:
    """A step takes its gradient by alpa.value_and_grad, and marks the boundaries of its layers."""

    def __init__(self, layers):
        self._last = {BLOCKS * (layer + 1) // layers - 1 for layer in range(layers - 1)}

    def value_and_grad(self, *args, **kwargs):
        import alpa

        return alpa.value_and_grad(*args, **kwargs)

    def block_ends(self, block):
        import alpa

        if block in self._last:
            alpa.mark_pipeline_boundary()


class OfJax:
    """The same step in plain JAX."""

    value_and_grad = staticmethod(jax.value_and_grad)

    def block_ends(self, block):
        del block


def weights():
    drawn = np.random.default_rng(0)
    blocks = [drawn.standard_normal((WIDTH, WIDTH)).astype(np.float32) * 0.3 for _ in range(BLOCKS)]
    return {"blocks": blocks, "head": drawn.standard_normal((WIDTH, CLASSES)).astype(np.float32) * 0.3}


def batch_of(step):
    drawn = np.random.default_rng(100 + step)
    mask = (drawn.random(SAMPLES) < np.linspace(0.2, 0.9, SAMPLES)).astype(np.float32)
    mask[0] = 1.0
    x = drawn.standard_normal((SAMPLES, WIDTH)).astype(np.float32)
    return {"x": x, "label": drawn.integers(0, CLASSES, SAMPLES).astype(np.int32), "mask": mask}


def scalars(under):
    """A penalty, a temperature, annealing and a key that cross stages; results that no sample influences; logits."""

    def step(state, batch):
        key, used = jax.random.split(state["key"])
        labels = jax.nn.one_hot(batch["label"], CLASSES)
        samples = batch["x"].shape[0]
        anneal = 1.0 / (1.0 + state["step"])

        def loss(params):
            x = batch["x"] * (jax.random.bits(used, (WIDTH,), "uint32") >> 8).astype(batch["x"].dtype) / 2**24
            x = x * jnp.exp(params["temperature"])
            penalty = 0.0
            for block, weight in enumerate(params["blocks"]):
                x = x + jnp.tanh(x @ weight)
                penalty = penalty + jnp.mean(x**2)
                under.block_ends(block)
            logits = x @ params["head"] / jnp.exp(params["temperature"])
            error = jnp.mean(optax.softmax_cross_entropy(logits, labels))
            kept = {"logits": logits, "penalty": penalty, "zero": jnp.zeros(()), "samples": samples, "used": used}
            return error + 0.1 * anneal * penalty, kept

        (value, kept), gradients = under.value_and_grad(loss, has_aux=True)(state["params"])
        norm = jnp.sqrt(sum(jnp.sum(one**2) for one in jax.tree_util.tree_leaves(gradients)))
        params = jax.tree_util.tree_map(lambda p, g: p - 0.1 * g / jnp.maximum(norm, 1.0), state["params"], gradients)
        seen = state["seen"] + samples
        new = {"params": params, "key": key, "step": state["step"] + 1, "seen": seen}
        return new, value, kept, {"samples": samples, "seven": 7, "ones": jnp.ones((3,))}

    params = {**weights(), "temperature": np.float32(0.1), "unused": np.float32(0.1)}
    return step, {"params": params, "key": np.array([0, 7], np.uint32), "step": np.int32(0), "seen": np.int32(0)}


def teacher(under):
    """A frozen first block, a teacher beside the loss, its moving average, and a mean over a mask."""

    def step(state, batch):
        goal = batch["x"]
        for weight in state["teacher"]:
            goal = jnp.tanh(goal @ weight)
        frozen = state["frozen"]

        def loss(params):
            x = jnp.tanh(batch["x"] @ frozen)
            under.block_ends(0)
            for block, weight in enumerate(params["blocks"][1:], 1):
                x = jnp.tanh(x @ weight)
                under.block_ends(block)
            errors = jnp.mean((x - goal) ** 2, axis=1)
            return jnp.sum(errors * batch["mask"]), jnp.sum(batch["mask"])

        (total, count), gradients = under.value_and_grad(loss, has_aux=True)(state["params"])
        params = jax.tree_util.tree_map(lambda p, g: p - 0.5 * g / count, state["params"], gradients)
        moving = [0.9 * old + 0.1 * new for old, new in zip(state["teacher"], params["blocks"])]
        return {"params": params, "teacher": moving, "frozen": frozen}, total / count

    params = {"blocks": weights()["blocks"]}
    return step, {"params": params, "teacher": weights()["blocks"], "frozen": params["blocks"][0] * 2}


def balanced(under):
    """A loss with a term of every block beside it, as balanced experts have: each passes a gradient of 1 on."""

    def step(state, batch):
        labels = jax.nn.one_hot(batch["label"], CLASSES)

        def loss(params):
            x, balance = batch["x"], 0.0
            for block, weight in enumerate(params["blocks"]):
                x = jnp.tanh(x @ weight)
                balance = balance + jnp.mean(x**2)
                under.block_ends(block)
            return jnp.mean(optax.softmax_cross_entropy(x @ params["head"], labels)) + balance

        value, gradients = under.value_and_grad(loss)(state)
        return jax.tree_util.tree_map(lambda p, g: p - 0.1 * g, state, gradients), value

    return step, weights()


PROGRAMS = {"scalars": scalars, "teacher": teacher, "balanced": balanced}
CASES = [
    ("scalars", 2, (2, 1), 4), ("teacher", 2, (2, 1), 2), ("teacher", 4, (1, 1), 4), ("balanced", 2, (1, 1), 2),
]  # fmt: skip
if os.environ.get("HWAWARE_ALL_CASES"):
    CASES = [
        (name, stages, logical, parts)
        for name in PROGRAMS
        for stages in (1, 2, 4)
        for logical in ((1, 1), (2, 1), (1, 2))
        for parts in (1, 2, 4)
    ]


def widened(tree):
    return jax.tree_util.tree_map(
        lambda leaf: leaf.astype(np.float64) if np.asarray(leaf).dtype == np.float32 else leaf,
        jax.tree_util.tree_map(np.asarray, tree),
    )


def plain(name, order=None, convert=lambda tree: tree):
    """Plain JAX's results of every step, and its last state."""
    step, state = PROGRAMS[name](OfJax())
    step, state, found = jax.jit(step), convert(state), []
    for number in range(STEPS):
        batch = {key: rows if order is None else rows[order] for key, rows in batch_of(number).items()}
        state, *rest = step(state, convert(batch))
        found.append(rest)
    return found, state


@pytest.fixture(scope="module")
def known():
    """For each program: plain JAX's results, the exact losses, and how far plain JAX's own are from these."""
    cache = {}

    def look_up(name):
        if name not in cache:
            orders = [np.random.default_rng(seed).permutation(SAMPLES) for seed in range(ORDERS)]
            with enable_x64():
                exact = [float(results[0]) for results in plain(name, convert=widened)[0]]
            own = [[abs(float(one[0]) - e) for one, e in zip(plain(name, order)[0], exact)] for order in orders]
            cache[name] = (plain(name), exact, max(map(max, own)))
        return cache[name]

    return look_up


@pytest.mark.parametrize(("name", "stages", "logical", "parts"), CASES)
def test_a_step_trains_like_plain_jax(pipeline, known, name, stages, logical, parts):
    import alpa

    (expected, last), exact, own = known(name)
    step, state = PROGRAMS[name](OfAlpa(stages))
    method = {"layer_option": alpa.ManualLayerOption(), "logical": logical, "donate": (0,)}
    run = pipeline(step, state, batch_of(0), stages, parts, **method)
    found = [run.step(batch_of(number)) for number in range(STEPS)]
    error = max(abs(float(one[0]) - value) for one, value in zip(found, exact))
    assert error <= own + np.spacing(np.float32(max(exact)))
    for one, other in zip(found, expected):
        for mine, theirs in zip(*map(jax.tree_util.tree_leaves, (one, other))):
            assert np.shape(mine) == np.shape(theirs)
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(*map(jax.tree_util.tree_leaves, (run.state, last))):
        np.testing.assert_allclose(np.asarray(mine._value), theirs, rtol=1e-4, atol=1e-5)


OPTIMIZERS = {
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=8),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "several steps": optax.MultiSteps(optax.adam(0.1), every_k_schedule=2),
    "batch norm": optax.sgd(0.1, momentum=0.9),
}


def optimized(under, name):
    """Dense blocks under an optimizer of optax; with "batch norm", the state has statistics that the loss updates."""
    import flax.linen as nn

    optimizer, norm = OPTIMIZERS[name], nn.BatchNorm(use_running_average=False, momentum=0.9)
    drawn = norm.init(jax.random.PRNGKey(0), jnp.ones((2, WIDTH))) if name == "batch norm" else {}

    def step(state, batch):
        labels = jax.nn.one_hot(batch["label"], CLASSES)

        def loss(params):
            x, stats = batch["x"], []
            for block, weight in enumerate(params["blocks"]):
                x = x + jnp.tanh(x @ weight)
                if drawn:
                    variables = {"params": params["scales"][block], "batch_stats": state["stats"][block]}
                    x, new = norm.apply(variables, x, mutable=["batch_stats"])
                    stats.append(new["batch_stats"])
                under.block_ends(block)
            return jnp.mean(optax.softmax_cross_entropy(x @ params["head"], labels)), stats

        (value, stats), gradients = under.value_and_grad(loss, has_aux=True)(state["params"])
        changes, optimizers = optimizer.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], changes), "optimizer": optimizers, "stats": stats}, value

    params = {**weights(), "scales": [drawn["params"]] * BLOCKS if drawn else []}
    stats = [drawn["batch_stats"]] * BLOCKS if drawn else []
    return step, {"params": params, "optimizer": optimizer.init(params), "stats": stats}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_trace_counts_the_state_of_an_optimizer(name, monkeypatch):
    monkeypatch.setitem(globals(), "WIDTH", 64)
    monkeypatch.setitem(globals(), "CLASSES", 32)
    step, state = optimized(OfJax(), name)
    layers = hwaware.trace(step, state, batch_of(0), num_layers=2, microbatch_size=8).layers
    held = sum(np.asarray(leaf).nbytes for leaf in jax.tree_util.tree_leaves(state))
    counted = sum(layer.parameter_bytes + layer.optimizer_bytes for layer in layers)
    counters = sum(leaf.nbytes for leaf in map(np.asarray, jax.tree_util.tree_leaves(state)) if not leaf.shape)
    assert counted == held + counters  # each layer counts its steps


# A batch normalization sees one microbatch, so several differ from plain JAX's whole batch.
@pytest.mark.parametrize(
    ("name", "parts"), chosen([("adafactor", 2), ("several steps", 2), ("batch norm", 1), ("momentum", 4)], 2)
)
def test_optimizers_and_statistics_train_like_plain_jax(pipeline, name, parts):
    import alpa

    step, state = optimized(OfJax(), name)
    step, expected = jax.jit(step), []
    for number in range(2 * STEPS):
        state, value = step(state, batch_of(number))
        expected.append(float(value))
    mine, start = optimized(OfAlpa(2), name)
    run = pipeline(mine, start, batch_of(0), 2, parts, layer_option=alpa.ManualLayerOption(), donate=(0,))
    losses = [float(run.step(batch_of(number))[0]) for number in range(2 * STEPS)]
    assert losses == pytest.approx(expected, rel=1e-5)
    for one, other in zip(*map(jax.tree_util.tree_leaves, (run.state, state))):
        np.testing.assert_allclose(np.asarray(one._value), other, rtol=1e-4, atol=1e-5)
