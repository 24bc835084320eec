"""Trainings that adapt: the driver watches the times of their steps, and says or does what another placement brings.

Workers record while they train. After a call, the driver asks for their recordings. Before the next call, it takes the
answers that have arrived, and never waits for one. `hwaware.adapting` turns them into decisions.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Dict, List, Literal, NamedTuple, Optional, Set, Tuple, Union

import msgspec

from hwaware.adapting.deciding import first_switch_s
from hwaware.adapting.following import Follower
from hwaware.adapting.pace import Pace, Watched
from hwaware.cluster import ClusterProfile
from hwaware.device_places import device_places
from hwaware.errors import HwawareError, UnusableInputError, WorkerFailedError
from hwaware.history import History, HistoryEvent
from hwaware.patching import choosing, meshes, observing, rescue, stage_option
from hwaware.plans import Plan
from hwaware.runtime.recorder import Recording
from hwaware.runtime.worker import CONTROL
from hwaware.survival import messages, moving
from hwaware.survival.run import NEWEST, Run
from hwaware.workload import Workload

Adapt = Union[bool, Literal["log"]]
VARIABLE, STEPS_VARIABLE = "HWAWARE_ADAPT", "HWAWARE_STEPS"
LOG = logging.getLogger("hwaware")
_VALUES: Dict[str, Adapt] = {"0": False, "1": True, "log": "log"}
# Ask the workers again after so many calls, or so many seconds.
_EVERY_CALLS, _EVERY_S = 3, 1.0
_SEARCH_LIMIT_S = 10.0


class Settings(NamedTuple):
    """Hold how programs adapt that are compiled from here on.

    Attributes:
        adapt: True to move, "log" to say it, False for neither.
        steps: Number of steps of the training, if it is known.
    """

    adapt: Adapt
    steps: Optional[int]


# The adapter of the newest training.
_NEWEST: List[Adapter] = []


def settings_of(adapt: Optional[Adapt], steps: Optional[int]) -> Settings:
    """Return what the program says; else what HWAWARE_ADAPT and HWAWARE_STEPS say.

    Raises:
        UnusableInputError: A value is none of the known ones.
    """
    if adapt is None:
        found = os.environ.get(VARIABLE, "0")
        if found not in _VALUES:
            raise UnusableInputError(f"{VARIABLE} is {found!r}, expected 0, 1 or log.", "set it to 1 or log.")
        adapt = _VALUES[found]
    if not isinstance(adapt, bool) and adapt != "log":
        raise UnusableInputError(f"adapt is {adapt!r}, expected False, True or 'log'.", "give one of the three.")
    count = os.environ.get(STEPS_VARIABLE) or None if steps is None else str(steps)
    if count is not None and not (count.isdecimal() and int(count) > 0):
        raise UnusableInputError(
            f"The number of steps is {count!r}, expected a whole number above 0.", f"set steps or {STEPS_VARIABLE}."
        )
    return Settings(adapt, None if count is None else int(count))


class _Made(NamedTuple):
    """Hold what the compilation of a training step knew."""

    settings: Settings
    option: Any
    placement: stage_option.PlacementSettings
    workload: Workload
    plan: Plan
    compile_s: float


class Observer:
    """Makes trainings adapt that are compiled while it is in charge."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def compiled(
        self, arguments: Dict[str, Any], took_s: float, is_launched: bool
    ) -> Optional[Callable[[Any], Adapter]]:
        """Return what makes the adapter of a function that was compiled; None for one that does not adapt.

        Args:
            arguments: Those of its compilation.
            took_s: Time that it took.
            is_launched: True if another function's workers ran before it.
        """
        if arguments["pipeline_schedule"] == "inference":
            return None
        placement = stage_option.settings_of(arguments["stage_option"])
        workload, plan = stage_option.last_workload(), stage_option.last_plan()
        if placement is None or workload is None or plan is None:
            if not is_launched:
                LOG.warning("adapt has no effect on a program whose stages hwaware does not choose.")
            return None
        compile_s = took_s - stage_option.last_calibration_s()
        made = _Made(self._settings, arguments["stage_option"], placement, workload, plan, compile_s)
        return functools.partial(Adapter, made)


class Adapter:
    """Watches one training step, from its first call on.

    Attributes:
        follower: Decides.
        events: Changes and decisions so far.
        calls: Number of calls.
        run: The part of a program that survives; None if it does not.
        begin_s: When it began, in `time.monotonic`.
    """

    def __init__(self, made: _Made, group: Any) -> None:
        self._made = made
        self.events: List[HistoryEvent] = []
        self.calls = 0
        self.run: Optional[Run] = rescue.run_of(group)
        self.begin_s = time.monotonic()
        self._group: Any = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hwaware-adapt")
        switch_s = first_switch_s(made.compile_s, group.start_s)
        self._compile_s: Optional[float] = switch_s
        self._asked_calls, self._asked_s = 0, 0.0
        self.follower = Follower(
            made.plan, made.workload, self._profile(group), self._search, switch_s=switch_s,
            start_s=group.start_s, steps=made.settings.steps, acts=made.settings.adapt is True,
        )  # fmt: skip
        _NEWEST[:] = [self]

    def _profile(self, group: Any) -> ClusterProfile:
        return meshes.restrict(self._whole(group), group.parent)

    def _whole(self, group: Any) -> ClusterProfile:
        """Return the profile of the cluster, with the hosts that have joined."""
        return meshes.whole(self._made.placement.profile, group.parent)

    def _search(self, workload: Workload, profile: ClusterProfile) -> Future[Plan]:
        """Search beside the training, which goes on meanwhile."""
        made, plan = self._made.placement, self.follower.plan
        if made.solver == "alpa":
            profile = choosing.in_order(profile, self._group.parent)
        return self._pool.submit(
            choosing.searched, workload, profile, solver=made.solver, exclude=_present(made.exclude, profile),
            num_microbatches=plan.num_microbatches, schedule=plan.schedule, reserve_bytes=made.reserve_bytes,
            time_limit_s=_SEARCH_LIMIT_S, rule=stage_option.rule_of(self._made.option, profile, workload),
        )  # fmt: skip

    def before_call(self, executable: Any) -> None:
        """Take what the workers have answered, and decide."""
        if executable.mesh_group is not self._group:
            is_first = self._group is None
            self._begin(executable)
            if not is_first:  # the program has recovered
                self._placed()
        if not self._take():
            return
        for times in self._pace.steps():
            for event in self.follower.observe(times):
                self._note(event)
            if self.follower.wanted is not None:
                self._move(executable, self.follower.wanted)
                break

    def _move(self, executable: Any, plan: Plan) -> None:
        """Move the training, whose state the vaults carry."""
        assert self.run is not None  # a training that adapts survives
        try:
            moved = moving.move(self.run, plan, self.events[-1].what)
        except WorkerFailedError:
            raise
        except HwawareError as error:
            self._note(HistoryEvent(kind="decided", call=self.calls, what=f"stays: {error.what}"))
            self.follower.placed(self.follower.plan, self._profile(self._group))
            return
        self._begin(executable)
        if self._present_plan().stages == plan.stages:
            self.follower.moved(plan, moved.took_s, moved.phases.get("start", 0.0))
        else:  # the other placement could not be taken up
            self._placed()

    def _placed(self) -> None:
        """Follow the placement that the program has now."""
        self.follower.placed(self._present_plan(), self._profile(self._group))

    def _present_plan(self) -> Plan:
        assert self.run is not None  # nothing else is placed again
        return moving.recipe_of(self.run).plan

    def after_call(self) -> None:
        """Ask the workers that owe no answer."""
        self.calls += 1
        now_s = time.monotonic()
        if self.calls - self._asked_calls < _EVERY_CALLS and now_s - self._asked_s < _EVERY_S:
            return
        self._asked_calls, self._asked_s = self.calls, now_s
        for number, worker in enumerate(self._workers):
            if number not in self._owed:
                self._owed.add(number)
                self._ask(number, worker)

    def _ask(self, number: int, worker: Any) -> None:
        answers = self._answers

        def answered(future: Any) -> None:
            answers.put((number, future, time.monotonic()))

        reference = worker.take_recording.options(concurrency_group=CONTROL).remote()
        reference.future().add_done_callback(answered)

    def _begin(self, executable: Any) -> None:
        """Let the workers record: those of the first call, or those after a recovery or a move."""
        group = self._group = executable.mesh_group
        observing.watched(group, self)
        whole, run = self._whole(group), rescue.run_of(group)
        if run is not None and self._made.settings.adapt is True:
            run.on_growth = self.follower.grown
        places = {place: device for device, place in device_places(whole).items()}
        host_of = {device.id: device.host for device in whole.devices}
        stages, uuids = len(group.meshes), executable.executable_uuids
        watched, self._workers = [], []
        for stage, mesh in enumerate(group.meshes):
            for rank, worker in enumerate(mesh.workers):
                address = mesh.host_info[rank]["NodeManagerAddress"]
                devices = [places[address, index] for index in mesh.devices[rank]]
                passes = (uuids[stage], uuids[2 * stages - 1 - stage])
                watched.append(Watched("+".join(devices), host_of[devices[0]], passes))
                self._workers.append(worker)
                worker.start_recording.remote()
        self._pace = Pace(watched, executable.num_batch)
        # Late answers of earlier workers go into a queue that nobody reads.
        self._answers: queue.SimpleQueue[Tuple[int, Any, float]] = queue.SimpleQueue()
        self._owed: Set[int] = set()
        self._begin_s = time.monotonic()

    def _take(self) -> bool:
        """Take the answers that have arrived; return True if one has a recording."""
        found = False
        while not self._answers.empty():
            number, future, answered_s = self._answers.get()
            self._owed.discard(number)
            if future.exception() is not None:
                continue  # the watch finds out why
            recording: Recording = future.result()
            self._pace.add(number, recording)
            if recording.programs and self._compile_s is not None:
                # Workers compile in the first call, and would compile as long for another placement.
                self.follower.switch_s = self._compile_s + answered_s - self._begin_s
                self._compile_s = None
            found = True
        return found

    def _note(self, event: HistoryEvent) -> None:
        best = self.follower.best
        mapping = choosing.mapping_of(best) if event.kind == "decided" and best is not None else None
        event = msgspec.structs.replace(event, call=self.calls, mapping=mapping)
        self.events.append(event)
        LOG.warning("%s", messages.noted(event))


def _present(exclude: Tuple[str, ...], profile: ClusterProfile) -> Tuple[str, ...]:
    known = {host.name for host in profile.hosts} | {device.id for device in profile.devices}
    return tuple(name for name in exclude if name in known)


def _newest() -> Tuple[Optional[Adapter], Optional[Run]]:
    """Return what adapts the newest program, and what lets it survive; None for what it does not have.

    An evaluation with workers of its own survives for itself, and is newer than the training that it serves.
    """
    adapter, running = _NEWEST[-1] if _NEWEST else None, [run for run in rescue.seen if not run.is_closed]
    run = max(running or NEWEST, key=lambda run: (run.trains(), run.begin_s), default=None)
    if adapter is None or run is None or adapter.run is run:
        return adapter, run
    return (adapter, None) if adapter.begin_s > run.begin_s else (None, run)


def last_history() -> Optional[History]:
    """Return what has happened to the newest training that survives or adapts; None without one.

    In a program that does not train, it is the newest function that survives.

    Example:
        >>> from hwaware import last_history
        >>> last_history() is None  # nothing was compiled
        True
    """
    adapter, run = _newest()
    known = None if run is None else run.history()
    if adapter is None:
        return known
    known = known or History(calls=adapter.calls)
    # A decision comes before the move at the same call.
    events = tuple(sorted((*adapter.events, *known.events), key=lambda event: event.call))
    return msgspec.structs.replace(known, events=events)


def last_profile() -> Optional[ClusterProfile]:
    """Return the profile of the newest training that adapts or survives; None without one.

    It has the hosts that have joined. If the training adapts, devices whose times have changed have kinds of their own.

    Example:
        >>> from hwaware import last_profile
        >>> last_profile() is None  # nothing was compiled
        True
    """
    adapter, run = _newest()
    if adapter is not None:
        return adapter.follower.profile
    recipe = None if run is None else run.calls.recipe()
    return None if recipe is None else recipe.profile
