"""Predicted memory of plans against what the runtime's accounting sees when they train: would a plan fit?

    python benchmarks/memory_limits.py -o benchmarks/results/memory_limits.json       (about eight minutes)

Every built-in model is trained for two steps under several plans on devices of this machine. The accounting adds up
the arrays that a worker holds, the results of each program and XLA's scratch for it, and refuses a program that does
not fit; here nothing is limited, so that it sees the whole need. A device limit for which the predicted need is
70 to 130 % of it classifies the plan: by the prediction and by what was seen.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence, Tuple

import numpy as np
from testbed_steps import Case

import hwaware
import hwaware.models
from hwaware.activation import install_runtime
from hwaware.bench.training import TrainingRun
from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct
from hwaware.plans import Plan, Replica, Stage

DEVICES = 4
# Predicted need over the device's limit: within 30 %, both ways.
RATIOS = np.linspace(0.7, 1.3, 61)
PLANS = 6
LIMIT_S = 60.0


CASES: Dict[str, Case] = {
    "mlp": Case(hwaware.models.MlpConfig(blocks=16, hidden=256), 8, 6, 512),
    "gpt": Case(hwaware.models.GptConfig(blocks=6, hidden=128, heads=4, sequence=64), 6, 6, 8),
    "moe": Case(hwaware.models.MoeConfig(), 4, 6, 8),
    "wresnet": Case(hwaware.models.WresnetConfig(blocks=6, width=16, image=32), 6, 6, 8),
}


def cluster(address: str) -> ClusterProfile:
    """Like devices of this machine with memory for everything."""
    curve: Dict[str, Tuple[MatrixProduct, ...]] = {"float32": (MatrixProduct(flops=1e9, seconds=1.0),)}
    devices = tuple(
        Device(id=f"here:{k}", host="here", kind="cpu", memory_bytes=1 << 40, throughput=curve) for k in range(DEVICES)
    )
    link = Link(source="here", target="here", latency_s=1e-4, bandwidth_bytes_per_s=1e9)
    return ClusterProfile(hosts=(Host(name="here", address=address),), devices=devices, links=(link,))


def random_plan(rng: random.Random, case: Case, stages: int) -> Plan:
    """Stages of one device each with random cuts."""
    cuts = [0, *sorted(rng.sample(range(1, case.num_layers), stages - 1)), case.num_layers]
    return Plan(
        num_microbatches=case.num_microbatches,
        stages=tuple(
            Stage(layers=(cuts[k], cuts[k + 1] - 1), replicas=(Replica(devices=(f"here:{k}",)),)) for k in range(stages)
        ),
    )


def rows_of(name: str, profile: ClusterProfile) -> Iterator[Dict[str, Any]]:
    """Predicted and seen memory of each stage of some plans of one model."""
    import ray

    case, rng = CASES[name], random.Random(name)
    model = hwaware.models.make(case.config)
    for number in range(PLANS):
        plan = random_plan(rng, case, 1 + number % min(DEVICES, case.num_layers))
        run = TrainingRun("hwaware", model, profile, *case[1:], plan)
        try:
            run.wait_until_compiled()
            workers = [mesh.workers[0] for mesh in run._mesh.launched_physical_mesh_group.meshes]
            for worker in workers:  # starts the accounting; nothing reaches this limit
                ray.get(worker.set_memory_limit.remote(1 << 40), timeout=LIMIT_S)
            for _ in range(2):  # the second has what the first one left
                run.step()
            seen = [ray.get(worker.peak_bytes.remote(), timeout=LIMIT_S) for worker in workers]
            priced = hwaware.evaluate(plan, run.workload, profile).stages
        finally:
            run.close()
        assert all(seen), "the accounting was off"
        yield {
            "model": name,
            "layers": [stage.layers for stage in plan.stages],
            "predicted_bytes": [stage.memory_bytes for stage in priced],
            "seen_bytes": seen,
        }


def classified(rows: Sequence[Dict[str, Any]]) -> Dict[str, Any]:
    """How many plans are rightly said to fit, or not to, on devices whose limit is near the predicted need."""
    fits: List[Tuple[bool, bool]] = []
    for row in rows:
        predicted, seen = max(row["predicted_bytes"]), max(row["seen_bytes"])
        fits += [(predicted <= predicted / ratio, seen <= predicted / ratio) for ratio in RATIOS.tolist()]
    said, true = np.array(fits).T
    return {
        "cases": len(fits),
        "right": float((said == true).mean()),
        "right_of_those_that_fit": float(said[true].mean()),
        "right_of_those_that_do_not_fit": float((~said[~true]).mean()),
    }


def main() -> int:
    """Train, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--model", action="append", choices=sorted(CASES), help="Only these models.")
    chosen = parser.parse_args()
    os.environ.update(JAX_PLATFORMS="cpu", NPROC="1")
    install_runtime()
    import ray

    folder = tempfile.mkdtemp(prefix="hwm")
    ray.init(num_cpus=DEVICES, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _temp_dir=folder)
    rows: List[Dict[str, Any]] = []
    try:
        profile = cluster(ray.nodes()[0]["NodeManagerAddress"])
        for name in chosen.model or CASES:
            for row in rows_of(name, profile):
                rows.append(row)
                errors = np.array(row["predicted_bytes"]) / np.array(row["seen_bytes"]) - 1
                print(f"{name:8} {row['layers']}: {', '.join(f'{error:+.1%}' for error in errors)}", flush=True)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    command = " ".join(["python benchmarks/memory_limits.py", *(f"--model {name}" for name in chosen.model or ())])
    result = {"rows": rows, "classified": classified(rows), "command": command}
    print(json.dumps(result["classified"]))
    if chosen.output is not None:
        chosen.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
