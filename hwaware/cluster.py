"""Describe a measured cluster, its hosts, devices and directed links, as a ClusterProfile.

Units are SI: seconds, bytes, FLOPs and their quotients.
"""

from __future__ import annotations

import itertools
import re
from typing import Any, ClassVar, Dict, List, Mapping, Optional, Sequence, Set, Tuple, Union

import msgspec

from hwaware.errors import RecordError
from hwaware.records import (
    LEAST_RATE,
    MOST_BYTES,
    MOST_BYTES_PER_S,
    MOST_FLOPS,
    MOST_FLOPS_PER_S,
    MOST_SECONDS,
    FileRecord,
    Record,
    rebuilt,
    require,
    require_amount,
    require_count,
    require_duration,
    require_finite,
    require_known_facts,
    require_name,
    require_printable,
    require_shallow,
    require_unique,
)

# Operations between devices. hwaware.costs.patterns says how each moves its bytes.
OPERATIONS = ("send", "all-reduce", "all-gather", "reduce-scatter", "all-to-all")
_NONE = ": no hardware has that"


def _require_rate(name: str, value: float) -> None:
    require_amount(name, value, MOST_BYTES_PER_S, least=LEAST_RATE, exclusive=True, why=_NONE)


class Host(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One machine.

    Attributes:
        name: Unique among hosts and devices.
        address: The address under which Ray knows the machine, if it is part of a Ray cluster.
    """

    name: str
    address: Optional[str] = None

    def __post_init__(self) -> None:
        require_name("host name", self.name)
        require_printable(f"address of host {self.name!r}", self.address)


class MatrixProduct(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The measured time of one matrix product.

    Attributes:
        flops: Floating-point operations of the product, 2 m n k.
        seconds: Wall time of one product.
    """

    flops: float
    seconds: float

    def __post_init__(self) -> None:
        require_amount("flops", self.flops, MOST_FLOPS, least=LEAST_RATE, exclusive=True, why=_NONE)
        require_duration("seconds", self.seconds)
        rate = self.flops / self.seconds
        require_amount("flops / seconds", rate, MOST_FLOPS_PER_S, least=LEAST_RATE, exclusive=True, why=_NONE)


class Device(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One accelerator, or one share of a processor that is used like an accelerator.

    Attributes:
        id: Unique among hosts and devices.
        host: Name of the host that it is part of.
        kind: Model; devices of one kind are assumed to run a layer alike.
        memory_bytes: Memory that training may use.
        throughput: Per data type, matrix products of several sizes.
        memory_bandwidth_bytes_per_s: Rate of a large copy in device memory, read and write counted.
        pass_s: Overhead of the runtime for each forward or backward pass of a stage: instructions, launch, messages.
            None where it was not measured; prices then leave it out.
        sum_bytes_per_s: Rate at which the device hands on gradients while replicas on several hosts sum them, without
            the network's time. None where it was not measured; prices then hold the network's time alone.
        head_start_s: Time that a pass gains if the device has waited before: an unused quota, a cooler clock. None
            where it was not measured or is zero; waiting then gains nothing.
        uuid: Hardware identity, where the device has one.
        samples: Raw measurements behind the summary figures, for inspection.
    """

    id: str
    host: str
    kind: str
    memory_bytes: int
    throughput: Dict[str, Tuple[MatrixProduct, ...]]
    memory_bandwidth_bytes_per_s: Optional[float] = None
    pass_s: Optional[float] = None
    sum_bytes_per_s: Optional[float] = None
    head_start_s: Optional[float] = None
    uuid: Optional[str] = None
    samples: Optional[Any] = None

    def __post_init__(self) -> None:
        require_name("device id", self.id)
        require_name(f"kind of device {self.id!r}", self.kind)
        require_amount(f"memory_bytes of device {self.id!r}", self.memory_bytes, MOST_BYTES, exclusive=True, why=_NONE)
        require(bool(self.throughput), f"device {self.id!r} has no throughput curve")
        for dtype, points in self.throughput.items():
            require(bool(points), f"device {self.id!r} has an empty throughput curve for {dtype}")
        for name in ("memory_bandwidth_bytes_per_s", "sum_bytes_per_s"):
            if getattr(self, name) is not None:
                _require_rate(f"{name} of device {self.id!r}", getattr(self, name))
        for name in ("pass_s", "head_start_s"):
            if getattr(self, name) is not None:
                require_amount(f"{name} of device {self.id!r}", getattr(self, name), MOST_SECONDS)
        require_shallow(f"samples of device {self.id!r}", self.samples)


def measured_kind(kind: str) -> str:
    """Return the kind that the profiler gives a device, without what tells slower devices of that kind apart.

    Example:
        >>> measured_kind("cpu like h0:0 as h1:0")
        'cpu'
    """
    return re.split(" (?:as|like) ", kind)[0]


class LinkSample(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The measured time of one message."""

    bytes: float
    seconds: float

    def __post_init__(self) -> None:
        require_amount("bytes", self.bytes, MOST_BYTES, why=_NONE)
        require_duration("seconds", self.seconds)


class Link(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A directed connection between two devices or two hosts.

    Attributes:
        source, target: Two device ids, or two host names (then every pair of their devices). The same host twice
            describes the pairs inside it.
        latency_s: Time of an empty message.
        bandwidth_bytes_per_s: Rate of a long message.
        samples: Timed messages; where given, they price the sizes that they span.
        evidence: Raw times, their spread, and the rate with both directions busy, for inspection.
    """

    source: str
    target: str
    latency_s: float
    bandwidth_bytes_per_s: float
    samples: Tuple[LinkSample, ...] = ()
    evidence: Optional[Dict[str, Any]] = None

    def __post_init__(self) -> None:
        # Clusters have links by the hundred thousand: most pass here, and only the others get a message.
        valid = 0 <= self.latency_s <= MOST_SECONDS and LEAST_RATE <= self.bandwidth_bytes_per_s <= MOST_BYTES_PER_S
        if valid and self.evidence is None:
            return
        name = f"of link {self.source!r} -> {self.target!r}"
        require_amount(f"latency_s {name}", self.latency_s, MOST_SECONDS)
        _require_rate(f"bandwidth_bytes_per_s {name}", self.bandwidth_bytes_per_s)
        if self.evidence is not None:
            require_shallow(f"evidence {name}", self.evidence)


class ConcurrentRate(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Give the rate of each of `k` transfers while all share one card."""

    k: int
    bytes_per_s: float

    def __post_init__(self) -> None:
        require_count("k", self.k)
        _require_rate("bytes_per_s", self.bytes_per_s)


class SharedCard(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A network card that several devices of a host send and receive through."""

    host: str
    devices: Tuple[str, ...]
    send_bytes_per_s: float
    receive_bytes_per_s: float
    concurrent: Tuple[ConcurrentRate, ...] = ()

    def __post_init__(self) -> None:
        _require_rate("send_bytes_per_s", self.send_bytes_per_s)
        _require_rate("receive_bytes_per_s", self.receive_bytes_per_s)
        require_unique("device", self.devices)


class Collective(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Measured times of one of `OPERATIONS` over one group; bytes are of the full logical array.

    `evidence` names the program and file of an imported measurement.
    """

    op: str
    devices: Tuple[str, ...]
    dtype: str
    points: Tuple[LinkSample, ...]
    evidence: Optional[Dict[str, Any]] = None

    def __post_init__(self) -> None:
        require(self.op in OPERATIONS, f"op is {self.op[:100]!r}, expected one of {', '.join(OPERATIONS)}")
        require(bool(self.devices), "a collective has no devices")
        require_name("dtype of a collective", self.dtype)
        require_unique("device", self.devices)
        require_shallow("evidence of a collective", self.evidence)


class Flag(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Something about the measurement that a reader should know before believing a number.

    Attributes:
        kind: "unsteady", "asymmetric", "slow", "non-monotone", "loaded", "slowed", "throttled", "clock", "corrupt",
            "failed" or "assumed".
        subjects: The host or device that is meant, or the two ends of a link, source first.
        what: A sentence that states the found and the expected value.
        only: Values of `hwaware profile --only` that measure just this again.
    """

    kind: str
    subjects: Tuple[str, ...]
    what: str
    only: Tuple[str, ...] = ()


class ClusterProfile(FileRecord, frozen=True, kw_only=True, omit_defaults=True):
    """Describe a cluster as the profiler measured it: hosts, devices and directed links.

    Read one by `load`, measure one by `hwaware.profile`, or make one up by `uniform`.

    Attributes:
        hosts: The machines.
        devices: The devices, at least one; links join each with every other, directly or through others.
        links: Directed links. A missing reverse means symmetric; a pair of devices wins over the pair of their hosts.
        shared_cards: Network cards that several devices of a host share.
        collectives: Measured collective operations.
        driver_s: Seconds of a step in which the driver starts it or waits for its end, and no stage computes; None if
            nobody has measured them.
        environment: Versions, time and command line of the measurement.
        flags: Devices, links and measurements that are doubtful or slow.

    Raises:
        ValueError: A name is unknown, an id occurs twice, or devices are unconnected.

    Example:
        >>> from hwaware import ClusterProfile
        >>> from hwaware.cluster import Device, Host, Link, LinkTable, MatrixProduct
        >>> profile = ClusterProfile(
        ...     hosts=(Host(name="a"), Host(name="b")),
        ...     devices=tuple(
        ...         Device(id=f"{h}:0", host=h, kind="cpu", memory_bytes=1 << 30,
        ...                throughput={"float32": (MatrixProduct(flops=1e9, seconds=0.01),)})
        ...         for h in "ab"),
        ...     links=(Link(source="a", target="b", latency_s=1e-4, bandwidth_bytes_per_s=1e8),))
        >>> LinkTable(profile).between("b:0", "a:0").bandwidth_bytes_per_s  # a missing reverse means symmetric
        100000000.0
    """

    SCHEMA: ClassVar[str] = "hwaware.cluster"
    MOST: ClassVar[Dict[str, Tuple[int, str]]] = {
        "devices": (10_000, "plan on a part of the cluster."),
        "links": (
            300_000,
            "write links between hosts in place of links between their devices; one link stands for both directions.",
        ),
    }

    hosts: Tuple[Host, ...]
    devices: Tuple[Device, ...]
    links: Tuple[Link, ...]
    shared_cards: Tuple[SharedCard, ...] = ()
    collectives: Tuple[Collective, ...] = ()
    driver_s: Optional[float] = None
    environment: Optional[Dict[str, Any]] = None
    flags: Tuple[Flag, ...] = ()

    def __post_init__(self) -> None:
        require(bool(self.devices), "the cluster has no devices")
        _check_facts(self)
        host_names = {host.name for host in self.hosts}
        device_ids = {device.id for device in self.devices}
        require_unique("id", tuple(h.name for h in self.hosts) + tuple(d.id for d in self.devices))
        for device in self.devices:
            require(device.host in host_names, f"device {device.id!r} names unknown host {device.host!r}")
        require_unique("link (source, target)", tuple((link.source, link.target) for link in self.links))
        for link in self.links:
            _check_ends(link, host_names, device_ids)
        for card in self.shared_cards:
            require(card.host in host_names, f"a shared card names unknown host {card.host!r}")
        named = [("shared card", card.devices) for card in self.shared_cards]
        for what, identifiers in [*named, *(("collective", one.devices) for one in self.collectives)]:
            for identifier in identifiers:
                require(identifier in device_ids, f"a {what} names unknown device {identifier!r}")
        unreached = _unreached(self)
        require(not unreached, f"devices {unreached} are unconnected to {self.devices[0].id!r}: no link leads there")

    @classmethod
    def uniform(
        cls,
        *,
        hosts: int = 2,
        devices_per_host: int = 1,
        flops_per_s: Union[float, Sequence[float]] = 1e12,
        memory_bytes: int = 16 << 30,
        bandwidth_bytes_per_s: float = 1e9,
        latency_s: float = 1e-4,
        dtype: str = "float32",
        kind: str = "cpu",
    ) -> ClusterProfile:
        """Make up a small cluster, for a first trial, a test or an example.

        Hosts are called h0, h1 and so on; their devices h0:0, h0:1 and so on. One link joins every two hosts, and one
        the devices inside each host.

        Args:
            hosts: Number of hosts.
            devices_per_host: Devices of each host.
            flops_per_s: Speed of each device, the same for matrix products of all sizes; or one speed for each host.
            memory_bytes: Memory of each device.
            bandwidth_bytes_per_s: Rate of every link.
            latency_s: Time of an empty message on every link.
            dtype: The data type that the speed is for.
            kind: Name of the devices' kind. With unlike speeds, a number follows it, the same for equal speeds.

        Raises:
            ValueError: A count is below one, a value is none that hardware has, or speeds are not one for each host.

        Example:
            >>> from hwaware import ClusterProfile
            >>> profile = ClusterProfile.uniform(hosts=3, flops_per_s=(1e12, 5e11, 1e12))
            >>> [(device.id, device.kind) for device in profile.devices]
            [('h0:0', 'cpu-0'), ('h1:0', 'cpu-1'), ('h2:0', 'cpu-0')]
        """
        require_count("hosts", hosts)
        require_count("devices_per_host", devices_per_host)
        speeds = [flops_per_s] * hosts if isinstance(flops_per_s, (int, float)) else list(flops_per_s)
        require(len(speeds) == hosts, f"flops_per_s has {len(speeds)} speeds, expected one for each of {hosts} hosts")
        for speed in speeds:
            require_finite("flops_per_s", speed, exclusive=True)
        unlike = list(dict.fromkeys(speeds))
        kinds = {speed: f"{kind}-{number}" if len(unlike) > 1 else kind for number, speed in enumerate(unlike)}
        names = [f"h{number}" for number in range(hosts)]
        inside = [(name, name) for name in names if devices_per_host > 1]
        return cls(
            hosts=tuple(Host(name=name) for name in names),
            devices=tuple(
                Device(
                    id=f"{name}:{index}",
                    host=name,
                    kind=kinds[speed],
                    memory_bytes=memory_bytes,
                    throughput={dtype: (MatrixProduct(flops=1e9, seconds=1e9 / speed),)},
                )
                for name, speed in zip(names, speeds)
                for index in range(devices_per_host)
            ),
            links=tuple(
                Link(source=source, target=target, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
                for source, target in [*inside, *itertools.combinations(names, 2)]
            ),
        )

    def device(self, identifier: str) -> Device:
        """Return the device with that id.

        Raises:
            KeyError: No device has it.
        """
        for device in self.devices:
            if device.id == identifier:
                return device
        raise KeyError(identifier)

    def without(self, excluded: Tuple[str, ...]) -> ClusterProfile:
        """Return the profile without some hosts or devices, and without links, groups and flags that name them.

        Args:
            excluded: Names of hosts and ids of devices.

        Raises:
            ValueError: Nothing remains, or what remains is unconnected.
        """
        gone = set(excluded) | {d.id for d in self.devices if d.host in excluded}

        def left(names: Sequence[str]) -> Tuple[str, ...]:
            return tuple(name for name in names if name not in gone)

        return rebuilt(
            self,
            hosts=tuple(host for host in self.hosts if host.name not in gone),
            devices=tuple(device for device in self.devices if device.id not in gone),
            links=tuple(link for link in self.links if not {link.source, link.target} & gone),
            shared_cards=tuple(
                msgspec.structs.replace(card, devices=left(card.devices))
                for card in self.shared_cards
                if card.host not in gone
            ),
            collectives=tuple(c for c in self.collectives if not set(c.devices) & gone),
            flags=tuple(
                msgspec.structs.replace(flag, subjects=left(flag.subjects), only=left(flag.only))
                for flag in self.flags
                # These two hold for each subject alone. Other flags of several are of a link or a group.
                if left(flag.subjects) == flag.subjects or (flag.kind in ("assumed", "loaded") and left(flag.subjects))
            ),
        )

    def keeping_free(self, reserve_bytes: float) -> ClusterProfile:
        """Return the profile with so much less memory on each device.

        Args:
            reserve_bytes: Less than the memory of the device with least.

        Raises:
            ValueError: It is not a number of at least 0, or a device would have no memory left.
        """
        require_finite("reserve_bytes", reserve_bytes)
        least = min(self.devices, key=lambda device: device.memory_bytes)
        found = (
            f"reserve_bytes (--reserve) is {reserve_bytes:g}, and device {least.id!r} has {least.memory_bytes:g} bytes"
        )
        require(least.memory_bytes - reserve_bytes >= 1, f"{found}, expected less than that")
        if not reserve_bytes:
            return self
        devices = (
            msgspec.structs.replace(device, memory_bytes=int(device.memory_bytes - reserve_bytes))
            for device in self.devices
        )
        return msgspec.structs.replace(self, devices=tuple(devices))


class PartialProfile(FileRecord, frozen=True, kw_only=True, omit_defaults=True):
    """A ClusterProfile that may lack devices and links; `hwaware profile --resume` completes it."""

    SCHEMA: ClassVar[str] = "hwaware.partial_cluster"

    hosts: Tuple[Host, ...] = ()
    devices: Tuple[Device, ...] = ()
    links: Tuple[Link, ...] = ()
    shared_cards: Tuple[SharedCard, ...] = ()
    collectives: Tuple[Collective, ...] = ()
    driver_s: Optional[float] = None
    environment: Optional[Dict[str, Any]] = None
    flags: Tuple[Flag, ...] = ()

    def __post_init__(self) -> None:
        _check_facts(self)

    @classmethod
    def of(cls, profile: AnyProfile) -> PartialProfile:
        """Return the same measurements as a PartialProfile."""
        return cls(**{name: getattr(profile, name) for name in cls.__struct_fields__})

    def complete(self) -> ClusterProfile:
        """Return the same measurements as a ClusterProfile.

        Raises:
            RecordError: No device was measured, or links are missing so that devices are unconnected.
        """
        try:
            return ClusterProfile(**{name: getattr(self, name) for name in self.__struct_fields__})
        except ValueError as error:
            raise RecordError(
                f"What was measured is no whole cluster: {error}.",
                "measure what is missing (hwaware profile --resume FILE -o cluster.json).",
            ) from error


# A profile, finished or not.
AnyProfile = Union[ClusterProfile, PartialProfile]


class LinkTable:
    """Find the link between two devices: a device pair wins over a host pair, a missing reverse means symmetric."""

    def __init__(self, profile: AnyProfile) -> None:
        self._links: Mapping[Tuple[str, str], Link] = {(link.source, link.target): link for link in profile.links}
        self._hosts: Mapping[str, str] = {device.id: device.host for device in profile.devices}

    def between(self, source: str, target: str) -> Optional[Link]:
        """Return the link that prices messages from device `source` to device `target`; None if they have none.

        Raises:
            KeyError: A device is not in the profile.
        """
        hosts = (self._hosts[source], self._hosts[target])
        for pair in ((source, target), (target, source), hosts, hosts[::-1]):
            link = self._links.get(pair)
            if link is not None:
                return link
        return None


def collectives_beside(profile: AnyProfile, links: Sequence[Link]) -> Tuple[Collective, ...]:
    """Return the measured collectives that use no link between the ends of `links`, which have new measurements."""
    ends = {frozenset((link.source, link.target)) for link in links}
    host_of = {device.id: device.host for device in profile.devices}

    def is_beside(one: Collective) -> bool:
        pairs = itertools.combinations(one.devices, 2)
        return not any({frozenset(pair), frozenset(host_of.get(name, name) for name in pair)} & ends for pair in pairs)

    return tuple(one for one in profile.collectives if is_beside(one))


def _check_facts(profile: AnyProfile) -> None:
    if profile.driver_s is not None:
        require_amount("driver_s", profile.driver_s, MOST_SECONDS)
    require_known_facts(profile.environment)
    require_shallow("environment", profile.environment)


def _check_ends(link: Link, host_names: set[str], device_ids: set[str]) -> None:
    source, target = link.source, link.target
    if source in host_names and target in host_names:
        return
    for end in (source, target):
        require(end in host_names or end in device_ids, f"a link names unknown host or device {end!r}")
    alike = (source in host_names) == (target in host_names)
    require(alike, f"link {source!r} -> {target!r} joins a host and a device, expected two alike")
    require(source != target, f"device {source!r} has a link to itself")


def _unreached(profile: ClusterProfile) -> Tuple[str, ...]:
    """Return the devices that no chain of links joins with the first one."""
    members: Dict[str, List[str]] = {host.name: [] for host in profile.hosts}
    for device in profile.devices:
        members[device.host].append(device.id)
    above: Dict[str, str] = {}  # of a host or device, another one that is joined with it

    def root(name: str) -> str:
        while above.setdefault(name, name) != name:
            above[name] = name = above[above[name]]
        return name

    linked: Set[str] = set()
    for link in profile.links:
        if members.get(link.source, True) and members.get(link.target, True):  # a host without devices joins none
            above[root(link.source)] = root(link.target)
            linked.update((link.source, link.target))
    for host in linked.intersection(members):  # its link reaches all its devices
        for name in members[host]:
            above[root(name)] = root(host)
    first = root(profile.devices[0].id)
    return tuple(device.id for device in profile.devices if root(device.id) != first)
