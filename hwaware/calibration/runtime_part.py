"""Measure the time that the runtime needs beside a stage's program and the network, in real training.

The caller gives the function that trains: it belongs to the rooms above, which run Alpa.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import statistics
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Optional, Protocol, Sequence, Tuple

import msgspec

from hwaware.cluster import ClusterProfile, LinkTable
from hwaware.costs.compute import device_time_s
from hwaware.costs.evaluate import evaluate
from hwaware.costs.pipeline import one_f_one_b_s
from hwaware.dtypes import MEASURED
from hwaware.errors import MeasurementError, cause_of
from hwaware.plans import Plan, Replica, Stage
from hwaware.timeline import Timeline
from hwaware.workload import Workload

NUM_MICROBATCHES = 32
LOG = logging.getLogger("hwaware")
_HIDDEN = 8
_WARMUP, _STEPS = 3, 8
# Size of the summed gradients, in blocks of 4 MiB. They fill a tenth of a device's memory, up to MOST_SUMMED blocks.
SUMMED_HIDDEN, MOST_SUMMED = 1024, 4
_SUMMED_PART = 0.1


# Devices in the pipeline that measures passes; the others' times follow from their speed.
MOST_STAGES = 16


class Run(Protocol):
    """A training program under Alpa; see `hwaware.bench.training.TrainingRun`."""

    workload: Workload

    def wait_until_compiled(self) -> None:
        """Wait for the workers."""

    def step(self) -> float:
        """Train one step, and return its wall time [s]."""

    def timed_step(self) -> Any:
        """Train one step, and return its times: `wall_s`, and `pipeline_s` without the driver's part."""

    def recorded(self, timelines: List[Timeline]) -> ContextManager[None]:
        """Append the timeline of the block's steps to `timelines`."""

    def close(self) -> None:
        """End the workers."""


#: Starts a training program: its name, a model of `hwaware.models`, the profile, numbers of layers and microbatches,
#: the microbatch size, the plan.
Start = Callable[[str, Any, ClusterProfile, int, int, int, Plan], Run]


def with_runtime(profile: ClusterProfile, start: Start) -> ClusterProfile:
    """Return the profile with `driver_s`, and `pass_s` and, if devices can sum gradients, `sum_bytes_per_s` of each.

    Args:
        profile: Profile of the running cluster, to which this process is connected.
        start: Starts a training program.

    Raises:
        HwawareError: A program could not run, or the devices have no data type in common.
    """
    found = with_passes(profile, start)
    try:
        return with_sums(found, start)
    except Exception as error:  # noqa: BLE001  # whatever it is, the passes are timed
        LOG.warning("The profile lacks the rates at which devices sum gradients: %s", cause_of(error))
        return found


def with_passes(profile: ClusterProfile, start: Start) -> ClusterProfile:
    """Return the profile with `driver_s`, and `pass_s` of every device, the runtime's own time for each pass.

    A pipeline through the devices, through MOST_STAGES of many, computes almost nothing and takes a few steps. The
    host's processor does a pass's work, so a device with half the speed needs twice as long. That leaves one unknown.
    The formula of 1F1B must give the measured step for it.

    Args:
        profile: Profile of the running cluster, to which this process is connected.
        start: Starts a training program.

    Raises:
        HwawareError: The pipeline could not run, or the devices have no data type in common.
    """
    slowness = _slowness(profile)
    count = len(profile.devices)
    used = min(count, MOST_STAGES)
    stages = [profile.devices[place * count // used].id for place in range(used)]
    seconds, driver_s = _measured_step_s(profile, stages, start)
    low, high = 0.0, seconds
    for _ in range(60):
        middle = (low + high) / 2
        passes = [middle * slowness[name] for name in stages]
        low, high = (middle, high) if _step_s(passes) < seconds else (low, middle)
    devices = tuple(msgspec.structs.replace(d, pass_s=low * slowness[d.id]) for d in profile.devices)
    return msgspec.structs.replace(profile, devices=devices, driver_s=driver_s)


def with_sums(profile: ClusterProfile, start: Start) -> ClusterProfile:
    """Return the profile with `sum_bytes_per_s` of every device, the rate at which it sums gradients.

    Two devices on different hosts sum gradients over the fastest link. The time beyond the ring all-reduce on that
    link is their own, and the slower device sets it. Processors do this work, so half the speed gives half the rate.

    The profile stays unchanged where this shows nothing:

    - all devices are on one host;
    - devices are CPUs, and this JAX cannot run a stage on several hosts;
    - the sum takes no longer than the ring.

    Args:
        profile: Profile of the running cluster, to which this process is connected.
        start: Starts a training program.

    Raises:
        HwawareError: The two devices could not run, or the devices have no data type in common.
    """
    pair = _fastest_pair(profile)
    if pair is None or not _can_sum(profile):
        return profile
    # A resumed profile may have the rates of some devices, which would take this time off once more.
    bare = tuple(msgspec.structs.replace(device, sum_bytes_per_s=None) for device in profile.devices)
    nbytes, beside_s = _summed(msgspec.structs.replace(profile, devices=bare), pair, start)
    if beside_s <= 0:
        return profile
    slowness = _slowness(profile)
    rate = nbytes / beside_s * max(slowness[name] for name in pair)  # in a ring of two, each member sends all n bytes
    devices = tuple(msgspec.structs.replace(d, sum_bytes_per_s=rate / slowness[d.id]) for d in profile.devices)
    return msgspec.structs.replace(profile, devices=devices)


def _fastest_pair(profile: ClusterProfile) -> Optional[Tuple[str, str]]:
    """Return the two devices on different hosts with the fastest link; None if no link joins hosts."""
    links = LinkTable(profile)
    rates: List[Tuple[float, Tuple[str, str]]] = []
    for one, other in itertools.combinations(profile.devices, 2):
        there, back = links.between(one.id, other.id), links.between(other.id, one.id)
        if one.host != other.host and there is not None and back is not None:
            rates.append((min(there.bandwidth_bytes_per_s, back.bandwidth_bytes_per_s), (one.id, other.id)))
    return max(rates)[1] if rates else None


def _can_sum(profile: ClusterProfile) -> bool:
    from hwaware.compat.client import has_gloo

    return has_gloo() or not all(device.kind.startswith("cpu") for device in profile.devices)


def _summed(profile: ClusterProfile, pair: Tuple[str, str], start: Start) -> Tuple[float, float]:
    """Return the bytes that two devices sum, and the seconds beside the network and the update."""
    import hwaware.models

    room = min(device.memory_bytes for device in profile.devices if device.id in pair)
    blocks = max(1, min(MOST_SUMMED, int(_SUMMED_PART * room / (4 * SUMMED_HIDDEN**2))))
    model = hwaware.models.make(hwaware.models.MlpConfig(blocks=blocks, hidden=SUMMED_HIDDEN))
    replicas = tuple(Replica(devices=(name,)) for name in pair)
    plan = Plan(num_microbatches=2, stages=(Stage(layers=(0, blocks - 1), replicas=replicas),))
    with _few_operations():
        run = start("sums", model, profile, blocks, 2, 2, plan)

    def last_s() -> float:
        timelines: List[Timeline] = []
        with run.recorded(timelines):
            run.step()
        return max(event.end_s - event.start_s for event in timelines[0].events if event.kind == "update")

    try:
        run.wait_until_compiled()
        seconds = _median_s(last_s)
        (stage,) = evaluate(plan, msgspec.structs.replace(run.workload, dtype=_dtype(profile)), profile).stages
        nbytes = sum(layer.gradient_size_bytes for layer in run.workload.layers)
    finally:
        run.close()
    return nbytes, seconds - stage.gradient_sync_s - stage.update_s


def _slowness(profile: ClusterProfile) -> Dict[str, float]:
    """Return each device's time over the fastest one's, in the largest product that all measured."""
    import numpy as np

    dtype = _dtype(profile)
    size = min(device.throughput[dtype][-1].flops for device in profile.devices)
    times = {d.id: float(device_time_s(d, dtype, np.array([size]))[0]) for d in profile.devices}
    return {name: seconds / min(times.values()) for name, seconds in times.items()}


def _dtype(profile: ClusterProfile) -> str:
    """Return a data type that all devices were measured with, if possible the programs' own, float32."""
    for dtype in MEASURED:
        if all(dtype in device.throughput for device in profile.devices):
            return dtype
    found = sorted({dtype for device in profile.devices for dtype in device.throughput})
    raise MeasurementError(
        f"The devices have no data type in common: found {', '.join(found)} on some, expected float32 on all.",
        "profile all devices with --dtype float32.",
    )


def _step_s(passes_s: Sequence[float]) -> float:
    nothing: List[float] = [0.0] * (len(passes_s) - 1)
    return one_f_one_b_s(passes_s, passes_s, nothing, nothing, NUM_MICROBATCHES)[0] + passes_s[0]


def _measured_step_s(profile: ClusterProfile, devices: Sequence[str], start: Start) -> Tuple[float, float]:
    """Return the median step of a pipeline that computes almost nothing, and the driver's median time beside it."""
    import hwaware.models

    count = len(devices)
    model = hwaware.models.make(hwaware.models.MlpConfig(blocks=count, hidden=_HIDDEN))
    stages = tuple(
        Stage(layers=(index, index), replicas=(Replica(devices=(name,)),)) for index, name in enumerate(devices)
    )
    plan = Plan(num_microbatches=NUM_MICROBATCHES, stages=stages)
    with _few_operations():
        run = start("passes", model, profile, count, NUM_MICROBATCHES, 1, plan)
    try:
        run.wait_until_compiled()
        steps = [run.timed_step() for _ in range(_WARMUP + _STEPS)][_WARMUP:]
        beside_s = statistics.median(step.wall_s - step.pipeline_s for step in steps)
        return statistics.median(step.pipeline_s for step in steps), max(0.0, beside_s)
    finally:
        run.close()


@contextlib.contextmanager
def _few_operations() -> Iterator[None]:
    """Silence Alpa's warning about layers with few matrix products: here they are meant to have few."""
    log = logging.getLogger("alpa.pipeline_parallel.layer_construction")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _median_s(timed: Callable[[], float]) -> float:
    """Return the median time of several steps, after a warm-up."""
    for _ in range(_WARMUP):
        timed()
    return statistics.median(timed() for _ in range(_STEPS))
