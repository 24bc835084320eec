"""Time the layers of a traced model on this machine."""

from __future__ import annotations

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
    from hwaware.costs.transfer import carried_over
    from hwaware.greeting import new_secret
    from hwaware.patching.layer_programs import function_programs
    from hwaware.patching.measuring import times_of
    from hwaware.profiler.worker import Worker
    from hwaware.runtime.mesh import Place
    from hwaware.runtime.timing import ProgramTimer, asking, timed

    worker = Worker("127.0.0.1", new_secret(), index=0)
    kind = worker.identify()["kind"]
    worker.close()
    known = sorted({device.kind for device in profile.devices})
    if kind not in known:
        raise UnusableInputError(
            f"This machine's device is of kind {kind!r}, expected one of the profile's kinds: {known}.",
            "trace on a machine of the cluster, or leave --measure out.",
        )
    ask = asking(ProgramTimer(Place(0, "", (0,))))
    programs = function_programs(functions, workload.microbatch_size)
    found = times_of(programs, lambda *unlike: {kind: timed(ask, *unlike)[0]})
    layers = tuple(
        msgspec.structs.replace(layer, measured={kind: one}) for layer, one in zip(workload.layers, found[kind])
    )
    return carried_over(msgspec.structs.replace(workload, layers=layers), profile)
