"""`make lint` runs every check, and fails at the end if one of them failed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKS = ("ruff check .", "ruff format --check .", "lint-imports", "mypy", "python docs/prose.py")


@pytest.mark.parametrize("failing", ["", "ruff", "mypy"])
def test_lint_runs_what_follows_a_check_that_fails(tmp_path, failing):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    (tmp_path / "bin").mkdir()
    for name in ("ruff", "lint-imports", "mypy", "python"):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\necho "ran {name} $*"\nexit {int(name == failing)}\n')
        program.chmod(0o755)
    (tmp_path / ".ready").touch()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "lint", f"VENV={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, env=environment)
    ran = [line for line in done.stdout.splitlines() if line.startswith("ran ")]
    assert [check for check in CHECKS if not any(line.startswith(f"ran {check}") for line in ran)] == []
    assert (done.returncode != 0) == bool(failing)
    assert ("make lint failed in" in done.stdout) == bool(failing)
    if failing:
        assert f"/{failing} " in done.stdout.splitlines()[-1] + " "
