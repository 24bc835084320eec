#!/usr/bin/env python
"""What predictions would be if passes varied: python benchmarks/variation.py -o benchmarks/results/variation.json

`evaluate` prices every pass at its mean. Here each pass of 1F1B varies by itself, normally, by the deviation that was
measured with the model's layers (`deviation_s`), and the mean of many such steps is set against the recorded ones.
Nothing is fitted. Reads benchmarks/results; takes a minute.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np
import numpy.typing as npt
from predictions import BENCH, ENUMERATED, SECOND, priced_anew

from hwaware.costs import PreparedCosts
from hwaware.costs.evaluate import prepared_for, price_stages
from hwaware.costs.speed import prediction_at_speed_s
from hwaware.costs.stages import check_plan
from hwaware.plans import Plan
from hwaware.result import BenchmarkResult, Mapping

FloatArray = npt.NDArray[np.float64]
# How much of the measured deviation passes have.
PARTS = (0.0, 0.5, 1.0)
_STEPS = 200


class Chain(NamedTuple):
    """Stages of a plan for 1F1B: means, deviations, messages on their way, and by how much waiting shortens passes."""

    num_microbatches: int
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    deviation_s: Sequence[float]
    there_s: Sequence[float]
    back_s: Sequence[float]
    gained_forward_s: Sequence[float]
    gained_backward_s: Sequence[float]


def chain(plan: Plan, costs: PreparedCosts) -> Chain:
    """A plan with its prices."""
    located, count = check_plan(plan, costs), plan.num_microbatches
    prices, on_the_way = price_stages(located, count, costs), price_stages(located, count, costs.without_head_starts)
    gained = [
        [way - exposed for way, exposed in zip(one, other)]
        for one, other in ((on_the_way.there_s, prices.there_s), (on_the_way.back_s, prices.back_s))
    ]
    deviations = []
    for stage in plan.stages:
        kind = costs.devices[stage.devices[0]].kind
        layers = costs.workload.layers[stage.layers[0] : stage.layers[1] + 1]
        times = [(layer.measured or {}).get(kind, {}) for layer in layers]
        found = [time.get(f"{len(stage.replicas)},1") or time.get("1,1") for time in times]
        deviations.append(math.sqrt(sum((one.deviation_s or 0.0) ** 2 for one in found if one is not None)))
    return Chain(
        count, prices.forward_s, prices.backward_s, deviations, on_the_way.there_s, on_the_way.back_s,
        [0.0, *gained[0]], [*gained[1], 0.0],
    )  # fmt: skip


def order(stage: int, stages: int, count: int) -> Iterator[Tuple[bool, int]]:
    """1F1B: (whether forward, microbatch) of each pass of a stage."""
    ahead = min(stages - stage - 1, count)
    yield from ((True, k) for k in range(ahead))
    for k in range(count):
        if ahead + k < count:
            yield True, ahead + k
        yield False, k


def pipeline_s(given: Chain, part: float, steps: int = _STEPS, seed: int = 0) -> float:
    """The mean time from the first pass to the first stage's last one, over steps whose passes vary by that part."""
    rng, stages = np.random.default_rng(seed), len(given.forward_s)
    waiting = [list(order(stage, stages, given.num_microbatches))[::-1] for stage in range(stages)]
    ends = [np.zeros(steps) for _ in range(stages)]  # of each stage's last pass
    # By (forward, stage, microbatch): when what a pass is for has arrived.
    arrived: Dict[Tuple[bool, int, int], FloatArray] = {(True, 0, k): np.zeros(steps) for k in range(len(waiting[0]))}
    sent: Dict[Tuple[bool, int], FloatArray] = {}
    while any(waiting):
        for stage, passes in enumerate(waiting):
            while passes:
                forward, k = passes[-1]
                last = stage == stages - 1
                came = ends[stage] if last and not forward else arrived.get((forward, stage, k))
                if came is None:
                    break
                passes.pop()
                mean = (given.forward_s if forward else given.backward_s)[stage]
                gained = (given.gained_forward_s if forward else given.gained_backward_s)[stage]
                takes = np.maximum(0.0, mean + part * given.deviation_s[stage] * rng.standard_normal(steps))
                ends[stage] = np.maximum(ends[stage] + takes, came + np.maximum(0.0, takes - gained))
                to = stage + 1 if forward else stage - 1
                if 0 <= to < stages:
                    way = given.there_s[stage] if forward else given.back_s[to]
                    sent[forward, stage] = np.maximum(ends[stage], sent.get((forward, stage), 0.0)) + way
                    arrived[forward, to, k] = sent[forward, stage]
    return float(ends[0].mean())


def errors(result: BenchmarkResult, mappings: Sequence[Mapping], part: float) -> List[float]:
    """The relative error of each mapping's prediction, with what variation adds to it."""
    found = []
    for mapping in mappings:
        groups = [
            replica.devices for stage in mapping.plan.stages for replica in stage.replicas if len(replica.devices) > 1
        ]
        if result.workload is None or result.profile is None or groups:
            continue
        one = chain(mapping.plan, prepared_for(mapping.plan, result.workload, result.profile))
        added = pipeline_s(one, part) - pipeline_s(one, 0.0, steps=1)
        predicted = prediction_at_speed_s(priced_anew(mapping, result), result) + added
        found.append(predicted / mapping.typical(mapping.predictable_s) - 1)
    return found


def main() -> None:
    """Print a line for each set of results and part of the deviations, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    output = parser.parse_args().output
    sets = {
        "gpt-small": (BENCH, "*gpt*.json"), "mlp": (BENCH, "*mlp*.json"), "make bench": (SECOND, "*.json"),
        "every mapping of three hosts": (ENUMERATED, "*.json"),
        "the fastest of them in three starts": (ENUMERATED / "starts", "*.json"),
    }  # fmt: skip
    rows: List[Dict[str, Any]] = []
    for name, (folder, files) in sets.items():
        results = [BenchmarkResult.load(path) for path in sorted(folder.glob(files))]
        for part in PARTS:
            off = np.array([e for one in results for e in errors(one, one.enumerated or one.mappings, part)])
            figures = {"median": np.median(abs(off)), "largest": abs(off).max(), "bias": off.mean()}
            rows.append({"set": name, "part": part, "n": len(off), **{key: float(x) for key, x in figures.items()}})
            print(name, f"part {part:g}, n {len(off)}:", *(f"{key} {100 * x:.1f} %" for key, x in figures.items()))
    if output is not None:
        output.write_text(json.dumps({"command": " ".join(["python", *sys.argv]), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
