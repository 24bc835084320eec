"""Alpa's layers timed on the devices of the cluster: the programs of which the runtime's stages are made."""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence

import msgspec

from hwaware.cluster import ClusterProfile
from hwaware.errors import MeasurementError
from hwaware.patching import meshes, splitting
from hwaware.placement.choices import remaining
from hwaware.reference_kernel import recorded_s
from hwaware.runtime.mesh import Place
from hwaware.runtime.programs import lower, lower_function
from hwaware.runtime.timing import ProgramTimer, Repeated, Timing, at_speed_s, timed
from hwaware.tracing.programs import Function, LayerFunctions
from hwaware.workload import MeasuredTime, Workload

_LIMIT_S = 600.0


class LayerPrograms(NamedTuple):
    """The programs of one layer; None where it has none, or none that runs alone."""

    forward: Optional[Repeated]
    backward: Optional[Repeated]
    update: Optional[Repeated]


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
    return _measured(workload, layer_programs(arguments), profile, exclude)


def measured_functions(workload: Workload, functions: Sequence[LayerFunctions], profile: ClusterProfile) -> Workload:
    """The same for the layers of `hwaware.tracing.function.trace_programs`; their update is not timed.

    The process has to be connected to the cluster.

    Raises:
        MeasurementError: A host did not answer, or not in time.
    """
    return _measured(workload, function_programs(functions), profile)


def function_programs(functions: Sequence[LayerFunctions]) -> List[LayerPrograms]:
    """The programs of traced layers."""

    def lowered(function: Optional[Function]) -> Optional[Repeated]:
        if function is None:
            return None
        return Repeated(
            lower_function(function.run, function.arguments, "layer", None, dict(function.sums)), function.sums
        )

    return [LayerPrograms(lowered(layer.forward), lowered(layer.backward), None) for layer in functions]


def _measured(
    workload: Workload, programs: Sequence[LayerPrograms], profile: ClusterProfile, exclude: Sequence[str] = ()
) -> Workload:
    found = times_of(programs, profile, functools.partial(_timed, profile, exclude))
    layers = tuple(
        msgspec.structs.replace(
            layer, measured={**(layer.measured or {}), **{kind: {"1,1": times[index]} for kind, times in found.items()}}
        )
        for index, layer in enumerate(workload.layers)
    )
    return msgspec.structs.replace(workload, layers=layers)


def layer_programs(arguments: Mapping[str, Any]) -> List[LayerPrograms]:
    """The programs of each layer, as they run in a step: accumulators and states are overwritten."""
    layers = arguments["layers"]
    inference = arguments["pipeline_schedule"] == "inference"
    count = len(layers) if inference else len(layers) // 2
    updates = arguments["jax_apply_layers"]
    sums, states = arguments["accumulator_mapping"], arguments["apply_grad_global_info"][0]
    return [
        LayerPrograms(
            forward=_repeated(layers[index], {}, microbatched=True),
            backward=None if inference else _repeated(layers[-1 - index], sums, microbatched=True),
            update=None if inference else _update(updates[index], states),
        )
        for index in range(count)
    ]


def _update(layer: Any, states: Mapping[Any, Any]) -> Optional[Repeated]:
    """The update of one layer's parameters; None where it waits for other meshes."""
    if layer is None or splitting.has_reductions(layer.closed_jaxpr()):
        return None
    return _repeated(layer, states, microbatched=False)


def _repeated(layer: Any, takes_over: Mapping[Any, Any], microbatched: bool) -> Repeated:
    places = {variable: place for place, variable in enumerate(layer.outvars)}
    pairs = {
        place: places[takes_over[variable]]
        for place, variable in enumerate(layer.invars)
        if variable in takes_over and takes_over[variable] in places
    }
    # One name for all, so that layers that are alike have the same text and are timed once.
    program = lower(layer.closed_jaxpr(), "layer", pairs, microbatched=microbatched)
    return Repeated(program, tuple(pairs.items()))


def times_of(
    programs: Sequence[LayerPrograms],
    profile: ClusterProfile,
    time: Callable[[Sequence[Repeated], int], Mapping[str, Sequence[Sequence[Timing]]]],
) -> Dict[str, List[MeasuredTime]]:
    """Each layer's times on each kind of device, at the speed that the machine had while the profile was taken.

    Args:
        programs: Of the layers.
        profile: Says how long its reference kernel took, or the times stay as they are.
        time: Times programs, all of them unlike, with working sets of so many bytes, on some kinds of devices.
    """
    every = [program for layer in programs for program in layer if program is not None]
    unlike = list(dict.fromkeys(every))
    # The whole model: the device that gets most layers, the fastest, touches nearly all of that.
    working_set_bytes = sum(program.argument_bytes() for program in every)
    reference_s = recorded_s(profile.environment)
    return {
        kind: _layer_times(programs, {p: at_speed_s(found, reference_s) for p, found in zip(unlike, timings)})
        for kind, timings in time(unlike, working_set_bytes).items()
    }


def _layer_times(programs: Sequence[LayerPrograms], seconds: Mapping[Repeated, float]) -> List[MeasuredTime]:
    return [
        MeasuredTime(
            forward_s=seconds[layer.forward] if layer.forward else 0.0,
            backward_s=seconds[layer.backward] if layer.backward else 0.0,
            update_s=seconds[layer.update] if layer.update else None,
        )
        for layer in programs
    ]


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
            address, index = places[device.id]
            node = {f"node:{address}": 0.001}
            timers[device.id] = ray.remote(num_cpus=0, resources=node)(ProgramTimer).remote(
                Place(0, address, (index,)), install
            )
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
