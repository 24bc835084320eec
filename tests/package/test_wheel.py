"""What is shipped: a wheel with exactly one top-level package, which works from another directory."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run([*command, str(ROOT)], check=True, cwd=folder, env=environment, timeout=120)
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_holds_one_top_level_package(wheel):
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"hwaware"}


def test_the_wheel_holds_types_and_scenarios(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "hwaware/py.typed" in names
    assert sum(name.endswith(".toml") for name in names) == 10


def test_the_wheel_works_from_another_directory(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "import hwaware, hwaware.plans; print(hwaware.__version__, hwaware.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    found = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    assert str(tmp_path / "site") in found
