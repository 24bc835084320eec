"""The supervising loop of examples/restart.py: it starts a training again, and not without an end."""

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "restart.py"
# Does the n-th of these at its n-th start: "s" saves, then it exits with the number.
PROGRAM = """
import sys
from pathlib import Path
folder, plan = Path(sys.argv[1]), sys.argv[2].split(",")
count = folder / "count"
number = int(count.read_text()) if count.exists() else 0
count.write_text(str(number + 1))
if plan[number].startswith("s"):
    (folder / f"checkpoint_{number}").write_text("")
sys.exit(int(plan[number].lstrip("s")))
"""


@pytest.fixture(scope="module")
def supervise():
    spec = importlib.util.spec_from_file_location("restart", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.supervise


@pytest.mark.parametrize(
    ("plan", "code", "starts"),
    [
        ("0", 0, 1),
        ("1,1,0", 0, 3),
        ("1,1,1,0", 1, 3),  # no progress
        ("1,1,s1,1,s1,0", 0, 6),  # progress in between
        ("s1,2,0", 2, 2),  # it cannot run like this
    ],
)
def test_a_training_is_started_again_but_not_without_an_end(supervise, tmp_path, plan, code, starts):
    command = [sys.executable, "-S", "-c", PROGRAM, str(tmp_path), plan]
    assert supervise(command, tmp_path, 0.0) == code
    assert int((tmp_path / "count").read_text()) == starts
