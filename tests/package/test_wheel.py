"""What is shipped: a wheel with exactly one top-level package, which works from another directory."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def make_wheel(source, folder):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run([*command, str(source)], check=True, cwd=folder, env=environment, timeout=120)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return make_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_one_top_level_package(wheel):
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"hwaware"}


def test_the_wheel_holds_types_and_scenarios(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "hwaware/py.typed" in names
    found = {name.rsplit("/", 1)[1] for name in names if name.endswith(".toml")}
    assert found == {path.name for path in (ROOT / "benchmarks" / "scenarios").glob("*.toml")}


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


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The source distribution, built from a copy so that nothing is left in the tree."""
    folder = tmp_path_factory.mktemp("sdist")
    names = subprocess.run(["git", "ls-files"], check=True, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    for name in names.splitlines():
        if (ROOT / name).is_file():
            (folder / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "copy" / name)
    code = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    command = [sys.executable, "-c", code, str(folder)]
    subprocess.run(command, check=True, cwd=folder / "copy", capture_output=True, timeout=120)
    (found,) = folder.glob("*.tar.gz")
    return found


def test_the_sdist_holds_what_a_person_runs_and_reads(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"setup.py", "pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "mkdocs.yml", "hwaware/py.typed"}
    wanted |= {"docs/index.md", "profiling/recorded/fast-and-slow.json", "patches/README.md", "benchmarks/startup.py"}
    wanted |= {"tests/unit/test_readme.py", "requirements/pinned.txt", "hwaware/bench/scenarios/fast-and-slow.toml"}
    assert sorted(wanted - names) == []
    assert not [name for name in names if name.endswith(".pyc")]


def test_a_wheel_can_be_made_of_the_sdist(sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
    ]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run([*command, str(source)], check=True, cwd=tmp_path, env=environment, timeout=120)
    (made,) = tmp_path.glob("*.whl")
    names = {name.split("/")[0] for name in zipfile.ZipFile(made).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"hwaware"}


# Runs without what only extras of setup.py bring.
BARE = """
import sys

EXTRAS = "alpa cryptography flax jax jaxlib matplotlib ml_dtypes msgpack optax pyroute2 ray".split()

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
import pytest
sys.exit(pytest.main(["-q", "-n0", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def test_the_unit_tests_can_be_read_without_extras():
    """`make package-matrix` runs all of them so, on six Pythons."""
    done = subprocess.run(
        [sys.executable, "-c", BARE, "--collect-only", "tests/unit"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "error" not in done.stdout.splitlines()[-1]
