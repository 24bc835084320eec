"""Make the console for tables: as wide as the terminal, and plain outside one."""

from __future__ import annotations

import os

from rich.console import Console

# Fits the widest table into a file or a pipe, which has no width; COLUMNS changes it.
WIDTH_WITHOUT_TERMINAL = 160


def make_console() -> Console:
    """Return a console on standard output that obeys NO_COLOR, and prints words as they are.

    By default, rich takes square brackets for styles, and parts of names such as :key: for emoji. The width is that of
    the terminal, else COLUMNS, else `WIDTH_WITHOUT_TERMINAL`.
    """
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH_WITHOUT_TERMINAL
    return console
