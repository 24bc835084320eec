"""A pipelined state saved and restored, also to another placement: training goes on as if nothing had happened."""

import os
import pickle

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


@pytest.mark.parametrize("dtype", [jnp.bfloat16])  # test_parity saves float32
def test_training_goes_on_where_it_was_saved_also_on_other_stages(dtype, pipeline, tmp_path):
    import alpa

    from hwaware.errors import MeasurementError, RecordError

    run = pipeline(train_step, fresh_state(dtype), batch_of(0), stages=2)
    for step in range(2):
        run.step(batch_of(step))
    alpa.save_checkpoint(tmp_path, run.state, 2)
    losses = [run.step(batch_of(step)) for step in (2, 3)]

    restored(run, tmp_path, 2)
    np.testing.assert_array_equal([run.step(batch_of(step)) for step in (2, 3)], losses)

    other = pipeline(train_step, fresh_state(dtype), batch_of(0), stages=4)
    restored(other, tmp_path, 2)
    assert [leaf.aval.dtype for leaf in other.state["params"]] == [dtype] * 4
    assert int(np.asarray(other.state["step"])) == 2
    np.testing.assert_allclose([other.step(batch_of(step)) for step in (2, 3)], losses, rtol=1e-6)

    # What an earlier save of the same step left, when other workers wrote it, is not read with the new one.
    alpa.save_checkpoint(tmp_path, other.state, 4)
    stale = [path.with_name("metadata_1") for path in (tmp_path / "step_4").rglob("metadata_0")]
    for path in stale:
        path.write_bytes(path.with_name("metadata_0").read_bytes())
    alpa.save_checkpoint(tmp_path, run.state, 4)
    assert stale
    assert not any(path.exists() for path in stale)
    restored(other, tmp_path, 4)
    np.testing.assert_allclose(other.step(batch_of(4)), run.step(batch_of(4)), rtol=1e-6)

    # A save that fails in the middle is no checkpoint, and the earlier one stays.
    (tmp_path / "step_3").write_text("in the way of a folder")
    with pytest.raises(MeasurementError, match=r"Saving step 3.*Not a directory.*To fix:"):
        alpa.save_checkpoint(tmp_path, run.state, 3)
    with pytest.raises(
        RecordError, match=r"no whole checkpoint of step 3; whole ones: checkpoint_2, checkpoint_4\..*To fix:"
    ):
        restored(run, tmp_path, 3)
    restored(run, tmp_path, 2)
    np.testing.assert_array_equal(run.step(batch_of(2)), losses[0])


def test_parts_are_put_together_and_cut_anew(tmp_path):
    from hwaware.runtime.checkpoints import load_parts, save_parts

    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    folder, cache = str(tmp_path / "array"), str(tmp_path / "cache")
    for host in (0, 1):
        rows = slice(2 * host, 2 * host + 2)
        save_parts(folder, cache, host, [whole[rows]], [(rows, slice(None))], whole.shape)
    assert os.listdir(cache) == []
    left, right = load_parts(folder, [np.s_[:, :3], np.s_[:, 3:]], whole.shape, whole.dtype)
    np.testing.assert_array_equal(np.hstack([left, right]), whole)


def test_another_shape_and_a_missing_array_are_refused(tmp_path):
    from hwaware.errors import RecordError
    from hwaware.runtime.checkpoints import load_parts, save_parts

    save_parts(str(tmp_path / "a"), None, 0, [np.ones(3)], [...], (3,))
    with pytest.raises(RecordError, match=r"holds float64\[3\], expected float64\[4\]"):
        load_parts(str(tmp_path / "a"), [...], (4,), np.dtype("float64"))
    with pytest.raises(RecordError, match="does not hold an array"):
        load_parts(str(tmp_path / "b"), [...], (4,), np.dtype("float64"))


def test_alpas_own_files_are_read(tmp_path):
    """What Alpa 0.2.3 itself writes for an array that is not on a mesh."""
    from hwaware.runtime.checkpoints import load_parts

    np.save(tmp_path / "part.npy", np.arange(3))
    os.rename(tmp_path / "part.npy", tmp_path / "shard_0.0")
    metadata = {"global_shape": (3,), "dtype": np.arange(3).dtype, "shard_names": ["shard_0.0"], "shard_indices": None}
    (tmp_path / "metadata_0").write_bytes(pickle.dumps(metadata))
    np.testing.assert_array_equal(load_parts(str(tmp_path), [...], (3,), np.arange(3).dtype)[0], [0, 1, 2])
