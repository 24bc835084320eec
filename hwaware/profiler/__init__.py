"""The profiler: measures a cluster's devices and links and writes what it found as a ClusterProfile.

    profile(...)   connects (ray_cluster, crew), identifies and times devices (devices, products), times links (links,
                   messages), and summarises (summary). policy says how much is measured.

Code in worker, products, messages and policy runs on the hosts, shipped by value: it uses only the standard library,
JAX and numpy, and from hwaware only what is shipped along.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from typing import Any, Callable, ContextManager, Dict, Optional, Sequence, Tuple

from hwaware._version import __version__
from hwaware.cluster import ClusterProfile, Host
from hwaware.errors import UnusableInputError
from hwaware.profiler import devices, links
from hwaware.profiler.crew import Crew, in_process, on_ray
from hwaware.profiler.devices import Subject
from hwaware.profiler.policy import DTYPES, FULL, QUICK, Policy
from hwaware.profiler.progress import Progress, Silent, for_terminal
from hwaware.profiler.rounds import rounds
from hwaware.reference_kernel import reference_s

__all__ = ["DTYPES", "FULL", "QUICK", "Policy", "Progress", "for_terminal", "measure", "profile", "rounds"]

# A host that does not even tell its load is not there any more.
_LOAD_LIMIT_S = 30.0


def profile(
    address: str = "auto",
    quick: bool = False,
    dtypes: Sequence[str] = ("float32",),
    progress: Optional[Progress] = None,
) -> ClusterProfile:
    """Measure the devices and links of a cluster.

    Args:
        address: HOST:PORT of a Ray cluster, "auto" for the one that Ray finds itself, or "local" for the devices of
            this process, without Ray.
        quick: Fewer sizes and shorter runs.
        dtypes: Data types of the throughput curves, of `DTYPES`.
        progress: What is told how far it is; nobody if left out.

    Raises:
        ClusterUnreachableError: No Ray cluster answers at `address`, or it offers no device.
        UnusableInputError: An unknown data type.
        MeasurementError: A probe failed or did not end within its limit.
    """
    unknown = [dtype for dtype in dtypes if dtype not in DTYPES]
    if unknown or not dtypes:
        raise UnusableInputError(
            f"Data types {', '.join(unknown) or '(none)'} cannot be measured, expected some of {', '.join(DTYPES)}.",
            "give --dtype float32, or several separated by commas.",
        )
    open_crew: Callable[[], ContextManager[Crew]] = in_process if address == "local" else lambda: on_ray(address)
    reporter = progress or Silent()
    reporter.phase("Starting a worker on every device", 1)
    with open_crew() as crew:
        reporter.step()
        return measure(crew, QUICK if quick else FULL, dtypes, reporter)


def measure(crew: Crew, policy: Policy, dtypes: Sequence[str], progress: Progress) -> ClusterProfile:
    """Measure what a crew of workers serves, as much as the policy says."""
    started_s = time.time()
    references = [reference_s()]
    subjects = devices.identify(crew, progress)
    loads = [_loads(crew)]
    measured_devices = devices.measure(crew, subjects, policy, dtypes, progress)
    references.append(reference_s())
    measured_links, link_references = links.measure(crew, subjects, policy, progress)
    loads.append(_loads(crew))
    environment = _environment(started_s, subjects, loads)
    environment["reference_s"] = references[0]
    environment["reference_samples_s"] = [*references, *link_references]
    return ClusterProfile(
        hosts=_hosts(subjects), devices=measured_devices, links=measured_links, environment=environment
    )


def _hosts(subjects: Sequence[Subject]) -> Tuple[Host, ...]:
    addresses = {subject.member.host: subject.member.address for subject in subjects}
    return tuple(Host(name=name, address=address) for name, address in addresses.items())


def _loads(crew: Crew) -> Dict[str, float]:
    firsts = list({member.host: member for member in reversed(crew.members)}.values())[::-1]
    pending = [crew.begin(member, "load") for member in firsts]
    return {member.host: load for member, load in zip(firsts, crew.collect(pending, _LOAD_LIMIT_S))}


def _environment(started_s: float, subjects: Sequence[Subject], loads: Sequence[Dict[str, float]]) -> Dict[str, Any]:
    """Where the numbers come from."""
    import numpy

    versions = {"hwaware": __version__, "python": platform.python_version(), "numpy": numpy.__version__}
    if "ray" in sys.modules:
        versions["ray"] = sys.modules["ray"].__version__
    versions["jax"] = subjects[0].facts["versions"]["jax"]
    hosts = {
        subject.member.host: {
            **subject.facts["versions"],
            "machine": subject.facts["machine"],
            "load_before": loads[0][subject.member.host],
            "load_after": loads[1][subject.member.host],
        }
        for subject in subjects
    }
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started_s)),
        "elapsed_s": time.time() - started_s,
        "command": [os.path.basename(sys.argv[0]), *sys.argv[1:]],
        "platform": platform.platform(),
        "versions": versions,
        "hosts": hosts,
    }
