"""Check what is installed and what works, and name the commands that fix the rest: `hwaware doctor`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Dict, List, Optional

import click

from hwaware.cli._run import json_option, print_json, reports_errors, waiting

if TYPE_CHECKING:
    from rich.table import Table


@click.command()
@click.option("--address", metavar="HOST:PORT", help="Also ask this Ray cluster for its hosts; auto: the one here.")
@click.option("-v", "--verbose", is_flag=True, help="List every override of Alpa, also those that fit.")
@json_option
@reports_errors
def command(address: Optional[str], verbose: bool, as_json: bool) -> None:
    """Show what is installed, which overrides of Alpa fit, and the command that installs what is missing.

    The command changes nothing. It exits with 0 if all installed parts fit together, even where optional parts are
    missing. It exits with 1 if an installed part does not fit, or if hwaware itself lacks a package. It also exits with
    1 if no cluster answers.

    \b
    Example:
        hwaware doctor --address 10.0.0.1:6379
    """  # noqa: D301
    from hwaware.cli._findings import examine
    from hwaware.ray_cluster import split_address

    if address is not None and address != "auto":
        split_address(address)
    with waiting("Looking at packages, devices and Alpa ..."):
        document = examine(address)
    if as_json:
        print_json(document)
    else:
        _print(document, verbose)
    if not document["ok"]:
        sys.exit(1)


def _print(document: Dict[str, Any], verbose: bool) -> None:
    from hwaware.report.console import make_console

    console = make_console()
    python, system = document["python"], document["platform"]
    console.print(f"hwaware {document['hwaware']}, Python {python}, {system}")
    console.print(_abilities(document["abilities"]))
    if document["gpus"]:
        names = ", ".join(f"{gpu['name']} ({gpu['memory']}, driver {gpu['driver']})" for gpu in document["gpus"])
        console.print(f"GPUs: {names}")
    alpa = document["alpa"]
    if alpa and "overrides" in alpa:
        unfit = [one for one in alpa["overrides"] if one["needed"] and not one["fits"]]
        if verbose or unfit:
            console.print(_overrides(alpa["overrides"] if verbose else unfit))
    fixes = {ability["name"]: ability["fix"] for ability in document["abilities"] if ability["fix"]}
    for name, fix in fixes.items():
        console.print(f'To fix "{name}": {fix}', soft_wrap=True)
    if not fixes:
        console.print("Nothing is missing.")


def _abilities(abilities: List[Dict[str, Any]]) -> Table:
    from hwaware.report.fitting import build_table

    names = [
        ("task", [ability["name"] for ability in abilities]),
        ("works", ["yes" if ability["works"] else "no" for ability in abilities]),
        ("found here", [ability["found"] for ability in abilities]),
    ]
    return build_table(None, names, [])


def _overrides(overrides: List[Dict[str, Any]]) -> Table:
    from hwaware.report.fitting import build_table

    fits = ["not needed" if not one["needed"] else "yes" if one["fits"] else "no" for one in overrides]
    names = [("function", [override["function"] for override in overrides]), ("fits", fits)]
    return build_table("\nOverrides of Alpa", names, [])
