"""Record where the numbers of a profile come from: versions, load, clock, command line."""

from __future__ import annotations

import os
import platform
import sys
import time
from typing import Any, Dict, Mapping, Sequence

from hwaware._version import __version__
from hwaware.profiler.crew import Failure, Member
from hwaware.profiler.devices import Subject
from hwaware.profiler.survey import Survey

# A host that does not tell its load in this time is down.
_LOAD_LIMIT_S = 30.0


def loads(survey: Survey, subjects: Sequence[Subject]) -> Dict[str, Mapping[str, float]]:
    """Return the load of each host, as `Worker.load` tells it, while the profiler measures nothing."""
    machines = {subject.member.host: subject.facts["machine"] for subject in subjects}
    present = [member for member in survey.crew.members if not survey.is_lost(member)]
    firsts: Dict[str, Member] = {}  # one of each machine: the others see the same processors
    for member in present:
        firsts.setdefault(machines.get(member.host, member.host), member)
    pending = [survey.begin(member, "load") for member in firsts.values()]
    results = survey.gather(pending, min(_LOAD_LIMIT_S, survey.policy.probe_limit_s))
    known = {machine: load for machine, load in zip(firsts, results) if not isinstance(load, Failure)}
    return {host: known[machine] for host, machine in machines.items() if machine in known}


def environment(
    started_s: float, subjects: Sequence[Subject], before: Mapping[str, Any], after: Mapping[str, Any]
) -> Dict[str, Any]:
    """Return the profile's `environment`, to which the measurement adds its reference times and phases."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started_s)),
        "elapsed_s": time.time() - started_s,
        "command": [os.path.basename(sys.argv[0]), *sys.argv[1:]],
        "platform": platform.platform(),
        "versions": _versions(subjects),
        "hosts": {
            subject.member.host: {
                **subject.facts["versions"],
                "machine": subject.facts["machine"],
                **_load("before", before.get(subject.member.host)),
                **_load("after", after.get(subject.member.host)),
            }
            for subject in subjects
        },
    }


def _load(when: str, load: Any) -> Dict[str, float]:
    return {} if load is None else {f"{key}_{when}": value for key, value in load.items()}


def _versions(subjects: Sequence[Subject]) -> Dict[str, str]:
    import numpy

    versions = {"hwaware": __version__, "python": platform.python_version(), "numpy": numpy.__version__}
    if "ray" in sys.modules:
        versions["ray"] = sys.modules["ray"].__version__
    # Neighbours of a host that joins tell none.
    jax = next((subject.facts["versions"]["jax"] for subject in subjects if subject.facts["versions"]), None)
    return versions if jax is None else {**versions, "jax": jax}
