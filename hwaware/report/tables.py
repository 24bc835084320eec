"""Build tables of records (`render`) and print them (`show`); headers name the units."""

from __future__ import annotations

import statistics
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple, Type

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hwaware.adapting.loads import LoadTrace
from hwaware.cluster import AnyProfile, ClusterProfile, Device, Link, LinkTable, PartialProfile
from hwaware.errors import UnusableInputError
from hwaware.formatting import (
    BYTES,
    BYTES_PER_S,
    FLOPS,
    FLOPS_PER_S,
    MISSING,
    SECONDS,
    Quantity,
    common_unit,
    counted,
    percent,
    ratio,
    text,
)
from hwaware.history import History, HistoryEvent
from hwaware.plans import RECEIVE_MEANS, Plan, Stage
from hwaware.records import FileRecord
from hwaware.report import collectives
from hwaware.report.console import make_console
from hwaware.report.fitting import Column, build_table
from hwaware.result import BenchmarkResult, Mapping
from hwaware.timeline import EventKind, Timeline
from hwaware.workload import Workload

# No terminal has room for a matrix of more devices, and a list of its cells has thousands of lines.
MOST_IN_A_MATRIX = 24
# Of more devices, the tables show so many links.
SLOWEST_LINKS = 20


def render(record: FileRecord) -> RenderableType:
    """Build the tables of a record.

    Raises:
        UnusableInputError: This kind of record has no tables.
    """
    draw = _TABLES.get(type(record))
    if draw is None:
        raise UnusableInputError(f"hwaware has no tables of a {record.SCHEMA} yet.", "show it with --json.")
    return draw(record)


def show(record: FileRecord, console: Optional[Console] = None) -> None:
    """Print the tables of a record on standard output, with colours on a terminal alone."""
    (console or make_console()).print(render(record))


def number_column(name: str, values: Iterable[Optional[float]], quantity: Quantity) -> Column:
    """Return a column of numbers in one common unit, which the header names."""
    return number_columns([(name, list(values))], quantity)[0]


def number_columns(numbers: Iterable[Tuple[str, Sequence[Optional[float]]]], quantity: Quantity) -> List[Column]:
    """Return columns that share one unit, so that a reader may compare and add their numbers."""
    named = list(numbers)
    unit = common_unit([value for _, values in named for value in values], quantity)
    return [(f"{name} [{unit.label}]", [unit.text(value) for value in values]) for name, values in named]


def _cluster(profile: AnyProfile) -> RenderableType:
    return Group(_hosts(profile), _devices(profile), *_links(profile), *_collectives(profile))


def _collectives(profile: AnyProfile) -> List[Table]:
    """Return the table of collectives, each at its largest size; none without collectives."""
    rows = collectives.rows(profile)
    if not rows:
        return []
    names = [
        ("operation", [row.op for row in rows]),
        ("devices", [row.devices for row in rows]),
        ("type", [row.dtype for row in rows]),
    ]
    columns = [
        number_column("array", [row.bytes for row in rows], BYTES),
        number_column("time", [row.seconds for row in rows], SECONDS),
        number_column("algbw", [row.algbw_bytes_per_s for row in rows], BYTES_PER_S),
        number_column("busbw", [row.busbw_bytes_per_s for row in rows], BYTES_PER_S),
    ]
    caption = (
        "At the largest measured size. algbw: array / time, of an all-to-all array / devices / time. busbw: rate on "
        "each device's link, as nccl-tests defines it."
    )
    return [build_table("Collectives", names, columns, caption)]


def _hosts(profile: AnyProfile) -> Table:
    names = [host.name for host in profile.hosts]
    addresses = [host.address or MISSING for host in profile.hosts]
    counts = [str(sum(device.host == name for device in profile.devices)) for name in names]
    return build_table("Hosts", [("host", names), ("address", addresses)], [("devices", counts)])


def _devices(profile: AnyProfile) -> Table:
    devices = profile.devices
    dtypes = sorted({dtype for device in devices for dtype in device.throughput})
    columns = [number_column(dtype, [_best_rate(device, dtype) for device in devices], FLOPS_PER_S) for dtype in dtypes]
    columns.append(number_column("memory", [device.memory_bytes for device in devices], BYTES))
    bandwidths = [device.memory_bandwidth_bytes_per_s for device in devices]
    if any(value is not None for value in bandwidths):
        columns.append(number_column("memory bandwidth", bandwidths, BYTES_PER_S))
    names = [
        ("device", [d.id for d in devices]),
        ("host", [d.host for d in devices]),
        ("kind", [d.kind for d in devices]),
    ]
    caption = "Rates in FLOP/s are the best over all measured sizes of matrix products."
    return build_table("Devices", names, columns, caption)


def _best_rate(device: Device, dtype: str) -> Optional[float]:
    return max((point.flops / point.seconds for point in device.throughput.get(dtype, ())), default=None)


def _links(profile: AnyProfile) -> List[Table]:
    devices = [device.id for device in profile.devices]
    if len(devices) < 2:
        return []
    if len(devices) > MOST_IN_A_MATRIX:
        return _slowest_links(profile.links)
    links = LinkTable(profile)
    pairs = {(s, t): links.between(s, t) if s != t else None for s in devices for t in devices}
    rates = {pair: link.bandwidth_bytes_per_s if link else None for pair, link in pairs.items()}
    delays = {pair: link.latency_s if link else None for pair, link in pairs.items()}
    rate_means = "Rate of long messages in one direction, without the latency."
    return [
        _matrix("Link bandwidth", devices, rates, BYTES_PER_S, rate_means),
        _matrix("Link latency", devices, delays, SECONDS, "Time of an empty message in one direction."),
    ]


def _slowest_links(links: Sequence[Link]) -> List[Table]:
    if not links:
        return []
    shown = sorted(links, key=lambda link: link.bandwidth_bytes_per_s)[:SLOWEST_LINKS]
    rates = [link.bandwidth_bytes_per_s for link in links]
    middle, highest = text(statistics.median(rates), BYTES_PER_S), text(max(rates), BYTES_PER_S)
    caption = (
        f"The slowest of {counted(len(links), 'link')}. Median bandwidth of all links: {middle}, highest: {highest}. "
        "--plot draws all links, and --json prints them."
    )
    columns = [
        number_column("bandwidth", [link.bandwidth_bytes_per_s for link in shown], BYTES_PER_S),
        number_column("latency", [link.latency_s for link in shown], SECONDS),
    ]
    names = [("from", [link.source for link in shown]), ("to", [link.target for link in shown])]
    return [build_table("Slowest links", names, columns, caption)]


def _matrix(
    title: str, devices: Sequence[str], values: Dict[Tuple[str, str], Optional[float]], quantity: Quantity, caption: str
) -> Table:
    unit = common_unit(values.values(), quantity)
    columns = [(target, [unit.text(values[source, target]) for source in devices]) for target in devices]
    return build_table(f"{title} [{unit.label}]", [("from \\ to", devices)], columns, caption)


def _workload(workload: Workload) -> RenderableType:
    layers = workload.layers
    columns = [
        number_column("forward", [layer.forward_flops for layer in layers], FLOPS),
        number_column("backward", [layer.backward_flops for layer in layers], FLOPS),
        number_column("parameters", [layer.parameter_bytes for layer in layers], BYTES),
        number_column("optimizer", [layer.optimizer_size_bytes for layer in layers], BYTES),
        number_column("output", [layer.output_bytes for layer in layers], BYTES),
        number_column("activations", [layer.activation_bytes for layer in layers], BYTES),
    ]
    total = sum(layer.forward_flops + layer.backward_flops for layer in layers)
    parameters = sum(layer.parameter_bytes for layer in layers)
    title = f"Workload {workload.name}: microbatches of {workload.microbatch_size}, {workload.dtype}"
    caption = f"In all {text(total, FLOPS)} per microbatch, {text(parameters, BYTES)} of parameters."
    return build_table(title, [("layer", [layer.name for layer in layers])], columns, caption)


def _plan(plan: Plan) -> RenderableType:
    title = f"Plan by {plan.solver}: {plan.status}, {counted(plan.num_microbatches, 'microbatch')}, {plan.schedule}"
    facts = [
        ("predicted step", plan.predicted_step_s),
        ("objective", plan.objective_s),
        ("bound", plan.bound_s),
        ("search", plan.search_s),
    ]
    known = [f"{name} {text(value, SECONDS)}" for name, value in facts if value is not None]
    sentences = [", ".join(known), plan.reason or "", legend(plan.stages)]
    if plan.step_interval_s is not None:
        low, high = (text(end, SECONDS) for end in plan.step_interval_s)
        sentences.insert(1, f"90 % of steps take {low} to {high}. `hwaware evaluate` also prints the likely step.")
    caption = "\n".join(filter(None, sentences))
    return _stages(title, plan.stages, caption or None) if plan.stages else Text(f"{title}\n{caption}")


def _stages(title: str, stages: Sequence[Stage], caption: Optional[str]) -> Table:
    names = [
        ("stage", [str(index) for index in range(len(stages))]),
        ("layers", [_range(stage) for stage in stages]),
        ("devices", [replicas_text(stage) for stage in stages]),
    ]
    times = [
        ("compute", [stage.compute_s for stage in stages]),
        ("receive", [stage.receive_s for stage in stages]),
        ("gradient sync", [stage.gradient_sync_s for stage in stages]),
    ]
    columns = [
        *number_columns(times, SECONDS),
        number_column("memory", [stage.memory_bytes for stage in stages], BYTES),
    ]
    return build_table(title, names, columns, caption)


def _range(stage: Stage) -> str:
    first, last = stage.layers
    return str(first) if first == last else f"{first}-{last}"


def replicas_text(stage: Stage) -> str:
    """Return a stage's device ids, with + inside a tensor-parallel group and | between replicas."""
    return " | ".join(
        " + ".join(replica.devices) + (f" ({percent(replica.share)})" if replica.share is not None else "")
        for replica in stage.replicas
    )


def legend(stages: Sequence[Stage]) -> str:
    """Return the meaning of the columns of a plan's table, and of the signs between devices."""
    if not stages:
        return ""
    signs = []
    if any(len(stage.replicas) > 1 for stage in stages):
        signs.append("| stands between replicas (data parallelism)")
    if any(len(replica.devices) > 1 for stage in stages for replica in stage.replicas):
        signs.append("+ joins the devices of one replica (tensor parallelism)")
    once = "Gradient sync (and update): once per step; other times: per microbatch. Memory: of the fullest device."
    return "\n".join([*([f"{', '.join(signs)}."] if signs else []), once, RECEIVE_MEANS])


def _result(result: BenchmarkResult) -> RenderableType:
    mappings = result.mappings
    alpas = [one for one in mappings if any(name.startswith("alpa") for name in one.names)]
    reference = next(iter(alpas), mappings[0])
    names = [
        ("mapping", [mapping.name for mapping in mappings]),
        (
            "stages",
            [" > ".join(replicas_text(stage) for stage in mapping.plan.stages) or MISSING for mapping in mappings],
        ),
    ]
    columns = [
        number_column("predicted", [mapping.predicted_step_s for mapping in mappings], SECONDS),
        number_column("median step", [mapping.median_step_s for mapping in mappings], SECONDS),
        number_column("fastest", [min(mapping.step_s) for mapping in mappings], SECONDS),
        number_column("slowest", [max(mapping.step_s) for mapping in mappings], SECONDS),
        ("steps", [str(len(mapping.step_s)) for mapping in mappings]),
        (f"speed-up over {reference.name}", [ratio(_speedup(reference, mapping)) for mapping in mappings]),
        ("last loss", [f"{mapping.loss[-1]:.6g}" if mapping.loss else MISSING for mapping in mappings]),
    ]
    title = f"{result.model} on {result.scenario}: {counted(result.num_microbatches, 'microbatch')} a step"
    return build_table(title, names, columns, "Speed-ups are ratios of medians, each step over its reference.")


def _speedup(reference: Mapping, mapping: Mapping) -> float:
    return statistics.median(reference.relative_steps) / statistics.median(mapping.relative_steps)


def _timeline(timeline: Timeline) -> RenderableType:
    stages = range(len(timeline.devices))
    kinds: Tuple[EventKind, ...] = ("forward", "backward", "activation", "gradient", "synchronisation", "update")
    spent = {kind: [timeline.spent_s(stage, kind) for stage in stages] for kind in kinds}
    names = [("stage", [str(k) for k in stages]), ("devices", [", ".join(devices) for devices in timeline.devices])]
    titles = {"activation": "activations out", "gradient": "gradients out", "synchronisation": "gradient sync"}
    columns = [number_column(titles.get(kind, kind), values, SECONDS) for kind, values in spent.items() if any(values)]
    busy = [timeline.busy_s(k) / timeline.step_s if timeline.step_s else None for k in stages]
    columns.append(("busy", [percent(share) for share in busy]))
    title = f"{timeline.title} {text(timeline.step_s, SECONDS)}: {counted(timeline.num_microbatches, 'microbatch')}, "
    title += f"{timeline.schedule}, {timeline.sends} sends"
    events = counted(len(timeline.events), "event")
    return build_table(title, names, columns, f"{events}; busy: time in forward and backward passes.")


def _load(trace: LoadTrace) -> RenderableType:
    rows = [
        (change.step, name, factor)
        for change in trace.changes
        for name, factor in {**change.drift.devices, **change.drift.links}.items() or [("nothing", 1.0)]
    ]
    steps, names, factors = zip(*rows) if rows else ((), (), ())
    title = f"Load of {counted(trace.steps, 'step')}, noise {percent(trace.noise)}"
    columns = [("time over the profile's", [f"{factor:.2f}" for factor in factors])]
    names_of = [("from step", [str(step) for step in steps]), ("slow", list(names))]
    return build_table(title, names_of, columns, None)


def _history(history: History) -> RenderableType:
    events = history.events
    names = [("call", [str(event.call) for event in events]), ("event", [event.what for event in events])]
    columns = [
        number_column("took", [event.took_s or None for event in events], SECONDS),
        ("phases", [_phases(event) for event in events]),
        ("numbers", [_numbers(event) for event in events]),
        ("made again", [str(event.made_again) if event.made_again else MISSING for event in events]),
        ("placement", [_placement(event) for event in events]),
    ]
    title = f"{counted(history.calls, 'call')}, state committed {counted(history.points, 'time')}"
    title += " (the program can return to the newest copy)"
    copied = f"{text(history.copied_bytes, BYTES)} copied; steps waited {text(history.copy_s, SECONDS)} for it"
    moved_s = sum(event.took_s for event in events if event.kind == "moved")
    lost = f"{text(history.lost_s, SECONDS)} in recoveries, {text(moved_s, SECONDS)} in planned moves"
    tries = f"at present it tries a copy every {'call' if history.every == 1 else counted(history.every, 'call')}"
    return build_table(title, names, columns, f"{copied}; {lost}; {tries}.")


def _placement(event: HistoryEvent) -> str:
    if event.mapping is None:
        return MISSING
    return f"compared with: {event.mapping}" if event.kind == "decided" else event.mapping


def _phases(event: HistoryEvent) -> str:
    return ", ".join(f"{name} {text(seconds, SECONDS)}" for name, seconds in event.phases.items()) or MISSING


def _numbers(event: HistoryEvent) -> str:
    """Return seconds by their names, and factors, which names of devices and links have."""
    shown = [
        f"{name[:-2]} {text(value, SECONDS)}" if name.endswith("_s") else f"{name} x {value:.2f}"
        for name, value in event.numbers.items()
    ]
    return ", ".join(shown) or MISSING


_TABLES: Dict[Type[FileRecord], Callable[[Any], RenderableType]] = {
    ClusterProfile: _cluster,
    PartialProfile: _cluster,
    Workload: _workload,
    Plan: _plan,
    BenchmarkResult: _result,
    Timeline: _timeline,
    LoadTrace: _load,
    History: _history,
}
