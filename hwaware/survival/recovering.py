"""Place a program again on the devices that are left, give it its state back, and make its calls again."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from hwaware import ray_cluster, ray_jobs
from hwaware.errors import HwawareError
from hwaware.patching import choosing, failures, leaves, meshes, unequal
from hwaware.plans import Plan
from hwaware.runtime.mesh import Place as PlaceOfWorker
from hwaware.runtime.worker import CONTROL
from hwaware.survival import messages, recipes, returning
from hwaware.survival.arrays import Place, holders, own_piece, placed
from hwaware.survival.beforehand import Beforehand
from hwaware.survival.calls import Calls
from hwaware.survival.copying import Copies
from hwaware.survival.pieces import Name, Piece, Wanted, covers, size_of
from hwaware.survival.points import Point
from hwaware.survival.vaults import Vaults

LOG = logging.getLogger("hwaware")
_ANSWER_LIMIT_S, _MOVE_LIMIT_S = 10.0, 600.0
# A worker that ends so often before a step is finished is left out, with its devices.
_MOST_RESTARTS = 2
_MOST_TRIES = 8
# For hosts that answered until a moment ago; the usual limit is for unknown hosts.
_CONNECT_LIMIT_S = 1.5


class Recovered(NamedTuple):
    """Tell about one recovery; the attributes are those of `HistoryEvent`."""

    mapping: str
    phases: Dict[str, float]
    made_again: int
    moved_bytes: int
    tries: int


class Recovery:
    """Recovers one program, as often as it has to.

    Attributes:
        watch: The watch over its workers.
        disk: The program's newest checkpoint, if it has saved one.
        idle, used: Surviving workers by their places, while a recovery looks for some.
        restarts: How often each worker has ended since the newest point.
        left_out: Devices that are not used any more.
        silent: Addresses of hosts on which Ray did not answer in the newest recovery.
        worker_class: Class of the program's workers.
        clock: Notes the phases.
        beforehand: The plans for the loss of each host.
        is_moving: True while nothing is lost: workers keep the arrays that stay where they are.
    """

    is_moving = False
    worker_class: Any = None

    def __init__(self, calls: Calls, vaults: Vaults, copies: Copies) -> None:
        self.watch: Any = None
        self.disk: Optional[returning.Disk] = None
        self.idle: Dict[Place, Any] = {}
        self.used: Dict[Place, Any] = {}
        self.restarts: Dict[Place, int] = {}
        self.left_out: Set[Tuple[str, int]] = set()
        self.silent: Set[str] = set()
        self.clock = Clock({})
        self.beforehand = Beforehand()
        self._otherwise: Optional[Plan] = None
        self._calls, self._vaults, self._copies = calls, vaults, copies
        # Where a process has to start in the place of a lost one.
        self._empty: List[PlaceOfWorker] = []
        # Actors whose loss is known: an attempt that fails after it counts no further loss.
        self._gone: Set[Any] = set()
        # Actors that this recovery has started: one may take longer to import JAX than others to answer.
        self._fresh: Set[Any] = set()
        # Addresses of hosts on which Ray answered as the newest attempt began.
        self._answered: Set[str] = set()
        self._moved_bytes = 0

    def run(self, survivors: Sequence[Any], lost: Sequence[Any], plan: Optional[Plan] = None) -> Recovered:
        """Recover, again and again where more is lost meanwhile.

        Args:
            survivors: The workers that are left, as the watch knows them.
            lost: The workers that are lost.
            plan: Move to this plan, of a program whose whole state is committed. Where that fails, the old plan stays.

        Raises:
            HwawareError: The program cannot go on.
        """
        actors = {_key(self._place_of(one)): one.actor for one in survivors}
        self._gone = {one.actor._actor_id for one in lost}
        try:
            return self._tried(actors, [self._place_of(one) for one in lost], plan)
        except BaseException:  # Ctrl-C, too
            ray_cluster.end_actors([*actors.values(), *self.used.values(), *(one.actor for one in self.watch.members)])
            raise

    def _tried(self, actors: Dict[Place, Any], empty: List[PlaceOfWorker], plan: Optional[Plan]) -> Recovered:
        """Make one attempt after the other; `actors` holds the workers that are left."""
        self._empty, self._fresh, self.silent, self._answered = empty, set(), set(), set()
        self._count(map(_key, empty))
        before = {executable: recipes.of(executable) for executable in self._calls.executables}
        for tries in range(1, _MOST_TRIES + 1):
            phases: Dict[str, float] = {}
            self.is_moving = plan is not None
            try:
                found, count = self._attempt(actors, phases, plan)
                return Recovered(choosing.mapping_of(found), phases, count, self._moved_bytes, tries)
            except Exception as again:
                is_lost = self._keep_left(actors)
                if not (is_lost or plan) or tries == _MOST_TRIES:
                    raise
                what = "Another loss while the program recovers" if is_lost else "The program goes back to its old plan"
                why = again.what if isinstance(again, HwawareError) else f"{ray_cluster.last_line(again)}."
                LOG.warning("%s: %s", what, why)
                if plan is not None:  # functions that are compiled already have it in their recipes
                    for executable, recipe in before.items():
                        recipes.put(executable, recipe)
                    plan = None
        raise AssertionError("the last try returns or raises")

    def _count(self, places: Any) -> None:
        for place in places:
            self.restarts[place] = self.restarts.get(place, 0) + 1

    def _place_of(self, member: Any) -> PlaceOfWorker:
        for mesh in self._calls.group.meshes:
            for rank, worker in enumerate(mesh.workers or ()):
                if worker is member.actor or worker._actor_id == member.actor._actor_id:
                    return leaves.place_of(mesh, rank)
        raise AssertionError("a watched worker is of the group")

    def _keep_left(self, actors: Dict[Place, Any]) -> bool:
        """Keep the workers that are left after a failed attempt; return True if a worker, vault or host was lost."""
        import ray

        known = {**actors, **self.used, **{_key(self._place_of(one)): one.actor for one in self.watch.members}}
        known = {place: actor for place, actor in known.items() if actor._actor_id not in self._gone}
        calls = {actor.clock_s.options(concurrency_group=CONTROL).remote(): place for place, actor in known.items()}
        arrived, late = ray.wait(list(calls), num_returns=len(calls), timeout=_ANSWER_LIMIT_S) if calls else ([], [])
        left = {calls[call]: known[calls[call]] for call in late if known[calls[call]]._actor_id in self._fresh}
        is_starting = bool(left)
        for call in arrived:
            try:
                ray.get(call)
            except ray.exceptions.RayError:
                continue
            left[calls[call]] = known[calls[call]]
        gone = set(known) - set(left)
        for place in gone:
            ray.kill(known[place])  # it may only be late
            self._gone.add(known[place]._actor_id)
        self._count(gone)
        vaults = set(self._vaults.up)
        self._vaults.listings()
        actors.clear()
        actors.update(left)
        # An idle host may be lost, too, where no worker runs yet.
        silent = self._answered and self._answered - _answering(sorted(self._answered))
        return bool(gone or silent) or is_starting or vaults != set(self._vaults.up)

    def _attempt(self, actors: Dict[Place, Any], phases: Dict[str, float], wanted: Optional[Plan]) -> Tuple[Plan, int]:
        """Do everything once, with these surviving workers; return the plan and the number of calls made again."""
        clock = self.clock = Clock(phases)
        self._stop(actors)
        virtual_mesh = self._calls.group.parent
        self._shrink(virtual_mesh)
        actors.update(self._started_early(virtual_mesh))
        listings = self._vaults.listings()
        before = self._copies.committed
        point = returning.newest(self._calls, self._copies, listings, self.disk)
        if point.number > (before.number if before else 0):  # a point has arrived since the loss before this one
            self.restarts = dict.fromkeys(self.restarts, 1)
        self._vaults.begin(listings, set(point.shapes))
        clock.ends("agree")
        plan = self._compile(virtual_mesh, actors, clock, wanted)
        arrays = self._restored(point, listings)
        failures.ask_all(self._calls.group, "sync", "Giving the workers their state")
        clock.ends("move")
        count = self._calls.make_again(arrays)
        failures.ask_all(self._calls.group, "sync", "Making calls again")
        self._copies.copy_again()
        clock.ends("replay")
        return plan, count

    def _stop(self, actors: Dict[Place, Any]) -> None:
        """Free the surviving workers of what they do, and forget the old group."""
        import ray

        for actor in actors.values():
            actor.abandon.options(concurrency_group=CONTROL).remote("the program is placed again")
        for place in map(self._place_of, self.watch.members):
            if place.workers > 1 and _key(place) in actors:  # its JAX keeps the devices of the whole stage
                ray.kill(actors.pop(_key(place)))
        self.watch.close()
        for mesh in self._calls.group.meshes:
            mesh.workers, mesh.launched = None, False
            mesh.to_delete_remote_refs, mesh.to_delete_remote_ref_ct = [], 0

    def _shrink(self, virtual_mesh: Any) -> None:
        """Take the devices that are lost out of the program's cluster, and give up the vaults beside them."""
        # A vault may be on a host without a device that the program still uses.
        addresses = {*(info["NodeManagerAddress"] for info in virtual_mesh.host_info), *self._vaults.up}
        answering = self._answered = _answering(sorted(addresses))
        self.silent |= addresses - answering
        for (address, devices), count in self.restarts.items():
            if count > _MOST_RESTARTS:
                self.left_out.update((address, device) for device in devices)
        self._vaults.end(addresses - answering)
        places = meshes.mesh_places(virtual_mesh)
        lost = {place for place in places if place[0] not in answering or place in self.left_out}
        if len(lost) == len(places):
            raise HwawareError("No host is left on which the program could go on.", messages.START_AGAIN)
        gone = {address for address, _ in places} - {address for address, _ in set(places) - lost}
        self._otherwise = self.beforehand.get(next(iter(gone))) if len(gone) == 1 else None
        if lost:
            unequal.shrink(virtual_mesh, lost)

    def _started_early(self, virtual_mesh: Any) -> Dict[Place, Any]:
        """Start a process in the place of each lost one, while the driver still looks for a plan."""
        left, empty, self._empty = meshes.mesh_places(virtual_mesh), self._empty, []
        return {
            _key(one): self.started(one)
            for one in empty
            if one.workers == 1 and all((one.address, device) in left for device in one.devices)
        }

    def started(self, place: PlaceOfWorker) -> Any:
        """Start a process at a place, and return its actor."""
        actor = leaves.start_worker(place, self.worker_class)
        self._fresh.add(actor._actor_id)
        return actor

    def _compile(self, virtual_mesh: Any, actors: Dict[Place, Any], clock: Clock, wanted: Optional[Plan]) -> Plan:
        """Launch the program on what is left, and compile its functions there."""
        import ray

        leaves.renew_secret()
        self.idle, self.used = dict(actors), {}
        virtual_mesh.launched_physical_mesh_group = None
        plan = None
        for executable in list(self._calls.executables):
            recipe = recipes.of(executable)
            if recipe is not None:
                plan = recipes.compile_again(executable, recipe, virtual_mesh, wanted, self._otherwise)
        if plan is None:
            raise HwawareError("The program was interrupted before it was compiled.", messages.START_AGAIN)
        clock.ends("instruct")
        for actor in self.idle.values():
            ray.kill(actor)
            self._gone.add(actor._actor_id)
        self.idle = {}
        failures.ask_all(self._calls.group, "sync", "Compiling")
        clock.ends("compile")
        return plan

    def _restored(self, point: Point, listings: Dict[str, List[Piece]]) -> Dict[Name, Any]:
        """Give the workers the arrays of a point; return these, as the program's own objects where it has them."""
        calls, values, group = self._calls, self._copies.values, self._calls.group
        arrays: Dict[Name, Any] = {}
        wanted: Dict[Tuple[int, int], List[Wanted]] = {
            (mesh, host): [] for mesh, each in enumerate(group.meshes) for host in range(each.num_hosts)
        }
        needed = sorted(calls.needed(point))
        former = {name: holders(array) for name, array in calls.live().items()} if self.is_moving else {}
        for name in needed:
            arrays[name] = placed(group.meshes, calls.spec(name), name, wanted)
        gifts: List[Any] = []
        reused = {place for place, actor in self.used.items() if actor._actor_id not in self._fresh}
        self._moved_bytes = 0
        for (mesh, host), asked in wanted.items():
            address = group.meshes[mesh].host_info[host]["NodeManagerAddress"]
            place = (address, tuple(group.meshes[mesh].devices[host]))
            these = [_kept(one, former.get(one.name, {}), place) if place in reused else one for one in asked]
            names = {one.name for one in these if one.former is None}
            own = [own_piece(name, values[name]) for name in names if name in values]
            refs = []
            left = names - set(values)
            for at in sorted(listings, key=lambda at: at != address):  # the host's own vault first
                pieces = [piece for piece in listings[at] if piece.name in left]
                self._moved_bytes += sum(map(size_of, pieces))
                if pieces:
                    refs.append(self._vaults.up[at].actor.give.remote(pieces))
                    left -= {name for name in left if _covered(name, pieces, point)}
            gifts.append(group.meshes[mesh].workers[host].take_in.remote(these, own, *refs))
        arrays = {name: calls.become(name, array) for name, array in arrays.items()}
        self.watch.wait(gifts, "Giving the workers their state", _MOVE_LIMIT_S)
        return arrays


def _key(place: PlaceOfWorker) -> Place:
    return place.address, place.devices


class Clock:
    """Notes how long the phases of a recovery take."""

    def __init__(self, phases: Dict[str, float]) -> None:
        self._phases, self._last_s = phases, time.monotonic()

    def ends(self, phase: str) -> None:
        """End a phase, and begin the next."""
        now_s = time.monotonic()
        self._phases[phase] = self._phases.get(phase, 0.0) + now_s - self._last_s
        self._last_s = now_s


def _answering(addresses: Sequence[str]) -> Set[str]:
    """Return the addresses of the hosts on which Ray answers at once."""
    nodes = ray_jobs.at(addresses)
    with ThreadPoolExecutor(max(1, len(nodes))) as pool:
        errors = pool.map(lambda one: ray_cluster.fails_to_answer(one.address, one.port, _CONNECT_LIMIT_S), nodes)
    return {node.address for node, error in zip(nodes, errors) if error is None}


def _kept(one: Wanted, former: Dict[Place, Any], place: Place) -> Wanted:
    """Return what a worker shall take in: its own blocks, if it has had the same ones."""
    uuid, boxes = former.get(place, (None, ()))
    return one._replace(former=uuid) if boxes == one.boxes else one


def _covered(name: Name, pieces: Sequence[Piece], point: Point) -> bool:
    return covers((piece for piece in pieces if piece.name == name), point.shapes[name])
