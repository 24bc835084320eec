"""Does what is shipped work on every Python that setup.py names?  python benchmarks/packages.py [--only 3.8] [--alpa]

Builds the source distribution from what git tracks and the wheel from the source distribution, installs the wheel in an
environment of its own for each Python, with nothing but hwaware's own loose requirements and a test runner, and uses it
from a directory that has no hwaware in it: commands, messages about what is missing, unit tests. With --alpa also the
part of tests/alpa below on Python 3.11, with stock JAX and Ray. Writes packages.json and packages.md to
benchmarks/results; exits with 1 if something failed. An environment that is there already is used again. Pythons are
taken from PATH, from pyenv, or from --pythons FOLDER (FOLDER/*/bin/pythonX.Y).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Set

import versions as alpa_versions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CORE = ("3.8", "3.9", "3.10", "3.11", "3.12", "3.13")
LIMIT_S = 900.0
RECORDED = ("profiling/recorded/fast-and-slow.json", "profiling/recorded/gpt-8-layers.json")
ALPA_TESTS = ("test_versions.py", "test_training.py::test_the_placed_model_trains_like_plain_jax")


class Check(NamedTuple):
    """A command of hwaware, how it has to exit, and what it has to say on either stream."""

    arguments: List[str]
    exit_code: int = 0
    says: str = ""


# In this order, in one directory: later commands read what earlier ones wrote.
COMMANDS = (
    Check(["--help"], says="evaluate"),
    Check(["doctor", "--json"], says='"ok": true'),
    Check(["plan", *RECORDED, "--microbatches", "8", "-o", "plan.json"], says="h0:0"),
    Check(["evaluate", *RECORDED, "plan.json"], says="step: 1.409 s"),
    Check(["simulate", *RECORDED, "plan.json", "-o", "trace.json"], says="Simulated step"),
    *(Check(["show", name], says="h0:0") for name in (RECORDED[0], "plan.json", "trace.json")),
    Check(["show", RECORDED[1]], says="GFLOP"),
    Check(["compare", RECORDED[0], RECORDED[0]], says="same"),
    Check(["testbed", "list", "--json"], says='"fast-and-slow"'),
)
# What an environment without the extras has to say.
MISSING = (
    Check(["show", RECORDED[0], "--plot", "cluster.png"], 2, "matplotlib is not installed"),
    Check(["trace", "gpt", "-o", "w.json"], 2, "need JAX, Flax and Optax"),
    Check(["trace", "mine:example", "-o", "w.json"], 2, "Tracing needs JAX"),
    Check(["profile", "--address", "127.0.0.1:1", "-o", "c.json"], 2, "Ray cannot be imported"),
    Check(["testbed", "up", "fast-and-slow"], 2, "Ray is not installed"),
    Check(["demo"], 2, "is not installed"),
)


def build(folder: Path) -> Path:
    """The wheel, made from the source distribution that is made from what git tracks; both hold one package."""
    shutil.rmtree(folder, ignore_errors=True)
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in names.splitlines():
        (folder / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "copy" / name, follow_symlinks=False)
    make = "import sys; from setuptools.build_meta import build_sdist as b, build_wheel as w; {}(sys.argv[1])"
    run = functools.partial(subprocess.run, check=True, stdout=subprocess.DEVNULL, env=clean_environment())
    run([sys.executable, "-c", make.format("b"), str(folder)], cwd=folder / "copy")
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder)
    (source,) = (path for path in folder.glob("hwaware-*") if path.is_dir())
    run([sys.executable, "-c", make.format("w"), str(folder)], cwd=source)
    (wheel,) = folder.glob("*.whl")
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    packages = {path.parent.name for path in source.glob("*/__init__.py")}
    if {top for top in tops if not top.endswith(".dist-info")} != {"hwaware"} or packages != {"hwaware"}:
        raise SystemExit(f"expected one top-level package, found {sorted(tops)} in the wheel, {sorted(packages)}")
    return wheel


def clean_environment(**more: str) -> Dict[str, str]:
    """The environment without what would let Python find the sources instead of what is installed."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "HWAWARE_PROFILE")}
    return {**kept, "JAX_PLATFORMS": "cpu", "NPROC": "1", "RAY_ENABLE_AUTO_CONNECT": "0", "COLUMNS": "200", **more}


@contextlib.contextmanager
def empty_place(wheel: Path, name: str) -> Iterator[Path]:
    """A directory with all that the source distribution holds but hwaware itself."""
    (source,) = (path for path in wheel.parent.glob("hwaware-*") if path.is_dir())
    place = wheel.parent / name
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(source, place, ignore=shutil.ignore_patterns("hwaware", "build", "*.egg-info"))
    (place / "mine.py").write_text("def example():\n    return lambda state, batch: state, {}, {}\n")
    yield place
    shutil.rmtree(place)


def environment_for(python: str, pythons: Optional[Path], folder: Path, wheel: Path) -> Path:
    """The interpreter of an environment with the wheel and what the wheel asks for, and with the test runner."""
    interpreter = folder / f"core-{python}" / "bin" / "python"
    if not interpreter.exists():
        base = find_python(python, pythons)
        subprocess.run([base, "-m", "venv", folder / f"core-{python}"], check=True, env=clean_environment())
    install(interpreter, wheel, "pytest", "hypothesis")
    return interpreter


def install(interpreter: Path, wheel: Path, *more: str) -> None:
    """Install the wheel, also over an older build of the same version."""
    pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for asked in ([str(wheel), *more], ["--no-deps", "--force-reinstall", str(wheel)]):
        subprocess.run([*pip, *asked], check=True, env=clean_environment(), cwd=wheel.parent)


def find_python(python: str, pythons: Optional[Path]) -> str:
    """An interpreter of this version: from the folder that was named, from pyenv, else from PATH."""
    for folder in (pythons, Path.home() / ".pyenv" / "versions"):
        found = sorted(folder.glob(f"*/bin/python{python}")) if folder is not None else []
        if found:
            return str(found[-1])
    base = shutil.which(f"python{python}")
    if base is None:
        raise SystemExit(f"There is no python{python}. To fix: install it, or use --only.")
    return base


def failures(interpreter: Path, place: Path, checks: Any) -> List[str]:
    """What went otherwise than the checks say."""
    found = []
    for check in checks:
        command = [interpreter.parent / "hwaware", *check.arguments]
        done = subprocess.run(
            command, cwd=place, capture_output=True, text=True, env=clean_environment(), timeout=LIMIT_S, check=False
        )
        said = done.stdout + done.stderr
        if done.returncode != check.exit_code or check.says not in said or "Traceback" in said:
            found.append(f"hwaware {' '.join(check.arguments)} exited with {done.returncode}:\n{said}")
    return found


def tested(interpreter: Path, place: Path, tests: List[str], log: Path) -> str:
    """What the tests came to, in pytest's words."""
    # Warnings of libraries of other ages than the pinned ones are not errors here.
    command = [str(interpreter), "-m", "pytest", "-q", "-W", "ignore", *tests]
    with log.open("w") as file:
        done = subprocess.run(
            command, cwd=place, stdout=file, stderr=file, env=clean_environment(), timeout=LIMIT_S, check=False
        )
    said = log.read_text().strip().splitlines()[-1].split(" in ")[0]
    return said if done.returncode == 0 else f"FAILED: {said}"


def installed(interpreter: Path, names: Set[str]) -> Dict[str, str]:
    """The versions of those of the packages that are there."""
    command = [str(interpreter), "-m", "pip", "list", "--format=json", "--disable-pip-version-check"]
    listed = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd="/").stdout)
    return {entry["name"].lower(): entry["version"] for entry in listed if entry["name"].lower() in names}


def core(python: str, arguments: argparse.Namespace, wheel: Path) -> Dict[str, Any]:
    """One row: a Python with nothing but what the wheel asks for."""
    interpreter = environment_for(python, arguments.pythons, arguments.environments, wheel)
    log = arguments.environments / f"core-{python}.log"
    with empty_place(wheel, f"core-{python}") as place:
        wrong = failures(interpreter, place, COMMANDS)
        unclear = failures(interpreter, place, MISSING)
        tests = tested(interpreter, place, ["tests/unit"], log)
    for words in (*wrong, *unclear):
        print(words, file=sys.stderr)
    return {
        "python": python,
        "with": installed(interpreter, {"msgspec", "numpy", "numba", "click", "rich"}),
        "commands": f"{len(COMMANDS) - len(wrong)} of {len(COMMANDS)}",
        "messages": f"{len(MISSING) - len(unclear)} of {len(MISSING)}",
        "tests": tests,
        "passed": not wrong and not unclear and "FAILED" not in tests,
    }


def alpa(versions: alpa_versions.Versions, arguments: argparse.Namespace, wheel: Path) -> Dict[str, Any]:
    """One row: Alpa on stock JAX with the wheel."""
    interpreter = alpa_versions.make(versions, arguments.environments, find_python(versions.python, arguments.pythons))
    install(interpreter, wheel)
    commands = [*COMMANDS, Check(["trace", "gpt", "-o", "w.json"], says="w.json: 8 layers")]
    with empty_place(wheel, versions.name) as place:
        wrong = failures(interpreter, place, commands)
        tests = [f"tests/alpa/{name}" for name in ALPA_TESTS]
        said = tested(interpreter, place, tests, arguments.environments / f"{versions.name}-wheel.log")
    for words in wrong:
        print(words, file=sys.stderr)
    return {
        "python": versions.python,
        "with": installed(interpreter, {"jax", "ray", "alpa", "flax", "numpy"}),
        "commands": f"{len(commands) - len(wrong)} of {len(commands)}",
        "messages": "",
        "tests": said,
        "passed": not wrong and "FAILED" not in said,
    }


def table(rows: List[Dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "The wheel in an environment of its own, used without the sources; made by `make package-matrix`.",
        "",
        "| Python | installed beside it | commands as expected | messages about missing extras | tests |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        beside = ", ".join(f"{name} {version}" for name, version in sorted(row["with"].items()))
        lines.append(f"| {row['python']} | {beside} | {row['commands']} | {row['messages'] or '-'} | {row['tests']} |")
    return "\n".join(lines) + "\n"


def record(row: Dict[str, Any], wheel: Path) -> None:
    """Put a row in the place of an older one of the same Python, with or without Alpa."""
    path = RESULTS / "packages.json"
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {(old["python"], "jax" in old["with"]): old for old in (*known, row)}
    ordered = [rows[key] for key in sorted(rows, key=lambda key: (key[1], int(key[0].split(".")[1])))]
    document = {"command": "make package-matrix", "wheel": wheel.name, "rows": ordered}
    path.write_text(json.dumps(document, indent=2) + "\n")
    path.with_suffix(".md").write_text(table(ordered))


def main() -> int:
    """Build, install, use, write the table; 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", type=Path, default=ROOT / ".versions")
    parser.add_argument("--pythons", type=Path, help="a folder with interpreters, */bin/pythonX.Y")
    parser.add_argument("--only", action="append", help="this Python only; may be given again; keeps the other rows")
    parser.add_argument("--alpa", action="store_true", help="also Alpa on stock JAX, on Python 3.11")
    arguments = parser.parse_args()
    arguments.environments.mkdir(parents=True, exist_ok=True)
    wheel = build(arguments.environments / "build")
    chosen = arguments.only or CORE
    jobs: List[Callable[[], Dict[str, Any]]] = [functools.partial(core, python, arguments, wheel) for python in chosen]
    if arguments.alpa:
        newest = [v for v in alpa_versions.ENVIRONMENTS if (v.jax, v.ray) == ("0.4.30", "2.9.3") and v.python in chosen]
        jobs += [functools.partial(alpa, versions, arguments, wheel) for versions in newest]
    rows = []
    for job in jobs:
        rows.append(job())
        print(json.dumps(rows[-1]), flush=True)
        record(rows[-1], wheel)
    return int(not all(row["passed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
