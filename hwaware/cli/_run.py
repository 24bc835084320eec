"""What every command shares: errors as one message with an exit code, `--json`, and where words go."""

from __future__ import annotations

import functools
import json
import sys
from typing import Any, Callable, Dict, TypeVar

import click

from hwaware.errors import HwawareError

F = TypeVar("F", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")


def reports_errors(function: F) -> F:
    """Print a HwawareError as one message on standard error and exit with its code; Ctrl-C exits with 130."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except HwawareError as error:
            click.echo(f"Error: {error}", err=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            sys.exit(130)

    return wrapped  # type: ignore[return-value]  # functools.wraps keeps the signature, mypy cannot see it


def say(message: str) -> None:
    """A line for the person at the terminal: standard error, so that standard output stays for results."""
    click.echo(message, err=True)


def print_json(document: Dict[str, Any]) -> None:
    """The one JSON document of a command run with `--json`."""
    click.echo(json.dumps(document, indent=2, allow_nan=False))
