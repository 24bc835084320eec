"""Take hosts into a running training that join its Ray cluster.

A thread looks for such hosts now and then. It measures one host beside the training, and finds the times of layers on
its devices. The driver's own thread then adds the host to the cluster, between two calls. From there on, the rule of
`hwaware.adapting` decides about a move.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from concurrent.futures import Future
from typing import Any, Dict, NamedTuple, Optional, Set, Tuple

import msgspec

from hwaware import ray_cluster
from hwaware.adapting.deciding import first_switch_s
from hwaware.adapting.following import Follower
from hwaware.adapting.pace import StepTimes
from hwaware.calibration import layers as layer_times
from hwaware.cluster import ClusterProfile
from hwaware.errors import HwawareError, UnusableInputError, WorkerFailedError
from hwaware.history import HistoryEvent
from hwaware.patching import choosing, meshes, rescue, reservation, stage_option
from hwaware.plans import Plan
from hwaware.profiler import beside
from hwaware.profiler.summary import host_names
from hwaware.ray_cluster import Node
from hwaware.runtime import settings as runtime
from hwaware.survival import messages, moving, recipes, reserving
from hwaware.survival.run import Run
from hwaware.workload import Workload

LOG = logging.getLogger("hwaware")
VARIABLE = "HWAWARE_JOIN"
# Ray's list of nodes costs its head a millisecond.
_LOOK_S = 2.0
_LAYERS_LIMIT_S = 30.0


class _Joiner(NamedTuple):
    """A host that the program may use.

    Attributes:
        name: Its name in the profile.
        node: The host.
        info: The facts that Ray knows about the node, as Alpa wants them.
        profile: The cluster with it.
        workload: The layers, with times for its devices.
        numbers: Seconds of each part of the work.
    """

    name: str
    node: Node
    info: Any
    profile: ClusterProfile
    workload: Workload
    numbers: Dict[str, float]


def watch(run: Run, steps: Optional[int]) -> None:
    """Let a program take in hosts that join, unless HWAWARE_JOIN is 0, or the program names its hosts itself.

    Args:
        run: The program, which has just been launched.
        steps: Number of its steps, if it is known.

    Raises:
        UnusableInputError: HWAWARE_JOIN is neither 0 nor 1.
    """
    if runtime.is_on(VARIABLE, default="1") and reservation.is_whole(run.calls.group.parent.parent):
        run.at_boundary.append(Joining(run, steps).at_boundary)


class Joining:
    """Takes in hosts for one program.

    Attributes:
        follower: Decides about moves; None before the first call.
        ready: The host that the next call may use, if any.
    """

    def __init__(self, run: Run, steps: Optional[int]) -> None:
        self.follower: Optional[Follower] = None
        self.ready: Optional[_Joiner] = None
        self._run, self._steps = run, steps
        self._group: Any = None
        self._begin_s = 0.0
        self._is_first, self._has_joined = True, False
        # Hosts that the program uses, by address, and nodes that are not new: used, left, or left alone.
        self._ids: Dict[str, str] = {}
        self._seen: Set[str] = set()
        # Nodes whose first measurement failed.
        self._tried: Set[str] = set()

    def at_boundary(self, run: Run) -> None:
        """Take in a host that is ready, and move where that pays; the program calls this between two calls."""
        recipe, begin_s = run.calls.recipe(), self._begin_s
        self._begin_s = time.monotonic()
        if recipe is None:
            return
        if self.follower is None:
            self._start(recipe)
        elif run.calls.group is not self._group:  # something has placed the program again
            self._follow(recipe)
            if self._has_joined and run.copies.events[-1].kind == "recovered":  # what was found is forgotten
                self._decide_about(recipe)
        elif run.trains():
            self._take(self._begin_s - begin_s)
        if self.ready is not None:
            joiner, self.ready = self.ready, None
            self._take_in(joiner)
        follower = self.follower
        if follower is not None and follower.wanted is not None:
            self._move(follower, follower.wanted)

    def _start(self, recipe: recipes.Recipe) -> None:
        self._group = self._run.calls.group
        self.follower = Follower(
            recipe.plan, recipe.workload, self._profile(recipe), self._search,
            switch_s=first_switch_s(recipe.compile_s, self._group.start_s), start_s=self._group.start_s,
            steps=self._steps,
        )  # fmt: skip
        threading.Thread(target=self._look_on, name="hwaware-join", daemon=True).start()

    def _profile(self, recipe: recipes.Recipe) -> ClusterProfile:
        return meshes.restrict(recipe.profile, self._run.calls.group.parent)

    def _follow(self, recipe: recipes.Recipe) -> None:
        """Follow the placement that the program has now."""
        assert self.follower is not None
        self._group = self._run.calls.group
        self.follower.placed(recipe.plan, self._profile(recipe))

    def _take(self, step_s: float) -> None:
        """Give the follower the time of a step, and note what it decides."""
        assert self.follower is not None
        if self._is_first:  # workers compile in the first call, and would compile as long for another placement
            self.follower.switch_s += step_s
            self._is_first = False
        for event in self.follower.observe(StepTimes({}, step_s)):
            best = self.follower.best
            mapping = choosing.mapping_of(best) if event.kind == "decided" and best is not None else None
            self._note(msgspec.structs.replace(event, mapping=mapping))

    def _note(self, event: HistoryEvent) -> None:
        event = msgspec.structs.replace(event, call=self._run.calls.number)
        self._run.copies.events.append(event)
        LOG.warning("%s", messages.noted(event))

    def _search(self, workload: Workload, profile: ClusterProfile) -> Future[Plan]:
        """Search for a plan beside the training, in a thread; return its future result."""
        recipe, virtual_mesh = moving.recipe_of(self._run), copy.copy(self._run.calls.group.parent)
        arguments = recipes.search_arguments(recipe, virtual_mesh)
        found: Future[Plan] = Future()
        found.set_running_or_notify_cancel()  # nobody can call it off

        def search() -> None:
            try:
                found.set_result(stage_option.searched(recipe.settings, profile, workload, arguments, logging.DEBUG))
            except BaseException as error:  # noqa: BLE001  # who asks for the result gets it
                found.set_exception(error)

        threading.Thread(target=search, name="hwaware-join-search", daemon=True).start()
        return found

    def _move(self, follower: Follower, plan: Plan) -> None:
        try:
            moved = moving.move(self._run, plan, self._run.copies.events[-1].what)
        except WorkerFailedError:
            raise
        except HwawareError as error:
            self._note(HistoryEvent(kind="decided", call=0, what=f"stays: {error.what}"))
            self._follow(moving.recipe_of(self._run))
            return
        recipe = moving.recipe_of(self._run)
        if recipe.plan.stages == plan.stages:
            self._group = self._run.calls.group
            follower.moved(plan, moved.took_s, moved.phases.get("start", 0.0))
        else:  # the other placement could not be taken up
            self._follow(recipe)

    # Hosts

    def _take_in(self, joiner: _Joiner) -> None:
        """Let the program use a host from now on."""
        run, address = self._run, joiner.node.address
        virtual_mesh = run.calls.group.parent
        if address in _addresses(virtual_mesh):
            return
        meshes.grow(virtual_mesh, joiner.info, joiner.node.num_gpus, joiner.profile)
        for executable in run.calls.executables:
            recipes.learn(executable, joiner.workload)
        names = {joiner.name, address, *(one.id for one in joiner.profile.devices if one.host == joiner.name)}
        for each in [one for one in rescue.seen if one.calls.group.parent is virtual_mesh and not one.is_closed]:
            each.takes_back(address, names)
        devices = [device.kind for device in joiner.profile.devices if device.host == joiner.name]
        what = f"host {joiner.name} has joined, with {' and '.join(devices)}"
        self._note(HistoryEvent(kind="joined", call=0, what=what, numbers=joiner.numbers))
        self._has_joined = True
        self._decide_about(moving.recipe_of(run))

    def _decide_about(self, recipe: recipes.Recipe) -> None:
        """Look for a plan on the cluster with the hosts that have joined."""
        assert self.follower is not None
        decide = self.follower.grown if self._run.on_growth is None else self._run.on_growth
        decide(recipe.workload, self._profile(recipe))

    def _look_on(self) -> None:
        """Look for new hosts until the program ends."""
        import ray

        while not self._run.is_closed and ray.is_initialized():
            time.sleep(_LOOK_S)
            try:
                node = self._new_host() if self.ready is None and moving.running() is self._run else None
            except ray.exceptions.RaySystemError:  # the program leaves Ray
                return
            except Exception as error:  # noqa: BLE001, such as a head that is busy for a moment
                LOG.info("hwaware could not look for hosts that have joined, and looks again: %s", error)
                continue
            if node is not None:
                self.ready = self._measured(node)

    def _new_host(self) -> Optional[Node]:
        """Return a host that the program does not use, if one answers."""
        nodes, used = ray_cluster.nodes(), _addresses(self._run.calls.group.parent)
        # Functions with the same devices leave a host one after the other.
        left = {address for run in [self._run, *rescue.seen] for address, _ in list(run.recovery.left_out)}
        for address in set(self._ids) - used:
            # A lost host is new once it is back. One that the program has left is not, until its Ray starts again.
            gone = self._ids.pop(address)
            if address not in left:
                self._seen.discard(gone)
        self._ids.update({node.address: node.id for node in nodes if node.address in used})
        self._seen.update(self._ids.values())
        addresses = [node.address for node in nodes]
        for node in nodes:
            # Ray believes for a while in the host that was at this address before.
            is_new = node.num_gpus and node.id not in self._seen and addresses.count(node.address) == 1
            if is_new and ray_cluster.fails_to_answer(node.address, node.port) is None:
                self._seen.add(node.id)
                return node
        return None

    def _measured(self, node: Node) -> Optional[_Joiner]:
        """Measure a host beside the training; return None, and log why, if that is impossible."""
        import ray

        group: Any = None
        try:
            recipe = moving.recipe_of(self._run)
            name, profile = _named(node, recipe.profile)
            if name in recipe.settings.exclude:
                return None
            LOG.warning(
                "Host %s has joined the cluster. It is measured for at most %g s, while the other hosts compute.",
                name, beside.LIMIT_S,
            )  # fmt: skip
            begin_s = time.monotonic()
            group = reserving.reserved_later(node)
            profile = beside.profile_beside(profile, node, name, sorted(_addresses(self._run.calls.group.parent)))
            profiled_s = time.monotonic()
            workload = _timed(recipe, profile, name)
            numbers = {"profile_s": profiled_s - begin_s, "layers_s": time.monotonic() - profiled_s}
            info = next(one for one in ray.nodes() if one["NodeID"] == node.id)
            self._run.reserved.append(group)
            if self._run.is_closed:  # it ended meanwhile, and gave back what it had reserved by then
                reserving.give_back(group)
                return None
            return _Joiner(name, node, info, profile, workload, numbers)
        except Exception as error:  # noqa: BLE001  # whatever it is, the training goes on without the host
            reserving.give_back(group)
            what = error.what if isinstance(error, HwawareError) else f"{type(error).__name__}: {error}"
            # A host that the training loses meanwhile disturbs the measurement of another one.
            is_last = isinstance(error, UnusableInputError) or node.id in self._tried
            self._tried.add(node.id)
            if not is_last:
                self._seen.discard(node.id)
            outcome = "left alone" if is_last else "measured once more"
            LOG.warning("Host %s has joined the cluster, but is %s: %s", node.address, outcome, what)
            return None


def _addresses(virtual_mesh: Any) -> Set[str]:
    # A recovery changes the mesh in another thread.
    return {address for address, _ in meshes.mesh_places(copy.copy(virtual_mesh))}


def _named(node: Node, profile: ClusterProfile) -> Tuple[str, ClusterProfile]:
    """Return a host's name, and the profile without that host, which may be another machine by now."""
    known = [host.name for host in profile.hosts if host.address == node.address]
    if known:
        return known[0], profile.without((known[0],))
    taken = {host.name for host in profile.hosts} | {device.id for device in profile.devices}
    name = host_names([(one.id, one.hostname, one.address) for one in ray_cluster.nodes()])[node.id]
    return node.address if name in taken else name, profile


def _timed(recipe: recipes.Recipe, profile: ClusterProfile, name: str) -> Workload:
    """Return the layers; time them on a host's devices of kinds that are new, if layers were timed before."""
    workload, sources = recipe.workload, recipe.sources
    known = {kind for layer in workload.layers for kind in layer.measured or ()}
    # A device with times of its own may be another machine by now.
    here = {one.id for one in profile.devices if one.host == name and (one.kind not in known or one.id in known)}
    others = [device.id for device in profile.devices if device.id not in here]
    if not sources or not here:
        return workload
    return layer_times.measured_within(workload, sources, profile, others, _LAYERS_LIMIT_S)
