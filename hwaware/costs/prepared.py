"""Work out the costs of a workload on a cluster once, for `evaluate` and all solvers."""

from __future__ import annotations

import functools
import itertools
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, TypeVar

import numpy as np
from msgspec.structs import replace

from hwaware.cluster import ClusterProfile, Device, Link, measured_kind
from hwaware.costs.cards import Cards
from hwaware.costs.compute import is_measured, is_split, joint_deviation_s, layer_times_s, measured_time
from hwaware.costs.curves import FloatArray, IntArray
from hwaware.costs.gradient_sync import adding_time_s, ring_all_reduces_s, ring_pairs, update_time_s
from hwaware.costs.links import Links, exposed_time_s
from hwaware.costs.measured_groups import MeasuredGroups
from hwaware.costs.memory import CommonBytes, common_bytes, layer_memory_bytes
from hwaware.costs.own_times import with_microbatch_size, with_own_kinds
from hwaware.errors import PlanError
from hwaware.plans import Schedule
from hwaware.workload import Layer, Workload

T = TypeVar("T")
# Methods of `PreparedCosts` whose newest results are kept, and how many of each: some ten MiB at most.
KEPT, MOST_KEPT = ("cached", "sends_s", "both_ways_s", "sums", "_row"), 50_000


class SharedReplica(NamedTuple):
    """Hold a replica with its share of each microbatch filled in."""

    devices: Tuple[str, ...]
    share: float


def device_row(device: Device, dtype: str) -> Tuple[object, ...]:
    """Return all that a device's own costs depend on, its memory last. Links and shared cards are no part."""
    curve = tuple((point.flops, point.seconds) for point in device.throughput.get(dtype, ()))
    rates = device.memory_bandwidth_bytes_per_s, device.pass_s, device.sum_bytes_per_s, device.head_start_s
    return (device.kind, curve, *rates, device.memory_bytes)


class ReplicaSums(NamedTuple):
    """Hold running sums over the layers for one replica; entry l is the sum over layers 0 .. l - 1."""

    forward_s: List[float]  # of the replica's share of one microbatch, with tensor-parallel collectives
    backward_s: List[float]
    update_s: List[float]  # on the slowest device
    resident_bytes: List[List[float]]  # one list for each device
    activation_bytes: List[float]  # of each microbatch in flight, on each device
    batch_bytes: List[float]  # the samples of each microbatch of the step, on each device
    scratch_bytes: List[float]  # no sum, but each layer's; a stage needs that of the layer with most
    deviation_s: float  # no sum either: how much passes vary
    update_bytes: List[float]  # beside what stays, on each device
    common: Sequence[CommonBytes]  # bytes that `resident_bytes` and `update_bytes` count too often
    pass_s: float  # overhead of each forward and each backward pass of a stage, on the slowest device


class PreparedCosts:
    """Price a workload on a cluster under one schedule; prices are worked out when first asked for.

    `links` and `measured` replace the profile's links and measured groups. `kinds` replaces the profile's kinds of
    devices where these tell hardware apart and not layer times. If the workload joins layers in blocks, `of_layers`
    holds the costs of these layers, else these costs themselves.

    Example:
        >>> workload = Workload.uniform(layers=2)
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
        kinds: Optional[Mapping[str, str]] = None,
    ) -> None:
        self.kinds = {device.id: measured_kind(device.kind) for device in profile.devices} if kinds is None else kinds
        # Before devices get kinds of their own: those tell layer times apart, and not networks.
        self.measured_groups = MeasuredGroups(profile, workload.dtype) if measured is None else measured
        self.workload, self.profile = workload, profile = with_own_kinds(workload, profile)
        self.schedule, self.of_layers = schedule, self
        self.devices = {device.id: device for device in profile.devices}
        # The same devices, with their hardware's kinds: what Alpa runs and a rule allows depends on these.
        self.hardware = {name: replace(device, kind=self.kinds[name]) for name, device in self.devices.items()}
        self.own_kinds = any(device.kind != self.kinds[name] for name, device in self.devices.items())
        self.memory_bytes = {device.id: float(device.memory_bytes) for device in profile.devices}
        self.cards = Cards(profile.shared_cards, self.devices)
        self.links = Links(profile) if links is None else links
        self.outputs_bytes: FloatArray = np.array([layer.output_bytes for layer in workload.layers], dtype=np.float64)
        # Of stages that work on whole microbatches, and the sums of such replicas: a look-up is faster than a call.
        self.whole: Dict[Tuple[str, ...], Tuple[SharedReplica, ...]] = {}
        self.alone: Dict[SharedReplica, ReplicaSums] = {}
        self._numbers = itertools.count()  # not lengths: threads may share prepared costs
        self._like_sums: Dict[Tuple[object, ...], ReplicaSums] = {}
        self._like_sends: Dict[Tuple[object, ...], List[float]] = {}
        self._link_ids: Dict[int, int] = {}
        self._link_values: Dict[object, int] = {}
        for name in KEPT:  # repeated calls run no Python
            setattr(self, name, functools.lru_cache(MOST_KEPT)(getattr(self, name)))

    def on(
        self,
        profile: ClusterProfile,
        links: Optional[Links] = None,
        measured: Optional[MeasuredGroups] = None,
    ) -> PreparedCosts:
        """Return the costs of the same workload on another cluster; measured groups stay unless others are given."""
        groups = self.measured_groups if measured is None else measured
        return PreparedCosts(self.workload, profile, self.schedule, links, groups, self.kinds)

    def of_size(self, samples: int) -> PreparedCosts:
        """Return the costs on the same cluster with microbatches of that many samples.

        Devices keep the measured times that the workload gives them by id.
        """
        workload = with_microbatch_size(self.workload, self.profile, samples)
        if workload is self.workload:
            return self
        return PreparedCosts(workload, self.profile, self.schedule, self.links, self.measured_groups, kinds=self.kinds)

    def cached(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return what a function of these costs makes of the arguments."""
        return function(self, *arguments)

    def link(self, source: str, target: str) -> Link:
        """Return the link that prices messages from one device to another.

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
        """Return `exposed_time_s` of that share of each layer's output, sent to `target`; None without a link."""
        link = self.links.between(source, target)
        if link is None:
            return None
        one, other = self.devices[source], self.devices[target]
        key: Tuple[object, ...] = (self.link_number(link), share)
        if other.head_start_s:
            key = (*key, other.head_start_s, one.sum_bytes_per_s, other.sum_bytes_per_s)
        if key not in self._like_sends:
            self._like_sends[key] = exposed_time_s(link, self.outputs_bytes * share, one, other).tolist()
        return self._like_sends[key]

    @functools.cached_property
    def without_head_starts(self) -> PreparedCosts:
        """Return the same costs where no device is ahead: messages take what they take on their way."""
        if not any(device.head_start_s for device in self.profile.devices):
            return self
        devices = tuple(replace(device, head_start_s=None) for device in self.profile.devices)
        return self.on(replace(self.profile, devices=devices), self.links)

    def both_ways_s(self, one: str, other: str, share: float = 1.0) -> Optional[Tuple[List[float], List[float]]]:
        """Return `sends_s` there and back; None without a link."""
        there, back = self.sends_s(one, other, share), self.sends_s(other, one, share)
        return None if there is None or back is None else (there, back)

    @functools.cached_property
    def most_gained_s(self) -> float:
        """Return the most that any device's pass is shorter because it waited."""
        return max((device.head_start_s or 0.0 for device in self.profile.devices), default=0.0)

    def link_number(self, link: Link) -> int:
        """Return a number that equal links have in common. The table keeps links, so ids are unique."""
        number = self._link_ids.get(id(link))
        if number is None:
            values = (link.latency_s, link.bandwidth_bytes_per_s, link.samples)
            number = self._link_ids[id(link)] = self._link_values.setdefault(values, next(self._numbers))
        return number

    def link_numbers(self, names: Sequence[str]) -> IntArray:
        """Return `link_number` of the links between all pairs of devices, [n, n]; -1 without one."""
        places, links = self.links.numbered(names)
        return np.array([*map(self.link_number, links), -1], dtype=np.int64)[places]

    def summed_bytes(self, group: int) -> FloatArray:
        """Return for each layer the bytes of gradients that replicas of so many devices sum."""
        return np.array([x.gradient_size_bytes / (group if is_split(x) else 1) for x in self.workload.layers])

    def whole_s(self, device: str) -> float:
        """Return the time of one microbatch through the whole model on one device, forward and backward."""
        sums = self.sums((device,))
        return sums.forward_s[-1] + sums.backward_s[-1]

    def ring(self, members: Sequence[str]) -> List[Link]:
        """Return the links of `ring_pairs` of the devices; none for one device."""
        return [self.link(*ends) for ends in ring_pairs(members)]

    def all_reduces_s(self, nbytes: FloatArray, members: Sequence[str]) -> FloatArray:
        """Return the times of all-reduces of n bytes over devices, for several n at once.

        `MeasuredGroups` price it if they find the group, or else `ring_all_reduces_s`.
        """
        ring_s = ring_all_reduces_s(nbytes, len(members), self.ring(members))
        found = self.measured_groups.find(members)
        return ring_s if found is None else self.measured_groups.all_reduces_s(found, nbytes, ring_s)

    def gradient_sums_s(self, nbytes: FloatArray, placed: Sequence[Sequence[str]]) -> FloatArray:
        """Return the times in which replicas sum gradients of n bytes each, for several n at once.

        Each position in the replicas' groups, `placed`, has a ring, and all rings run at once. The slowest ring counts,
        or a card that several messages pass. Over several hosts, `adding_time_s` adds the devices' own work.
        """
        rings = [[devices[k % len(devices)] for devices in placed] for k in range(max(map(len, placed)))]
        unlike = {
            (self.measured_groups.find(ring), frozenset(map(self.link_number, self.ring(ring)))): ring for ring in rings
        }
        seconds: FloatArray = np.maximum.reduce([self.all_reduces_s(nbytes, ring) for ring in unlike.values()])
        # One measured collective went through its cards already.
        if self.cards and (len(rings) > 1 or self.measured_groups.find(rings[0]) is None):
            parts = ((source, target, 1.0 / len(ring)) for ring in rings for source, target in ring_pairs(ring))
            seconds = np.maximum(seconds, 2 * (len(placed) - 1) * nbytes * self.cards.seconds_per_byte(parts))
        devices = [[self.devices[name] for name in replica] for replica in placed]
        if len({device.host for replica in devices for device in replica}) == 1:
            return seconds
        rates = [[one.sum_bytes_per_s for one in replica if one.sum_bytes_per_s is not None] for replica in devices]
        return seconds + adding_time_s(nbytes, [min(replica, default=None) for replica in rates])

    def sums(self, devices: Tuple[str, ...], share: float = 1.0, replicas: int = 1) -> ReplicaSums:
        """Return the running sums of one of several replicas: a tensor-parallel group with a share of each microbatch.

        Groups of like devices in the same order, with like links and measured groups, have the same sums.
        """
        links = [self.link_number(link) for link in self.ring(devices)]
        like = (*map(self._row, devices), self.measured_groups.find(devices), *links, share, replicas)
        if like not in self._like_sums:
            self._like_sums[like] = self._make_sums(devices, share, replicas)
        return self._like_sums[like]

    def _row(self, name: str) -> Tuple[object, ...]:
        return device_row(self.devices[name], self.workload.dtype)[:-1]

    def _make_sums(self, devices: Tuple[str, ...], share: float, replicas: int) -> ReplicaSums:
        layers, group = self.workload.layers, len(devices)
        records = [self.devices[device] for device in devices]
        # One device of each that cannot be told apart in a layer's time.
        unlike = {self._row(device.id): device for device in records}.values()
        kinds = dict.fromkeys(device.kind for device in records)
        times = [layer_times_s(layers, d, self.workload.dtype, share, group) for d in unlike]
        collectives = self._collectives_s(devices, share)
        updates = [[self._update_s(layer, device, replicas, group) for layer in layers] for device in unlike]
        memory = {
            kind: np.array([layer_memory_bytes(one, kind, self.schedule, share, replicas, group) for one in layers])
            for kind in kinds
        }
        stays = {kind: _running(found[:, 0]) for kind, found in memory.items()}
        # The devices of a group wait for each other in every layer, so the slowest counts layer by layer.
        return ReplicaSums(
            forward_s=_running(np.max([forward for forward, _ in times], axis=0) + collectives / 2),
            backward_s=_running(np.max([backward for _, backward in times], axis=0) + collectives / 2),
            update_s=_running(np.max(updates, axis=0)),
            resident_bytes=[stays[device.kind] for device in records],
            activation_bytes=_running(np.array([layer.activation_bytes * share for layer in layers])),
            batch_bytes=_running(np.array([(layer.batch_bytes or 0.0) * share for layer in layers])),
            scratch_bytes=np.max([found[:, 1] for found in memory.values()], axis=0).tolist(),
            # Passes of a device vary nearly alike, whatever they compute. A single layer's deviation is uncertain.
            deviation_s=max(self._deviation_s(kind, replicas, group) for kind in kinds),
            update_bytes=_running(next(iter(memory.values()))[:, 2]),  # alike for all kinds
            common=tuple(common_bytes(self.workload, self.schedule, group)),
            pass_s=max(device.pass_s or 0.0 for device in records),
        )

    def _deviation_s(self, kind: str, replicas: int, group: int) -> float:
        """Return how much passes of such replicas vary, or else those of one such replica alone."""
        layers = self.workload.layers
        known = [measured_time(one, kind, replicas, group) or measured_time(one, kind, 1, group) for one in layers]
        return joint_deviation_s(one.deviation_s for one in known if one is not None) or 0.0

    def _update_s(self, layer: Layer, device: Device, replicas: int, group: int) -> float:
        """Return the seconds of a layer's update: measured for such replicas, or for one, or for a single device."""
        parts = group if is_split(layer) else 1
        # Replicas update all weights, each for itself: as long as one alone does. Groups share them.
        for of, scale in (((replicas, group), 1), ((1, group), 1), ((1, 1), parts)) if layer.measured else ():
            measured = measured_time(layer, device.kind, *of)
            if measured is not None and measured.update_s is not None:
                return measured.update_s / scale
        return update_time_s(layer, device.memory_bandwidth_bytes_per_s, parts)

    def _collectives_s(self, devices: Tuple[str, ...], share: float) -> FloatArray:
        """Return the seconds of each layer's tensor-parallel all-reduces for one microbatch, both directions."""
        layers, kinds = self.workload.layers, {self.devices[device].kind for device in devices}
        like = len({self.kinds[device] for device in devices}) == 1
        if len(devices) == 1:
            return np.zeros(len(layers))
        calls = np.array([max(1.0, layer.tensor_parallel_collectives or 1.0) for layer in layers])
        sizes = np.array([layer.tensor_parallel_bytes or 0.0 for layer in layers]) * share / calls
        seconds = calls * self.all_reduces_s(sizes, devices)
        # Measured times hold their own collectives. A group of unlike hardware takes the analytic ones all the same.
        held = [like and all(is_measured(one, kind, share, len(devices)) for kind in kinds) for one in layers]
        return np.where(held, 0.0, seconds)


def _running(values: FloatArray) -> List[float]:
    """Return running sums that start with 0."""
    return [0.0, *np.cumsum(values).tolist()]
