"""Alpa's layers timed on the devices of the cluster: the programs of which the runtime's stages are made."""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

import msgspec

from hwaware.cluster import ClusterProfile, Device
from hwaware.errors import MeasurementError
from hwaware.patching import meshes
from hwaware.patching.layer_programs import LayerPrograms, function_programs, layer_programs
from hwaware.placement.choices import remaining
from hwaware.reference_kernel import recorded_s
from hwaware.runtime.mesh import Place
from hwaware.runtime.timing import ProgramTimer, Repeated, Timing, at_speed_s, timed
from hwaware.tracing.programs import LayerFunctions
from hwaware.workload import MeasuredTime, Workload

_LIMIT_S = 600.0


def measured(
    workload: Workload, arguments: Mapping[str, Any], profile: ClusterProfile, exclude: Sequence[str] = ()
) -> Workload:
    """The workload with measured layer times, for every kind of device of the profile.

    The layers are timed on all devices that may be used, all of them at once.

    Args:
        workload: Alpa's layers, traced.
        arguments: Those of Alpa's stage construction, which have the layers themselves.
        profile: Of the running cluster.
        exclude: Hosts or devices that must not be used.

    Raises:
        MeasurementError: A host did not answer, or not in time.
        UnusableInputError: The cluster has no such host or device.
    """
    return _measured(workload, layer_programs(arguments, workload.microbatch_size), profile, exclude)


def measured_functions(workload: Workload, functions: Sequence[LayerFunctions], profile: ClusterProfile) -> Workload:
    """The same for the layers of `hwaware.tracing.function.trace_programs`; their update is not timed.

    The process has to be connected to the cluster.

    Raises:
        MeasurementError: A host did not answer, or not in time.
    """
    return _measured(workload, function_programs(functions, workload.microbatch_size), profile)


def _measured(
    workload: Workload, programs: Sequence[LayerPrograms], profile: ClusterProfile, exclude: Sequence[str] = ()
) -> Workload:
    found = times_of(programs, profile, functools.partial(_timed, profile, exclude))
    layers = tuple(
        msgspec.structs.replace(
            layer, measured={**(layer.measured or {}), **{kind: times[index] for kind, times in found.items()}}
        )
        for index, layer in enumerate(workload.layers)
    )
    return msgspec.structs.replace(workload, layers=layers)


def times_of(
    programs: Sequence[LayerPrograms],
    profile: ClusterProfile,
    time: Callable[[Sequence[Repeated], int], Mapping[str, Sequence[Sequence[Timing]]]],
) -> Dict[str, List[Dict[str, MeasuredTime]]]:
    """Each layer's times on each kind of device, at the speed that the machine had while the profile was taken.

    Args:
        programs: Of the layers.
        profile: Says how long its reference kernel took, or the times stay as they are.
        time: Times programs, all of them unlike, with working sets of so many bytes, on some kinds of devices.

    Returns:
        Kind -> for each layer, the times of each sharding ("DP,TP") that was timed.
    """
    whole = [program for layer in programs for program in layer.whole()]
    unlike = list(dict.fromkeys([*whole, *(program for layer in programs for program in layer.parts())]))
    # The whole model: the device that gets most layers, the fastest, touches nearly all of that.
    working_set_bytes = sum(program.argument_bytes() for program in whole)
    reference_s = recorded_s(profile.environment)
    return {
        kind: _layer_times(programs, {p: at_speed_s(found, reference_s) for p, found in zip(unlike, timings)})
        for kind, timings in time(unlike, working_set_bytes).items()
    }


def _layer_times(programs: Sequence[LayerPrograms], seconds: Mapping[Repeated, float]) -> List[Dict[str, MeasuredTime]]:
    def one(forward: Optional[Repeated], backward: Optional[Repeated], update: Optional[Repeated]) -> MeasuredTime:
        return MeasuredTime(
            forward_s=seconds[forward] if forward else 0.0,
            backward_s=seconds[backward] if backward else 0.0,
            update_s=seconds[update] if update else None,
        )

    found = []
    for layer in programs:
        times = {"1,1": one(layer.forward, layer.backward, layer.update)}
        if layer.parts():
            times[f"{layer.replicas},1"] = one(layer.forward_part, layer.backward_part, layer.update)
        found.append(times)
    return found


def _timed(
    profile: ClusterProfile, exclude: Sequence[str], programs: Sequence[Repeated], working_set_bytes: int
) -> Dict[str, List[List[Timing]]]:
    """The timings on all devices of each kind, one after the other."""
    import ray

    from hwaware.patching.stock_jax import install

    devices = remaining(profile, exclude).devices
    places = meshes.device_places(profile)  # of all: it numbers each host's devices
    timers: Dict[str, Any] = {}
    try:
        for device in devices:
            place = _place(device, *places[device.id])
            node = {f"node:{place.address}": 0.001}
            timers[device.id] = ray.remote(num_cpus=0, resources=node)(ProgramTimer).remote(place, install)
        found = timed(functools.partial(_ask, timers), programs, working_set_bytes)
    finally:
        for timer in timers.values():
            ray.kill(timer)
    together: Dict[str, List[List[Timing]]] = {}
    for device, timings in zip(devices, found):
        of_kind = together.setdefault(device.kind, [[] for _ in programs])
        for kept, more in zip(of_kind, timings):
            kept.extend(more)
    return together


def _place(device: Device, address: str, index: int) -> Place:
    """Of one device alone: by its hardware identity, if it has one."""
    return Place(0, address, (index,), uuids=(device.uuid,) if device.uuid else ())


def _ask(timers: Mapping[str, Any], method: str, *arguments: Any, at_once: bool = True) -> List[Any]:
    """A method of every timer, asked of all at once or of one after the other."""
    import ray

    answers = []
    if at_once:
        arguments = tuple(ray.put(argument) for argument in arguments)  # not once for each
        answers = [getattr(timer, method).remote(*arguments) for timer in timers.values()]
    results = []
    for position, (name, timer) in enumerate(timers.items()):
        answer = answers[position] if at_once else getattr(timer, method).remote(*arguments)
        try:
            results.append(ray.get(answer, timeout=_LIMIT_S))
        except ray.exceptions.RayError as error:  # also a host that is lost, or too slow
            reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
            raise MeasurementError(
                f"The layers were not timed on device {name!r} within {_LIMIT_S:g} s: {reason}.",
                "look at `ray status`, cut the model into fewer layers, or leave the measuring out.",
            ) from error
    return results
