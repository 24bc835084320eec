"""Fit tables to the terminal: fold headers, then names, and print a list rather than cut a number."""

from __future__ import annotations

from typing import Any, Iterator, List, Optional, Sequence, Tuple

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.table import Column as RichColumn
from rich.table import Table
from rich.text import Text

# Header and cells; text is aligned left, numbers right.
Column = Tuple[str, Sequence[str]]
# Spaces between two columns.
_GAP = 2
# Names fold at this width if room is short: host names may be long.
_LONGEST_WORD = 16
# Headers fold to no fewer letters than this.
_FOLDED = 5


class FittingTable(Table):
    """A rich table that prints a list of its rows where its numbers do not fit side by side."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        room = options.max_width - _GAP * len(self.columns)
        for with_headers in (True, False):
            widths = [_least_width(column, with_headers) for column in self.columns]
            if sum(widths) <= room:
                # Rich would shrink all columns alike, and cut off what then does not fit.
                for column, width in zip(self.columns, _widened(widths, self.columns, room)):
                    column.width = width
                yield from self._side_by_side(console, options)
                return
        yield from self._as_list()

    def _side_by_side(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        """Yield the table. Rich would fold the title and the caption to the width of a narrow table."""
        title, caption = self.title, self.caption
        self.title = self.caption = None
        try:
            rows = [*super().__rich_console__(console, options)]
        finally:
            self.title, self.caption = title, caption
        yield from (one for one in (title, *rows, caption) if one)

    def _as_list(self) -> Iterator[Text]:
        if self.title:
            yield Text(str(self.title), style="bold")
        headers = [column.header for column in self.columns]
        for row in zip(*(column.cells for column in self.columns)):
            for index, (header, cell) in enumerate(zip(headers, row)):
                yield Text(f"{'' if index == 0 else '  '}{header}: {cell}")
        if self.caption:
            yield Text(str(self.caption))


def build_table(
    title: Optional[str], names: Sequence[Column], numbers: Sequence[Column], caption: Optional[str] = None
) -> FittingTable:
    """Build a table of names and numbers; all words stay as they are.

    Args:
        title: Line above the table.
        names: Columns aligned left, as (header, texts).
        numbers: Columns aligned right, as (header with its unit, numbers as texts).
        caption: Text below the table.
    """
    table = FittingTable(title_justify="left", caption_justify="left")
    table.title = None if title is None else Text(title, style="bold")
    table.caption = None if caption is None else Text(caption, style="table.caption")
    table.box, table.pad_edge, table.show_edge, table.padding = box.SIMPLE_HEAD, False, False, (0, 1, 0, 0)
    for header, _ in names:
        table.add_column(Text(header), overflow="fold")
    for header, _ in numbers:
        table.add_column(Text(header), justify="right", overflow="fold")
    for row in zip(*(cells for _, cells in (*names, *numbers))):
        table.add_row(*map(Text, row))
    return table


def _least_width(column: RichColumn, with_header: bool) -> int:
    """Return how narrow a column may be: whole numbers, names word by word, and headers too if asked."""
    cells = [*map(str, column.cells)]
    if column.justify != "right":
        cells = _words(cells)
    words = str(column.header).split()
    header = words if with_header else [word[:_FOLDED] for word in words]
    longest = max(map(cell_len, [*cells, *header]), default=1)  # Chinese letters are two columns wide
    return longest if column.justify == "right" else min(_LONGEST_WORD, longest)


def _widened(widths: Sequence[int], columns: Sequence[RichColumn], room: int) -> List[int]:
    """Return the widths after sharing out the left room, character by character, among columns that still fold."""
    wanted = [max(cell_len(str(cell)) for cell in (column.header, *column.cells)) for column in columns]
    given, left = list(widths), room - sum(widths)
    while left > 0:
        narrow = [k for k in range(len(given)) if given[k] < wanted[k]]
        if not narrow:
            break
        for k in narrow[:left]:
            given[k] += 1
        left -= len(narrow[:left])
    return given


def _words(texts: Sequence[str]) -> List[str]:
    return [word for text in texts for word in text.split()]
