"""hwaware show: any of hwaware's files as tables and pictures."""

from __future__ import annotations

import importlib
from typing import Dict, Optional, Tuple, Type

import click

from hwaware.cli._run import json_option, reports_errors, say
from hwaware.errors import RecordError, UnusableInputError
from hwaware.records import FileRecord, decode_document, read_bytes

# schema -> where its record is
RECORDS: Dict[str, Tuple[str, str]] = {
    "hwaware.cluster": ("hwaware.cluster", "ClusterProfile"),
    "hwaware.workload": ("hwaware.workload", "Workload"),
    "hwaware.plan": ("hwaware.plans", "Plan"),
    "hwaware.benchmark": ("hwaware.result", "BenchmarkResult"),
}


@click.command()
@click.argument("file", type=click.Path())
@click.option("--plot", "picture", type=click.Path(dir_okay=False), help="Also draw it to this file (.png or .svg).")
@json_option
@reports_errors
def command(file: str, picture: Optional[str], as_json: bool) -> None:
    """Any of hwaware's files (cluster, workload, plan, results) as tables and pictures.

    \b
    Example:
        hwaware show cluster.json --plot cluster.png
    """
    record = load_any(file)
    if picture is not None:
        _draw(record, picture)
    if as_json:
        click.echo(record.to_json(), nl=False)
    else:
        from hwaware.report.tables import show

        show(record)


def load_any(path: str) -> FileRecord:
    """The record in a file, of whichever schema the file names.

    Raises:
        RecordError: The file cannot be read, names no known schema, or is not valid.
    """
    data = read_bytes(path)
    schema = decode_document(data, path).get("schema")
    home = RECORDS.get(schema) if isinstance(schema, str) else None
    if home is None:
        raise RecordError(
            f"{path} has schema {schema!r}, expected one of {', '.join(RECORDS)}.", "show a file that hwaware wrote."
        )
    record_type: Type[FileRecord] = getattr(importlib.import_module(home[0]), home[1])
    return record_type.from_json(data, name=path)


def _draw(record: FileRecord, path: str) -> None:
    try:
        from hwaware.report.plots import plot
    except ImportError as error:
        raise UnusableInputError(f"Pictures need matplotlib: {error}.", "pip install hwaware[plots]") from error
    plot(record, path)
    say(f"{path}: drawn.")
