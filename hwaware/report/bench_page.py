"""Write a benchmark's report from its results alone: one self-contained page, and its pictures as PNG files."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

from hwaware.records import write_bytes
from hwaware.report import bench_pictures, canvas
from hwaware.report.bench_tables import mappings_table, overall_table, speed_up_table
from hwaware.report.cluster_picture import draw_cluster
from hwaware.report.page import as_page, table_html
from hwaware.result import BenchmarkResult, Mapping

# (file name without its ending, heading, function that draws it)
Picture = Tuple[str, str, Callable[[], Any]]


def save_report(
    results: Sequence[BenchmarkResult], figures: Sequence[Dict[str, Any]], total: Dict[str, Any], directory: Path
) -> None:
    """Write index.html and the pictures into a directory.

    Args:
        results: The results, at least one.
        figures: The summary of each result, by `hwaware.bench.summary.summary`.
        total: The figures over all results, by `hwaware.bench.summary.overall`.
        directory: The folder to write into.
    """
    parts = [table_html(speed_up_table(figures)), table_html(overall_table(total))]
    everything: List[Picture] = [
        ("predictions", "Predictions", lambda: bench_pictures.draw_predictions(figures)),
    ]
    if bench_pictures.compared_baselines(figures):
        everything.insert(0, ("speed-ups", "Speed-ups", lambda: bench_pictures.draw_speed_ups(figures)))
    parts += _drawn(everything, directory)
    stems: Dict[str, int] = {}
    for result, own in zip(results, figures):
        stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{result.scenario}-{result.model}")
        stems[stem] = stems.get(stem, 0) + 1
        if stems[stem] > 1:  # an earlier result of the same scenario and model: its pictures stay
            stem = f"{stem}-{stems[stem]}"
        parts.append(f"<h1>{html.escape(result.scenario)}, {html.escape(result.model)}</h1>\n")
        parts.append(table_html(mappings_table(result, own)))
        parts.append(_words(result))
        parts += _drawn(_pictures(result, own, stem), directory)
    title = f"Benchmark: {len(results)} results" if len(results) > 1 else "Benchmark"
    write_bytes(directory / "index.html", as_page(title, "".join(parts)).encode())


def _pictures(result: BenchmarkResult, figures: Dict[str, Any], stem: str) -> List[Picture]:
    found: List[Picture] = [(f"{stem}-steps", "Steps", lambda: bench_pictures.draw_steps(result, figures))]
    if result.profile is not None:
        profile = result.profile
        found.append((f"{stem}-map", "Stages and links", lambda: bench_pictures.draw_maps(result, figures)))
        found.append((f"{stem}-cluster", "The measured cluster", lambda: draw_cluster(profile)))
    if result.enumerated:
        found.append((f"{stem}-every", "Every mapping", lambda: bench_pictures.draw_enumerated(result)))
    for mapping in bench_pictures.shown_mappings(result, figures):
        if mapping.timeline is not None:
            found.append((f"{stem}-step-{mapping.name}", f"A step of {mapping.name}", _timeline(result, mapping)))
    return found


def _timeline(result: BenchmarkResult, mapping: Mapping) -> Callable[[], Any]:
    return lambda: bench_pictures.draw_timelines(result, mapping)


def _drawn(pictures: Sequence[Picture], directory: Path) -> List[str]:
    """Write each picture to a file, and return it as a part of the page."""
    parts = []
    for name, heading, draw in pictures:
        figure = draw()
        canvas.save(figure, directory / f"{name}.png", close=False)
        picture = canvas.svg_text(figure, name)
        parts.append(f'<h2>{html.escape(heading)}</h2>\n<figure id="{name}">{picture}</figure>\n')
    return parts


def _words(result: BenchmarkResult) -> str:
    """Return the paragraphs below a result: its notes, failed mappings, machine and command."""
    about = result.environment
    loads = about.get("load_average_during") or []
    facts = [
        f"{about.get('time')}, {about.get('platform')}, {about.get('cores')} cores",
        f"load average {min(loads):.1f} to {max(loads):.1f} while measuring, including the cluster's own work"
        if loads
        else "",
        "versions " + ", ".join(f"{name} {version}" for name, version in (about.get("versions") or {}).items()),
        f"command: {about.get('command')}",
    ]
    missing = [f"{one.name} could not be measured: {one.reason}" for one in result.unmeasured]
    lines = [*result.notes, *missing, "; ".join(filter(None, facts)) + "."]
    return "".join(f"<p>{html.escape(line)}</p>\n" for line in lines)
