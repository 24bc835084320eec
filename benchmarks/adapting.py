"""Measure trainings that adapt, on a testbed whose hosts become slower while they train.

    python benchmarks/adapting.py                    (root; writes benchmarks/results/adapting.json)
    python benchmarks/adapting.py --traces midway --steps 150

A small GPT trains on the hosts of slows-midway, under five loads, and without one. Each load is met three times: by a
training that adapts, by one that stays, and by one that knows the load and is placed for it from its first step. Of the
first, all steps count, with the moves between them; the first ten do not, in which programs are compiled. The other
two run fewer steps, and the mean step of each part of the load counts as often as the first training made it. The
clairvoyant takes the better placement in each part of the load, and pays for its switches as the first training did.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

from hwaware.bench import testbed
from hwaware.cli._run import cleaning_up_when_terminated

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "adapting.json"
SCENARIO, WELL, SLOW = "slows-midway", 0.45, 0.2
# First steps that do not count. Loads change from a fifth of a training on, so that many steps leave some to count.
LEFT_OUT, LEAST_STEPS = 10, 55
# Limits of a training [s] far above what was recorded: the first step, which compiles, took up to 21 s, and later ones
# 0.7 s in the mean of a training. A quick profile takes less than 20 s (benchmarks/profiler.py).
START_LIMIT_S, STEP_LIMIT_S = 300.0, 5.0
# Name -> changes of shares: (part of the training after which they come, shares of hosts).
TRACES: Dict[str, List[Tuple[float, Dict[str, float]]]] = {
    "calm": [],
    "midway": [(0.2, {"h1": SLOW})],
    "returns": [(0.2, {"h1": SLOW}), (0.6, {"h1": WELL})],
    "ramp": [(0.2 + 0.05 * part, {"h1": WELL - (WELL - SLOW) * (part + 1) / 4}) for part in range(4)],
    "flapping": [(0.2 + 0.1 * part, {"h1": WELL if part % 2 else SLOW}) for part in range(8)],
    "two hosts": [(0.2, {"h1": SLOW}), (0.5, {"h2": SLOW})],
}
WAYS = ("adapts", "stays", "hindsight")


@cleaning_up_when_terminated()
def main() -> int:
    """Measure on a testbed of its own; print the figures, and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", nargs="+", choices=list(TRACES), default=list(TRACES))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--others", type=int, default=60, help="Steps of the trainings that stay as they are placed.")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    parser.add_argument("--inside", nargs=4, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if min(chosen.steps, chosen.others) < LEAST_STEPS:
        parser.error(f"--steps is {chosen.steps} and --others {chosen.others}, expected at least {LEAST_STEPS} each")
    if chosen.inside:
        address, trace, way, profile = chosen.inside
        print(json.dumps(trained(address, TRACES[trace], way, profile, chosen.steps)), flush=True)
        return 0
    found: Dict[str, Any] = {"scenario": SCENARIO, "traces": {}}
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    for trace in chosen.traces:
        found["traces"][trace] = of_trace(trace, chosen.steps, chosen.others)
        chosen.output.write_text(json.dumps(found, indent=1) + "\n")
        print(summary(trace, found["traces"][trace]), flush=True)
    return 0


def of_trace(trace: str, steps: int, others: int) -> Dict[str, Any]:
    """Return what each way of training took under a load; all of them share one profile."""
    found = {}
    with testbed.running(SCENARIO) as bed:
        profile = Path(bed.driver_environment().get("TMPDIR", "/tmp")) / f"adapting-{os.getpid()}.json"
        for way in WAYS:
            for host in bed.hosts:
                bed.set_share(host, WELL)
            line = [sys.executable, __file__, "--steps", str(steps if way == "adapts" else others)]
            line += ["--inside", bed.address, trace, way, str(profile)]
            environment = {**os.environ, **bed.driver_environment(), "JAX_PLATFORMS": "cpu"}
            limit_s = START_LIMIT_S + STEP_LIMIT_S * (steps if way == "adapts" else others)
            done = subprocess.run(line, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=limit_s)
            found[way] = json.loads(done.stdout.splitlines()[-1])
        profile.unlink()
    return found


def trained(
    address: str, trace: List[Tuple[float, Dict[str, float]]], way: str, profile_path: str, steps: int
) -> Dict[str, Any]:
    """Train on a running testbed, and return all times."""
    bed = testbed.find(address)
    assert bed is not None
    bed.enter()
    import ray

    ray.init(address=address, _node_ip_address=bed.head_address, log_to_driver=False, logging_level="error")
    import hwaware
    import hwaware.models
    from hwaware.bench.profiling import profile as measured_profile

    if not Path(profile_path).exists():
        measured_profile(address, quick=True, say=lambda *_: None).save(profile_path)
    profile = slowed = hwaware.ClusterProfile.load(profile_path)
    if way == "hindsight":
        from hwaware.adapting import Drift
        from hwaware.workload import Workload

        shares = {host: share for _, change in trace for host, share in change.items() if share < WELL}
        ids = {device.id: WELL / shares[device.host] for device in profile.devices if device.host in shares}
        _, slowed = Drift(devices=ids).applied(Workload.uniform(), profile)
    hwaware.enable(slowed, costs="model", adapt=way == "adapts", steps=steps)
    import alpa

    alpa.init(cluster="ray")
    model = hwaware.models.make(hwaware.models.GptConfig(blocks=8, hidden=192, heads=6, sequence=64))
    method = alpa.PipeshardParallel(
        num_micro_batches=8, layer_option=alpa.AutoLayerOption(layer_num=8), stage_option="auto"
    )

    def train_step(state: Any, batch: Any) -> Any:
        return model.train_step(state, batch, value_and_grad=alpa.value_and_grad)

    step = alpa.parallelize(train_step, method=method)
    changes = {int(part * steps): shares for part, shares in trace}
    state, times, losses = model.initial_state(0), [], []
    for number in range(steps):
        for host, share in changes.get(number, {}).items():
            bed.set_share(host, share)
        start_s = time.perf_counter()
        state, loss = step(state, model.batch(number, 8))
        losses.append(float(loss._value))
        times.append(time.perf_counter() - start_s)
    history = hwaware.last_history()
    events = [] if history is None else json.loads(history.to_json()).get("events", [])
    alpa.shutdown()
    return {"step_s": times, "losses": losses, "events": events}


def parts(trace: str, steps: int) -> List[Tuple[int, int]]:
    """Return the first step, and the one after the last, of each part of a load without a change."""
    begins = [LEFT_OUT, *(int(part * steps) for part, _ in TRACES[trace])]
    return list(zip(begins, [*begins[1:], steps]))


def totals_s(trace: str, found: Dict[str, Any]) -> Dict[str, float]:
    """Return the seconds of each way of training, and of the clairvoyant, for as many steps as the first has made."""
    adapts = found["adapts"]
    counts = [end - begin for begin, end in parts(trace, len(adapts["step_s"]))]
    means = {
        way: [
            statistics.fmean(found[way]["step_s"][begin:end]) for begin, end in parts(trace, len(found[way]["step_s"]))
        ]
        for way in WAYS[1:]
    }
    switches_s = [event["took_s"] for event in adapts["events"] if event["kind"] == "moved"]
    # Where the first training never moved, nobody has measured a switch, and the clairvoyant makes none.
    switch_s = statistics.median(switches_s) if switches_s else float("inf")
    best = {"stays": 0.0, "hindsight": 0.0}
    for place, count in enumerate(counts):
        best = {
            way: min(best[way], *(other + switch_s for other in best.values())) + count * means[way][place]
            for way in best
        }
    kept = {way: sum(count * mean for count, mean in zip(counts, means[way])) for way in means}
    return {"adapts": sum(adapts["step_s"][LEFT_OUT:]), **kept, "clairvoyant": min(best.values())}


def at_the_end(trace: str, step_s: List[float]) -> float:
    """Return the median step of the last part of a load, without the first quarter of its steps."""
    begin, end = parts(trace, len(step_s))[-1]
    return statistics.median(step_s[begin + (end - begin) // 4 : end])


def summary(trace: str, found: Dict[str, Any]) -> str:
    """Return the figures of a load as text."""
    adapts, totals = found["adapts"], totals_s(trace, found)
    begin = next((int(part * len(adapts["step_s"])) for part, _ in TRACES[trace]), 0)
    numbers = [event["call"] for event in adapts["events"] if event["kind"] == "noticed" and event["call"] > begin]
    moves = [event["took_s"] for event in adapts["events"] if event["kind"] == "moved"]
    said = ", ".join(f"{took_s:.1f} s" for took_s in moves) or "none"
    shared = min(len(found[way]["losses"]) for way in WAYS)
    same = len({tuple(found[way]["losses"][:shared]) for way in WAYS}) == 1
    after, other = (at_the_end(trace, found[way]["step_s"]) for way in ("adapts", "hindsight"))
    return (
        f"{trace}: {', '.join(f'{way} {total_s:.1f} s' for way, total_s in totals.items())}; adapting takes "
        f"{totals['adapts'] / totals['clairvoyant']:.2f} of the clairvoyant's; last steps {after:.3f} s, "
        f"with hindsight {other:.3f} s; noticed after {numbers[0] - begin if numbers else '-'} steps; moves: {said}; "
        f"losses {'bit-equal' if same else 'differ'}"
    )


if __name__ == "__main__":
    sys.exit(main())
