"""How good and how fast the searches are: Alpa's own search, large clusters, and all solvers on all scenarios.

    python benchmarks/search.py alpa -o benchmarks/results/search_alpa.json        (needs Alpa)
    python benchmarks/search.py tables -o benchmarks/results/search_tables.json    (needs Alpa)
    python benchmarks/search.py proofs -o benchmarks/results/search_proofs.json
    python benchmarks/search.py replicas -o benchmarks/results/search_replicas.json
    python benchmarks/search.py scale -o benchmarks/results/search_scale.json
    python benchmarks/search.py solvers -o benchmarks/results/search_solvers.json  (and .md, .png)

Every instance is made here from a seed. Times are wall times after compilation, of one run in one process.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import search_clusters
import search_solvers

import hwaware
from hwaware.placement import training_dp


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
        row: Dict[str, Any] = {
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


def bench_scale() -> Dict[str, Any]:
    """Gaps on large clusters within a time limit; 5 seeds each, 3 of the largest."""
    warm = search_clusters.large_cluster(0, 128, 48, 32)
    hwaware.plan(*warm, num_microbatches=128, time_limit_s=2.0)
    rows: List[Dict[str, Any]] = []
    for name, seeds, limit_s, devices, layers, samples, directed, target in (
        ("like links", 5, 2.0, 128, 48, 32, False, "alpa"),
        # A limit of less than 10 s, for it ends the search and not the whole call.
        ("like links", 3, 9.5, 512, 96, 64, False, "alpa"),
        ("random directed links", 5, 9.5, 128, 48, 32, True, "alpa"),
        ("unlike replicas allowed", 5, 9.5, 128, 48, 32, False, "any"),
    ):
        for seed in range(seeds):
            workload, profile = search_clusters.large_cluster(seed, devices, layers, samples, directed)
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


def bench_tables() -> Dict[str, Any]:
    """Alpa's optimum on 500 random tables, also with inf and with limits on succeeding stages that bind."""
    from hwaware.patching import stock_jax

    stock_jax.install()
    from alpa.pipeline_parallel.stage_construction import training_dp as own

    rows: Dict[str, Any] = {"tables": 500, "with_inf": 0, "limits_bind": 0, "no_solution": 0, "ours_better": 0}
    worst = 0.0
    for seed in range(rows["tables"]):
        rng = np.random.default_rng(seed)
        layers, devices = int(rng.integers(1, 11)), int(rng.choice([1, 2, 4, 8, 16]))
        shapes = tuple((1, 1 << k) for k in range(4) if 1 << k <= devices) + (((2, 8),) if devices == 16 else ())
        cost = rng.uniform(0.05, 1, (layers, layers, len(shapes), 2)) * (1 + np.arange(layers))[None, :, None, None]
        if seed % 2:
            cost[rng.random(cost.shape) < 0.3] = np.inf
        limits = rng.integers(-1, 5, cost.shape).astype(float) if seed % 4 >= 2 else np.full(cost.shape, 2.0**20)
        arguments = (layers, devices, int(rng.choice([1, 4, 64])), shapes, 2, cost)
        ours, stages = training_dp(*arguments, limits)
        theirs, other = own(*arguments, limits)
        if stages is None or other is None:
            assert stages is other is None, seed
            rows["no_solution"] += 1
            continue
        free, _ = training_dp(*arguments, np.full(cost.shape, 2.0**20))
        rows["with_inf"] += bool(np.isinf(cost).any())
        rows["limits_bind"] += bool(free < ours * (1 - 1e-9))
        rows["ours_better"] += bool(ours < float(theirs) * (1 - 1e-6))
        worst = max(worst, ours / float(theirs) - 1)
    rows["largest_excess_over_alpa"] = worst
    print(json.dumps(rows))
    return {"rows": [rows]}


def bench_proofs(replicas: bool) -> Dict[str, Any]:
    """Compare price and bound with every possible plan, on 1,000 instances without replicas or 200 with them."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
    import instances

    target = "any" if replicas else "alpa"
    row: Dict[str, Any] = {"instances": 200 if replicas else 1000, "target": target, "infeasible": 0, "optimal": 0}
    furthest, exceeded = 0.0, -math.inf
    for seed in range(row["instances"]):
        rng = random.Random(seed)
        one = instances.replicated_stages(rng) if replicas else instances.single_device_stages(rng)
        arranged = instances.arrangements(one, target) if replicas else instances.alone
        best = instances.brute_force(one, arranged)
        found = hwaware.plan(one.workload, one.profile, num_microbatches=one.num_microbatches, target=target)
        row["infeasible"] += found.status == "infeasible"
        row["optimal"] += found.status == "optimal"
        assert (found.status == "infeasible") == math.isinf(best), seed
        if found.objective_s is not None and found.bound_s is not None:
            furthest = max(furthest, abs(found.objective_s / best - 1))
            exceeded = max(exceeded, found.bound_s / best - 1)
    row.update(largest_relative_difference=furthest, largest_excess_of_bound=exceeded)
    print(json.dumps(row))
    return {"rows": [row]}


def main() -> None:
    """Run one part and write its file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("alpa", "tables", "proofs", "replicas", "scale", "solvers"))
    parser.add_argument("-o", "--output", type=Path)
    chosen = parser.parse_args()
    parts: Dict[str, Callable[[], Dict[str, Any]]] = {
        "alpa": bench_alpa, "tables": bench_tables, "proofs": lambda: bench_proofs(False),
        "replicas": lambda: bench_proofs(True), "scale": bench_scale, "solvers": search_solvers.bench_solvers,
    }  # fmt: skip
    result = parts[chosen.part]()
    result["environment"] = {
        "python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine(),
        "command": f"python benchmarks/search.py {chosen.part}", "hwaware": hwaware.__version__,
    }  # fmt: skip
    if chosen.output is not None:
        chosen.output.write_text(json.dumps(result, indent=1) + "\n")
        if chosen.part == "solvers":
            search_solvers.draw(result["rows"], chosen.output.with_suffix(".png"))
            chosen.output.with_suffix(".md").write_text(search_solvers.tables(result))
    else:
        json.dump(result, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
