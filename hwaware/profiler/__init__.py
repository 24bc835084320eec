"""The profiler: measures a cluster's devices and links and writes what it found as a ClusterProfile.

    profile(...)   connects (ray_cluster, crew), identifies and times devices (devices, products), times links (links,
                   messages) and what shares a card (cards), collectives (collectives), summarises (summary), and says
                   what to distrust (flags). policy says how much is measured, selection what, survey who is left.

Code in worker, products, messages, rings, clock and policy runs on the hosts, shipped by value: it uses only the
standard library, JAX and numpy, and from hwaware only what is shipped along.
"""

from __future__ import annotations

from typing import Callable, ContextManager, Optional, Sequence, Union

from hwaware.cluster import ClusterProfile, PartialProfile
from hwaware.errors import UnusableInputError
from hwaware.profiler.crew import Crew, in_process, on_ray
from hwaware.profiler.fingerprint import differences, fingerprint, require_same
from hwaware.profiler.measurement import IncompleteError, InterruptedMeasurement, measure
from hwaware.profiler.partial import load_any, merge
from hwaware.profiler.policy import DTYPES, FULL, QUICK, Policy
from hwaware.profiler.progress import Progress, Silent, for_terminal
from hwaware.profiler.rounds import rounds
from hwaware.profiler.selection import Selection

__all__ = [
    "DTYPES",
    "FULL",
    "QUICK",
    "IncompleteError",
    "InterruptedMeasurement",
    "PartialProfile",
    "Policy",
    "Progress",
    "differences",
    "fingerprint",
    "for_terminal",
    "load_any",
    "measure",
    "merge",
    "profile",
    "require_same",
    "rounds",
]


def profile(
    address: str = "auto",
    quick: bool = False,
    dtypes: Sequence[str] = ("float32",),
    progress: Optional[Progress] = None,
    only: Sequence[str] = (),
    resume: Union[ClusterProfile, PartialProfile, None] = None,
    symmetric: bool = False,
) -> ClusterProfile:
    """Measure the devices and links of a cluster.

    Args:
        address: HOST:PORT of a Ray cluster, "auto" for the one that Ray finds itself, or "local" for the devices of
            this process, without Ray.
        quick: Fewer sizes and shorter runs.
        dtypes: Data types of the throughput curves, of `DTYPES`.
        progress: What is told how far it is; nobody if left out.
        only: Hosts or devices, or HOST+HOST for the links between two: only these are measured.
        resume: What was measured before. Without `only`, what it lacks is measured; the result holds both.
        symmetric: One pair of hosts stands for all pairs whose devices are of the same kinds.

    Raises:
        ClusterUnreachableError: No Ray cluster answers at `address`, or it offers no device.
        UnusableInputError: An unknown data type, or nobody has a name in `only`.
        ProfileMismatchError: `resume` is of another cluster.
        IncompleteError: What could be measured is no whole cluster; its `found` is what there is.
        InterruptedMeasurement: Ctrl-C; its `found` is what was measured until then.
    """
    unknown = [dtype for dtype in dtypes if dtype not in DTYPES]
    if unknown or not dtypes:
        raise UnusableInputError(
            f"Data types {', '.join(unknown) or '(none)'} cannot be measured, expected some of {', '.join(DTYPES)}.",
            "give --dtype float32, or several separated by commas.",
        )
    earlier = None if resume is None else PartialProfile.of(resume)
    selection = Selection.of(only, earlier, symmetric)
    open_crew: Callable[[], ContextManager[Crew]] = (
        in_process if address == "local" else lambda: on_ray(address, selection.hosts())
    )
    reporter = progress or Silent()
    reporter.phase("Starting a worker on every device", 1)
    with open_crew() as crew:
        reporter.step()
        return measure(crew, QUICK if quick else FULL, dtypes, reporter, selection, earlier)
