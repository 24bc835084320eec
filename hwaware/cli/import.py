"""Turn other programs' measurements into a cluster profile: `hwaware import`."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Sequence, Tuple, TypeVar

import click

from hwaware.cli._run import NumberRange, json_option, name_dropped_collectives, print_document, reports_errors, say
from hwaware.cluster import OPERATIONS, ClusterProfile, LinkTable
from hwaware.errors import UnusableInputError
from hwaware.formatting import BYTES_PER_S, SECONDS, counted, text

F = TypeVar("F", bound=Callable[..., Any])
_host = click.option("--host", help="Name of the host that was measured. [the only host of --into, or host]")
_client = click.option("--client", help="Name of the client's host. [as in the file, or client]")
_server = click.option("--server", help="Name of the server's host. [as in the file, or server]")


@click.group()
def command() -> None:
    """Turn other programs' measurements into a cluster profile.

    Each command reads one format. Several files become one profile. With --into, they become part of an existing one.
    """


@command.command("alpa-db", short_help="Alpa's prof_database.pkl: a whole cluster.")
@click.argument("file", type=click.Path())
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="File to write, such as cluster.json.")
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


def _importer(function: F) -> F:
    """Add the arguments and options that all importers of measurement files share."""
    shared = (
        click.argument("files", type=click.Path(), nargs=-1, required=True),
        click.option("--into", type=click.Path(), help="Cluster profile to add the results to. [a new one]"),
        click.option("-o", "--output", type=click.Path(dir_okay=False), help="File to write, such as cluster.json."),
        click.option("--rename", multiple=True, metavar="OLD=NEW", help="Another name for a host of the files."),
        click.option(
            "--flops-per-s",
            type=NumberRange(1e-3, 1e24),
            help="For a new profile: speed to assume of each device. [1e12]",
        ),
        click.option(
            "--memory-bytes",
            type=click.IntRange(1, 10**15),
            help="For a new profile: memory to assume of each device. [as in the device's name, or 16 GiB]",
        ),
        json_option,
        reports_errors,
    )
    for decorate in reversed(shared):
        function = decorate(function)
    return function


@command.command("nccl-tests", short_help="nccl-tests, rccl-tests: collectives, links.")
@click.option("--op", type=click.Choice(OPERATIONS), help="The operation, where a file does not name the program.")
@click.option("--table", "only", type=click.IntRange(1), help="Number of the table to take, where a file has several.")
@_importer
def nccl_tests(op: Optional[str], only: Optional[int], **options: Any) -> None:
    """Import the output of nccl-tests or rccl-tests: its tables, or its JSON.

    all_reduce_perf, all_gather_perf, reduce_scatter_perf and alltoall_perf give collectives. sendrecv_perf gives links.

    If you redirect the output, it may lack the program's name. Then add --op all-reduce, or another operation.
    """
    _import("nccl-tests", options, {}, op=op, only=only)


@command.command("p2p", short_help="p2pBandwidthLatencyTest: links between devices.")
@_host
@_importer
def p2p(host: Optional[str], **options: Any) -> None:
    """Import the output of p2pBandwidthLatencyTest, of NVIDIA's CUDA samples, as links between devices of a host."""
    _import("p2p", options, {"host": host})


@command.command("nvbandwidth", short_help="nvbandwidth, text or JSON: links between devices.")
@_host
@_importer
def nvbandwidth(host: Optional[str], **options: Any) -> None:
    """Import the output of nvbandwidth, text or --format json, as links between devices."""
    _import("nvbandwidth", options, {"host": host})


@command.command("iperf3", short_help="iperf3 --json: links between hosts.")
@_client
@_server
@_importer
def iperf3(client: Optional[str], server: Optional[str], **options: Any) -> None:
    """Import the output of iperf3 --json, of client or server, as links between hosts."""
    _import("iperf3", options, {"client": client, "server": server})


@command.command("ib", short_help="ib_write_bw, ib_send_lat and others: links of hosts.")
@_client
@_server
@_importer
def infiniband(client: Optional[str], server: Optional[str], **options: Any) -> None:
    """Import the output of ib_write_bw, ib_read_bw, ib_send_bw and their _lat tests, as links between hosts."""
    _import("ib", options, {"client": client, "server": server})


@command.command("topo", short_help="nvidia-smi topo -m: kinds of connections.")
@_host
@_importer
def topo(host: Optional[str], **options: Any) -> None:
    """Import the matrix of nvidia-smi topo -m: kinds of connections between the devices of a host.

    The matrix has no speeds. On links of the profile --into, hwaware notes the kind of connection. For other links,
    hwaware assumes the nominal rate of the connection, and flags this.
    """
    _import("topo", options, {"host": host})


def _import(
    name: str,
    options: Dict[str, Any],
    roles: Dict[str, Optional[str]],
    op: Optional[str] = None,
    only: Optional[int] = None,
) -> None:
    from hwaware import interop

    output, as_json = options["output"], options["as_json"]
    _require_output(output, as_json)
    profile = ClusterProfile.load(options["into"]) if options["into"] is not None else None
    if profile is not None and (options["flops_per_s"] is not None or options["memory_bytes"] is not None):
        raise UnusableInputError(
            "--flops-per-s and --memory-bytes are for a new profile; --into has its own.", "leave them out."
        )
    given = {role: host for role, host in roles.items() if host is not None}
    renamed = _renamed(options["rename"])
    readings = [interop.read(name, file, op, only) for file in options["files"]]
    known = interop.names_of(readings)
    unknown = [old for old in renamed if old not in known]
    if unknown:
        raise UnusableInputError(
            f"--rename names {', '.join(unknown)}, expected host names or addresses in the files: "
            f"{', '.join(known) or 'these name no host'}.",
            "correct or leave out this --rename.",
            found=tuple(unknown),
            expected=tuple(known),
        )
    readings = [interop.with_names(reading, given, renamed) for reading in readings]
    found = interop.merged(readings, profile, interop.Speed(options["flops_per_s"], options["memory_bytes"]))
    for reading in readings:
        for remark in (*reading.remarks, *(interop.unnamed(reading) if profile is None else ())):
            say(remark)
    if profile is None:
        for flag in found.flags:
            say(flag.what)
    else:
        _name_replaced_values(found, profile)
        name_dropped_collectives(found, profile, output=output)
    _write(found, output, as_json)
    if profile is not None and output is not None and found.flags:
        count = len(found.flags)
        say(f"{counted(count, 'flag')}; `hwaware show {output}` lists {'it' if count == 1 else 'them'}.")


def _name_replaced_values(found: ClusterProfile, earlier: ClusterProfile) -> None:
    """Print one line for each rate or latency that differs; the opposite direction serves where one was missing."""
    known = {(link.source, link.target): link for link in earlier.links}
    table, devices = LinkTable(earlier), {device.id for device in earlier.devices}
    for link in found.links:
        ends = (link.source, link.target)
        before = table.between(*ends) if devices.issuperset(ends) else known.get(ends, known.get(ends[::-1]))
        for name, quantity in (("bandwidth_bytes_per_s", BYTES_PER_S), ("latency_s", SECONDS)):
            if before is not None and getattr(before, name) != getattr(link, name):
                values = (text(getattr(one, name), quantity) for one in (before, link))
                say(f"Replaced {' -> '.join(ends)}: {' -> '.join(values)}.")


def _renamed(words: Sequence[str]) -> Dict[str, str]:
    found: Dict[str, str] = {}
    for word in words:
        old, _, new = word.partition("=")
        if not old or not new:
            raise UnusableInputError(f"--rename has {word!r}, expected OLD=NEW.", "write --rename node1=h0.")
        if found.get(old, new) != new:
            raise UnusableInputError(
                f"--rename gives {old} two names, {found[old]} and {new}.", "leave one of them out."
            )
        found[old] = new
    return found


def _require_output(output: Optional[str], as_json: bool) -> None:
    if output is None and not as_json:
        raise UnusableInputError("There is nowhere to write the profile to.", "give -o cluster.json, or --json.")


def _write(found: ClusterProfile, output: Optional[str], as_json: bool) -> None:
    if output is not None:
        found.save(output)
        counts: Tuple[Tuple[int, str], ...] = (
            (len(found.hosts), "host"),
            (len(found.devices), "device"),
            (len(found.links), "link"),
            (len(found.collectives), "collective"),
        )
        say(f"{output}: {', '.join(counted(count, name) for count, name in counts)}.")
    if as_json:
        print_document(found.to_json().decode())
