"""Compare what programs get by default with a full calibration: python benchmarks/programs.py [TESTBED ...] [-o FILE].

Each of three programs (benchmarks/program.py) starts under HWAWARE_PROFILE alone on each of two testbeds. In each of
three rounds, it starts by default with an empty cache (times its layers, within the limit), and with
HWAWARE_COSTS=measured. If the two mappings differ, they train in turn, one step each, in four starts. Then it starts by
default again (reads the cache), and with HWAWARE_COSTS=model. Needs root; takes an hour.
`--program NAME` measures one program alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, Generator, List, Sequence

import hwaware
from hwaware import ClusterProfile, Plan, autoload
from hwaware.bench import testbed
from hwaware.bench.harness import measure as measure_in_turn
from hwaware.bench.training import TrainingRun
from hwaware.cli._run import cleaning_up_when_terminated
from hwaware.reference_kernel import kernel_reference

PROGRAM = Path(__file__).with_name("program.py")
PROGRAMS = ("language", "vision", "mixer")
SCENARIOS = {
    "five": """
shares = { a = 0.7, b = 0.35, c = 0.3, d = 0.2, e = 0.1 }
default_mbit = 300
mbit = { "a-c" = 1000, "b-e" = 60 }
""",
    "four": """
shares = { p = 0.6, q = 0.6, r = 0.25, s = 0.25 }
default_mbit = 500
mbit = { "q-r" = 100 }
""",
}
# Starts differ more than the steps of one: two mappings' ratio was 1.040 in one start of 60 steps, 0.973 in another.
ROUNDS, STEPS, STARTS_IN_TURN, STEPS_IN_TURN, WARMUP_IN_TURN, LIMIT_S = 3, 12, 4, 30, 3, 600.0
_PREDICTED = re.compile(r"a step likely takes ([\d.e+-]+) s\b.*? with hwaware's mapping")
_ALPAS = re.compile(r"with hwaware's mapping, ([\d.e+-]+) s\b.*? with Alpa's")
_MAPPINGS = re.compile(r"hwaware's: (layers .*?); Alpa's: (layers .*?)\.$")


class Starter:
    """Starts programs on a running testbed."""

    def __init__(self, name: str, bed: Any, folder: Path) -> None:
        self.name, self.folder, self.profile = name, folder, folder / f"{name}.json"
        path = os.pathsep.join(filter(None, (str(folder / "startup"), os.environ.get("PYTHONPATH"))))
        self.environment = {
            **os.environ, **bed.driver_environment(), "RAY_ADDRESS": bed.address, "PYTHONPATH": path,
            "JAX_PLATFORMS": "cpu",
        }  # fmt: skip
        command = [sys.executable, "-m", "hwaware", "profile", "--address", bed.address, "-o", str(self.profile)]
        subprocess.run(command, env=self.environment, check=True, timeout=LIMIT_S)

    def start(self, program: str, label: str, cache: Path, plan: Path, steps: int, costs: str = "") -> Dict[str, Any]:
        """Run a program once, and return its steps, its mapping and its prediction; write the mapping to `plan`."""
        given = {"HWAWARE_PROFILE": str(self.profile), "HWAWARE_CACHE": str(cache)}
        workload = self.folder / "workload.json"
        found, stderr = self._run(
            [str(PROGRAM), program, str(steps), str(plan), str(workload)],
            {**given, **({"HWAWARE_COSTS": costs} if costs else {})},
        )
        if steps:  # what benchmarks/intervals.py prices again
            found["plan"], found["workload"] = (json.loads(path.read_text()) for path in (plan, workload))
        lines = [line for line in stderr.splitlines() if line.startswith("hwaware: ")]
        line = next(line for line in lines if "with hwaware's mapping" in line)
        predicted, alpas, mappings = _PREDICTED.search(line), _ALPAS.search(line), _MAPPINGS.search(line)
        assert predicted is not None
        assert alpas is not None
        assert mappings is not None
        kept = "Alpa's own mapping is kept" in line
        found["predicted_s"] = float((alpas if kept else predicted).group(1))
        found["mapping"] = mappings.group(2 if kept else 1)
        step = f"step {statistics.median(found['step_s']):.3f} s, " if found["step_s"] else ""
        print(
            f"{self.name} {program} {label}: first step after {found['first_s']:.0f} s; {step}"
            f"predicted {found['predicted_s']:.3f} s; {found['mapping']}",
            flush=True,
        )
        return {**found, "log": lines}

    def in_turn(self, program: str, plans: List[Path]) -> List[float]:
        """Return the median ratio of the steps that two mappings take in turn, for each of several starts."""
        command = [__file__, "--in-turn", program, str(self.profile), *map(str, plans)]
        ratios = [self._run(command, {})[0]["ratio"] for _ in range(STARTS_IN_TURN)]
        print(
            f"{self.name} {program} in turn: {statistics.geometric_mean(ratios):.3f} times a step of the full "
            f"calibration ({', '.join(f'{ratio:.3f}' for ratio in ratios)})",
            flush=True,
        )
        return ratios

    def _run(self, command: List[str], given: Dict[str, str]) -> Any:
        run = subprocess.run(
            [sys.executable, *command], env={**self.environment, **given}, capture_output=True, text=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
        if run.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{run.stderr[-4000:]}")
        # Ray may print more after the program's own line.
        return json.loads(next(line for line in reversed(run.stdout.splitlines()) if line.startswith("{"))), run.stderr


def train_in_turn(program: str, profile_path: str, *plans: str) -> None:
    """Train a program by two mappings that take turns, and print the median ratio of their steps as JSON."""
    hwaware.enable(profile_path)  # before Alpa is imported
    import alpa
    import program as programs

    from hwaware.models.model import Model

    module, profile = programs.MODELS[program](), ClusterProfile.load(profile_path)
    model = Model(None, module, module.loss, module.batch)  # type: ignore[arg-type]  # training reads no sizes
    alpa.init(cluster="ray")
    size = (programs.LAYERS, programs.MICROBATCHES, programs.BATCH // programs.MICROBATCHES)
    runs = [TrainingRun(path, model, profile, *size, Plan.load(path)) for path in plans]
    for run in runs:
        run.wait_until_compiled()
    reference = kernel_reference(profile.environment)
    found = measure_in_turn(runs, STEPS_IN_TURN, WARMUP_IN_TURN, reference, dict.fromkeys(plans, 1.0))
    default, full = (mapping.step_s for mapping in found)
    print(json.dumps({"ratio": statistics.median(one / other for one, other in zip(default, full))}))


def measure(name: str, text: str, programs: Sequence[str], folder: Path) -> Generator[Dict[str, Any], None, None]:
    """Run programs on one testbed, and yield a row for each."""
    scenario = folder / f"{name}.toml"
    scenario.write_text(text)
    autoload.switch_on(str(folder / "startup"))
    with testbed.running(str(scenario)) as bed:
        bed.enter()
        starter = Starter(name, bed, folder)
        for program in programs:
            rounds: List[Dict[str, Any]] = []
            for index in range(ROUNDS):
                cache, plans = folder / f"{name}-{program}-{index}", [folder / "default.json", folder / "measured.json"]
                default = starter.start(program, "default", cache, plans[0], STEPS)
                measured = starter.start(program, "measured", cache, plans[1], 0, "measured")
                same = default["mapping"] == measured["mapping"]
                ratios = [] if same else starter.in_turn(program, plans)
                again = starter.start(program, "default again", cache, plans[0], 0 if index else STEPS)
                model = starter.start(program, "model", cache, plans[1], 0, "model")
                rounds.append({
                    "default": default, "measured": measured, "ratios": ratios, "default-again": again, "model": model,
                })  # fmt: skip
            yield {
                "testbed": name, "program": program, "steps_in_turn": STEPS_IN_TURN, "rounds": rounds,
                "profile": json.loads(starter.profile.read_text(), object_hook=without_evidence),
            }  # fmt: skip


def without_evidence(record: Dict[str, Any]) -> Dict[str, Any]:
    """Return an object of a profile without the single measurements behind its figures."""
    return {name: value for name, value in record.items() if name != "evidence"}


def described(row: Dict[str, Any]) -> str:
    """Return a row's ratios in words."""
    rounds = row["rounds"]
    ratios = [f"{statistics.geometric_mean(one['ratios']):.3f}" for one in rounds if one["ratios"]]
    starts = [one["default"] for one in rounds] + [rounds[0]["default-again"]]
    errors = sorted(statistics.median(start["step_s"]) / start["predicted_s"] for start in starts)
    seconds = [one["default-again"]["first_s"] / one["model"]["first_s"] for one in rounds]
    return (
        f"{row['testbed']} {row['program']}: the mapping of a full calibration in {len(rounds) - len(ratios)} of "
        f"{len(rounds)} rounds, in the others steps {', '.join(ratios) or 'none'} times as long; step over "
        f"the prediction, the median start {statistics.median(errors):.3f} "
        f"({errors[0]:.3f} to {errors[-1]:.3f}); second start over costs=model "
        f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
    )


@cleaning_up_when_terminated()
def main() -> None:
    """Measure, print the ratios, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("testbeds", nargs="*", metavar="TESTBED", help=f"of {', '.join(SCENARIOS)}; default: all")
    parser.add_argument("-o", "--output", type=Path, help="rows of other testbeds and programs in it stay")
    parser.add_argument("--program", choices=PROGRAMS, help="measure only this program")
    options = parser.parse_args()
    output, testbeds = options.output, options.testbeds or list(SCENARIOS)
    programs = [options.program] if options.program else PROGRAMS
    if unknown := set(testbeds) - set(SCENARIOS):
        parser.error(f"no testbed is named {', '.join(sorted(unknown))}; some of {', '.join(SCENARIOS)} were expected")
    rows: List[Dict[str, Any]] = []
    if output is not None and output.exists():
        rows = json.loads(output.read_text())["rows"]
        rows = [row for row in rows if row["testbed"] not in testbeds or row["program"] not in programs]
    with tempfile.TemporaryDirectory() as folder:
        for name in testbeds:
            # Closed here: an exception in this loop would leave the testbed up until the interpreter ends.
            with contextlib.closing(measure(name, SCENARIOS[name], programs, Path(folder))) as measured:
                for row in measured:
                    rows.append(row)
                    print(described(row), flush=True)
                    if output is not None:  # a run that is cut short keeps its rows
                        document = {"command": "python benchmarks/programs.py", "rows": rows}
                        output.write_text(json.dumps(document) + "\n")
    print("\n".join(map(described, rows)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--in-turn"]:
        train_in_turn(*sys.argv[2:])
    else:
        main()
