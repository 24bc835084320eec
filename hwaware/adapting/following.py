"""Follow a running training: notice changes, look for a better placement, decide, and judge a move afterwards."""

from __future__ import annotations

import collections
import logging
import statistics
from concurrent.futures import Future
from typing import Callable, Deque, Dict, List, Mapping, NamedTuple, Optional

from hwaware.adapting.deciding import Decision, Rent, starts_processes, switch_cost_s
from hwaware.adapting.detector import FIRST_STEPS, Change, Detector, Expected
from hwaware.adapting.drift import MOST_TIMES, Drift
from hwaware.adapting.pace import StepTimes
from hwaware.cluster import ClusterProfile
from hwaware.costs import Cost, evaluate
from hwaware.costs.intervals import late_s
from hwaware.costs.stages import located
from hwaware.errors import HwawareError
from hwaware.history import EventKind, HistoryEvent
from hwaware.plans import Plan
from hwaware.workload import Workload

LOG = logging.getLogger("hwaware")
# Steps whose median is the step of now.
JUDGED_STEPS = 10
# Steps since a change from which its factors are known well enough to search with them.
SETTLED_STEPS = 6
# First steps of a placement, which load programs and fill caches, do not count.
WARM_STEPS = 2
# A smaller factor would round to 0.
_LEAST_FACTOR = 0.01
Search = Callable[[Workload, ClusterProfile], "Future[Plan]"]


class _Other(NamedTuple):
    """Another placement: the predicted steps of both under the drift of now, and the cost of the switch."""

    plan: Plan
    kept_s: float
    best_s: float
    cost_s: float


class _Trial(NamedTuple):
    """A move that is judged: where it came from, the step measured there, and the step promised here."""

    before: Plan
    kept_s: float
    promised_s: float


class Follower:
    """Follow one training.

    Attributes:
        plan: Placement that runs.
        drift: Factors of devices and links over the profile's times, as noticed so far.
        wanted: Placement to move to before the next step; None to stay. `moved` answers it.
        switch_s: As given; after a move, its measured time without the start of processes.
        start_s: As given; after a move that started processes, the time that they took.

    Args:
        plan: Placement of the first step.
        workload: Model's layers.
        profile: Cluster as profiled.
        search: Begins the search of a placement, and returns its future.
        switch_s: Time of a switch beside the transfer of the state and the start of processes.
        start_s: Time to start the processes of devices that the placement before leaves idle.
        steps: Number of steps of the training, if it is known.
        acts: False to say what it would do, and never to want another placement.

    Example:
        >>> from hwaware.placement import plan
        >>> workload = Workload.uniform(layers=4)
        >>> profile = ClusterProfile.uniform(hosts=2, flops_per_s=1e10)
        >>> placed = plan(workload, profile, num_microbatches=4)
        >>> def search(workload, profile):
        ...     found = Future()
        ...     found.set_result(plan(workload, profile, num_microbatches=4))
        ...     return found
        >>> follower = Follower(placed, workload, profile, search, switch_s=2.0)
        >>> kinds = []
        >>> for step in range(40):
        ...     slow = 3.0 if step >= 20 else 1.0
        ...     times = StepTimes({"h0:0": slow, "h1:0": 1.0}, step_s=1.2 * slow)
        ...     kinds += [event.kind for event in follower.observe(times)]
        >>> kinds, follower.drift.devices, follower.wanted != placed
        (['noticed', 'decided', 'decided'], {'h0:0': 3.0}, True)
    """

    def __init__(
        self, plan: Plan, workload: Workload, profile: ClusterProfile, search: Search, *, switch_s: float,
        start_s: float = 0.0, steps: Optional[int] = None, acts: bool = True,
    ) -> None:  # fmt: skip
        self.drift, self.switch_s, self.start_s = Drift(), switch_s, start_s
        self._workload, self._search = workload, search
        self._steps, self._number, self._acts = steps, 0, acts
        self._rent = Rent()
        self.placed(plan, profile)

    def placed(self, plan: Plan, profile: ClusterProfile, expected: Optional[Mapping[str, Expected]] = None) -> None:
        """Begin to watch a placement, on what is left of the cluster. The drift so far is in its first steps.

        Args:
            plan: The placement.
            profile: Cluster as profiled.
            expected: Predicted times of passes of some devices.
        """
        self.plan, self._profile, self._base = plan, profile, self.drift
        self.wanted: Optional[Plan] = None
        self._searching: Optional[Future[Plan]] = None
        self._trial: Optional[_Trial] = None
        self._detector = Detector(2 * len(self._profile.devices), expected)
        self._recent: Deque[float] = collections.deque(maxlen=JUDGED_STEPS)
        self._other: Optional[_Other] = None
        self._is_told = self._is_decided = False
        self._changed_at: Optional[int] = None  # step of a change whose factors are not known well enough yet
        self._warm_until = self._number + WARM_STEPS

    @property
    def best(self) -> Optional[Plan]:
        """Return the best other placement for the cluster of now, if it is known."""
        return None if self._other is None else self._other.plan

    @property
    def profile(self) -> ClusterProfile:
        """Return the profile as the training measures it now."""
        return self.drift.applied(self._workload, self._profile)[1]

    def observe(self, times: StepTimes) -> List[HistoryEvent]:
        """Take the times of a step, and return events that they bring."""
        self._number += 1
        if self._number <= self._warm_until:
            return []
        self._recent.append(times.step_s)
        events = self._noticed(self._detector.observe(times.seconds))
        self._settle()
        if self._trial is not None:
            return events + self._judged(self._trial)
        return events + self._found() + self._decided()

    def moved(self, plan: Plan, took_s: float, start_s: float = 0.0) -> None:
        """Go on with a placement that the training has moved to.

        Args:
            plan: The placement.
            took_s: Measured time of the move, which is the price of the next one.
            start_s: Part of it in which processes started.
        """
        other, expected = self._other, self._expected(plan)
        starts = starts_processes(self.plan, plan)
        trial: Optional[_Trial] = None
        if other is not None and plan == other.plan:
            kept_s = statistics.median(self._recent)
            trial = _Trial(self.plan, kept_s, kept_s * other.best_s / other.kept_s)
        self.placed(plan, self._profile, expected)
        self._trial, self.switch_s = trial, took_s - start_s
        if starts:
            self.start_s = start_s

    def _expected(self, plan: Plan) -> Dict[str, Expected]:
        """Predict the passes of a placement, with the least and the greatest error that predictions have had here.

        A device that mostly waits may be faster than its profile, because CPU quotas let it burst. With more to do, it
        is not.
        """
        now = self.drift.applied(self._workload, self._profile)
        before_s, after_s = (_passes_s(evaluate(one, *now)) for one in (self.plan, plan))
        levels = {name: level for name, level in self._detector.levels().items() if name in before_s}
        errors = [level.time_s / before_s[name] for name, level in levels.items()]
        return {
            name: Expected(min(errors) * after_s[name], max(errors) * after_s[name], level.noise, level.freedom)
            for name, level in levels.items()
            if name in after_s
        }

    def grown(self, workload: Workload, profile: ClusterProfile) -> None:
        """Look for a placement on a cluster that has grown.

        Args:
            workload: Model's layers, with times for the new devices.
            profile: Cluster as profiled, with the new devices.
        """
        self._workload, self._profile = workload, profile
        self._look_again()

    def _look_again(self) -> None:
        self._other, self._trial, self.wanted = None, None, None
        self._is_told = self._is_decided = False
        if self._searching is not None:
            self._searching.cancel()  # one that has not begun would only hold up the new one
        try:
            self._searching = self._search(*self.drift.applied(self._workload, self._profile))
        except Exception as error:  # noqa: BLE001, told as an error of the search itself
            self._searching = Future()
            self._searching.set_exception(error)

    def _noticed(self, changes: List[Change]) -> List[HistoryEvent]:
        if changes:
            self._changed_at = self._number - max(change.steps for change in changes)
        return [
            self._event(
                "noticed",
                f"{one.subject} takes {one.factor:.2f} times its usual time, since {one.steps} steps",
                {one.subject: one.factor},
            )
            for one in changes
        ]

    def _settle(self) -> None:
        """Search again, once the factors of a change are known well enough."""
        steps = 0 if self._changed_at is None else self._number - self._changed_at
        if steps < SETTLED_STEPS:
            return
        self._changed_at = None
        drift = _combined(self._base, self._detector.factors(steps))
        if drift != self.drift:
            self.drift = drift
            self._recent = collections.deque(list(self._recent)[-steps:], maxlen=JUDGED_STEPS)
            self._look_again()

    def _found(self) -> List[HistoryEvent]:
        """Price the placement that the search has found, once it has."""
        if self._searching is None or not self._searching.done():
            return []
        searching, self._searching = self._searching, None
        try:
            plan = searching.result()
            if located(plan) == located(self.plan):  # their prices differ as the cluster has changed
                return [self._event("decided", "stays: no other placement is faster")]
            now = self.drift.applied(self._workload, self._profile)
            kept_s, best_s = (evaluate(one, *now).step_s + late_s(one, *now) for one in (self.plan, plan))
            cost_s = switch_cost_s(self.plan, plan, *now, compile_s=0.0, fixed_s=self.switch_s, start_s=self.start_s)
        except HwawareError as error:
            return [self._event("decided", f"stays: {error.what}")]
        except Exception as error:  # the training goes on, whatever it is
            LOG.warning("The search for another placement failed. To fix: report this error.", exc_info=True)
            return [self._event("decided", f"stays: the search failed ({type(error).__name__}: {error})")]
        self._other = _Other(plan, kept_s, best_s, cost_s)
        return []

    def _decided(self) -> List[HistoryEvent]:
        other = self._other
        if other is None or self.wanted is not None or self._is_decided:
            return []
        now_s = statistics.median(self._recent)
        left = None if self._steps is None else max(0, self._steps - self._number)
        # Predictions give the ratio of both steps; the measured one gives their scale, drain included in the cost.
        best_s = now_s * other.best_s / other.kept_s
        decision = self._rent.decide(kept_s=now_s, best_s=best_s, cost_s=other.cost_s + now_s, steps_left=left)
        if decision.switch:
            self._is_decided = True
            self.wanted = other.plan if self._acts else None
            verb = "moves" if self._acts else "would move"
            return [self._event("decided", f"{verb}: {decision.reason}", _numbers(decision))]
        if self._is_told:
            return []
        self._is_told = True
        return [self._event("decided", f"stays for now: {decision.reason}", _numbers(decision))]

    def _judged(self, trial: _Trial) -> List[HistoryEvent]:
        """Keep a move that measures faster than the placement before; undo it otherwise.

        A surprise in the first steps is a change, too; it brings another search.
        """
        if self._number < self._warm_until + FIRST_STEPS:
            return []
        now_s = statistics.median(self._recent)
        events = self._noticed(self._detector.surprises(self.drift.devices))
        self._settle()
        if self._trial is None:  # the search has begun again
            return events
        self._trial = None
        numbers = {"before_s": trial.kept_s, "promised_s": trial.promised_s, "measured_s": now_s}
        if now_s < trial.kept_s:
            return [*events, self._event("decided", "keeps the move: the step is shorter than before", numbers)]
        self.wanted = trial.before
        return [*events, self._event("undone", "undoes the move: the step is not shorter than before", numbers)]

    def _event(self, kind: EventKind, what: str, numbers: Optional[Dict[str, float]] = None) -> HistoryEvent:
        return HistoryEvent(kind=kind, call=self._number, what=what, numbers=numbers or {})


def _passes_s(cost: Cost) -> Dict[str, float]:
    """Return the time of a stage for each device that runs one alone."""
    return {
        stage.devices[0]: stage.compute_s for stage in cost.stages if len(stage.devices) == 1 and stage.compute_s > 0
    }


def _numbers(decision: Decision) -> Dict[str, float]:
    return {name: getattr(decision, name) for name in ("kept_s", "best_s", "cost_s", "lost_s")}


def _combined(base: Drift, factors: Dict[str, float]) -> Drift:
    """Return the drift of a placement's first steps, times what has changed since.

    No device counts as faster than its profile. It may seem so while it mostly waits, because CPU quotas let it burst.
    """
    devices, links = dict(base.devices), dict(base.links)
    for subject, factor in factors.items():
        ends = subject.split("<->")
        into, names = (
            (devices, subject.split("+")) if len(ends) == 1 else (links, ["->".join(ends), "->".join(ends[::-1])])
        )
        for name in names:
            into[name] = into.get(name, 1.0) * factor
    return Drift(devices=_rounded({name: max(1.0, factor) for name, factor in devices.items()}), links=_rounded(links))


def _rounded(factors: Dict[str, float]) -> Dict[str, float]:
    """Round factors, within the bounds of a drift: equal drifts have equal placements."""
    rounded = {name: round(min(MOST_TIMES, max(_LEAST_FACTOR, factor)), 2) for name, factor in factors.items()}
    return {name: factor for name, factor in rounded.items() if factor != 1.0}
