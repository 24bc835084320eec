"""Watch over the workers of one program: every wait has a limit, and a failure names its cause.

The driver keeps one idle connection to each worker. The system ends this connection when the worker's process ends, or
seconds after its host has vanished. Ray gives a node up much later. A heartbeat notices a stopped process.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Dict, List, NamedTuple, NoReturn, Optional, Sequence

from hwaware import ray_cluster, ray_jobs
from hwaware.errors import MeasurementError, WorkerFailedError
from hwaware.greeting import Credentials
from hwaware.runtime.feeding import Feed
from hwaware.runtime.heartbeat import Heartbeat, Silence, Subject, end_process, on_host, process_state
from hwaware.runtime.worker import CONTROL, Failure
from hwaware.transport import Address, Connection

_POLL_S = 0.5
# Failures travel from worker to worker; the first that the driver meets need not be the first that happened.
_CAUSE_LIMIT_S = 5.0
_AGAIN = "then launch the program again."
_MEMORY_FIX = f"see that host's memory and its Ray logs (worker-*.err), {_AGAIN}"
_BUSY_FIX = f"look at the load and the disk of the workers' hosts, {_AGAIN}"
_LOG_FIX = f"mend what the message names; the worker's Ray log (worker-*.err) may say more; {_AGAIN}"
# A worker that has just started may compile or load, which delays its greeting.
_GREETING_LIMIT_S = 30.0


class Member(NamedTuple):
    """One worker under watch.

    Attributes:
        actor: Its Ray handle.
        where: Name of the worker in errors.
        lifeline: The idle connection to the worker.
        address: Address of its host.
        pid: Id of its process there.
        feed: Sends it samples; None if nothing does.
    """

    actor: Any
    where: str
    lifeline: Connection
    address: str
    pid: int
    feed: Optional[Feed] = None


def member(actor: Any, where: str, address: Address, credentials: Credentials, pid: int, limit_s: float) -> Member:
    """Put a running worker under watch.

    Args:
        actor: Its Ray handle.
        where: Name of the worker in errors.
        address: Address of its mailbox.
        credentials: Credentials of the program.
        pid: Id of its process.
        limit_s: Limit [s] for it to make room for samples, as for a step.

    Raises:
        MeasurementError: Its mailbox cannot be reached from here.
    """
    lifeline = Connection(address, credentials, _GREETING_LIMIT_S, "the driver")
    return Member(actor, where, lifeline, address[0], pid, Feed(address, credentials, limit_s, lifeline))


class Watch:
    """Waits for workers, and finds out why one has failed.

    Args:
        members: The workers of one program.
        limit_s: Limit [s] on the wait for a step or for compilation.
        head: Address of Ray's head.
    """

    def __init__(self, members: Sequence[Member], limit_s: float, head: Address) -> None:
        self._members = list(members)
        self._limit_s = limit_s
        self._head = ray_cluster.Head(head)
        self.failure: Optional[WorkerFailedError] = None

    def wait(self, references: Sequence[Any], what: str, limit_s: Optional[float] = None) -> List[Any]:
        """Return the values of Ray references, as `ray.get` does, but within a time limit.

        Args:
            references: The references.
            what: Name of the awaited work in errors.
            limit_s: Limit [s] on the wait; None for the limit of a step.

        Raises:
            WorkerFailedError: A worker failed or was lost, now or earlier; all workers of the program have been ended.
            MeasurementError: The time limit passed.
        """
        import ray

        if self.failure is not None:
            raise self.failure
        allowed_s = self._limit_s if limit_s is None else limit_s
        end_s = time.monotonic() + allowed_s
        heartbeat = Heartbeat([_subject(one) for one in self._members], _arrived, _value)
        waiting, values = list(references), {}
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_S)
            values.update(self._checked(ready))
            if self._head.is_lost():
                self._end(self._head.failure(), None)
            silence = heartbeat.beat() if waiting else None
            if silence is not None:
                self._end(_silent(self._members[silence.number], silence), None)
            if waiting and time.monotonic() > end_s:
                fix = "raise step_limit_s of hwaware.runtime_settings." if limit_s is None else _BUSY_FIX
                raise MeasurementError(f"{what} took longer than {allowed_s:g} s.", fix)
        return [values[reference] for reference in references]

    def give_up(self, failure: WorkerFailedError) -> None:
        """End every worker; every later wait raises the failure."""
        import ray

        self.failure = failure
        if self._head.error is None:
            ray_cluster.end_actors([one.actor for one in self._members])
        else:  # Ray can kill none; the workers themselves still answer
            ends = [one.actor.end.options(concurrency_group=CONTROL).remote() for one in self._members]
            ray.wait(ends, num_returns=len(ends), timeout=_CAUSE_LIMIT_S)
            ray_cluster.leave()  # before Ray ends the driver
        self.close()

    def close(self) -> None:
        """End the watch; the workers may end now."""
        for member_ in self._members:
            if member_.feed is not None:
                member_.feed.close()
            member_.lifeline.close()
        self._members = []

    def _checked(self, ready: Sequence[Any]) -> Dict[Any, Any]:
        """Return the values of references that have arrived; end the program if a worker is lost or has failed."""
        import ray

        values = {}
        if any(member_.lifeline.is_lost() for member_ in self._members):
            self._end(self._cause(None), None)
        for reference in ready:
            try:
                values[reference] = ray.get(reference)
            except ray.exceptions.RayError as error:
                self._end(self._cause(error), error)
        return values

    def _end(self, failure: WorkerFailedError, error: Optional[Exception]) -> NoReturn:
        """End every worker, and raise the failure."""
        self.give_up(failure)
        raise failure from error

    def _cause(self, error: Optional[Exception]) -> WorkerFailedError:
        """Return the loss of Ray's head, else of a worker, else a worker's own failure, else one that it noticed."""
        if self._head.is_lost(at_once=True):
            return self._head.failure()
        for member_ in self._members:
            lost = member_.lifeline.is_lost()
            if lost is not None:
                return _lost(member_, lost)
        found = self._failures()
        for number, failure in sorted(found.items(), key=lambda item: not item[1].is_own):
            return WorkerFailedError(self._members[number].where, failure.sentence, failure.fix or _LOG_FIX)
        return self._unexplained(error)

    def _failures(self) -> Dict[int, Failure]:
        """Return the failures that the answering workers report."""
        import ray

        calls = [one.actor.failure.options(concurrency_group=CONTROL).remote() for one in self._members]
        arrived, _ = ray.wait(calls, num_returns=len(calls), timeout=_CAUSE_LIMIT_S) if calls else ([], [])
        answers = {number: _value(call) for number, call in enumerate(calls) if call in arrived}
        return {number: failure for number, failure in answers.items() if failure is not None}

    def _unexplained(self, error: Optional[Exception]) -> WorkerFailedError:
        """Return the error where no worker reports a failure: a process ended, or only the call itself failed."""
        actor = getattr(error, "actor_id", None)
        for member_ in self._members:
            if actor is not None and member_.actor._actor_id.hex() == actor:
                return _lost(member_, "its process ended")
        cause = "it gave no reason" if error is None else f"{ray_cluster.last_line(error)}."
        return WorkerFailedError("a worker", cause, _LOG_FIX)


def _lost(member_: Member, lost: str) -> WorkerFailedError:
    """Return an error that tells apart a lost host, a host without Ray, and an ended process."""
    address, where = member_.address, member_.where
    answer = ray_jobs.daemon_fails(address)
    if answer is not None and not ray_jobs.is_gone(answer):
        return WorkerFailedError(
            where,
            f"{lost}; Ray on host {address} does not answer either ({answer}): the host or its network link is down.",
            f"see that host {address} runs and that its network link is up (ping {address}; on the host, ip link), "
            f"{_AGAIN}",
        )
    reason = "" if answer is not None else _how_it_ended(member_)
    # Ray ends a host's workers before or after its daemon.
    if answer is not None or not ray_jobs.is_there(address):
        return WorkerFailedError(
            where,
            f"{lost}, because Ray is gone on host {address}: its daemon (raylet) has ended.",
            f"start Ray on host {address} again (ray start --address=...; its logs raylet.out and raylet.err there say "
            f"why it ended), {_AGAIN}",
        )
    return WorkerFailedError(where, f"{lost}.{f' Ray says: {reason}.' if reason else ''}", _MEMORY_FIX)


def _silent(member_: Member, silence: Silence) -> WorkerFailedError:
    address, pid = member_.address, member_.pid
    if silence.is_stopped:
        with contextlib.suppress(*ray_cluster.errors()):  # a stopped process cannot even be told to end
            _wait_shortly(on_host(address, end_process, pid))
        return WorkerFailedError(
            member_.where,
            f"its process {pid} was stopped (SIGSTOP) and did nothing any more; hwaware has ended it.",
            f"find who stops processes on host {address} (a job scheduler that suspends, kill -STOP, Ctrl-Z), {_AGAIN}",
        )
    return WorkerFailedError(
        member_.where,
        f"neither its process {pid} nor any other on host {address} did anything for a minute, though the host's "
        "network answers: the host is frozen or overloaded.",
        f"look at host {address} (a paused container or virtual machine, swapping), {_AGAIN}",
    )


def _how_it_ended(member_: Member) -> str:
    """Return Ray's own words on a lost worker's end; empty if Ray has not noticed it yet."""
    import ray

    with contextlib.suppress(ray.exceptions.RayError):  # a time limit: Ray still believes that the worker lives
        try:
            ray.get(member_.actor.clock_s.options(concurrency_group=CONTROL).remote(), timeout=_CAUSE_LIMIT_S)
        except ray.exceptions.RayActorError as error:
            return ray_cluster.died(error)
    return ""


def _subject(member_: Member) -> Subject:
    return Subject(
        lambda: member_.actor.clock_s.options(concurrency_group=CONTROL).remote(),
        lambda: on_host(member_.address, process_state, member_.pid),
    )


def _arrived(references: Sequence[Any]) -> List[Any]:
    import ray

    if not references:
        return []
    arrived: List[Any] = ray.wait(list(references), num_returns=len(references), timeout=0)[0]
    return arrived


def _value(reference: Any) -> Any:
    """Return the value of a reference that has arrived; None if its worker has ended, which its lifeline tells."""
    import ray

    with contextlib.suppress(ray.exceptions.RayError):
        return ray.get(reference, timeout=_CAUSE_LIMIT_S)
    return None


def _wait_shortly(reference: Any) -> None:
    import ray

    ray.get(reference, timeout=_CAUSE_LIMIT_S)
