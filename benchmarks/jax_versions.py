"""Compare the training steps of two environments, such as two versions of JAX, on testbeds.

    python benchmarks/jax_versions.py NEW_PYTHON OLD_PYTHON       (root; about 25 minutes)
    python benchmarks/jax_versions.py NEW_PYTHON OLD_PYTHON --starts 1 --repeats 2 --scenario fast-and-slow

Each argument is the interpreter of an environment that `make env` or `make versions` made. In every start, each
environment runs `hwaware bench` in processes of its own, first one and then the other; the next start turns the order
around. Prints, for each scenario and mapping, the ratio of the median steps with its 95 % interval over the starts.
The mapping "even" is the same plan in both environments; "hwaware" is what each environment chose.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import DefaultDict, Dict, List, Tuple

import hwaware
from hwaware.bench.statistics import starts_interval, starts_ratio_interval

ROOT = Path(__file__).resolve().parent.parent
SCENARIOS = ("fast-and-slow", "four-equal")
MAPPINGS = ("even", "hwaware")
LIMIT_S = 1200.0


def measured(python: str, scenario: str, repeats: int) -> Tuple[str, Dict[str, List[float]]]:
    """Return the version of JAX, and the steps [s] of each mapping, of one run of `hwaware bench`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ENABLE_AUTO_CONNECT": "0", "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory(prefix="hwv") as folder:
        options = ["--mappings", ",".join(MAPPINGS), "--repeats", str(repeats), "--output", folder]
        command = [python, "-W", "ignore", "-m", "hwaware", "bench", scenario, "--model", "gpt-small", *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            raise SystemExit(f"{python} ended with {done.returncode} on {scenario}: {done.stderr[-2000:]}")
        (path,) = Path(folder).glob("*.json")
        result = hwaware.BenchmarkResult.load(path)
    return result.environment["versions"]["jax"], {one.name: [*one.step_s] for one in result.mappings}


def main() -> None:
    """Measure both environments in turns; print one row for each scenario and mapping."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs=2, metavar="PYTHON")
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="Only these scenarios.")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10)
    chosen = parser.parse_args()
    print("| scenario | mapping | JAX | step [s] | JAX | step [s] | ratio | 95 % |\n|" + "---|" * 8, flush=True)
    for scenario in chosen.scenario or SCENARIOS:
        versions: Dict[str, str] = {}
        steps: DefaultDict[Tuple[str, str], List[List[float]]] = defaultdict(list)
        for start in range(chosen.starts):
            for python in chosen.pythons if start % 2 == 0 else reversed(chosen.pythons):
                versions[python], of_mapping = measured(python, scenario, chosen.repeats)
                for mapping, seconds in of_mapping.items():
                    steps[python, mapping].append(seconds)
        for mapping in MAPPINGS:
            new, old = (steps[python, mapping] for python in chosen.pythons)
            ratio = starts_ratio_interval(new, old)
            cells = [
                f"{versions[python]} | {starts_interval(one).median:.3f}"
                for python, one in zip(chosen.pythons, (new, old))
            ]
            print(f"| {scenario} | {mapping} | {' | '.join(cells)} | {ratio.median:.3f}", end=" | ")
            print(f"{ratio.low:.3f} to {ratio.high:.3f} |", flush=True)


if __name__ == "__main__":
    main()
