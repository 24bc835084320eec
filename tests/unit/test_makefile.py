"""`make lint` runs every check, and fails at the end if one of them failed."""

import os
import shutil
import subprocess
import sys
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


@pytest.mark.parametrize(
    ("version", "fits"), [("3.10", False), ("3.11", True), ("3.12", True), ("3.13", True), ("3.14", False)]
)
def test_env_takes_a_python_that_fits_and_says_what_it_lacks(version, fits, tmp_path):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    numbers = tuple(map(int, version.split(".")))
    python = tmp_path / f"python{version}"
    # It answers the question for its version as that Python would, and makes an environment in name alone.
    python.write_text(f"""#!/bin/sh
case "$1" in
-c) exec {sys.executable} -c "import sys; sys.version_info = {(*numbers, 0)}; $2" ;;
-V) echo "Python {version}.0" ;;
-m) if [ "$2" = venv ]; then mkdir -p "$3/bin"; ln -sf "$0" "$3/bin/python"; fi ;;
esac
""")
    python.chmod(0o755)
    made = tmp_path / "made"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "env", f"VENV={made}", f"PYTHON={python}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert (done.returncode == 0) == fits == (made / ".ready").exists()
    if not fits:
        assert done.stdout.startswith(f"Found no Python 3.11, 3.12 or 3.13 that runs, under the name {python}. To fix:")
