"""Copy the state of a program into vaults, and commit points to which it can return."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter, deque
from typing import Any, Deque, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from hwaware import ray_jobs
from hwaware.cluster import ClusterProfile, LinkTable
from hwaware.device_places import device_places
from hwaware.formatting import BYTES, text
from hwaware.history import HistoryEvent
from hwaware.patching import meshes
from hwaware.runtime.checkpoints import box_of
from hwaware.survival import messages
from hwaware.survival.arrays import one, shape_of
from hwaware.survival.calls import Calls
from hwaware.survival.copier import MOST_MEMORIES, Copied, Item, Order
from hwaware.survival.pieces import Name
from hwaware.survival.points import FAILURE_S, MOST_CALLS, Point, buddies, idle_buddy, interval_of
from hwaware.survival.sending import forwarder, unreadable
from hwaware.survival.vaults import START_LIMIT_S, Block, Vaults

LOG = logging.getLogger("hwaware")
# Points whose copies may be on their way at once: those of one step travel during the next, and are known after it.
_MOST_FLIGHTS = 2
# Copies travel during so much of a step: the slower they are, the less they delay the training's messages. The rest of
# the step is for copying before, and for what comes late.
_SENDING = 0.6
# Points whose costs tell how often to copy.
_POINTS = 9
# Copies that take longer than this, and than MOST_CALLS calls, were stopped on their way. A link between two hosts may
# be broken though the driver reaches both.
_FLIGHT_LIMIT_S = 600.0
# An idle host that has lost so many vaults takes no more copies, though Ray answers there.
_MOST_VAULTS = 3
# So long ago that copies are due at the next call, however rare they are.
_NEVER = -math.inf


class _Flight(NamedTuple):
    """Copies that are on their way: what each vault waits for, and what workers were told to send to it."""

    point: Point
    copies: List[Any]
    waiting: Dict[str, Set[Tuple[int, str]]]
    sent: Dict[str, Set[Block]]
    begin_s: float
    serial: int = 0
    called_s: float = 0.0  # when the point's call was made


class Copies:
    """The copies of one program's state.

    Attributes:
        committed: The newest point to which the program can return; None before the first.
        values: Arrays of that point that the driver has read from a checkpoint.
        flights: The points whose copies are on their way, the oldest first.
        every: Copy after so many calls; None to let the measured times decide.
        points, copied_bytes, copy_s: As in `History`.
        events: The losses so far.
        lost: Addresses of hosts that were lost with their vault, or lost several vaults.
    """

    every: Optional[int] = None

    def __init__(self, calls: Calls, vaults: Vaults) -> None:
        self.committed: Optional[Point] = None
        self.values: Dict[Name, Any] = {}
        self.flights: List[_Flight] = []
        self.points, self.copied_bytes, self.copy_s = 0, 0, 0.0
        self.events: List[HistoryEvent] = []
        self._calls, self._vaults = calls, vaults
        self._interval = 1
        self._known_rates: Tuple[Any, Dict[Tuple[str, str], float]] = (None, {})  # of the newest profile
        self._costs: Deque[Tuple[float, float]] = deque(maxlen=_POINTS)  # of the newest points
        self._newest = _NEVER  # number of the newest point that was copied
        self._hands_over = True  # until a vault cannot read a worker's memory
        self.lost: Set[str] = set()
        self._vaults_lost: Counter[str] = Counter()
        self._is_alone = False  # the state is on one host only
        self._serials = itertools.count()
        self._commits: List[int] = []  # serials of the newest flights that were committed
        # When the newest call was made, and that of the newest point.
        self._begin_s = self._called_s = self._point_s = time.monotonic()

    @property
    def calls_a_point(self) -> int:
        """Return the number of calls from one point to the next, at present."""
        return self._interval if self.every is None else self.every

    def hosts(self) -> Set[str]:
        """Return the addresses of hosts that need vaults: those with stages, and idle ones that take their copies."""
        group, vaults, rates = self._calls.group, self._vaults, self._rates()
        found = {info["NodeManagerAddress"] for mesh in group.meshes for info in mesh.host_info}
        idle = {address for address, _ in meshes.mesh_places(group.parent)} - found - vaults.avoided - self.lost
        idle -= vaults.late()
        return found.union(*(idle_buddy(host, found - {host}, idle, vaults.up, rates) for host in found))

    def _warn_if_alone(self, hosts: Set[str]) -> None:
        """Warn whenever one host is left for the copies."""
        if len(hosts) == 1 and not self._is_alone:
            LOG.warning("Only host %s has copies of the state: if this host is lost, the training ends.", *hosts)
        self._is_alone = len(hosts) == 1

    def copy_if_due(self) -> None:
        """Copy after a call, if the last copies are old enough, or a vault has come up since."""
        self._called_s, before = time.monotonic(), set(self._vaults.up)
        self._vaults.use_started(0)
        if set(self._vaults.up) - before:  # some arrays may be on one host only
            self._newest = _NEVER
        if len(self.flights) < _MOST_FLIGHTS and self._calls.number - self._newest >= self.calls_a_point:
            self.copy()

    def copy_again(self, at_once: bool = False) -> None:
        """Give up the copies on their way, and copy what the program holds; `at_once` if the training waits for it."""
        self.flights, self._newest = [], _NEVER
        self.copy(at_once)

    def copy(self, at_once: bool = False) -> None:
        """Let the workers copy what the program holds now, as fast as possible if `at_once`."""
        vaults, group = self._vaults, self._calls.group
        needed = self.hosts()
        self._warn_if_alone(needed)
        vaults.start(needed)
        vaults.use_started(0 if vaults.up else START_LIMIT_S)
        live = self._calls.live()
        hosts = [host for host in vaults.up if host not in vaults.avoided]
        if not hosts:
            return  # the next call tries again
        targets = buddies(hosts, self._rates())
        orders: Dict[Tuple[int, int], List[Item]] = {}
        sent: Dict[str, Set[Block]] = {host: set() for host in hosts}
        for name, array in ((name, one(array)) for name, array in live.items() if name not in self.values):
            for (host, device), place in zip(array.one_replica_host_local_ids, array.one_replica_buffer_ids):
                mesh, box = group.meshes.index(array.device_mesh), box_of(array.indices[place], array.aval.shape)
                own = array.device_mesh.host_info[host]["NodeManagerAddress"]
                first = own if own in targets else hosts[0]  # its own vault may not be up yet
                places = [at for at in (first, targets[first]) if at is not None]
                wanted = [at for at in places if (name, box) not in vaults.held[at]]
                if wanted:
                    chosen = tuple(hosts.index(at) for at in wanted)
                    orders.setdefault((mesh, host), []).append(
                        Item(name, int(array.remote_ref.uuid), device, box, chosen)
                    )
                    for at in wanted:
                        sent[at].add((name, box))
        point = Point(self._calls.number, {name: shape_of(array) for name, array in live.items()})
        self._newest = point.number
        self.flights.append(self._ordered(point, orders, sent, at_once))

    def _ordered(
        self, point: Point, orders: Mapping[Tuple[int, int], Sequence[Item]], sent: Dict[str, Set[Block]],
        at_once: bool = False,
    ) -> _Flight:  # fmt: skip
        """Order copies from workers, by (mesh, worker)."""
        vaults, hosts = self._vaults, list(sent)
        addresses = tuple(vaults.up[host].mailbox for host in hosts)
        copies: List[Any] = []
        waiting: Dict[str, Set[Tuple[int, str]]] = {}
        serial = next(self._serials)  # a point may be copied twice
        send_s = 0.0 if at_once else _SENDING * min((step_s for _, step_s in self._costs), default=0.0)
        group = self._calls.group
        owns = {(mesh, host): group.meshes[mesh].host_info[host]["NodeManagerAddress"] for mesh, host in orders}
        shares = Counter(owns.values())  # a vault sends on what it got from one worker after the other
        for (mesh, host), items in orders.items():
            sender, own = f"{mesh}.{host}", owns[mesh, host]
            order = Order(
                vaults.epoch, tuple(items), addresses, vaults.secret, vaults.digests, sender,
                beside=hosts.index(own) if self._hands_over and own in hosts else None,
                serial=serial, spares=self._spares(own), send_s=send_s / shares[own],
            )  # fmt: skip
            copies.append(group.meshes[mesh].workers[host].copy_out.remote(order.encoded))
            for place, number in {pair for item in items for pair in enumerate(item.vaults)}:
                name = forwarder(sender) if place else sender
                waiting.setdefault(hosts[number], set()).add((serial, name))
        return _Flight(point, copies, waiting, sent, time.monotonic(), serial, self._called_s)

    def _spares(self, host: str) -> Tuple[int, ...]:
        """Return the serials of orders whose memory no vault of this host reads any more, the oldest first."""
        kept = self._vaults.kept.get(host, -1)
        return tuple(serial for serial in self._commits if serial < kept)

    def collect(self) -> None:
        """Commit the points whose copies have all arrived, without a wait."""
        marks, lost = self._vaults.marks()
        for host in lost:
            self._lose_vault(host)
        if any(self._is_unread(flight, marks) for flight in self.flights):
            LOG.info("A vault cannot read the memory of a worker of its host: workers send their copies instead.")
            self._hands_over, self.flights, self._newest = False, [], _NEVER
        for flight in self.flights:
            for host, done in marks.items():
                if flight.waiting.get(host, set()) <= done:
                    flight.waiting.pop(host, None)
        for flight in list(self.flights):
            # A connection that broke may have lost an older flight.
            if not flight.waiting and not self._landed(flight):
                break
        self._give_up_late()

    def _is_unread(self, flight: _Flight, marks: Mapping[str, Set[Tuple[int, str]]]) -> bool:
        """Return True if a vault could not read the memory of a worker for this flight."""
        waited = ((host, serial, sender) for host, each in flight.waiting.items() for serial, sender in each)
        return any((serial, unreadable(sender)) in marks.get(host, ()) for host, serial, sender in waited)

    def _give_up_late(self) -> None:
        """Copy again where copies are late in seconds and in calls: a program may pause between two calls."""
        for flight in self.flights[:1]:
            calls, age_s = self._calls.number - flight.point.number, time.monotonic() - flight.begin_s
            if calls >= MOST_CALLS and age_s > _FLIGHT_LIMIT_S:
                LOG.warning("The copies of call %d did not arrive; they are made again.", flight.point.number)
                self.flights, self._newest = [], _NEVER

    def _landed(self, flight: _Flight) -> bool:
        """Commit a point that all vaults have, once all workers have answered; return True if it is committed."""
        import ray

        if flight.copies and ray.wait(flight.copies, num_returns=len(flight.copies), timeout=0)[1]:
            return False
        try:
            copied: List[Optional[Copied]] = ray.get(flight.copies)
        except ray.exceptions.RayError:  # the worker is lost, as the watch finds out; it keeps its own failures
            copied = [None]
        whole = [each for each in copied if each is not None]
        if len(whole) < len(copied):
            self.flights = []
            return False
        self._commit(flight, whole)
        return True

    def _commit(self, flight: _Flight, copied: Sequence[Copied]) -> None:
        """Let every vault drop what the newest point does not need."""
        now_s, calls = time.monotonic(), flight.point.number - (self.committed.number if self.committed else 0)
        if copied and calls > 0:
            step_s = (flight.called_s - self._point_s) / calls
            losses = sum(event.kind == "recovered" for event in self.events)
            failure_s = min(FAILURE_S, (now_s - self._begin_s) / losses) if losses else FAILURE_S
            self._costs.append((max(each.copy_s + each.sent_s for each in copied), step_s))
            self._interval = interval_of(self._costs, failure_s)
        self._point_s = flight.called_s
        self.points += 1
        if self.points == 1:
            self._say_first(copied)
        self.copied_bytes += sum(each.bytes for each in copied)
        self.copy_s += max((each.copy_s for each in copied), default=0.0)
        names = set(flight.point.shapes)
        self.values = {name: value for name, value in self.values.items() if name in names}
        self._vaults.keep(flight.point.number, flight.serial, names, flight.sent)
        self.committed = flight.point
        self._commits = [*self._commits[-MOST_MEMORIES:], flight.serial]
        del self.flights[: self.flights.index(flight) + 1]
        self._calls.forget(flight.point.number)

    def _say_first(self, copied: Sequence[Copied]) -> None:
        """Log one line about the memory of copies: that of workers, and points in vaults of other hosts."""
        nbytes, hosts = sum(each.bytes for each in copied), sorted(self._vaults.up)
        most = (MOST_MEMORIES + (1 + _MOST_FLIGHTS) * (len(hosts) > 1)) * nbytes
        LOG.info(
            "The training survives: a point has %s of state. On %s, its copies take up to %s of memory together.",
            text(nbytes, BYTES), ", ".join(hosts), text(most, BYTES),
        )  # fmt: skip

    def takes_back(self, host: str) -> None:
        """Let a host take copies that was lost."""
        self.lost.discard(host)
        del self._vaults_lost[host]

    def given_up(self) -> List[Point]:
        """Give up the points on their way; return them, the newest first: vaults may have got their copies."""
        flights, self.flights = self.flights, []
        return [flight.point for flight in reversed(flights)]

    def _lose_vault(self, host: str) -> None:
        """Go on without a vault; the next copies start another."""
        what = f"the vault on host {host} has ended, or does not answer; another one takes its place"
        LOG.warning("%s", messages.vault_lost(what))
        self.events.append(HistoryEvent(kind="vault", call=self._calls.number, what=what))
        self._vaults.drop([host])
        self._vaults_lost[host] += 1
        if self._vaults_lost[host] >= _MOST_VAULTS or not ray_jobs.is_there(host):
            self.lost.add(host)  # such as one with too little memory
        self.flights, self._newest = [], _NEVER

    def _rates(self) -> Dict[Tuple[str, str], float]:
        """Return the rates between hosts' addresses, as the profile has them."""
        recipe = self._calls.recipe()
        profile = None if recipe is None else recipe.profile
        if profile is not self._known_rates[0]:
            self._known_rates = (profile, {} if profile is None else _host_rates(profile))
        return self._known_rates[1]


def _host_rates(profile: ClusterProfile) -> Dict[Tuple[str, str], float]:
    """Return bytes per second between the addresses of hosts that have a link."""
    links, places = LinkTable(profile), device_places(profile)
    first = {address: device for device, (address, _) in reversed(list(places.items()))}
    found = {(a, b): links.between(first[a], first[b]) for a in first for b in first if a != b}
    return {pair: link.bandwidth_bytes_per_s for pair, link in found.items() if link is not None}
