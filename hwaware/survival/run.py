"""Make the calls of a program that survives: note each, copy the state after it, and recover where one fails."""

from __future__ import annotations

import logging
import time
from typing import Any, Callable, Collection, Dict, List, Optional, Sequence, Tuple

from hwaware.cluster import ClusterProfile
from hwaware.errors import HwawareError, WorkerFailedError
from hwaware.history import History, HistoryEvent
from hwaware.patching import failures, rescue
from hwaware.plans import Plan
from hwaware.survival import messages, recipes, reserving, returning
from hwaware.survival.calls import Call, Calls, Named, name_of
from hwaware.survival.copying import Copies
from hwaware.survival.recovering import Recovered, Recovery
from hwaware.survival.vault import Drained
from hwaware.survival.vaults import Vaults
from hwaware.survival.watching import Interrupted, SurvivingWatch
from hwaware.workload import Workload

LOG = logging.getLogger("hwaware")
# How long a restored state waits for its copies; slower copies go on beside the training.
_RESTORED_LIMIT_S, _POLL_S = 60.0, 0.02
# The newest program that survives.
NEWEST: List[Run] = []


class Run:
    """One launched program, its noted calls and its vaults.

    Attributes:
        calls, vaults, copies, recovery: Its parts.
        is_calling: True while a call is launched: what fails in it is made again as a whole.
        is_closed: True once the program has ended its workers.
        called: The function of the newest call.
        ended: Why the program cannot go on; None while it can.
        drained: How each host or device was left that the program was asked to leave.
        at_boundary: Called with the run before each call, when the workers have the whole state and do nothing.
        reserved: Placement groups of hosts that have joined.
        begin_s: When it began, in `time.monotonic`.
        on_growth: Called with layers and profile once a host has joined; None to let `joining` decide about a move.
    """

    is_calling = False
    is_closed = False

    def __init__(self, rescuer: Any) -> None:
        self.calls, self.vaults = Calls(), Vaults()
        self.copies = Copies(self.calls, self.vaults)
        self.recovery = Recovery(self.calls, self.vaults, self.copies)
        self.ended: Optional[WorkerFailedError] = None
        self.drained: Dict[str, Drained] = {}
        self.at_boundary: List[Callable[[Run], None]] = []
        self.called: Any = None
        self.reserved: List[Any] = []
        self.begin_s = time.monotonic()
        self.on_growth: Optional[Callable[[Workload, ClusterProfile], None]] = None
        self.recovery.worker_class = rescuer.worker_class
        self._rescuer = rescuer
        # The group for which plans were looked for beforehand.
        self._planned: Any = None

    def trains(self) -> bool:
        """Return True if the newest call was a training step whose stages hwaware chose."""
        recipe = None if self.called is None else recipes.of(self.called)
        return recipe is not None and recipe.trains

    def now(self, mesh: Any) -> Any:
        """Return a mesh, or the group that a recovery has put in its place."""
        group = self.calls.group
        return mesh if mesh is group or mesh in group.meshes else group

    def take_up(self, group: Any, watch: SurvivingWatch) -> None:
        """Begin to use a launched group of meshes."""
        self.calls.group, self.recovery.watch = group, watch
        watch.run = self
        for mesh in [group, *group.meshes]:
            rescue.attach(mesh, self)
        self.vaults.start(self.copies.hosts())

    def saved(self, folder: str, step: int, leaves: Dict[Tuple[str, ...], Any]) -> None:
        """Remember a checkpoint of the program's state."""
        self.recovery.disk = returning.saved(self.calls, folder, step, leaves) or self.recovery.disk

    def brought(self, arrays: Sequence[Any]) -> None:
        """Keep arrays that the program has restored onto its workers; wait for their copies, at most a minute."""
        self.calls.bring(arrays)
        self.copies.copy_again(at_once=True)
        end_s, names = time.monotonic() + _RESTORED_LIMIT_S, {name_of(array) for array in arrays}

        def lacks_copies() -> bool:
            point = self.copies.committed
            return not names <= (point.shapes.keys() if point else set())

        while lacks_copies() and self.vaults.up and time.monotonic() < end_s:  # no call can make these arrays again
            if not self.copies.flights:  # a vault was lost, or cannot read the memory of a worker
                self.copies.copy_again(at_once=True)
            rescue.retried(self._look)
            time.sleep(_POLL_S)
        if lacks_copies() or not self.vaults.up:
            LOG.warning("The restored state has no copies yet: if its host is lost before they exist, training ends.")

    def end(self, failure: WorkerFailedError) -> None:
        """End the program, which cannot go on: every later call raises the failure."""
        self.ended = failure
        self.close()

    def close(self) -> None:
        """End the vaults, and give back what was reserved."""
        self.is_closed, self.copies.flights = True, []
        self.vaults.close()
        while self.reserved:
            reserving.give_back(self.reserved.pop())

    def takes_back(self, address: str, names: Collection[str]) -> None:
        """Use a host, and forget that it was lost or left, and what could not be left without it.

        Args:
            address: Its address.
            names: Names of the host and of its devices.
        """
        recovery = self.recovery
        recovery.left_out = {place for place in recovery.left_out if place[0] != address}
        recovery.restarts = {place: count for place, count in recovery.restarts.items() if place[0] != address}
        self.vaults.avoided.discard(address)
        self.copies.takes_back(address)
        kept = {what: outcome for what, outcome in self.drained.items() if what not in names and outcome.done}
        self.vaults.forget(set(self.drained) - set(kept))
        self.drained = kept
        self._planned = None

    def call(self, executable: Any, args: Sequence[Any], launch: Callable[..., Any]) -> Any:
        """Call a compiled function, and note the call so that it can be made again.

        Raises:
            WorkerFailedError: The program cannot go on.
        """
        if self.ended is not None:
            raise self.ended
        rescue.retried(lambda: self.recovery.watch.raise_lost())  # each time the watch of that moment
        call, has_new = self.calls.begin(executable, args, launch)
        if has_new:  # no point has them
            self.copies.copy_again()
        for act in list(self.at_boundary):
            act(self)
        self.calls.pending = [call]
        try:
            outs = self._launched(call, args)
        finally:
            self.calls.pending = []
        self.calls.note(call, outs)
        self.called = executable
        if recipes.creates(executable):  # Alpa goes on with these meshes, and would not see that others replace them
            rescue.retried(lambda: failures.wait_for(self.calls.group, "Creating the state"))
        self._collect()  # only now: the workers compute meanwhile
        self.copies.copy_if_due()
        recipe = self.calls.recipe()
        if self._planned is not self.calls.group and recipe is not None:
            self._planned = self.calls.group
            self.recovery.beforehand.look(recipe, self.calls.group.parent)
        return outs

    def _launched(self, call: Call, args: Sequence[Any]) -> Any:
        """Launch a call, again after each loss, and return its outputs."""
        given = list(args)
        while True:
            try:
                self.is_calling = True
                with rescue.in_charge(self._rescuer):  # a function that follows another one may be compiled again
                    return self.calls.launched(call.executable, given)
            except Interrupted as error:
                self.is_calling = False
                self.recover(error)
                # Arguments donated to the interrupted launch are gone; their copies are not.
                given = [arg if isinstance(kept, Named) else kept for arg, kept in zip(args, call.arguments)]
            finally:
                self.is_calling = False

    def _look(self) -> None:
        self.recovery.watch.raise_lost()
        self._collect()

    def _collect(self) -> None:
        committed = self.copies.committed
        self.copies.collect()
        if self.copies.committed is not committed:
            self.recovery.restarts.clear()

    def recover(self, error: Interrupted) -> None:
        """Go on after a loss, on what is left, and make all noted calls again.

        Raises:
            WorkerFailedError: The program cannot go on.
        """
        noticed_s = time.monotonic()
        survivors, lost = self.recovery.watch.sorted_out()
        if not lost:
            self.end(error.failure)
            self.recovery.watch.give_up(error.failure)
            raise error.failure
        what = messages.lost(lost, error.failure)
        try:
            done = self.place_again(survivors, lost)
        except HwawareError as failure:
            raise messages.lost_for_good(error, failure) from failure
        took_s = time.monotonic() - noticed_s
        what += messages.silent(self.recovery.silent)
        self.tell(HistoryEvent(kind="recovered", call=self.calls.number, what=what, took_s=took_s, **done._asdict()))

    def place_again(self, survivors: Sequence[Any], lost: Sequence[Any], plan: Optional[Plan] = None) -> Recovered:
        """Let the recovery place the program again, as `Recovery.run`; where that fails, the program has ended."""
        watches = [self.recovery.watch]
        with rescue.in_charge(self._rescuer):
            self._rescuer.recovering = self
            try:
                return self.recovery.run(survivors, lost, plan)
            except BaseException as error:
                self.ended = messages.ended(error)
                for watch in [*watches, self.recovery.watch]:
                    watch.failure = self.ended
                self.close()
                raise
            finally:
                self._rescuer.recovering = None

    def tell(self, event: HistoryEvent) -> None:
        """Remember an event, and log the line about it."""
        self.copies.events.append(event)
        LOG.warning("%s", messages.recovered(event))

    def history(self) -> History:
        """Return what has happened so far."""
        copies = self.copies
        return History(
            calls=self.calls.number,
            points=copies.points,
            copied_bytes=copies.copied_bytes,
            copy_s=copies.copy_s,
            every=copies.calls_a_point,
            events=tuple(copies.events),
        )
