#!/usr/bin/env python
"""How many plans a second `evaluate` prices, one at a time, and how long 250,000 simulated events take.

    python benchmarks/speed.py [-o benchmarks/results/speed.json]

Plans of 16 stages on a cluster of 32 unlike devices, 64 layers, with prepared costs (what a solver has). The best of
several rounds counts: other work on the machine only slows.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from pathlib import Path
from typing import Callable, List

import hwaware
from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct
from hwaware.costs import PreparedCosts, evaluate
from hwaware.plans import Plan, Replica, Stage
from hwaware.workload import Layer, Workload

RESULTS = Path(__file__).resolve().parent / "results" / "speed.json"
DEVICES, LAYERS, STAGES, PLANS, ROUNDS = 32, 64, 16, 2000, 7
EVENTS = 250_000  # the simulator runs at most 300,000


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    output: Path = parser.parse_args().output
    rng = random.Random(0)
    profile, workload = cluster(rng), model()
    costs = PreparedCosts(workload, profile)
    plans = [random_plan(rng, 32) for _ in range(PLANS)]
    evaluated_s = quickest_s(lambda: [evaluate(plan, workload, profile, costs) for plan in plans])
    # A microbatch has a forward and a backward pass on each stage and as many messages between them.
    long = random_plan(rng, -(-EVENTS // (4 * STAGES - 2)))
    events = len(hwaware.simulate(long, workload, profile, costs=costs).events)
    simulated_s = quickest_s(lambda: hwaware.simulate(long, workload, profile, costs=costs), 3)
    result = {
        "command": "python benchmarks/speed.py",
        "python": platform.python_version(),
        "evaluated_plans_per_s": PLANS / evaluated_s,
        "simulated_events": events,
        "simulated_s": simulated_s,
    }
    print(json.dumps(result, indent=1))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def quickest_s(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The least wall time of several rounds [s]."""
    times: List[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def cluster(rng: random.Random) -> ClusterProfile:
    """Hosts of one device each, of four kinds, with unlike directed links."""
    names = [f"h{index}" for index in range(DEVICES)]
    devices = tuple(
        Device(
            id=f"{name}:0", host=name, kind=f"kind {index % 4}", memory_bytes=1 << 34,
            throughput={"float32": (MatrixProduct(flops=1e9, seconds=0.01 * (1 + index % 4)),)},
            memory_bandwidth_bytes_per_s=1e11,
        )
        for index, name in enumerate(names)
    )  # fmt: skip
    links = tuple(
        Link(source=a, target=b, latency_s=1e-5, bandwidth_bytes_per_s=rng.uniform(1e8, 1e10))
        for a in names
        for b in names
        if a != b
    )
    return ClusterProfile(hosts=tuple(Host(name=name) for name in names), devices=devices, links=links)


def model() -> Workload:
    """Layers that are alike."""
    layers = tuple(
        Layer(
            name=str(index), forward_flops=1e9, backward_flops=2e9, parameter_bytes=1e6, output_bytes=1e6,
            activation_bytes=1e7,
        )
        for index in range(LAYERS)
    )  # fmt: skip
    return Workload(name="alike", microbatch_size=4, dtype="float32", layers=layers)


def random_plan(rng: random.Random, num_microbatches: int) -> Plan:
    """Random cuts on random devices."""
    ends = [*sorted(rng.sample(range(1, LAYERS), STAGES - 1)), LAYERS]
    starts = [0, *ends[:-1]]
    chosen = rng.sample(range(DEVICES), STAGES)
    stages = tuple(
        Stage(layers=(start, end - 1), replicas=(Replica(devices=(f"h{index}:0",)),))
        for start, end, index in zip(starts, ends, chosen)
    )
    return Plan(num_microbatches=num_microbatches, stages=stages)


if __name__ == "__main__":
    sys.exit(main())
