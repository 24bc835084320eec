"""A pipelined state saved and restored, also to another placement: training goes on as if nothing had happened."""

import errno
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytestmark = pytest.mark.alpa

WIDTH = 16


def fresh_state(dtype=jnp.float32):
    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    params = [jax.random.normal(key, (WIDTH, WIDTH), dtype) / 4 for key in keys]
    return {"params": params, "optimizer": OPTIMIZER.init(params), "step": jnp.zeros((), jnp.int32)}


OPTIMIZER = optax.adam(1e-2)


def batch_of(step):
    x = np.random.default_rng(step).standard_normal((8, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x)}


def train_step(state, batch):
    import alpa

    def loss(params):
        x = batch["x"]
        for weights in params:
            x = jnp.tanh(x @ weights.astype(x.dtype))
        return jnp.mean((x - batch["y"]) ** 2)

    value, gradients = alpa.value_and_grad(loss)(state["params"])
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "optimizer": optimizer, "step": state["step"] + 1}, value


def restored(run, folder, step):
    import alpa

    run.state = alpa.restore_checkpoint(folder, step, run.executable.get_input_placement_specs()[0])


def flip_a_bit(folder, step):
    """Damage what a worker wrote."""
    path = max(next(folder.glob(f"step_{step}.*")).iterdir(), key=lambda one: one.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def fill_the_disk(worker):
    """Let a worker find that the disk is full once its bytes are written."""
    from hwaware.runtime import worker as module

    real = module.write_arrays

    def write_arrays(path, arrays):
        real(path, arrays)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    module.write_arrays = write_arrays
    worker.undo = lambda: setattr(module, "write_arrays", real)


@pytest.mark.parametrize("dtype", [jnp.bfloat16])  # test_parity saves float32
def test_training_goes_on_where_it_was_saved_also_on_other_stages(dtype, pipeline, tmp_path, capsys):
    import alpa
    import ray

    import hwaware
    from hwaware.errors import CheckpointError, DamagedCheckpointError, RecordError, UnusableInputError

    run = pipeline(train_step, fresh_state(dtype), batch_of(0), stages=2)
    for step in range(2):
        run.step(batch_of(step))
    alpa.save_checkpoint(tmp_path, run.state, 2)
    losses = [run.step(batch_of(step)) for step in (2, 3)]

    restored(run, tmp_path, 2)
    np.testing.assert_array_equal([run.step(batch_of(step)) for step in (2, 3)], losses)

    # On twice as many stages, by the newest checkpoint that is whole.
    alpa.save_checkpoint(tmp_path, run.state, 4)
    expected = run.step(batch_of(4))
    flip_a_bit(tmp_path, 4)
    with pytest.raises(
        DamagedCheckpointError, match=r"step_4\..*, have digest .*expected.*To fix: restore an older step"
    ):
        restored(run, tmp_path, 4)
    other = pipeline(train_step, fresh_state(dtype), batch_of(0), stages=4)
    fresh = fresh_state(dtype)
    other.state, step = hwaware.restore_newest(tmp_path, other.step_function, fresh, batch_of(0))
    assert step == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hwaware: step 4 is not restored, an older one is looked for: ")
    assert [leaf.aval.dtype for leaf in other.state["params"]] == [dtype] * 4
    assert int(np.asarray(other.state["step"])) == 2
    np.testing.assert_allclose([other.step(batch_of(step)) for step in (2, 3)], losses, rtol=1e-6)
    assert hwaware.restore_newest(tmp_path / "none", other.step_function, fresh, batch_of(0)) == (fresh, 0)

    # The same number again, and a disk that becomes full: the one before stays, training goes on.
    alpa.save_checkpoint(tmp_path, other.state, 4)
    ray.get(other.workers[1].__ray_call__.remote(fill_the_disk))
    with pytest.raises(
        CheckpointError,
        match=r"Saving step 4 to .* failed: in stage 1 on host .*: disk full \(No space left on device\)\. .*To fix:",
    ):
        alpa.save_checkpoint(tmp_path, other.state, 4)
    ray.get(other.workers[1].__ray_call__.remote(lambda worker: worker.undo()))
    assert len(os.listdir(tmp_path)) == 4
    restored(run, tmp_path, 4)
    np.testing.assert_allclose(run.step(batch_of(4)), expected, rtol=1e-6)
    np.testing.assert_allclose(other.step(batch_of(4)), expected, rtol=1e-6)

    # Another model is refused, and no older checkpoint taken in its place.
    specs = other.executable.get_input_placement_specs()[0]
    with pytest.raises(RecordError, match=r"checkpoint_2 does not hold 'more', which the state has"):
        alpa.restore_checkpoint(tmp_path, 2, {**specs, "more": None})
    with pytest.raises(RecordError, match="no whole checkpoint of step 3; whole ones: checkpoint_2, checkpoint_4"):
        alpa.restore_checkpoint(tmp_path, 3, specs)
    with pytest.raises(UnusableInputError, match=r"expected a function made by alpa\.parallelize"):
        hwaware.restore_newest(tmp_path, train_step, fresh, batch_of(0))
    run.state["params"][0].delete()
    with pytest.raises(UnusableInputError, match=r"params\.0 of the state was deleted, or donated to a step"):
        alpa.save_checkpoint(tmp_path, run.state, 5)


def test_a_relative_folder_lies_where_the_driver_runs(pipeline, tmp_path, monkeypatch):
    import alpa

    import hwaware

    run = pipeline(train_step, fresh_state(), batch_of(0), stages=2)
    run.step(batch_of(0))
    monkeypatch.chdir(tmp_path)  # the workers' own folder is another one
    alpa.save_checkpoint("here", run.state, 1)
    expected = run.step(batch_of(1))
    restored(run, "here", 1)
    assert run.step(batch_of(1)) == expected
    assert hwaware.restore_newest("here", run.step_function, fresh_state(), batch_of(0))[1] == 1


def test_arrays_of_workers_that_have_ended_are_refused(pipeline, tmp_path):
    import alpa

    from hwaware.errors import UnusableInputError

    run = pipeline(train_step, fresh_state(), batch_of(0), stages=2)
    run.step(batch_of(0))
    run.close()
    with pytest.raises(UnusableInputError, match=r"have ended.*before alpa\.shutdown"):
        alpa.save_checkpoint(tmp_path, run.state, 1)
    with pytest.raises(UnusableInputError, match=r"have ended.*before alpa\.shutdown"):
        _ = run.state["params"][0]._value


def test_a_worker_that_dies_while_it_saves(own_workers, pipeline, tmp_path):
    import alpa
    import ray

    from hwaware.errors import WorkerFailedError

    run = pipeline(train_step, fresh_state(), batch_of(0), stages=2)
    run.step(batch_of(0))
    alpa.save_checkpoint(tmp_path, run.state, 1)

    def die_at_the_next_save(worker):
        from hwaware.runtime import worker as module

        module.write_arrays = lambda path, arrays: os.kill(os.getpid(), signal.SIGKILL)

    ray.get(run.workers[1].__ray_call__.remote(die_at_the_next_save))
    with pytest.raises(
        WorkerFailedError, match=r"^Stage 1 on host .* failed: .*Saving step 1 to .*before are untouched\. To fix:"
    ) as caught:
        alpa.save_checkpoint(tmp_path, run.state, 1)
    assert str(caught.value).count("To fix:") == 1
    assert len(os.listdir(tmp_path)) == 2
    again = pipeline(train_step, fresh_state(), batch_of(0), stages=2)
    restored(again, tmp_path, 1)
    plain, _ = jax.jit(lambda state, batch: plain_step(state, batch))(fresh_state(), batch_of(0))
    for ours, theirs in zip(again.state["params"], plain["params"]):
        np.testing.assert_allclose(np.asarray(ours._value), theirs, rtol=1e-5, atol=1e-6)


def plain_step(state, batch):
    def loss(params):
        x = batch["x"]
        for weights in params:
            x = jnp.tanh(x @ weights)
        return jnp.mean((x - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["params"])
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer, "step": 1}, value
