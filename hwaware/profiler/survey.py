"""Track one measurement: its members, its lost members, and the flags for its readers.

A member that dies or does not answer in time is lost. Probes ask it no more, and a flag names its host. The
measurements of the other members stay.
"""

from __future__ import annotations

import time
from typing import Any, Dict, List, Mapping, Sequence, Set, Tuple

from hwaware.cluster import Flag
from hwaware.profiler.crew import Crew, Failure, Member, Pending
from hwaware.profiler.policy import Policy
from hwaware.profiler.progress import Progress


class Survey:
    """Hold the state that all probes share.

    Args:
        crew: The workers.
        policy: Says how much to measure.
        progress: Receives the reports of progress.

    Attributes:
        flags: The flags so far.
        phases_s: Duration of each phase [s].
    """

    def __init__(self, crew: Crew, policy: Policy, progress: Progress) -> None:
        self.crew = crew
        self.policy = policy
        self.flags: List[Flag] = []
        self.phases_s: Dict[str, float] = {}
        self._progress = progress
        self._lost: Set[Tuple[str, int]] = set()
        self._phase_began = ("", time.monotonic())

    def phase(self, name: str, steps: int) -> None:
        """Begin a new phase of that many steps."""
        self.end_phase()
        self._phase_began = (name, time.monotonic())
        self._progress.phase(name, steps)

    def end_phase(self) -> None:
        """End the phase and keep its time."""
        name, began = self._phase_began
        if name:
            self.phases_s[name] = time.monotonic() - began
        self._phase_began = ("", time.monotonic())

    def step(self) -> None:
        """Report that one step of the phase is done."""
        self._progress.step()

    def is_lost(self, member: Member) -> bool:
        """Return True if that member has died, or has not answered in time."""
        return (member.host, member.device_index) in self._lost

    def begin(self, member: Member, method: str, *arguments: Any) -> Pending:
        """See `Crew.begin`."""
        return self.crew.begin(member, method, *arguments)

    def gather(self, pending: Sequence[Pending], limit_s: float) -> List[Any]:
        """See `Crew.gather`. Also count members that are gone as lost, and flag clocks that jumped."""
        results = self.crew.gather(pending, limit_s)
        for one, result in zip(pending, results):
            if isinstance(result, Failure) and result.gone:
                self._lose(result)
            elif isinstance(result, Mapping):
                self._note_clock(one, result)
        return results

    def flag(self, kind: str, subjects: Sequence[str], what: str, only: Sequence[str] = ()) -> None:
        """Add a flag for the readers, once for the same kind and subjects."""
        if not any((flag.kind, flag.subjects) == (kind, tuple(subjects)) for flag in self.flags):
            self.flags.append(Flag(kind=kind, subjects=tuple(subjects), what=what, only=tuple(only)))

    def flag_failure(self, failure: Failure, subjects: Sequence[str], only: Sequence[str]) -> None:
        """Flag work that a living member could not do."""
        if not failure.gone:  # else `gather` has flagged the member's host
            self.flag("failed", subjects, f"{failure.what} To fix: {failure.fix}", only)

    def _lose(self, failure: Failure) -> None:
        member = failure.member
        if self.is_lost(member):
            return
        self._lost.add((member.host, member.device_index))
        what = f"{failure.what} It was left out from then on. To fix: {failure.fix}"
        self.flags.append(Flag(kind="failed", subjects=(member.host,), what=what, only=(member.host,)))

    def _note_clock(self, one: Pending, result: Mapping[str, Any]) -> None:
        jumps = result.get("clock_jumps_s")
        if jumps:
            host = one.member.host
            what = (
                f"A clock of host {host} jumped by {max(jumps, key=abs):+.3g} s during {one.method} on {one.member}; "
                "that timing does not count."
            )
            self.flag("clock", (host,), what, (host,))
