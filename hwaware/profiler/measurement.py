"""Run a measurement from beginning to end, and keep the finished part of a measurement that ends early."""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from hwaware.cluster import ClusterProfile, Device, Host, PartialProfile, measured_kind
from hwaware.errors import MeasurementError, ProfileMismatchError, RecordError
from hwaware.profiler import cards, collectives, devices, links
from hwaware.profiler.crew import Crew
from hwaware.profiler.devices import Findings, Subject
from hwaware.profiler.environment import environment, loads
from hwaware.profiler.fingerprint import fingerprint, require_same
from hwaware.profiler.flags import all_flags
from hwaware.profiler.partial import loads as loads_of
from hwaware.profiler.partial import merge
from hwaware.profiler.policy import Policy
from hwaware.profiler.progress import Progress
from hwaware.profiler.selection import Selection
from hwaware.profiler.survey import Survey
from hwaware.profiler.symmetry import copy_links, representatives, uncopied
from hwaware.records import rebuilt
from hwaware.reference_kernel import NAME, reference_s


class IncompleteError(MeasurementError):
    """Signal that the measured parts make no whole profile.

    Attributes:
        found: The measured parts.
    """

    def __init__(self, what: str, fix: str, found: PartialProfile) -> None:
        super().__init__(what, fix)
        self.found = found


class InterruptedMeasurement(KeyboardInterrupt):
    """Signal that Ctrl-C ended a measurement.

    Attributes:
        found: The parts measured until then.
    """

    def __init__(self, found: PartialProfile) -> None:
        super().__init__()
        self.found = found


class TerminatedMeasurement(SystemExit):
    """Signal that SIGTERM or SIGHUP ended a measurement, if a handler turns them into SystemExit, as the commands do.

    Attributes:
        found: The parts measured until then.
    """

    def __init__(self, code: Any, found: PartialProfile) -> None:
        super().__init__(code)
        self.found = found


def measure(
    crew: Crew,
    policy: Policy,
    dtypes: Sequence[str],
    progress: Progress,
    selection: Optional[Selection] = None,
    earlier: Optional[PartialProfile] = None,
) -> ClusterProfile:
    """Measure the devices and links of a crew, as the policy says. For the errors, see `hwaware.profile`."""
    work = _Work(Survey(crew, policy, progress), dtypes, selection or Selection.of((), earlier), earlier)
    with _interruptible(work):
        work.run()
    found = work.found()
    try:
        return found.complete()
    except RecordError as error:
        failures = [flag.what.partition(" To fix: ") for flag in found.flags if flag.kind == "failed"]
        fixes = [fix for _, _, fix in failures if fix] if not (found.devices or found.links) else []
        what = " ".join([*(what[:1].upper() + what[1:] for what, _, _ in failures), error.what])
        raise IncompleteError(what, fixes[0] if fixes else error.fix, found) from error


@contextlib.contextmanager
def _interruptible(work: _Work) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedMeasurement(work.found()) from None
    except SystemExit as ending:
        raise TerminatedMeasurement(ending.code, work.found()) from None


class _Work:
    """Hold the measurements so far. Each step of `run` adds some, so that any step may be the last."""

    def __init__(
        self, survey: Survey, dtypes: Sequence[str], selection: Selection, earlier: Optional[PartialProfile]
    ) -> None:
        self._survey = survey
        self._dtypes = dtypes
        self._selection = selection
        self._earlier = earlier
        self._started_s = time.time()
        self._references_s: List[float] = []
        self._subjects: Tuple[Subject, ...] = ()
        self._chosen: Tuple[Subject, ...] = ()
        self._findings = Findings()
        self._links = links.Measured()
        self._cards = cards.Measured()
        self._collectives = collectives.Measured()
        self._loads: List[Mapping[str, Any]] = []

    def run(self) -> None:
        survey, selection = self._survey, self._selection
        for host, what in survey.crew.absent.items():
            survey.flag("failed", (host,), what, (host,))
        self._references_s.append(reference_s(repeats=1))
        self._subjects = devices.identify(survey)
        present = {host: [one.id for one in own] for host, own in links.by_host(self._subjects).items()}
        selection.check(present, "which the cluster does not have or which does not answer")
        self._require_same_cluster()
        self._loads.append(loads(survey, self._subjects))
        self._chosen = tuple(subject for subject in self._subjects if selection.wants_device(subject))
        devices.measure(survey, self._chosen, self._dtypes, self._findings)
        self._references_s.append(reference_s(repeats=1))
        self._run_links()
        devices.measure_again(survey, self._chosen, self._dtypes, self._findings)
        self._loads.append(loads(survey, self._subjects))
        survey.end_phase()

    def _run_links(self) -> None:
        survey = self._survey
        present = [subject for subject in self._subjects if not survey.is_lost(subject.member)]
        ends, hosts = links.Ends(present), links.by_host(present)
        left = links.schedule(hosts, self._selection.wants_link)
        while left:
            plan, copies = representatives(left, hosts) if self._selection.symmetric else (left, {})
            links.measure(survey, plan, ends, self._links)
            # Where a host is lost whose links stand for others, another pair is timed for these.
            left = uncopied(left, copy_links(copies, self._links), survey.is_lost)
        if self._selection.is_all:
            known = {} if self._earlier is None else {(one.source, one.target): one for one in self._earlier.links}
            cards.measure(survey, hosts, ends, {**known, **self._links.links}, self._cards)
            collectives.measure(survey, present, ends, self._collectives)

    def found(self) -> PartialProfile:
        """Return the measurements, joined with the earlier ones."""
        survey = self._survey
        alive = [subject for subject in self._subjects if not survey.is_lost(subject.member)]
        made = devices.records([subject for subject in alive if subject in self._chosen], self._dtypes, self._findings)
        names = {subject.member.host: subject.member.address for subject in alive}
        addresses = {**survey.crew.addresses, **names}
        known = {device.host for device in made}
        own = {device.id for device in made}
        if self._earlier is not None:
            known |= {host.name for host in self._earlier.hosts}
            own |= {device.id for device in self._earlier.devices}
        own &= {subject.id for subject in alive}
        ends = (set(names) & known) | own
        timed = tuple(link for link in self._links.records() if {link.source, link.target} <= ends)
        facts = self._environment()
        fresh = PartialProfile(
            hosts=tuple(Host(name=name, address=address) for name, address in addresses.items() if name in known),
            devices=made,
            links=timed,
            shared_cards=tuple(card for card in self._cards.records() if set(card.devices) <= own),
            collectives=tuple(one for one in self._collectives.records() if set(one.devices) <= own),
            environment=facts,
            flags=(*survey.flags, *all_flags(made, timed, loads_of(facts))),
        )
        if self._earlier is None:
            return fresh
        # Hosts keep their order. A host's devices follow their indices, even if an earlier run measured later devices.
        # Where not all of a host's devices take part, they keep their order, too.
        places = {subject.id: place for place, subject in enumerate(self._subjects)}
        merged = merge(self._earlier, fresh)
        hosts = list(dict.fromkeys(device.host for device in merged.devices))
        parted = {device.host for device in merged.devices if device.id not in places}

        def place(one: Device) -> Tuple[int, int]:
            return hosts.index(one.host), 0 if one.host in parted else places[one.id]

        return rebuilt(merged, devices=tuple(sorted(merged.devices, key=place)))

    def _environment(self) -> Dict[str, Any]:
        nothing: Mapping[str, Any] = {}
        before, after = (self._loads[i] if len(self._loads) > i else nothing for i in (0, 1))
        facts = environment(self._started_s, self._subjects, before, after)
        if self._references_s and any(subject.facts["is_processor"] for subject in self._subjects):
            # Later speeds are compared with this time, so it must come from the moments that gave the curves.
            beside = devices.references_s(self._subjects, self._findings).values()
            facts["reference_s"] = statistics.median(beside) if beside else min(self._references_s)
            facts["reference_kernel"] = NAME
            facts["reference_samples_s"] = [*self._references_s, *self._links.references_s]
        facts["phases_s"] = {name: round(seconds, 3) for name, seconds in self._survey.phases_s.items()}
        return facts

    def _require_same_cluster(self) -> None:
        """Refuse an earlier profile that describes the selected hosts otherwise; either side may lack hosts."""
        if self._earlier is None:
            return
        names = {subject.member.address: subject.member.host for subject in self._subjects}
        for host in self._earlier.hosts:
            now = names.get(host.address or "", host.name)
            if now != host.name and host.address != _LOOPBACK and host.name not in self._survey.crew.addresses:
                raise ProfileMismatchError(
                    f"{_RESUMED} calls the host at {host.address} {host.name!r}, and the cluster calls it {now!r}.",
                    f"rename the host in the profile to {now!r}, or measure without --resume.",
                )
        asked = [subject for subject in self._subjects if self._selection.asks_for(subject)]
        before, running = fingerprint(self._earlier), _running(asked)
        known = {what: {name: before[what][name] for name in running[what] if name in before[what]} for what in before}
        if before["hosts"] and not before["hosts"].keys() & {subject.member.host for subject in self._subjects}:
            require_same(before if self._selection.is_all else {"hosts": {}, "devices": {}}, running, _RESUMED)
        require_same(known, {what: {name: running[what][name] for name in known[what]} for what in known}, _RESUMED)


_RESUMED = "The profile to resume"
_LOOPBACK = "127.0.0.1"


def _running(subjects: Sequence[Subject]) -> Dict[str, Any]:
    """Return the fingerprint of running devices and their hosts."""
    return {
        "hosts": {one.member.host: one.facts["versions"] for one in subjects},
        "devices": {
            one.id: {
                "host": one.member.host,
                "kind": measured_kind(one.facts["kind"]),
                "uuid": one.facts["uuid"],
            }
            for one in subjects
        },
    }
