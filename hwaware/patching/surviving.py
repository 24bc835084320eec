"""Programs that survive: when a worker or a host is lost, the driver goes on inside the program's own call.

Every call of a compiled function is noted with its batch. After a call, workers copy the arrays that the program holds
into vaults (`hwaware.survival`). If a worker is lost, the others stop; a placement on the remaining devices takes over
the surviving processes and their compiled programs; vaults give the arrays of the newest committed point back; the
calls since then are made again. The program's own arrays then refer to the new ones.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from hwaware import greeting, ray_cluster, ray_jobs
from hwaware.cluster import ClusterProfile, LinkTable
from hwaware.compiler.layouts import alpa_spec
from hwaware.compiler.sharding import whole
from hwaware.device_places import device_places
from hwaware.errors import AlpaError, HwawareError, WorkerFailedError
from hwaware.formatting import counted
from hwaware.history import History, HistoryEvent
from hwaware.patching import checkpoints, choosing, failures, leaves, meshes, rescue, stage_option, unequal
from hwaware.patching.mechanism import Patch, PatchSet, Target
from hwaware.plans import Plan
from hwaware.runtime import settings as runtime
from hwaware.runtime.checkpoints import Box, box_of
from hwaware.runtime.worker import CONTROL
from hwaware.survival.pieces import Name, Piece, Wanted, bytes_of, covers, digest_of
from hwaware.survival.points import Point, buddies, interval, missing
from hwaware.survival.vault import Vault
from hwaware.survival.watching import Interrupted, SurvivingWatch
from hwaware.survival.worker import Copied, Item, Order, SurvivingWorker
from hwaware.transport import Address

# The newest program that survives.
_NEWEST: List[Run] = []
# A block of an array.
_Block = Tuple[Name, Box]
VARIABLE = "HWAWARE_SURVIVE"
LOG = logging.getLogger("hwaware")
# Kept on the program's arrays: their names; and on Alpa's handlers of outputs: how to compile the function again.
_NAME, _RECIPE = "hwaware_name", "hwaware_recipe"
_VAULT_LIMIT_S, _ANSWER_LIMIT_S, _MOVE_LIMIT_S = 60.0, 10.0, 600.0
# Arrays up to this size go to the driver with the worker's answer.
_SMALL_BYTES = 256
# A worker that ends so often before a step is finished is left out, with its devices.
_MOST_RESTARTS = 2
_MOST_TRIES = 8
# Hosts that answered until a moment ago; the usual limit is for those of which nothing is known.
_CONNECT_LIMIT_S = 1.5
_FIX = "start the program again from its newest checkpoint (hwaware.restore_newest)."


class _Recipe(NamedTuple):
    """How to compile a function again."""

    compiled: Callable[[Dict[str, Any]], Any]
    arguments: Dict[str, Any]
    known: Optional[stage_option.Known]
    profile: Optional[ClusterProfile]


class _Call(NamedTuple):
    """A call of a compiled function: its arguments are names of arrays, or values of their own."""

    number: int
    executable: Any
    arguments: Tuple[Any, ...]


class _Named(NamedTuple):
    name: Name


class _Origin(NamedTuple):
    """Where an array's placement can be looked up: the function that made or took it, and its place there."""

    executable: Any
    is_input: bool
    place: int


class _Vault(NamedTuple):
    actor: Any
    mailbox: Address


class _Disk(NamedTuple):
    """A checkpoint that the program has saved: where each output of a call is in it."""

    folder: str
    step: int
    call: int
    paths: Dict[int, Tuple[str, ...]]


class _Flight(NamedTuple):
    """Copies that are on their way: what each vault waits for, and what workers were told to send to it."""

    point: Point
    copies: List[Any]
    waiting: Dict[str, Set[Tuple[int, str]]]
    sent: Dict[str, Set[_Block]]


class Rescuer:
    """Makes programs survive that are compiled while it is in charge.

    Attributes:
        worker_class: The class of their workers.
    """

    worker_class = SurvivingWorker

    def __init__(self) -> None:
        self.recovering: Optional[Run] = None

    def watch(self, members: Any, limit_s: float, head: Address) -> SurvivingWatch:
        """Return the watch over a program."""
        return SurvivingWatch(members, limit_s, head)

    def require(self, arguments: Dict[str, Any]) -> None:
        """Refuse programs that could not be placed again.

        Raises:
            AlpaError: The program fixes its stages, or encrypts.
        """
        launched = arguments["virtual_mesh"].launched_physical_mesh_group is not None
        if stage_option.settings_of(arguments["stage_option"]) is None and not launched:
            raise AlpaError(
                f"survive=True needs stages that hwaware chooses, found {type(arguments['stage_option']).__name__}.",
                'use stage_option="auto" or hwaware.HardwareAwareStageOption, or leave survive out.',
            )
        if runtime.current().encrypt:
            raise AlpaError(
                "survive=True and encrypt=True exclude each other: copies that return from a vault travel in Ray's own "
                "connections, which stay plain.",
                "leave one of them out.",
            )

    def compiled(self, compiled: Any, arguments: Dict[str, Any], config: Any) -> None:
        """Remember how to compile a function again."""
        chosen = stage_option.settings_of(arguments["stage_option"])
        workload, known, profile = stage_option.last_workload(), None, None
        if chosen is not None and workload is not None:
            profile = chosen.profile
            known = stage_option.Known(workload, stage_option.last_layer_sources(), stage_option.last_plan())
        setattr(config.outs_handler, _RECIPE, _Recipe(compiled, dict(arguments), known, profile))

    def launched(self, group: Any, watch: SurvivingWatch) -> None:
        """Take charge of a launched group of meshes."""
        run = self.recovering or Run(self)
        run.take_up(group, watch)

    def takes(self, place: Any, secret: bytes, identity: Any) -> bool:
        """Let a surviving worker start over at a place; return False if there is none."""
        run = self.recovering
        actor = None if run is None else run.idle.pop((place.address, place.devices), None)
        if run is None or actor is None or place.workers > 1:
            return False
        run.used[place.address, place.devices] = actor
        actor.start_over.remote(place, secret, identity)
        return True

    def worker(self, place: Any) -> Any:
        """Return the worker that `takes` has found."""
        assert self.recovering is not None
        return self.recovering.used[place.address, place.devices]


class Run:
    """One launched program, its noted calls and its vaults.

    Attributes:
        group: Alpa's group of meshes, as it is now.
        committed: The newest point to which the program can return; None before the first.
        every: Copy after so many calls; None to let the measured times decide.
        idle, used: Surviving workers by address and devices, while a recovery looks for places.
        events: The recoveries so far.
    """

    every: Optional[int] = None
    # True while a call is launched: what fails in it is made again as a whole.
    is_calling = False

    def __init__(self, rescuer: Rescuer) -> None:
        self.group: Any = None
        self.committed: Optional[Point] = None
        self.idle: Dict[Tuple[str, Tuple[int, ...]], Any] = {}
        self.used: Dict[Tuple[str, Tuple[int, ...]], Any] = {}
        self.events: List[HistoryEvent] = []
        self._points, self._copied_bytes, self._copy_s = 0, 0, 0.0
        _NEWEST[:] = [self]
        self.vaults: Dict[str, _Vault] = {}
        # Vaults that are not up yet: actor and the call that tells.
        self._starting: Dict[str, Tuple[Any, Any]] = {}
        # The question to each vault that it has not answered yet.
        self._asked: Dict[str, Any] = {}
        self._rescuer = rescuer
        self._watch: Any = None
        self._epoch = 0
        self._secret = greeting.new_secret()
        self._digests = runtime.current().message_digests
        self._number = 0
        self._brought = 0
        self._log: List[_Call] = []
        self._launch: Any = None
        self._made: Dict[Name, Any] = {}
        self._origins: Dict[Name, _Origin] = {}
        self._avals: Dict[Name, Any] = {}
        self._values: Dict[Name, Any] = {}
        self._held: Dict[str, Set[_Block]] = {}
        self._flight: Optional[_Flight] = None
        self._disk: Optional[_Disk] = None
        self._interval = 1
        self._newest = -1
        self._commit_s = time.monotonic()
        self._executables: Any = weakref.WeakSet()
        self._restarts: Dict[Tuple[str, Tuple[int, ...]], int] = {}
        self._left_out: Set[Tuple[str, int]] = set()

    def now(self, mesh: Any) -> Any:
        """Return a mesh, or the group that a recovery has put in its place."""
        return mesh if mesh is self.group or mesh in self.group.meshes else self.group

    def take_up(self, group: Any, watch: SurvivingWatch) -> None:
        """Begin to use a launched group of meshes."""
        self.group, self._watch = group, watch
        watch.run = self
        for mesh in [group, *group.meshes]:
            rescue.attach(mesh, self)
        self._start_vaults()

    def saved(self, folder: str, step: int, leaves: Dict[Tuple[str, ...], Any]) -> None:
        """Remember a checkpoint of the program's state."""
        names = {path: vars(leaf).get(_NAME) for path, leaf in leaves.items() if self._is_own(leaf)}
        made = {path: name for path, name in names.items() if name is not None and name[0] > 0}
        if made:
            call = max(number for number, _ in made.values())
            self._disk = _Disk(folder, step, call, {place: path for path, (_, place) in made.items()})

    def close(self) -> None:
        """End the vaults."""
        import ray

        actors = [vault.actor for vault in self.vaults.values()] + [actor for actor, _ in self._starting.values()]
        self.vaults, self._starting, self._flight = {}, {}, None
        for actor in actors:
            ray.kill(actor)

    # Calls

    def call(self, executable: Any, args: Sequence[Any], launch: Callable[..., Any]) -> Any:
        """Call a compiled function, and note the call so that it can be made again."""
        self._executables.add(executable)
        self._launch = launch
        rescue.retried(self._look)
        self._bring(executable, args)
        call = _Call(self._number + 1, executable, tuple(map(self._kept, args)))
        given = list(args)
        while True:
            try:
                self.is_calling = True
                outs = launch(executable, *given)
                break
            except Interrupted as error:
                self.is_calling = False
                self.recover(error)
                # What was donated to the interrupted launch is gone; its copy is not.
                given = [arg if isinstance(kept, _Named) else kept for arg, kept in zip(args, call.arguments)]
            finally:
                self.is_calling = False
        self._number = call.number
        self._log.append(call)
        for place, out in enumerate(outs):
            self._name(out, (call.number, place), _Origin(executable, False, place))
        self._copy_if_due(outs)
        return outs

    def _look(self) -> None:
        self._watch.raise_lost()
        self._collect()

    def _name(self, array: Any, name: Name, origin: _Origin) -> None:
        setattr(array, _NAME, name)
        self._made[name] = weakref.ref(array)
        self._origins[name], self._avals[name] = origin, array.aval

    def _is_own(self, array: Any) -> bool:
        """Tell if an argument is an array on the workers of this program, and not of another one."""
        return _is_distributed(array) and _one(array).device_mesh in self.group.meshes

    def _kept(self, arg: Any) -> Any:
        """Return what to keep of an argument: its name, or a copy, since the program may write the next batch there."""
        import jax
        import numpy

        if self._is_own(arg):
            return _Named(vars(arg)[_NAME])
        if _is_distributed(arg):
            return numpy.array(arg._value)
        return numpy.array(arg) if isinstance(arg, (numpy.ndarray, jax.Array)) else arg

    def _bring(self, executable: Any, args: Sequence[Any]) -> None:
        """Name arrays that no noted call made, such as those of a restored checkpoint, and copy them now."""
        unknown = False
        for place, arg in enumerate(args):
            if not self._is_own(arg):
                continue
            name = vars(arg).get(_NAME)
            if name is None:
                unknown = True
                self._brought += 1
                self._name(arg, (0, self._brought), _Origin(executable, True, place))
            else:
                self._origins[name] = _Origin(executable, True, place)
        if unknown:
            self._flight = None
            self._copy()

    # Copies

    def _live(self) -> Dict[Name, Any]:
        """Return the arrays that the program holds and that no call has taken."""
        found, read = {}, self._read()
        for name, reference in list(self._made.items()):
            array = reference()
            if array is None:
                if name not in read:
                    del self._made[name]
                    self._origins.pop(name, None)
                    self._avals.pop(name, None)
            elif not _is_deleted(array):
                found[name] = array
        return found

    def _read(self) -> Set[Name]:
        """Return the arrays that calls read which may be made again."""
        return {arg.name for call in self._log for arg in call.arguments if isinstance(arg, _Named)}

    def _copy_if_due(self, outs: Sequence[Any]) -> None:
        del outs  # the caller holds them, so they count as live
        every = self._interval if self.every is None else self.every
        if self._flight is None and self._number - self._newest >= every:
            self._copy()

    def _copy(self) -> None:
        """Let the workers copy what the program holds now."""
        self._start_vaults()
        self._use_started(0 if self.vaults else _VAULT_LIMIT_S)
        live = self._live()
        hosts = list(self.vaults)
        targets = buddies(hosts, self._rates())
        orders: Dict[Tuple[int, int], List[Item]] = {}
        sent: Dict[str, Set[_Block]] = {host: set() for host in hosts}
        for name, array in live.items():
            one = _one(array)
            if name in self._values:
                continue
            is_small = one.aval.size * one.aval.dtype.itemsize <= _SMALL_BYTES
            for (host, device), place in zip(one.one_replica_host_local_ids, one.one_replica_buffer_ids):
                mesh, box = self.group.meshes.index(one.device_mesh), box_of(one.indices[place], one.aval.shape)
                own = one.device_mesh.host_info[host]["NodeManagerAddress"]
                places = dict.fromkeys((own, targets.get(own) or next(iter(hosts), None)))
                wanted = [at for at in places if at in self.vaults and (name, box) not in self._held[at]]
                if not is_small and not wanted and not any((name, box) in held for held in self._held.values()):
                    return  # no vault is up that could hold it; the next call tries again
                if is_small or wanted:
                    chosen = () if is_small else tuple(hosts.index(at) for at in wanted)
                    orders.setdefault((mesh, host), []).append(Item(name, one.remote_ref.uuid, device, box, chosen))
                    for at in () if is_small else wanted:
                        sent[at].add((name, box))
        point = Point(self._number, {name: tuple(_one(array).aval.shape) for name, array in live.items()})
        copies: List[Any] = []
        waiting: Dict[str, Set[Tuple[int, str]]] = {}
        addresses = tuple(self.vaults[host].mailbox for host in hosts)
        for (mesh, host), items in orders.items():
            sender = f"{mesh}.{host}"
            used = {number for item in items for number in item.vaults}
            order = Order(self._epoch, point.number, tuple(items), addresses, self._secret, self._digests, sender)
            copies.append(self.group.meshes[mesh].workers[host].copy_out.remote(order))
            for number in used:
                waiting.setdefault(hosts[number], set()).add((point.number, sender))
        self._newest = self._number
        self._flight = _Flight(point, copies, waiting, sent)

    def _collect(self) -> None:
        """Commit the point whose copies have all arrived, if they have; never waits."""
        import ray

        flight = self._flight
        for host, done in self._marks().items():
            if flight is not None and flight.waiting.get(host, set()) <= done:
                flight.waiting.pop(host, None)
        flight = self._flight  # none where a vault has ended
        if flight is None or flight.waiting:
            return
        if flight.copies and ray.wait(flight.copies, num_returns=len(flight.copies), timeout=0)[1]:
            return
        try:
            copied: List[Optional[Copied]] = ray.get(flight.copies)
        except ray.exceptions.RayError:  # the watch finds out why
            self._flight = None
            return
        whole = [one for one in copied if one is not None]
        if len(whole) < len(copied):
            self._flight = None
            return
        self._commit(flight, whole)

    def _marks(self) -> Dict[str, Set[Tuple[int, str]]]:
        """Return what vaults that have answered meanwhile have as a whole; every vault always owes one answer."""
        import ray

        found = {}
        for host, vault in list(self.vaults.items()):
            asked = self._asked.get(host)
            if asked is not None and ray.wait([asked], timeout=0)[0]:
                try:
                    found[host] = ray.get(asked)
                except ray.exceptions.RayError:
                    self._lose_vault(host)
                    continue
                asked = None
            if asked is None:
                self._asked[host] = vault.actor.marks.remote()
        return found

    def _commit(self, flight: _Flight, copied: Sequence[Copied]) -> None:
        """Let every vault drop what the newest point does not need."""
        now_s, calls = time.monotonic(), flight.point.number - (self.committed.number if self.committed else 0)
        if copied and calls > 0:
            step_s = (now_s - self._commit_s) / calls
            self._interval = interval(max(one.copy_s + one.sent_s for one in copied), step_s)
        self._commit_s = now_s
        self._points += 1
        self._copied_bytes += sum(one.bytes for one in copied)
        self._copy_s += max((one.copy_s for one in copied), default=0.0)
        names = set(flight.point.shapes)
        for one in copied:
            self._values.update(one.values)
        self._values = {name: value for name, value in self._values.items() if name in names}
        for host, vault in self.vaults.items():
            blocks = self._held[host] | flight.sent.get(host, set())
            self._held[host] = {block for block in blocks if block[0] in names}
            vault.actor.keep.remote(names)
        self.committed, self._flight = flight.point, None
        self._log = [call for call in self._log if call.number > flight.point.number]
        self._restarts.clear()

    def _rates(self) -> Dict[Tuple[str, str], float]:
        """Return the rates between hosts' addresses, as the profile has them."""
        recipes = [getattr(executable.outs_handler, _RECIPE) for executable in self._executables]
        profile = next((recipe.profile for recipe in recipes if recipe.profile is not None), None)
        return {} if profile is None else _host_rates(profile)

    # Vaults

    def _start_vaults(self) -> None:
        """Start a vault on every host of the program that has none."""
        import ray

        hosts = {info["NodeManagerAddress"] for mesh in self.group.meshes for info in mesh.host_info}
        for host in sorted(hosts - set(self.vaults) - set(self._starting)):
            node = {f"node:{host}": 0.001}
            actor = ray.remote(num_cpus=0, resources=node, max_restarts=0)(Vault)
            started = actor.remote(host, self._secret, self._digests)
            self._starting[host] = (started, started.mailbox_address.remote())

    def _use_started(self, limit_s: float) -> None:
        """Use the vaults that have started."""
        import ray

        calls = {call: host for host, (_, call) in self._starting.items()}
        for call in ray.wait(list(calls), num_returns=len(calls), timeout=limit_s)[0] if calls else ():
            actor, _ = self._starting.pop(calls[call])
            with contextlib.suppress(ray.exceptions.RayError):  # it, or its host, has ended already
                self.vaults[calls[call]] = _Vault(actor, ray.get(call))
                self._held[calls[call]] = set()
                actor.begin.remote(self._epoch, ())

    def _lose_vault(self, host: str) -> None:
        """Go on without a vault; the next copies start another."""
        what = f"the vault on host {host} has ended; another one takes its place"
        LOG.warning("%s.", what[:1].upper() + what[1:])
        self.events.append(HistoryEvent(kind="vault", call=self._number, what=what))
        self._drop_vault(host)
        self._flight, self._newest = None, -1

    def _drop_vault(self, host: str) -> None:
        del self.vaults[host], self._held[host]
        self._asked.pop(host, None)

    def _listings(self) -> Dict[str, List[Piece]]:
        """Return what each vault that answers has; the others are given up."""
        import ray

        calls = {vault.actor.listing.remote(): host for host, vault in self.vaults.items()}
        arrived, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_ANSWER_LIMIT_S) if calls else ([], [])
        found: Dict[str, List[Piece]] = {}
        for call in arrived:
            try:
                found[calls[call]] = ray.get(call)
            except ray.exceptions.RayError:
                continue
        for host in set(self.vaults) - set(found):
            self._drop_vault(host)
        return found

    # Recovery

    def recover(self, error: Interrupted) -> None:
        """Go on after a loss, on what is left; returns once all noted calls are made again.

        Raises:
            WorkerFailedError: The program cannot go on.
        """
        noticed_s = time.monotonic()
        survivors, lost = self._watch.sorted_out()
        if not lost:
            self.close()
            self._watch.give_up(error.failure)
        actors = {self._place_of(one): one.actor for one in survivors}
        words = "; ".join(f"{one.where} ({one.lifeline.is_lost() or 'it does not answer'})" for one in lost)
        for one in lost:
            place = self._place_of(one)
            self._restarts[place] = self._restarts.get(place, 0) + 1
        with rescue.in_charge(self._rescuer):
            self._rescuer.recovering = self
            try:
                phases, attempt, tries = self._attempts(actors)
            except HwawareError as failure:
                raise self._lost_for_good(error, failure) from failure
            finally:
                self._rescuer.recovering = None
        took_s = time.monotonic() - noticed_s
        event = HistoryEvent(
            kind="recovered",
            call=self._number,
            what=f"lost {words}",
            took_s=took_s,
            phases=phases,
            tries=tries,
            **attempt,
        )
        self.events.append(event)
        LOG.warning("%s", _line(event))

    def history(self) -> History:
        """Return what has happened so far."""
        every = self._interval if self.every is None else self.every
        return History(
            calls=self._number,
            points=self._points,
            copied_bytes=self._copied_bytes,
            copy_s=self._copy_s,
            every=every,
            events=tuple(self.events),
        )

    def _attempts(self, actors: Dict[Any, Any]) -> Tuple[Dict[str, float], Dict[str, Any], int]:
        """Recover, again and again where more is lost meanwhile."""
        for tries in range(1, _MOST_TRIES + 1):
            phases: Dict[str, float] = {}
            try:
                return phases, self._attempt(actors, phases), tries
            except Exception as again:
                actors, gone = self._left(actors)
                if not gone or tries == _MOST_TRIES:
                    self._end_all(actors)
                    raise
                LOG.warning("Another loss while the program recovers: %s", ray_cluster.last_line(again))
        raise AssertionError("the last try returns or raises")

    def _lost_for_good(self, error: Interrupted, failure: HwawareError) -> WorkerFailedError:
        """Return the error that ends the program: what was lost first, and why it cannot go on."""
        return WorkerFailedError(error.where, f"{error.cause} {failure.what}", failure.fix)

    def _place_of(self, member: Any) -> Tuple[str, Tuple[int, ...]]:
        for mesh in self.group.meshes:
            for rank, worker in enumerate(mesh.workers or ()):
                if worker is member.actor or worker._actor_id == member.actor._actor_id:
                    return mesh.host_info[rank]["NodeManagerAddress"], tuple(mesh.devices[rank])
        raise AssertionError("a watched worker is of the group")

    def _left(self, actors: Dict[Any, Any]) -> Tuple[Dict[Any, Any], bool]:
        """Return the workers that are left after a failed attempt, and True if any was lost."""
        import ray

        known = {**actors, **self.used, **{self._place_of(one): one.actor for one in self._watch.members}}
        calls = {actor.clock_s.options(concurrency_group=CONTROL).remote(): place for place, actor in known.items()}
        arrived, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_ANSWER_LIMIT_S) if calls else ([], [])
        left = {}
        for call in arrived:
            try:
                ray.get(call)
            except ray.exceptions.RayError:
                continue
            left[calls[call]] = known[calls[call]]
        gone = set(known) - set(left)
        for place in gone:
            self._restarts[place] = self._restarts.get(place, 0) + 1
        vaults = set(self.vaults)
        self._listings()
        return left, bool(gone) or vaults != set(self.vaults)

    def _end_all(self, actors: Dict[Any, Any]) -> None:
        import ray

        for actor in {**actors, **self.used}.values():
            ray.kill(actor)
        self.close()

    def _attempt(self, actors: Dict[Any, Any], phases: Dict[str, float]) -> Dict[str, Any]:
        """Do everything once, with these surviving workers."""
        clock = _Clock(phases)
        self._stop(actors)
        virtual_mesh = self.group.parent
        self._shrink(virtual_mesh)
        listings = self._listings()
        point, values = self._point(listings)
        self._epoch += 1
        for vault in self.vaults.values():
            vault.actor.begin.remote(self._epoch, set(point.shapes))
        self._held = {
            host: {(piece.name, Box(piece.start, piece.shape)) for piece in pieces if piece.name in point.shapes}
            for host, pieces in listings.items()
        }
        clock.ends("agree")
        plan = self._compile(virtual_mesh, actors, clock)
        arrays = self._restored(point, values, listings)
        failures.ask_all(self.group, "sync", "Giving the workers their state")
        clock.ends("move")
        count = self._made_again(arrays)
        failures.ask_all(self.group, "sync", "Making calls again")
        self._flight, self._newest = None, -1
        self._copy()
        clock.ends("replay")
        return {"made_again": count, "mapping": choosing.mapping_of(plan)}

    def _stop(self, actors: Dict[Any, Any]) -> None:
        """Free the surviving workers of what they do, and forget the old group."""
        for actor in actors.values():
            actor.abandon.options(concurrency_group=CONTROL).remote("a worker of this program was lost")
        self._watch.close()
        for mesh in self.group.meshes:
            mesh.workers, mesh.launched = None, False
            mesh.to_delete_remote_refs, mesh.to_delete_remote_ref_ct = [], 0

    def _shrink(self, virtual_mesh: Any) -> None:
        """Take the devices that are lost out of the program's cluster, and give up the vaults beside them."""
        addresses = [info["NodeManagerAddress"] for info in virtual_mesh.host_info]
        answering = _answering(addresses)
        for (address, devices), count in self._restarts.items():
            if count > _MOST_RESTARTS:
                self._left_out.update((address, device) for device in devices)
        for host in set(self.vaults) - answering:
            self._drop_vault(host)
        places = meshes.mesh_places(virtual_mesh)
        lost = {place for place in places if place[0] not in answering or place in self._left_out}
        if len(lost) == len(places):
            raise HwawareError("No host is left on which the program could go on.", _FIX)
        if lost:
            unequal.shrink(virtual_mesh, lost)

    def _point(self, listings: Dict[str, List[Piece]]) -> Tuple[Point, Dict[Name, Any]]:
        """Return the newest point to which the program can return, and what the driver has of it."""
        held = [piece for pieces in listings.values() for piece in pieces]
        flight, self._flight = self._flight, None
        if flight is not None:  # it may have arrived since the last look
            values = {**self._values, **_arrived_values(flight.copies)}
            if not missing(flight.point, held, values, self._needed(flight.point)):
                self.committed, self._values = flight.point, values
        point = self.committed or Point(0, {})
        self._log = [call for call in self._log if call.number > point.number]
        needed = self._needed(point)
        lost = missing(point, held, self._values, needed)
        if lost and self._disk is not None and all(name[0] > 0 and name[1] in self._disk.paths for name in lost):
            return self._from_disk(self._disk, point, needed)
        if lost:
            names = ", ".join(f"output {place} of call {number}" for number, place in lost[:3])
            raise HwawareError(
                f"The program cannot go on: {len(lost)} arrays were lost with every host that held a copy ({names}).",
                _FIX,
            )
        return point, self._values

    def _from_disk(self, disk: _Disk, point: Point, needed: Set[Name]) -> Tuple[Point, Dict[Name, Any]]:
        """Return the point with the state of a checkpoint, and say so: what was trained since then is lost."""
        paths = {name: disk.paths[name[1]] for name in needed if name[0] > 0 and name[1] in disk.paths}
        found = checkpoints.values(disk.folder, disk.step, set(paths.values()))
        what = f"every host that held a copy of the state is lost: it is step {disk.step} of {disk.folder} again"
        LOG.warning("%s; the work of %s is lost.", what, counted(max(0, point.number - disk.call), "call"))
        self.events.append(HistoryEvent(kind="disk", call=self._number, what=what))
        values = {**self._values, **{name: found[path] for name, path in paths.items()}}
        shapes = {**point.shapes, **{name: tuple(values[name].shape) for name in paths}}
        self.committed, self._values = Point(point.number, shapes), values
        return self.committed, values

    def _needed(self, point: Point) -> Set[Name]:
        """Return the arrays that the point has to give: those that calls read again, and those that the program has."""
        later = [call for call in self._log if call.number > point.number]
        read = {arg.name for call in later for arg in call.arguments if isinstance(arg, _Named)}
        return {name for name in read | set(self._live()) if name[0] <= point.number}

    def _compile(self, virtual_mesh: Any, actors: Dict[Any, Any], clock: _Clock) -> Any:
        """Launch the program on what is left, and compile its functions there."""
        import ray
        from alpa.pipeline_parallel.pipeshard_executable import PipeshardDriverExecutable

        leaves.renew_secret()
        self.idle, self.used = dict(actors), {}
        virtual_mesh.launched_physical_mesh_group = None
        plan = None
        for executable in list(self._executables):
            recipe: _Recipe = getattr(executable.outs_handler, _RECIPE)
            if recipe.known is None or recipe.profile is None:
                if any(call.executable is executable for call in self._log):
                    raise HwawareError("The program was interrupted before its first state was copied.", _FIX)
                continue
            known = recipe.known._replace(plan=_still_possible(recipe.known.plan, virtual_mesh, recipe.profile))
            with stage_option.placed_again(known), _timers_stopped():
                config = recipe.compiled(recipe.arguments)
            plan = stage_option.last_plan()
            handler = recipe._replace(known=recipe.known._replace(plan=plan))
            setattr(config.outs_handler, _RECIPE, handler)
            PipeshardDriverExecutable.__init__(
                executable,
                mesh_group=virtual_mesh.launched_physical_mesh_group,
                pipeshard_config=config,
                num_batch=executable.num_batch,
                layer_option=executable.pipeline_plan.layer_option,
                in_tree=executable.in_tree,
                out_tree=executable.out_tree,
                static_argnums=executable.static_argnums,
            )
        if plan is None:
            raise HwawareError("The program was interrupted before its first call.", _FIX)
        clock.ends("place")
        for actor in self.idle.values():
            ray.kill(actor)
        self.idle = {}
        failures.ask_all(self.group, "sync", "Compiling")
        clock.ends("compile")
        return plan

    def _restored(self, point: Point, values: Dict[Name, Any], listings: Dict[str, List[Piece]]) -> Dict[Name, Any]:
        """Give the workers the arrays of a point; returns them, the program's own where it still has them."""
        needed = self._needed(point)
        arrays: Dict[Name, Any] = {}
        wanted: Dict[Tuple[int, int], List[Wanted]] = {}
        for name in sorted(needed):
            arrays[name] = self._become(name, _placed(self.group, self._spec(name), name, wanted))
        gifts = {}
        for (mesh, host), these in wanted.items():
            worker = self.group.meshes[mesh].workers[host]
            address = self.group.meshes[mesh].host_info[host]["NodeManagerAddress"]
            names = {one.name for one in these}
            own = [_own_piece(name, values[name]) for name in names if name in values]
            refs = []
            left = names - set(values)
            for at in sorted(listings, key=lambda at: at != address):  # the host's own vault first
                pieces = [piece for piece in listings[at] if piece.name in left]
                if pieces:
                    refs.append(self.vaults[at].actor.give.remote(pieces))
                    complete = {name for name in left if _covered(name, pieces, point)}
                    left -= complete
            gifts[mesh, host] = worker.take_in.remote(these, own, *refs)
        self._watch.wait(list(gifts.values()), "Giving the workers their state", _MOVE_LIMIT_S)
        return arrays

    def _spec(self, name: Name) -> Any:
        """Return where an array belongs now: where the function that reads or made it says, else on the first stage."""
        from alpa.parallel_plan import PlacementSpec

        origin = self._origins[name]
        if getattr(origin.executable.outs_handler, _RECIPE).known is not None:
            executable = origin.executable
            specs = executable.input_placement_specs if origin.is_input else executable.output_placement_specs
            return specs[origin.place]
        aval, width = self._avals[name], self.group.meshes[0].num_devices
        return PlacementSpec(aval, (0,), (alpa_spec(whole(aval.shape), (width, 1)),))

    def _become(self, name: Name, new: Any) -> Any:
        """Let the program's own array be the new one, if the program still has it; returns the one to use."""
        reference = self._made.get(name)
        old = None if reference is None else reference()
        if old is None:
            setattr(new, _NAME, name)
            return new
        old.__class__ = new.__class__
        old.__dict__ = {**vars(new), _NAME: name}
        return old

    def _made_again(self, arrays: Dict[Name, Any]) -> int:
        """Make the noted calls again; returns their number."""
        for call in self._log:
            given = [arrays[arg.name] if isinstance(arg, _Named) else arg for arg in call.arguments]
            for place, out in enumerate(self._launch(call.executable, *given)):
                name = (call.number, place)
                arrays[name] = self._become(name, out)
                self._made[name] = weakref.ref(arrays[name])
        return len(self._log)


@contextlib.contextmanager
def _timers_stopped() -> Iterator[None]:
    """Stop Alpa's timers where compiling fails: Alpa would refuse to start them again."""
    from alpa.timer import timers

    try:
        yield
    except BaseException:
        for timer in timers.timers.values():
            timer.started = False
        raise


class _Clock:
    """Notes how long the phases of a recovery take."""

    def __init__(self, phases: Dict[str, float]) -> None:
        self._phases, self._last_s = phases, time.monotonic()

    def ends(self, phase: str) -> None:
        """End a phase, and begin the next."""
        now_s = time.monotonic()
        self._phases[phase], self._last_s = now_s - self._last_s, now_s


def _host_rates(profile: ClusterProfile) -> Dict[Tuple[str, str], float]:
    """Return bytes per second between the addresses of hosts that have a link."""
    links, places = LinkTable(profile), device_places(profile)
    first = {address: device for device, (address, _) in reversed(list(places.items()))}
    found = {(a, b): links.between(first[a], first[b]) for a in first for b in first if a != b}
    return {pair: link.bandwidth_bytes_per_s for pair, link in found.items() if link is not None}


def _arrived_values(copies: Sequence[Any]) -> Dict[Name, Any]:
    """Return the arrays that workers have sent to the driver, as far as they have arrived."""
    import ray

    found: Dict[Name, Any] = {}
    for copy in ray.wait(list(copies), num_returns=len(copies), timeout=0)[0] if copies else ():
        with contextlib.suppress(ray.exceptions.RayError):
            copied: Optional[Copied] = ray.get(copy)
            found.update(copied.values if copied is not None else {})
    return found


def _answering(addresses: Sequence[str]) -> Set[str]:
    """Return the addresses of the hosts on which Ray answers at once."""
    nodes = ray_jobs.at(addresses)
    with ThreadPoolExecutor(max(1, len(nodes))) as pool:
        errors = pool.map(lambda one: ray_cluster.fails_to_answer(one.address, one.port, _CONNECT_LIMIT_S), nodes)
    return {node.address for node, error in zip(nodes, errors) if error is None}


def _one(array: Any) -> Any:
    """Return an array on one group of devices, also of an array that several stages have."""
    from alpa.device_mesh import ReplicatedDistributedArray

    return array.replica if isinstance(array, ReplicatedDistributedArray) else array


def _is_distributed(value: Any) -> bool:
    from alpa.device_mesh import DistributedArray, ReplicatedDistributedArray

    return isinstance(value, (DistributedArray, ReplicatedDistributedArray))


def _is_deleted(array: Any) -> bool:
    reference = _one(array).remote_ref
    return reference is None or reference.is_deleted_on_workers


def _own_piece(name: Name, value: Any) -> Tuple[Piece, Any]:
    """Return a whole array of the driver as a piece."""
    data = bytes_of(value)
    return Piece(name, (0,) * value.ndim, value.shape, value.dtype.name, digest_of(data)), data


def _covered(name: Name, pieces: Sequence[Piece], point: Point) -> bool:
    return covers((piece for piece in pieces if piece.name == name), point.shapes[name])


def _placed(group: Any, spec: Any, name: Name, wanted: Dict[Tuple[int, int], List[Wanted]]) -> Any:
    """Return an array on the meshes where it belongs, and add to what each worker shall take in."""
    from alpa.device_mesh import DistributedArray, RemoteArrayRef, ReplicatedDistributedArray

    from hwaware.compat.specs import spec_to_indices

    arrays = []
    for mesh_id, sharding in zip(spec.mesh_ids, spec.sharding_specs):
        mesh = group.meshes[mesh_id]
        reference, width = RemoteArrayRef(mesh), mesh.num_devices_per_host
        indices = spec_to_indices(spec.aval.shape, sharding)
        for host in range(mesh.num_hosts):
            boxes = tuple(box_of(index, spec.aval.shape) for index in indices[host * width : (host + 1) * width])
            wanted.setdefault((mesh_id, host), []).append(Wanted(name, reference.uuid, spec.aval.dtype, boxes))
        arrays.append(DistributedArray(mesh, spec.aval, sharding, reference, indices))
    return arrays[0] if len(arrays) == 1 else ReplicatedDistributedArray([a.device_mesh for a in arrays], arrays)


def _still_possible(plan: Optional[Plan], virtual_mesh: Any, profile: ClusterProfile) -> Optional[Plan]:
    """Return a plan if the program still has all of its devices."""
    places, available = device_places(profile), meshes.mesh_places(virtual_mesh)
    if plan is None or any(places.get(device) not in available for stage in plan.stages for device in stage.devices):
        return None
    return plan


def _line(event: HistoryEvent) -> str:
    """Return what a person reads about a recovery."""
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in event.phases.items())
    calls = counted(event.made_again, "call")
    what = event.what[:1].upper() + event.what[1:]
    return (
        f"{what}. After {event.took_s:.1f} s ({phases}) the program goes on with {event.mapping}; {calls} up to number "
        f"{event.call} {'was' if event.made_again == 1 else 'were'} made again."
    )


def value(original: Any) -> property:
    """Alpa's own; where a worker is lost meanwhile, the program recovers, and the value is that of the new array."""

    def replacement(self: Any) -> Any:
        from alpa.device_mesh import DistributedArray

        return rescue.retried(lambda: original.fget(self) if isinstance(self, DistributedArray) else self._value)

    return property(replacement)


def last_history() -> Optional[History]:
    """Return what has happened to the newest program that survives; None without one.

    Example:
        >>> last_history() is None  # nothing was compiled
        True
    """
    return _NEWEST[-1].history() if _NEWEST else None


def is_asked_for(survive: Optional[bool]) -> bool:
    """Return what the program says; else what HWAWARE_SURVIVE says.

    Raises:
        UnusableInputError: HWAWARE_SURVIVE is neither 0 nor 1.
    """
    return runtime.is_on(VARIABLE) if survive is None else survive


# The digests are of Alpa 0.2.3's own sources, printed by `hwaware.patching.mechanism.source_digest`.
PATCHES = PatchSet([Patch(Target("alpa.device_mesh", "DistributedArray._value", ("f3bc0c0fa180d4cb",)), value)])
