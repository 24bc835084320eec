"""Time a model's layers on the devices of a cluster: the programs that the runtime's stages are made of."""

from __future__ import annotations

import functools
import logging
import statistics
import time
from typing import Any, Callable, Collection, Dict, Iterable, List, Mapping, Optional, Sequence, Set

import msgspec

from hwaware.calibration.agreeing import Errors, agreed, errors_of
from hwaware.calibration.cache import AGAIN, KeptLayer, LayerCache, renewed
from hwaware.calibration.filling import Times, filled, seconds_per_flop
from hwaware.calibration.programs import LayerPrograms, LayerSource
from hwaware.calibration.timers import timers
from hwaware.calibration.timing import Repeated, Timed, Timing, timed, together
from hwaware.cluster import ClusterProfile, Device
from hwaware.costs.own_times import NOISE, with_device_times
from hwaware.errors import MeasurementError
from hwaware.formatting import counted
from hwaware.placement.choices import remaining
from hwaware.workload import MeasuredTime, Workload

LOG = logging.getLogger("hwaware")
#: Time limit of a calibration that nobody asked for.
LIMIT_S = 30.0
# Devices that are timed within a limit; more take the times of the most similar one.
_MOST_DEVICES = 64
# Layers that every device times.
_HEAVIEST = 2
_NO_TIMES: Times = {}


def measured(
    workload: Workload,
    sources: Sequence[LayerSource],
    profile: ClusterProfile,
    exclude: Sequence[str] = (),
) -> Workload:
    """Return the workload with the times of all layers on all devices, however long that takes.

    The process has to be connected to the cluster.

    Args:
        workload: The layers.
        sources: Their programs; updates are timed where they are among these.
        profile: Profile of the running cluster.
        exclude: Hosts or devices that must not be used.

    Raises:
        MeasurementError: A host did not answer, or not in time.
        UnusableInputError: The cluster has no such host or device.
    """
    devices = remaining(profile, exclude).devices
    unlike = {source.key: source for source in sources}
    with timers(profile, devices) as ask:
        errors: Dict[str, Errors] = {}

        def within(*given: Any) -> Timed:
            found = timed(ask, *given)
            errors.update((device.id, errors_of(timings)) for device, timings in zip(devices, found.timings))
            return found

        found = times_of([source.make(True) for source in unlike.values()], within)
    of_devices = {device.id: dict(zip(unlike, layers)) for device, layers in zip(devices, found)}
    return _with(workload, sources, profile, agreed(of_devices, errors, devices, workload.dtype))


def measured_within(
    workload: Workload,
    sources: Sequence[LayerSource],
    profile: ClusterProfile,
    exclude: Sequence[str] = (),
    limit_s: float = LIMIT_S,
) -> Workload:
    """Return the workload with the times of its layers, from the cache or measured within a limit.

    A layer that was not timed on a device gets an estimate from those that were. Where nothing could be timed, the
    workload stays as it is. One line of the log says beforehand how long this takes, and one line what was left out.

    Args:
        workload: The layers.
        sources: Their programs.
        profile: Profile of the running cluster, to which this process is connected.
        exclude: Hosts or devices that must not be used.
        limit_s: Time limit.

    Raises:
        UnusableInputError: The cluster has no such host or device.
    """
    import jax

    cache = LayerCache(jax.__version__)
    usable = remaining(profile, exclude).devices
    unlike = _by_weight(sources, workload)
    devices = _chosen(usable, workload.dtype)
    kept = {
        device.id: {key: layer for key, layer in cache.known(device).items() if key in unlike} for device in devices
    }
    missing = _missing(unlike, devices, kept, limit_s, workload.dtype)
    if any(layer.busy for name, known in kept.items() for key, layer in known.items() if key not in missing[name]):
        LOG.warning(
            "Hosts did other work while an earlier start timed the layers, so predictions may be too long. To fix: %s",
            AGAIN,
        )
    if any(missing.values()):
        fresh = _timed_within(unlike, devices, missing, profile, limit_s, workload.dtype)
        kept = {name: renewed(known, fresh.get(name, {})) for name, known in kept.items()}
        for device in devices:
            if device.id in fresh and not cache.keep(device, fresh[device.id]):
                break  # one warning is enough
    timed_layers = {name: {key: layer for key, layer in known.items() if layer.times} for name, known in kept.items()}
    if not any(timed_layers.values()):
        LOG.warning("No layer was timed; prices follow from the profile alone. %s", _longer(limit_s))
        return workload
    found = {name: {key: layer.times for key, layer in known.items()} for name, known in timed_layers.items()}
    errors = {name: _errors_of(known.values()) for name, known in timed_layers.items()}
    found = agreed(found, errors, devices, workload.dtype)
    return _with(workload, sources, profile, filled(found, sources, workload, usable))


def _errors_of(layers: Collection[KeptLayer]) -> Errors:
    """Return the errors of a device whose layers were kept, maybe by several starts."""
    programs, levels = [layer.error for layer in layers], [layer.level_error for layer in layers]
    return Errors(max(programs, default=NOISE), max(levels, default=NOISE))


def _chosen(devices: Sequence[Device], dtype: str) -> List[Device]:
    """Return the devices to time: all, or of many those that have the most different speeds within each kind."""
    if len(devices) <= _MOST_DEVICES:
        return list(devices)
    kinds: Dict[str, List[Device]] = {}
    for device in devices:
        kinds.setdefault(device.kind, []).append(device)
    each = max(1, _MOST_DEVICES // len(kinds))
    found = []
    for alike in kinds.values():
        ordered = sorted(alike, key=lambda device: seconds_per_flop(device, dtype))
        count = min(each, len(ordered))
        found += [ordered[place * (len(ordered) - 1) // max(1, count - 1)] for place in range(count)]
    return found[:_MOST_DEVICES]


def _missing(
    unlike: Collection[str],
    devices: Sequence[Device],
    kept: Mapping[str, Mapping[str, KeptLayer]],
    limit_s: float,
    dtype: str,
) -> Dict[str, List[str]]:
    """Return the layers that each device is to time.

    These were never timed, or without success or on busy hosts under a shorter limit. Where no device of a kind was
    asked for all layers, the fastest one is to time them all.
    """

    def lacks(layer: Optional[KeptLayer]) -> bool:
        return layer is None or (0 < layer.limit_s < limit_s and (not layer.times or layer.busy))

    missing = {name: [key for key in unlike if lacks(known.get(key))] for name, known in kept.items()}
    has_all = {
        device.kind
        for device in devices
        if all(key in kept[device.id] and kept[device.id][key].limit_s > 0 for key in unlike)
    }
    leaders = _leaders([device for device in devices if device.kind not in has_all], dtype)
    return {**missing, **{name: list(unlike) for name in leaders}}


def _by_weight(sources: Sequence[LayerSource], workload: Workload) -> Dict[str, LayerSource]:
    """Return unlike layers, those that compute most in a step first."""
    flops: Dict[str, float] = {}
    for source, layer in zip(sources, workload.layers):
        flops[source.key] = flops.get(source.key, 0.0) + layer.forward_flops + layer.backward_flops
    found = {source.key: source for source in sources}
    return {key: found[key] for key in sorted(found, key=lambda key: -flops[key])}


def _timed_within(
    unlike: Mapping[str, LayerSource],
    devices: Sequence[Device],
    missing: Mapping[str, Sequence[str]],
    profile: ClusterProfile,
    limit_s: float,
    dtype: str,
) -> Dict[str, Dict[str, KeptLayer]]:
    """Time what the cache lacks, on the devices that lack it.

    One device of each kind times all layers. The others time the heaviest ones, which tell their speed.
    """
    keys = [key for key in unlike if any(key in lacks for lacks in missing.values())]
    asked = [device for device in devices if missing[device.id]]
    LOG.info(
        "timing %s on %s, for at most %g s; the next start of this program times nothing ...",
        counted(len(keys), "different layer"), counted(len(asked), "device"), limit_s,
    )  # fmt: skip
    start_s = time.monotonic()
    busy: List[str] = []
    errors: Dict[str, Errors] = {}

    def left_s() -> float:
        return max(0.0, start_s + limit_s - time.monotonic())

    def timed_now(programs: Sequence[Repeated], working_set_bytes: int, others: int) -> Timed:
        """Time all programs on the leaders, and so many of the first ones on the other devices."""
        counts = [len(programs) if device.id in leaders else others for device in asked]
        found = timed(ask, programs, working_set_bytes, left_s(), counts, busy)
        busy.extend(found.busy)
        for device, timings in zip(asked, found.timings):
            errors.setdefault(device.id, errors_of(timings))  # whole layers come first
        return found

    try:
        with timers(profile, asked, start_s + limit_s) as ask:
            # Lowered here while the timers start there.
            whole = [unlike[key].make(False) for key in keys if left_s() > limit_s / 2]
            leaders = _leaders(asked, dtype, ask("start"))
            found = times_of(whole, functools.partial(timed_now, others=2 * _HEAVIEST))
            # Of the layers that compute most, as many as can be lowered in time.
            parts = [
                LayerPrograms(None, None, None, unlike[key].make(True).parts)
                for key in keys[: len(whole)]
                if left_s() > limit_s / 3
            ]
            if any(layer.parts for layer in parts):
                parts += [LayerPrograms(None, None, None, ())] * (len(whole) - len(parts))
                found = _merged(found, times_of(parts, functools.partial(timed_now, others=0)))
    except MeasurementError as error:
        LOG.warning("The layers were not timed. %s", error)
        return {}
    untried = [_NO_TIMES] * (len(keys) - len(whole))
    fresh: Dict[str, Dict[str, KeptLayer]] = {}
    if any(map(any, found)):  # if no device answers, the next start asks again
        for device, layers in zip(asked, found):
            most = len(keys) if device.id in leaders else _HEAVIEST
            error_of = {"error": errors[device.id].program, "level_error": errors[device.id].level}
            fresh[device.id] = {
                key: KeptLayer(
                    times=times, limit_s=limit_s if times or place < most else 0, busy=bool(busy), **error_of
                )
                for place, (key, times) in enumerate(zip(keys, [*layers, *untried]))
            }
    LOG.info("timed the layers in %.0f s.", time.monotonic() - start_s)
    untimed = [key for key in keys if not all(name in fresh and fresh[name][key].times for name in leaders)]
    if untimed and (fresh or any(len(lacks) < len(unlike) for lacks in missing.values())):
        LOG.warning(
            "Time ran out before each kind of device had timed %d of %d layers; missing times are estimated. %s",
            len(untimed), len(keys), _longer(limit_s),
        )  # fmt: skip
    return fresh


def _leaders(devices: Sequence[Device], dtype: str, has_started: Iterable[Any] = ()) -> Set[str]:
    """Return the fastest device of each kind, if possible one whose timer has started."""
    started = dict(zip((device.id for device in devices), has_started))
    found: Dict[str, str] = {}
    for device in sorted(devices, key=lambda one: (not started.get(one.id), seconds_per_flop(one, dtype))):
        found.setdefault(device.kind, device.id)
    return set(found.values())


def _longer(limit_s: float) -> str:
    return f"To fix: give a longer limit, such as HWAWARE_CALIBRATION_S={4 * limit_s:g}."


def _merged(whole: Sequence[Sequence[Times]], parts: Sequence[Sequence[Times]]) -> List[List[Times]]:
    """Return the times of whole layers, with those of their parts where both were timed."""

    def both(times: Times, more: Times) -> Times:
        if not times:
            return times
        update_s = times["1,1"].update_s
        return {**times, **{name: msgspec.structs.replace(one, update_s=update_s) for name, one in more.items()}}

    return [[both(*layer) for layer in zip(*of_device)] for of_device in zip(whole, parts)]


def times_of(
    programs: Sequence[LayerPrograms], time_programs: Callable[[Sequence[Repeated], int], Timed]
) -> List[List[Times]]:
    """Return each layer's times on each device.

    Args:
        programs: Programs of the layers, the most important first.
        time_programs: Times programs, all unlike, with working sets of so many bytes, on some devices.

    Returns:
        For each device and layer, the times of each sharding ("DP,TP") whose passes were timed.
    """
    whole = [program for layer in programs for program in (layer.forward, layer.backward) if program is not None]
    updates = [layer.update for layer in programs if layer.update is not None]
    parts = [program for layer in programs for part in layer.parts for program in part.programs()]
    unlike = list(dict.fromkeys([*whole, *updates, *parts]))
    if not unlike:
        return []
    # The whole model: the device that gets most layers, the fastest, touches nearly all of that.
    working_set_bytes = sum(program.argument_bytes() for program in (*whole, *updates))
    return [
        [_layer_times(layer, {program: one for program, one in zip(unlike, timings) if one}) for layer in programs]
        for timings in time_programs(unlike, working_set_bytes).timings
    ]


def _layer_times(layer: LayerPrograms, timings: Mapping[Repeated, Timing]) -> Times:
    def seconds(program: Optional[Repeated]) -> Optional[float]:
        return statistics.median(timings[program].readings_s) if program and program in timings else None

    def one(passes: Iterable[Optional[Repeated]]) -> Optional[MeasuredTime]:
        both = list(passes)
        if any(program is not None and program not in timings for program in both):
            return None
        known = [timings[program] for program in both if program is not None]
        return MeasuredTime(
            forward_s=seconds(both[0]) or 0.0,
            backward_s=seconds(both[1]) or 0.0,
            update_s=seconds(layer.update),
            deviation_s=together(known).deviation_s if known else None,
        )

    found = {f"{part.replicas},1": one((part.forward, part.backward)) for part in layer.parts}
    if layer.whole():
        found["1,1"] = one((layer.forward, layer.backward))
    return {sharding: times for sharding, times in found.items() if times is not None}


def _with(
    workload: Workload,
    sources: Sequence[LayerSource],
    profile: ClusterProfile,
    of_devices: Mapping[str, Mapping[str, Times]],
) -> Workload:
    """Return the workload with these times, device -> key of the layer -> sharding."""
    times = {name: [layers[source.key] for source in sources] for name, layers in of_devices.items()}
    return with_device_times(workload, profile, times)
