"""doctor: what is missing is named with the command that gets it, and what does not fit makes it exit with 1."""

import json

import pytest
from click.testing import CliRunner

from hwaware.cli import _findings, _probes, main

VERSIONS = {package.name: "1.0" for package in _findings.PACKAGES}
GOOD_ALPA = {"on_stock_jax": True, "overrides": [{"function": "alpa.a", "needed": True, "fits": True, "problem": None}]}
GOOD = {
    "jax": {"devices": [{"platform": "cpu", "kind": "cpu", "count": 2}]},
    "alpa": GOOD_ALPA,
    "gpus": [],
    "cuda_plugins": {},
    "ray": None,
    "ucx": {"version": "1.22.0", "transports": ["posix", "tcp"]},
    "testbed": {"kinds": ["user", "loopback"], "notes": ["Not shaped: CPU shares."]},
}


def judged(versions=VERSIONS, **changes):
    return {ability.name: ability for ability in _findings.judge({**GOOD, **changes}, {**VERSIONS, **versions})}


def test_everything_is_there():
    abilities = judged()
    assert all(ability.works for ability in abilities.values())
    assert abilities["trace, profile --address local"].found == "JAX 1.0 sees 2 cpu (cpu)"
    assert abilities["train with Alpa"].found == "Alpa 1.0 on stock JAX 1.0: 1 of 1 overrides fit"
    assert abilities["testbed, demo"].fix == "run as root on Linux (a container needs --privileged and --cgroupns=host)"


@pytest.mark.parametrize(
    ("answer", "driver", "works", "found", "fix"),
    [
        ({"version": None, "transports": []}, None, False, "not installed: libucx", "libucx-cu13"),
        ({"version": None, "transports": []}, "550.54", False, "not installed: libucx", "libucx-cu12"),
        ({"version": None, "transports": [], "problem": "no such file"}, None, False, "no such file", "--force"),
        (
            {"version": "1.22.0", "transports": ["tcp"]},
            "580.65.06",
            False,
            "1.22.0 with tcp, not cuda_ipc",
            "libucx-cu13",
        ),
        ({"version": "1.22.0", "transports": ["cuda_ipc", "tcp"]}, "580.65.06", True, "with cuda_ipc, tcp", None),
        ({"version": "1.22.0", "transports": ["tcp"]}, None, True, "with tcp; no GPU is here", None),
    ],
)
def test_ucx(answer, driver, works, found, fix):
    gpus = [{"name": "H100", "memory": "80 GiB", "driver": driver}] if driver else []
    ability = _findings._ucx({"ucx": answer, "gpus": gpus})
    assert ability.works is works
    assert found in ability.found
    assert (ability.fix is None) if fix is None else (fix in ability.fix)


def test_ucx_is_asked_for_what_it_has_here():
    found = _findings.ucx()
    assert found["version"] is None or "tcp" in found["transports"]


def test_all_that_a_shaped_testbed_needs_is_named_at_once():
    (ability,) = [one for one in judged({"ray": None, "pyroute2": None}).values() if one.name == "testbed, demo"]
    assert ability.fix == "pip install ray && pip install pyroute2"


@pytest.mark.parametrize("package", _findings.PACKAGES, ids=lambda package: package.name)
def test_a_missing_package_comes_with_its_command(package):
    missing = [a for a in judged({package.name: None}).values() if a.fix and package.install in a.fix]
    assert missing
    # Without a required package hwaware itself is broken; the others are only not there.
    assert any(ability.broken for ability in missing) == package.required


@pytest.mark.parametrize(
    ("changes", "ability", "words"),
    [
        ({"jax": {"problem": "no libcuda"}}, "trace, profile --address local", "does not run: no libcuda"),
        ({"alpa": {"problem": "Alpa 0.1 is installed", "fix": "f"}}, "train with Alpa", "Alpa 0.1 is installed"),
        (
            {"alpa": {"on_stock_jax": True, "overrides": [{"function": "alpa.a", "needed": True, "fits": False}]}},
            "train with Alpa",
            "0 of 1 overrides fit, not alpa.a",
        ),
        (
            {"ray": {"address": "h:1", "problem": "Nobody answers.", "fix": "f"}},
            "profile a Ray cluster",
            "Nobody answers",
        ),
        (
            {"ray": {"address": "h:1", "hosts": [{"name": "a", "address": "1", "gpus": 0}]}},
            "profile a Ray cluster",
            "1 Ray node at h:1, 0 with devices (Ray's resource GPU)",
        ),
    ],
)
def test_what_does_not_fit_is_broken(changes, ability, words):
    found = judged(**changes)[ability]
    assert words in found.found
    assert (found.works, found.broken) == (False, True)
    assert found.fix


PARTS = {"kinds": ["gpu", "gpu-loopback"], "notes": ["Each device is a part."], "mps": True}


def on_gpus(driver="580.65.06", jax="0.12.0.1", plugins=(), parts=PARTS):
    gpus = [{"name": "A100", "memory": "80 GB", "driver": driver}]
    return judged({"jax": jax, "jaxlib": jax}, gpus=gpus, cuda_plugins=dict(plugins), gpu_testbed=parts)


@pytest.mark.parametrize(
    ("driver", "jax", "extra"),
    [
        ("580.65.06", "0.12.0.1", "cuda13"),
        ("580.65.06", "0.7.1", "cuda12"),
        ("570.1", "0.12.0.1", "cuda12"),
        ("580.65.06", "0.4.30", "cuda12"),
        ("470.1", "0.12.0.1", "cuda12"),
    ],
)
def test_gpus_that_jax_does_not_see(driver, jax, extra):
    found = on_gpus(driver, jax)["trace, profile --address local"]
    assert found.works
    assert "not 1 GPU that the driver lists" in found.found
    assert f"jax[{extra}]=={jax}" in found.fix


def test_a_plugin_for_another_jax_is_named():
    found = on_gpus(plugins={"jax-cuda13-plugin": "0.11.2"})["trace, profile --address local"]
    assert found.found.endswith("lists; installed is jax-cuda13-plugin 0.11.2, which needs JAX 0.11.2")
    fitting = on_gpus(plugins={"jax-cuda13-plugin": "0.12.0.1"})["trace, profile --address local"]
    assert fitting.found.endswith("that the driver lists")


def test_a_testbed_on_parts_of_a_gpu_is_judged_where_one_is():
    name = "testbed on parts of a GPU"
    assert on_gpus()[name] == _findings.Ability(name, True, "kind gpu: Each device is a part.")
    turns = on_gpus(parts={**PARTS, "notes": ["By turns."], "mps": False})[name]
    assert (turns.works, turns.found) == (True, "kind gpu: By turns.")
    assert "Multi-Process Service" in turns.fix
    assert name not in judged()


def test_the_document_of_a_host_with_a_gpu(fast, tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H100, 81559 MiB, 580.65.06'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    document = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)
    assert document["gpus"] == [{"name": "NVIDIA H100", "memory": "81559 MiB", "driver": "580.65.06"}]
    if document["gpu_testbed"] is not None:  # without Ray, nobody can tell
        assert document["gpu_testbed"]["kinds"][-1] == "gpu-loopback"
        assert document["gpu_testbed"]["mps"] is False


@pytest.fixture
def fast(monkeypatch):
    """Without starting JAX and Alpa."""
    answers = {"jax": GOOD["jax"], "alpa": GOOD_ALPA}
    monkeypatch.setattr(_probes, "ask", lambda *probe: answers[probe[0]])
    return answers


def test_the_document_and_the_table(fast):
    outcome = CliRunner().invoke(main, ["doctor", "--json"])
    assert outcome.exit_code == 0, outcome.output
    document = json.loads(outcome.stdout)
    assert document["ok"] is True
    assert {"packages", "abilities", "alpa", "jax", "testbed"} <= set(document)
    text = CliRunner().invoke(main, ["doctor"]).stdout
    assert "plan, evaluate, simulate, show" in text
    assert "\x1b" not in text  # no colour where there is no terminal


def test_overrides_that_fit_are_listed_only_on_demand(fast):
    pytest.importorskip("ray")
    fast["alpa"] = {
        "on_stock_jax": True,
        "overrides": [
            {"function": name, "needed": True, "fits": name != "alpa.unfit", "problem": None}
            for name in ("alpa.fit", "alpa.unfit")
        ],
    }
    text = CliRunner().invoke(main, ["doctor"]).stdout
    assert "alpa.unfit  no" in text
    assert "alpa.fit" not in text
    assert "alpa.fit" in CliRunner().invoke(main, ["doctor", "--verbose"]).stdout
    fast["alpa"] = GOOD_ALPA
    assert "alpa." not in CliRunner().invoke(main, ["doctor"]).stdout


def test_exit_code_1_where_something_does_not_fit(fast):
    fast["jax"] = {"problem": "no libcuda"}
    outcome = CliRunner().invoke(main, ["doctor"])
    if _findings.version("jax") is None:
        pytest.skip("JAX is not installed, so nobody asks it")
    assert outcome.exit_code == 1
    assert 'To fix "trace, profile --address local": pip install jax' in outcome.stdout


def test_a_ray_that_does_not_answer():
    pytest.importorskip("ray")
    found = _probes.ask("ray", "127.0.0.1:1")
    assert "No Ray cluster answers" in found["problem"]
    assert found["fix"]


def test_a_probe_that_fails_says_why(monkeypatch):
    answer = _probes.ask("nothing")
    assert answer == {"problem": "KeyError: 'nothing'"}
    monkeypatch.setattr(_probes, "LIMIT_S", 0.001)
    assert "did not end within" in _probes.ask("jax")["problem"]
