"""Run the whole pipeline on one machine, in a few minutes: `hwaware demo`."""

from __future__ import annotations

import click

from hwaware.cli._run import json_option, print_json, reports_errors, say


@click.command("demo")
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False),
    default="demo",
    show_default=True,
    help="Directory for the files that the demo writes.",
)
@json_option
@reports_errors
def command(output: str, as_json: bool) -> None:
    """Profile a heterogeneous Ray cluster, train a GPT on it by Alpa's placement and by hwaware's, and compare.

    The demo starts a real Ray cluster on this machine and slows its hosts and links down. Run it as root to shape both
    CPU shares and links.
    """
    from hwaware.bench import demo
    from hwaware.bench.summary import summary

    result, _ = demo.run(output, say)
    figures = summary(result)
    if as_json:
        print_json(figures)
        return
    from hwaware.report.bench_tables import mappings_table
    from hwaware.report.console import make_console

    console = make_console()
    console.print(mappings_table(result, figures))
    ratio = figures["step_ratio"]
    console.print(
        f"hwaware's step takes {ratio['median']:.2f} of Alpa's ({figures['median_alpa']}), "
        f"95 % interval {ratio['low']:.2f} to {ratio['high']:.2f}."
    )
    difference = figures["largest_relative_loss_difference"]
    verdict = "agree with" if figures["losses_agree"] else "DIFFER from"
    console.print(f"Losses {verdict} single-device training (largest relative difference {difference:.1e}).")
