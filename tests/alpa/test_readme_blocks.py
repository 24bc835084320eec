"""The README's line for an existing Alpa program runs, in a directory with a profile."""

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
