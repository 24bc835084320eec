"""Compare what programs get by default with a full calibration: python benchmarks/programs.py [TESTBED ...] [-o FILE].

Each of three programs (benchmarks/program.py) starts four times on each of two testbeds, under HWAWARE_PROFILE alone:
by default (times its layers, within the limit), with HWAWARE_COSTS=measured, by default again (reads the cache), and
with HWAWARE_COSTS=model. Needs root; takes half an hour, or more on a slow machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List

from hwaware import autoload
from hwaware.bench import testbed

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
# Name of a start -> HWAWARE_COSTS.
STARTS = {"default": "", "measured": "measured", "default-again": "", "model": "model"}
STEPS, LIMIT_S = 12, 600.0
_PREDICTED = re.compile(r"a step likely takes ([\d.e+-]+) s\b.*? with hwaware's mapping")
_ALPAS = re.compile(r"with hwaware's mapping, ([\d.e+-]+) s\b.*? with Alpa's")
_MAPPINGS = re.compile(r"hwaware's: (layers .*?); Alpa's: (layers .*?)\.$")


def started(program: str, environment: Dict[str, str]) -> Dict[str, Any]:
    """Run a program once, and return its steps, its mapping and its prediction."""
    run = subprocess.run(
        [sys.executable, str(PROGRAM), program, str(STEPS)],
        env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    if run.returncode:
        raise SystemExit(f"{program} failed:\n{run.stderr[-4000:]}")
    lines = [line for line in run.stderr.splitlines() if line.startswith("hwaware: ")]
    line = next(line for line in lines if "with hwaware's mapping" in line)
    predicted, alpas, mappings = _PREDICTED.search(line), _ALPAS.search(line), _MAPPINGS.search(line)
    assert predicted is not None
    assert alpas is not None
    assert mappings is not None
    kept = "Alpa's own mapping is kept" in line
    # Ray may print more after the program's own line.
    found = json.loads(next(line for line in reversed(run.stdout.splitlines()) if line.startswith("{")))
    return {
        **found,
        "predicted_s": float((alpas if kept else predicted).group(1)),
        "mapping": mappings.group(2 if kept else 1),
        "median_s": statistics.median(found["step_s"]),
        "log": lines,
    }


def measure(name: str, text: str, folder: Path) -> Iterator[Dict[str, Any]]:
    """Run all programs on one testbed, and yield a row for each."""
    scenario = folder / f"{name}.toml"
    scenario.write_text(text)
    autoload.switch_on(str(folder / "startup"))
    with testbed.running(str(scenario)) as bed:
        bed.enter()
        profile = folder / f"{name}.json"
        path = os.pathsep.join(filter(None, (str(folder / "startup"), os.environ.get("PYTHONPATH"))))
        environment = {
            **os.environ, **bed.driver_environment(), "RAY_ADDRESS": bed.address, "PYTHONPATH": path,
            "HWAWARE_CACHE": str(folder / "cache"), "JAX_PLATFORMS": "cpu",
        }  # fmt: skip
        command = [sys.executable, "-m", "hwaware", "profile", "--address", bed.address, "-o", str(profile)]
        subprocess.run(command, env=environment, check=True, timeout=LIMIT_S)
        for program in PROGRAMS:
            row: Dict[str, Any] = {"testbed": name, "program": program}
            for start, costs in STARTS.items():
                given = {"HWAWARE_PROFILE": str(profile), **({"HWAWARE_COSTS": costs} if costs else {})}
                row[start] = started(program, {**environment, **given})
                one = row[start]
                print(
                    f"{name} {program} {start}: first step after {one['first_s']:.0f} s; step {one['median_s']:.3f} s, "
                    f"predicted {one['predicted_s']:.3f} s; {one['mapping']}",
                    flush=True,
                )
            yield row


def main() -> None:
    """Measure, print the ratios, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("testbeds", nargs="*", metavar="TESTBED", help=f"of {', '.join(SCENARIOS)}; default: all")
    parser.add_argument("-o", "--output", type=Path, help="rows of other testbeds in it stay")
    options = parser.parse_args()
    output, testbeds = options.output, options.testbeds or list(SCENARIOS)
    if unknown := set(testbeds) - set(SCENARIOS):
        parser.error(f"no testbed is named {', '.join(sorted(unknown))}; some of {', '.join(SCENARIOS)} were expected")
    rows: List[Dict[str, Any]] = []
    if output is not None and output.exists():
        rows = [row for row in json.loads(output.read_text()) if row["testbed"] not in testbeds]
    with tempfile.TemporaryDirectory() as folder:
        for name in testbeds:
            for row in measure(name, SCENARIOS[name], Path(folder)):
                rows.append(row)
                if output is not None:  # a run that is cut short keeps its rows
                    output.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        default, again, measured, model = (row[name] for name in ("default", "default-again", "measured", "model"))
        step_s = statistics.fmean((default["median_s"], again["median_s"]))
        print(
            f"{row['testbed']} {row['program']}: step over that of a full calibration "
            f"{step_s / measured['median_s']:.3f}, over the prediction {step_s / default['predicted_s']:.3f}, "
            f"over that of costs=model {step_s / model['median_s']:.3f}; second start over costs=model "
            f"{again['first_s'] / model['first_s']:.2f}"
        )


if __name__ == "__main__":
    main()
