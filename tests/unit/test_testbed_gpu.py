"""The testbed whose devices are parts of one GPU, as far as it goes without one."""

import json
import stat
import subprocess

import msgspec
import pytest

from hwaware.bench.testbed import gpu, kinds, load_scenario, ray_nodes
from hwaware.bench.testbed.state import State
from hwaware.errors import UnusableInputError


def state(kind, temp_dir="/tmp/hw-ab12"):
    scenario = load_scenario("fast-and-slow")
    return State(
        name="test-ab12",
        scenario=scenario,
        kind=kind,
        token="ab12",
        owner_pid=1,
        owner_started=1,
        subnet="10.64.3.0/24",
        address="10.64.3.254:6400",
        hosts={host: f"10.64.3.{index + 1}" for index, host in enumerate(scenario.hosts())},
        temp_dir=temp_dir,
    )


def a_program(directory, name, text):
    path = directory / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_parts_follow_the_shares_and_add_up_to_the_gpu():
    scenario = load_scenario("fast-and-slow")
    parts = [gpu.percentage(scenario, host) for host in scenario.hosts()]
    assert parts == pytest.approx([100 * share / 1.8 for share in scenario.shares.values()])
    assert sum(parts) == pytest.approx(100)


@pytest.fixture
def with_mps(tmp_path, monkeypatch):
    a_program(tmp_path, gpu.CONTROL, "true")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_a_host_s_workers_see_their_part_of_the_gpu_alone(with_mps):
    of_host = ray_nodes.host_environment(state("gpu"), "h0")
    assert of_host["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "44.4"
    assert of_host["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=2048M"
    assert of_host["CUDA_MPS_PIPE_DIRECTORY"].startswith("/tmp/hw-ab12/")
    assert of_host["JAX_PLATFORMS"] == "cuda"
    assert "NPROC" not in of_host
    [device] = json.loads(of_host["HWAWARE_DEVICES"])
    assert (device["id"], device["kind"]) == ("h0:0", "gpu-0.80")
    assert ray_nodes.host_environment(state("root"), "h0")["JAX_PLATFORMS"] == "cpu"


def test_a_host_of_several_devices_is_refused():
    with pytest.raises(UnusableInputError, match=r"Host h0 of unequal-devices has 2 devices.*To fix: "):
        gpu.check(load_scenario("unequal-devices"))


def test_without_mps_hosts_take_turns(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    of_host = ray_nodes.host_environment(state("gpu"), "h0")
    assert not [name for name in of_host if name.startswith("CUDA_MPS")]
    assert of_host["JAX_PLATFORMS"] == "cuda"
    assert "by turns with the others" in kinds.notes_for("gpu", False)[0]


def test_parts_on_loopback_have_no_links_of_their_own():
    assert state("gpu-loopback").is_gpu()
    assert not state("gpu-loopback").has_links()
    assert state("gpu").has_links()
    assert "Not shaped: links" in kinds.notes_for("gpu-loopback", False)[1]


def test_the_kinds_need_a_driver_and_are_never_the_default(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr(kinds, "_succeeds", lambda trial: True)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    for kind in ("gpu", "gpu-loopback"):
        with pytest.raises(
            UnusableInputError, match=rf"does not let this user build a testbed of kind '{kind}'.*NVIDIA's driver"
        ):
            kinds.best_kind(kind)
    for name in (gpu.CONTROL, "nvidia-smi"):
        a_program(tmp_path, name, "true")
    assert [kinds.best_kind(kind) for kind in ("gpu", "gpu-loopback")] == ["gpu", "gpu-loopback"]
    assert kinds.best_kind("auto") == "root"
    assert "a part of this machine's GPU" in kinds.notes_for("gpu", False)[0]


def test_the_service_is_a_silent_child_with_own_directories(tmp_path, monkeypatch, capfd):
    told = tmp_path / "told"
    a_program(
        tmp_path, gpu.CONTROL, f'echo chatter; echo "$@" "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY" > {told}'
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)))
    gpu.start_service(state("gpu", str(tmp_path)))
    assert started[0].wait(10) == 0
    assert told.read_text().split() == ["-f", f"{tmp_path}/mps", f"{tmp_path}/mps-log"]
    assert (tmp_path / "mps").is_dir()
    assert capfd.readouterr().out == ""  # the keeper's answer goes there


@pytest.mark.parametrize(
    ("kind", "mount", "said"),
    [
        ("gpu", None, "h0:0 (GPU share 0.8)"),
        ("gpu-loopback", None, "h0:0 (GPU share 0.8)"),
        ("root", "/nowhere", "h0:0 (0.8 of a core)"),
        ("root", None, "h0:0 (speed not limited)"),
    ],
)
def test_the_command_line_says_what_a_share_is_of(kind, mount, said, capsys):
    from hwaware.bench.testbed.manager import Testbed
    from hwaware.cli.testbed import _print

    _print(Testbed(msgspec.structs.replace(state(kind), cgroup_mount=mount)).describe())
    assert said in capsys.readouterr().out
