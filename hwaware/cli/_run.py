"""What every command shares: errors as one message with an exit code, `--json`, where words go, and waiting."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import signal
import sys
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, TextIO, TypeVar

import click

from hwaware.errors import HwawareError
from hwaware.records import require_writable

F = TypeVar("F", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")

INTERRUPTED = 130
# What ends a program; Windows has no SIGHUP.
_ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
# Where the JSON document goes while everything else that is printed goes to standard error; the newest last.
_results: List[TextIO] = []


def reports_errors(function: F) -> F:
    """Print a HwawareError as one message on standard error and exit with its code; Ctrl-C exits with 130.

    Being terminated (SIGTERM, 143) or losing the terminal (SIGHUP, 129) cleans up as Ctrl-C does: no testbed or cluster
    is left behind.

    An `output` where nothing can be written is refused before the command runs, however long it would take.

    With `--json`, whatever a library prints on standard output meanwhile goes to standard error: only `print_json` and
    `print_document` reach standard output.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            if kwargs.get("output") is not None:
                require_writable(kwargs["output"])
            with _cleaning_up_when_terminated(), _results_only() if kwargs.get("as_json") else contextlib.nullcontext():
                return function(*args, **kwargs)
        except HwawareError as error:
            click.echo(f"Error: {error}", err=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            sys.exit(INTERRUPTED)

    return wrapped  # type: ignore[return-value]  # functools.wraps keeps the signature, mypy cannot see it


@contextlib.contextmanager
def _cleaning_up_when_terminated() -> Iterator[None]:
    """SIGTERM and SIGHUP leave every open context, where nothing else handles them; only the main thread can say so."""
    is_main = threading.current_thread() is threading.main_thread()
    taken = [one for one in _ENDING if is_main and signal.getsignal(one) == signal.SIG_DFL]
    for one in taken:
        signal.signal(one, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for one in taken:
            signal.signal(one, signal.SIG_DFL)


@contextlib.contextmanager
def _results_only() -> Iterator[None]:
    """Keep standard output for the JSON document: prints, child processes and C libraries go to standard error."""
    with _result_stream() as stream, contextlib.redirect_stdout(sys.stderr):
        _results.append(stream)
        try:
            yield
        finally:
            _results.pop()


@contextlib.contextmanager
def _result_stream() -> Iterator[TextIO]:
    """Standard output as it was, with the file descriptor that others write to turned to standard error."""
    try:
        is_real = sys.stdout.fileno() == 1
    except (io.UnsupportedOperation, AttributeError):  # a test's or a notebook's replacement
        is_real = False
    if not is_real:
        yield sys.stdout
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(kept, "w", encoding="utf-8", closefd=False) as stream:
            yield stream
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def say(message: str) -> None:
    """A line for the person at the terminal: standard error, so that standard output stays for results."""
    click.echo(message, err=True)


def print_json(document: Dict[str, Any]) -> None:
    """The one JSON document of a command run with `--json`."""
    print_document(json.dumps(document, indent=2, allow_nan=False) + "\n")


def print_document(text: str) -> None:
    """As `print_json`, for a document that is text already."""
    click.echo(text, nl=False, file=_results[-1] if _results else None)


@contextlib.contextmanager
def waiting(what: str, limit_s: Optional[float] = None) -> Iterator[None]:
    """Show on a terminal what is waited for, for how long already, and the limit; silent elsewhere."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns: List[Any] = [SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
    if limit_s is not None:
        columns.append(TextColumn(f"of at most {limit_s:g} s"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bars.add_task(what, total=None)
        yield
