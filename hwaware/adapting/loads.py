"""Make load traces: by how much devices and links slow down from which step on."""

from __future__ import annotations

import random
from typing import Callable, ClassVar, Dict, List, Tuple

from hwaware.adapting.drift import Drift
from hwaware.cluster import ClusterProfile
from hwaware.errors import UnusableInputError
from hwaware.formatting import counted
from hwaware.records import FileRecord, Record, require, require_amount, require_count

# Shorter traces have no room for a load after the first steps.
LEAST_STEPS, MOST_STEPS = 200, 1_000_000


class Change(Record, frozen=True, kw_only=True):
    """The drift from a step on.

    Attributes:
        step: First step with it.
        drift: Differences from the profile from then on.
    """

    step: int
    drift: Drift

    def __post_init__(self) -> None:
        require_count("step", self.step, least=0)


class LoadTrace(FileRecord, frozen=True, kw_only=True, omit_defaults=True):
    """A load on a cluster, step by step.

    Attributes:
        steps: Number of steps.
        changes: The drift from each of these steps on, in their order; none before the first.
        noise: Standard deviation of the logarithm of every time.

    Example:
        >>> trace = LoadTrace(steps=3, changes=(Change(step=1, drift=Drift(devices={"a:0": 2.0})),))
        >>> [trace.drift(step).devices for step in range(3)]
        [{}, {'a:0': 2.0}, {'a:0': 2.0}]
    """

    SCHEMA: ClassVar[str] = "hwaware.load"

    steps: int
    changes: Tuple[Change, ...] = ()
    noise: float = 0.0

    def __post_init__(self) -> None:
        require_count("steps", self.steps)
        require(self.steps <= MOST_STEPS, f"steps is {self.steps}, expected at most {MOST_STEPS}")
        require_amount("noise", self.noise, 1.0)
        steps = [change.step for change in self.changes]
        require(steps == sorted(set(steps)), f"the steps of the changes are {steps}, expected each later than the last")

    def drift(self, step: int) -> Drift:
        """Return the drift of a step."""
        past = [change.drift for change in self.changes if change.step <= step]
        return past[-1] if past else Drift()


def random_trace(profile: ClusterProfile, kind: str, seed: int, steps: int = 2000, noise: float = 0.08) -> LoadTrace:
    """Draw a load trace.

    Args:
        profile: The cluster, whose hosts and links are slowed down.
        kind: One of `KINDS`. "step" slows one host down, for a while or to the end. "ramp" does it in ten parts,
            "flapping" again and again. "noise" changes nothing. "two hosts" become slow one after the other. "link"
            slows one direction between two hosts down.
        seed: Seed of the drawing.
        steps: Length of the trace, from `LEAST_STEPS` to `MOST_STEPS`.
        noise: As in `LoadTrace`.

    Raises:
        UnusableInputError: No kind has this name, the trace is too short or too long, or the cluster has too few hosts.
    """
    hosts, needed = len(profile.hosts), 2 if kind in ("two hosts", "link") else 1
    if kind not in KINDS or not LEAST_STEPS <= steps <= MOST_STEPS or hosts < needed:
        raise UnusableInputError(
            f"A load trace of kind {kind!r} with {steps} steps on {counted(hosts, 'host')} is not known.",
            f"choose a kind from {', '.join(KINDS)}, and {LEAST_STEPS} to {MOST_STEPS} steps. "
            "The kinds 'two hosts' and 'link' need two hosts.",
        )
    rng = random.Random(f"{kind} {seed}")
    drawn = _DRAW[kind](rng, profile, steps)
    return LoadTrace(steps=steps, changes=tuple(Change(step=at, drift=drift) for at, drift in drawn), noise=noise)


_Drawn = List[Tuple[int, Drift]]


def _host(profile: ClusterProfile, host: str, factor: float) -> Dict[str, float]:
    return {device.id: factor for device in profile.devices if device.host == host}


def _one(rng: random.Random, profile: ClusterProfile, factor: float) -> Drift:
    return Drift(devices=_host(profile, rng.choice(profile.hosts).name, factor))


def _step(rng: random.Random, profile: ClusterProfile, steps: int) -> _Drawn:
    begin = rng.randrange(50, steps // 2)
    drift = _one(rng, profile, rng.uniform(1.5, 4.0))
    end = rng.choice([steps, min(steps, begin + rng.randrange(steps // 10, steps // 2))])
    return [(begin, drift), *([(end, Drift())] if end < steps else [])]


def _ramp(rng: random.Random, profile: ClusterProfile, steps: int) -> _Drawn:
    begin, length, most = rng.randrange(50, steps // 3), rng.randrange(steps // 10, steps // 3), rng.uniform(2.0, 4.0)
    host = rng.choice(profile.hosts).name
    return [
        (begin + length * part // 10, Drift(devices=_host(profile, host, 1 + (most - 1) * (part + 1) / 10)))
        for part in range(10)
    ]


def _flapping(rng: random.Random, profile: ClusterProfile, steps: int) -> _Drawn:
    drift, length = _one(rng, profile, rng.uniform(1.5, 3.0)), rng.randrange(20, 120)
    return [(at, drift if number % 2 == 0 else Drift()) for number, at in enumerate(range(length, steps, length))]


def _noise(rng: random.Random, profile: ClusterProfile, steps: int) -> _Drawn:
    return []


def _two_hosts(rng: random.Random, profile: ClusterProfile, steps: int) -> _Drawn:
    first, second = rng.sample([host.name for host in profile.hosts], 2)
    one = _host(profile, first, rng.uniform(1.5, 3.0))
    both = {**one, **_host(profile, second, rng.uniform(1.5, 3.0))}
    begin = rng.randrange(50, steps // 3)
    return [(begin, Drift(devices=one)), (begin + rng.randrange(1, steps // 3), Drift(devices=both))]


def _link(rng: random.Random, profile: ClusterProfile, steps: int) -> _Drawn:
    source, target = rng.sample([host.name for host in profile.hosts], 2)
    return [(rng.randrange(50, steps // 2), Drift(links={f"{source}->{target}": rng.uniform(4.0, 16.0)}))]


_DRAW: Dict[str, Callable[[random.Random, ClusterProfile, int], _Drawn]] = {
    "step": _step, "ramp": _ramp, "flapping": _flapping, "noise": _noise, "two hosts": _two_hosts, "link": _link,
}  # fmt: skip
KINDS = tuple(_DRAW)
