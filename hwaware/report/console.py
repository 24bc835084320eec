"""Make the console for tables: as wide as the terminal, and plain outside one."""

from __future__ import annotations

import os

from rich.console import Console

# Fits the widest table into a file or a pipe, which has no width; COLUMNS changes it.
WIDTH_WITHOUT_TERMINAL = 160


def make_console() -> Console:
    """Return a console on standard output that obeys NO_COLOR.

    Its width is the terminal's, else COLUMNS, else `WIDTH_WITHOUT_TERMINAL`.
    """
    console = Console()
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(width=WIDTH_WITHOUT_TERMINAL)
