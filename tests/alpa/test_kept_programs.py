"""A program's next start loads what its workers compiled before, and computes the same numbers."""

import os

import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.alpa
STEPS, WIDTH = 2, 32


def drawn(number, *shape):
    return np.random.default_rng(number).standard_normal(shape).astype(np.float32)


def train_step(state, batch):
    import alpa

    def loss(layers):
        x = batch["x"]
        for weights in layers:
            x = jnp.tanh(x @ weights)
        return jnp.mean((x - batch["y"]) ** 2)

    value, gradients = alpa.value_and_grad(loss)(state)
    return [weights - 0.1 * gradient for weights, gradient in zip(state, gradients)], value


@pytest.fixture
def started(pipeline, monkeypatch, own_workers, tmp_path):
    """Start the program once more, and return its losses with the age [s] of every kept program."""
    folder = tmp_path / "cache" / "programs"

    def start():
        monkeypatch.setenv("HWAWARE_CACHE", str(tmp_path / "cache"))
        for path in folder.iterdir() if folder.exists() else ():
            os.utime(path, (1000, 1000))
        state = [drawn(layer, WIDTH, WIDTH) / 6 for layer in range(3)]
        batches = [{"x": drawn(10 + step, 12, WIDTH), "y": drawn(20 + step, 12, WIDTH)} for step in range(STEPS)]
        run = pipeline(train_step, state, batches[0], stages=3, microbatches=3)
        losses = [float(run.step(batch)[0]) for batch in batches]
        run.close()
        files = sorted(folder.iterdir()) if folder.exists() else ()
        return losses, {path.name: path.stat().st_mtime for path in files}

    return start


def test_the_next_start_compiles_nothing(started):
    losses, compiled = started()
    if not compiled:
        pytest.skip("this JAX stores no programs of CPUs")
    again, loaded = started()
    assert again == losses
    assert set(loaded) == set(compiled)
    assert min(loaded.values()) > 1000  # every one was read
