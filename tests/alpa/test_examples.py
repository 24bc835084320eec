"""The programs of examples/, as they are: run, placed by the profile, and both mappings said.

They run with HWAWARE_ALL_CASES alone, as `make examples` sets it.
"""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import hwaware

pytestmark = pytest.mark.alpa
ROOT = Path(hwaware.__file__).parent.parent
PROGRAMS = ["mlp", "serve_gpt", "gpt", "moe", "wresnet", "nnx", "haiku", "equinox"]
INSTALLED = [name for name in PROGRAMS if name not in ("haiku", "equinox") or importlib.util.find_spec(name)]


@pytest.fixture(scope="module")
def said():
    """(standard output, standard error) of each program, run one after the other on one Ray."""
    command = [sys.executable, str(ROOT / "examples" / "run.py"), *INSTALLED]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    parts = done.stdout.split("HWAWARE_PROFILE=cluster.json python ")[1:]
    lines = [line for line in done.stderr.splitlines() if line.startswith("hwaware: ")]
    return dict(zip(INSTALLED, zip(parts, lines)))


def test_every_program_is_known():
    files = {name.stem.replace("train_", "") for name in (ROOT / "examples").glob("*.py")} - {"run", "models"}
    assert files == {*PROGRAMS, "restart"}


@pytest.mark.skipif(not os.environ.get("HWAWARE_ALL_CASES"), reason="trains twice; `make examples` runs it")
def test_a_killed_training_goes_on_with_the_same_losses():
    command = [sys.executable, str(ROOT / "examples" / "run.py"), "restart"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    starts, losses = [], {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as done:
        for line in done.stdout:
            if line.startswith("process "):
                starts.append((int(line.split()[1]), int(line.split()[-1])))
            elif line.startswith("step "):
                step, loss = int(line.split()[1][:-1]), line.split()[-1]
                assert losses.setdefault(step, loss) == loss  # also of a step that is trained a second time
                if step == 7 and len(starts) == 1:
                    os.kill(starts[0][0], signal.SIGKILL)
    assert done.returncode == 0
    assert [first for _, first in starts] == [0, 6]
    assert sorted(losses) == list(range(12))


@pytest.mark.thorough
@pytest.mark.parametrize("name", INSTALLED)
def test_an_example(said, name):
    output, line = said[name]
    assert "s with hwaware's mapping, " in line
    assert "with Alpa's: " in line
    assert "hwaware's: layers 0-" in line
    assert "Alpa's: layers 0" in line
    if name.startswith("serve"):
        assert output.count("next tokens [") == 4
    else:
        losses = [float(row.split()[-1]) for row in output.splitlines() if row.startswith("step ")]
        assert len(losses) == 5
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_example_names_hwaware(name):
    text = next((ROOT / "examples").glob(f"*{name}.py")).read_text()
    assert "hwaware" not in text.split('"""', 2)[2]
