"""Time the layers of a traced model on this machine."""

from __future__ import annotations

import socket
from typing import Sequence

import msgspec

from hwaware.cluster import ClusterProfile
from hwaware.errors import UnusableInputError
from hwaware.tracing.programs import LayerFunctions
from hwaware.workload import Workload


def measured_here(workload: Workload, functions: Sequence[LayerFunctions], profile: ClusterProfile) -> Workload:
    """Return the workload with layer times for every kind of device of the profile.

    The function times each layer on this machine's first device. The profile's throughput curves convert these times
    for the other kinds.

    Raises:
        UnusableInputError: The profile has no device of this machine's kind.
    """
    from hwaware.calibration.layers import times_of
    from hwaware.calibration.timing import ProgramTimer, asking, timed
    from hwaware.costs.own_times import carried_to_devices
    from hwaware.greeting import new_secret
    from hwaware.patching.layer_programs import function_programs
    from hwaware.profiler.worker import Worker
    from hwaware.runtime.mesh import Place

    worker = Worker("127.0.0.1", new_secret(), index=0)
    kind = worker.identify()["kind"]
    worker.close()
    known = sorted({device.kind for device in profile.devices})
    if kind not in known:
        raise UnusableInputError(
            f"This machine's device is of kind {kind!r}, expected one of the profile's kinds: {known}.",
            "trace on a machine of the cluster, or leave --measure out. On a testbed, let a training program call "
            "hwaware.last_workload().save(FILE).",
        )
    ask = asking(ProgramTimer(Place(0, "", (0,))))
    programs = function_programs(functions, workload.microbatch_size)
    (found,) = times_of(programs, lambda *unlike: timed(ask, *unlike))
    layers = tuple(msgspec.structs.replace(layer, measured={kind: one}) for layer, one in zip(workload.layers, found))
    this = _this(profile, kind, workload.dtype)
    return carried_to_devices(msgspec.structs.replace(workload, layers=layers), profile, this)


def _this(profile: ClusterProfile, kind: str, dtype: str) -> str:
    """Return this machine's first device: the profile's device on this host, else the fastest of the kind."""
    from hwaware.calibration.filling import seconds_per_flop

    alike = [device for device in profile.devices if device.kind == kind]
    here = [device for device in alike if device.host == socket.gethostname()]
    return (here[0] if here else min(alike, key=lambda device: seconds_per_flop(device, dtype))).id
