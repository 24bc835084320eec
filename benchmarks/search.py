"""How good and how fast the searches are: Alpa's own search, large clusters, and all solvers on all scenarios.

    python benchmarks/search.py alpa -o benchmarks/results/search_alpa.json        (needs Alpa)
    python benchmarks/search.py scale -o benchmarks/results/search_scale.json
    python benchmarks/search.py solvers -o benchmarks/results/search_solvers.json  (also writes the .png beside it)

Every instance is made here from a seed. Times are wall times after compilation, of one run in one process.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

import hwaware
from hwaware.bench.testbed.scenarios import Scenario, load_scenario, shipped_names
from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct
from hwaware.placement import training_dp
from hwaware.workload import Layer, Workload

SOLVERS = ("exact", "annealing", "gradient", "alpa", "megatron", "even", "proportional")


def alpa_table(seed: int, layers: int, devices: int, limit: Optional[int]) -> Tuple[Any, ...]:
    """Arguments of `training_dp`: hosts of 8 devices, power-of-two submeshes, 2 configurations, falling efficiency.

    With `limit`, every entry may have 0 to limit - 1 stages behind it, drawn evenly.
    """
    rng = np.random.default_rng(seed)
    shapes = [(1, 1 << k) for k in range(4)] + [(1 << k, 8) for k in range(1, (devices // 8).bit_length())]
    work, size = rng.uniform(0.5, 2, layers), np.array([h * d for h, d in shapes])
    ends = np.concatenate([[0.0], np.cumsum(work)])
    ranges = ends[None, 1:] - ends[:-1, None]
    noise = rng.uniform(0.9, 1.1, (layers, layers, len(shapes), 2))
    cost = ranges[:, :, None, None] * (size**-0.75)[:, None] * noise
    cost = np.where((np.tri(layers, layers, -1) > 0)[:, :, None, None], np.inf, cost)
    limits = np.full(cost.shape, 2.0**20) if limit is None else rng.integers(0, limit, cost.shape).astype(float)
    return layers, devices, 64, tuple(shapes), 2, cost, limits


def bench_alpa() -> Dict[str, Any]:
    """Ours and Alpa's own search in one run."""
    from hwaware.patching import stock_jax

    stock_jax.install()
    from alpa.pipeline_parallel.stage_construction import training_dp as own

    for limit in (None, 8):
        own(*alpa_table(0, 3, 8, limit))
        training_dp(*alpa_table(0, 3, 8, limit))
    rows = []
    for layers, devices, limit, compare in (
        (16, 64, None, True), (16, 64, 8, True), (32, 64, None, False), (32, 64, 8, False), (128, 1024, None, False),
        (128, 1024, 8, False),
    ):  # fmt: skip
        arguments = alpa_table(1, layers, devices, limit)
        times = []
        for _ in range(9 if layers < 128 else 3):
            started = time.perf_counter()
            found = training_dp(*arguments)
            times.append(time.perf_counter() - started)
        row = {
            "layers": layers, "devices": devices, "limit_below": limit, "ours_s": sorted(times)[len(times) // 2],
            "ours_each_s": times, "objective_s": found[0], "stages": len(found[1] or []),
        }  # fmt: skip
        if compare:
            started = time.perf_counter()
            theirs, _ = own(*arguments)
            row["alpa_s"] = time.perf_counter() - started
            row["ratio"] = row["alpa_s"] / row["ours_s"]
            row["alpa_objective_s"] = float(theirs)
        rows.append(row)
        print(json.dumps({key: value for key, value in row.items() if key != "ours_each_s"}), flush=True)
    return {"rows": rows}


def large_cluster(
    seed: int, devices: int, layers: int, samples: int, directed: bool = False, kinds: int = 4, per_host: int = 8
) -> Tuple[Workload, ClusterProfile]:
    """GPT-like layers on hosts of 8 devices, 4 kinds; links alike between two kinds, or random in each direction."""
    rng = random.Random(seed)
    hosts, speeds = devices // per_host, [rng.uniform(0.4, 1.0) for _ in range(kinds)]

    def curve(speed: float) -> Tuple[MatrixProduct, ...]:
        # Small products run at 0.3 to 1 of the full rate.
        return tuple(
            MatrixProduct(flops=f, seconds=f / (1e14 * speed) / (0.3 + 0.7 * min(1.0, (f / 1e12) ** 0.25)))
            for f in (1e9, 1e10, 1e11, 1e12, 1e13)
        )

    boxes = tuple(
        Device(
            id=f"h{h}:{d}", host=f"h{h}", kind=f"k{h % kinds}", memory_bytes=(24 + 8 * (h % kinds)) << 30,
            memory_bandwidth_bytes_per_s=1e12, throughput={"float16": curve(speeds[h % kinds])},
        )
        for h in range(hosts)
        for d in range(per_host)
    )  # fmt: skip
    rates = {(a, b): rng.uniform(1.2e10, 5e10) for a in range(kinds) for b in range(a, kinds)}
    links = [Link(source=f"h{h}", target=f"h{h}", latency_s=5e-6, bandwidth_bytes_per_s=1.5e11) for h in range(hosts)]
    for a in range(hosts):
        for b in range(hosts):
            if a == b or (a > b and not directed):
                continue
            one, other = sorted((a % kinds, b % kinds))
            rate = rng.uniform(5e9, 5e10) if directed else rates[one, other]
            links.append(Link(source=f"h{a}", target=f"h{b}", latency_s=2e-5, bandwidth_bytes_per_s=rate))
    made = []
    for index in range(layers):
        work = rng.uniform(0.8, 1.2)
        made.append(
            Layer(
                name=str(index), forward_flops=work * samples * 1e12, backward_flops=2 * work * samples * 1e12,
                parameter_bytes=work * 4e8, output_bytes=samples * 1024 * 4096 * 2.0, activation_bytes=samples * 1e8,
                tensor_parallel_bytes=samples * 4 * 1024 * 4096 * 2.0, tensor_parallel_collectives=4,
            )
        )  # fmt: skip
    profile = ClusterProfile(hosts=tuple(Host(name=f"h{h}") for h in range(hosts)), devices=boxes, links=tuple(links))
    return Workload(name="large", microbatch_size=samples, dtype="float16", layers=tuple(made)), profile


def bench_scale() -> Dict[str, Any]:
    """Gaps on large clusters within a time limit; 5 seeds each, 3 of the largest."""
    warm = large_cluster(0, 128, 48, 32)
    hwaware.plan(*warm, num_microbatches=128, time_limit_s=2.0)
    rows = []
    for name, seeds, limit_s, devices, layers, samples, directed, target in (
        ("like links", 5, 2.0, 128, 48, 32, False, "alpa"),
        ("like links", 3, 10.0, 512, 96, 64, False, "alpa"),
        ("random directed links", 5, 10.0, 128, 48, 32, True, "alpa"),
        ("unlike replicas allowed", 5, 10.0, 128, 48, 32, False, "any"),
    ):
        for seed in range(seeds):
            workload, profile = large_cluster(seed, devices, layers, samples, directed)
            started = time.perf_counter()
            found = hwaware.plan(workload, profile, num_microbatches=128, time_limit_s=limit_s, target=target)
            seconds = time.perf_counter() - started
            assert found.objective_s is not None
            assert found.bound_s is not None
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            rows.append(
                {
                    "case": name, "seed": seed, "devices": devices, "layers": layers, "num_microbatches": 128,
                    "time_limit_s": limit_s, "wall_s": seconds, "status": found.status, "stages": len(found.stages),
                    "objective_s": found.objective_s, "bound_s": found.bound_s,
                    "gap": found.objective_s / found.bound_s - 1, "peak_memory_bytes": peak,
                }
            )  # fmt: skip
            print(f"{name:24} {devices:4} devices, seed {seed}: gap {100 * rows[-1]['gap']:.2f} % in {seconds:.2f} s")
    return {"rows": rows}


def scenario_profile(scenario: Scenario) -> ClusterProfile:
    """What a perfect profiler would say of a scenario: 50 GFLOP/s a core, the links' own rates, 1 ms latency."""
    boxes, links = [], []
    for host in scenario.hosts():
        for index in range(scenario.devices_of(host)):
            share = scenario.shares[host]
            boxes.append(
                Device(
                    id=f"{host}:{index}", host=host, kind=f"cpu {share:g}", memory_bytes=scenario.memory_bytes(host),
                    throughput={"float32": (MatrixProduct(flops=1e9, seconds=0.02 / share),)},
                )
            )  # fmt: skip
        for other in scenario.hosts():
            inside = scenario.inside_mbit or 20_000.0
            rate = inside if other == host else scenario.rate_mbit(host, other)
            links.append(Link(source=host, target=other, latency_s=1e-3, bandwidth_bytes_per_s=rate * 1e6 / 8))
    hosts = tuple(Host(name=host) for host in scenario.hosts())
    return ClusterProfile(hosts=hosts, devices=tuple(boxes), links=tuple(links))


def scenario_model(layers: int = 24) -> Workload:
    """Layers of uneven work with about 1 MB between them."""
    rng = random.Random(0)
    made = []
    for index in range(layers):
        work = rng.uniform(0.6, 1.6)
        made.append(
            Layer(
                name=str(index), forward_flops=work * 2e8, backward_flops=work * 4e8, parameter_bytes=work * 2e6,
                output_bytes=rng.uniform(0.3, 1.5) * 1e6, activation_bytes=4e6,
            )
        )  # fmt: skip
    return Workload(name="scenario", microbatch_size=4, dtype="float32", layers=tuple(made))


def bench_solvers() -> Dict[str, Any]:
    """Every solver on every shipped scenario, 10 s each: its price over that of exact, and its time."""
    workload, rows = scenario_model(), []
    first = scenario_profile(load_scenario(shipped_names()[0]))
    for solver in SOLVERS:  # compiles, and imports JAX
        hwaware.plan(workload, first, num_microbatches=16, solver=solver, time_limit_s=10.0)
    for name in shipped_names():
        profile = scenario_profile(load_scenario(name))
        best = None
        for solver in SOLVERS:
            started = time.perf_counter()
            found = hwaware.plan(workload, profile, num_microbatches=16, solver=solver, time_limit_s=10.0)
            seconds = time.perf_counter() - started
            if solver == "exact":
                best = found.objective_s
            usable = found.status != "infeasible" and found.objective_s is not None and best is not None
            rows.append(
                {
                    "scenario": name, "solver": solver, "devices": len(profile.devices), "status": found.status,
                    "objective_s": found.objective_s, "bound_s": found.bound_s, "wall_s": seconds,
                    "over_exact": found.objective_s / best - 1 if usable else None,
                }
            )  # fmt: skip
            over = rows[-1]["over_exact"]
            said = found.status if over is None else f"+{100 * over:.2f} %"
            print(f"{name:16} {solver:12} {said:>10} {seconds:6.2f} s", flush=True)
    return {"rows": rows, "winners": _winners(rows)}


def _winners(rows: List[Dict[str, Any]]) -> Dict[str, List[str]]:
    """For each scenario the searches (not the baselines) that reach the best price found, quickest first."""
    winners: Dict[str, List[str]] = {}
    for name in {row["scenario"] for row in rows}:
        searches = [
            r for r in rows if r["scenario"] == name and r["solver"] in SOLVERS[:3] and r["over_exact"] is not None
        ]
        least = min((row["over_exact"] for row in searches), default=None)
        reached = [row for row in searches if least is not None and row["over_exact"] <= least + 1e-9]
        winners[name] = [row["solver"] for row in sorted(reached, key=lambda row: row["wall_s"])]
    return winners


def draw(rows: List[Dict[str, Any]], path: Path) -> None:
    """Quality against time, one point for each solver and scenario."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for solver in SOLVERS:
        points = [row for row in rows if row["solver"] == solver and row["over_exact"] is not None]
        axes.scatter([r["wall_s"] for r in points], [100 * r["over_exact"] for r in points], label=solver, alpha=0.7)
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=1.0)
    axes.set_ylim(bottom=-0.2)
    axes.set_xlabel("search [s]")
    axes.set_ylabel("step time over that of exact [%]")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    """Run one part and write its file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("alpa", "scale", "solvers"))
    parser.add_argument("-o", "--output", type=Path)
    chosen = parser.parse_args()
    result = {"alpa": bench_alpa, "scale": bench_scale, "solvers": bench_solvers}[chosen.part]()
    result["environment"] = {
        "python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine(),
        "command": f"python benchmarks/search.py {chosen.part}", "hwaware": hwaware.__version__,
    }  # fmt: skip
    if chosen.output is not None:
        chosen.output.write_text(json.dumps(result, indent=1) + "\n")
        if chosen.part == "solvers":
            draw(result["rows"], chosen.output.with_suffix(".png"))
    else:
        json.dump(result, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
