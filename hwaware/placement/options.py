"""Ways to build one stage: which devices, in which replicas, with which shares of the microbatch.

Devices that cannot be told apart form a class, so an option names classes, not devices. Few devices: every arrangement
of every set of them is listed. More devices: replicas of like devices in the order of the profile.
"""

from __future__ import annotations

import itertools
import math
from typing import Iterator, List, NamedTuple, Optional, Sequence, Tuple, TypeVar

from hwaware.cluster import Device

Member = TypeVar("Member")
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

    def placed(self, members: Sequence[Sequence[Member]], taken: Sequence[int]) -> Tuple[Tuple[Member, ...], ...]:
        """The devices of each replica: the first ones of each class that are not taken."""
        following = list(taken)
        placed = []
        for replica in self.replicas:
            names = []
            for c in replica:
                names.append(members[c][following[c]])
                following[c] += 1
            placed.append(tuple(names))
        return tuple(placed)


class Space(NamedTuple):
    """Options, and whether they are all that the target allows."""

    options: Tuple[Option, ...]
    complete: bool


def stage_options(
    classes: Sequence[Sequence[Device]],
    samples: int,
    target: str,
    most_devices: Optional[int] = None,
    splits: bool = True,
) -> Space:
    """All ways to build a stage from classes of devices.

    Args:
        classes: The devices of each class.
        samples: Samples of a microbatch.
        target: "alpa": what `alpa_runs` allows. "any": all.
        most_devices: Of one stage; None for no limit.
        splits: Whether tensor parallelism divides anything; if not, every replica is one device.
    """
    sizes = [len(members) for members in classes]
    devices = sum(sizes)
    most = min(devices, most_devices or devices)
    every = devices <= EVERY_ARRANGEMENT
    options: List[Option] = [Option(((c,),), (samples,)) for c in range(len(sizes))]
    complete = every or target == "alpa" or most == 1
    for count in range(2, most + 1):
        for chosen in _sets(sizes, count):
            if not every and len({classes[c][0].kind for c in chosen}) > 1:
                continue
            # Like devices with unlike links: other orders of them may be better.
            complete = complete and (every or len(set(chosen)) == 1)
            for option in _arranged(chosen, samples, target, every, splits):
                if target == "alpa" and not _alpa_runs(option, classes):
                    continue
                if len(options) == MAX_OPTIONS:
                    return Space(tuple(options), False)
                options.append(option)
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


def _arranged(chosen: Tuple[int, ...], samples: int, target: str, every: bool, splits: bool) -> Iterator[Option]:
    orders = sorted(set(itertools.permutations(chosen))) if every else [chosen]
    free = every and target == "any"
    for order in orders:
        for widths in _compositions(len(order)) if free else _equal(len(order)):
            if not splits and max(widths) > 1:
                continue
            shares = _compositions_of(samples, len(widths)) if free else _equal_shares(samples, len(widths))
            ends = list(itertools.accumulate(widths))
            replicas = tuple(order[end - width : end] for end, width in zip(ends, widths))
            for share in shares:
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


def _alpa_runs(option: Option, classes: Sequence[Sequence[Device]]) -> bool:
    placed = option.placed([list(range(len(members))) for members in classes], [0] * len(classes))
    return alpa_runs(
        [
            [classes[c][index] for c, index in zip(replica, indices)]
            for replica, indices in zip(option.replicas, placed)
        ],
        option.samples,
    )


def alpa_runs(replicas: Sequence[Sequence[Device]], samples: Sequence[float]) -> bool:
    """Whether Alpa can run a stage: devices of one kind, equally many on each of their hosts, in equal replicas."""
    devices = [device for replica in replicas for device in replica]
    hosts = [device.host for device in devices]
    return (
        len({device.kind for device in devices}) == 1
        and len({len(replica) for replica in replicas}) == 1
        and len(set(samples)) == 1
        and len({hosts.count(host) for host in hosts}) == 1
    )


def count_states(sizes: Sequence[int]) -> int:
    """How many sets of used devices there are when the devices of a class are alike."""
    return int(math.prod(size + 1 for size in sizes))
