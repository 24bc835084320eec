"""Files that hwaware writes: as the umask says, whole or not at all, and never lost for a full disk."""

import errno
import json
import os
import stat
import tracemalloc

import pytest
from builders import chain, cluster
from click.testing import CliRunner

from hwaware import Plan, output_files
from hwaware.cli import main
from hwaware.errors import RecordError
from hwaware.records import read_bytes, save_or_keep, write_bytes


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.fixture
def umask():
    """Set a umask for one test."""
    before = os.umask(0o077)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize(("mask", "expected"), [(0o077, 0o600), (0o027, 0o640), (0o022, 0o644), (0o002, 0o664)])
def test_a_new_file_has_the_mode_that_the_umask_leaves(mask, expected, umask, tmp_path):
    umask(mask)
    write_bytes(tmp_path / "new.json", b"1")
    assert mode(tmp_path / "new.json") == expected


@pytest.mark.parametrize("own", [0o600, 0o640, 0o664, 0o444])
def test_an_existing_file_keeps_its_mode(own, tmp_path):
    path = tmp_path / "old.json"
    path.write_bytes(b"1")
    path.chmod(own)
    write_bytes(path, b"2")
    assert (path.read_bytes(), mode(path)) == (b"2", own)


def test_the_longest_name_has_room_for_a_temporary_one(tmp_path):
    path = tmp_path / ("x" * 255)
    write_bytes(path, b"1")
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def full_disk(monkeypatch, *folders):
    """Let every write below these folders fail as a full disk does, after the file was made."""
    original = os.fdopen

    class Full:
        def __init__(self, stream):
            self._stream = stream

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self._stream.close()

        def write(self, _):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def opened(handle, *arguments, **named):
        stream = original(handle, *arguments, **named)
        place = os.readlink(f"/proc/self/fd/{handle}")
        return Full(stream) if any(place.startswith(str(folder)) for folder in folders) else stream

    monkeypatch.setattr(os, "fdopen", opened)


def test_a_full_disk_leaves_the_old_file_and_no_half_one(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_bytes(b"old")
    full_disk(monkeypatch, tmp_path)
    with pytest.raises(OSError, match="No space left"):
        output_files.replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_with_a_full_disk_the_content_is_kept_elsewhere(tmp_path, monkeypatch):
    plan, full, spare = chain("a:0", "b:0"), tmp_path / "full", tmp_path / "spare"
    spare.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(spare))
    full_disk(monkeypatch, full)
    with pytest.raises(RecordError) as caught:
        save_or_keep(plan, full / "plan.json")
    [kept] = spare.iterdir()
    assert str(caught.value).startswith(f"{full / 'plan.json'} cannot be written: No space left on device. ")
    assert f"The content is kept in {kept}." in str(caught.value)
    assert Plan.load(kept) == plan
    assert mode(kept) == 0o600, "the temporary folder is everybody's"


def test_with_every_disk_full_the_content_is_printed(tmp_path, monkeypatch):
    plan, shown = chain("a:0", "b:0"), []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "spare"))
    full_disk(monkeypatch, tmp_path)
    with pytest.raises(RecordError, match="The content is on standard output instead"):
        save_or_keep(plan, tmp_path / "plan.json", shown.append)
    assert [Plan.from_json(text) for text in shown] == [plan]


def test_a_plan_is_not_lost_for_a_full_disk(tmp_path, monkeypatch):
    cluster().save(tmp_path / "cluster.json")
    layer = {"name": "0", "forward_flops": 1e9, "backward_flops": 2e9, "parameter_bytes": 0, "output_bytes": 0}
    document = {"schema": "hwaware.workload", "schema_version": 1, "name": "m", "microbatch_size": 4}
    document.update(dtype="float32", layers=[{**layer, "activation_bytes": 0}])
    (tmp_path / "workload.json").write_text(json.dumps(document))
    full, spare = tmp_path / "full", tmp_path / "spare"
    full.mkdir()
    spare.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(spare))
    full_disk(monkeypatch, full)
    files = [str(tmp_path / name) for name in ("cluster.json", "workload.json")]
    command = ["plan", *files, "--microbatches", "4", "--solver", "even", "-o", str(full / "plan.json")]
    outcome = CliRunner().invoke(main, command)
    assert outcome.exit_code == 2, outcome.output
    [kept] = spare.iterdir()
    assert str(kept) in outcome.stderr
    assert Plan.load(kept).stages


def test_a_file_without_end_is_refused():
    with pytest.raises(RecordError, match="/dev/zero is larger than 67108864 bytes") as caught:
        read_bytes("/dev/zero", 1 << 26)
    assert caught.value.exit_code == 2


def test_to_read_a_small_file_reserves_no_gigabyte(tmp_path):
    (tmp_path / "small").write_bytes(b"{}")
    tracemalloc.start()
    try:
        assert read_bytes(tmp_path / "small") == b"{}"
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()


def test_a_pipe_is_read_to_its_end(tmp_path):
    """As in `hwaware show <(command)`."""
    reader, writer = os.pipe()
    os.write(writer, b"x" * 50_000)
    os.close(writer)
    assert read_bytes(f"/dev/fd/{reader}") == b"x" * 50_000
    os.close(reader)
