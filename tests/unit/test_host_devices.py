"""HWAWARE_DEVICES: what a host declares of its devices, and how a process joins one."""

import contextlib
import json
import os
import threading

import pytest

from hwaware import host_devices
from hwaware.errors import HwawareError, UnusableInputError
from hwaware.greeting import new_secret
from hwaware.profiler import worker


@pytest.fixture
def groups(tmp_path, monkeypatch):
    monkeypatch.setattr(host_devices, "_membership", host_devices._Membership())
    files = {name: str(tmp_path / name) for name in ("d0", "d1", "start", "setup")}
    entries = [
        {"id": f"h0:{i}", "kind": "cpu", "memory_bytes": 1, "group": files[f"d{i}"],
         "start_group": files["start"], "setup_group": files["setup"]}
        for i in range(2)
    ]  # fmt: skip
    monkeypatch.setenv("HWAWARE_DEVICES", json.dumps(entries))
    return tmp_path


@pytest.fixture
def moves(monkeypatch):
    found = []
    monkeypatch.setattr(host_devices, "_move_self", lambda group: found.append(os.path.basename(group)))
    return found


def test_nothing_declared_means_nothing_happens(monkeypatch):
    monkeypatch.delenv("HWAWARE_DEVICES", raising=False)
    assert host_devices.declared() == ()
    host_devices.join(3)
    with host_devices.unthrottled():
        pass


def test_devices_without_groups_join_nothing(monkeypatch, moves):
    monkeypatch.setenv("HWAWARE_DEVICES", '[{"id": "a:0", "kind": "cpu", "memory_bytes": 5}]')
    host_devices.join(0)
    with host_devices.unthrottled():
        pass
    assert host_devices.declared()[0] == host_devices.DeclaredDevice("a:0", "cpu", 5)
    assert moves == []


def test_who_serves_a_device_listens_where_it_is_declared(monkeypatch):
    entry = {"id": "a:0", "kind": "cpu", "memory_bytes": 5}
    monkeypatch.setenv("HWAWARE_DEVICES", json.dumps([entry, {**entry, "ports": [7000, 7002]}]))
    assert [list(host_devices.ports(index)) for index in range(3)] == [[0], [7000, 7001, 7002], [0]]


@pytest.mark.parametrize(
    "ports", [7000, [7000], [7000, 7000], [7001, 7000], [0, 5], [7000, 65536], ["7000", "7001"], [True, 5]]
)
def test_ports_that_are_none(monkeypatch, ports):
    entry = {"id": "a:0", "kind": "cpu", "memory_bytes": 5, "ports": ports}
    monkeypatch.setenv("HWAWARE_DEVICES", json.dumps([entry]))
    with pytest.raises(
        UnusableInputError, match=r"ports of entry 0 of HWAWARE_DEVICES is .*, expected \[FIRST, LAST\]"
    ):
        host_devices.declared()


def test_an_id_with_the_sign_between_two_names_is_refused(monkeypatch):
    """`--only a+b` names links, and trainings that adapt name several devices so."""
    monkeypatch.setenv("HWAWARE_DEVICES", '[{"id": "a+b", "kind": "cpu", "memory_bytes": 5}]')
    with pytest.raises(UnusableInputError, match=r"id of entry 0 of HWAWARE_DEVICES is 'a\+b', expected a name"):
        host_devices.declared()


def test_join_writes_this_process(groups):
    host_devices.join(1)
    assert (groups / "d1").read_text() == str(os.getpid())


def test_devices_that_are_shares_are_compared_on_one_processor(groups):
    """All threads of the process, also one that starts meanwhile, and back again."""
    stop, before = threading.Event(), os.sched_getaffinity(0)
    threads = [threading.Thread(target=stop.wait, args=(60,)) for _ in range(2)]
    try:
        threads[0].start()
        with host_devices.on_one_processor():
            threads[1].start()
            inside = [os.sched_getaffinity(thread.native_id) for thread in threads] + [os.sched_getaffinity(0)]
        after = [os.sched_getaffinity(thread.native_id) for thread in threads] + [os.sched_getaffinity(0)]
    finally:
        stop.set()
    assert inside == [{max(before)}] * 3
    assert after == [before] * 3


def test_a_device_that_is_no_share_keeps_all_processors(monkeypatch):
    monkeypatch.setenv("HWAWARE_DEVICES", '[{"id": "a:0", "kind": "cpu", "memory_bytes": 5}]')
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, mask: pytest.fail("nothing is to be bound"))
    with host_devices.on_one_processor():
        assert os.sched_getaffinity(0) == before


def test_unthrottled_goes_back_to_the_joined_device(groups, moves):
    host_devices.join(1)
    with host_devices.unthrottled(), host_devices.unthrottled():
        pass
    assert moves == ["d1", "setup", "d1"]


def test_unthrottled_goes_back_to_the_start_group_before_joining(groups, moves):
    with pytest.raises(KeyError), host_devices.unthrottled():
        raise KeyError
    assert moves == ["setup", "start"]


def test_joining_inside_unthrottled_takes_effect_after_it(groups, moves):
    with host_devices.unthrottled():
        host_devices.join(0)
    assert moves == ["setup", "d0"]


def test_join_beyond_the_declared_devices_is_refused(groups):
    with pytest.raises(UnusableInputError, match="declares 2"):
        host_devices.join(2)


def test_a_group_that_is_gone_is_an_error(groups, monkeypatch):
    gone = [{"id": "a:0", "kind": "cpu", "memory_bytes": 5, "group": str(groups / "no" / "cgroup.procs")}]
    monkeypatch.setenv("HWAWARE_DEVICES", json.dumps(gone))
    with pytest.raises(HwawareError, match="could not move"):
        host_devices.join(0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("{}", "holds a dict"),
        ("[3]", "entry 0"),
        ('[{"id": "", "kind": "cpu", "memory_bytes": 1}]', "id of entry 0"),
        ('[{"id": "a", "memory_bytes": 1}]', "kind of entry 0"),
        ('[{"id": "a", "kind": "cpu", "memory_bytes": -1}]', "memory_bytes of entry 0"),
        ('[{"id": "a", "kind": "cpu", "memory_bytes": true}]', "memory_bytes of entry 0"),
        ('[{"id": "a", "kind": "cpu", "memory_bytes": 1, "group": 3}]', "group of entry 0"),
    ],
)
def test_malformed_declarations_say_what_is_wrong(monkeypatch, text, words):
    monkeypatch.setenv("HWAWARE_DEVICES", text)
    with pytest.raises(UnusableInputError, match=words):
        host_devices.declared()


def test_memory_is_limited_to_that_of_the_device_or_of_the_host(tmp_path, monkeypatch, moves):
    folders = [tmp_path / "h" / name for name in ("device-0", "device-1", "")]
    for limit, folder in enumerate(folders):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    files = [str(folder / "cgroup.procs") for folder in folders[:2]]
    entries = [{"id": f"h:{i}", "kind": "cpu", "memory_bytes": 1, "memory_group": file} for i, file in enumerate(files)]
    monkeypatch.setenv("HWAWARE_DEVICES", json.dumps(entries))
    monkeypatch.setattr(host_devices, "_move_self", moves.append)
    own = tmp_path / f"h-{os.getpid()}"
    for devices, limit in (((1,), "1"), ((0, 1), "2")):
        host_devices.limit_memory(*devices)
        assert (own / "memory.limit_in_bytes").read_text() == limit
        assert (own / "memory.swappiness").read_text() == "0"
    assert moves == [str(own / "cgroup.procs")] * 2
    monkeypatch.setenv("HWAWARE_DEVICES", json.dumps([{"id": "h:0", "kind": "cpu", "memory_bytes": 1}]))
    host_devices.limit_memory(0)
    assert len(moves) == 2


@pytest.mark.parametrize("version", [1, 2])
def test_a_process_of_two_devices_gets_the_sum_of_their_quotas(tmp_path, monkeypatch, moves, version):
    monkeypatch.setattr(host_devices, "_membership", host_devices._Membership())
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.cfs_burst_us") if version == 1 else ("cpu.max",)

    def make(folder, *values):
        folder.mkdir()
        for name, value in zip(names, values):
            (folder / name).write_text(value)
        return str(folder / "cgroup.procs")

    limits = (
        (("2000", "10000", "1000"), ("3200", "4000", "1000")) if version == 1 else (("2000 10000",), ("3200 4000",))
    )
    files = [make(tmp_path / f"device-{index}", *each) for index, each in enumerate(limits)]
    make(tmp_path / "device-0+device-1", *limits[0])  # the kernel fills a new group with its files
    entries = [{"id": f"h:{i}", "kind": "cpu", "memory_bytes": 1, "group": file} for i, file in enumerate(files)]
    monkeypatch.setenv("HWAWARE_DEVICES", json.dumps(entries))
    monkeypatch.setattr(host_devices, "_move_self", moves.append)
    host_devices.join(0, 1)
    joint = tmp_path / "device-0+device-1"
    assert moves == [str(joint / "cgroup.procs")]
    written = [(joint / name).read_text() for name in names]
    assert written == (["10000", "10000", "1000"] if version == 1 else ["10000 10000"])


def test_two_devices_of_which_one_is_not_declared(groups):
    with pytest.raises(UnusableInputError, match="device 2 of its host, but HWAWARE_DEVICES declares 2"):
        host_devices.join(0, 2)


def test_the_profiler_refuses_a_device_that_its_host_does_not_declare(monkeypatch):
    """It would take the device for another kind, with a part of the whole host's memory."""
    pytest.importorskip("jax")
    monkeypatch.setenv("HWAWARE_DEVICES", '[{"id": "a:0", "kind": "cpu", "memory_bytes": 5}]')
    monkeypatch.setattr(worker, "_assigned_index", lambda: 1)
    with contextlib.closing(worker.Worker("127.0.0.1", new_secret())) as second:
        with pytest.raises(UnusableInputError, match="serves device 1 of its host, but HWAWARE_DEVICES declares 1"):
            second.identify()
