"""A folder of checkpoints: what is damaged, cut or missing is named; a save is whole or is not there."""

import errno
import os
import pickle
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwaware.errors import DamagedCheckpointError, RecordError, UnusableInputError
from hwaware.patching.checkpoints import _read, restored, values
from hwaware.runtime import checkpoint_folder, checkpoints
from hwaware.runtime.checkpoints import Fault, attempt, box_of, read_boxes, write_arrays
from hwaware.runtime.manifests import (
    Manifest,
    Part,
    SavedArray,
    SavedValue,
    ShardFile,
    digest_of,
    dtype_of,
    flattened,
    nested,
)

WHOLE = np.arange(12, dtype=np.float32).reshape(4, 3)
SECOND = b'{"file":"0.bin","offset":0,"bytes":24,"digest":"' + b"f" * 64 + b'","start":[0,0],"shape":[2,3]}'
UPPER, LOWER = (slice(0, 2), slice(None)), (slice(2, 4), slice(None))
VALUES = {"rate": 0.1, "bad": float("inf"), "name": "…", "none": None, "on": True, "big": 1 << 70, "raw": b"\0"}


def save(folder, step, whole=WHOLE, indices=(UPPER, LOWER)):
    """Save one array in two files, and some values, as two workers and the driver do."""
    unfinished = checkpoint_folder.begin(str(folder), step)
    try:
        files, parts = [], []
        for number, index in enumerate(indices):
            name, box = f"{number}.bin", box_of(index, whole.shape)
            (written,) = write_arrays(os.path.join(unfinished.path, name), [whole[index]])
            files.append(ShardFile(name=name, bytes=written.bytes))
            place = dict(zip(("offset", "bytes", "digest"), written))
            parts.append(Part(file=name, start=box.start, shape=box.shape, **place))
        array = SavedArray(path=("w",), dtype=whole.dtype.name, shape=whole.shape, parts=tuple(parts))
        values = tuple(SavedValue.of(("v", key), value) for key, value in VALUES.items())
        manifest = Manifest(
            step=step, folder=unfinished.name, files=tuple(files), arrays=(array,), values=values, empty=(("e",),)
        )
        checkpoint_folder.commit(unfinished, manifest)
    except BaseException:
        checkpoint_folder.abandon(unfinished)
        raise
    return os.path.join(str(folder), unfinished.name)


def load(folder, step):
    """Read the whole state."""
    found = _read(str(folder), step)
    return {
        path: read_boxes(str(folder), leaf, [box_of(..., leaf.shape)])[0] if isinstance(leaf, SavedArray) else leaf
        for path, leaf in found.items()
    }


def rewrite(folder, step, change):
    """Change a manifest as somebody does who knows how its digest is made."""
    path = checkpoint_folder.manifest_path(str(folder), step)
    with open(path, "rb") as file:
        data = file.read()
    old = Manifest.from_file(data, path)
    data = change(data).replace(data[data.index(b'"digest":"') + 10 :][:64], b"0" * 64, 1)
    assert old
    with open(path, "wb") as file:
        file.write(data.replace(b"0" * 64, digest_of(data).encode(), 1))


def test_a_state_comes_back(tmp_path):
    save(tmp_path, 3)
    found = load(tmp_path, 3)
    np.testing.assert_array_equal(found.pop(("w",)), WHOLE)
    assert found == {("e",): {}, **{("v", key): value for key, value in VALUES.items()}}
    assert nested(found, "n") == {"e": {}, "v": VALUES}
    assert flattened({"e": {}, "v": VALUES}) == found


def test_an_array_is_cut_in_any_way(tmp_path):
    save(tmp_path, 0)
    array = _read(str(tmp_path), 0)[("w",)]
    columns, middle = (slice(None), slice(1, 2)), (slice(1, 3), slice(0, 3))
    found = read_boxes(str(tmp_path), array, [box_of(index, WHOLE.shape) for index in (columns, middle, columns)])
    for part, index in zip(found, (columns, middle, columns)):
        np.testing.assert_array_equal(part, WHOLE[index])


@pytest.mark.parametrize(
    "array",
    [np.float16(2.5), np.array(True), np.zeros((0, 4)), np.arange(6.0, dtype=">f8").reshape(2, 3).T, np.ones(2, "c8")],
)
def test_arrays_of_every_kind(tmp_path, array):
    array = np.asarray(array)
    save(tmp_path, 0, array, [...])
    found = load(tmp_path, 0)[("w",)]
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype.newbyteorder("<")


def test_types_that_numpy_does_not_know(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    whole = np.arange(5).astype(ml_dtypes.bfloat16)
    save(tmp_path, 0, whole, [...])
    found = load(tmp_path, 0)[("w",)]
    assert found.dtype == whole.dtype
    np.testing.assert_array_equal(found, whole)


@pytest.mark.parametrize("name", ["object", "O", "i4,i4", "str", "V3", "finfo", "int", "float", "no_such"])
def test_types_that_are_no_numbers(name):
    with pytest.raises(RecordError, match="expected that of numbers"):
        dtype_of(name)


def test_what_cannot_be_saved_is_named():
    with pytest.raises(RecordError, match=r"a\.b of the state is a object, expected an array or one of NoneType, bool"):
        SavedValue.of(("a", "b"), object())


# Damage


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with a step, and its files' contents by their paths."""
    pytest.importorskip("msgpack")  # a damaged manifest may look like one of Alpa's
    folder = tmp_path_factory.mktemp("good")
    save(folder, 1)
    return folder, {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@given(st.data())
def test_a_flipped_bit_is_noticed_wherever_it_is(good, data):
    folder, files = good
    path = data.draw(st.sampled_from(sorted(files)))
    place, bit = data.draw(st.integers(0, len(files[path]) - 1)), data.draw(st.integers(0, 7))
    changed = bytearray(files[path])
    changed[place] ^= 1 << bit
    path.write_bytes(changed)
    try:
        with pytest.raises(DamagedCheckpointError, match=r"To fix: ") as caught:
            load(folder, 1)
        assert str(path) in str(caught.value)
    finally:
        path.write_bytes(files[path])


@given(st.data())
def test_a_cut_file_is_noticed(good, data):
    folder, files = good
    path = data.draw(st.sampled_from(sorted(files)))
    path.write_bytes(files[path][: data.draw(st.integers(0, len(files[path]) - 1))])
    try:
        with pytest.raises(DamagedCheckpointError) as caught:
            load(folder, 1)
        assert str(path) in str(caught.value)
    finally:
        path.write_bytes(files[path])


def test_a_flipped_bit_says_where_and_what(tmp_path):
    place = save(tmp_path, 1)
    with open(os.path.join(place, "1.bin"), "r+b") as file:
        file.write(b"\xff")
    with pytest.raises(DamagedCheckpointError, match=r"1\.bin: bytes 0 to 24, w, have digest .*…, expected .*…: the"):
        load(tmp_path, 1)


def missing(path):
    os.remove(path)
    return "is not there, expected a file"


def cut(path):
    os.truncate(path, 5)
    return r"has 5 bytes, expected 24: it was cut"


def longer(path):
    with open(path, "ab") as file:
        file.write(b"more")
    return "has 28 bytes, expected 24"


def linked(path):
    os.remove(path)
    os.symlink("/etc/hostname", path)
    return r"is a link to /etc/hostname, expected a file inside of"


def pipe(path):
    os.remove(path)
    os.mkfifo(path)
    return "is a folder or a device, expected a file"


def folder_instead(path):
    os.remove(path)
    os.mkdir(path)
    return "is a folder or a device, expected a file"


@pytest.mark.parametrize("harm", [missing, cut, longer, linked, pipe, folder_instead])
def test_a_file_that_is_not_what_was_written(tmp_path, harm):
    path = os.path.join(save(tmp_path, 1), "0.bin")
    expected = harm(path)
    with pytest.raises(DamagedCheckpointError, match=rf"0\.bin {expected}.*To fix: "):
        load(tmp_path, 1)


def test_a_folder_that_is_a_link_elsewhere(tmp_path):
    (tmp_path / "a").mkdir()
    place = save(tmp_path / "a", 1)
    os.rename(place, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", place)
    with pytest.raises(DamagedCheckpointError, match=r"is a link to .*elsewhere"):
        load(tmp_path / "a", 1)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            b'"name":"0.bin"',
            b'"name":"../0.bin"',
            "name is '../0.bin', expected that of a file in the step's own folder",
        ),
        (b'"name":"0.bin"', b'"name":"/etc/hosts"', "name is '/etc/hosts', expected that of a file"),
        (b'"folder":"step_1.', b'"folder":"../step_1.', r"folder is '\.\./step_1\..*', expected step_1\."),
        (b'"file":"0.bin"', b'"file":"../../x"', r"is in file '../../x', which is not among the files"),
        (b'"offset":0', b'"offset":-8', "starts at byte -8 of 24 bytes"),
        (b'"offset":0', b'"offset":1', "starts at byte 1 of 24 bytes"),
        (b'"bytes":24,"digest"', b'"bytes":20,"digest"', "has 20 bytes, expected 24"),
        (b'"start":[2,0]', b'"start":[3,0]', r"starts at \[3, 0\] with shape \[2, 3\], outside of \[4, 3\]"),
        (b'"start":[2,0]', b'"start":[2]', r"starts at \[2\] with shape"),
        (b'"start":[2,0]', b'"start":[0,0]', "holds 6 of 12 numbers of w: parts are missing"),
        (b'"dtype":"float32"', b'"dtype":"object"', "dtype is 'object', expected that of numbers"),
        (b'"kind":"int"', b'"kind":"code"', "kind is 'code', expected one of"),
        (b'"shape":[4,3]', b'"shape":[1000000000000,1000000000000]', "too large"),
        (b'"shape":[4,3]', b'"shape":[1000000000000,3]', "holds 12 of 3000000000000 numbers of w: parts are missing"),
        (b'"shape":[4,3]', b'"shape":[' + b"1," * 32 + b"4]", "expected at most 32 dimensions"),
        (b'"start":[2,0],"shape":[2,3]}', b'"start":[2,0],"shape":[2,3]},' + SECOND, "have 72 bytes, expected at most"),
        (b'"path":["e"]', b'"path":["w"]', "twice"),
        (b'"empty":[["e"]]', b'"empty":[["w"]]', "twice"),
        (b'"empty":[["e"]]', b'"empty":[["w","x"]]', "twice"),
    ],
)
def test_a_manifest_that_somebody_wrote(tmp_path, old, new, said):
    save(tmp_path, 1)

    def change(data):
        return data.replace(old, new, 1) if old in data else data.replace(b'"empty":[["e"]]', b'"empty":[["w"]]')

    rewrite(tmp_path, 1, change)
    with pytest.raises(DamagedCheckpointError, match=said):
        nested(load(tmp_path, 1), "checkpoint_1")


SPECS = {"w": None, "v": dict.fromkeys(VALUES), "e": {}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"e": None}, "holds nothing as 'e', unlike the state"),
        ({"w": {}}, "holds a value as 'w', unlike the state"),
        ({"x": None}, "does not hold 'x', which the state has"),
    ],
)
def test_a_checkpoint_of_another_structure(tmp_path, change, said):
    pytest.importorskip("flax")
    save(tmp_path, 1)
    np.testing.assert_array_equal(restored(str(tmp_path), 1, SPECS, keep_unread=True)["w"], WHOLE)
    with pytest.raises(RecordError, match=f"{said}.*To fix: restore a checkpoint of the same model"):
        restored(str(tmp_path), 1, {**SPECS, **change}, keep_unread=True)


def test_a_newer_version_is_not_called_damaged(tmp_path):
    save(tmp_path, 1)
    rewrite(tmp_path, 1, lambda data: data.replace(b'"schema_version":1', b'"schema_version":2'))
    with pytest.raises(RecordError, match=r"schema_version 2.*update hwaware") as caught:
        load(tmp_path, 1)
    assert not isinstance(caught.value, DamagedCheckpointError)


def test_a_step_that_is_not_there(tmp_path):
    save(tmp_path, 2)
    save(tmp_path, 10)
    with pytest.raises(RecordError, match=r"no whole checkpoint of step 3; whole ones: checkpoint_2, checkpoint_10\."):
        load(tmp_path, 3)
    assert checkpoint_folder.steps(str(tmp_path)) == [10, 2]
    assert checkpoint_folder.steps(str(tmp_path / "none")) == []
    file = tmp_path / "checkpoint_2"
    with pytest.raises(RecordError, match=r"checkpoint_2 cannot be read: Not a directory\. To fix: "):
        checkpoint_folder.read_manifest(str(file), 2)


def test_a_file_that_the_system_does_not_open_is_named(tmp_path):
    save(tmp_path, 2)
    (tmp_path / "checkpoint_3").symlink_to("checkpoint_3")
    with pytest.raises(RecordError, match=r"checkpoint_3 cannot be read: Too many levels .*\. To fix: check the path"):
        load(tmp_path, 3)
    data = next(tmp_path.glob("step_2.*/*.bin"))
    data.unlink()
    data.symlink_to(data.name)
    with pytest.raises(RecordError, match=r"\.bin cannot be read: Too many levels"):
        values(str(tmp_path), 2, ())


def test_restoring_says_which_folder_or_step_does_not_fit(tmp_path, monkeypatch):
    from hwaware.patching import leaves, restore_newest

    monkeypatch.setattr(leaves, "PATCHES", SimpleNamespace(applied=True))

    def parallelized(step):
        return SimpleNamespace(fun=step, get_executable=None)

    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match=r"file cannot be read: Not a directory"):
        restore_newest(tmp_path / "file", parallelized(lambda state, batch: state), {}, {})
    with pytest.raises(UnusableInputError, match=r"takes \(state, batch, rng\), expected a state and a batch"):
        restore_newest(tmp_path, parallelized(lambda state, batch, rng: state), {}, {})
    assert restore_newest(tmp_path, parallelized(lambda state, batch, rng=None: state), {"a": 1}, {}) == ({"a": 1}, 0)


# Saves that end early


def killed_at(number, folder, step, whole):
    """Save in a child process that is killed at its n-th call of the system; returns whether it was."""
    child = os.fork()
    if child == 0:
        left = [number]
        for name in ("mkdir", "fsync", "replace", "open", "rmdir", "unlink"):
            real = getattr(os, name)

            def counted(*args, real=real, **kwargs):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            setattr(os, name, counted)
        try:
            save(folder, step, whole)
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] != 0


def test_a_driver_that_is_killed_leaves_the_old_step_or_the_new_one(tmp_path):
    newer = WHOLE + 100
    outcomes = []
    for number in range(100):
        save(tmp_path, 5)
        is_killed = killed_at(number, tmp_path, 5, newer)
        found = load(tmp_path, 5)[("w",)]
        assert np.array_equal(found, WHOLE) or np.array_equal(found, newer)
        outcomes.append(bool(np.array_equal(found, newer)))
        if not is_killed:
            break
    assert not is_killed
    assert outcomes == sorted(outcomes)  # once the new step is there, it stays
    assert 8 < outcomes.count(False) < len(outcomes) - 2
    save(tmp_path, 6)
    assert sorted(name.split(".")[0] for name in os.listdir(tmp_path)) == [
        "checkpoint_5", "checkpoint_6", "step_5", "step_6",
    ]  # fmt: skip


def test_what_a_killed_first_save_left_is_no_checkpoint_and_is_removed(tmp_path):
    assert killed_at(6, tmp_path, 1, WHOLE)
    assert checkpoint_folder.steps(str(tmp_path)) == []
    assert len(os.listdir(tmp_path)) == 1
    (tmp_path / "step_7").mkdir()  # not ours
    save(tmp_path, 2)
    assert sorted(name.split(".")[0] for name in os.listdir(tmp_path)) == ["checkpoint_2", "step_2", "step_7"]


def test_a_save_beside_a_damaged_manifest_removes_nothing_of_that_step(tmp_path):
    save(tmp_path, 1)
    assert killed_at(6, tmp_path, 1, WHOLE)
    (tmp_path / "checkpoint_1").write_bytes(b"{")
    save(tmp_path, 2)
    assert sum(name.startswith("step_1.") for name in os.listdir(tmp_path)) == 2


@pytest.mark.parametrize("call", range(6))
def test_a_full_disk_is_said_in_words_and_the_old_step_stays(tmp_path, monkeypatch, call):
    save(tmp_path, 5)
    left = [call]
    real = os.fsync

    def fsync(handle):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    fault = attempt(lambda: save(tmp_path, 5, WHOLE + 1), "stage 1 on host 10.0.0.2")
    assert isinstance(fault, Fault)
    assert fault.where == "stage 1 on host 10.0.0.2"
    assert "disk full (No space left on device)" in fault.what
    np.testing.assert_array_equal(load(tmp_path, 5)[("w",)], WHOLE)
    monkeypatch.undo()
    save(tmp_path, 6)
    assert len(os.listdir(tmp_path)) == 4


def test_a_file_that_the_driver_does_not_see_is_not_committed(tmp_path, monkeypatch):
    real = checkpoints.write_arrays
    monkeypatch.setitem(globals(), "write_arrays", lambda path, arrays: real(path + ".elsewhere", arrays))
    with pytest.raises(DamagedCheckpointError, match=r"0\.bin is not there"):
        save(tmp_path, 1)
    assert os.listdir(tmp_path) == []


# Alpa's own format


class Evil:
    """Runs a command where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def alpas(folder, metadata=None, shard="shard_0.0", array=None, name="state.w"):
    """Write what Alpa 0.2.3 writes, by default for an array that is not on a mesh."""
    msgpack = pytest.importorskip("msgpack")
    array = np.arange(3) if array is None else array
    place = folder / name
    place.mkdir(parents=True)
    with open(place / "shard_0.0", "wb") as file:
        np.save(file, array)
    said = {"global_shape": array.shape, "dtype": array.dtype, "shard_names": [shard], "shard_indices": None}
    (place / "metadata_0").write_bytes(pickle.dumps({**said, **(metadata or {})}))
    (folder / "checkpoint_4").write_bytes(msgpack.packb({"w": name, "lr": 0.5}))
    return place


def test_alpas_own_files_are_read(tmp_path):
    alpas(tmp_path)
    found = load(tmp_path, 4)
    np.testing.assert_array_equal(found[("w",)], np.arange(3))
    assert found[("w",)].dtype == np.arange(3).dtype
    assert found[("lr",)] == 0.5


def test_alpas_parts_of_two_workers_are_read_as_one(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    whole = WHOLE.astype(ml_dtypes.bfloat16)
    place = alpas(tmp_path, array=whole[UPPER], metadata={"global_shape": (4, 3), "shard_indices": [UPPER]})
    said = {"global_shape": (4, 3), "dtype": whole.dtype, "shard_names": ["b"], "shard_indices": [LOWER]}
    with open(place / "b", "wb") as file:
        np.save(file, whole[LOWER].view(np.uint16))  # as hwaware 0.1.0 wrote it
    (place / "metadata_1").write_bytes(pickle.dumps(said))
    np.testing.assert_array_equal(load(tmp_path, 4)[("w",)], whole)
    (place / "metadata_1").unlink()
    with pytest.raises(DamagedCheckpointError, match="holds 6 of 12 numbers of w: parts are missing"):
        load(tmp_path, 4)


def test_a_strangers_metadata_runs_no_code(tmp_path):
    trace = tmp_path / "it ran"
    alpas(tmp_path / "c", metadata={"dtype": Evil(str(trace))})
    with pytest.raises(
        DamagedCheckpointError, match=r"metadata_0 names posix\.mkdir.*To fix: never open it with pickle"
    ):
        load(tmp_path / "c", 4)
    with open(tmp_path / "c" / "state.w" / "shard_0.0", "wb") as file:
        np.save(file, np.array([Evil(str(trace))]), allow_pickle=True)
    (tmp_path / "c" / "state.w" / "metadata_0").write_bytes(
        pickle.dumps(
            {"global_shape": (1,), "dtype": np.dtype("i8"), "shard_names": ["shard_0.0"], "shard_indices": None}
        )
    )
    with pytest.raises(DamagedCheckpointError, match=r"is not a whole \.npy file of numbers"):
        load(tmp_path / "c", 4)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"shard_names": ["../../secret"]}, "a file is named 'state.w/../../secret', expected a name inside"),
        ({"shard_names": ["/etc/hostname"]}, "a file is named '/etc/hostname', expected a name inside"),
        ({"shard_names": ["none"]}, "none is not there"),
        ({"shard_names": [5]}, "does not describe an array: ValueError"),
        ({"shard_indices": [(slice(None), slice(None))]}, "does not describe an array: ValueError"),
        ({"shard_indices": [5]}, "does not describe an array: TypeError"),
        ({"global_shape": (10**12,)}, r"shard_0\.0 has \d+ bytes, expected at least 8000000000000"),
        ({"shard_names": ["shard_0.0"] * 2}, "a file is named twice"),
        ({"global_shape": (4,)}, r"shard_0\.0 holds int64\[3\], expected int64\[4\]"),
        ({"global_shape": "x"}, "does not describe an array: ValueError"),
        ({"dtype": np.dtype("f8")}, r"shard_0\.0 holds int64\[3\], expected float64\[3\]"),
        ({"dtype": "f8"}, "does not describe an array: AttributeError"),
    ],
)
def test_alpas_files_that_lie(tmp_path, metadata, said):
    alpas(tmp_path, metadata)
    with pytest.raises(DamagedCheckpointError, match=said):
        load(tmp_path, 4)


@given(st.data())
def test_alpas_files_with_a_flipped_or_missing_byte_give_numbers_or_one_message(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("alpa")
    alpas(folder)
    path = data.draw(st.sampled_from(sorted(path for path in folder.rglob("*") if path.is_file())))
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[place:]
    path.write_bytes(content)
    fault = attempt(lambda: load(folder, 4))
    assert not isinstance(fault, Fault) or str(folder) in fault.what
