"""Draw a cluster: the throughput of each device, and all directed links as heat maps."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Optional, Tuple

from hwaware.cluster import ClusterProfile, Device, LinkTable
from hwaware.formatting import BYTES, BYTES_PER_S, FLOPS_PER_S, SECONDS, Quantity, common_unit, counted, text
from hwaware.report import canvas

# With more devices, numbers in the cells would be too small to read.
MOST_NUMBERED = 16
# With more devices, a matrix names only every second one, third one, and so on.
MOST_LABELLED = 40
# With more devices, matrices have only every second one, third one, and so on: their memory grows with the square.
MOST_DRAWN = 500
# More characters in all names together do not fit below a matrix of this many columns, which is wide in proportion.
MOST_CHARACTERS_BELOW = 40
# Longer names lose their middles: four columns have no more room beside them.
MOST_CHARACTERS = 28
# Colours follow the logarithm if the largest value exceeds this many times the smallest.
WIDE_RANGE = 20.0


def draw_cluster(profile: ClusterProfile) -> Any:
    """Draw each device's best measured throughput and memory, and bandwidth and latency of every directed pair."""
    count = len(profile.devices)
    side = max(3.2, min(14.0, 1.6 + 0.62 * count))
    widths = [5.2] + ([side + 1.2] * 2 if count > 1 else [])
    figure, axes = canvas.subplots(widths, max(2.6, side), squeeze=False)
    _draw_devices(axes[0][0], profile)
    if count > 1:
        names, rates, delays = _matrices(profile)
        some = "" if len(names) == count else f" of {len(names)} devices"
        _draw_matrix(axes[0][1], names, rates, BYTES_PER_S, f"Link bandwidth{some}", "viridis")
        _draw_matrix(axes[0][2], names, delays, SECONDS, f"Link latency{some}", "viridis_r")
    return figure


def peak_flops_per_s(device: Device) -> float:
    """Return a device's highest measured throughput over all data types and sizes, in FLOP/s."""
    return max(float(point.flops / point.seconds) for points in device.throughput.values() for point in points)


def _draw_devices(axis: Any, profile: ClusterProfile) -> None:
    devices, hosts = profile.devices, [host.name for host in profile.hosts]
    rates = [peak_flops_per_s(device) for device in devices]
    unit = common_unit(rates, FLOPS_PER_S)
    colours = [canvas.stage_colour(hosts.index(device.host)) for device in devices]
    axis.barh(range(len(devices)), [rate / unit.size for rate in rates], color=colours)
    for place in canvas.name_rows(axis, [f"{one.id}\n{one.kind} on {one.host}" for one in devices]):
        words = f"{unit.text(rates[place])} ({text(devices[place].memory_bytes, BYTES)})"
        canvas.label(axis, rates[place] / unit.size, place, words)
    axis.set_xlim(0, 1.45 * max(rates) / unit.size)
    axis.set_xlabel(f"Best measured matrix products [{unit.label}] (memory)")
    axis.set_title(f"{counted(len(devices), 'device')} on {counted(len(hosts), 'host')}", fontsize=11)
    canvas.bare(axis)


Matrix = List[List[Optional[float]]]


def _matrices(profile: ClusterProfile) -> Tuple[List[str], Matrix, Matrix]:
    every, table = -(-len(profile.devices) // MOST_DRAWN), LinkTable(profile)
    names = [device.id for device in profile.devices[::every]]
    links: Dict[Tuple[str, str], Any] = {(s, t): table.between(s, t) for s in names for t in names if s != t}
    rates: Matrix = [[_of(links.get((s, t)), "bandwidth_bytes_per_s") for t in names] for s in names]
    delays: Matrix = [[_of(links.get((s, t)), "latency_s") for t in names] for s in names]
    return names, rates, delays


def _of(link: Any, field: str) -> Optional[float]:
    return None if link is None else float(getattr(link, field))


def _draw_matrix(axis: Any, names: List[str], values: Matrix, quantity: Quantity, title: str, colours: str) -> None:
    """Draw a heat map with its numbers; pairs without a link stay grey."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FuncFormatter, LogLocator

    known = [value for row in values for value in row if value is not None]
    unit = common_unit(known, quantity)
    scaled = [[math.nan if value is None else value / unit.size for value in row] for row in values]
    picture = axis.imshow(scaled, cmap=colours, norm=_norm([value / unit.size for value in known]))
    axis.set_facecolor(canvas.IDLE)
    if len(names) <= MOST_NUMBERED:
        for row, cells in enumerate(scaled):
            for column, value in enumerate(cells):
                if not math.isnan(value):
                    shown = unit.text(value * unit.size)
                    ink = _ink(picture.cmap(picture.norm(value)))
                    axis.text(column, row, shown, ha="center", va="center", color=ink, fontsize=8)
    names = [canvas.shortened(name, MOST_CHARACTERS) for name in names]
    every = -(-len(names) // MOST_LABELLED)
    places = range(0, len(names), every)
    fits = len(names) * max(map(len, names)) <= MOST_CHARACTERS_BELOW
    axis.set_xticks(places, names[::every], rotation=0 if fits else 90, fontsize=8)
    axis.set_yticks(places, names[::every], fontsize=8)
    axis.set_xlabel("to")
    axis.set_ylabel("from")
    axis.set_title(f"{title} [{unit.label}]", fontsize=11)
    bar = axis.figure.colorbar(picture, ax=axis, label=f"[{unit.label}]", shrink=0.8)
    if isinstance(picture.norm, LogNorm):  # its own labels are math, which an SVG file with plain text shows as markup
        bar.set_ticks(LogLocator(subs=(1.0, 2.0, 5.0)))
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        bar.minorticks_off()


def _norm(values: List[float]) -> Any:
    from matplotlib.colors import LogNorm, Normalize

    low, high = min(values), max(values)
    if low > 0 and high > WIDE_RANGE * low:
        return LogNorm(low, high)
    return Normalize(0, high or 1.0)


def _ink(colour: Any) -> str:
    """Return black for light cells and white for dark ones, by the luminance of ITU-R BT.709."""
    red, green, blue, _ = colour
    return "black" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.5 else "white"
