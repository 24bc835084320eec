"""Measure the devices and links of a cluster: `hwaware profile`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Dict, Optional, Sequence, Tuple, Union

import click

from hwaware.cli._run import (
    enter_testbed,
    json_option,
    name_dropped_collectives,
    print_document,
    reports_errors,
    say,
)
from hwaware.dtypes import MEASURED
from hwaware.errors import UnusableInputError
from hwaware.formatting import counted
from hwaware.records import save_or_keep

if TYPE_CHECKING:
    from hwaware.cluster import ClusterProfile, PartialProfile


@click.command()
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="File to write, such as cluster.json.")
@click.option("--address", default="auto", show_default=True, help="Ray cluster: auto or HOST:PORT; local: no Ray.")
@click.option(
    "--quick", is_flag=True, help="Measure fewer sizes, shorter: under 20 s for four hosts with --no-runtime."
)
@click.option(
    "--dtype", "dtypes", default="float32", show_default=True,
    help=f"Data types, separated by commas: {', '.join(MEASURED)}.",
)  # fmt: skip
@click.option(
    "--only",
    multiple=True,
    help="Measure this host or device; HOST+HOST with --resume: the links between two hosts. Repeatable.",
)
@click.option("--resume", type=click.Path(), help="Profile to complete, or to renew with --only.")
@click.option("--symmetric", is_flag=True, help="Measure one pair of hosts for all pairs of the same device kinds.")
@click.option(
    "--no-runtime", is_flag=True, help="Skip the tiny programs that time passes, gradient sums and the driver."
)
@json_option
@reports_errors
def command(
    output: Optional[str],
    address: str,
    quick: bool,
    dtypes: str,
    only: Tuple[str, ...],
    resume: Optional[str],
    symmetric: bool,
    no_runtime: bool,
    as_json: bool,
) -> None:
    """Measure the devices and links of a Ray cluster and write them to a file.

    The profiler times matrix products of several sizes and data types on every device, and measures memory and its
    bandwidth. On every directed pair of hosts it measures latency and bandwidth, through the transport that training
    uses.

    Ctrl-C and SIGTERM keep finished measurements in OUTPUT.partial. --resume goes on from there, and removes that file
    when the profile is complete. With --resume, --only measures the named parts again and keeps the rest.

    \b
    Examples:
        hwaware profile --address 10.0.0.1:6379 -o cluster.json
        hwaware profile --resume cluster.json --only h1+h2 -o cluster.json
    """  # noqa: D301
    if output is None and not as_json:
        raise UnusableInputError("There is nowhere to write the profile to.", "give -o cluster.json, or --json.")
    enter_testbed(address)
    from hwaware import profiler
    from hwaware.bench import profiling

    earlier = None if resume is None else profiler.load_any(resume)
    progress = profiler.for_terminal()
    try:
        wanted = tuple(filter(None, map(str.strip, dtypes.split(","))))
        found = profiling.profile(
            address, quick=quick, dtypes=wanted, progress=progress, only=only, resume=earlier, symmetric=symmetric,
            runtime=not no_runtime, say=say,
        )  # fmt: skip
    except (profiler.InterruptedMeasurement, profiler.TerminatedMeasurement, profiler.IncompleteError) as early:
        progress.close()
        _keep(early.found, output)
        if not (early.found.devices or early.found.links) and not isinstance(early, profiler.IncompleteError):
            say("The profiler had not finished any device or link yet, so nothing is saved.")
        raise
    finally:
        progress.close()
    _name_lost_hosts(found)
    if earlier is not None:
        _name_kept_types(found, earlier, wanted)
        name_dropped_collectives(found, earlier, ["--address", address] if address != "auto" else [], output)
    if output is not None:
        save_or_keep(found, output, print_document)
        _remove_partial(output, resume)
        say(f"{output}: {_counts(found)}.")
        if found.flags:
            say(
                f"{counted(len(found.flags), 'flag')} on slow or doubtful measurements; see them: hwaware show {output}"
            )
    if as_json:
        print_document(found.to_json().decode())


def _name_lost_hosts(found: ClusterProfile) -> None:
    """Print one line for each host that vanished while the profiler measured, so that the profile lacks it."""
    present = {host.name for host in found.hosts} | {device.id for device in found.devices}
    lost: Dict[str, str] = {}
    for flag in found.flags:
        if flag.kind == "failed" and len(flag.subjects) == 1 and flag.subjects[0] not in present:
            lost.setdefault(flag.subjects[0], flag.what)
    for host, what in lost.items():
        say(f"Host {host} is missing from the profile: {what}")


def _name_kept_types(found: ClusterProfile, earlier: PartialProfile, wanted: Sequence[str]) -> None:
    """Print one line if devices that were not measured again lack a data type that was asked for."""
    before = {device.id: device.throughput for device in earlier.devices}
    kept = [device for device in found.devices if device.throughput == before.get(device.id)]
    lacking = [device for device in kept if not device.throughput.keys() >= set(wanted)]
    if lacking:
        types = sorted({dtype for device in lacking for dtype in device.throughput})
        lost = [dtype for dtype in wanted if any(dtype not in device.throughput for device in lacking)]
        say(
            f"--resume kept {counted(len(lacking), 'device')} as measured, in {', '.join(types)} and not in "
            f"{', '.join(lost)}. To fix: measure each again, with --only {lacking[0].id} --dtype "
            f"{','.join(dict.fromkeys([*types, *lost]))}"
        )


def _keep(found: PartialProfile, output: Optional[str]) -> None:
    """Save unfinished measurements beside the output, and leave the output itself as it is."""
    if output is None or not (found.devices or found.links):
        return
    path = _partial(output)
    save_or_keep(found, path, print_document)
    from hwaware.report.flags import going_on

    say(f"{path}: kept {_counts(found)}. Go on with: {going_on(found, path)}")


def _counts(found: Union[ClusterProfile, PartialProfile]) -> str:
    parts = (("host", found.hosts), ("device", found.devices), ("link", found.links))
    return ", ".join(counted(len(records), noun) for noun, records in parts)


def _partial(output: str) -> str:
    return f"{output}.partial"


def _remove_partial(output: str, resumed: Optional[str]) -> None:
    """Remove the unfinished profile beside the output if the output now holds all of it."""
    path = _partial(output)
    if resumed is not None and os.path.realpath(resumed) == os.path.realpath(path):
        os.unlink(path)
