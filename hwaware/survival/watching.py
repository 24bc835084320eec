"""The watch over a program that survives: a lost worker interrupts what the driver waits for, and ends nothing."""

from __future__ import annotations

import time
from typing import Any, List, NoReturn, Optional, Sequence, Tuple

from hwaware.errors import WorkerFailedError
from hwaware.runtime.watch import Member, Watch
from hwaware.runtime.worker import CONTROL
from hwaware.transport import Address

# How long a worker that keeps its connection may take to show that it lives.
_ANSWER_LIMIT_S = 10.0
# Peers notice a lost host a little before or after the driver does.
_PEERS_LIMIT_S = 20.0
_LOOK_S = 0.1


class Interrupted(WorkerFailedError):
    """A worker was lost, and the program can go on without it.

    Attributes:
        failure: The error for a program that does not survive.
        run: The run that can recover.
    """

    def __init__(self, failure: WorkerFailedError, run: Any) -> None:
        super().__init__(failure.where, failure.cause, failure.fix)
        self.failure = failure
        self.run = run


class SurvivingWatch(Watch):
    """A Watch that leaves the other workers alone.

    Attributes:
        run: The run that it watches over.
    """

    run: Any = None

    def __init__(self, members: Sequence[Member], limit_s: float, head: Address) -> None:
        super().__init__(members, limit_s, head)
        for member in members:
            member.lifeline.ask_often()

    def _end(self, failure: WorkerFailedError, error: Optional[Exception]) -> NoReturn:
        if self._head.error is not None:
            super()._end(failure, error)
        raise Interrupted(failure, self.run) from error

    def _cause(self, error: Optional[Exception]) -> WorkerFailedError:
        """Name a lost worker at once; to find out more takes seconds, and the program shall go on."""
        for member in self._members:
            lost = member.lifeline.is_lost()
            if lost is not None and not self._head.is_lost(at_once=True):
                return WorkerFailedError(member.where, f"{lost}.", "see the Ray logs of that host (worker-*.err).")
        return super()._cause(error)

    def raise_lost(self) -> None:
        """Raise if a worker's process or host is lost, without a wait.

        Raises:
            Interrupted: A worker is lost, and the program can go on.
        """
        if any(member.lifeline.is_lost() for member in self._members):
            self._end(self._cause(None), None)

    def sorted_out(self) -> Tuple[List[Member], List[Member]]:
        """Return the workers that go on, and those that are lost; none is lost if the program itself failed."""
        end_s = time.monotonic() + _PEERS_LIMIT_S
        while True:
            lost = [one for one in self._members if one.lifeline.is_lost()]
            if lost or time.monotonic() > end_s:
                break
            if any(failure.is_own for failure in self._failures().values()):
                return list(self._members), []
            time.sleep(_LOOK_S)
        lost = lost or self._unanswering()
        return [one for one in self._members if one not in lost], lost

    def _unanswering(self) -> List[Member]:
        import ray

        calls = {one.actor.clock_s.options(concurrency_group=CONTROL).remote(): one for one in self._members}
        _, late = ray.wait(list(calls), num_returns=len(calls), timeout=_ANSWER_LIMIT_S)
        return [calls[call] for call in late]

    @property
    def members(self) -> Tuple[Any, ...]:
        """Return the workers under watch."""
        return tuple(self._members)
