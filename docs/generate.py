"""MkDocs calls this while it builds: commands from click, Python names from docstrings, pictures from records."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Tuple

import click

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "benchmarks" / "results" / "demo"
WIDTH = 100


def commands_page() -> str:
    """Return every command's help, as the command line prints it."""
    from hwaware.cli import COMMANDS, main

    parts = ["# Commands\n\nMade from the program itself. `hwaware COMMAND --help` prints the same."]
    parts.append(f"```text\n{_help('hwaware', main)}\n```")
    for name in COMMANDS:
        for full_name, command in _commands(f"hwaware {name}", importlib.import_module(f"hwaware.cli.{name}").command):
            parts.append(f"## {full_name}\n\n```text\n{_help(full_name, command)}\n```")
    return "\n\n".join(parts) + "\n"


def _commands(name: str, command: click.Command) -> Iterator[Tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        for inner, member in command.commands.items():
            yield f"{name} {inner}", member


def _help(name: str, command: click.Command) -> str:
    context = click.Context(command, info_name=name, terminal_width=WIDTH, max_content_width=WIDTH)
    return command.get_help(context)


def python_page() -> str:
    """Return every public name of `hwaware`, with its docstring."""
    import hwaware

    parts = ["# Python\n\nThe public names of `hwaware`, made from their docstrings. Units are SI and in the names."]
    for name in hwaware.__all__:
        found = getattr(hwaware, name)
        if callable(found):
            shown = name if inspect.isclass(found) else f"{name}{inspect.signature(found)}"
            parts.append(f"## {name}\n\n```text\nhwaware.{shown}\n\n{inspect.getdoc(found)}\n```")
    return "\n\n".join(parts) + "\n"


def pictures() -> Dict[str, bytes]:
    """Draw the pictures of the pages from the files that the demo recorded."""
    from hwaware import ClusterProfile, Plan, Workload
    from hwaware.report import canvas
    from hwaware.report.plots import Context, drawings

    profile, workload = ClusterProfile.load(DEMO / "cluster.json"), Workload.load(DEMO / "workload.json")
    plan = Plan.load(DEMO / "plan.json")
    drawn = {**drawings(profile), **drawings(plan, Context(profile, workload))}
    wanted = ("cluster", "plan", "timeline", "sensitivity")
    return {f"pictures/{name}.svg": canvas.svg_text(drawn[name](), name).encode() for name in wanted}


# What a link may point to though it is not in docs/.
GENERATED: Dict[str, Callable[[], Any]] = {
    "commands.md": commands_page,
    "python.md": python_page,
    **dict.fromkeys([f"pictures/{name}.svg" for name in ("cluster", "plan", "timeline", "sensitivity")], pictures),
}


def on_files(files: Any, config: Any) -> Any:
    """Add the generated files before MkDocs checks links."""
    from mkdocs.structure.files import File

    for name in ("commands.md", "python.md"):
        files.append(File.generated(config, name, content=GENERATED[name]()))
    for name, content in pictures().items():
        files.append(File.generated(config, name, content=content))
    return files
