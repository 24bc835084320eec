"""`hwaware testbed`: a heterogeneous Ray cluster on this machine."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional

import click

from hwaware.cli._run import json_option, print_json, reports_errors, say, waiting
from hwaware.errors import UnusableInputError

# As in hwaware.bench.testbed.kinds, written out so that --help does not load it.
kind_option = click.option(
    "--kind",
    type=click.Choice(["auto", "root", "user", "loopback", "gpu"]),
    default="auto",
    show_default=True,
    help="How to build a testbed; auto takes the first of root, user and loopback that works.",
)


@click.group()
def command() -> None:
    """A heterogeneous multi-host Ray cluster on this machine: real Ray and TCP at set speeds.

    As root on Linux, hosts are network namespaces with CPU quotas and link rates. Without root, an unprivileged user
    namespace shapes the links if the system allows it; else the hosts share the loopback and nothing is shaped.
    With --kind gpu (root) each host's device is a part of this machine's NVIDIA GPU.
    """


@command.command()
@click.argument("scenario")
@click.option("--name", help="What to call the testbed; by default the scenario's name and a suffix.")
@kind_option
@json_option
@reports_errors
def up(scenario: str, name: Optional[str], kind: str, as_json: bool) -> None:
    """Start SCENARIO, the name of a shipped one or a .toml file, and wait until every host has joined."""
    from hwaware.bench import testbed
    from hwaware.bench.testbed.manager import UP_LIMIT_S

    say(f"Starting {scenario} ...")
    with waiting("Waiting for every host to join ...", UP_LIMIT_S):
        bed = testbed.up(scenario, name=name, kind=kind)
    for note in bed.notes:
        say(note)
    if as_json:
        print_json(bed.describe())
        return
    _print(bed.describe())
    exports = " ".join(f"{key}={value}" for key, value in bed.driver_environment().items())
    click.echo(f"Before a driver starts: export {exports}")
    click.echo(f"Take it down with: hwaware testbed down {bed.name}")


@command.command()
@click.argument("name", required=False)
@click.option("--all", "everything", is_flag=True, help="Take down every testbed of this user.")
@json_option
@reports_errors
def down(name: Optional[str], everything: bool, as_json: bool) -> None:
    """Take down the testbed NAME, or the one of that scenario, and remove everything it made.

    NAME may be left out if there is only one.
    """
    from hwaware.bench import testbed

    scenarios = {bed.name: bed.scenario.name for bed in testbed.list_testbeds()}
    with waiting("Ending what runs in it ..."):
        taken_down = [each for each in _chosen(scenarios, name, everything) if testbed.down(each)]
    if as_json:
        print_json({"down": taken_down})
    elif not taken_down:
        say("There is no testbed.")
    for each in taken_down:
        say(f"{each} is down.")


@command.command(name="list")
@click.argument("scenario", required=False)
@json_option
@reports_errors
def list_command(scenario: Optional[str], as_json: bool) -> None:
    """The testbeds of this user, or those of SCENARIO."""
    from hwaware.bench import testbed

    documents = [bed.describe() for bed in testbed.list_testbeds() if scenario in (None, bed.scenario.name)]
    if as_json:
        print_json({"testbeds": documents, "scenarios": testbed.shipped_names()})
        return
    for document in documents:
        _print(document)
    if not documents:
        which = "No testbed" if scenario is None else f"No testbed of {scenario}"
        click.echo(f"{which} is up. Scenarios: {', '.join(testbed.shipped_names())}")


def _chosen(scenarios: Mapping[str, str], name: Optional[str], everything: bool) -> List[str]:
    """Those that are meant of the testbeds, by name: the one of that name, or of that scenario, or all."""
    if name in scenarios:
        return [str(name)]
    names = [one for one, scenario in scenarios.items() if name in (None, scenario)]
    if name is not None and not names:
        raise UnusableInputError(
            f"There is no testbed {name!r}.",
            f"the testbeds are: {', '.join(scenarios) or 'none'} (`hwaware testbed list`).",
        )
    if len(names) > 1 and not everything:
        raise UnusableInputError(f"There are {len(names)} testbeds: {', '.join(names)}.", "name one, or give --all.")
    return names


def _print(document: Dict[str, Any]) -> None:
    click.echo(f"{document['name']}: {document['scenario']}, {document['status']}, Ray at {document['address']}")
    for host in document["hosts"]:
        shares = ", ".join(f"{device['id']} ({_share(document, device)})" for device in host["devices"])
        click.echo(f"  {host['name']}  {host['address']}  {shares}")


def _share(document: Dict[str, Any], device: Dict[str, Any]) -> str:
    if document["kind"] == "gpu":  # in proportion to the others'
        return f"a part of the GPU as {device['share']:g}"
    return f"{device['share']:g} of a core"
