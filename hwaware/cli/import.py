"""Turn other programs' measurements into a cluster profile: `hwaware import`."""

from __future__ import annotations

from typing import Optional, Tuple

import click

from hwaware.cli._run import json_option, print_document, reports_errors, say
from hwaware.cluster import ClusterProfile
from hwaware.errors import UnusableInputError


@click.group()
def command() -> None:
    """Turn other programs' measurements into a cluster profile: Alpa's database, the output of nccl-tests."""


@command.command("alpa-db")
@click.argument("file", type=click.Path())
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="File to write (cluster.json).")
@click.option("--key", default="default", show_default=True, help="Name of the cluster in the database.")
@click.option("--kind", default="unknown", show_default=True, help="Model of the devices, which the database lacks.")
@json_option
@reports_errors
def alpa_database(file: str, output: Optional[str], key: str, kind: str, as_json: bool) -> None:
    """Turn Alpa's prof_database.pkl into a cluster profile, without running any code in the file.

    The database has no times between two devices, so hwaware derives the links from its collectives.
    """
    from hwaware import interop

    _require_output(output, as_json)
    found = interop.import_profile(interop.read_database(file, key), kind, source=file)
    _write(found, output, as_json)


@command.command("nccl-tests")
@click.argument("files", type=click.Path(), nargs=-1, required=True)
@click.option("--into", required=True, type=click.Path(), help="Cluster profile to add the results to.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="File to write (cluster.json).")
@json_option
@reports_errors
def nccl_tests(files: Tuple[str, ...], into: str, output: Optional[str], as_json: bool) -> None:
    """Add the output of nccl-tests, its table or its JSON, to the collectives of the profile --into."""
    from hwaware import interop

    _require_output(output, as_json)
    found = ClusterProfile.load(into)
    for file in files:
        found = interop.add_collectives(found, interop.read_nccl_tests(file))
    _write(found, output, as_json)


def _require_output(output: Optional[str], as_json: bool) -> None:
    if output is None and not as_json:
        raise UnusableInputError("There is nowhere to write the profile to.", "give -o cluster.json, or --json.")


def _write(found: ClusterProfile, output: Optional[str], as_json: bool) -> None:
    if output is not None:
        found.save(output)
        counts = f"{len(found.hosts)} hosts, {len(found.devices)} devices, {len(found.collectives)} collectives"
        say(f"{output}: {counts}.")
    if as_json:
        print_document(found.to_json().decode())
