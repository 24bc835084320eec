"""hwaware plan: find the best placement of a workload on a cluster."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Optional, Tuple

import click

from hwaware.cli._run import json_option, print_json, reports_errors, say
from hwaware.errors import UnusableInputError

if TYPE_CHECKING:
    from hwaware.cluster import ClusterProfile
    from hwaware.plans import Plan
    from hwaware.workload import Workload

# As hwaware.placement.SOLVERS; written out so that --help does not load it.
SOLVERS = ("exact", "annealing", "gradient", "alpa", "megatron", "even", "proportional")


@click.command()
@click.argument("cluster", type=click.Path(dir_okay=False))
@click.argument("workload", type=click.Path(dir_okay=False))
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="File to write (plan.json).")
@click.option("--microbatches", type=int, required=True, help="Microbatches per step.")
@click.option("--solver", type=click.Choice(SOLVERS), default="exact", show_default=True)
@click.option(
    "--objective",
    type=click.Choice(["step", "alpa"]),
    default="step",
    show_default=True,
    help="step: the predicted step time; alpa: sum t + (B - 1) max t, without communication.",
)
@click.option(
    "--target",
    type=click.Choice(["alpa", "any"]),
    default="alpa",
    show_default=True,
    help="alpa: only plans that Alpa can run.",
)
@click.option("--exclude", multiple=True, metavar="HOST", help="Host or device that stays idle; may be given again.")
@click.option("--schedule", type=click.Choice(["1f1b", "gpipe", "inference"]), default="1f1b", show_default=True)
@click.option(
    "--max-devices-per-stage", type=int, help="1 where the runtime has one device a stage (Alpa on stock JAX)."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the annealing and gradient searches.")
@click.option("--time-limit", type=float, default=60.0, show_default=True, help="Seconds to search at most.")
@click.option("--explain", "explained", is_flag=True, help="Say what binds, and what would help (plans again twice).")
@json_option
@reports_errors
def command(
    cluster: str,
    workload: str,
    output: Optional[str],
    microbatches: int,
    exclude: Tuple[str, ...],
    time_limit: float,
    explained: bool,
    as_json: bool,
    **choices: Any,
) -> None:
    """Find the best placement of WORKLOAD on CLUSTER and write it to a file.

    \b
    Example:
        hwaware plan cluster.json workload.json -o plan.json --microbatches 16
    """
    if output is None and not as_json:
        raise UnusableInputError("There is nowhere to write the plan to.", "give -o plan.json, or --json.")
    from hwaware.cluster import ClusterProfile
    from hwaware.placement import explain, plan
    from hwaware.workload import Workload

    profile, model = ClusterProfile.load(cluster), Workload.load(workload)

    def planned(workload: Workload, profile: ClusterProfile) -> Plan:
        return plan(workload, profile, num_microbatches=microbatches, time_limit_s=time_limit, **choices)

    found = plan(
        model, profile, num_microbatches=microbatches, exclude=exclude, time_limit_s=time_limit, **choices
    )  # fmt: skip
    if output is not None:
        found.save(output)
    if found.status == "infeasible":
        say(f"Infeasible. {found.reason}")
    if as_json:
        print_json(json.loads(found.to_json()))
    elif found.stages:
        from hwaware.cli._plan_table import print_plan

        print_plan(found, model, profile)
    if explained and found.stages:
        usable = profile.without(exclude) if exclude else profile
        for sentence in explain(found, model, usable, planned).sentences():
            say(sentence)
