"""All solvers on all kinds of cluster: quality against time, and which search wins where. A part of search.py."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence

from search_clusters import large_cluster, scenario_model, scenario_profile

import hwaware
from hwaware.bench.testbed.scenarios import load_scenario, shipped_names
from hwaware.cluster import ClusterProfile
from hwaware.workload import Workload

SEARCHES = ("exact", "annealing", "gradient")
BASELINES = ("alpa", "megatron", "even", "proportional")
LIMITS_S = (0.1, 0.3, 1.0, 10.0)
# Prices closer than this are the same.
SAME = 1e-6


class Case(NamedTuple):
    """One cluster and model, and what the target allows."""

    group: str
    cluster: str
    workload: Workload
    profile: ClusterProfile
    num_microbatches: int
    target: str


def cases() -> Iterator[Case]:
    """The scenarios of the acceptance with two models, then generated clusters."""
    for name in shipped_names():
        profile = scenario_profile(load_scenario(name))
        yield Case("scenarios", name, scenario_model(), profile, 16, "alpa")
        yield Case("scenarios, unlike replicas", name, scenario_model(12, split=True), profile, 16, "any")
    for name, shape in (
        ("16 devices on 4 hosts, links alike", {"devices": 16, "layers": 24, "samples": 32, "per_host": 4}),
        (
            "16 unlike devices, directed links",
            {"devices": 16, "layers": 24, "samples": 32, "per_host": 1, "kinds": 16, "directed": True},
        ),
        ("128 devices on 16 hosts, links alike", {"devices": 128, "layers": 48, "samples": 32}),
        ("128 devices on 16 hosts, directed links", {"devices": 128, "layers": 48, "samples": 32, "directed": True}),
    ):
        workload, profile = large_cluster(0, **shape)  # type: ignore[arg-type]
        yield Case("generated", name, workload, profile, 128 if shape["devices"] == 128 else 32, "alpa")


def bench_solvers() -> Dict[str, Any]:
    """Every solver on every case: the searches with growing time limits, the baselines once."""
    rows: List[Dict[str, Any]] = []
    for case in cases():
        for solver in (*SEARCHES, *BASELINES):  # compiles, and imports JAX
            _row(case, solver, 0.5)
        found = [
            _row(case, solver, limit_s)
            for solver in (*SEARCHES, *BASELINES)
            for limit_s in (LIMITS_S if solver in SEARCHES else LIMITS_S[-1:])
        ]
        exact = next(row["objective_s"] for row in found if row["solver"] == "exact" and row["time_limit_s"] == 10.0)
        best = min(row["objective_s"] for row in found if row["objective_s"] is not None)
        for row in found:
            value = row["objective_s"]
            row["over_exact"] = None if value is None or exact is None else value / exact - 1
            row["over_best"] = None if value is None else value / best - 1
            if row["time_limit_s"] == LIMITS_S[-1]:
                said = row["status"] if value is None else f"+{100 * row['over_exact']:.2f} %"
                print(
                    f"{case.group:26} {case.cluster:40} {row['solver']:12} {said:>12} {row['wall_s']:6.2f} s",
                    flush=True,
                )
        rows += found
    return {"rows": rows}


def _row(case: Case, solver: str, limit_s: float) -> Dict[str, Any]:
    started = time.perf_counter()
    found = hwaware.plan(
        case.workload, case.profile, num_microbatches=case.num_microbatches, solver=solver, time_limit_s=limit_s,
        target=case.target,
    )  # fmt: skip
    usable = found.status != "infeasible"
    return {
        "group": case.group, "cluster": case.cluster, "solver": solver, "time_limit_s": limit_s,
        "wall_s": time.perf_counter() - started, "status": found.status,
        "objective_s": found.objective_s if usable else None, "bound_s": found.bound_s if usable else None,
    }  # fmt: skip


def _percent(value: float) -> str:
    return "none" if math.isinf(value) else f"{100 * max(0.0, value):.2f} %"


def tables(result: Dict[str, Any]) -> str:
    """Both tables as Markdown."""
    rows = result["rows"]
    return "\n".join(
        [
            "# Searches compared",
            "",
            "Recorded by `python benchmarks/search.py solvers`; every figure is in search_solvers.json. Two cores.",
            "",
            "## Quality against time, scenarios of the acceptance",
            "",
            "Step time over that of exact with 10 s, worst of all scenarios (in brackets: mean), and the mean time.",
            "",
            *_quality([row for row in rows if row["group"].startswith("scenarios")]),
            "",
            "## Which search wins where",
            "",
            "Step time over the best that any search found within 10 s, and the time until the search ended. The",
            "winner has the best price; among equal prices, the quickest. Alpa's own search is a DP over shapes at",
            "equal speeds, exact a DP with bounds over located devices, annealing MCMC.",
            "",
            *_winners(rows),
            "",
        ]
    )


def _quality(rows: Sequence[Dict[str, Any]]) -> List[str]:
    lines = ["| solver | limit | worst (mean) over exact | mean time |", "|---|---|---|---|"]
    for solver in (*SEARCHES, *BASELINES):
        for limit_s in LIMITS_S:
            own = [row for row in rows if row["solver"] == solver and row["time_limit_s"] == limit_s]
            if not own:
                continue
            over = [math.inf if row["over_exact"] is None else row["over_exact"] for row in own]
            mean_s = sum(row["wall_s"] for row in own) / len(own)
            known = [value for value in over if not math.isinf(value)]
            mean = _percent(sum(known) / len(known)) if known else "none"
            lines.append(f"| {solver} | {limit_s:g} s | {_percent(max(over))} ({mean}) | {mean_s:.3f} s |")
    return lines


def _winners(rows: Sequence[Dict[str, Any]]) -> List[str]:
    columns = (*SEARCHES, "alpa")
    lines = ["| group | cluster | " + " | ".join(columns) + " | winner |", "|---" * (len(columns) + 3) + "|"]
    for group, cluster in dict.fromkeys((row["group"], row["cluster"]) for row in rows):
        own = {
            row["solver"]: row
            for row in rows
            if row["group"] == group and row["cluster"] == cluster and row["time_limit_s"] == LIMITS_S[-1]
        }
        cells = [
            "none"
            if own[solver]["over_best"] is None
            else f"{_percent(own[solver]['over_best'])}, {own[solver]['wall_s']:.2f} s"
            for solver in columns
        ]
        reached = [own[solver] for solver in columns if (own[solver]["over_best"] or 0.0) <= SAME]
        reached = [row for row in reached if row["over_best"] is not None]
        winner = min(reached, key=lambda row: row["wall_s"])["solver"] if reached else "a baseline"
        lines.append(f"| {group} | {cluster} | " + " | ".join(cells) + f" | {winner} |")
    return lines


def draw(rows: Sequence[Dict[str, Any]], path: Path) -> None:
    """Quality against time: one point for each solver, time limit and case; the searches' means as lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    for solver in (*SEARCHES, *BASELINES):
        own = [row for row in rows if row["solver"] == solver and row["over_best"] is not None]
        points = axes.scatter([r["wall_s"] for r in own], [100 * r["over_best"] for r in own], s=14, alpha=0.4)
        marks = [[row for row in own if row["time_limit_s"] == limit] for limit in LIMITS_S]
        marks = [same for same in marks if same]
        axes.plot(
            [sum(row["wall_s"] for row in same) / len(same) for same in marks],
            [100 * sum(row["over_best"] for row in same) / len(same) for same in marks],
            marker="o", label=f"{solver} (mean)", color=points.get_facecolor()[0][:3],
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=0.1)
    worst = max((row["over_best"] for row in rows if row["over_best"] is not None), default=0.0)
    axes.set_ylim(-0.02, 100 * worst * 1.5 + 1)
    axes.set_xlabel("search [s]")
    axes.set_ylabel("step time over the best found [%]")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)  # points lie in every corner
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
