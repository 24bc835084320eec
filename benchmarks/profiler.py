"""How well the profiler knows a testbed whose shares and rates are set: python benchmarks/profiler.py [-o FILE]

Starts the testbed of benchmarks/profiler-ladder.toml (root on Linux), profiles it twice with --quick and
twice in full through the command line, and compares: shares by the throughput ratios of the larger products, rates by
the bandwidth of every directed link, repeats with each other, and the wall time, start-up included. What a share lets
through is also measured without the profiler, before and after: the difference from that is the profiler's own, the
rest is the testbed's. Writes everything it saw; nothing is left out or run again until it looks better.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

from hwaware.bench import testbed
from hwaware.bench.testbed import Testbed
from hwaware.bench.testbed.scenarios import Scenario
from hwaware.cli._run import cleaning_up_when_terminated
from hwaware.cluster import ClusterProfile

HERE = Path(__file__).parent
SCENARIO = HERE / "profiler-ladder.toml"
# Products from 2 x 256^3 FLOPs on: the launch no longer counts.
LARGE_FLOPS = 2 * 256**3
LIMITS = {"share": 0.05, "rate": 0.08, "repeat": 0.05, "quick_s": 20.0, "full_s": 90.0}


def run(bed: Testbed, path: Path, options: List[str], prefix: List[str]) -> Tuple[ClusterProfile, float]:
    """One profile, and its wall time with start-up."""
    line = [*prefix, sys.executable, "-m", "hwaware", "profile", "--address", bed.address, "-o", str(path), *options]
    stamp = f"{path}.time"
    timed = [*prefix, sys.executable, "-c", TIMED, stamp, *line[len(prefix) :]]
    subprocess.run(timed, check=True, timeout=900, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return ClusterProfile.load(path), float(Path(stamp).read_text())


# Runs the rest of its line and writes how long that took: waiting for a lock in the prefix does not count.
TIMED = (
    "import subprocess, sys, time; start = time.monotonic(); "
    "code = subprocess.call(sys.argv[2:]); open(sys.argv[1], 'w').write(str(time.monotonic() - start)); sys.exit(code)"
)


def speeds(profile: ClusterProfile) -> Dict[str, float]:
    """Each device's rate over the first one's: the median over the larger sizes that both were measured at."""
    curves = {
        device.id: {p.flops: p.flops / p.seconds for p in device.throughput["float32"] if p.flops >= LARGE_FLOPS}
        for device in profile.devices
    }
    first = curves[profile.devices[0].id]
    return {
        name: statistics.median(rate / first[flops] for flops, rate in curve.items() if flops in first)
        for name, curve in curves.items()
    }


def rates(profile: ClusterProfile) -> Dict[str, float]:
    """Bandwidth of each directed link in Mbit/s."""
    return {f"{link.source}->{link.target}": link.bandwidth_bytes_per_s * 8e-6 for link in profile.links}


def true_ratios(bed: Testbed) -> Dict[str, float]:
    """Each device's measured speed over the first one's, by device id."""
    sys.path.insert(0, str(HERE.parent / "tests" / "support"))
    from share_speed import speed_under_share  # the testbed's tests use it too

    found = {f"{host}:0": speed_under_share(bed, host) for host in bed.scenario.shares}
    first: float = next(iter(found.values()))
    return {name: speed / first for name, speed in found.items()}


def report(profile: ClusterProfile, wall_s: float, scenario: Scenario, truth: Dict[str, float]) -> Dict[str, Any]:
    """What one profile says against what was set."""
    shares = scenario.shares
    first = next(iter(shares.values()))
    found_speeds, found_rates = speeds(profile), rates(profile)
    set_rates = {f"{a}->{b}": scenario.rate_mbit(a, b) for a in shares for b in shares if a != b}
    environment = profile.environment or {}
    references = environment["reference_samples_s"]
    return {
        "wall_s": round(wall_s, 2),
        "share_ratio": {
            name: {
                "set": shares[name.partition(":")[0]] / first,
                "seen": round(ratio, 4),
                "error": round(ratio / (shares[name.partition(":")[0]] / first) - 1, 4),
                "measured": round(truth[name], 4),
                "error_from_measured": round(ratio / truth[name] - 1, 4),
            }
            for name, ratio in found_speeds.items()
        },
        "rate_mbit": {
            link: {
                "set": set_rates[link],
                "seen": round(found_rates[link], 2),
                "error": round(found_rates[link] / set_rates[link] - 1, 4),
            }
            for link in sorted(set_rates)
        },
        "reference_slowest_over_quietest": round(max(references) / min(references), 3),
        "other_work": {when: environment["hosts"]["h0"].get(f"busy_{when}") for when in ("before", "after")},
        "phases_s": environment["phases_s"],
        "flags": [f"{flag.kind} {'->'.join(flag.subjects)}" for flag in profile.flags],
    }


def agreement(one: ClusterProfile, other: ClusterProfile) -> Dict[str, float]:
    """By how much two profiles of the same cluster differ, at worst."""
    speed, again = speeds(one), speeds(other)
    rate, rate_again = rates(one), rates(other)
    return {
        "share_ratio": round(max(abs(again[name] / speed[name] - 1) for name in speed), 4),
        "rate": round(max(abs(rate_again[link] / rate[link] - 1) for link in rate), 4),
    }


def directed(scenario: Scenario, runs: List[Dict[str, Any]]) -> Dict[str, Any]:
    """The pairs whose directions were set to differ by 20 % and more, and the ratios that were seen."""
    hosts = list(scenario.shares)
    found = {}
    for number, a in enumerate(hosts):
        for b in hosts[number + 1 :]:
            ratio = scenario.rate_mbit(a, b) / scenario.rate_mbit(b, a)
            if abs(ratio - 1) >= 0.199:
                seen = [one["rate_mbit"][f"{a}->{b}"]["seen"] / one["rate_mbit"][f"{b}->{a}"]["seen"] for one in runs]
                found[f"{a}<->{b}"] = {"set": round(ratio, 3), "seen": [round(value, 3) for value in seen]}
    return found


def worst(runs: List[Dict[str, Any]], key: str, error: str = "error") -> float:
    """The largest error of all runs."""
    largest: float = max(abs(entry[error]) for one in runs for entry in one[key].values())
    return largest


@cleaning_up_when_terminated()
def main() -> int:
    """Measure, compare, write; exit code 1 where a limit is not kept."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", default=str(HERE / "results" / "profiler.json"))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--prefix", default="", help="command that runs each profile, such as a lock")
    arguments = parser.parse_args()
    prefix = shlex.split(arguments.prefix)
    found: Dict[str, List[Tuple[ClusterProfile, float]]] = {"quick": [], "full": []}
    with tempfile.TemporaryDirectory() as folder, testbed.running(str(SCENARIO)) as bed:
        scenario = bed.scenario
        before = true_ratios(bed)
        for number in range(arguments.repeats):
            for mode in found:
                options = ["--quick"] if mode == "quick" else []
                found[mode].append(run(bed, Path(folder) / f"{mode}-{number}.json", options, prefix))
        after = true_ratios(bed)
    truth = {name: (ratio + after[name]) / 2 for name, ratio in before.items()}
    runs = {
        mode: [report(profile, wall_s, scenario, truth) for profile, wall_s in both] for mode, both in found.items()
    }
    everything = [one for both in runs.values() for one in both]
    seen: Dict[str, Any] = {
        "worst_share_error": {mode: worst(runs[mode], "share_ratio") for mode in runs},
        "worst_share_error_from_measured": {
            mode: worst(runs[mode], "share_ratio", "error_from_measured") for mode in runs
        },
        "worst_rate_error": {mode: worst(runs[mode], "rate_mbit") for mode in runs},
        "repeats_differ": {mode: agreement(found[mode][0][0], found[mode][-1][0]) for mode in runs},
        "slowest_wall_s": {mode: max(one["wall_s"] for one in runs[mode]) for mode in runs},
        "directed": directed(scenario, everything),
    }
    environment = found["full"][0][0].environment or {}
    document = {
        "environment": {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "processors": os.cpu_count(),
            "versions": environment["versions"],
            "load_average": os.getloadavg(),
        },
        "limits": LIMITS,
        "seen": seen,
        "runs": runs,
    }
    Path(arguments.output).write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(seen, indent=1))
    kept = [
        max(seen["worst_share_error"].values()) <= LIMITS["share"],
        max(seen["worst_rate_error"].values()) <= LIMITS["rate"],
        max(value for one in seen["repeats_differ"].values() for value in one.values()) <= LIMITS["repeat"],
        seen["slowest_wall_s"]["quick"] <= LIMITS["quick_s"],
        seen["slowest_wall_s"]["full"] <= LIMITS["full_s"],
    ]
    print(dict(zip(("shares", "rates", "repeats", "quick", "full"), kept)))
    return int(not all(kept))


if __name__ == "__main__":
    sys.exit(main())
