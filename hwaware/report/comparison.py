"""Build the demo's table: measured and predicted step of each mapping."""

from __future__ import annotations

from typing import Any, Dict

from rich import box
from rich.table import Table

from hwaware.formatting import counted
from hwaware.plans import Plan
from hwaware.result import BenchmarkResult


def comparison_table(result: BenchmarkResult, figures: Dict[str, Any]) -> Table:
    """Return a table with one row a mapping: stages, measured and predicted step, error of the prediction."""
    title = f"{result.model} on {result.scenario}, {counted(result.num_microbatches, 'microbatch')} a step"
    table = Table(title=title, box=box.SIMPLE)
    table.add_column("mapping", no_wrap=True)
    table.add_column("layers by device, in pipeline order")
    for heading in ("measured [s]", "95 % interval", "pipeline [s]", "predicted [s]", "error"):
        table.add_column(heading, justify="right")
    for mapping in result.mappings:
        row = figures["mappings"][mapping.name]
        step = row["measured_step_s"]
        table.add_row(
            mapping.name,
            describe_stages(mapping.plan),
            f"{step['median']:.3f}",
            f"{step['low']:.3f}-{step['high']:.3f}",
            f"{row['predictable_step_s']:.3f}",
            f"{row['corrected_prediction_s']:.3f}",
            f"{row['prediction_error']:+.0%}",
        )
    return table


def describe_stages(plan: Plan) -> str:
    """Return a plan in one line, e.g. "h0:0 0-3, h1:0 4": devices, then layers, of each stage."""
    parts = []
    for stage in plan.stages:
        first, last = stage.layers
        parts.append(f"{'+'.join(stage.devices)} {first}" + (f"-{last}" if last > first else ""))
    return ", ".join(parts)
