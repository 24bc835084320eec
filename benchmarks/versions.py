"""Which versions Alpa runs on: makes an environment for each and runs a small part of tests/alpa in it.

python benchmarks/versions.py [--environments FOLDER] [--only TEXT]; needs the Pythons of ENVIRONMENTS on PATH and a
package registry. An environment that is there already is used again. Prints the table of patches/README.md; exits with
1 if something failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import List, NamedTuple, Optional

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
LIMIT_S = 1200.0
# One of each: placement, schedules, all-reduces, types, checkpoints, random numbers, donation, layers of a CNN.
TESTS = (
    "test_training.py::test_the_placed_model_trains_like_plain_jax",
    "test_schedules.py::test_training_schedules[1f1b_overlap_friendly]",
    "test_reductions.py::test_clipping_by_global_norm",
    "test_mixed_precision.py::test_float16_with_dynamic_loss_scale",
    "test_mixed_precision.py::test_bfloat16_with_float32_weights",
    "test_checkpoints.py::test_training_goes_on_where_it_was_saved_also_on_other_stages",
    "test_randomness.py::test_dropout[2-True-gpipe]",
    "test_randomness.py::test_the_first_microbatch_draws_what_plain_jax_draws_and_others_draw_other_numbers",
    "test_donation.py",
    "test_batches.py",
    "test_kept_programs.py",
    "test_splitting.py",
    "test_sharding.py::test_replicas_keep_gradients_of_convolutions_apart_and_exchange_nothing",
    "test_own_scalars.py",
    "test_fewer_samples.py",
    "test_layerwise.py",
    "test_sharded_stages.py::test_losses_are_plain_jaxs",
    "test_flops.py",
    "test_versions.py",
)


class Versions(NamedTuple):
    """One environment; `ray` is a version or "newest"."""

    python: str
    jax: str
    ray: str

    @property
    def name(self) -> str:
        """A folder's name."""
        return f"py{self.python}-jax{self.jax}-ray{self.ray}"


# The oldest JAX, three on the way, and the newest, which requirements/pinned.txt names, too.
ENVIRONMENTS = (
    Versions("3.9", "0.4.13", "2.9.3"),
    Versions("3.9", "0.4.30", "newest"),
    Versions("3.11", "0.4.30", "2.9.3"),
    Versions("3.11", "0.6.2", "newest"),
    Versions("3.12", "0.8.3", "newest"),
    Versions("3.13", "0.12.0.1", "newest"),
)


def interpreter(version: str) -> str:
    """Return a Python of a version that runs: on PATH, or one of pyenv's, whose names on PATH need not run."""
    name = f"python{version}"
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/{name}"))
    for one in filter(None, (shutil.which(name), *map(str, installed))):
        if subprocess.run([one, "-c", ""], capture_output=True, check=False).returncode == 0:
            return one
    raise SystemExit(f"Found no {name} that runs. To fix: install it, or leave it out by --only.")


def make(versions: Versions, folder: Path, base: Optional[str] = None) -> Path:
    """The interpreter of an environment with these versions; makes it, from `base`, if it is not there."""
    python = folder / versions.name / "bin" / "python"
    ready = folder / versions.name / ".ready"
    if not ready.exists():
        base = base or interpreter(versions.python)
        subprocess.run([base, "-m", "venv", folder / versions.name], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # The pip that Python 3.9 brings looks for hours for versions that fit together.
        subprocess.run([*pip, "--upgrade", "pip"], check=True)
        files = [
            f"--requirement={REQUIREMENTS / 'versions' / f'{name}.txt'}" for name in (f"jax-{versions.jax}", "common")
        ]
        ray = "ray" if versions.ray == "newest" else f"ray=={versions.ray}"
        subprocess.run([*pip, *files, ray], check=True)
        subprocess.run([*pip, "--no-deps", f"--requirement={REQUIREMENTS / 'alpa.txt'}"], check=True)
        ready.touch()
    return python


def run(python: Path, log: Path) -> str:
    """What the tests came to: "26 passed", or the last line of what pytest said."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "NPROC": "1"}
    environment["RAY_ENABLE_AUTO_CONNECT"] = "0"
    tests = [f"tests/alpa/{name}" for name in TESTS]
    # Libraries of different ages warn about each other.
    command = [str(python), "-m", "pytest", "-q", "-W", "ignore", *tests]
    with log.open("w") as file:
        try:
            subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=file, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"did not end within {LIMIT_S:g} s"
    return log.read_text().strip().splitlines()[-1]


def found(python: Path) -> List[str]:
    """The versions that an environment really has."""
    modules = "jax, ray, flax"
    script = f"import platform, {modules}; print(platform.python_version(), *(m.__version__ for m in ({modules})))"
    return subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout.split()


def main() -> None:
    """Makes, runs, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, default=ROOT / ".versions")
    parser.add_argument("--only", default="", help="only environments whose name has this in it, e.g. py3.9-jax0.4.13")
    arguments = parser.parse_args()
    failed = False
    print("| Python | JAX | Ray | Flax | tests/alpa (part) | seconds |\n|---|---|---|---|---|---|", flush=True)
    for versions in ENVIRONMENTS:
        if arguments.only in versions.name:
            python = make(versions, arguments.environments)
            start_s = time.monotonic()
            result = run(python, arguments.environments / f"{versions.name}.log")
            failed |= "failed" in result or "error" in result or "passed" not in result
            cells = [*found(python), result.split(" in ")[0], f"{time.monotonic() - start_s:.0f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
