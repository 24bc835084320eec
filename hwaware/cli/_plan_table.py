"""Print a priced plan as a table: one row a stage, units in the headers."""

from __future__ import annotations

from typing import List, Sequence

from rich.console import Console

from hwaware.cluster import ClusterProfile
from hwaware.costs import Cost, StageCost, evaluate
from hwaware.costs.intervals import Interval, described, step_interval
from hwaware.formatting import BYTES, SECONDS, counted, text
from hwaware.plans import Plan
from hwaware.report.console import make_console
from hwaware.report.fitting import Column, build_table
from hwaware.report.tables import legend, number_columns, replicas_text
from hwaware.workload import Workload


def print_plan(plan: Plan, workload: Workload, profile: ClusterProfile) -> None:
    """Print a solver's plan: its stages, their prices, and by how much another plan may be better."""
    cost = evaluate(plan, workload, profile)
    console = print_cost(cost, plan, step_interval(plan, workload, profile, cost.step_s))
    console.print(_certainty(plan))


def print_cost(cost: Cost, plan: Plan, interval: Interval) -> Console:
    """Print the price of a plan, stage by stage, and return the console."""
    console = make_console()
    stages = cost.stages
    names = [
        ("stage", [str(index) for index in range(len(stages))]),
        ("layers", [f"{stage.layers[0]}-{stage.layers[1]}" for stage in stages]),
        ("devices", [replicas_text(stage) for stage in plan.stages]),
    ]
    times = [
        ("forward", [stage.forward_s for stage in stages]),
        ("backward", [stage.backward_s for stage in stages]),
        ("receive", [stage.receive_s for stage in stages]),
        ("gradient sync", [stage.gradient_sync_s for stage in stages]),
        ("update", [stage.update_s for stage in stages]),
    ]
    columns = [*number_columns(times, SECONDS), *_memory(stages)]
    samples = "" if plan.microbatch_size is None else f" of {counted(plan.microbatch_size, 'sample')}"
    title = f"{plan.schedule}, {counted(plan.num_microbatches, 'microbatch')}{samples}"
    console.print(build_table(title, names, columns, legend(plan.stages)))
    fits = "" if cost.fits else "  Over memory (!): this plan cannot run."
    step, period = (text(seconds, SECONDS) for seconds in (cost.step_s, cost.period_s))
    summary = f"Predicted step: {step}, to compare plans; one microbatch every {period} in the midst of a step.{fits}"
    console.print(summary)
    console.print(f"{described(interval)}.")
    return console


def _memory(stages: Sequence[StageCost]) -> List[Column]:
    """Return the columns of memory and its limit, with a mark where a stage exceeds its limit."""
    numbers = [
        ("memory", [stage.memory_bytes for stage in stages]),
        ("limit", [stage.memory_limit_bytes for stage in stages]),
    ]
    (header, cells), limit = number_columns(numbers, BYTES)
    over = [stage.memory_excess_bytes > 0 for stage in stages]
    return [(header, [f"{cell} !" if too_much else cell for cell, too_much in zip(cells, over)]), limit]


def _certainty(plan: Plan) -> str:
    search = f"{plan.solver}, {plan.search_s or 0.0:.2f} s"
    if plan.objective_s is None or plan.bound_s is None:
        return f"{plan.status} ({search})"
    below = 100 * (1 - plan.bound_s / plan.objective_s) if plan.objective_s > 0 else 0.0
    known = "no plan is better" if plan.status == "optimal" else f"no plan is more than {below:.2f} % better"
    return f"{plan.status}: {known} ({plan.objective} objective {text(plan.objective_s, SECONDS)}; {search})"
