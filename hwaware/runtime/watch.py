"""The driver's watch over the workers of one program: every wait has a limit, and a failure names its cause.

The driver keeps one idle connection to each worker. The system ends it when the worker's process ends, and within
seconds when its host vanishes, long before Ray gives a node up.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, List, NamedTuple, Optional, Sequence

from hwaware.errors import MeasurementError, WorkerFailedError
from hwaware.runtime.worker import CONTROL, Failure
from hwaware.transport import Address, Connection

_POLL_S = 0.5
# Failures travel from worker to worker; the first that the driver meets need not be the first that happened.
_CAUSE_LIMIT_S = 5.0
_FIX = "see that host's memory and its Ray logs (worker-*.err), then launch the program again."


class Member(NamedTuple):
    """One worker under watch.

    Attributes:
        actor: Its Ray handle.
        where: What errors call it.
        lifeline: The idle connection to it.
    """

    actor: Any
    where: str
    lifeline: Connection


def member(actor: Any, where: str, address: Address) -> Member:
    """Put a worker that is up under watch.

    Raises:
        MeasurementError: Its mailbox cannot be reached from here.
    """
    return Member(actor, where, Connection(address, timeout_s=10.0, name="the driver"))


class Watch:
    """Waits for workers and finds out why one of them failed.

    Args:
        members: The workers of one program.
        limit_s: How long to wait for a step or for compilation.
    """

    def __init__(self, members: Sequence[Member], limit_s: float) -> None:
        self._members = list(members)
        self._limit_s = limit_s
        self.failure: Optional[WorkerFailedError] = None

    def wait(self, references: Sequence[Any], what: str, limit_s: Optional[float] = None) -> List[Any]:
        """The values of Ray references, as `ray.get`, but never without an end.

        Args:
            references: What to wait for.
            what: What errors call it.
            limit_s: How long, where that is not the limit of a step.

        Raises:
            WorkerFailedError: A worker failed or was lost, now or earlier; all workers of the program have been ended.
            MeasurementError: The time limit passed.
        """
        import ray

        if self.failure is not None:
            raise self.failure
        allowed_s = self._limit_s if limit_s is None else limit_s
        end_s = time.monotonic() + allowed_s
        waiting = list(references)
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_S)
            self._check(ready)
            if waiting and time.monotonic() > end_s:
                raise MeasurementError(
                    f"{what} took longer than {allowed_s:g} s.", "raise step_limit_s of hwaware's RuntimeSettings."
                )
        values: List[Any] = ray.get(list(references))
        return values

    def close(self) -> None:
        """End the watch; the workers may end now."""
        for member_ in self._members:
            member_.lifeline.close()
        self._members = []

    def _check(self, ready: Sequence[Any]) -> None:
        import ray

        if any(member_.lifeline.is_lost() for member_ in self._members):
            self._end(None)
        for reference in ready:
            try:
                ray.get(reference)
            except ray.exceptions.RayError as error:
                self._end(error)

    def _end(self, error: Optional[Exception]) -> None:
        """Find the cause, end every worker, and raise."""
        self.failure = self._cause(error)
        for member_ in self._members:
            _kill(member_.actor)
        self.close()
        raise self.failure from error

    def _cause(self, error: Optional[Exception]) -> WorkerFailedError:
        """A worker that was lost, else one whose failure is its own, else one that noticed a peer's."""
        found = [(member_, self._failure_of(member_)) for member_ in self._members]
        for member_, _ in found:
            lost = member_.lifeline.is_lost()
            if lost is not None:
                return WorkerFailedError(member_.where, f"{lost}.{_how_it_ended(member_)}", _FIX)
        failures = [(member_, failure) for member_, failure in found if failure is not None]
        for member_, failure in sorted(failures, key=lambda item: not item[1].is_own):
            return WorkerFailedError(member_.where, failure.sentence, _FIX)
        return WorkerFailedError("a worker", str(error), _FIX)

    def _failure_of(self, member_: Member) -> Optional[Failure]:
        import ray

        if member_.lifeline.is_lost() is not None:
            return None
        with contextlib.suppress(ray.exceptions.RayError):  # it is asked again through its lifeline
            call = member_.actor.failure.options(concurrency_group=CONTROL).remote()
            failure: Optional[Failure] = ray.get(call, timeout=_CAUSE_LIMIT_S)
            return failure
        return None


def _how_it_ended(member_: Member) -> str:
    """What Ray knows of a lost worker's end, in its own words; nothing if Ray has not noticed yet."""
    import ray

    try:
        ray.get(member_.actor.clock_s.options(concurrency_group=CONTROL).remote(), timeout=_CAUSE_LIMIT_S)
    except ray.exceptions.RayActorError as error:
        reasons = [line.strip() for line in str(error).splitlines() if "died" in line or "killed" in line]
        return f" Ray says: {reasons[-1]}" if reasons else ""
    except ray.exceptions.RayError:  # a time limit: Ray still believes that it lives
        return ""
    return ""


def _kill(actor: Any) -> None:
    import ray

    ray.kill(actor)
