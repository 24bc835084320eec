"""The layers of a traced model, timed on this machine."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

import msgspec

from hwaware.cluster import ClusterProfile
from hwaware.errors import UnusableInputError
from hwaware.tracing.programs import Function, LayerFunctions
from hwaware.workload import MeasuredTime, Workload


def measured_here(workload: Workload, functions: Sequence[LayerFunctions], profile: ClusterProfile) -> Workload:
    """The workload with measured times for every kind of device of the profile.

    The layers are timed on this machine's first device and carried over to the other kinds by their curves.

    Raises:
        UnusableInputError: The profile has no device of this machine's kind.
    """
    from hwaware.costs.transfer import carried_over
    from hwaware.profiler.worker import Worker

    worker = Worker(0)
    kind = worker.identify()["kind"]
    worker.close()
    known = sorted({device.kind for device in profile.devices})
    if kind not in known:
        raise UnusableInputError(
            f"This machine's device is of kind {kind!r}, the profile knows {known}: times cannot be carried over.",
            "trace on a machine of the cluster, or leave --measure out.",
        )
    layers = tuple(
        msgspec.structs.replace(layer, measured={kind: {"1,1": times}})
        for layer, times in zip(workload.layers, _times(functions, profile))
    )
    return carried_over(msgspec.structs.replace(workload, layers=layers), profile)


def _times(functions: Sequence[LayerFunctions], profile: ClusterProfile) -> List[MeasuredTime]:
    from hwaware.runtime.mesh import Place
    from hwaware.runtime.programs import lower_function
    from hwaware.runtime.timing import ProgramTimer, Repeated, at_speed_s

    def lowered(function: Optional[Function]) -> Any:
        return None if function is None else Repeated(lower_function(function.run, function.arguments, "layer", None))

    programs = [(lowered(layer.forward), lowered(layer.backward)) for layer in functions]
    unlike = list(dict.fromkeys(one for layer in programs for one in layer if one is not None))
    timings = ProgramTimer(Place(0, "", (0,))).time(unlike)
    reference_s = (profile.environment or {}).get("reference_s")
    seconds = {program: at_speed_s(found, reference_s) for program, found in zip(unlike, timings)}
    return [
        MeasuredTime(forward_s=seconds.get(forward, 0.0), backward_s=seconds.get(backward, 0.0))
        for forward, backward in programs
    ]
