"""Samples that arrive microbatch by microbatch: the same numbers, whatever the workers have by then."""

import os
import signal
import threading

import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.alpa

WIDTH, SAMPLES, MICROBATCHES = 64, 48, 12


def batch_of(number):
    draw = np.random.default_rng(number)
    x = draw.standard_normal((SAMPLES, WIDTH)).astype(np.float32)
    # JAX keeps 32 bits of the 64-bit integers.
    return {"x": x, "half": jnp.asarray(x, jnp.bfloat16), "class": draw.integers(0, WIDTH, SAMPLES)}


def state_of():
    draw = np.random.default_rng(0)
    return [draw.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8 for _ in range(4)]


def train_step(state, batch):
    import alpa

    def loss(params):
        x = batch["x"] + batch["half"].astype(jnp.float32)
        for weights in params:
            x = jnp.tanh(x @ weights)
        # All stages but the last read only `x`; the last one reads two arrays of the batch.
        return jnp.mean((x - batch["x"]) ** 2) + jnp.mean((x.argmax(-1) - batch["class"]) ** 2) * 1e-3

    value, gradients = alpa.value_and_grad(loss)(state)
    return [weights - 0.1 * gradient for weights, gradient in zip(state, gradients)], value


def losses_of(run, steps, waits):
    found = []
    for number in range(steps):
        batch = batch_of(number)
        run.state, loss = run.step_function(run.state, batch)
        for array in batch.values():
            if isinstance(array, np.ndarray):
                array[...] = 0  # the program uses its memory again
        found.append(float(loss._value) if waits else loss)
    return [float(getattr(loss, "_value", loss)) for loss in found]


@pytest.mark.parametrize("devices", [1, 2], ids=["chain", "replicas"])
def test_losses_are_those_of_whole_batches(pipeline, monkeypatch, devices):
    from hwaware.patching import batches
    from hwaware.runtime.feeding import Feed

    sent = []
    real = Feed.send
    monkeypatch.setattr(Feed, "send", lambda self, messages: (sent.append(len(messages)), real(self, messages)))
    found = []
    for least_bytes, waits in ((1 << 30, True), (1, True), (1, False)):
        monkeypatch.setattr(batches, "LEAST_BYTES", least_bytes)
        run = pipeline(train_step, state_of(), batch_of(0), 2, MICROBATCHES, donate=(0,), logical=(devices, 1))
        found.append(losses_of(run, 5, waits))
        assert len(set(found[-1])) == 5
        if least_bytes > 1:
            assert not sent
    # In each step, one array for the first stage and three for the second, or as Alpa has cut them.
    assert sum(sent) >= 2 * 5 * 4 * MICROBATCHES * devices
    assert found[0] == found[1] == found[2]


def test_the_driver_is_at_most_one_step_ahead(pipeline, monkeypatch):
    import ray

    from hwaware.patching import batches

    monkeypatch.setattr(batches, "LEAST_BYTES", 1)
    run = pipeline(train_step, state_of(), batch_of(0), 2, MICROBATCHES, donate=(0,))
    losses_of(run, 2, True)
    resumed, losses = [], []
    process = ray.get(run.workers[0].process_id.remote())

    def resume():
        resumed.append(True)
        os.kill(process, signal.SIGCONT)

    os.kill(process, signal.SIGSTOP)
    later = threading.Timer(2.0, resume)
    later.start()
    for number in range(3):
        run.state, loss = run.step_function(run.state, batch_of(number))
        losses.append(loss)
        assert bool(resumed) == (number > 0)
    assert len({float(loss._value) for loss in losses}) == 3
    later.join()
