"""Compare the training steps of two environments, such as two versions of JAX, on testbeds.

    python benchmarks/jax_versions.py NEW_PYTHON OLD_PYTHON       (root; a start of a plan took four minutes)
    python benchmarks/jax_versions.py NEW_PYTHON OLD_PYTHON --starts 1 --scenario fast-and-slow

Each argument is the interpreter of an environment that `make env` or `make versions` made. In every start, both
environments train a small GPT at once, each in a process on a testbed of its own, and take turns of a few steps: one
waits while the other trains. Both train by the same plan. Prints, for each scenario and plan, the ratio of the median
steps with its 95 % interval over the starts. The plan "even" has equal layers; "hwaware" is what the first start of
NEW_PYTHON chooses.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

import hwaware
from hwaware.bench import testbed
from hwaware.bench.statistics import starts_interval, starts_ratio_interval
from hwaware.cli._run import cleaning_up_when_terminated

SCENARIOS = ("fast-and-slow", "four-equal")
SOLVERS = {"even": "even", "hwaware": "exact"}
MICROBATCHES, SAMPLES, WARM = 8, 1, 3


class Training:
    """A training in a process of another environment, which makes as many steps as it is asked for."""

    def __init__(self, python: str, scenario: str, plan: Path, name: str) -> None:
        self._process = subprocess.Popen(
            [python, "-W", "ignore", __file__, "--inside", scenario, str(plan), name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "RAY_ENABLE_AUTO_CONNECT": "0", "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        self.version: str = self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line[len("answer ") :])
        raise SystemExit(f"a training ended with {self._process.wait(60)}; its own messages are above")

    def steps(self, count: int) -> List[float]:
        """Make so many steps; return the seconds of each but the first, which follows a pause."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count + 1}\n")
        self._process.stdin.flush()
        return list(self._answer()[1:])

    def close(self) -> None:
        """End the training and its testbed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(120)


def inside(scenario: str, plan: Path, name: str) -> None:
    """Train on a testbed of its own, as standard input asks, by the plan in a file; write the file if it is missing."""
    with testbed.running(scenario, kind="root") as bed:
        os.environ.update(bed.driver_environment())
        bed.enter()
        import ray

        ray.init(address=bed.address, _node_ip_address=bed.head_address, log_to_driver=False, logging_level="error")
        from hwaware import models, profiler

        profile = profiler.profile(bed.address, quick=True)
        given: Dict[str, Any] = {"plan": str(plan)} if plan.exists() else {"solver": SOLVERS[name]}
        hwaware.enable(profile, costs="model", **given)
        import alpa
        import jax

        from hwaware.patching import stage_option

        alpa.init(cluster="ray")
        model = models.make(models.GptConfig(blocks=8, hidden=384, heads=6, sequence=64))
        layers = alpa.AutoLayerOption(layer_num=8)
        method = alpa.PipeshardParallel(num_micro_batches=MICROBATCHES, layer_option=layers, stage_option="auto")

        def train_step(state: Any, batch: Any) -> Any:
            return model.train_step(state, batch, value_and_grad=alpa.value_and_grad)

        step = alpa.parallelize(train_step, method=method)
        batch, state = model.batch(0, MICROBATCHES * SAMPLES), model.initial_state(0)

        def trained(count: int) -> List[float]:
            nonlocal state
            times = []
            for _ in range(count):
                start_s = time.perf_counter()
                state, loss = step(state, batch)
                float(loss._value)
                times.append(time.perf_counter() - start_s)
            return times

        trained(WARM)
        used = stage_option.last_plan()
        if used is not None and not plan.exists():
            used.save(plan)
        print("answer", json.dumps(jax.__version__), flush=True)
        for line in sys.stdin:
            print("answer", json.dumps(trained(int(line))), flush=True)
        alpa.shutdown()
        ray.shutdown()


def start(pythons: List[str], scenario: str, plan: Path, name: str, turns: int, steps: int) -> Tuple[List[str], Any]:
    """Return the versions of JAX, and the steps [s] of each environment, of one start."""
    trainings: List[Training] = []
    try:
        for python in pythons:
            trainings.append(Training(python, scenario, plan, name))
        found: List[List[float]] = [[] for _ in trainings]
        for turn in range(turns):
            for index in (0, 1) if turn % 2 == 0 else (1, 0):
                found[index] += trainings[index].steps(steps)
    finally:
        for training in trainings:
            training.close()
    return [training.version for training in trainings], found


@cleaning_up_when_terminated()
def main() -> None:
    """Measure both environments in turns; print one row for each scenario and plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON")
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="Only these scenarios.")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--turns", type=int, default=10, help="Turns of each environment in a start.")
    parser.add_argument("--steps", type=int, default=2, help="Steps of a turn.")
    parser.add_argument("--inside", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inside:
        scenario, plan, name = chosen.inside
        return inside(scenario, Path(plan), name)
    if len(chosen.pythons) != 2:
        parser.error(f"found {len(chosen.pythons)} interpreters, expected two")
    print("| scenario | plan | JAX | step [s] | JAX | step [s] | ratio | 95 % |\n|" + "---|" * 8, flush=True)
    with tempfile.TemporaryDirectory(prefix="hwv") as folder:
        for scenario in chosen.scenario or SCENARIOS:
            for name in SOLVERS:
                plan = Path(folder) / f"{scenario}-{name}.json"
                of_starts: Dict[int, List[List[float]]] = {0: [], 1: []}
                for _ in range(chosen.starts):
                    versions, found = start(chosen.pythons, scenario, plan, name, chosen.turns, chosen.steps)
                    for index, seconds in enumerate(found):
                        of_starts[index].append(seconds)
                ratio = starts_ratio_interval(of_starts[0], of_starts[1])
                cells = [f"{versions[one]} | {starts_interval(of_starts[one]).median:.3f}" for one in (0, 1)]
                print(f"| {scenario} | {name} | {' | '.join(cells)} | {ratio.median:.3f}", end=" | ")
                print(f"{ratio.low:.3f} to {ratio.high:.3f} |", flush=True)
    return None


if __name__ == "__main__":
    main()
