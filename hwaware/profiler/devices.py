"""Measure every device of a crew so that devices that share a processor do not disturb each other."""

from __future__ import annotations

import statistics
import time
from itertools import zip_longest
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import msgspec

from hwaware.cluster import Device, MatrixProduct
from hwaware.errors import MeasurementError, UnusableInputError
from hwaware.profiler.crew import Failure, Member
from hwaware.profiler.products import Shape, flops_of, square
from hwaware.profiler.rest import head_starts_s
from hwaware.profiler.summary import (
    ProductSample,
    curve,
    curve_of_share,
    disturbed,
    reference_beside,
    short,
    spread_of_products,
    undisturbed,
)
from hwaware.profiler.survey import Survey

# The copied array fills at most 1/8 of the memory: this leaves room for the largest products in the smallest device.
_COPY_SHARE = 8
# Number of sizes that the profiler times again at the end.
_AGAIN = 2
# The reference kernel's time after a probe also counts as its time before the next probe on the machine, if no older.
_REFERENCE_HOLDS_S = 0.1


class Subject(NamedTuple):
    """A device to measure.

    Attributes:
        member: The worker that serves the device.
        facts: Result of the worker's `identify`.
        id: The device's id in the profile.
        memory_bytes: Memory that training may use.
    """

    member: Member
    facts: Mapping[str, Any]
    id: str
    memory_bytes: int


class Findings:
    """Hold the measurements of the devices so far.

    Attributes:
        are_whole: True once every device has had all its probes. Before, curves may lack sizes, and devices memory
            rates.
    """

    def __init__(self) -> None:
        self.sizes: Dict[Tuple[str, str], List[int]] = {}
        self.products: Dict[Tuple[str, str], List[ProductSample]] = {}
        self.shapes: Dict[Tuple[str, str], List[Dict[str, Any]]] = {}
        self.copies: Dict[str, List[Mapping[str, float]]] = {}
        self.bursts: Dict[str, List[List[float]]] = {}
        self.clocks: Dict[str, Dict[str, Mapping[str, Any]]] = {}
        self.are_whole = False
        self._references: Dict[str, Tuple[float, float]] = {}

    def note_reference(self, subject: Subject, seconds: Optional[float]) -> None:
        """Remember the reference kernel's time just after a probe [s], or forget it if `seconds` is None."""
        self._references.pop(subject.facts["machine"], None)
        if seconds is not None:
            self._references[subject.facts["machine"]] = (time.monotonic(), seconds)

    def reference_s(self, subject: Subject) -> Optional[float]:
        """Return the reference kernel's time on the subject's machine [s], or None if no probe has just ended there."""
        taken, seconds = self._references.get(subject.facts["machine"], (-_REFERENCE_HOLDS_S, 0.0))
        return seconds if time.monotonic() - taken < _REFERENCE_HOLDS_S else None


def identify(survey: Survey) -> Tuple[Subject, ...]:
    """Ask every worker for the facts of its device, and return the devices whose workers answer."""
    members = survey.crew.members
    survey.phase("Loading JAX on every device", len(members))
    pending = [survey.begin(member, "identify") for member in members]
    results = survey.gather(pending, survey.policy.setup_limit_s)
    subjects = []
    for member, facts in zip(members, results):
        survey.step()
        if isinstance(facts, Failure):
            survey.flag_failure(facts, (member.host,), (member.host,))
            continue
        on_host = sum(other.host == member.host for other in members)
        identifier = facts["declared_id"] or f"{member.host}:{member.device_index}"
        subjects.append(Subject(member, facts, identifier, _memory_bytes(facts, on_host)))
    if not subjects:
        raise MeasurementError(
            f"No device could be identified: {survey.flags[0].what if survey.flags else 'there is none'}",
            "mend the first of them, then profile again.",
        )
    _require_unlike(subjects)
    return tuple(subjects)


def _require_unlike(subjects: Sequence[Subject]) -> None:
    """Refuse an id that another device or a host has: the profiler keeps samples by id, and would mix them."""
    taken = {subject.member.host: "a host's name" for subject in subjects}
    for subject in subjects:
        if subject.id in taken:
            raise UnusableInputError(
                f"Device {subject.member.device_index} of host {subject.member.host} has the id {subject.id!r}, which "
                f"is {taken[subject.id]} already.",
                "give every device an id of its own in HWAWARE_DEVICES.",
            )
        taken[subject.id] = f"that of device {subject.member.device_index} of host {subject.member.host}"


def turns(subjects: Sequence[Subject]) -> Tuple[Tuple[Subject, ...], ...]:
    """Divide devices into turns. The profiler can measure a turn at once: it has at most one device of each machine.

    Hosts that run under one kernel (containers, the testbed's namespaces) share processors, so they are one machine.
    """
    by_machine: Dict[str, List[Subject]] = {}
    for subject in subjects:
        by_machine.setdefault(subject.facts["machine"], []).append(subject)
    columns = zip_longest(*by_machine.values())
    return tuple(tuple(subject for subject in column if subject is not None) for column in columns)


def measure(survey: Survey, subjects: Sequence[Subject], dtypes: Sequence[str], findings: Findings) -> None:
    """Time the products of every device, round after round, then the memory of every device."""
    if not subjects:
        return
    order = turns(subjects)
    _prepare(survey, subjects, order, dtypes, findings)
    if not _can_time(survey, subjects, dtypes, findings):
        findings.are_whole = True
        return
    policy = survey.policy
    survey.phase("Timing devices", policy.device_rounds + 1)
    tries = {subject.id: int(len(policy.sizes) * policy.second_tries) for subject in subjects}
    for _ in range(policy.device_rounds):
        for dtype in dtypes:
            for edge in policy.sizes:  # one size on all devices, then the next: drift meets all alike
                for turn in order:
                    able = [subject for subject in turn if edge in findings.sizes.get((subject.id, dtype), ())]
                    _time_size(survey, able, dtype, edge, tries, findings, policy.product_s)
        survey.step()
    for turn in order:
        _time_shapes(survey, turn, dtypes, findings)
    for _ in range(survey.policy.copies):
        for turn in order:
            _copy(survey, turn, findings)
    _rest(survey, subjects, dtypes[0], findings)
    findings.are_whole = True
    survey.step()


def measure_again(survey: Survey, subjects: Sequence[Subject], dtypes: Sequence[str], findings: Findings) -> None:
    """Time two sizes of every device once more, after everything else, to see if its speed has changed."""
    if not _can_time(survey, subjects, dtypes[:1], findings):
        return
    survey.phase("Timing devices again", _AGAIN)
    for place in range(_AGAIN):
        for turn in turns(subjects):
            for edge, group in _by_size(turn, dtypes[0], findings, place).items():
                tries = {subject.id: 1 for subject in group}
                _time_size(survey, group, dtypes[0], edge, tries, findings, survey.policy.product_s / 2)
        survey.step()


def _can_time(survey: Survey, subjects: Sequence[Subject], dtypes: Sequence[str], findings: Findings) -> bool:
    """Return True if a device still answers and has a compiled product."""
    alive = [subject for subject in subjects if not survey.is_lost(subject.member)]
    return any(findings.sizes.get((subject.id, dtype)) for subject in alive for dtype in dtypes)


def records(subjects: Sequence[Subject], dtypes: Sequence[str], findings: Findings) -> Tuple[Device, ...]:
    """Return the devices that have a throughput curve. All curves of a machine's processors hold for one machine speed.

    While a measurement runs, return no device: a resumed measurement would take a part of a device for the whole.
    """
    if not findings.are_whole:
        return ()
    beside = references_s(subjects, findings)
    shares = _of_shares(subjects, findings)
    made = (_device(subject, dtypes, findings, beside, shares) for subject in subjects)
    kinds = {subject.id: subject.facts["kind"] for subject in subjects}
    ahead = head_starts_s((kinds[name], bursts) for name, bursts in findings.bursts.items() if name in kinds)
    return tuple(
        msgspec.structs.replace(device, head_start_s=ahead.get(device.kind)) for device in made if device is not None
    )


def _of_shares(subjects: Sequence[Subject], findings: Findings) -> Dict[Tuple[str, str], List[ProductSample]]:
    """Return the samples of all devices that are shares of a processor, by machine and data type."""
    machines = {subject.id: subject.facts["machine"] for subject in subjects if subject.facts["is_share"]}
    found: Dict[Tuple[str, str], List[ProductSample]] = {}
    for (name, dtype), samples in findings.products.items():
        if name in machines:
            found.setdefault((machines[name], dtype), []).extend(samples)
    return found


def references_s(subjects: Sequence[Subject], findings: Findings) -> Dict[str, float]:
    """Return the reference kernel's time on each machine [s], taken beside the machine's undisturbed products."""
    machines = {subject.id: subject.facts["machine"] for subject in subjects}
    found: Dict[str, List[ProductSample]] = {}
    for (name, _), samples in findings.products.items():
        if name in machines:  # else the device was lost since
            kept = [sample for of_size in undisturbed(samples).values() for sample in of_size]
            found.setdefault(machines[name], []).extend(kept)
    return {machine: reference_beside(samples) for machine, samples in found.items()}


def _by_size(turn: Sequence[Subject], dtype: str, findings: Findings, place: int) -> Dict[int, List[Subject]]:
    """Group subjects by the size to time again: the middle one of their timed sizes, or `place` sizes above it."""
    grouped: Dict[int, List[Subject]] = {}
    for subject in turn:
        timed = {sample.edge for sample in findings.products.get((subject.id, dtype), ())}
        if timed:
            middle = max(0, min(len(timed) // 2, len(timed) - _AGAIN))
            edge = sorted(timed)[min(middle + place, len(timed) - 1)]
            grouped.setdefault(edge, []).append(subject)
    return grouped


def _prepare(
    survey: Survey,
    subjects: Sequence[Subject],
    order: Sequence[Sequence[Subject]],
    dtypes: Sequence[str],
    findings: Findings,
) -> None:
    """Compile on all devices at once, then heat the devices in turns."""
    survey.phase("Compiling and heating up", len(dtypes))
    policy = survey.policy
    for dtype in dtypes:
        present = [subject for subject in subjects if not survey.is_lost(subject.member)]
        pending = [
            survey.begin(s.member, "compile", dtype, policy.portable(), s.memory_bytes, _copy_bytes(survey, s))
            for s in present
        ]
        for subject, sizes in zip(present, survey.gather(pending, policy.setup_limit_s)):
            if isinstance(sizes, Failure):
                survey.flag_failure(sizes, (subject.id,), (subject.id,))
            elif sizes:
                findings.sizes[subject.id, dtype] = sizes
            else:
                what = f"The {subject.memory_bytes} bytes of device {subject.id} do not hold the smallest product."
                survey.flag("failed", (subject.id,), what, (subject.id,))
        for turn in order:
            able = [subject for subject in turn if (subject.id, dtype) in findings.sizes]
            heated = _ask(survey, able, "heat", lambda s, d=dtype: (d, findings.sizes[s.id, d][-1], policy.heat_s))
            for subject, clock in heated:
                if clock:
                    findings.clocks.setdefault(subject.id, {})[dtype] = clock
        survey.step()


def _ask(survey: Survey, subjects: Sequence[Subject], method: str, arguments: Any) -> List[Tuple[Subject, Any]]:
    """Run `method` on the subjects that are not lost. Return those that succeeded, with their results."""
    present = [subject for subject in subjects if not survey.is_lost(subject.member)]
    pending = [survey.begin(subject.member, method, *arguments(subject)) for subject in present]
    done = []
    for subject, result in zip(present, survey.gather(pending, survey.policy.probe_limit_s)):
        if isinstance(result, Failure):
            survey.flag_failure(result, (subject.id,), (subject.id,))
        else:
            done.append((subject, result))
    return done


def _time_size(
    survey: Survey,
    subjects: Sequence[Subject],
    dtype: str,
    edge: int,
    tries: Dict[str, int],
    findings: Findings,
    minimum_s: float,
) -> None:
    """Time one size on these devices at once, and again on disturbed devices, as long as they have tries left."""
    again = list(subjects)
    while again:
        measured = _products(survey, again, dtype, square(edge), findings, minimum_s)
        again = []
        for subject, result in measured:
            so_far = findings.products.setdefault((subject.id, dtype), [])
            so_far.append(ProductSample.of(edge, result, round_number=_rounds_of(so_far, edge)))
            was_disturbed = disturbed(so_far[-1], min(one.reference_s for one in so_far))
            findings.note_reference(subject, None if was_disturbed else result.get("after_s"))
            if was_disturbed and tries.get(subject.id, 0):
                tries[subject.id] -= 1
                again.append(subject)


def _products(
    survey: Survey, able: Sequence[Subject], dtype: str, shape: Shape, findings: Findings, minimum_s: float
) -> List[Tuple[Subject, Mapping[str, Any]]]:
    return _ask(survey, able, "measure", lambda s: (dtype, shape, minimum_s, findings.reference_s(s)))


def _rounds_of(samples: Sequence[ProductSample], edge: int) -> int:
    return sum(sample.edge == edge for sample in samples)


def _time_shapes(survey: Survey, turn: Sequence[Subject], dtypes: Sequence[str], findings: Findings) -> None:
    for dtype in dtypes:
        able = [subject for subject in turn if (subject.id, dtype) in findings.sizes]
        for name, *shape in survey.policy.shapes:
            for subject, result in _products(survey, able, dtype, _four(shape), findings, survey.policy.product_s / 2):
                entry = {"shape": name, "batch_m_n_k": shape, "flops": flops_of(_four(shape)), **_plain(result)}
                findings.shapes.setdefault((subject.id, dtype), []).append(entry)


def _four(shape: Sequence[int]) -> Shape:
    return shape[0], shape[1], shape[2], shape[3]


def _plain(result: Mapping[str, Any]) -> Dict[str, Any]:
    return {key: result[key] for key in ("calls", "seconds", "reference_s")}


def _copy(survey: Survey, turn: Sequence[Subject], findings: Findings) -> None:
    answers = _ask(
        survey,
        [s for s in turn if any(name == s.id for name, _ in findings.sizes)],
        "copy",
        lambda _: (survey.policy.copy_s,),
    )
    for subject, rates in answers:
        findings.copies.setdefault(subject.id, []).append(rates)


def _rest(survey: Survey, subjects: Sequence[Subject], dtype: str, findings: Findings) -> None:
    """Time bursts after pauses on all devices at once, as in training.

    Devices that share a processor can catch up only while the processor is free.
    """
    able = [subject for subject in subjects if (subject.id, dtype) in findings.sizes]
    answers = _ask(survey, able, "rest", lambda _: (dtype, survey.policy.rests))
    for subject, bursts in answers:
        findings.bursts.setdefault(subject.id, []).extend(bursts)


def _copy_bytes(survey: Survey, subject: Subject) -> int:
    policy = survey.policy
    wanted = policy.copy_bytes if subject.facts["is_processor"] else policy.accelerator_copy_bytes
    return min(wanted, subject.memory_bytes // _COPY_SHARE)


def _device(
    subject: Subject,
    dtypes: Sequence[str],
    findings: Findings,
    beside: Mapping[str, float],
    shares: Mapping[Tuple[str, str], Sequence[ProductSample]],
) -> Optional[Device]:
    products, shapes = findings.products, findings.shapes
    known = {dtype: products[subject.id, dtype] for dtype in dtypes if (subject.id, dtype) in products}
    if not known:
        return None
    copied = findings.copies.get(subject.id, [])
    machine = subject.facts["machine"]

    def curve_of(dtype: str, samples: Sequence[ProductSample]) -> Tuple[MatrixProduct, ...]:
        if subject.facts["is_share"]:
            return curve_of_share(samples, shares[machine, dtype], beside[machine])
        # The reference kernel tells how fast the host's processors were, but nothing about its GPUs.
        return curve(samples, beside[machine] if subject.facts["is_processor"] else None)

    evidence: Dict[str, Any] = {
        "products": {dtype: [sample.document() for sample in samples] for dtype, samples in known.items()},
        "spread": {dtype: spread_of_products(samples) for dtype, samples in known.items()},
        "shapes": {dtype: shapes[subject.id, dtype] for dtype in dtypes if (subject.id, dtype) in shapes},
    }
    if subject.id in findings.bursts:
        evidence["bursts_s"] = [short(burst) for burst in findings.bursts[subject.id]]
    if subject.id in findings.clocks:
        evidence["clocks"] = findings.clocks[subject.id]
    if copied:
        evidence["launch_s"] = statistics.median(one["launch_s"] for one in copied)
        evidence["copies_bytes_per_s"] = short(one["bytes_per_s"] for one in copied)
    return Device(
        id=subject.id,
        host=subject.member.host,
        kind=subject.facts["kind"],
        memory_bytes=subject.memory_bytes,
        throughput={dtype: curve_of(dtype, samples) for dtype, samples in known.items()},
        memory_bandwidth_bytes_per_s=statistics.median(one["bytes_per_s"] for one in copied) if copied else None,
        uuid=subject.facts["uuid"],
        samples=evidence,
    )


def _memory_bytes(facts: Mapping[str, Any], devices_on_host: int) -> int:
    """Return the declared memory, else JAX's limit for the device, else an equal part of the host's memory."""
    known = facts["declared_memory_bytes"] or facts["device_memory_bytes"]
    return int(known or facts["host_memory_bytes"] // devices_on_host)
