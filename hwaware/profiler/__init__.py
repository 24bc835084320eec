"""Measure a cluster's devices and links, and return them as a ClusterProfile.

`profile` takes these steps, in the modules in brackets:

    connect to Ray and start a worker on every device          (hwaware.ray_cluster, crew)
    identify and time devices                                  (devices, products)
    time links, shared network cards and collectives           (links, messages, cards, collectives)
    summarise, and flag doubtful measurements                  (summary, flags)

policy sets the sizes and repeats, selection the subjects, and survey knows which workers still answer.

The profiler ships the code of its workers to the hosts by value: `crew._shipped_by_value` lists the modules. That code
imports only the standard library, JAX, numpy and modules that the profiler ships with it.
"""

from __future__ import annotations

import os
from typing import Callable, ContextManager, Optional, Sequence, Union

from hwaware.cluster import ClusterProfile, PartialProfile
from hwaware.deprecation import keyword_only
from hwaware.dtypes import MEASURED
from hwaware.errors import UnusableInputError
from hwaware.profiler.crew import Crew, in_process, on_ray
from hwaware.profiler.measurement import IncompleteError, InterruptedMeasurement, TerminatedMeasurement, measure
from hwaware.profiler.partial import load_any
from hwaware.profiler.policy import FULL, QUICK
from hwaware.profiler.progress import Progress, Silent, for_terminal
from hwaware.profiler.selection import Selection
from hwaware.records import PathLike

__all__ = [
    "FULL",
    "QUICK",
    "IncompleteError",
    "InterruptedMeasurement",
    "Silent",
    "TerminatedMeasurement",
    "for_terminal",
    "load_any",
    "measure",
    "profile",
]


@keyword_only
def profile(
    address: str = "auto",
    *,
    quick: bool = False,
    dtypes: Union[str, Sequence[str]] = ("float32",),
    progress: Optional[Progress] = None,
    only: Union[str, Sequence[str]] = (),
    resume: Union[ClusterProfile, PartialProfile, PathLike, None] = None,
    symmetric: bool = False,
) -> ClusterProfile:
    """Measure the devices and links of a cluster; `hwaware.profile` has the same arguments and says what they mean.

    Raises:
        HwawareError: As in `hwaware.profile`.
    """
    dtypes = [dtypes] if isinstance(dtypes, str) else dtypes
    unknown = [dtype for dtype in dtypes if dtype not in MEASURED]
    if unknown or not dtypes:
        raise UnusableInputError(
            f"Data types {', '.join(map(repr, unknown)) or '(none)'} cannot be measured, expected some of "
            f"{', '.join(MEASURED)}.",
            "give --dtype float32, or several separated by commas.",
        )
    before = load_any(resume) if isinstance(resume, (str, os.PathLike)) else resume
    earlier = None if before is None else PartialProfile.of(before)
    selection = Selection.of([only] if isinstance(only, str) else only, earlier, symmetric)
    open_crew: Callable[[], ContextManager[Crew]] = (
        in_process if address == "local" else lambda: on_ray(address, selection.participants)
    )
    reporter = progress or Silent()
    reporter.phase("Starting a worker on every device", 1)
    with open_crew() as crew:
        reporter.step()
        return measure(crew, QUICK if quick else FULL, dtypes, reporter, selection, earlier)
