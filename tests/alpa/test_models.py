"""Built-in models: deterministic, trainable, and with a loss that does not depend on how the batch is cut."""

import jax
import numpy as np
import pytest
from builders import chosen

from hwaware import models

pytestmark = pytest.mark.alpa

SMALL = [
    models.MlpConfig(blocks=2, hidden=16),
    models.GptConfig(blocks=2, hidden=16, heads=2, sequence=8, vocabulary=32),
    models.MoeConfig(blocks=2, hidden=16, heads=2, sequence=8, vocabulary=32, experts=2),
    models.WresnetConfig(blocks=3, width=8, image=8),
]


@pytest.fixture(scope="module", params=chosen(SMALL, 0), ids=lambda config: config.NAME)
def small(request):
    return models.make(request.param)


@pytest.fixture(scope="module")
def step(small):
    return jax.jit(small.train_step)


def test_data_and_parameters_are_the_same_every_time(small):
    again = models.make(small.config)
    for first, second in ((small.batch(3, 4), again.batch(3, 4)), (small.initial_state(1), again.initial_state(1))):
        leaves = zip(jax.tree_util.tree_leaves(first), jax.tree_util.tree_leaves(second))
        assert all(np.array_equal(a, b) for a, b in leaves)
    assert not np.array_equal(small.batch(3, 4)["inputs"], small.batch(4, 4)["inputs"])


def test_training_lowers_the_loss(small, step):
    state, losses = small.initial_state(), []
    batch = small.batch(0, 8)
    for _ in range(20):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert losses[-1] < 0.97 * losses[0]


def test_mean_over_microbatches_is_the_loss_of_the_batch(small, step):
    state, batch = small.initial_state(), small.batch(0, 8)
    halves = [{name: value[part] for name, value in batch.items()} for part in (slice(0, 4), slice(4, 8))]
    mean = np.mean([float(step(state, half)[1]) for half in halves])
    assert mean == pytest.approx(float(step(state, batch)[1]), rel=1e-5)


def test_abstract_state_is_the_state_without_numbers(small):
    def shapes(tree):
        return jax.tree_util.tree_map(lambda leaf: (np.shape(leaf), str(np.asarray(leaf).dtype)), tree)

    described = jax.tree_util.tree_map(lambda leaf: (leaf.shape, str(leaf.dtype)), small.abstract_state().params)
    assert described == shapes(small.initial_state().params)


def test_the_gradient_function_is_the_callers(small):
    calls = []

    def counting(loss):
        calls.append(loss)
        return jax.value_and_grad(loss)

    jax.eval_shape(
        lambda state, batch: small.train_step(state, batch, value_and_grad=counting),
        small.abstract_state(),
        small.batch(0, 2),
    )
    assert len(calls) == 1


@pytest.mark.thorough
def test_attention_looks_back_only():
    model = models.make(SMALL[1])
    state, tokens = model.initial_state(), model.batch(0, 1)["inputs"]
    changed = tokens.copy()
    changed[:, -1] = (changed[:, -1] + 1) % 32
    before, after = (model.module.apply({"params": state.params}, batch) for batch in (tokens, changed))
    np.testing.assert_allclose(before[:, :-1], after[:, :-1], rtol=1e-5, atol=1e-6)
    assert not np.allclose(before[:, -1], after[:, -1])
