"""Write a cluster profile in another program's format: `hwaware export`."""

from __future__ import annotations

import click

from hwaware.cli._run import json_option, print_json, reports_errors, say
from hwaware.cluster import ClusterProfile


@click.group()
def command() -> None:
    """Write a cluster profile in another program's format: Alpa's profiling database."""


@command.command("alpa-db")
@click.argument("cluster", type=click.Path())
@click.option(
    "-o", "--output", required=True, type=click.Path(dir_okay=False), help="File to write, such as prof_database.pkl."
)
@json_option
@reports_errors
def alpa_database(cluster: str, output: str, as_json: bool) -> None:
    """Write CLUSTER as the prof_database.pkl that Alpa's cost model reads.

    Alpa's database knows mesh shapes but no hosts. So hwaware prices every shape on the slowest devices and links.
    """
    from hwaware import interop

    shapes = interop.export_profile(ClusterProfile.load(cluster), output)
    say(f"{output}: mesh shapes {', '.join(f'{hosts}x{devices}' for hosts, devices in shapes)}.")
    if as_json:
        print_json({"file": output, "mesh_shapes": [list(shape) for shape in shapes]})
