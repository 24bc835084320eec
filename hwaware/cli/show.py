"""Show any of hwaware's files as tables, pictures or a page: `hwaware show`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Dict, Optional, Tuple, Type

import click

from hwaware.cli._run import json_option, print_document, reports_errors, say, waiting
from hwaware.errors import RecordError, UnusableInputError
from hwaware.formatting import counted
from hwaware.records import FileRecord, decode_document, read_bytes

if TYPE_CHECKING:
    from hwaware.report.plots import Context

# Schema -> module and name of its record.
RECORDS: Dict[str, Tuple[str, str]] = {
    "hwaware.cluster": ("hwaware.cluster", "ClusterProfile"),
    "hwaware.workload": ("hwaware.workload", "Workload"),
    "hwaware.plan": ("hwaware.plans", "Plan"),
    "hwaware.timeline": ("hwaware.timeline", "Timeline"),
    "hwaware.benchmark": ("hwaware.result", "BenchmarkResult"),
    "hwaware.history": ("hwaware.history", "History"),
    "hwaware.partial_cluster": ("hwaware.cluster", "PartialProfile"),
    "hwaware.load": ("hwaware.adapting.loads", "LoadTrace"),
}
PICTURES = ("cluster", "workload", "plan", "map", "timeline", "sensitivity", "result")


@click.command()
@click.argument("file", type=click.Path())
@click.option(
    "--plot",
    "plotted",
    type=click.Path(dir_okay=False),
    help="Also draw a picture to this file: .png, .svg, or another format of matplotlib.",
)
@click.option("--picture", type=click.Choice(PICTURES), help="Picture that --plot draws. [the file's usual one]")
@click.option("--html", "page", type=click.Path(dir_okay=False), help="Write all tables and pictures as one page.")
@click.option("--cluster", type=click.Path(), help="For a plan: the cluster that it runs on.")
@click.option("--workload", type=click.Path(), help="For a plan: the workload that it runs.")
@json_option
@reports_errors
def command(
    file: str,
    plotted: Optional[str],
    picture: Optional[str],
    page: Optional[str],
    cluster: Optional[str],
    workload: Optional[str],
    as_json: bool,
) -> None:
    """Show any of hwaware's files (cluster, workload, plan, trace, results) as tables and pictures.

    With --cluster, a plan's picture adds hosts and capacities. The pictures timeline and sensitivity (what would
    shorten the step) need --workload too. A page (--html) holds all tables and pictures, and works offline.

    \b
    One picture:
        hwaware show cluster.json --plot cluster.png
        hwaware show trace.json --plot step.svg

    \b
    All pictures of a plan, on one page:
        hwaware show plan.json --cluster cluster.json --workload workload.json --html plan.html

    \b
    Changes that would shorten its step:
        hwaware show plan.json --cluster cluster.json --workload workload.json --picture sensitivity --plot what.png
    """  # noqa: D301
    record = load_any(file)
    if picture is not None and plotted is None:
        raise UnusableInputError(f"--picture {picture} has no file to go to.", "add --plot out.png.")
    if (cluster or workload) and plotted is None and page is None:
        what = "--cluster and --workload are for pictures of a plan, and there is neither --plot nor --html."
        raise UnusableInputError(what, "add --plot out.png, or price the plan on a cluster by `hwaware evaluate`.")
    if plotted is not None or page is not None:
        context = _context(record, cluster, workload)
        with waiting("Drawing ..."):
            _draw(record, context, plotted, picture, page, Path(file).name)
    if as_json:
        print_document(record.to_json().decode())
    else:
        from hwaware.report.tables import show

        _show_unfinished(record, file)
        show(record)
        _show_flags(record, file)


def _show_unfinished(record: FileRecord, file: str) -> None:
    """Print one line if the record is an unfinished profile, with the command that completes it."""
    from hwaware.cluster import PartialProfile

    if isinstance(record, PartialProfile):
        from hwaware.report.flags import going_on

        counts = f"{counted(len(record.devices), 'device')}, {counted(len(record.links), 'link')}"
        click.echo(f"Unfinished profile: {counts}; go on with: {going_on(record, file)}")


def _show_flags(record: FileRecord, file: str) -> None:
    """Print what the profiler found doubtful or slow, with commands that measure just this again."""
    if getattr(record, "flags", None):
        from hwaware.report.flags import show_flags

        show_flags(record, file)


def load_any(path: str) -> FileRecord:
    """Read a record from a file of any known schema; a trace of `simulate` becomes its Timeline.

    Raises:
        RecordError: The file cannot be read, names no known schema, or is not valid.
    """
    data = read_bytes(path)
    document = decode_document(data, path)
    if "traceEvents" in document:
        from hwaware.timeline import Timeline

        return Timeline.from_trace(document, name=path)
    schema = document.get("schema")
    home = RECORDS.get(schema) if isinstance(schema, str) else None
    if home is None:
        has = 'no "schema"' if schema is None else f"schema {schema!r}"
        raise RecordError(
            f"{path} has {has}, expected one of {', '.join(RECORDS)}.",
            "give a file with one of these schemas; `hwaware import` reads other programs' files.",
            found=schema,
            expected=tuple(RECORDS),
        )
    record_type: Type[FileRecord] = getattr(importlib.import_module(home[0]), home[1])
    return record_type.from_json(data, name=path)


def _context(record: FileRecord, cluster: Optional[str], workload: Optional[str]) -> Context:
    """Load the records that a plan needs for its pictures; refuse them beside any other file."""
    from hwaware.cluster import ClusterProfile
    from hwaware.workload import Workload

    if (cluster or workload) and record.SCHEMA != "hwaware.plan":
        what = f"--cluster and --workload belong to a plan, not to a {record.SCHEMA}."
        raise UnusableInputError(what, "leave them out.")
    from hwaware.report.plots import Context

    profile = None if cluster is None else ClusterProfile.load(cluster)
    return Context(profile, None if workload is None else Workload.load(workload))


def _draw(
    record: FileRecord, context: Context, plotted: Optional[str], picture: Optional[str], page: Optional[str], name: str
) -> None:
    if plotted is not None:
        from hwaware.report.plots import plot

        plot(record, plotted, picture, context)
        say(f"{plotted}: drawn.")
    if page is not None:
        from hwaware.report.page import save_page

        save_page(record, page, name, context)
        say(f"{page}: written; open it in a browser.")
