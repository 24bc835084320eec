"""Compare two results or two profiles, with the significance of differences: `hwaware compare`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hwaware.cli._run import json_option, print_json, reports_errors

if TYPE_CHECKING:
    from rich.table import Table

    from hwaware.bench.differences import Comparison

_FIRST = {"hwaware.benchmark": "mapping (median step)", "hwaware.cluster": "device or link (largest size in both)"}


@click.command()
@click.argument("a", type=click.Path(dir_okay=False), metavar="A.json")
@click.argument("b", type=click.Path(dir_okay=False), metavar="B.json")
@json_option
@reports_errors
def command(a: str, b: str, as_json: bool) -> None:
    """Compare two results (of demo or bench) or two profiles: ratio B / A, its 95 % interval, and a verdict.

    The verdict "same" means that the interval holds 1: the measurements show no difference. Fewer
    than six measurements give "too few points".

    \b
    Example:
        hwaware compare before/result.json after/result.json
    """  # noqa: D301
    from hwaware.bench.differences import compare
    from hwaware.cli.show import load_any

    found = compare(load_any(a), load_any(b))
    if as_json:
        print_json({"a": a, "b": b, **found.document()})
    else:
        _print(found)


def _print(found: Comparison) -> None:
    from hwaware.report.console import make_console

    console = make_console()
    if found.differences:
        console.print(_table(found))
    for line in found.remarks():
        console.print(line, highlight=False, markup=False)


def _table(found: Comparison) -> Table:
    """Return one row for each thing that both files measured; every time names its own unit."""
    from hwaware.bench.differences import VERDICTS
    from hwaware.formatting import SECONDS, text
    from hwaware.report.fitting import build_table

    rows = found.differences
    names = [
        (_FIRST[found.schema], [row.what for row in rows]),
        ("verdict", [VERDICTS[row.verdict] for row in rows]),
    ]
    numbers = [
        ("A", [text(row.a_s, SECONDS) for row in rows]),
        ("B", [text(row.b_s, SECONDS) for row in rows]),
        ("B / A", [f"{row.ratio.median:.3f}" for row in rows]),
        ("95 % interval", [f"{row.ratio.low:.3f}-{row.ratio.high:.3f}" for row in rows]),
        ("points", [str(row.points) for row in rows]),
    ]
    return build_table(None, names, numbers)
