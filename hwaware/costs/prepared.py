"""A workload on a cluster as numbers: what every stage and boundary costs, worked out once and read many times.

`evaluate` and the solvers read the same prefix sums and send times, so they price a plan alike.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, TypeVar, Union

import msgspec
import numpy as np

from hwaware.cluster import ClusterProfile, Device, Link
from hwaware.costs.cards import Cards
from hwaware.costs.communication import exposed_time_s
from hwaware.costs.compute import is_split, layer_times_s, measured_time
from hwaware.costs.curves import FloatArray
from hwaware.costs.gradient_sync import (
    adding_time_s,
    position_rings,
    ring_all_reduces_s,
    ring_pairs,
    update_time_s,
)
from hwaware.costs.links import Links
from hwaware.costs.measured_groups import MeasuredGroups
from hwaware.costs.memory import CommonBytes, common_bytes, layer_memory_bytes, update_bytes
from hwaware.costs.own_times import with_own_kinds
from hwaware.errors import PlanError
from hwaware.plans import Schedule
from hwaware.workload import MeasuredTime, Workload

K = TypeVar("K")
T = TypeVar("T")
V = TypeVar("V")
# Results of one function that are kept, some ten MiB at most.
MOST_KEPT = 50_000


class SharedReplica(NamedTuple):
    """Hold a replica with its share of each microbatch filled in."""

    devices: Tuple[str, ...]
    share: float


class _Filled(Dict[K, V]):
    """Ask a function for missing values, and keep them unless they are None or empty. A look-up is no call."""

    def __init__(self, made: Callable[[K], V]) -> None:
        super().__init__()
        self._made = made

    def __missing__(self, key: K) -> V:
        found = self._made(key)
        if found:
            self[key] = found
        return found


class ReplicaSums(NamedTuple):
    """Running sums over the layers for one replica; entry l is the sum over layers 0 .. l - 1.

    Attributes:
        forward_s, backward_s: Of one microbatch, the replica's share of it, with tensor-parallel collectives.
        update_s: Of the slowest device.
        resident_bytes: One list for each device of the replica.
        activation_bytes: Per microbatch in flight, on each device.
        batch_bytes: Of the samples, per microbatch of the step, on each device.
        scratch_bytes: Not a running sum: each layer's, of which a stage needs that of the layer with most.
        deviation_s: Of one pass from the next, layer by layer; a stage's is that of the layer with most.
        update_bytes: Of the update beside what stays, on each device.
        common: What layers count too often in `resident_bytes` and `update_bytes` where a stage has several of them.
        pass_s: What each forward and each backward pass of a stage takes beside its layers; of the slowest device.
    """

    forward_s: List[float]
    backward_s: List[float]
    update_s: List[float]
    resident_bytes: List[List[float]]
    activation_bytes: List[float]
    batch_bytes: List[float]
    scratch_bytes: List[float]
    deviation_s: List[float]
    update_bytes: List[float]
    common: Sequence[CommonBytes] = ()
    pass_s: float = 0.0

    def as_arrays(self) -> ReplicaSums:
        """Return the sums with arrays in place of lists, to price many ranges of layers at once."""
        lists = [name for name in self._fields if name not in ("common", "pass_s")]
        made: Dict[str, Any] = {name: np.array(getattr(self, name)) for name in lists}
        return self._replace(**made)


class PreparedCosts:
    """The costs of a workload on a cluster under one schedule, worked out when first asked for.

    Args:
        workload: What has to run.
        profile: Where.
        schedule: Decides what stays in memory.
        links: Links that replace the profile's.
        measured: Measured groups that replace the profile's.
        next_passes_s: For some devices, what replaces their own `next_pass_s` of whole microbatches.

    Example:
        >>> from hwaware.workload import Layer
        >>> layer = Layer(name="0", forward_flops=1e9, backward_flops=2e9, parameter_bytes=0, output_bytes=0,
        ...               activation_bytes=0)
        >>> workload = Workload(name="two", microbatch_size=4, dtype="float32", layers=(layer, layer))
        >>> profile = ClusterProfile.uniform(hosts=1, flops_per_s=1e10)
        >>> PreparedCosts(workload, profile).sums(("h0:0",)).forward_s
        [0.0, 0.1, 0.2]
    """

    def __init__(
        self,
        workload: Workload,
        profile: ClusterProfile,
        schedule: Schedule = "1f1b",
        links: Optional[Links] = None,
        measured: Optional[MeasuredGroups] = None,
        next_passes_s: Optional[Dict[str, FloatArray]] = None,
    ) -> None:
        # Before devices get kinds of their own: those tell layer times apart, and not networks.
        self.measured_groups = MeasuredGroups(profile, workload.dtype) if measured is None else measured
        self.workload, self.profile = workload, profile = with_own_kinds(workload, profile)
        self.schedule = schedule
        self.devices = {device.id: device for device in profile.devices}
        self.memory_bytes = {device.id: float(device.memory_bytes) for device in profile.devices}
        self.cards = Cards(profile.shared_cards, self.devices)
        self.links = Links(profile) if links is None else links
        self.outputs_bytes: FloatArray = np.array([layer.output_bytes for layer in workload.layers], dtype=np.float64)
        self._measured = any(layer.measured for layer in workload.layers)
        self._sums: Dict[Tuple[Tuple[str, ...], float, int], ReplicaSums] = {}
        self._like_sums: Dict[Tuple[Tuple[object, ...], float, int], ReplicaSums] = {}
        self._numbers = itertools.count()  # not lengths: threads may share prepared costs
        self._like_rows: Dict[str, Tuple[object, ...]] = {}
        self._likes: Dict[Tuple[object, ...], List[Tuple[int, Device]]] = {}
        self._sends: Dict[Tuple[str, str, float], Optional[List[float]]] = {}
        self._both_ways: Dict[Tuple[str, str, float], Tuple[List[float], List[float]]] = {}
        self._send_vectors: Dict[Tuple[object, ...], List[float]] = {}
        self._given_passes_s = next_passes_s or {}
        self._next_passes_s: Dict[Tuple[str, float], FloatArray] = {}
        # For evaluate: the one replica of a stage that works on whole microbatches, none if a device is unknown; the
        # sums of such a replica, and `both_ways_s` of whole microbatches.
        self.whole_replicas: _Filled[Tuple[str, ...], Tuple[SharedReplica, ...]] = _Filled(
            lambda names: (SharedReplica(names, 1.0),) if all(name in self.devices for name in names) else ()
        )
        self.alone: _Filled[SharedReplica, ReplicaSums] = _Filled(lambda replica: self.sums(*replica))
        self.both_ways: _Filled[Tuple[str, str], Optional[Tuple[List[float], List[float]]]] = _Filled(
            lambda ends: self.both_ways_s(*ends)
        )
        self._cached: Dict[Any, Dict[Any, Any]] = {}
        self._all_reduces: Dict[Tuple[object, ...], FloatArray] = {}
        self._link_ids: Dict[int, int] = {}
        self._link_values: Dict[object, int] = {}

    @property
    def of_layers(self) -> PreparedCosts:
        """The costs of the model's own layers: these, unless the layers are joined in blocks."""
        return self

    def on(
        self,
        profile: ClusterProfile,
        links: Optional[Links] = None,
        measured: Optional[MeasuredGroups] = None,
        next_passes_s: Optional[Dict[str, FloatArray]] = None,
    ) -> PreparedCosts:
        """Return the costs of the same workload on another cluster; measured groups stay unless others are given."""
        groups = self.measured_groups if measured is None else measured
        return PreparedCosts(self.workload, profile, self.schedule, links, groups, next_passes_s)

    def cached(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return what a function of these costs makes of the arguments; the newest results are kept."""
        kept = self._cached.setdefault(function, {})
        found: Optional[T] = kept.get(arguments)
        if found is None:
            found = function(self, *arguments)
            if len(kept) >= MOST_KEPT:
                kept.clear()
            kept[arguments] = found
        return found

    def link(self, source: str, target: str) -> Link:
        """The link that prices messages from one device to another.

        Raises:
            PlanError: They have none.
        """
        link = self.links.between(source, target)
        if link is None:
            raise PlanError(
                f"devices {source!r} and {target!r} have to exchange data, but the cluster has no link between them.",
                "choose devices with a link as neighbours, or measure the link (hwaware profile).",
            )
        return link

    def sends_s(self, source: str, target: str, share: float = 1.0) -> Optional[List[float]]:
        """For each layer, what sending that share of its output to `target` takes of a step; None without a link.

        Below 0 where the target's next pass gains more by waiting than the message takes: see
        `hwaware.costs.communication.exposed_time_s`.
        """
        key = (source, target, share)
        found = self._sends.get(key)
        if found is None and key not in self._sends:
            link = self.links.between(source, target)
            found = self._sends[key] = None if link is None else self._send_vector(link, share, source, target)
        return found

    @functools.cached_property
    def without_head_starts(self) -> PreparedCosts:
        """The same costs where no device is ahead: messages take what they take on their way."""
        if not any(device.head_start_s for device in self.profile.devices):
            return self
        devices = tuple(msgspec.structs.replace(device, head_start_s=None) for device in self.profile.devices)
        profile = msgspec.structs.replace(self.profile, devices=devices)
        return self.on(profile, self.links, self.measured_groups)

    def both_ways_s(self, one: str, other: str, share: float = 1.0) -> Optional[Tuple[List[float], List[float]]]:
        """`sends_s` there and back; None without a link."""
        key = (one, other, share)
        found = self._both_ways.get(key)
        if found is None:
            there, back = self.sends_s(one, other, share), self.sends_s(other, one, share)
            if there is None or back is None:
                return None
            found = self._both_ways[key] = there, back
        return found

    def _send_vector(self, link: Link, share: float, source: str, target: str) -> List[float]:
        one, other = self.devices[source], self.devices[target]
        key: Tuple[object, ...] = (self.link_number(link), share)
        held_s: Union[float, FloatArray] = math.inf
        if other.head_start_s:
            held_s = self.next_pass_s(target, share)
            key = (*key, other.head_start_s, one.sum_bytes_per_s, other.sum_bytes_per_s, held_s.tobytes())
        if key not in self._send_vectors:
            sends = exposed_time_s(link, self.outputs_bytes * share, one, other, held_s)
            self._send_vectors[key] = sends.tolist()
        return self._send_vectors[key]

    def next_pass_s(self, device: str, share: float = 1.0) -> FloatArray:
        """For each layer, what the pass takes at least that its output, or that output's gradient, is for.

        On this device: the forward pass of the layer behind it, or its own backward pass. The last one's output is for
        no stage. A share of a microbatch takes its part of the whole's time, or less where it does by its own price.
        """
        if device in self._given_passes_s:
            return self._given_passes_s[device] * share
        found = self._next_passes_s.get((device, share))
        if found is None:
            found = self._pass_behind_s(self.sums((device,), share))
            if share != 1.0:
                found = np.minimum(found, self.next_pass_s(device) * share)
            self._next_passes_s[device, share] = found
        return found

    def _pass_behind_s(self, sums: ReplicaSums) -> FloatArray:
        found = np.append(np.diff(sums.forward_s)[1:], np.inf)
        return found if self.schedule == "inference" else np.minimum(found, np.diff(sums.backward_s))

    @functools.cached_property
    def most_gained_s(self) -> float:
        """The most that any device's pass is shorter because it waited."""
        gained = [
            min(device.head_start_s, float(self.next_pass_s(device.id)[:-1].max(initial=0.0)))
            for device in self.profile.devices
            if device.head_start_s
        ]
        return max(gained, default=0.0)

    def link_number(self, link: Link) -> int:
        """Return a number that links have in common if they are alike. The table keeps them, so ids are unique."""
        number = self._link_ids.get(id(link))
        if number is None:
            values = (link.latency_s, link.bandwidth_bytes_per_s, link.samples)
            number = self._link_ids[id(link)] = self._link_values.setdefault(values, next(self._numbers))
        return number

    def ring(self, members: Sequence[str]) -> List[Link]:
        """The links of the ring through the devices; none for one device. See `ring_pairs`."""
        return [self.link(*ends) for ends in ring_pairs(members)]

    def all_reduces_s(self, nbytes: FloatArray, members: Sequence[str]) -> FloatArray:
        """Return the times of all-reduces of n bytes over devices, for several sums at once.

        Measured collectives of the group or a like one price it, see `MeasuredGroups`; else `ring_all_reduces_s` does.

        Raises:
            PlanError: Two neighbours in the ring have no link.
        """
        ring_s = ring_all_reduces_s(nbytes, len(members), self.ring(members))
        found = self.measured_groups.find(members)
        return ring_s if found is None else self.measured_groups.all_reduces_s(found, nbytes, ring_s)

    def gradient_sums_s(self, nbytes: FloatArray, placed: Sequence[Sequence[str]]) -> FloatArray:
        """Return the times in which replicas sum gradients of n bytes each, for several sums at once.

        Each position in the replicas' groups has a ring, and all rings run at once. The slowest one counts, or a card
        that several messages pass at a time. `adding_s` adds what the devices compute.

        Args:
            nbytes: n.
            placed: The devices of each replica.
        """
        rings = position_rings(placed)
        seconds = self._all_rings_s(nbytes, rings)
        # One measured collective went through its cards already.
        if self.cards and (len(rings) > 1 or self.measured_groups.find(rings[0]) is None):
            seconds = np.maximum(seconds, 2 * (len(placed) - 1) * nbytes * self.rings_step_s_per_byte(rings))
        total: FloatArray = seconds + self.adding_s(nbytes, placed)
        return total

    def _all_rings_s(self, nbytes: FloatArray, rings: Sequence[Sequence[str]]) -> FloatArray:
        """Return the slowest ring's times; those of single sums are kept, because searches ask for them often."""
        unlike = {
            (self.measured_groups.find(ring), frozenset(map(self.link_number, self.ring(ring)))): ring for ring in rings
        }
        key = (nbytes.item(), len(rings[0]), *unlike) if nbytes.size == 1 else ()
        found = self._all_reduces.get(key)
        if found is None:
            found = np.max([self.all_reduces_s(nbytes, ring) for ring in unlike.values()], axis=0)
            if key:
                self._all_reduces[key] = found
        return found

    def rings_step_s_per_byte(self, rings: Sequence[Sequence[str]]) -> float:
        """What cards need for each byte of n while the members of all rings at once hand on their parts of n bytes."""
        if not self.cards:
            return 0.0
        return self.cards.seconds_per_byte(
            (member, ring[k - 1], 1.0 / len(ring)) for ring in rings for k, member in enumerate(ring) if len(ring) > 1
        )

    def adding_s(self, nbytes: FloatArray, placed: Sequence[Sequence[str]]) -> FloatArray:
        """What the replicas compute while they sum gradients of n bytes each over several hosts; see `adding_time_s`.

        Args:
            nbytes: n, for several sums at once.
            placed: The devices of each replica.
        """
        devices = [[self.devices[name] for name in replica] for replica in placed]
        if len({device.host for replica in devices for device in replica}) == 1:
            return np.zeros(len(nbytes))
        rates = [[device.sum_bytes_per_s for device in replica] for replica in devices]
        known = [[rate for rate in replica if rate is not None] for replica in rates]
        return adding_time_s(nbytes, [min(replica, default=None) for replica in known])

    def sums(self, devices: Tuple[str, ...], share: float = 1.0, replicas: int = 1) -> ReplicaSums:
        """The running sums of one replica: a tensor-parallel group that works on a share of each microbatch."""
        key = (devices, share, replicas)
        found = self._sums.get(key)
        if found is None:
            like = (self._likeness(devices), share, replicas)
            found = self._like_sums.get(like)
            if found is None:
                found = self._like_sums[like] = self._make_sums(devices, share, replicas)
            self._sums[key] = found
        return found

    def _likeness(self, devices: Tuple[str, ...]) -> Tuple[object, ...]:
        """Equal for groups whose sums are equal: like devices in the same order, links, and measured groups."""
        measured = self.measured_groups.find(devices)
        return (*map(self._like_row, devices), measured, *(self.link_number(link) for link in self.ring(devices)))

    def _like_row(self, name: str) -> Tuple[object, ...]:
        """Equal for devices that cannot be told apart in a layer's time."""
        if name not in self._like_rows:
            device = self.devices[name]
            figures = (device.kind, device.memory_bandwidth_bytes_per_s, device.pass_s)
            like = self._likes.setdefault(figures, [])
            known = next((number for number, one in like if one.throughput == device.throughput), None)
            if known is None:
                known = next(self._numbers)
                like.append((known, device))
            self._like_rows[name] = (*figures, known)
        return self._like_rows[name]

    def _make_sums(self, devices: Tuple[str, ...], share: float, replicas: int) -> ReplicaSums:
        layers, group = self.workload.layers, len(devices)
        records = [self.devices[device] for device in devices]
        unlike = _unlike(records)
        times = [layer_times_s(layers, d, self.workload.dtype, share, group) for d in unlike]
        collectives = self._collectives_s(devices, share, replicas)
        updates = []
        for device in unlike:
            # Replicas update all weights, each for itself: as long as one alone does.
            known = self._known(device.kind, replicas, group)
            rate = device.memory_bandwidth_bytes_per_s
            updates.append(
                [
                    measured.update_s
                    if measured is not None and measured.update_s is not None
                    else update_time_s(layer, rate, group if is_split(layer) else 1)
                    for layer, measured in zip(layers, known)
                ]
            )
        resident, scratch = self._memory(records, share, replicas, group)
        # The devices of a group wait for each other in every layer, so the slowest counts layer by layer.
        return ReplicaSums(
            forward_s=_running(np.max([forward for forward, _ in times], axis=0) + collectives / 2),
            backward_s=_running(np.max([backward for _, backward in times], axis=0) + collectives / 2),
            update_s=_running(np.max(updates, axis=0)),
            resident_bytes=resident,
            activation_bytes=_running(np.array([layer.activation_bytes * share for layer in layers])),
            batch_bytes=_running(np.array([(layer.batch_bytes or 0.0) * share for layer in layers])),
            scratch_bytes=scratch,
            deviation_s=self._deviations_s(unlike, replicas, group),
            update_bytes=_running(np.array([update_bytes(layer, self.schedule, group) for layer in layers])),
            common=tuple(common_bytes(self.workload, self.schedule, group)),
            pass_s=max(device.pass_s or 0.0 for device in records),
        )

    def _deviations_s(self, records: Sequence[Device], replicas: int, group: int) -> List[float]:
        """Each layer's, of the device with most; 0 where nothing is known."""
        known = [self._known(device.kind, replicas, group) for device in records]
        return [
            max((times.deviation_s or 0.0 for times in of_layer if times is not None), default=0.0)
            for of_layer in zip(*known)
        ]

    def _known(self, kind: str, replicas: int, group: int) -> List[Optional[MeasuredTime]]:
        """Return the measured times of each layer on such replicas, or else on one such replica alone."""
        layers = self.workload.layers
        if not self._measured:
            return [None] * len(layers)
        return [measured_time(layer, kind, replicas, group) or measured_time(layer, kind, 1, group) for layer in layers]

    def _memory(
        self, records: Sequence[Device], share: float, replicas: int, group: int
    ) -> Tuple[List[List[float]], List[float]]:
        """The running sums of what stays on each device, and each layer's scratch memory."""
        parts = {
            kind: [
                layer_memory_bytes(layer, kind, self.schedule, share, replicas, group) for layer in self.workload.layers
            ]
            for kind in {device.kind for device in records}
        }
        stays = {kind: _running(np.array([stay for stay, _ in found])) for kind, found in parts.items()}
        scratch = np.max([[more for _, more in found] for found in parts.values()], axis=0)
        return [stays[device.kind] for device in records], scratch.tolist()

    def _collectives_s(self, devices: Tuple[str, ...], share: float, replicas: int) -> FloatArray:
        """Tensor-parallel all-reduces of each layer per microbatch, forward and backward; half falls to each."""
        seconds = np.zeros(len(self.workload.layers))
        if len(devices) == 1:
            return seconds
        kinds = {self.devices[device].kind for device in devices}
        calls = np.array([max(1.0, layer.tensor_parallel_collectives or 1.0) for layer in self.workload.layers])
        sizes = np.array([layer.tensor_parallel_bytes or 0.0 for layer in self.workload.layers]) * share / calls
        seconds = calls * self.all_reduces_s(sizes, devices)
        for index, layer in enumerate(self.workload.layers):
            # Measured times hold their own collectives. A group of unlike kinds takes the analytic ones all the same.
            if len(kinds) == 1 and measured_time(layer, next(iter(kinds)), replicas, len(devices)) is not None:
                seconds[index] = 0.0
        return seconds


def _unlike(records: Sequence[Device]) -> List[Device]:
    """One device of each that cannot be told apart in a layer's time."""
    kept: List[Device] = []
    for device in records:
        if not any(
            device.kind == other.kind
            and device.memory_bandwidth_bytes_per_s == other.memory_bandwidth_bytes_per_s
            and device.throughput == other.throughput
            for other in kept
        ):
            kept.append(device)
    return kept


def _running(values: FloatArray) -> List[float]:
    """Running sums, starting with 0."""
    return [0.0, *np.cumsum(values).tolist()]
