"""Start, list and take down heterogeneous Ray clusters on this machine: `hwaware testbed`."""

from __future__ import annotations

import shlex
from typing import Any, Dict, List, Mapping, Optional

import click

from hwaware.cli._run import json_option, print_json, reports_errors, say, waiting
from hwaware.errors import UnusableInputError

# The choices are a copy from hwaware.bench.testbed.kinds, whose import would slow --help down.
kind_option = click.option(
    "--kind",
    type=click.Choice(["auto", "root", "user", "loopback", "gpu", "gpu-loopback"]),
    default="auto",
    show_default=True,
    help="Way to build a testbed; auto takes the first of root, user and loopback that works.",
)


@click.group()
def command() -> None:
    """Run a heterogeneous multi-host Ray cluster on this machine: real Ray and TCP at set speeds.

    As root on Linux, hosts are network namespaces with CPU quotas and link rates. Without root, an unprivileged user
    namespace shapes the links, where the system allows it. Elsewhere the hosts share the loopback, and the testbed
    sets no speeds. With --kind gpu (root), each host's device is a part of this machine's NVIDIA GPU.
    """


@command.command()
@click.argument("scenario")
@click.option("--name", help="Name of the testbed. [the scenario's name and a suffix]")
@kind_option
@json_option
@reports_errors
def up(scenario: str, name: Optional[str], kind: str, as_json: bool) -> None:
    """Start SCENARIO and wait until every host has joined.

    SCENARIO is the name of a shipped scenario (`hwaware testbed list` prints them) or a .toml file.
    """
    from hwaware.bench import testbed
    from hwaware.bench.testbed.manager import UP_LIMIT_S

    chosen = testbed.load_scenario(scenario)
    with waiting(f"Starting {chosen.name}: waiting for every host to join ...", UP_LIMIT_S):
        bed = testbed.up(chosen, name=name, kind=kind)
    for note in bed.notes:
        say(note)
    if as_json:
        print_json(bed.describe())
        return
    _print(bed.describe())
    click.echo(f"Take it down with: hwaware testbed down {bed.name}")


@command.command()
@click.argument("name", required=False)
@click.option("--all", "everything", is_flag=True, help="Take down every testbed of this user.")
@json_option
@reports_errors
def down(name: Optional[str], everything: bool, as_json: bool) -> None:
    """Take down a testbed and remove everything it made.

    NAME is that of the testbed or of its scenario. Leave it out if only one testbed is up.
    """
    from hwaware.bench import testbed

    scenarios = {bed.name: bed.scenario.name for bed in testbed.list_testbeds()}
    with waiting("Ending its processes ..."):
        taken_down = [each for each in _chosen(scenarios, name, everything) if testbed.down(each)]
    if as_json:
        print_json({"down": taken_down})
    elif not taken_down:
        say("No testbed is up.")
    for each in taken_down:
        say(f"{each} is down.")


@command.command(name="list")
@click.argument("scenario", required=False)
@json_option
@reports_errors
def list_command(scenario: Optional[str], as_json: bool) -> None:
    """List the testbeds of this user, or only those of SCENARIO.

    SCENARIO is the name of a scenario or a .toml file.
    """
    from hwaware.bench import testbed

    beds = testbed.list_testbeds()
    names = {bed.scenario.name for bed in beds}
    wanted = scenario if scenario is None or scenario in names else testbed.load_scenario(scenario).name
    documents = [bed.describe() for bed in beds if wanted in (None, bed.scenario.name)]
    if as_json:
        print_json({"testbeds": documents, "scenarios": testbed.shipped_names()})
        return
    for document in documents:
        _print(document)
    if scenario is None:
        nothing = "" if documents else "No testbed is up. "
        click.echo(f"{nothing}Scenarios: {', '.join(testbed.shipped_names())}")
    elif not documents:
        click.echo(f"No testbed of {wanted} is up. Start one with: hwaware testbed up {scenario}")


def _chosen(scenarios: Mapping[str, str], name: Optional[str], everything: bool) -> List[str]:
    """Return the names of the testbeds to take down: the one of that name or scenario, or all."""
    if name in scenarios:
        return [str(name)]
    names = [one for one, scenario in scenarios.items() if name in (None, scenario)]
    if name is not None and not names:
        raise UnusableInputError(
            f"There is no testbed {name!r}.",
            f"the testbeds are: {', '.join(scenarios) or 'none'} (`hwaware testbed list`).",
        )
    if len(names) > 1 and not everything:
        raise UnusableInputError(f"{len(names)} testbeds are up: {', '.join(names)}.", "name one, or give --all.")
    return names


def _print(document: Dict[str, Any]) -> None:
    click.echo(f"{document['name']}: {document['scenario']}, {document['status']}, Ray at {document['address']}")
    for host in document["hosts"]:
        shares = ", ".join(f"{device['id']} ({_share(document, device)})" for device in host["devices"])
        ray = "" if host["runs_ray"] else "  Ray does not run there"
        click.echo(f"  {host['name']}  {host['address']}  {shares}{ray}")
    variables = {"RAY_ADDRESS": document["address"], **document["driver_environment"]}
    exports = " ".join(f"{key}={value}" for key, value in variables.items())
    enter = document["enter_command"]  # its shell keeps the variables
    then = f" && {shlex.join(enter)}" if enter else ""
    click.echo(f"  Before you start a program of your own: export {exports}{then}")


def _share(document: Dict[str, Any], device: Dict[str, Any]) -> str:
    if document["kind"].startswith("gpu"):  # the hosts split it in proportion to their shares
        return f"GPU share {device['share']:g}"
    return f"{device['share']:g} of a core" if document["shaped"]["cpu"] else "speed not limited"
