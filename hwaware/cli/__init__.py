"""Define the command `hwaware`: a pipeline over files, with one module a subcommand, imported when it runs."""

from __future__ import annotations

import importlib
from typing import Any, List, Optional

import click

from hwaware import autoload
from hwaware._version import __version__

# Name -> line for --help. The module hwaware.cli.NAME holds the click command as `command`.
COMMANDS = {
    "doctor": "Check what is installed and what works, and name the commands that fix the rest.",
    "profile": "Measure the devices and links of a cluster.",
    "trace": "Count what a model computes, stores and sends, layer by layer.",
    "plan": "Find the best placement of a workload on a cluster.",
    "evaluate": "Price any plan, also one written by hand.",
    "estimate": "Estimate gradient sums, ZeRO's memory and iteration times by formulas.",
    "simulate": "Simulate one step of a plan, event by event, as a Chrome trace.",
    "show": "Show any of hwaware's files as tables and pictures.",
    "compare": "Compare two results, profiles or plans, and name significant differences.",
    "import": "Turn other programs' measurements into a cluster profile.",
    "export": "Write a cluster profile in another program's format.",
    "testbed": "Run a heterogeneous Ray cluster on this machine.",
    "drain": "Let running trainings leave a host, which may then be stopped.",
    "bench": "Measure Alpa's placement against hwaware's on real clusters.",
    "demo": "Run the whole pipeline on one machine, in a few minutes.",
    "completion": "Print the script that completes commands and options in a shell.",
}


class _LazyGroup(click.Group):
    """A group that imports a command's module only to run it or to show its help."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line; say in one message if the help finds no room on standard output."""
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            from hwaware.cli._run import exit_if_full

            exit_if_full(error)
            raise

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
    autoload.cancel()  # a command names its own profile; HWAWARE_PROFILE must not add one
