"""What the runtime takes for a pass of a stage beside the stage's program, measured as training runs it."""

from __future__ import annotations

import statistics
from typing import Dict, List

import msgspec

from hwaware.cluster import ClusterProfile
from hwaware.costs.compute import device_time_s
from hwaware.costs.pipeline import one_f_one_b_s
from hwaware.plans import Plan, Replica, Stage
from hwaware.reference_kernel import processors_reference_s, recorded_s

NUM_MICROBATCHES = 32
_HIDDEN = 8
_WARMUP, _STEPS = 3, 8
_DTYPE = "float32"


def with_passes(profile: ClusterProfile) -> ClusterProfile:
    """The profile with `pass_s` of every device, from a pipeline through all of them that computes next to nothing.

    What a pass takes is work for the host's processor, so a device with half the speed takes twice as long for it: one
    figure is found, for which the closed form of 1F1B gives the measured step.

    Args:
        profile: Of the running cluster, to which the process is connected.

    Raises:
        HwawareError: The pipeline could not be run.
    """
    slowness = _slowness(profile)
    seconds = _measured_step_s(profile)
    low, high = 0.0, seconds
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _step_s(profile, slowness, middle) < seconds else (low, middle)
    devices = tuple(msgspec.structs.replace(d, pass_s=low * slowness[d.id]) for d in profile.devices)
    return msgspec.structs.replace(profile, devices=devices)


def _slowness(profile: ClusterProfile) -> Dict[str, float]:
    """By what each device is slower than the fastest, in the largest product that all were measured with."""
    import numpy as np

    size = min(device.throughput[_DTYPE][-1].flops for device in profile.devices)
    times = {d.id: float(device_time_s(d, _DTYPE, np.array([size]))[0]) for d in profile.devices}
    return {name: seconds / min(times.values()) for name, seconds in times.items()}


def _step_s(profile: ClusterProfile, slowness: Dict[str, float], fastest_s: float) -> float:
    passes = [fastest_s * slowness[device.id] for device in profile.devices]
    nothing: List[float] = [0.0] * (len(passes) - 1)
    return one_f_one_b_s(passes, passes, nothing, nothing, NUM_MICROBATCHES) + passes[0]


def _measured_step_s(profile: ClusterProfile) -> float:
    """The median step of that pipeline at the speed of the profile, without the driver's start of it."""
    import hwaware.models
    from hwaware.bench.training import TrainingRun

    count = len(profile.devices)
    model = hwaware.models.make(hwaware.models.MlpConfig(blocks=count, hidden=_HIDDEN))
    stages = tuple(
        Stage(layers=(index, index), replicas=(Replica(devices=(device.id,)),))
        for index, device in enumerate(profile.devices)
    )
    plan = Plan(num_microbatches=NUM_MICROBATCHES, stages=stages)
    run = TrainingRun("passes", model, profile, count, NUM_MICROBATCHES, 1, plan)
    steps, references = [], []
    try:
        run.wait_until_compiled()
        for _ in range(_WARMUP):
            run.step()
        for _ in range(_STEPS):
            before = processors_reference_s()
            steps.append(run.timed_step().pipeline_s)
            references.append((before + processors_reference_s()) / 2)
    finally:
        run.close()
    then_s = recorded_s(profile.environment)
    return statistics.median(
        step * (1.0 if then_s is None else then_s / beside) for step, beside in zip(steps, references)
    )
