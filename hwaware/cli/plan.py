"""Find the best placement of a workload on a cluster: `hwaware plan`."""

from __future__ import annotations

import contextlib
import gc
import json
from typing import TYPE_CHECKING, Any, Callable, Dict, Optional, Tuple, Union

import click

from hwaware.cli._run import json_option, print_document, print_json, reports_errors, say, waiting
from hwaware.errors import UnusableInputError
from hwaware.formatting import parse_bytes
from hwaware.records import save_or_keep

if TYPE_CHECKING:
    from hwaware.cluster import ClusterProfile
    from hwaware.plans import Plan
    from hwaware.workload import Workload

# A copy of hwaware.placement.SOLVERS, whose import would slow --help down.
SOLVERS = ("exact", "annealing", "gradient", "alpa", "megatron", "even", "proportional")


@click.command()
@click.argument("cluster", type=click.Path())
@click.argument("workload", type=click.Path())
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    help="File to write, such as plan.json. [required without --json and --explain]",
)
@click.option(
    "--microbatches",
    required=True,
    metavar="B|open",
    help="Microbatches per step; open: the solver chooses, with --global-batch fixed.",
)
@click.option("--global-batch", type=click.IntRange(1), help="Samples per step, for --microbatches open.")
@click.option(
    "--solver",
    type=click.Choice(SOLVERS),
    default="exact",
    show_default=True,
    help="Search that makes the plan, or the rule of thumb that it follows.",
)
@click.option(
    "--objective",
    type=click.Choice(["step", "alpa", "per-device"]),
    default="step",
    show_default=True,
    help="Figure to minimise. step: the predicted step time; alpa: sum t + (B - 1) max t, without communication; "
    "per-device: step time times devices used, for the most throughput per device.",
)
@click.option(
    "--target",
    type=click.Choice(["alpa", "any"]),
    default="alpa",
    show_default=True,
    help="alpa: only plans that Alpa can run; any: all plans, also with unequal replicas.",
)
@click.option("--exclude", multiple=True, metavar="HOST", help="Host or device to leave idle. Repeatable.")
@click.option(
    "--reserve",
    metavar="SIZE",
    default="0",
    show_default=True,
    help="Memory to leave free on each device, as 2GB or 500MiB.",
)
@click.option(
    "--pin",
    "pinned",
    multiple=True,
    metavar="LAYER=PLACE[,PLACE]",
    help="Layer (number or name) that only these hosts or devices may run. Repeatable.",
)
@click.option(
    "--schedule",
    type=click.Choice(["1f1b", "gpipe", "inference"]),
    default="1f1b",
    show_default=True,
    help="Order of forward and backward passes.",
)
@click.option("--max-devices-per-stage", type=click.IntRange(1), help="Most devices of a stage. [any number]")
@click.option(
    "--judge",
    type=click.Choice(["evaluate", "simulate"]),
    default="evaluate",
    show_default=True,
    help="simulate: annealing minimises the simulated step, in which messages share links.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the annealing and gradient searches."
)
@click.option("--time-limit", type=float, default=60.0, show_default=True, help="Longest search, in seconds.")
@click.option(
    "--explain",
    "explained",
    is_flag=True,
    help="Say what limits the step and what would shorten it. This takes longer: hwaware searches twice more.",
)
@json_option
@reports_errors
def command(
    cluster: str,
    workload: str,
    output: Optional[str],
    microbatches: str,
    exclude: Tuple[str, ...],
    reserve: str,
    pinned: Tuple[str, ...],
    judge: str,
    time_limit: float,
    explained: bool,
    as_json: bool,
    **choices: Any,
) -> None:
    """Find the best placement of WORKLOAD on CLUSTER and write it to a file.

    \b
    Example:
        hwaware plan cluster.json workload.json -o plan.json --microbatches 16
    """  # noqa: D301
    gc.set_threshold(100_000)  # objects of numba and the searches live on; collecting them took a tenth of the time
    from hwaware.cluster import ClusterProfile
    from hwaware.placement import explain, plan
    from hwaware.workload import Workload

    profile, model = ClusterProfile.load(cluster), Workload.load(workload)
    reserve_bytes = _bytes(reserve)
    choices["num_microbatches"] = _count(microbatches, choices["global_batch"])
    choices.update(time_limit_s=time_limit, pins=_pins(pinned))
    if output is None and not (as_json or explained):
        raise UnusableInputError("There is nowhere to write the plan to.", "give -o plan.json, or --json.")

    def planned(workload: Workload, profile: ClusterProfile, **kept_free: Any) -> Plan:
        simulated = _simulator(workload, profile) if judge == "simulate" else None
        return plan(workload, profile, judge=simulated, **kept_free, **choices)

    with waiting("Searching (a first run also compiles the search, for some seconds) ...", time_limit):
        found = planned(model, profile, exclude=exclude, reserve_bytes=reserve_bytes)
    if output is not None:
        save_or_keep(found, output, print_document)
    if found.status == "infeasible":
        say(f"Infeasible. {found.reason}")
    if as_json:
        print_json(json.loads(found.to_json()))
    usable = profile.without(exclude).keeping_free(reserve_bytes)
    if found.stages and not as_json:
        from hwaware.cli._plan_table import print_plan

        print_plan(found, model, usable)
    if explained and found.stages:
        with waiting("Planning again on changed clusters ...", 2 * time_limit):
            sentences = explain(found, model, usable, planner=planned, pins=choices["pins"]).sentences()
        # With --json, standard output holds the plan alone.
        for sentence in sentences:
            click.echo(sentence, err=as_json)


def _simulator(workload: Workload, profile: ClusterProfile) -> Callable[[Plan], float]:
    from hwaware.simulator import simulate

    return lambda candidate: simulate(candidate, workload, profile).step_s


def _bytes(reserve: str) -> float:
    try:
        return parse_bytes(reserve)
    except ValueError as error:
        raise UnusableInputError(f"--reserve: {error}.", "give for example --reserve 2GB.") from None


def _count(microbatches: str, global_batch: Optional[int]) -> Optional[int]:
    """Parse --microbatches: a number, or None for "open"."""
    if microbatches == "open":
        if global_batch is None:
            raise UnusableInputError(
                "--microbatches is open without --global-batch.", "add for example --global-batch 64."
            )
        return None
    with contextlib.suppress(ValueError):
        if int(microbatches) >= 1:
            return int(microbatches)
    raise UnusableInputError(
        f"--microbatches is {microbatches!r}, expected a number of at least 1, or open.",
        "give for example --microbatches 16.",
    )


def _pins(pinned: Tuple[str, ...]) -> Dict[Union[int, str], Tuple[str, ...]]:
    pins: Dict[Union[int, str], Tuple[str, ...]] = {}
    for pin in pinned:
        layer, equals, places = pin.rpartition("=")
        if not equals or not layer or not places:
            raise UnusableInputError(f"--pin is {pin!r}, expected LAYER=PLACE.", "give for example --pin 0=host1.")
        if layer in pins:
            fix = f"give all its places in one: --pin {layer}={','.join(pins[layer])},{places}."
            raise UnusableInputError(f"--pin names layer {layer!r} twice.", fix)
        pins[layer] = tuple(places.split(","))
    return pins
