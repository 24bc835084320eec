"""Compare two results, profiles or plans, with the significance of differences: `hwaware compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Tuple

import click

from hwaware.cli._run import json_option, print_json, reports_errors

if TYPE_CHECKING:
    from rich.table import Table

    from hwaware.bench.differences import Comparison

_FIRST = {
    "hwaware.benchmark": "mapping (median step)",
    "hwaware.cluster": "device or link (largest size in both)",
    "hwaware.plan": "figure",
}


@click.command()
@click.argument("a", type=click.Path(), metavar="A.json")
@click.argument("b", type=click.Path(), metavar="B.json")
@json_option
@reports_errors
def command(a: str, b: str, as_json: bool) -> None:
    """Compare two results (of demo or bench), two profiles or two plans: times, ratios and verdicts.

    A ratio is the time in B.json divided by the time in A.json. "faster" and "slower" speak of B.json. The verdict
    "same" means that the 95 % interval of the ratio contains 1: the measurements show no difference. Fewer than six
    measurements give "too few points", unless the ratio is at least 2 or at most 1/2.

    Two plans are compared by their predicted times, with the stages in which they differ. Predictions that differ by
    less than their usual errors are "too close to call".

    \b
    Examples:
        hwaware compare cluster.json.before cluster.json
        hwaware compare before/result.json after/result.json
        hwaware compare exact.json annealing.json
    """  # noqa: D301
    from hwaware.bench.differences import compare
    from hwaware.cli.show import load_any

    found = compare(load_any(a), load_any(b), _short(a, b))
    if as_json:
        print_json({"a": a, "b": b, **found.document()})
    else:
        _print(found)


def _short(a: str, b: str) -> Tuple[str, str]:
    """Return the shortest ends of two paths that differ, such as before/result.json and after/result.json."""
    parts = [Path(path).parts for path in (a, b)]
    for length in range(1, max(map(len, parts))):
        ends = [str(Path(*one[-length:])) for one in parts]
        if ends[0] != ends[1]:
            return ends[0], ends[1]
    return a, b


def _print(found: Comparison) -> None:
    from hwaware.report.console import make_console

    console = make_console()
    if found.differences:
        console.print(_table(found))
    for line in found.remarks():
        console.print(line)


def _table(found: Comparison) -> Table:
    """Return one row for each thing that both files have; every time names its own unit."""
    from hwaware.bench.differences import VERDICTS
    from hwaware.formatting import MISSING, SECONDS, text
    from hwaware.report.fitting import build_table

    rows = found.differences
    names = [
        (_FIRST[found.schema], [row.what for row in rows]),
        ("verdict", [VERDICTS[row.verdict] for row in rows]),
    ]
    numbers = [
        (found.names[0], [text(row.a_s, SECONDS) for row in rows]),
        (found.names[1], [text(row.b_s, SECONDS) for row in rows]),
        ("ratio", [f"{row.ratio.median:.3f}" for row in rows]),
    ]
    if found.schema != "hwaware.plan":  # predictions have no noise
        intervals = [f"{'range ' * bool(row.sizes)}{row.ratio.low:.3f}-{row.ratio.high:.3f}" for row in rows]
        intervals = [MISSING if row.verdict == "kept" else one for row, one in zip(rows, intervals)]
        numbers += [("95 % interval", intervals), ("points", [str(row.points) for row in rows])]
    return build_table(None, names, numbers)
