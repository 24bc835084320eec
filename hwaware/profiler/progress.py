"""Show the progress of a measurement to the person who waits."""

from __future__ import annotations

import sys
from typing import Any, Optional, Protocol


class Progress(Protocol):
    """Receive the profiler's reports."""

    def phase(self, name: str, steps: int) -> None:
        """Begin a new phase of that many steps."""

    def step(self) -> None:
        """Note that one step of the phase is done."""

    def close(self) -> None:
        """End the reports."""


class Silent:
    """Report nothing."""

    def phase(self, name: str, steps: int) -> None:
        """See `Progress`."""

    def step(self) -> None:
        """See `Progress`."""

    def close(self) -> None:
        """See `Progress`."""


class Lines:
    """Print one line per phase to standard error, for logs."""

    def phase(self, name: str, steps: int) -> None:
        """See `Progress`."""
        print(f"{name} ...", file=sys.stderr, flush=True)

    def step(self) -> None:
        """See `Progress`."""

    def close(self) -> None:
        """See `Progress`."""


class Bars:
    """Show a bar per phase on the terminal's standard error, with its rate and the remaining time."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description:<28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
        )
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self._bars: Any = Progress(*columns, *times, console=Console(stderr=True))
        self._task: Optional[Any] = None
        self._bars.start()

    def phase(self, name: str, steps: int) -> None:
        """See `Progress`."""
        self._task = self._bars.add_task(name, total=steps, rate="")

    def step(self) -> None:
        """See `Progress`."""
        self._bars.advance(self._task)
        [task] = [task for task in self._bars.tasks if task.id == self._task]
        if task.elapsed:
            self._bars.update(self._task, rate=f"{task.completed / task.elapsed:.1f}/s")

    def close(self) -> None:
        """See `Progress`."""
        self._bars.stop()


def for_terminal() -> Progress:
    """Return bars if standard error is a terminal, else a line per phase."""
    return Bars() if sys.stderr.isatty() else Lines()
