"""Print the script that completes commands, options and file names in a shell: `hwaware completion`."""

from __future__ import annotations

import click

from hwaware.cli._run import json_option, print_json, reports_errors

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@json_option
@reports_errors
def command(shell: str, as_json: bool) -> None:
    """Print the script that completes hwaware's commands and options in SHELL.

    Run your shell's line once for this session. For every session, put it into ~/.bashrc, ~/.zshrc or
    ~/.config/fish/config.fish.

    \b
    Examples:
        eval "$(hwaware completion bash)"              # or zsh
        hwaware completion fish | source
    """  # noqa: D301
    script = completion_script(shell)
    if as_json:
        print_json({"shell": shell, "script": script})
        return
    click.echo(script)


def completion_script(shell: str) -> str:
    """Return click's completion script of a shell, for the program hwaware."""
    from click.shell_completion import get_completion_class

    from hwaware.cli import main

    maker = get_completion_class(shell)
    assert maker is not None, shell  # click knows the three
    return maker(main, {}, "hwaware", "_HWAWARE_COMPLETE").source()
