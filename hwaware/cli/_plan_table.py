"""A priced plan as a table: one row a stage, units in the headers."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from hwaware.cluster import ClusterProfile
from hwaware.costs import Cost, evaluate
from hwaware.plans import Plan
from hwaware.workload import Workload

# Wide enough for the whole table where there is no terminal to ask (pipes, files).
WIDTH_WITHOUT_TERMINAL = 120


def print_plan(plan: Plan, workload: Workload, profile: ClusterProfile) -> None:
    """Print a plan that was found: its stages, what they cost, and how sure it is that no other plan is better."""
    console = print_cost(evaluate(plan, workload, profile), plan)
    console.print(_certainty(plan), highlight=False, markup=False)


def print_cost(cost: Cost, plan: Plan) -> Console:
    """Print the price of a plan, stage by stage, and return the console it went to."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH_WITHOUT_TERMINAL)
    table = Table(title=f"{plan.schedule}, {plan.num_microbatches} microbatches")
    for header in ("stage", "layers", "devices"):
        table.add_column(header)
    for header in (
        "forward ms",
        "backward ms",
        "receive ms",
        "gradient sync ms",
        "update ms",
        "memory MiB",
        "limit MiB",
    ):
        table.add_column(header, justify="right")
    for index, stage in enumerate(cost.stages):
        times = (stage.forward_s, stage.backward_s, stage.receive_s, stage.gradient_sync_s, stage.update_s)
        table.add_row(
            str(index),
            f"{stage.layers[0]}-{stage.layers[1]}",
            ", ".join(stage.devices),
            *(f"{1e3 * seconds:,.3f}" for seconds in times),
            f"{stage.memory_bytes / 2**20:,.1f}" + ("" if stage.memory_excess_bytes == 0 else " !"),
            f"{stage.memory_limit_bytes / 2**20:,.1f}",
        )
    console.print(table, markup=False)
    fits = "" if cost.fits else "  Over memory (!): it cannot run."
    summary = f"step {1e3 * cost.step_s:,.3f} ms, one microbatch every {1e3 * cost.period_s:,.3f} ms.{fits}"
    console.print(summary, highlight=False, markup=False)
    return console


def _certainty(plan: Plan) -> str:
    search = f"{plan.solver}, {plan.search_s or 0.0:.2f} s"
    if plan.objective_s is None or plan.bound_s is None:
        return f"{plan.status} ({search})"
    below = 100 * (1 - plan.bound_s / plan.objective_s) if plan.objective_s > 0 else 0.0
    known = "no plan is better" if plan.status == "optimal" else f"no plan is more than {below:.2f} % better"
    return f"{plan.status}: {known} ({plan.objective} objective {1e3 * plan.objective_s:,.3f} ms; {search})"
