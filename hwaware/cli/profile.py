"""hwaware profile: measure the devices and links of a cluster."""

from __future__ import annotations

import os
from typing import Optional

import click

from hwaware.cli._run import json_option, reports_errors, say
from hwaware.errors import UnusableInputError


@click.command()
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="File to write (cluster.json).")
@click.option("--address", default="auto", show_default=True, help="Ray cluster: auto, HOST:PORT; local: without Ray.")
@click.option("--quick", is_flag=True, help="Fewer sizes and shorter runs: under 20 s for four hosts.")
@click.option("--dtype", "dtypes", default="float32", show_default=True, help="Data types, separated by commas.")
@json_option
@reports_errors
def command(output: Optional[str], address: str, quick: bool, dtypes: str, as_json: bool) -> None:
    """Measure the devices and links of a Ray cluster and write them to a file.

    On every device: matrix products over sizes and data types, memory and its bandwidth. On every directed pair of
    hosts: latency and bandwidth, through the transport that training uses.

    \b
    Example:
        hwaware profile --address 10.0.0.1:6379 -o cluster.json
    """
    if output is None and not as_json:
        raise UnusableInputError("There is nowhere to write the profile to.", "give -o cluster.json, or --json.")
    from hwaware import profiler

    _enter_testbed(address)
    progress = profiler.for_terminal()
    try:
        found = profiler.profile(address, quick, tuple(filter(None, dtypes.split(","))), progress)
    finally:
        progress.close()
    if output is not None:
        found.save(output)
        say(f"{output}: {len(found.hosts)} hosts, {len(found.devices)} devices, {len(found.links)} links.")
    if as_json:
        click.echo(found.to_json(), nl=False)


def _enter_testbed(address: str) -> None:
    """Where the address is a testbed's: take its environment and join its network, before any thread starts."""
    if address in ("auto", "local"):
        return
    from hwaware.bench import testbed

    bed = testbed.find(address)
    if bed is not None:
        os.environ.update(bed.driver_environment())
        bed.enter()
