"""Draw a plan: the layers, hosts, times and memory of each stage."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

from hwaware.cluster import ClusterProfile
from hwaware.costs import Cost, evaluate
from hwaware.formatting import BYTES, SECONDS, common_unit, counted, text
from hwaware.plans import Plan
from hwaware.report import canvas
from hwaware.workload import Workload

# Longer lists show the first name and a count.
MOST_NAMED, MOST_CHARACTERS = 4, 60
# A bar has room for one character of its label in each thirtieth of the axis.
WIDE_ENOUGH = 30


def draw_plan(plan: Plan, profile: Optional[ClusterProfile] = None, workload: Optional[Workload] = None) -> Any:
    """Draw one row a stage, in pipeline order: layers, times per microbatch, memory against capacity.

    Args:
        plan: A plan with at least one stage.
        profile: Adds hosts and capacities.
        workload: With the profile, adds the price by `evaluate`. Without both, the picture shows the plan's own times.
    """
    cost = evaluate(plan, workload, profile) if profile is not None and workload is not None else None
    height = max(2.6, 1.5 + 0.55 * len(plan.stages))
    figure, axes = canvas.subplots([5.5, 4.5, 4.5], height, sharey=True)
    _draw_layers(axes[0], plan, profile)
    _draw_times(axes[1], plan, cost)
    _draw_memory(axes[2], plan, profile, cost)
    step_s = cost.step_s if cost is not None else plan.predicted_step_s
    step = "" if step_s is None else f", predicted step {text(step_s, SECONDS)}"
    microbatches = counted(plan.num_microbatches, "microbatch")
    figure.suptitle(f"{plan.solver}: {plan.status}, {microbatches}, {plan.schedule}{step}")
    return figure


def stage_label(plan: Plan, stage: int, hosts: Dict[str, str]) -> str:
    """Return a stage's number and devices, and their hosts if `hosts` (device -> host) names them."""
    devices = plan.stages[stage].devices
    label = f"stage {stage}\n{_names(devices)}"
    where = list(dict.fromkeys(hosts[device] for device in devices if device in hosts))
    return f"{label}\non {_names(where)}" if where else label


def _names(names: Sequence[str]) -> str:
    few = ", ".join(names)
    if len(names) == 1 or (len(names) <= MOST_NAMED and len(few) <= MOST_CHARACTERS):
        return few
    return f"{names[0]} and {len(names) - 1} more"


def _draw_layers(axis: Any, plan: Plan, profile: Optional[ClusterProfile]) -> None:
    hosts = {} if profile is None else {device.id: device.host for device in profile.devices}
    count = plan.stages[-1].layers[1] + 1
    for index, stage in enumerate(plan.stages):
        first, last = stage.layers
        axis.barh(index, last + 1 - first, left=first - 0.5, color=canvas.stage_colour(index), height=0.7)
        label = str(first) if first == last else f"{first}-{last}"
        if (last + 1 - first) * WIDE_ENOUGH >= len(label) * count:
            axis.text((first + last) / 2, index, label, ha="center", va="center", color="white", fontsize=9)
        else:  # beside the bar, on the side with more room
            is_left = first > count / 2
            canvas.label(axis, first - 0.5 if is_left else last + 0.5, index, label, left=is_left)
    labels = [stage_label(plan, index, hosts) for index in range(len(plan.stages))]
    canvas.name_rows(axis, labels)
    axis.set_xlim(-0.5, plan.stages[-1].layers[1] + 0.5)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("Layer")
    axis.set_title("Layers by stage", fontsize=11)
    canvas.bare(axis)


def _draw_times(axis: Any, plan: Plan, cost: Optional[Cost]) -> None:
    """Draw each stage's time for one microbatch: its passes, then its wait for links."""
    parts = _parts(plan, cost)
    total = [sum(values[k] for values in parts.values()) for k in range(len(plan.stages))]
    unit = common_unit(total, SECONDS)
    axis.set_xlabel(f"Per microbatch [{unit.label}]")
    axis.set_title("Times by stage", fontsize=11)
    canvas.bare(axis)
    if not any(total):
        _say_unknown(axis)
        return
    left = [0.0] * len(total)
    colours = {"forward": "#4c78a8", "backward": "#9ecae9", "forward + backward": "#4c78a8", "receive": "#f58518"}
    for name, values in parts.items():
        # A stage's devices can save more time than it waits for links.
        lengths = [max(0.0, value) / unit.size for value in values]
        axis.barh(range(len(lengths)), lengths, left=left, color=colours[name], height=0.6, label=name)
        left = [start + length for start, length in zip(left, lengths)]
    for index, value in enumerate(total):
        canvas.label(axis, left[index], index, unit.text(value))
    axis.set_xlim(0, 1.25 * max(left))
    below = -0.42 / (axis.figure.get_figheight() - 1.1)  # just under the axis, in parts of its height
    axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, below), ncols=3, frameon=False)


def _parts(plan: Plan, cost: Optional[Cost]) -> Dict[str, List[float]]:
    if cost is not None:
        return {
            "forward": [stage.forward_s for stage in cost.stages],
            "backward": [stage.backward_s for stage in cost.stages],
            "receive": [stage.receive_s for stage in cost.stages],
        }
    return {
        "forward + backward": [stage.compute_s or 0.0 for stage in plan.stages],
        "receive": [stage.receive_s or 0.0 for stage in plan.stages],
    }


def _draw_memory(axis: Any, plan: Plan, profile: Optional[ClusterProfile], cost: Optional[Cost]) -> None:
    """Draw the fullest device's memory as a bar in the outline of its capacity, red if it does not fit."""
    if cost is not None:
        used: List[Optional[float]] = [stage.memory_bytes for stage in cost.stages]
        limits: List[Optional[float]] = [stage.memory_limit_bytes for stage in cost.stages]
    else:
        used = [stage.memory_bytes for stage in plan.stages]
        limits = [_smallest(profile, stage.devices) for stage in plan.stages]
    known = [value for value in (*used, *limits) if value is not None]
    unit = common_unit(known, BYTES)
    axis.set_xlabel(f"Fullest device [{unit.label}]")
    axis.set_title("Memory and capacity" if any(limits) else "Memory", fontsize=11)
    canvas.bare(axis)
    if not known:
        _say_unknown(axis)
        return
    for index, (value, limit) in enumerate(zip(used, limits)):
        over = value is not None and limit is not None and value > limit
        if value is not None:
            axis.barh(index, value / unit.size, color="#e45756" if over else canvas.stage_colour(index), height=0.6)
        if limit is not None:
            axis.barh(index, limit / unit.size, color="none", edgecolor=canvas.INK, height=0.7)
        share = f" ({value / limit:.0%})" if value is not None and limit else ""
        end = max(value or 0.0, limit or 0.0)
        canvas.label(axis, end / unit.size, index, f"{unit.text(value)}{share}")
    axis.set_xlim(0, 1.35 * max(known) / unit.size or 1.0)


def _smallest(profile: Optional[ClusterProfile], devices: Sequence[str]) -> Optional[float]:
    if profile is None:
        return None
    sizes = [float(device.memory_bytes) for device in profile.devices if device.id in devices]
    return min(sizes, default=None)


def _say_unknown(axis: Any) -> None:
    words = "not in the plan's file;\ngive cluster and workload"
    axis.text(0.5, 0.5, words, ha="center", va="center", transform=axis.transAxes, color=canvas.INK)
