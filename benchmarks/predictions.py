#!/usr/bin/env python
"""How well the cost model predicts measurements that it was not fitted to: one table, written beside this file.

    python benchmarks/predictions.py [--output benchmarks/results/predictions]

Reads profiling/recorded; fit and test points are disjoint in every row. Takes about a minute on one core.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Sequence, Tuple

import msgspec
import numpy as np
from recorded_curves import read_collectives

from hwaware.bench.statistics import rank_correlation
from hwaware.costs import evaluate, fit_collectives, fit_iterations
from hwaware.costs.curves import log_log_interpolate
from hwaware.costs.iterations import read_iterations
from hwaware.costs.patterns import checked_groups, shapes
from hwaware.costs.pipeline import one_f_one_b_s
from hwaware.costs.speed import prediction_at_speed_s
from hwaware.reference_kernel import LAYERS, NAME
from hwaware.result import BenchmarkResult, Mapping
from hwaware.simulator.engine import run_overlapped
from hwaware.simulator.messages import Channel

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "profiling" / "recorded"
STEPS = ROOT / "benchmarks" / "results" / "testbed_steps.jsonl"
BENCH = ROOT / "benchmarks" / "results" / "bench"
SECOND = ROOT / "benchmarks" / "results" / "make-bench"
ENUMERATED = ROOT / "benchmarks" / "results" / "best-measured"
# As in hwaware.bench.midway, whose imports need Ray: measured before its cluster changed, and the result has the
# profile of after that.
BEFORE = "hwaware-before"
SMALLEST_BYTES = 4096
# Points of a curve that a structural row tests at most, and is given of every other curve; evenly picked.
THINNED = 40

Curve = Dict[str, Any]
Pairs = Tuple[np.ndarray, np.ndarray]  # predicted, measured


class Row(NamedTuple):
    """One line of the table; errors are relative to the measurement."""

    data_set: str
    n: int
    mape: float
    median: float
    p90: float
    largest: float
    bias: float
    rank_correlation: float
    bound: str


def row(name: str, pairs: Iterable[Pairs], bound: str = "") -> Row:
    """The figures of one set of predictions."""
    collected = list(pairs)
    predicted = np.concatenate([p for p, _ in collected])
    measured = np.concatenate([m for _, m in collected])
    errors = predicted / measured - 1
    size = np.abs(errors)
    correlation = rank_correlation(predicted.tolist(), measured.tolist())
    assert correlation is not None, name  # every row has several different values
    return Row(
        name, len(errors), float(size.mean()), float(np.median(size)), float(np.quantile(size, 0.9)),
        float(size.max()), float(errors.mean()), correlation, bound,
    )  # fmt: skip


def picked(curve: Curve, count: int) -> List[int]:
    """Indices of about `count` points, even in log size from 4 KiB; the first and last that there are among them."""
    sizes = np.array([size for size, _ in curve["points"]], dtype=float)
    usable = np.where(sizes >= SMALLEST_BYTES)[0]
    wanted = np.geomspace(sizes[usable[0]], sizes[usable[-1]], count)
    return sorted({int(usable[np.argmin(np.abs(np.log(sizes[usable] / size)))]) for size in wanted})


def reduced(curve: Curve, count: int) -> Curve:
    """The curve with those points alone."""
    return {**curve, "points": [curve["points"][index] for index in picked(curve, count)]}


def pairs_of(model: Any, curve: Curve, hidden_from: Sequence[Sequence[float]] = ()) -> Pairs:
    """Predicted and measured seconds of a curve from 4 KiB up, without the points that the model was given."""
    given = {size for size, _ in hidden_from}
    points = [point for point in curve["points"] if point[0] >= SMALLEST_BYTES and point[0] not in given]
    points = points[:: max(1, len(points) // THINNED)] if not given else points
    question = {name: curve[name] for name in ("op", "dtype", "devices_per_host", "replica_groups")}
    predicted = np.array([model.predict_s(nbytes=size, **question) for size, _ in points])
    return predicted, np.array([seconds for _, seconds in points])


def interpolation_rows() -> List[Row]:
    """Every curve from 12 and from 4 of its own sizes, beside plain log-log interpolation."""
    rows = []
    for file, bound in (("nccl_transfers", "1.0 %"), ("v100_collectives", "2.9 %")):
        curves = [curve for kind in read_collectives(RECORDED / f"{file}.json").values() for curve in kind]
        for count in (12, 4):
            ours, plain = [], []
            for curve in curves:
                few = reduced(curve, count)
                ours.append(pairs_of(fit_collectives([few]), curve, few["points"]))
                plain.append(plain_pairs(few, curve))
            rows.append(row(f"{file}, {count} sizes a curve, the rest", ours, bound if count == 12 else ""))
            rows.append(row(f"  (plain log-log, {count} sizes)", plain))
    return rows


def plain_pairs(few: Curve, curve: Curve) -> Pairs:
    """The same by log-log interpolation alone."""
    given = np.array(few["points"], dtype=float)
    rest = [point for point in curve["points"] if point[0] >= SMALLEST_BYTES and point[0] not in set(given[:, 0])]
    at = np.array([size for size, _ in rest], dtype=float)
    return log_log_interpolate(at, given[:, 0], given[:, 1]), np.array([seconds for _, seconds in rest])


def crosses(curve: Curve) -> bool:
    """Whether the groups of a curve cross hosts."""
    groups = curve["replica_groups"]
    if groups is None:
        return False
    per_host = curve["devices_per_host"]
    return shapes(checked_groups(groups, per_host), per_host)[0].crossing > 0


def same_groups(a: Curve, b: Curve) -> bool:
    """Whether two curves are of the same groups on the same hosts."""
    return all(a[name] == b[name] for name in ("replica_groups", "devices_per_host", "hosts"))


def structure_rows() -> List[Row]:
    """Groups that cross hosts at once, from other operations on them and from other groups."""
    rows = []
    for file in ("v100_collectives", "nccl_transfers"):
        by_operation: List[Pairs] = []
        by_groups: Dict[str, List[Pairs]] = {"all-gather, reduce-scatter": [], "all-reduce": [], "all-to-all": []}
        for curves in read_collectives(RECORDED / f"{file}.json").values():
            thin = [reduced(curve, 20) for curve in curves]
            for curve in curves:
                if not crosses(curve) or len(curve["replica_groups"]) < 2:
                    continue
                others = [t for t in thin if same_groups(curve, t) and t["op"] != curve["op"]]
                by_operation.append(pairs_of(fit_collectives(others), curve))
                elsewhere = [t for t in thin if not same_groups(curve, t)]
                family = next(family for family in by_groups if curve["op"] in family)
                by_groups[family].append(pairs_of(fit_collectives(elsewhere), curve))
        rows.append(row(f"{file}, cross-host groups at once from other operations", by_operation, "15 %"))
        for family, pairs in by_groups.items():
            bound = "20 %" if "gather" in family else ""
            rows.append(row(f"{file}, {family} from other groups", pairs, bound))
    return rows


def host_and_size_rows() -> List[Row]:
    """Two hosts from one and a few sizes; eight devices from two and four."""
    curves = read_collectives(RECORDED / "v100_collectives.json")["V100"]
    few = [curve if curve["hosts"] == 1 else reduced(curve, 4) for curve in curves]
    model = fit_collectives(few)
    pairs = [
        pairs_of(model, curve, given["points"])
        for curve, given in zip(curves, few)
        if curve["hosts"] == 2 and len(curve["replica_groups"][0]) > 1
    ]
    crossing = [
        pairs_of(model, curve, given["points"])
        for curve, given in zip(curves, few)
        if curve["hosts"] == 2 and crosses(curve)
    ]
    rows = [
        row("v100_collectives, (2, 8) from one host and 4 sizes a curve", pairs, "20 %"),
        row("  of these, groups across hosts", crossing),
    ]
    curves = read_collectives(RECORDED / "nccl_transfers.json")["V100"]
    sizes = [max(len(group) for group in curve["replica_groups"] or [[]]) for curve in curves]
    model = fit_collectives([curve for curve, size in zip(curves, sizes) if size in (2, 4)])
    eight = [pairs_of(model, curve) for curve, size in zip(curves, sizes) if size == 8]
    return [*rows, row("nccl_transfers, V100 groups of 8 from 2 and 4", eight, "15 %")]


def iteration_rows() -> List[Row]:
    """Iterations from a tenth of them, ten random tenths."""
    configurations, seconds = read_iterations(RECORDED / "a100_iterations.csv")
    measured, pairs = np.array(seconds), []
    for seed in range(10):
        order = np.random.default_rng(seed).permutation(len(measured))
        fit, test = order[: len(order) // 10], order[len(order) // 10 :]
        model = fit_iterations([configurations[i] for i in fit], measured[fit])
        pairs.append((model.predict_s([configurations[i] for i in test]), measured[test]))
    return [row("a100_iterations, fitted on a tenth (10 splits)", pairs, "8 %")]


def communication_share_s(parallel_s: float, alone_s: float, members: int) -> float:
    """Return the time that N devices spend on communication, from epoch times: T_N - T_1 / N.

    All that does not scale counts as communication, so it is an upper bound; it can be negative where N devices gain
    more than N times.

    Example:
        >>> communication_share_s(67.0, 38.0, 2)
        48.0
    """
    return parallel_s - alone_s / members


def epoch_bandwidth(size: float, members: int, samples: int, batch: int, communication_s: float) -> float:
    """Ring bandwidth of one epoch: ceil(samples / batch) all-reduces in `communication_s`, in units of `size` a second.

    W = 2 (N - 1) / N  size  ceil(samples / batch) / t.  Give the size in bytes to get bytes a second.

    Example:
        >>> round(epoch_bandwidth(11173962, 2, 50000, 32, 48.0) / 1e9, 6)  # parameters, not bytes: 4 bytes each
        0.363852
    """
    return 2 * (members - 1) / members * size * -(-samples // batch) / communication_s


def data_parallel_rows() -> List[Row]:
    """The seed notebook's own arithmetic; nothing is fitted."""
    source = json.loads((RECORDED / "resnet18_data_parallel.json").read_text())
    times: List[Tuple[float, float]] = []
    rates: List[Tuple[float, float]] = []
    for devices in ("2", "4"):
        for batch, alone in source["epoch_s"]["1"].items():
            spent = communication_share_s(source["epoch_s"][devices][batch], alone, int(devices))
            times.append((spent, source["communication_s"][devices][batch]))
            rate = epoch_bandwidth(source["parameters"], int(devices), source["dataset_images"], int(batch), spent)
            rates.append((rate / 1e9, source["bandwidth_gparams_per_s"][devices][batch]))
    split = [(np.array([a for a, _ in pairs]), np.array([b for _, b in pairs])) for pairs in (times, rates)]
    return [
        row("resnet18_data_parallel, communication times", split[:1]),
        row("resnet18_data_parallel, G parameters/s (labelled GB/s there: x 4)", split[1:]),
    ]


def pipeline_rows() -> List[Row]:
    """The closed form of 1F1B against the event simulation of random uneven pipelines."""
    rng, pairs = random.Random(0), []
    for _ in range(600):
        n = rng.randint(2, 8)
        forward = [rng.uniform(0.3, 2) for _ in range(n)]
        backward = [f * rng.uniform(1.5, 2.5) for f in forward]
        slowest = rng.choice([0.0, 0.5, 2.0, 4.0])
        there = [slowest * rng.random() ** 2 for _ in range(n - 1)]
        back = [seconds * rng.uniform(0.8, 1.2) for seconds in there]
        count = n * rng.choice([1, 2, 4]) + rng.randint(0, 8)
        run = run_overlapped("1f1b", forward, backward, [Channel(s) for s in there + back], count)
        pairs.append((one_f_one_b_s(forward, backward, there, back, count)[0], run.ends[0]))
    return [
        row(
            "1F1B closed form against simulation, random pipelines",
            [(np.array([a for a, _ in pairs]), np.array([b for _, b in pairs]))],
        )
    ]


def handing_on(loss: Callable[..., Any], parameters: Any, batch: Any) -> Callable[..., Any]:
    """The forward pass of a loss, with the arrays that its backward pass reads."""
    import jax
    from jax.interpreters import partial_eval

    def forward(p: Any, b: Any) -> Any:
        return jax.vjp(lambda q: loss(q, b), p)

    _, backward = jax.eval_shape(forward, parameters, batch)
    leaves, structure = jax.tree_util.tree_flatten(backward)
    jaxpr = jax.make_jaxpr(lambda kept: jax.tree_util.tree_unflatten(structure, kept)(1.0))(leaves).jaxpr
    _, is_read = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=False)

    def lean(p: Any, b: Any) -> Any:
        value, pull = forward(p, b)
        return value, [leaf for leaf, read in zip(jax.tree_util.tree_leaves(pull), is_read) if read]

    return lean


def memory_rows() -> List[Row]:
    """Parameters, gradients and activations of the built-in models against XLA's analysis of their forward pass.

    XLA's figure: arguments plus outputs of a forward pass that hands on what its backward pass reads (in a pipeline
    both are programs of their own; `jax.vjp` alone also keeps arrays that no backward operation reads). The parameters
    are among these outputs and stand for the gradients, as large.
    """
    import jax

    import hwaware
    from hwaware.models import configure, make

    pairs, whole = [], []
    for name, size in (("mlp", 64), ("gpt", 4), ("moe", 4), ("wresnet", 4)):
        model = make(configure(name, {}))
        state, batch = model.abstract_state(), model.batch(0, size)
        workload = hwaware.trace(
            lambda s, b, m=model: m.train_step(s, b, jax.value_and_grad),
            state, batch, num_layers=4, microbatch_size=size,
        )  # fmt: skip

        def loss(p: Any, b: Any, s: Any = state, m: Any = model) -> Any:
            return m.loss(s.apply_fn({"params": p}, b["inputs"]), b["targets"])

        ours = sum(x.parameter_bytes + x.gradient_size_bytes + x.activation_bytes for x in workload.layers)
        parameters = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree_util.tree_leaves(state.params))
        forward = jax.jit(handing_on(loss, state.params, batch))
        split = forward.lower(state.params, batch).compile().memory_analysis()
        pairs.append((ours, split.argument_size_in_bytes + split.output_size_in_bytes))
        both = jax.jit(jax.value_and_grad(loss)).lower(state.params, batch).compile().memory_analysis()
        whole.append((ours, parameters + both.output_size_in_bytes + both.temp_size_in_bytes))
    return [
        row(
            "memory of the built-in models, forward and backward apart (XLA's analysis)",
            [(np.array([float(a) for a, _ in pairs]), np.array([float(b) for _, b in pairs]))], "10 %",
        ),
        row(
            "  forward and backward as one program, where XLA recomputes and fuses",
            [(np.array([float(a) for a, _ in whole]), np.array([float(b) for _, b in whole]))],
        ),
    ]  # fmt: skip


def testbed_rows() -> List[Row]:
    """Steps recorded by benchmarks/testbed_steps.py against what is predicted from their profiles and layer times."""
    from testbed_steps import corrected_s, is_short

    found: Dict[str, List[Pairs]] = {}
    for one in map(json.loads, STEPS.read_text().splitlines() if STEPS.exists() else ()):
        several = any(len(stage["replicas"]) > 1 for stage in one["plan"]["stages"])
        # Rows from before pipelines were recorded: steps with the driver's start, which was part of `pass_s` then.
        pair = (np.array([corrected_s(one)]), np.array([np.median(one.get("pipeline_s") or one["step_s"])]))
        beside = f"beside {one.get('environment', {}).get('reference_kernel') or 'an older kernel'}"
        longer = f"longer passes, {'some' if several else 'no'} stage with replicas"
        for kind in ("all", "passes of a few quota periods" if is_short(one) else longer):
            found.setdefault(f"{beside}, {one['sends']} sends, {kind}", []).append(pair)
    return [row(f"testbed steps, {kind} (median 5 %, largest 10 %)", pairs) for kind, pairs in sorted(found.items())]


def second_rows() -> List[Row]:
    """The mappings of `make bench`, and those of unequal-devices."""
    results = [BenchmarkResult.load(path) for path in sorted(SECOND.glob("*.json"))]
    pairs = [mapping_pairs(one, one.mappings) for one in results]
    return (
        [row(f"steps of `make bench`'s kind, {len(pairs)} results (median 5 %, largest 10 %)", pairs)] if pairs else []
    )


def bench_rows() -> List[Row]:
    """All mappings of the results of `hwaware bench`, by their model and together."""
    results = [BenchmarkResult.load(path) for path in sorted(BENCH.glob("*.json"))]
    found: Dict[str, List[Pairs]] = {}
    for one in results:
        if one.environment.get("reference_kernel") not in (LAYERS, NAME):
            continue  # steps beside an older kernel say nothing of the speed that predictions are for
        pairs = mapping_pairs(one, one.mappings)
        for kind in (one.model, "all models"):
            found.setdefault(kind, []).append(pairs)
    return [
        row(f"steps of `hwaware bench`, {kind}, {len(pairs)} results (median 5 %, largest 10 %)", pairs)
        for kind, pairs in sorted(found.items(), reverse=True)
    ]


def mapping_pairs(result: BenchmarkResult, mappings: Sequence[Mapping]) -> Pairs:
    """Pipelines of a result's mappings, priced anew by the code as it is, and predicted for the speed of their time."""
    predicted = [prediction_at_speed_s(priced_anew(mapping, result), result) for mapping in mappings]
    return np.array(predicted), np.array([mapping.typical(mapping.predictable_s) for mapping in mappings])


def priced_anew(mapping: Mapping, result: BenchmarkResult) -> Mapping:
    """The mapping with the price that its plan has now; if its cluster changed since, the recorded one."""
    if mapping.name == BEFORE or result.workload is None or result.profile is None:
        return mapping
    price_s = evaluate(mapping.plan, result.workload, result.profile).step_s
    return msgspec.structs.replace(mapping, predicted_step_s=price_s)


def enumerated_rows() -> List[Row]:
    """Every mapping of three hosts, each measured briefly."""
    results = [BenchmarkResult.load(path) for path in sorted(ENUMERATED.glob("*.json"))]
    return [
        row(
            f"every mapping, {one.scenario}, {one.model} (median 5 %, largest 10 %)",
            [mapping_pairs(one, one.enumerated)],
        )
        for one in results
    ]


PARTS: Dict[str, Callable[[], List[Row]]] = {
    "interpolation": interpolation_rows,
    "structure": structure_rows,
    "hosts": host_and_size_rows,
    "iterations": iteration_rows,
    "data-parallel": data_parallel_rows,
    "pipeline": pipeline_rows,
    "memory": memory_rows,
    "testbed": testbed_rows,
    "bench": bench_rows,
    "second": second_rows,
    "enumerated": enumerated_rows,
}


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table, errors in percent."""
    lines = [
        "| data set | n | MAPE | median | p90 | max | bias | rank correlation | bound |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        errors = " | ".join(f"{100 * value:.1f} %" for value in (r.mape, r.median, r.p90, r.largest))
        lines.append(
            f"| {r.data_set} | {r.n} | {errors} | {100 * r.bias:+.1f} % | {r.rank_correlation:.3f} | {r.bound} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] = ()) -> int:
    """Make the rows, print the table, and write it as Markdown and JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "predictions")
    parser.add_argument("--only", choices=sorted(PARTS), action="append", help="Only these parts.")
    chosen = parser.parse_args(arguments)
    rows = [r for name, make in PARTS.items() if not chosen.only or name in chosen.only for r in make()]
    text = table(rows)
    print(text, end="")
    if not all(math.isfinite(r.mape) for r in rows):
        print("a prediction is not finite", file=sys.stderr)
        return 1
    command = " ".join(["python benchmarks/predictions.py", *(f"--only {name}" for name in chosen.only or ())])
    about = f"Made by `{command}`, Python {platform.python_version()}, NumPy {np.__version__}.\n"
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    chosen.output.with_suffix(".md").write_text(f"# Predictions against measurements\n\n{about}\n{text}")
    document = {"command": command, "rows": [r._asdict() for r in rows]}
    chosen.output.with_suffix(".json").write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
