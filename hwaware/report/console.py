"""The console that tables are printed on: as wide as the terminal, without colour where there is none."""

from __future__ import annotations

import os

from rich.console import Console

# Wide enough for the widest table where there is no terminal to ask (a file, a pipe); COLUMNS changes it.
WIDTH_WITHOUT_TERMINAL = 160


def make_console() -> Console:
    """Standard output: the terminal's width, or COLUMNS, or `WIDTH_WITHOUT_TERMINAL`; NO_COLOR is respected."""
    console = Console()
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(width=WIDTH_WITHOUT_TERMINAL)
