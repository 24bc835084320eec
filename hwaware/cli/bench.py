"""Measure Alpa's placement against hwaware's on real clusters: `hwaware bench`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import click
from click.core import ParameterSource

from hwaware.cli._run import INTERRUPTED, NumberRange, json_option, print_json, reports_errors, say
from hwaware.cli.testbed import kind_option
from hwaware.cli.trace import model_options
from hwaware.errors import UnusableInputError
from hwaware.records import require_writable, write_or_keep

if TYPE_CHECKING:
    from hwaware.bench.benchmark import Outcome
    from hwaware.bench.task import Effort
    from hwaware.result import BenchmarkResult

# Copies from hwaware.bench, whose import would slow --help down.
MODELS = ("gpt-small", "gpt-medium", "gpt-large", "gpt", "mlp", "moe", "wresnet")
MAPPINGS = ("hwaware", "alpa", "even", "proportional", "annealing", "gradient", "best-measured")


class _Counts(NamedTuple):
    """How much to measure: of placements, and with --faults rounds with and without copies, and processes to kill."""

    repeats: int
    orders: int
    checked_losses: int
    rounds: int
    kills: int


_FULL = _Counts(repeats=20, orders=3, checked_losses=5, rounds=10, kills=20)
_QUICK = _Counts(repeats=8, orders=1, checked_losses=2, rounds=2, kills=3)


@click.command()
@click.argument("scenarios", metavar="[SCENARIO]...", nargs=-1)
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False),
    default="results",
    show_default=True,
    help="Directory for results and report.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    default=("gpt-small",),
    show_default=True,
    metavar="MODEL",
    help=f"Model to train, one of {', '.join(MODELS)}. Repeatable.",
)
@click.option(
    "--mappings",
    default="hwaware,alpa,even,proportional",
    show_default=True,
    help=f"Mappings to measure, separated by commas: {', '.join(MAPPINGS)}.",
)
@click.option(
    "--orders",
    type=click.IntRange(1),
    help=f"Host orders, of at most 24, in which to measure Alpa's placement. [{_FULL.orders}, quick {_QUICK.orders}]",
)
@click.option(
    "--repeats",
    type=click.IntRange(1),
    help=f"Steps to measure of each placement. [{_FULL.repeats}, quick {_QUICK.repeats}]",
)
@click.option(
    "--starts",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="How often to start the placements' processes; each start measures all steps. With several starts, intervals "
    "cover what differs between starts; three or more starts make them narrow.",
)
@click.option(
    "--within",
    "within_min",
    type=NumberRange(min=0, min_open=True),
    metavar="MINUTES",
    help="Time to aim for. Each scenario and model gets a part of it and measures the steps and starts that fit, at "
    "least 5 steps. It does not shorten setup.",
)
@click.option("--microbatches", type=click.IntRange(1), default=8, show_default=True, help="Microbatches per step.")
@click.option("--microbatch-size", type=click.IntRange(1), default=4, show_default=True, help="Samples per microbatch.")
@click.option("--layers", type=click.IntRange(1), help="Layers to cut the model into. [its blocks]")
@click.option("--max-devices-per-stage", type=click.IntRange(1), help="Limit for Alpa's search and hwaware's alike.")
@kind_option
@click.option(
    "--faults",
    is_flag=True,
    help="Measure instead what it costs to survive on each testbed, and how long recoveries take.",
)
@click.option("--full-profile", is_flag=True, help="Profile clusters in full, not in the quick form.")
@click.option("--quick", is_flag=True, help="Measure fewer steps and orders.")
@click.option(
    "--report-only",
    is_flag=True,
    help="Measure nothing; make the report again from all results in the directory, of any scenario and model.",
)
@model_options
@json_option
@reports_errors
def command(
    scenarios: Tuple[str, ...],
    output: str,
    models: Tuple[str, ...],
    mappings: str,
    orders: Optional[int],
    repeats: Optional[int],
    starts: int,
    within_min: Optional[float],
    microbatches: int,
    microbatch_size: int,
    layers: Optional[int],
    max_devices_per_stage: Optional[int],
    kind: str,
    faults: bool,
    full_profile: bool,
    quick: bool,
    report_only: bool,
    as_json: bool,
    **sizes: Optional[int],
) -> None:
    """Train a model by Alpa's own placement and by hwaware's on real clusters, and compare the steps.

    SCENARIO names a testbed (hwaware testbed list) or a .toml file that describes one. HOST:PORT names a running Ray
    cluster instead, auto the one on this machine. Without SCENARIO, the command runs all shipped testbeds.

    With --faults, the same small GPT trains on each testbed. Workers are killed, and at last the link of a host goes
    down. The command compares the recoveries with a restart from a checkpoint, and the steps after both. It writes
    faults-SCENARIO.json.

    Every pair of scenario and model gives one result file. The report (index.html and pictures) reads these files
    alone. Ctrl-C keeps the finished results.

    \b
    Examples:
        hwaware bench fast-and-slow -o results --quick
        hwaware bench 10.0.0.1:6379 -o results --model gpt --hidden 512 --heads 8
    """  # noqa: D301
    counts = _QUICK if quick else _FULL
    if report_only:
        _take_only({"report_only", "output", "as_json"})
        _report(Path(output), as_json)
        return
    if faults:
        _take_only({"faults", "scenarios", "output", "kind", "quick", "as_json"})
        _faults(scenarios, Path(output), kind, counts, as_json)
        return
    from hwaware.bench.mappings import Wanted, check_names
    from hwaware.bench.task import Effort

    names = check_names([name.strip() for name in mappings.split(",")])
    effort = Effort(
        num_layers=layers or 0,
        num_microbatches=microbatches,
        microbatch_size=microbatch_size,
        repeats=repeats or counts.repeats,
        starts=starts,
        checked_losses=counts.checked_losses,
        wanted=Wanted(names, orders or counts.orders, max_devices_per_stage),
    )
    given = {name: value for name, value in sizes.items() if value is not None}
    within_s = None if within_min is None else 60 * within_min
    outcome = _measure(scenarios, models, given, effort, Path(output), not full_profile, kind, within_s)
    if outcome.results:
        _report(Path(output), as_json)
    if outcome.failures:
        raise _failed(outcome)


def _take_only(taken: Set[str]) -> None:
    """Refuse arguments and options that the command line has, but that are not taken."""
    context = click.get_current_context()
    left = [
        "SCENARIO" if isinstance(one, click.Argument) else one.opts[0]
        for one in context.command.params
        if one.name not in taken
        and context.get_parameter_source(str(one.name)) == ParameterSource.COMMANDLINE
        and context.params[str(one.name)]
    ]
    if left:
        mode = "--report-only" if "report_only" in taken else "--faults"
        raise UnusableInputError(f"bench {mode} does not use {', '.join(left)}.", "leave this out.", found=tuple(left))


def _faults(scenarios: Sequence[str], output: Path, kind: str, counts: _Counts, as_json: bool) -> None:
    """Measure survival on testbeds, one after the other; keep and print the figures."""
    from hwaware.bench import faults, testbed
    from hwaware.bench.benchmark import file_names

    names = list(dict.fromkeys(scenarios or testbed.shipped_names()))
    chosen = [testbed.load_scenario(name) for name in names]
    faults.require_links(chosen, kind)
    paths = [output / f"faults-{name}.json" for name in file_names([one.name for one in chosen])]
    output.mkdir(parents=True, exist_ok=True)
    for path in paths:
        require_writable(path)
    found = {}
    for name, path in zip(names, paths):
        found[name] = faults.on_testbed(name, counts.rounds, counts.kills, kind)
        if not as_json:
            click.echo(f"{name}:\n{faults.summary(found[name])}")
        write_or_keep(path, json.dumps(found[name], indent=1).encode() + b"\n", click.echo)
        say(f"{path} written.")
    if as_json:
        print_json({"faults": found})


def _measure(
    scenarios: Sequence[str],
    models: Sequence[str],
    sizes: Dict[str, int],
    effort: Effort,
    output: Path,
    quick_profile: bool,
    kind: str,
    within_s: Optional[float],
) -> Outcome:
    """Check all arguments before anything starts, then measure."""
    from hwaware.bench import testbed
    from hwaware.bench.benchmark import Benchmark, named_model, place
    from hwaware.errors import TestbedError
    from hwaware.report.canvas import pyplot

    pyplot()  # the report at the end needs matplotlib: fail now without it

    named = [named_model(name, sizes) for name in dict.fromkeys(models)]
    unused = [name for name in sizes if not any(hasattr(model.config, name) for model in named)]
    if unused:
        raise UnusableInputError(f"None of {', '.join(models)} has an option --{unused[0]}.", "leave it out.")
    places = [place(name) for name in dict.fromkeys(scenarios or testbed.shipped_names())]
    kept = f"Finished results are in {output}; report on them: hwaware bench --report-only -o {output}"
    try:
        return Benchmark(named, effort, output, quick_profile, say, kind, within_s).run(places)
    except TestbedError:
        say(kept)
        raise
    except (KeyboardInterrupt, SystemExit) as ended:
        say(f"Interrupted. {kept}")
        _leave_at_once(INTERRUPTED if isinstance(ended, KeyboardInterrupt) else ended.code)
        raise


def _leave_at_once(code: Any) -> None:
    """End this process without joining its threads; it has closed everything that it started.

    Alpa launches meshes in threads that wait minutes for workers that are gone. Python would join them at exit.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _failed(outcome: Outcome) -> Exception:
    """Return the error to raise: the first one if all input was unusable, else a summary of all failures."""
    from hwaware.errors import MeasurementError

    if not outcome.results and all(isinstance(one.error, UnusableInputError) for one in outcome.failures):
        return outcome.failures[0].error
    pairs = " ".join(f"{one.scenario}, {one.model}: {one.error.what}" for one in outcome.failures)
    return MeasurementError(
        f"{len(outcome.failures)} of {len(outcome.failures) + len(outcome.results)} measurements failed. {pairs}",
        "remove these causes, then run the failed ones again; the other results are kept.",
    )


def _report(directory: Path, as_json: bool) -> None:
    """Write the page and the pictures from the result files of a directory, and print the tables."""
    from hwaware.bench.benchmark import load_results
    from hwaware.bench.summary import overall, summary
    from hwaware.report.bench_page import save_report

    loaded = load_results(directory)
    results: List[BenchmarkResult] = [result for _, result in loaded]
    figures: List[Dict[str, Any]] = [summary(result) for result in results]
    total = overall(figures)
    save_report(results, figures, total, directory)
    say(f"{directory / 'index.html'} written; open it in a browser.")
    if as_json:
        print_json({"results": {path.name: one for (path, _), one in zip(loaded, figures)}, "overall": total})
        return
    from hwaware.report.bench_tables import overall_table, speed_up_table
    from hwaware.report.console import make_console

    console = make_console()
    console.print(speed_up_table(figures))
    console.print(overall_table(total))
