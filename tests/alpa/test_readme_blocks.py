"""The README's line for an existing Alpa program runs, and so does the complete program of docs/alpa.md."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.alpa
ROOT = Path(__file__).parents[2]


def test_one_line_before_alpa(tmp_path):
    text = (ROOT / "README.md").read_text()
    (enable,) = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "print(" not in code]
    assert "hwaware.enable(" in enable
    shutil.copy(ROOT / "profiling" / "recorded" / "fast-and-slow.json", tmp_path / "cluster.json")
    (tmp_path / "train.py").write_text(f"{enable}\nimport alpa\n\nhwaware.disable()\nprint('through')\n")
    # What hwaware is comes from the checkout, as for every other test.
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); exec(open('train.py').read())"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", start],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["through"]), done.stderr[-2000:]


@pytest.mark.thorough
def test_the_complete_program_trains(tmp_path):
    text = (ROOT / "docs" / "alpa.md").read_text()
    (program,) = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "ray.init(" in code]
    (tmp_path / "train.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "train.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(loss) for loss in re.findall(r"^step \d: loss (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    ends = [tuple(map(int, pair)) for pair in re.findall(r"^layers \((\d), (\d)\) on ", done.stdout, re.MULTILINE)]
    assert [layer for first, last in ends for layer in range(first, last + 1)] == [0, 1, 2, 3]
