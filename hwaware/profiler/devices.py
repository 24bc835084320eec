"""Measuring every device of a crew so that devices which share a processor do not disturb each other."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Tuple

from hwaware.cluster import Device
from hwaware.errors import MeasurementError
from hwaware.profiler.crew import Crew, Member, Pending
from hwaware.profiler.policy import Policy
from hwaware.profiler.progress import Progress
from hwaware.profiler.summary import ProductSample, curve, disturbed

# Loading JAX on a throttled or busy host; compiling all products of a device.
IDENTIFY_LIMIT_S = 180.0
PREPARE_LIMIT_S = 180.0
# A probe runs for well under a second; what takes this long hangs.
PROBE_LIMIT_S = 60.0
# A copy reads one array and writes another; an eighth leaves room for both in the smallest device.
_COPY_SHARE = 8


class Subject(NamedTuple):
    """A device that is being measured.

    Attributes:
        member: The worker that serves it.
        facts: What the worker's `identify` returned.
        id: The device's id in the profile.
        memory_bytes: Memory that training may use.
    """

    member: Member
    facts: Mapping[str, Any]
    id: str
    memory_bytes: int


def identify(crew: Crew, progress: Progress) -> Tuple[Subject, ...]:
    """What every worker's device is."""
    progress.phase("Loading JAX on every device", len(crew.members))
    pending = [crew.begin(member, "identify") for member in crew.members]
    subjects = []
    for member, one in zip(crew.members, pending):
        [facts] = crew.collect([one], IDENTIFY_LIMIT_S)
        on_host = sum(other.host == member.host for other in crew.members)
        identifier = facts["declared_id"] or f"{member.host}:{member.device_index}"
        subjects.append(Subject(member, facts, identifier, _memory_bytes(facts, on_host)))
        progress.step()
    return tuple(subjects)


def turns(subjects: Sequence[Subject]) -> Tuple[Tuple[Subject, ...], ...]:
    """Who may be measured at the same time: one device of each machine per turn.

    Hosts that run under one kernel (containers, the testbed's namespaces) share processors: they are one machine.
    """
    by_machine: Dict[str, List[Subject]] = {}
    for subject in subjects:
        by_machine.setdefault(subject.facts["machine"], []).append(subject)
    columns = zip_longest(*by_machine.values())
    return tuple(tuple(subject for subject in column if subject is not None) for column in columns)


def measure(
    crew: Crew, subjects: Sequence[Subject], policy: Policy, dtypes: Sequence[str], progress: Progress
) -> Tuple[Device, ...]:
    """Every device with its throughput curves and its memory bandwidth."""
    order = turns(subjects)
    progress.phase("Compiling and heating up", len(subjects) * len(dtypes))
    sizes = {dtype: _prepare(crew, order, policy, dtype, progress) for dtype in dtypes}
    samples: Dict[Tuple[str, str], List[ProductSample]] = {}
    progress.phase("Timing devices", len(subjects) * policy.device_rounds)
    for _ in range(policy.device_rounds):
        for turn in order:
            for dtype in dtypes:
                _time_products(crew, turn, policy, dtype, sizes[dtype], samples)
            for _ in turn:
                progress.step()
    copies = {s.id: rate for turn in order for s, rate in zip(turn, _copy(crew, turn, policy))}
    return tuple(_device(subject, dtypes, samples, copies[subject.id]) for subject in subjects)


def _prepare(
    crew: Crew, order: Sequence[Sequence[Subject]], policy: Policy, dtype: str, progress: Progress
) -> Dict[str, List[int]]:
    """The sizes that each device can be measured at."""
    sizes: Dict[str, List[int]] = {}
    for turn in order:
        pending = [crew.begin(s.member, "prepare", dtype, policy.portable(), s.memory_bytes) for s in turn]
        for subject, ready in zip(turn, crew.collect(pending, PREPARE_LIMIT_S)):
            if not ready:
                raise MeasurementError(
                    f"The {subject.memory_bytes} bytes of device {subject.id} do not hold the smallest product.",
                    "give it more memory, or take it out of the cluster.",
                )
            sizes[subject.id] = ready
            progress.step()
    return sizes


def _time_products(
    crew: Crew,
    turn: Sequence[Subject],
    policy: Policy,
    dtype: str,
    sizes: Mapping[str, Sequence[int]],
    samples: Dict[Tuple[str, str], List[ProductSample]],
) -> None:
    """Every size of the turn's devices once, and again where other work disturbed it, as often as the policy allows."""
    tries = {subject.id: int(len(sizes[subject.id]) * policy.second_tries) for subject in turn}
    for edge in policy.sizes:
        again = [subject for subject in turn if edge in sizes[subject.id]]
        while again:
            measured = list(zip(again, _time_one_size(crew, again, policy, dtype, edge)))
            again = []
            for subject, sample in measured:
                so_far = samples.setdefault((subject.id, dtype), [])
                so_far.append(sample)
                if tries[subject.id] and disturbed(sample, min(one.reference_s for one in so_far)):
                    tries[subject.id] -= 1
                    again.append(subject)


def _time_one_size(
    crew: Crew, subjects: Sequence[Subject], policy: Policy, dtype: str, edge: int
) -> List[ProductSample]:
    pending: List[Pending] = [crew.begin(s.member, "measure", dtype, edge, policy.product_s) for s in subjects]
    return [ProductSample(edge, *result) for result in crew.collect(pending, PROBE_LIMIT_S)]


def _copy(crew: Crew, turn: Sequence[Subject], policy: Policy) -> List[float]:
    pending = []
    for subject in turn:
        nbytes = min(policy.copy_bytes, subject.memory_bytes // _COPY_SHARE)
        pending.append(crew.begin(subject.member, "copy", nbytes, policy.product_s))
    return [float(rate) for rate in crew.collect(pending, PROBE_LIMIT_S)]


def _device(
    subject: Subject,
    dtypes: Sequence[str],
    samples: Mapping[Tuple[str, str], Sequence[ProductSample]],
    copy_bytes_per_s: float,
) -> Device:
    raw = {dtype: [sample._asdict() for sample in samples[subject.id, dtype]] for dtype in dtypes}
    return Device(
        id=subject.id,
        host=subject.member.host,
        kind=subject.facts["kind"],
        memory_bytes=subject.memory_bytes,
        throughput={dtype: curve(samples[subject.id, dtype]) for dtype in dtypes},
        memory_bandwidth_bytes_per_s=copy_bytes_per_s,
        uuid=subject.facts["uuid"],
        samples={"products": raw},
    )


def _memory_bytes(facts: Mapping[str, Any], devices_on_host: int) -> int:
    """What was declared, else what JAX may use of the device, else an equal part of the host's memory."""
    known = facts["declared_memory_bytes"] or facts["device_memory_bytes"]
    return int(known or facts["host_memory_bytes"] // devices_on_host)
