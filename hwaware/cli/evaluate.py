"""Price any plan, also one written by hand: `hwaware evaluate`."""

from __future__ import annotations

from typing import Optional

import click

from hwaware.cli._run import json_option, print_document, print_json, reports_errors, say


@click.command()
@click.argument("cluster", type=click.Path())
@click.argument("workload", type=click.Path())
@click.argument("priced", metavar="PLAN", type=click.Path())
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="File to write: the plan with these figures.")
@json_option
@reports_errors
def command(cluster: str, workload: str, priced: str, output: Optional[str], as_json: bool) -> None:
    """Price PLAN for WORKLOAD on CLUSTER: the step time, and each stage's times and memory.

    \b
    Example:
        hwaware evaluate cluster.json workload.json plan.json -o priced.json
    """  # noqa: D301
    import msgspec

    from hwaware.cluster import ClusterProfile
    from hwaware.costs import evaluate, step_interval
    from hwaware.formatting import BYTES, text
    from hwaware.plans import Plan
    from hwaware.workload import Workload

    profile, model, placed = ClusterProfile.load(cluster), Workload.load(workload), Plan.load(priced)
    cost = evaluate(placed, model, profile)
    interval = step_interval(placed, model, profile, cost.step_s)
    for index, stage in enumerate(cost.stages):
        if stage.memory_excess_bytes > 0:
            excess = text(stage.memory_excess_bytes, BYTES)
            say(f"Stage {index} on {', '.join(stage.devices)} exceeds the memory limit by {excess}.")
    if output is not None:
        from hwaware.placement.problem import with_figures
        from hwaware.records import save_or_keep

        save_or_keep(with_figures(placed, cost, interval), output, print_document)
    if as_json:
        steps = {"likely_step_s": interval.likely_s, "step_interval_s": [interval.low_s, interval.high_s]}
        print_json({**msgspec.to_builtins(cost), **steps, "layer_times": interval.source})
        return
    from hwaware.cli._plan_table import print_cost

    print_cost(cost, placed, interval)
