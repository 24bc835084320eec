"""Simulate one step of a plan, event by event, as a Chrome or Perfetto trace: `hwaware simulate`."""

from __future__ import annotations

import click

from hwaware.cli._run import json_option, print_json, reports_errors, say, waiting


@click.command()
@click.argument("cluster", type=click.Path())
@click.argument("workload", type=click.Path())
@click.argument("plan", type=click.Path())
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False), help="Trace file to write.")
@click.option(
    "--sends",
    type=click.Choice(["overlapped", "blocking"]),
    default="overlapped",
    show_default=True,
    help="overlapped: compute while messages travel; blocking: wait for each, in Alpa's own order.",
)
@click.option("--unshared", is_flag=True, help="Give every message the full bandwidth of its link.")
@json_option
@reports_errors
def command(cluster: str, workload: str, plan: str, output: str, sends: str, unshared: bool, as_json: bool) -> None:
    """Simulate one step of PLAN for WORKLOAD on CLUSTER, event by event, and write it as a trace.

    Open the file with ui.perfetto.dev or chrome://tracing.

    \b
    Example:
        hwaware simulate cluster.json workload.json plan.json -o trace.json
    """  # noqa: D301
    from hwaware.cluster import ClusterProfile
    from hwaware.costs import PreparedCosts, evaluate
    from hwaware.formatting import SECONDS, counted, percent, text
    from hwaware.plans import Plan
    from hwaware.simulator import simulate
    from hwaware.simulator.simulate import disagreement
    from hwaware.workload import Workload

    profile, model, placed = ClusterProfile.load(cluster), Workload.load(workload), Plan.load(plan)
    costs = PreparedCosts(model, profile, placed.schedule)
    with waiting("Simulating ..."):
        timeline = simulate(
            placed,
            model,
            profile,
            sends="blocking" if sends == "blocking" else "overlapped",
            shared_links=not unshared,
            costs=costs,
        )
    cost = evaluate(placed, model, profile, costs)
    timeline.save_trace(output)
    differs = disagreement(timeline, cost)
    if differs:
        say(differs)
    busy = [timeline.busy_s(stage) for stage in range(len(placed.stages))]
    if as_json:
        print_json(
            {
                "step_s": timeline.step_s,
                "evaluated_step_s": cost.step_s,
                "events": len(timeline.events),
                "busy_s": busy,
                "trace": output,
            }
        )
        return
    click.echo(f"Simulated step: {text(timeline.step_s, SECONDS)}; the predicted step is {text(cost.step_s, SECONDS)}.")
    for stage, used in enumerate(busy):
        share = used / timeline.step_s if timeline.step_s > 0 else 0.0
        click.echo(f"  stage {stage} ({', '.join(timeline.devices[stage])}): busy {percent(share)}")
    say(f"{output}: {counted(len(timeline.events), 'event')} written; open it with ui.perfetto.dev.")
