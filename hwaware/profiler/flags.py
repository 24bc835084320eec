"""Flag the numbers that a reader should doubt: pure functions from measured records to flags."""

from __future__ import annotations

import math
import statistics
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import msgspec

from hwaware.cluster import Device, Flag, Link
from hwaware.formatting import BYTES, FLOPS, FLOPS_PER_S, SECONDS, column, text
from hwaware.host_load import BUSY
from hwaware.link_flags import SLOWER, asymmetric, link_flag, slow_links
from hwaware.profiler.summary import DISTURBED

# The limit that the documentation promises: two measurements of one thing agree within 5 %.
UNSTEADY = 0.05
# A device has slowed if later products of its last sizes took at least this many times as long as all earlier ones.
_SLOWED = 1.25
_SLOWED_SIZES = 2
# A larger message or product is doubtful if it takes less time than a smaller one by more than this part.
_NON_MONOTONE = 0.05
# Reasons for a lower clock that training does not have to meet, as nvidia-smi names them.
_FAULTS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
# The profiler writes no larger numbers.
_LARGEST = 1e30
# The time of a shorter message is mostly latency, and scatters.
_LONG_BYTES = 1 << 20


def all_flags(devices: Sequence[Device], links: Sequence[Link], loads: Sequence[Mapping[str, Any]]) -> List[Flag]:
    """Return every flag that the measurements themselves show.

    Args:
        devices: Devices. Some flags need the evidence that the profiler writes into `samples`.
        links: Links. Some flags need the evidence that the profiler writes.
        loads: {host: {"busy": part of its processors}} before the measurement, and the same after it.
    """
    # Imported profiles may have links between single devices. These are not comparable with links between hosts.
    ids = {device.id for device in devices}
    of_hosts = [link for link in links if not {link.source, link.target} & ids]
    found = [
        *_slowed(devices),
        *_unsteady_devices(devices),
        *_slow_devices(devices),
        *_throttled(devices),
        *_non_monotone_devices(devices),
        *_unsteady_links(links),
        *asymmetric(of_hosts),
        *slow_links(devices, of_hosts),
        *_non_monotone_links(links),
        *_loaded(loads),
    ]
    slowed = {flag.subjects for flag in found if flag.kind == "slowed"}
    hosts = {device.id: device.host for device in devices}
    return [_of_hosts(flag, hosts) for flag in found if flag.kind != "unsteady" or flag.subjects not in slowed]


def _of_hosts(flag: Flag, hosts: Mapping[str, str]) -> Flag:
    """Return the flag of a link with an argument that names hosts: nothing measures the link of two devices alone."""
    if len(flag.subjects) != 2 or not set(flag.subjects) <= set(hosts):
        return flag
    return msgspec.structs.replace(flag, only=("+".join(hosts[end] for end in flag.subjects),))


def _products(device: Device) -> Dict[Tuple[str, int], List[Mapping[str, Any]]]:
    """Return the samples of each data type and size, in the order of time. The size timed last comes last."""
    samples = device.samples if isinstance(device.samples, dict) else {}
    products = samples.get("products")
    found: Dict[Tuple[str, int], List[Mapping[str, Any]]] = {}
    for dtype, entries in products.items() if isinstance(products, dict) else ():
        for entry in entries if isinstance(entries, (list, tuple)) else ():
            if _is_sample(entry):
                key = dtype, entry["edge"]
                found[key] = [*found.pop(key, []), entry]
    return found


def _is_sample(entry: Any) -> bool:
    """Return True if the entry has the form of the profiler's samples: evidence in a file may be anything."""
    keys = ("edge", "calls", "seconds", "reference_s")
    return isinstance(entry, dict) and all(_is_amount(entry.get(key)) for key in keys)


def _is_amount(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < _LARGEST


def _quiet(device: Device) -> Dict[Tuple[str, int], List[float]]:
    """Return the undisturbed times of one product [s] by data type and size, in the order of time."""
    products = _products(device)
    references = [entry["reference_s"] for entries in products.values() for entry in entries]
    most = DISTURBED * min(references, default=0.0)
    return {
        key: [entry["seconds"] / entry["calls"] for entry in entries if entry["reference_s"] <= most]
        for key, entries in products.items()
    }


def _slowed(devices: Sequence[Device]) -> Iterator[Flag]:
    for device in devices:
        for sizes in _timed_last(device):
            steps = [step for entries in sizes for step in [_step(entries)] if step is not None]
            # One reading of the reference kernel can be wrong by half. The mean over sizes is wrong by less.
            means = [statistics.fmean(map(math.log, ratios)) for ratios in zip(*((s.alone, s.relative) for s in steps))]
            if len(steps) == _SLOWED_SIZES and min(means) > math.log(_SLOWED):
                what = (
                    f"Device {device.id} became slower midway: products of {len(steps)} sizes took "
                    f"{statistics.median(s.factor for s in steps):.2f} times as long as before, while the reference "
                    "kernel beside them did not slow alike: it is the device, not its machine."
                )
                yield Flag(kind="slowed", subjects=(device.id,), what=what, only=(device.id,))
                break


def _timed_last(device: Device) -> Iterator[List[List[Mapping[str, Any]]]]:
    """Yield, for each data type, the samples of the sizes that were timed last, in the order of time."""
    by_dtype: Dict[str, Dict[int, List[Mapping[str, Any]]]] = {}
    for (dtype, edge), entries in _products(device).items():
        by_dtype.setdefault(dtype, {})[edge] = entries
    for sizes in by_dtype.values():
        yield list(sizes.values())[-_SLOWED_SIZES:]


class _Step(NamedTuple):
    """A lasting rise of one size's times, at one point of the measurement.

    Attributes:
        factor: The median time after that point over the median time before it.
        alone: The shortest time after that point over the longest time before it.
        relative: The same as `alone`, for times divided by the reference kernel's times.
    """

    factor: float
    alone: float
    relative: float


def _step(entries: Sequence[Mapping[str, Any]]) -> Optional[_Step]:
    """Return the clearest rise of one size's times; None if they do not rise.

    The times must also rise in relation to the reference kernel's times beside them. Else the machine slowed.
    """
    times = [float(entry["seconds"] / entry["calls"]) for entry in entries]
    relative = [seconds / entry["reference_s"] for seconds, entry in zip(times, entries)]
    found = [
        _Step(
            statistics.median(times[place:]) / statistics.median(times[:place]),
            *(min(values[place:]) / max(values[:place]) for values in (times, relative)),
        )
        for place in range(1, len(times))
    ]
    clearest = max(found, key=lambda step: min(step.alone, step.relative), default=None)
    return clearest if clearest is not None and min(clearest.alone, clearest.relative) > 1 else None


def _unsteady_devices(devices: Sequence[Device]) -> Iterator[Flag]:
    for device in devices:
        repeated = [times for times in _quiet(device).values() if len(times) > 1]
        spreads = [statistics.stdev(times) / statistics.fmean(times) for times in repeated]
        if spreads and statistics.median(spreads) > UNSTEADY:
            what = (
                f"Device {device.id} is unsteady: repeated products of one size differ by "
                f"{statistics.median(spreads):.1%} (coefficient of variation), expected at most {UNSTEADY:.0%}."
            )
            yield Flag(kind="unsteady", subjects=(device.id,), what=what, only=(device.id,))


def _slow_devices(devices: Sequence[Device]) -> Iterator[Flag]:
    classes: Dict[str, List[Device]] = {}
    for device in devices:
        classes.setdefault(device.kind, []).append(device)
    for kind, members in classes.items():
        for device in members if len(members) > 1 else ():
            found = _beside_class(device, members)
            if found is not None and found.share < 1 - SLOWER:
                label, (own, median) = column((found.flops_per_s, found.flops_per_s / found.share), FLOPS_PER_S)
                what = (
                    f"Device {device.id} reaches {found.share:.0%} of the median of the {len(members)} devices of its "
                    f"kind ({kind}), expected {1 - SLOWER:.0%} and more: {own} against {median} {label} in "
                    f"{found.dtype} products of {text(found.flops, FLOPS)}, the median of the measured sizes by share."
                )
                yield Flag(kind="slow", subjects=(device.id,), what=what, only=(device.id,))


def _throttled(devices: Sequence[Device]) -> Iterator[Flag]:
    """Yield a flag for each GPU that heat or its power supply slowed; a power limit is as in training."""
    for device in devices:
        clocks = device.samples.get("clocks") if isinstance(device.samples, dict) else None
        for dtype, clock in clocks.items() if isinstance(clocks, dict) else ():
            reasons = clock.get("slowed_by") if isinstance(clock, dict) else None
            found = [one for one in reasons if one in _FAULTS] if isinstance(reasons, (list, tuple)) else []
            if found:
                what = (
                    f"Device {device.id} lowered its clock while it multiplied in {dtype} "
                    f"(nvidia-smi: {', '.join(found)}). See its cooling and its power supply, then measure it again."
                )
                yield Flag(kind="throttled", subjects=(device.id,), what=what, only=(device.id,))
                break


class _Beside(NamedTuple):
    """A device's rate at one size, as a share of the median rate of its class."""

    share: float
    flops_per_s: float
    flops: float
    dtype: str


def _beside_class(device: Device, members: Sequence[Device]) -> Optional[_Beside]:
    """Compare a device with its class at all common sizes. Return the size with the median share, or None."""
    shares = []
    for dtype, points in device.throughput.items():
        curves = [{p.flops: p.flops / p.seconds for p in other.throughput.get(dtype, ())} for other in members]
        for point in points:
            rates = [curve[point.flops] for curve in curves if point.flops in curve]
            if len(rates) == len(members):
                own = point.flops / point.seconds
                shares.append(_Beside(own / statistics.median(rates), own, point.flops, dtype))
    return statistics.median_low(shares) if shares else None


def _non_monotone_devices(devices: Sequence[Device]) -> Iterator[Flag]:
    for device in devices:
        for dtype, points in device.throughput.items():
            times = [(point.flops, point.seconds) for point in points]
            drop = _drop(times)
            if drop is not None:
                what = (
                    f"Device {device.id}: a {dtype} product of {text(drop[1][0], FLOPS)} took "
                    f"{text(drop[1][1], SECONDS)}, a smaller one of {text(drop[0][0], FLOPS)} took "
                    f"{text(drop[0][1], SECONDS)}."
                )
                yield Flag(kind="non-monotone", subjects=(device.id,), what=what, only=(device.id,))


def _drop(times: Sequence[Tuple[float, float]]) -> Optional[Tuple[Tuple[float, float], Tuple[float, float]]]:
    """Return the first two neighbouring sizes where the larger one took clearly less time, or None."""
    ordered = sorted(times)
    for smaller, larger in zip(ordered, ordered[1:]):
        if larger[1] < (1 - _NON_MONOTONE) * smaller[1]:
            return smaller, larger
    return None


def _unsteady_links(links: Sequence[Link]) -> Iterator[Flag]:
    for link in links:
        rates = (link.evidence or {}).get("bytes_per_s")
        cv = rates.get("cv", 0.0) if isinstance(rates, dict) else 0.0
        cv = cv if _is_amount(cv) else 0.0
        if cv > UNSTEADY:
            what = (
                f"Link {link.source} -> {link.target} is unsteady: the rates of its longest messages differ by "
                f"{cv:.1%} (coefficient of variation), expected at most {UNSTEADY:.0%}."
            )
            yield link_flag("unsteady", link, what)


def _non_monotone_links(links: Sequence[Link]) -> Iterator[Flag]:
    for link in links:
        drop = _drop([(sample.bytes, sample.seconds) for sample in link.samples if sample.bytes >= _LONG_BYTES])
        if drop is not None:
            what = (
                f"Link {link.source} -> {link.target}: a message of {text(drop[1][0], BYTES)} took "
                f"{text(drop[1][1], SECONDS)}, a smaller one of {text(drop[0][0], BYTES)} "
                f"{text(drop[0][1], SECONDS)}."
            )
            yield link_flag("non-monotone", link, what)


def _loaded(loads: Sequence[Mapping[str, Any]]) -> Iterator[Flag]:
    """Yield one flag for all hosts that were equally busy, because hosts inside one machine share its processors."""
    alike: Dict[Tuple[float, ...], List[str]] = {}
    for host in dict.fromkeys(host for load in loads for host in load):
        busy = tuple(float(load[host].get("busy", 0.0)) for load in loads if host in load)
        if max(busy, default=0.0) > BUSY:
            alike.setdefault(busy, []).append(host)
    for busy, hosts in alike.items():
        shown = " and ".join(f"{part:.0%}" for part in busy)
        subject, them = (f"Host {hosts[0]}", "it") if len(hosts) == 1 else (f"Hosts {', '.join(hosts)}", "them")
        what = (
            f"{subject} did other work when the profiler measured {them}: other programs used {shown} of the "
            f"processors before and after, expected less than {BUSY:.0%}. "
            "So devices and links may be faster than measured."
        )
        yield Flag(kind="loaded", subjects=tuple(hosts), what=what, only=tuple(hosts))
