"""Let running trainings leave a host: `hwaware drain`."""

from __future__ import annotations

import sys

import click

from hwaware.cli._run import NumberRange, enter_testbed, json_option, print_json, reports_errors, waiting
from hwaware.errors import UnusableInputError
from hwaware.formatting import counted


@click.command()
@click.argument("host")
@click.option("--address", default="auto", show_default=True, help="Ray cluster: auto or HOST:PORT.")
@click.option(
    "--timeout", "limit_s", type=NumberRange(min=0, min_open=True), default=600.0, show_default=True,
    help="Seconds to wait for all trainings.",
)  # fmt: skip
@json_option
@reports_errors
def command(host: str, address: str, limit_s: float, as_json: bool) -> None:
    """Let all trainings with survive=True leave HOST, which may then be stopped.

    HOST is a host's name or address, or a device's id. Each training leaves it at the end of a step. The training goes
    on with the other hosts, and loses nothing.

    The command exits with 0 once no training uses HOST, also if none runs. It exits with 1 if a training needs HOST, or
    does not answer in time. It exits with 2 if no training knows HOST, or the cluster cannot be reached.

    \b
    Example:
        hwaware drain h2 --address 10.0.0.1:6379
    """  # noqa: D301
    enter_testbed(address)
    from hwaware import ray_cluster
    from hwaware.survival import asking

    with ray_cluster.connect(address), waiting(f"Waiting for trainings to leave {host} ...", limit_s):
        outcomes = asking.drain(host, limit_s)
    if outcomes and not any(one.is_known for one in outcomes.values()):
        raise UnusableInputError(
            f"No training knows a host or device {host!r}.", "name it as the profile does: hwaware show cluster.json"
        )
    ok = all(one.done or not one.is_known for one in outcomes.values())
    if as_json:
        trainings = [{"training": token, **outcome._asdict()} for token, outcome in sorted(outcomes.items())]
        print_json({"host": host, "ok": ok, "trainings": trainings})
    else:
        for outcome in outcomes.values():
            click.echo(f"{outcome.what} {outcome.moved}".rstrip())
        if not outcomes:
            click.echo(
                f"No training with survive=True runs on this cluster, so nobody checked the name {host}. Other "
                "trainings may use this host."
            )
        elif ok:
            click.echo(f"Asked {counted(len(outcomes), 'training')}: none uses {host} any more.")
    if not ok:
        sys.exit(1)
