"""Start timers on the devices of a cluster, ask them, and time layers beside a benchmark's steps."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import math
import operator
import statistics
import time
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from hwaware import ray_cluster
from hwaware.calibration.programs import LayerPrograms
from hwaware.calibration.timing import RESTING, Ask, Each, ProgramTimer, once_s, readings
from hwaware.cluster import ClusterProfile, Device
from hwaware.device_places import device_places
from hwaware.errors import MeasurementError
from hwaware.formatting import counted
from hwaware.reference_kernel import LAYERS, Reading, Reference
from hwaware.runtime.mesh import Place
from hwaware.workload import Workload

LOG = logging.getLogger("hwaware")
_LIMIT_S = 600.0
# A timer that should have answered by the end of the calibration gets so much longer.
_GRACE_S = 2.0
# Part of what is left of a time limit in which timers may start: those that have started wait no longer for others.
_STARTING = 0.5
# Each of the three that are a device's reading: twenty-five to fifty periods of a CPU quota. A result's factors are
# medians of its readings, twenty as a rule.
_READING_S = 0.5


@contextlib.contextmanager
def layers_reference(
    workload: Workload, programs: Sequence[LayerPrograms], profile: ClusterProfile
) -> Iterator[Reference]:
    """Yield a reference that times the workload's layers again and again; its timers end with the block.

    Shared processors slow down for one kind of work more than for another. A kernel that is not the model follows the
    model's drift by a half or by a third too much. A reading compares each layer's mean time now, as
    `hwaware.calibration.timing.timed` measures it, with the workload's time:

        usual_s x mean over devices(sum of its layers' seconds now / sum of its layers' seconds in the workload)

    and the same for each kind of device: kinds drift apart, by a half within a minute and more.

    Args:
        workload: As `measured` returned it.
        programs: Programs of its layers.
        profile: Profile of the running cluster, in which devices of a kind are alike.

    Raises:
        MeasurementError: A host did not answer, or not in time.
    """
    whole = [program for layer in programs for program in layer.whole()]
    unlike = list(dict.fromkeys(whole))
    runs = [whole.count(program) for program in unlike]
    known = {kind: _seconds(workload, kind) for kind in dict.fromkeys(device.kind for device in profile.devices)}
    usual = [known[device.kind] for device in profile.devices]
    with timers(profile, profile.devices) as ask:
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
    """Return a step's seconds of all programs, each as often as it runs; `found` holds a device's readings."""
    means = [statistics.fmean(map(statistics.fmean, of_program)) for of_program in zip(*found)]
    return math.fsum(map(operator.mul, runs, means))


def _seconds(workload: Workload, kind: str) -> float:
    """Return the seconds of one run of each layer's programs on a kind of device."""
    times = [(layer.measured or {})[kind]["1,1"] for layer in workload.layers]
    return sum(time.forward_s + time.backward_s + (time.update_s or 0.0) for time in times)


class _Kept(NamedTuple):
    """Hold timers that outlast their use, by the ids of their devices, and their exit stack."""

    asks: Dict[Tuple[str, ...], Ask]
    end: contextlib.ExitStack


_KEPT: contextvars.ContextVar[Optional[_Kept]] = contextvars.ContextVar("hwaware_kept_timers", default=None)


@contextlib.contextmanager
def timers_kept() -> Iterator[None]:
    """Keep the timers that the block uses, with what they compiled, for their next use on the same devices.

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
def timers(profile: ClusterProfile, devices: Sequence[Device], end_s: float = math.inf) -> Iterator[Ask]:
    """Yield what asks a timer on each of the devices, until the block ends, or that of `timers_kept` around it.

    Args:
        profile: Profile of the running cluster; it numbers each host's devices.
        devices: Some of its devices.
        end_s: Time by which timers must have answered, in `time.monotonic`. A timer that is late is asked no
            more, and its answers are None. Without `end_s`, a timer that does not answer is an error.
    """
    kept = _KEPT.get()
    if kept is None:
        with _started(profile, devices, end_s) as ask:
            yield ask
        return
    names = tuple(device.id for device in devices)
    if names not in kept.asks:
        kept.asks[names] = kept.end.enter_context(_started(profile, devices, end_s))
    yield kept.asks[names]


@contextlib.contextmanager
def _started(profile: ClusterProfile, devices: Sequence[Device], end_s: float) -> Iterator[Ask]:
    import ray

    places = device_places(profile)
    started: Dict[str, Any] = {}
    try:
        for device in devices:
            place = _place(device, *places[device.id])
            node = {f"node:{place.address}": 0.001}
            started[device.id] = ray.remote(num_cpus=0, resources=node)(ProgramTimer).remote(place)
        yield functools.partial(_ask, started, {device.id: device.host for device in devices}, end_s)
    finally:
        ray_cluster.end_actors([*started.values()])


def _place(device: Device, address: str, index: int) -> Place:
    """Return the place of one device alone, by its hardware identity if it has one."""
    return Place(0, address, (index,), uuids=(device.uuid,) if device.uuid else ())


def _ask(
    started: Mapping[str, Any],
    hosts: Dict[str, str],
    end_s: float,
    method: str,
    *arguments: Any,
    resting: Optional[int] = None,
) -> List[Any]:
    """Call a method of every timer that does not rest, and return the answers. Forget timers that are late or fail.

    Raises:
        MeasurementError: All timers have failed, or one without `end_s`.
    """
    import ray

    common = [one if isinstance(one, Each) else ray.put(one) for one in arguments]  # not once for each
    places = {name: place for place, name in enumerate(started)}
    results: Dict[str, Any] = dict.fromkeys(started)
    answers = {
        name: getattr(started[name], method).remote(
            *(one.values[places[name]] if isinstance(one, Each) else one for one in common)
        )
        for name in _working(hosts, resting)
    }
    begin_s = time.monotonic()
    limit_s = min(_LIMIT_S, max(0.0, end_s - begin_s) + _GRACE_S)
    if answers and end_s < math.inf:  # one limit for all together
        part_s = limit_s * (_STARTING if method == "start" else 1.0)
        ready, late = ray.wait([*answers.values()], num_returns=len(answers), timeout=part_s)
        if not ready:
            late = ray.wait(late, num_returns=1, timeout=limit_s - part_s)[1]
            late = ray.wait(late, num_returns=len(late), timeout=_GRACE_S)[1] if late else []  # others soon after it
        for name in [name for name, answer in answers.items() if answer in late]:
            del answers[name], hosts[name]
    failures: List[MeasurementError] = []
    for name, answer in answers.items():
        try:
            results[name] = ray.get(answer, timeout=max(_GRACE_S, begin_s + limit_s - time.monotonic()))
        except ray.exceptions.RayError as error:  # also a host that is lost, or too slow
            failures.append(_failure(name, limit_s, error))
            if end_s == math.inf or len(hosts) == 1:
                raise failures[-1] from error
            del hosts[name]  # such as a device with too little memory: the others go on
    if failures:
        what = "%s Layer times of %s are estimated. To fix: %s"
        LOG.warning(what, failures[0].what, counted(len(failures), "device"), failures[0].fix)
    return list(results.values())


def _failure(name: str, limit_s: float, error: Exception) -> MeasurementError:
    """Return the error about a timer whose call ended with this error of Ray's."""
    import ray

    is_own = isinstance(error, ray.exceptions.RayTaskError)
    reason, _, fix = (ray_cluster.last_line(error) if is_own else ray_cluster.died(error)).partition(" To fix: ")
    return MeasurementError(
        f"The layers were not timed on device {name!r} within {limit_s:g} s: {reason.rstrip('.')}.",
        f"{fix}." if fix else "look at `ray status`, cut the model into fewer layers, or leave the measuring out.",
    )


def _working(hosts: Mapping[str, str], resting: Optional[int]) -> List[str]:
    """Return the devices of the hosts that do not rest."""
    names = list(dict.fromkeys(hosts.values()))
    rest = () if resting is None else names[resting::RESTING]
    return [name for name, host in hosts.items() if host not in rest]
