"""Draw a workload's layers, and the changes that would shorten a plan's step."""

from __future__ import annotations

from typing import Any, Sequence, Tuple

from hwaware.formatting import BYTES, FLOPS, SECONDS, Quantity, common_unit, text
from hwaware.placement.sensitivity import Explanation
from hwaware.report import canvas
from hwaware.workload import Workload

Series = Tuple[str, Sequence[float]]


def draw_workload(workload: Workload) -> Any:
    """Draw each layer's forward and backward FLOPs, and the bytes that it keeps and sends."""
    layers = workload.layers
    height = max(2.8, 1.4 + 0.34 * len(layers))
    figure, (left, right) = canvas.subplots([6.5, 6.5], height, sharey=True)
    flops = (("forward", [x.forward_flops for x in layers]), ("backward", [x.backward_flops for x in layers]))
    sizes = (
        ("parameters", [layer.parameter_bytes for layer in layers]),
        ("activations kept", [layer.activation_bytes for layer in layers]),
        ("output sent", [layer.output_bytes for layer in layers]),
    )
    _draw_groups(left, flops, FLOPS, "Work")
    _draw_groups(right, sizes, BYTES, "Bytes")
    canvas.name_rows(left, [layer.name for layer in layers])
    left.set_ylabel("Layer")
    figure.suptitle(
        f"{canvas.shortened(workload.name, 80)}: a microbatch of {workload.microbatch_size}, {workload.dtype}"
    )
    return figure


def _draw_groups(axis: Any, series: Sequence[Series], quantity: Quantity, name: str) -> None:
    """Draw a group of bars for each layer, one bar a series."""
    unit = common_unit([value for _, values in series for value in values], quantity)
    width = 0.8 / len(series)
    for index, (label, values) in enumerate(series):
        places = [place + (index - (len(series) - 1) / 2) * width for place in range(len(values))]
        axis.barh(places, [value / unit.size for value in values], width, label=label, color=canvas.stage_colour(index))
    axis.set_xlabel(f"{name} per microbatch [{unit.label}]")
    axis.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(series), frameon=False)
    canvas.bare(axis)


def draw_sensitivity(explanation: Explanation) -> Any:
    """Draw by how much each change would shorten or lengthen the step, largest gain on top."""
    changes = [*explanation.stages, *explanation.links]
    changes += [change for change in (explanation.one_more, explanation.next_best) if change is not None]
    changes.sort(key=lambda change: -change.saves_s)
    unit = common_unit([change.saves_s for change in changes], SECONDS)
    saved = [change.saves_s / unit.size for change in changes]
    height = min(canvas.TALLEST, max(2.4, 1.4 + 0.42 * len(changes)))
    figure, axis = canvas.pyplot().subplots(figsize=(10, height), layout="constrained")
    axis.barh(range(len(saved)), saved, color=["#54a24b" if value >= 0 else "#e45756" for value in saved])
    for place in canvas.name_rows(axis, [change.what for change in changes], most=80):
        saves_s = changes[place].saves_s
        words = f"{unit.text(saves_s)} ({saves_s / (explanation.step_s or 1.0):.1%})"  # nothing saves of a step of 0 s
        canvas.label(axis, saved[place], place, words, left=saves_s < 0)
    span = max((abs(value) for value in saved), default=0.0) or 1.0
    axis.set_xlim(-1.3 * span if min(saved) < 0 else 0, 1.3 * span)
    axis.axvline(0, color=canvas.INK, linewidth=0.8)
    axis.set_xlabel(f"Step shorter by [{unit.label}] (part of the step)")
    step = text(explanation.step_s, SECONDS)
    figure.suptitle(f"What would help: the step takes {step}, and {explanation.binds} limits it", fontsize=11)
    canvas.bare(axis)
    return figure
