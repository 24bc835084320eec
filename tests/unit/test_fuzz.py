"""A few hundred changed files and messages on every reader; `make fuzz` runs as many as wanted."""

import pickle
import random
import re
import time
import types

import fuzzing
import pytest


@pytest.fixture(autouse=True)
def _modules_as_before(monkeypatch):
    """Take the modules that a fuzzer names away again: later tests import Alpa itself."""
    for name in ("alpa", "alpa.mesh_profiling", "fuzz_sentinel"):
        monkeypatch.setitem(fuzzing.sys.modules, name, types.ModuleType(name))


@pytest.fixture
def fuzzer(tmp_path):
    pytest.importorskip("flax")  # restores checkpoints
    return fuzzing.Fuzzer(tmp_path)


def test_no_changed_file_or_message_breaks_a_reader(fuzzer):
    """In this process, which has imported everything already; limits of time and memory hold in `make fuzz`."""
    broken = {}
    for number in range(300):
        case = fuzzer.case(number)
        # Searches and pictures take longer than all other cases together.
        if "exact" not in case.command and "--time-limit" not in case.command and "simulate" not in case.command:
            report = fuzzer.run(case)
            if report is not None:
                broken[number] = report.strip().splitlines()[-1]
    assert not broken, "see them: make fuzz FUZZ=1 SEED=number"


def test_a_case_depends_on_its_number_alone(fuzzer, tmp_path):
    again = fuzzing.Fuzzer(tmp_path)
    cases = [fuzzer.case(number) for number in range(50)]
    assert [again.case(number) for number in reversed(range(50))] == cases[::-1]
    assert len({case.data for case in cases}) > 40
    assert {case.kind for case in map(fuzzer.case, range(300))} == set(fuzzer.kinds)


def test_every_importer_has_a_valid_file_to_change(fuzzer):
    for name in fuzzing.importers():
        assert name == "alpa-db" or fuzzer.seeds.texts[name]
        assert f"import {name}" in fuzzer.kinds


def test_every_reader_accepts_what_is_valid(fuzzer):
    for kind, files in fuzzer.folders.items():
        for name, data in files.items():
            assert fuzzer.run(fuzzing.Case(kind, data, [name])) is None
    for kind in fuzzing.CALLERS:
        assert fuzzing.call(kind, b"".join) is None


def test_a_mailbox_that_breaks_is_found(monkeypatch):
    def flip(pieces):
        return b"".join(pieces).replace(bytes([3]) * 5000, bytes([2]) * 5000)

    assert fuzzing.call("a member calls", flip) is None  # only digests notice
    monkeypatch.setattr(fuzzing.greeting.Seal, "is_right", lambda *_: True)
    assert fuzzing.call("a member calls, digests", flip) == "a changed message has passed"
    monkeypatch.setattr(fuzzing.greeting.hmac, "compare_digest", lambda *_: True)
    assert "a stranger's words count" in fuzzing.call("a stranger calls", b"".join)
    monkeypatch.setattr(fuzzing.transport, "_read_header", lambda _: {}["lost"])
    assert "KeyError" in fuzzing.call("a member calls", b"".join)


def breaking(how):
    """Return a fuzzer that breaks at case 5, and does nothing else."""

    class Broken(fuzzing.Fuzzer):
        def __init__(self, folder):
            self.folder = folder

        def case(self, number):
            return number

        def run(self, case):
            return how() if case == 5 else None

    return Broken


def run_a_pickle():
    fuzzing._watching[:] = [True]
    pickle.loads(b"cos\nsystem\n(X\x04\x00\x00\x00truetR.")
    return fuzzing._ran[0] if fuzzing._ran else None


def take_memory():
    return f"{len(bytearray(2 << 30))} bytes"


def hang():
    while True:
        random.random()


@pytest.mark.parametrize(("how", "words"), [
    (lambda: 1 / 0, "ZeroDivisionError"), (run_a_pickle, "pickle.find_class"), (take_memory, "MemoryError"),
    (lambda: fuzzing.os._exit(9), "the worker ended: 9"), (hang, "computed for more than 0.3 s"),
])  # fmt: skip
def test_what_breaks_is_found_and_the_rest_still_runs(how, words, monkeypatch):
    monkeypatch.setattr(fuzzing, "Fuzzer", breaking(how))
    monkeypatch.setattr(fuzzing, "MOST_CPU_S", 0.3)
    start = time.monotonic()
    found = fuzzing.fuzz(20)
    assert [number for number, _ in found.broken] == [5]
    assert re.search(words, found.broken[0][1])
    assert found.cases == 20
    assert time.monotonic() - start < 60


def test_what_broke_is_kept(tmp_path):
    pytest.importorskip("ml_dtypes")
    fuzzing.keep([3], tmp_path / "kept")
    assert {"changed", "command"} <= {path.name for path in (tmp_path / "kept" / "3").iterdir()}
