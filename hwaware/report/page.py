"""Write tables and pictures of a record as one HTML page without network, scripts or fonts."""

from __future__ import annotations

import html
from typing import Any, List, Optional, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from hwaware._version import __version__
from hwaware.errors import UnusableInputError
from hwaware.records import FileRecord, PathLike, write_bytes
from hwaware.report import canvas
from hwaware.report.flags import flag_lines, flags_heading
from hwaware.report.plots import Context, drawings
from hwaware.report.tables import render

# With this policy a browser fetches nothing, whatever the page holds.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff; margin: 2rem auto; max-width: 82rem;
       padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { caption-side: bottom; text-align: left; color: #555; padding-top: .3rem; }
th, td { padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: left; }
th { border-bottom-color: #555; } .n { text-align: right; }
figure { margin: 0; overflow-x: auto; } svg { max-width: 100%; height: auto; }
pre { white-space: pre-wrap; }
.scroll { overflow-x: auto; } footer { margin-top: 3rem; color: #555; font-size: .85rem; }
"""
_TITLES = {
    "cluster": "Cluster",
    "workload": "Workload",
    "plan": "Stages",
    "map": "Stages and the links between them",
    "timeline": "One step, event by event",
    "sensitivity": "What would help",
    "result": "Measured and predicted steps",
}


def save_page(record: FileRecord, path: PathLike, name: str, context: Optional[Context] = None) -> None:
    """Write tables and every picture of a record as one page.

    Args:
        record: The record to show.
        path: The .html file.
        name: Title of the page, e.g. the name of the record's file.
        context: Profile and workload that a plan's timeline and sensitivity need; the page shows them too.
    """
    context = context or Context()
    canvas.pyplot()  # without matplotlib, no part of the page is written
    records = [record, *(other for other in context if isinstance(other, FileRecord))]
    sections = [_section(each, context) for each in records]
    sections.append(_doubts(record, name))
    title = html.escape(f"{name}: {record.SCHEMA}")
    write_bytes(path, as_page(title, "".join(sections)).encode(errors="replace"))  # a file's name may be no text


def as_page(title: str, body: str) -> str:
    """Return a whole page around a body; title and body are HTML already."""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_STYLE}</style>\n</head>\n'
        f"<body>\n<h1>{title}</h1>\n{body}\n<footer>Made by hwaware {__version__}.</footer>\n"
        "</body>\n</html>\n"
    )


def _section(record: FileRecord, context: Context) -> str:
    shown = render(record)
    parts = [table_html(table) for table in _tables(shown)]
    if isinstance(shown, Text):  # a plan without stages says why
        parts.append(f"<pre>{html.escape(shown.plain)}</pre>\n")
    for name, draw in drawings(record, context).items():
        try:
            picture = canvas.svg_text(draw(), name)
        except UnusableInputError as error:  # such as a step of too many events: the page says why in its place
            picture = f"<pre>{html.escape(str(error))}</pre>"
        parts.append(f'<h2>{_TITLES[name]}</h2>\n<figure id="{name}">{picture}</figure>\n')
    return f"<section>\n{''.join(parts)}</section>\n"


def _doubts(record: FileRecord, file: str) -> str:
    """Return the flags of a profile as HTML, or nothing."""
    if not getattr(record, "flags", None):
        return ""
    lines = html.escape("\n".join(flag_lines(record, file)))
    return f"<section>\n<h2>{flags_heading(record)}</h2>\n<pre>{lines}</pre>\n</section>\n"


def _tables(renderable: Any) -> List[Table]:
    if isinstance(renderable, Group):
        return [table for inner in renderable.renderables for table in _tables(inner)]
    return [renderable] if isinstance(renderable, Table) else []


def table_html(table: Table) -> str:
    """Return a rich table as an HTML table, with the same alignment."""
    classes = [' class="n"' if column.justify == "right" else "" for column in table.columns]
    rows = zip(*(column.cells for column in table.columns))
    head = _row("th", [column.header for column in table.columns], classes)
    body = "\n".join(_row("td", list(row), classes) for row in rows)
    caption = f"<caption>{_plain(table.caption)}</caption>\n" if table.caption else ""
    title = f"<h2>{_plain(table.title)}</h2>\n" if table.title else ""
    return (
        f'{title}<div class="scroll"><table>\n{caption}<thead>{head}</thead>\n<tbody>{body}</tbody>\n</table></div>\n'
    )


def _row(tag: str, cells: Sequence[Any], classes: Sequence[str]) -> str:
    shown = (f"<{tag}{css}>{_plain(cell)}</{tag}>" for cell, css in zip(cells, classes))
    return f"<tr>{''.join(shown)}</tr>"


def _plain(cell: Any) -> str:
    """Return the words of a cell, escaped for HTML."""
    return html.escape(str(cell))  # of rich's Text, its words
