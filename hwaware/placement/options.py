"""Ways to build one stage: which devices, in which replicas, with which shares of the microbatch.

Devices that cannot be told apart form a class, so an option names classes, not devices. Few devices: every arrangement
of every set of them is listed. More devices: replicas of like devices in the order of the profile, and tensor-parallel
groups of those with the fastest links between them, wherever they stand; for target "any" also unlike devices as
data-parallel replicas, with shares in proportion to their speed.
"""

from __future__ import annotations

import collections
import itertools
import math
from typing import Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from hwaware.cluster import Device
from hwaware.costs.curves import FloatArray
from hwaware.costs.stages import Replicas, SharedReplica

# With so many devices every order of devices, and for target "any" every division into replicas, is listed.
EVERY_ARRANGEMENT = 4
# Beyond this many options the rest is left out, and what a search over them proves does not hold for all plans.
MAX_OPTIONS = 1500


class Option(NamedTuple):
    """One way to build a stage.

    Attributes:
        replicas: For each replica, the class of each of its devices.
        samples: How many samples of each microbatch each replica takes.
    """

    replicas: Tuple[Tuple[int, ...], ...]
    samples: Tuple[int, ...]

    def use(self, classes: int) -> List[int]:
        """Devices of each class that the option takes."""
        flat = [c for replica in self.replicas for c in replica]
        return [flat.count(c) for c in range(classes)]

    def placed(self, members: Sequence[Sequence[str]], taken: Sequence[int]) -> Replicas:
        """Return the replicas on devices: the first ones of each class that are not taken."""
        following, total, placed = list(taken), sum(self.samples), []
        for replica, samples in zip(self.replicas, self.samples):
            names = []
            for c in replica:
                names.append(members[c][following[c]])
                following[c] += 1
            placed.append(SharedReplica(tuple(names), samples / total))
        return tuple(placed)


class Hints(NamedTuple):
    """What guides the arrangement of many devices.

    Attributes:
        between_s: [K, K] time of a message between devices of two classes, there and back; infinite without a link.
        speed: [K] of one device, in any unit.
    """

    between_s: FloatArray
    speed: FloatArray


class Space(NamedTuple):
    """Options, and whether they are all that the target allows."""

    options: Tuple[Option, ...]
    complete: bool

    def fits(self, classes: Sequence[Sequence[str]], layers: int, most_states: int, most_pairs: float) -> bool:
        """Return True if an exact search has no more states, and no more pairs of options that may be neighbours."""
        states = count_states(classes) * (layers + 1) * len(self.options)
        return states <= most_states and (
            most_pairs == math.inf or number_of_pairs(self.options, classes) <= most_pairs
        )


def stage_options(
    classes: Sequence[Sequence[Device]],
    samples: int,
    target: str,
    most_devices: Optional[int] = None,
    splits: bool = True,
    hints: Optional[Hints] = None,
    unlike: bool = True,
) -> Space:
    """All ways to build a stage from classes of devices.

    Args:
        classes: The devices of each class.
        samples: Samples of a microbatch.
        target: "alpa": what `alpa_runs` allows. "any": all.
        most_devices: Of one stage; None for no limit.
        splits: Whether tensor parallelism divides anything; if not, every replica is one device.
        hints: How to arrange devices that are too many for every arrangement.
        unlike: Whether unlike devices may share a stage.
    """
    sizes, none_taken = [len(members) for members in classes], [0] * len(classes)
    names = [[device.id for device in members] for members in classes]
    by_name = {device.id: device for members in classes for device in members}
    devices = sum(sizes)
    most = min(devices, most_devices or devices)
    every = devices <= EVERY_ARRANGEMENT
    options: List[Option] = [Option(((c,),), (samples,)) for c in range(len(sizes))]
    # One sample that cannot be divided and layers that cannot be split: stages have one device.
    complete = every or target == "alpa" or most == 1 or (samples == 1 and not splits)
    mixed = every or (unlike and target == "any" and hints is not None)
    for count in range(2, most + 1):
        for chosen in _sets(sizes, count) if mixed else _like_sets(classes, count):
            if target == "alpa" and not _even_over_hosts(chosen, classes):
                continue
            if not every and len({classes[c][0].kind for c in chosen}) > 1:
                found = _unlike(chosen, samples, hints) if unlike and target == "any" and hints is not None else ()
            else:
                found = _arranged(chosen, samples, target, every, splits, None if every else hints)
            for option in found:
                if target == "alpa" and not alpa_runs(option.placed(names, none_taken), by_name):
                    continue
                if len(options) == MAX_OPTIONS:
                    return Space(tuple(options), False)
                options.append(option)
                # Like devices with unlike links: other orders of them may be better.
                complete = complete and (every or len(set(chosen)) == 1)
    return Space(tuple(options), complete)


def _sets(sizes: Sequence[int], count: int) -> Iterator[Tuple[int, ...]]:
    """Every way to take `count` devices from the classes, as a sorted sequence of classes."""
    if not sizes:
        if count == 0:
            yield ()
        return
    for last in range(min(sizes[-1], count) + 1):
        for rest in _sets(sizes[:-1], count - last):
            yield (*rest, *([len(sizes) - 1] * last))


def _like_sets(classes: Sequence[Sequence[Device]], count: int) -> Iterator[Tuple[int, ...]]:
    """`_sets` of devices of one kind."""
    for kind in dict.fromkeys(members[0].kind for members in classes):
        yield from _sets([len(members) if members[0].kind == kind else 0 for members in classes], count)


def _even_over_hosts(chosen: Sequence[int], classes: Sequence[Sequence[Device]]) -> bool:
    """Whether the set takes as many devices of each of its hosts: what Alpa runs, whatever the order."""
    devices = [device for c in dict.fromkeys(chosen) for device in classes[c][: chosen.count(c)]]
    return len(set(collections.Counter(device.host for device in devices).values())) == 1


def _unlike(chosen: Tuple[int, ...], samples: int, hints: Hints) -> Iterator[Option]:
    """Unlike devices as data-parallel replicas, with whole samples in proportion to their speed."""
    if len(chosen) > samples:
        return
    yield Option(tuple((c,) for c in chosen), whole_shares(hints.speed[list(chosen)], samples))


def whole_shares(speed: FloatArray, samples: int) -> Tuple[int, ...]:
    """Samples in proportion to speed, whole and at least one each, so that the slowest ends early.

    Example:
        >>> whole_shares(np.array([1.0, 3.0]), 4), whole_shares(np.array([1.0, 1.0, 100.0]), 5)
        ((1, 3), (1, 1, 3))
    """
    shares = np.maximum(1, np.floor(speed * samples / speed.sum())).astype(np.int64)
    while shares.sum() < samples:
        shares[int(np.argmin((shares + 1) / speed))] += 1
    while shares.sum() > samples:
        shares[int(np.argmax(np.where(shares > 1, shares / speed, -1.0)))] -= 1
    return tuple(shares.tolist())


def _nearest(chosen: Tuple[int, ...], group: int, between_s: FloatArray) -> Tuple[int, ...]:
    """The devices ordered so that each run of `group` of them has fast links inside, found greedily."""
    left, ordered = list(chosen), []  # type: Tuple[List[int], List[int]]
    while left:
        members = [left.pop(0)]
        while len(members) < group:
            slowest = [max(between_s[member, c] for member in members) for c in left]
            members.append(left.pop(int(np.argmin(slowest))))
        ordered += members
    return tuple(ordered)


def _arranged(
    chosen: Tuple[int, ...], samples: int, target: str, every: bool, splits: bool, hints: Optional[Hints]
) -> Iterator[Option]:
    orders = sorted(set(itertools.permutations(chosen))) if every else [chosen]
    free = every and target == "any"
    for order in orders:
        for widths in _compositions(len(order)) if free else _equal(len(order)):
            if not splits and max(widths) > 1:
                continue
            shares = _compositions_of(samples, len(widths)) if free else _equal_shares(samples, len(widths))
            ends = list(itertools.accumulate(widths))
            arrangements = {order: None}
            if hints is not None and max(widths) > 1:
                arrangements[_nearest(order, widths[0], hints.between_s)] = None
            for share in shares:
                for arrangement in arrangements:
                    replicas = tuple(arrangement[end - width : end] for end, width in zip(ends, widths))
                    yield Option(replicas, share)


def _compositions(total: int) -> Iterator[Tuple[int, ...]]:
    for parts in range(1, total + 1):
        yield from _compositions_of(total, parts)


def _compositions_of(total: int, parts: int) -> Iterator[Tuple[int, ...]]:
    """Every way to write `total` as an ordered sum of `parts` positive numbers."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(edges[k + 1] - edges[k] for k in range(parts))


def _equal(total: int) -> Iterator[Tuple[int, ...]]:
    for parts in range(1, total + 1):
        if total % parts == 0:
            yield (total // parts,) * parts


def _equal_shares(samples: int, parts: int) -> List[Tuple[int, ...]]:
    return [(samples // parts,) * parts] if samples % parts == 0 else []


def alpa_runs(replicas: Replicas, devices: Mapping[str, Device]) -> bool:
    """Return True if Alpa can run a stage: devices of one kind, equally many of each host, in equal replicas.

    A mesh of Alpa goes through its hosts one after the other, so no host's devices may stand between another one's.
    """
    used = [devices[name] for replica in replicas for name in replica.devices]
    hosts = [device.host for device in used]
    return (
        len({device.kind for device in used}) == 1
        and len({len(replica.devices) for replica in replicas}) == 1
        and len({replica.share for replica in replicas}) == 1
        and len({hosts.count(host) for host in hosts}) == 1
        and len([host for host, _ in itertools.groupby(hosts)]) == len(set(hosts))
    )


def count_states(classes: Sequence[Sequence[str]]) -> int:
    """Return the number of sets of used devices where the devices of a class are alike."""
    return math.prod(len(names) + 1 for names in classes)


def number_of_pairs(options: Sequence[Option], classes: Sequence[Sequence[object]]) -> int:
    """How many ordered pairs of options find devices for both.

    Example:
        >>> one, other, both = (Option((c,), (1,)) for c in ((0,), (1,), (0, 1)))
        >>> number_of_pairs([one, other, both], [["a"], ["b"]])
        2
    """
    sizes = np.array([len(members) for members in classes])
    use, times = np.unique([option.use(len(classes)) for option in options], axis=0, return_counts=True)
    fit = (use[:, None, :] + use[None, :, :] <= sizes).all(axis=2)
    return int(times @ fit @ times)
