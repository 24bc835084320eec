"""A table that fits the terminal: it folds headers first, then names, and becomes a list before it loses a number."""

from __future__ import annotations

from typing import Any, Iterator, List, Optional, Sequence, Tuple

from rich import box
from rich.console import Console, ConsoleOptions
from rich.table import Column as RichColumn
from rich.table import Table
from rich.text import Text

# Header and cells; text is aligned left, numbers right.
Column = Tuple[str, Sequence[str]]
# Between two columns.
_GAP = 2
# No column of names is kept wider than this: names of hosts may be long.
_LONGEST_WORD = 16
# Headers are folded to no fewer letters than this.
_FOLDED = 5


class FittingTable(Table):
    """A rich table that is drawn as a list of its rows where its numbers would not fit side by side."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        room = options.max_width - _GAP * len(self.columns)
        for with_headers in (True, False):
            widths = [_least_width(column, with_headers) for column in self.columns]
            if sum(widths) <= room:
                # Rich would take width from all columns alike, and cut off what then does not fit.
                for column, width in zip(self.columns, _widened(widths, self.columns, room)):
                    column.width = width
                yield from super().__rich_console__(console, options)
                return
        yield from self._as_list()

    def _as_list(self) -> Iterator[Text]:
        if self.title:
            yield Text.from_markup(str(self.title), style="bold")
        headers = [_plain(column.header) for column in self.columns]
        for row in zip(*(column.cells for column in self.columns)):
            for index, (header, cell) in enumerate(zip(headers, row)):
                yield Text(f"{'' if index == 0 else '  '}{header}: {_plain(cell)}")
        if self.caption:
            yield Text.from_markup(str(self.caption))


def build_table(
    title: Optional[str], names: Sequence[Column], numbers: Sequence[Column], caption: Optional[str] = None
) -> FittingTable:
    """A table with columns of names and columns of numbers; square brackets in headers and cells are kept.

    Args:
        title: Above the table, in rich's markup.
        names: Headers and texts.
        numbers: Headers, with units, and numbers as texts.
        caption: Below the table, in rich's markup.
    """
    table = FittingTable(title=title, title_justify="left", title_style="bold", caption=caption)
    table.caption_justify = "left"
    table.box, table.pad_edge, table.show_edge, table.padding = box.SIMPLE_HEAD, False, False, (0, 1, 0, 0)
    for header, _ in names:
        table.add_column(literal(header), overflow="fold")
    for header, _ in numbers:
        table.add_column(literal(header), justify="right", overflow="fold")
    for row in zip(*(cells for _, cells in (*names, *numbers))):
        table.add_row(*(literal(cell) for cell in row))
    return table


def literal(words: str) -> str:
    """Words whose square brackets are not rich's markup."""
    return words.replace("[", r"\[")


def _plain(cell: Any) -> str:
    return Text.from_markup(str(cell)).plain


def _least_width(column: RichColumn, with_header: bool) -> int:
    """How narrow a column may be: its numbers whole, its names word by word, and its header too if that is asked."""
    cells = [_plain(cell) for cell in column.cells]
    if column.justify != "right":
        cells = _words(cells)
    words = _words([_plain(column.header)])
    header = words if with_header else [word[:_FOLDED] for word in words]
    longest = max(map(len, [*cells, *header]), default=1)
    return longest if column.justify == "right" else min(_LONGEST_WORD, longest)


def _widened(widths: Sequence[int], columns: Sequence[RichColumn], room: int) -> List[int]:
    """The widths with what is left of the room given out, one by one, to columns that would still fold."""
    wanted = [max(len(_plain(cell)) for cell in (column.header, *column.cells)) for column in columns]
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
