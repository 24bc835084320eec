"""Alpa's layers timed on the devices of the cluster: the programs of which the runtime's stages are made."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
import operator
import statistics
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import msgspec

from hwaware.cluster import ClusterProfile, Device
from hwaware.errors import MeasurementError
from hwaware.patching import meshes
from hwaware.patching.layer_programs import LayerPrograms
from hwaware.placement.choices import remaining
from hwaware.reference_kernel import LAYERS, Reading, Reference
from hwaware.runtime.mesh import Place
from hwaware.runtime.timing import RESTING, Ask, ProgramTimer, Repeated, Timing, once_s, readings, timed, together
from hwaware.workload import MeasuredTime, Workload

_LIMIT_S = 600.0
# Each of the three that are a device's reading: twenty-five to fifty periods of a CPU quota. A result's factors are
# medians of its readings, twenty as a rule.
_READING_S = 0.5


def measured(
    workload: Workload, programs: Sequence[LayerPrograms], profile: ClusterProfile, exclude: Sequence[str] = ()
) -> Workload:
    """The workload with measured layer times, for every kind of device of the profile.

    The layers are timed on all devices that may be used. The process has to be connected to the cluster.

    Args:
        workload: The layers, traced.
        programs: What each of them runs; updates are timed where they are among it.
        profile: Of the running cluster.
        exclude: Hosts or devices that must not be used.

    Raises:
        MeasurementError: A host did not answer, or not in time.
        UnusableInputError: The cluster has no such host or device.
    """
    found = times_of(programs, functools.partial(_timed, profile, exclude))
    layers = tuple(
        msgspec.structs.replace(
            layer, measured={**(layer.measured or {}), **{kind: times[index] for kind, times in found.items()}}
        )
        for index, layer in enumerate(workload.layers)
    )
    return msgspec.structs.replace(workload, layers=layers)


@contextlib.contextmanager
def layers_reference(
    workload: Workload, programs: Sequence[LayerPrograms], profile: ClusterProfile
) -> Iterator[Reference]:
    """The workload's own layers, timed again and again beside its steps; the timers end with the block.

    Processors slow for one kind of work more than for another when others share them: a kernel that is not the model
    follows its drift by a half or by a third too much. One reading is a device's mean time of one run of each layer,
    timed as `hwaware.runtime.timing.timed` does, each over what the workload says of it:

        usual_s x mean over devices(sum of its layers' seconds now / sum of its layers' seconds in the workload)

    and the same for each kind of device: kinds drift apart, by a half within a minute and more.

    Args:
        workload: As `measured` returned it.
        programs: Of its layers.
        profile: Of the running cluster.

    Raises:
        MeasurementError: A host did not answer, or not in time.
    """
    whole = [program for layer in programs for program in layer.whole()]
    unlike = list(dict.fromkeys(whole))
    runs = [whole.count(program) for program in unlike]
    known = {kind: _seconds(workload, kind) for kind in dict.fromkeys(device.kind for device in profile.devices)}
    usual = [known[device.kind] for device in profile.devices]
    with _timers(profile, profile.devices) as ask:
        ask("compile", unlike, sum(program.argument_bytes() for program in whole))
        reading_s = max(_READING_S, once_s(ask))

        def now() -> Reading:
            ratios = [_once_each_s(runs, found) / then for found, then in zip(readings(ask, reading_s), usual)]
            of_kinds = {
                kind: statistics.mean(r for r, device in zip(ratios, profile.devices) if device.kind == kind)
                for kind in known
            }
            return Reading(statistics.mean(usual) * statistics.mean(ratios), of_kinds)

        yield Reference(LAYERS, statistics.mean(usual), now)


def _once_each_s(runs: Sequence[int], found: Sequence[Sequence[Sequence[float]]]) -> float:
    """The seconds of each program as often as it runs in a step; found are a device's readings."""
    means = [statistics.fmean(map(statistics.fmean, of_program)) for of_program in zip(*found)]
    return math.fsum(map(operator.mul, runs, means))


def _seconds(workload: Workload, kind: str) -> float:
    """One run of each layer's programs on a kind of device."""
    times = [(layer.measured or {})[kind]["1,1"] for layer in workload.layers]
    return sum(time.forward_s + time.backward_s + (time.update_s or 0.0) for time in times)


def times_of(
    programs: Sequence[LayerPrograms],
    time: Callable[[Sequence[Repeated], int], Mapping[str, Sequence[Timing]]],
) -> Dict[str, List[Dict[str, MeasuredTime]]]:
    """Each layer's times on each kind of device.

    Args:
        programs: Of the layers.
        time: Times programs, all of them unlike, with working sets of so many bytes, on some kinds of devices.

    Returns:
        Kind -> for each layer, the times of each sharding ("DP,TP") that was timed.
    """
    whole = [program for layer in programs for program in layer.whole()]
    parts = [program for layer in programs for part in layer.parts for program in part.programs()]
    unlike = list(dict.fromkeys([*whole, *parts]))
    # The whole model: the device that gets most layers, the fastest, touches nearly all of that.
    working_set_bytes = sum(program.argument_bytes() for program in whole)
    return {
        kind: _layer_times(programs, dict(zip(unlike, timings)))
        for kind, timings in time(unlike, working_set_bytes).items()
    }


def _layer_times(
    programs: Sequence[LayerPrograms], timings: Mapping[Repeated, Timing]
) -> List[Dict[str, MeasuredTime]]:
    seconds = {program: statistics.median(timing.readings_s) for program, timing in timings.items()}

    def one(forward: Optional[Repeated], backward: Optional[Repeated], update: Optional[Repeated]) -> MeasuredTime:
        passes = [timings[program] for program in (forward, backward) if program]
        return MeasuredTime(
            forward_s=seconds[forward] if forward else 0.0,
            backward_s=seconds[backward] if backward else 0.0,
            update_s=seconds[update] if update else None,
            deviation_s=together(passes).deviation_s if passes else None,
        )

    found = []
    for layer in programs:
        times = {"1,1": one(layer.forward, layer.backward, layer.update)}
        for part in layer.parts:
            times[f"{part.replicas},1"] = one(part.forward, part.backward, layer.update)
        found.append(times)
    return found


def _timed(
    profile: ClusterProfile, exclude: Sequence[str], programs: Sequence[Repeated], working_set_bytes: int
) -> Dict[str, List[Timing]]:
    """The timings on all devices of each kind."""
    devices = remaining(profile, exclude).devices
    with _timers(profile, devices) as ask:
        found = timed(ask, programs, working_set_bytes)
    of_kinds: Dict[str, List[List[Timing]]] = {}
    for device, timings in zip(devices, found):
        of_kinds.setdefault(device.kind, []).append(timings)
    return {kind: list(map(together, zip(*timings))) for kind, timings in of_kinds.items()}


class _Kept(NamedTuple):
    """Timers that outlast their use: by the ids of their devices, and what ends them all."""

    asks: Dict[Tuple[str, ...], Ask]
    end: contextlib.ExitStack


_KEPT: contextvars.ContextVar[Optional[_Kept]] = contextvars.ContextVar("hwaware_kept_timers", default=None)


@contextlib.contextmanager
def timers_kept() -> Iterator[None]:
    """Timers that are used in the block stay, with what they compiled, for their next use on the same devices.

    To start them and to compile a model's layers takes as long as to time these. Everything in the block is of one
    running cluster.
    """
    with contextlib.ExitStack() as end:
        token = _KEPT.set(_Kept({}, end))
        try:
            yield
        finally:
            _KEPT.reset(token)


@contextlib.contextmanager
def _timers(profile: ClusterProfile, devices: Sequence[Device]) -> Iterator[Ask]:
    """A timer on each of the devices, which ends with the block, or with that of `timers_kept` around it."""
    kept = _KEPT.get()
    if kept is None:
        with _started(profile, devices) as ask:
            yield ask
        return
    names = tuple(device.id for device in devices)
    if names not in kept.asks:
        kept.asks[names] = kept.end.enter_context(_started(profile, devices))
    yield kept.asks[names]


@contextlib.contextmanager
def _started(profile: ClusterProfile, devices: Sequence[Device]) -> Iterator[Ask]:
    """A timer on each of the devices, which ends with the block."""
    import ray

    from hwaware.patching.stock_jax import install

    places = meshes.device_places(profile)  # of all: it numbers each host's devices
    timers: Dict[str, Any] = {}
    try:
        for device in devices:
            place = _place(device, *places[device.id])
            node = {f"node:{place.address}": 0.001}
            timers[device.id] = ray.remote(num_cpus=0, resources=node)(ProgramTimer).remote(place, install)
        yield functools.partial(_ask, timers, {device.id: device.host for device in devices})
    finally:
        for timer in timers.values():
            ray.kill(timer)


def _place(device: Device, address: str, index: int) -> Place:
    """Of one device alone: by its hardware identity, if it has one."""
    return Place(0, address, (index,), uuids=(device.uuid,) if device.uuid else ())


def _ask(
    timers: Mapping[str, Any], hosts: Mapping[str, str], method: str, *arguments: Any, resting: Optional[int] = None
) -> List[Any]:
    """A method of every timer that does not rest."""
    import ray

    given = tuple(ray.put(argument) for argument in arguments)  # not once for each
    results: Dict[str, Any] = dict.fromkeys(timers)
    answers = {name: getattr(timers[name], method).remote(*given) for name in _working(hosts, resting)}
    for name, answer in answers.items():
        try:
            results[name] = ray.get(answer, timeout=_LIMIT_S)
        except ray.exceptions.RayError as error:  # also a host that is lost, or too slow
            reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
            raise MeasurementError(
                f"The layers were not timed on device {name!r} within {_LIMIT_S:g} s: {reason}.",
                "look at `ray status`, cut the model into fewer layers, or leave the measuring out.",
            ) from error
    return list(results.values())


def _working(hosts: Mapping[str, str], resting: Optional[int]) -> List[str]:
    """The devices of the hosts that do not rest."""
    names = list(dict.fromkeys(hosts.values()))
    rest = () if resting is None else names[resting::RESTING]
    return [name for name, host in hosts.items() if host not in rest]
