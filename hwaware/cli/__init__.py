"""The command line: a pipeline over files. Each command is a module of this package, imported when it runs."""

from __future__ import annotations

import importlib
from typing import List, Optional

import click

from hwaware import autoload
from hwaware._version import __version__

# name -> one line for --help. The module hwaware.cli.NAME holds the click command as `command`.
COMMANDS = {
    "doctor": "What is installed, what works with it, and the command that mends what does not.",
    "profile": "Measure the devices and links of a cluster.",
    "trace": "Work out what a model has to compute, store and send.",
    "plan": "Find the best placement of a workload on a cluster.",
    "evaluate": "Price a plan written by anyone.",
    "simulate": "Run one step of a plan, event by event, into a Chrome trace.",
    "show": "Any of hwaware's files as tables and pictures.",
    "compare": "Two results or two profiles: what differs, and whether that is significant.",
    "import": "Other programs' measurements as a cluster profile.",
    "export": "A cluster profile in other programs' formats.",
    "testbed": "A heterogeneous Ray cluster on this machine.",
    "bench": "Measure Alpa's mapping against hwaware's on real clusters.",
    "demo": "The whole way on one machine, in a few minutes.",
    "completion": "The script that completes commands and options in a shell.",
}


class _LazyGroup(click.Group):
    """Knows every command's name and summary, and imports a command's module only to run it or to show its help."""

    def list_commands(self, ctx: click.Context) -> List[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> Optional[click.Command]:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"hwaware.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hwaware")
def main() -> None:
    """Place the pipeline stages of a JAX model on the machines of a heterogeneous cluster, inside Alpa."""
    autoload.cancel()  # commands say themselves which profile they use
