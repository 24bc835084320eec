"""Give every command its error messages and exit codes, `--json`, output streams and progress."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import json
import math
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Sequence, TextIO, TypeVar

import click

from hwaware.errors import HwawareError, UnusableInputError
from hwaware.formatting import counted
from hwaware.records import require_writable

if TYPE_CHECKING:
    from hwaware.cluster import AnyProfile

F = TypeVar("F", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")


class NumberRange(click.FloatRange):
    """Accept the numbers of a range, without NaN: no comparison with a bound refuses that."""

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> float:
        """Return the number of an option's value."""
        found: float = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value} is not a number.", param, ctx)
        return found


INTERRUPTED = 130
# A longer wait without a word looks like a hang.
_SILENT_S = 2.0
# Signals that end a program; Windows has no SIGHUP.
_ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_HANDLED_BY_NOBODY = (signal.SIG_DFL, signal.default_int_handler)
_IMPORTING = "<frozen importlib._bootstrap>"
# Time between two attempts to end, and longest wait for an import: JAX needs seconds.
_AGAIN_S, _IMPORT_LIMIT_S = 0.05, 20.0
# A full disk, quota or device behind standard output; click ends quietly where the reader of a pipe has gone.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Parameters that name a file or folder to write.
_OUTPUTS = ("output", "plotted", "page", "workload_output")
# Parameters that name a file to read, which an output must not replace. Some commands do renew a file: `profile` with
# --resume, `import` with --into, and `evaluate` its plan.
_INPUTS = ("cluster", "workload", "file", "files", "result", "plan", "measure", "load")
# Streams that take the JSON document while all other output goes to standard error; the newest last.
_results: List[TextIO] = []


def reports_errors(function: F) -> F:
    """Turn a command's errors into one message on standard error and an exit code.

    A HwawareError exits with its own code and Ctrl-C with 130. SIGTERM (143) and SIGHUP (129) clean up as Ctrl-C does,
    so that no testbed or cluster stays behind. Before the command runs, an output that cannot be written is an error.
    Two outputs with one path are an error, and so is an output with the path of an input.
    Standard output that is full is an error too. It gets escapes for characters that its encoding lacks.

    With `--json`, only `print_json` and `print_document` reach standard output. Everything that libraries print goes to
    standard error.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        _escape_unknown_characters()
        try:
            outputs = [kwargs[name] for name in _OUTPUTS if kwargs.get(name) is not None]
            for output in outputs:  # a file, or a folder of some commands
                require_writable(os.path.join(output, "file") if os.path.isdir(output) else output)
            if len({*map(os.path.realpath, outputs)}) < len(outputs):
                raise UnusableInputError(
                    f"The outputs {' and '.join(outputs)} are one file: the second would replace the first.",
                    "give each output a path of its own.",
                )
            _keep_inputs(kwargs, outputs)
            with cleaning_up_when_terminated(), _results_only() if kwargs.get("as_json") else contextlib.nullcontext():
                return function(*args, **kwargs)
        except HwawareError as error:
            click.echo(f"Error: {error}", err=True)
            sys.exit(error.exit_code)
        except OSError as error:
            exit_if_full(error)
            raise
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            sys.exit(INTERRUPTED)

    return wrapped  # type: ignore[return-value]  # functools.wraps keeps the signature; mypy cannot see that


def _keep_inputs(given: Dict[str, Any], outputs: Sequence[str]) -> None:
    """Refuse an output that would replace a file that the command reads."""
    replaced = {os.path.realpath(path): path for path in outputs}
    for name in _INPUTS:
        paths = given.get(name) or ()
        for path in (paths,) if isinstance(paths, str) else paths:
            if os.path.realpath(path) in replaced:
                raise UnusableInputError(
                    f"The output {replaced[os.path.realpath(path)]} would replace {path}, which the command reads.",
                    "give the output a path of its own.",
                )


def exit_if_full(error: OSError) -> None:
    """End the program with one message if the error says that standard output is full."""
    if error.errno in _FULL and error.filename is None:
        click.echo(f"Error: The output cannot be written: {error.strerror}. To fix: free space on the disk.", err=True)
        with contextlib.suppress(io.UnsupportedOperation):  # Python would write the rest at its end, and fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(HwawareError.exit_code)


def _escape_unknown_characters() -> None:
    """Let standard output escape what it cannot encode: Chinese in Latin-1, or undecodable bytes of a file's name."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def cleaning_up_when_terminated() -> Iterator[None]:
    """Make Ctrl-C, SIGTERM and SIGHUP leave every open context, unless something else handles them.

    Python allows handlers in the main thread alone, so other threads change nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    signals = (*_ENDING, signal.SIGALRM) if hasattr(signal, "SIGALRM") else _ENDING
    taken = {one: signal.getsignal(one) for one in signals if is_main and signal.getsignal(one) in _HANDLED_BY_NOBODY}
    ending = _Ending(can_wait=signals[-1] not in _ENDING and signals[-1] in taken, hook=sys.unraisablehook)
    for one in taken:
        signal.signal(one, ending.on_signal)
    if taken:
        sys.unraisablehook = ending.on_unraisable
    try:
        yield
    except (Exception, SystemExit):  # other code may have made another exception of it: Ray makes SystemExit(1)
        ending.end_if_asked()
        raise
    finally:
        if taken:
            sys.unraisablehook = ending.hook
        for one, handler in taken.items():
            signal.signal(one, handler)
    ending.end_if_asked()


class _Ending:
    """End the program by an exception, where no other code catches that exception.

    Some modules catch every exception of an optional import, and garbage collection drops exceptions.

    Args:
        can_wait: True if SIGALRM can wake the program for another attempt.
        hook: Receives other exceptions that Python drops.
    """

    def __init__(self, can_wait: bool, hook: Callable[[Any], Any]) -> None:
        self._can_wait = can_wait
        self.hook = hook
        self._number: Optional[int] = None
        self._first_s = 0.0

    def on_signal(self, number: int, frame: Optional[FrameType]) -> None:
        """Raise the exception that ends the program, or wait until an import is over."""
        if self._number is None:
            self._number, self._first_s = number, time.monotonic()
        if self._can_wait and _imports(frame) and time.monotonic() - self._first_s < _IMPORT_LIMIT_S:
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        else:
            self.end_if_asked()

    def end_if_asked(self) -> None:
        """Raise the exception if a signal has come."""
        if self._number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._number is not None:
            sys.exit(128 + self._number)

    def on_unraisable(self, dropped: Any) -> None:
        """Try again after Python has dropped the exception."""
        if self._can_wait and self._number is not None and dropped.exc_type in (SystemExit, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        else:
            self.hook(dropped)


def _imports(frame: Optional[FrameType]) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def _results_only() -> Iterator[None]:
    """Keep standard output for the JSON document, and turn all other output to standard error."""
    with _result_stream() as stream, contextlib.redirect_stdout(sys.stderr):
        _results.append(stream)
        try:
            yield
        finally:
            _results.pop()


@contextlib.contextmanager
def _result_stream() -> Iterator[TextIO]:
    """Yield the true standard output; child processes and C libraries write to standard error meanwhile."""
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
    """Print a line for the user on standard error, so that standard output holds results alone."""
    click.echo(message, err=True)


def print_json(document: Dict[str, Any]) -> None:
    """Print the one JSON document of a command run with `--json`."""
    print_document(json.dumps(document, indent=2, allow_nan=False) + "\n")


def print_document(text: str) -> None:
    """Print a document that is JSON text already, as `print_json` does."""
    click.echo(text, nl=False, file=_results[-1] if _results else None)


@contextlib.contextmanager
def waiting(what: str, limit_s: Optional[float] = None) -> Iterator[None]:
    """Show on a terminal what the command waits for, the time so far and the limit.

    Elsewhere, print one line on standard error if the wait takes longer than `_SILENT_S`.
    """
    if not sys.stderr.isatty():
        late = threading.Timer(_SILENT_S, say, (what,))
        late.daemon = True
        late.start()
        try:
            yield
        finally:
            late.cancel()
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns: List[Any] = [SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
    if limit_s is not None:
        columns.append(TextColumn(f"of at most {limit_s:g} s"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bars.add_task(what, total=None)
        yield


def enter_testbed(address: str) -> None:
    """Join the network of a testbed and take its environment, if the address is a testbed's.

    Call it before any thread starts: Linux moves no process with several threads into a user namespace.
    """
    if address in ("auto", "local"):
        return
    from hwaware.bench import testbed

    bed = testbed.find(address)
    if bed is not None:
        os.environ.update(bed.driver_environment())
        bed.enter()


def name_dropped_collectives(
    found: AnyProfile,
    earlier: AnyProfile,
    options: Sequence[str] = ("--address", "HOST:PORT"),
    output: Optional[str] = None,
) -> None:
    """Print one line if the profile no longer has collectives over links that were measured again."""
    left = {(one.op, one.devices) for one in found.collectives}
    dropped = [one for one in earlier.collectives if (one.op, one.devices) not in left]
    if dropped:
        file = output or "FILE"
        command = " ".join(["hwaware profile", *options, "--resume", file, "-o", file])
        say(
            f"Left out {counted(len(dropped), 'earlier collective')} over links that have new measurements. hwaware "
            f"now computes their times from the links. To measure them: {command}"
        )
