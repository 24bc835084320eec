"""Describe by which factors devices and links differ from their profile."""

from __future__ import annotations

from typing import Dict, Mapping, Tuple

import msgspec

from hwaware.cluster import ClusterProfile, Link, measured_kind
from hwaware.costs.measured_groups import with_links
from hwaware.costs.own_times import with_own_kinds
from hwaware.costs.speed import at_speed, slower_link
from hwaware.records import Record, require, require_amount
from hwaware.workload import Layer, Workload

# No detector and no trace needs more; longer steps have another cause.
MOST_TIMES = 1e4


class Drift(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Factors by which a cluster differs from its profile; 1 for all that is not named.

    Attributes:
        devices: Device id -> its time over the profile's time.
        links: "SOURCE->TARGET", two hosts -> time of messages over the profile's time, in this direction.

    Example:
        >>> profile = ClusterProfile.uniform(hosts=2, flops_per_s=1e10)
        >>> layer = Layer(name="0", forward_flops=1e9, backward_flops=2e9, parameter_bytes=0, output_bytes=0,
        ...               activation_bytes=0)
        >>> workload = Workload(name="one", microbatch_size=4, dtype="float32", layers=(layer,))
        >>> _, slower = Drift(devices={"h1:0": 2.0}).applied(workload, profile)
        >>> [device.throughput["float32"][0].seconds for device in slower.devices]
        [0.1, 0.2]
    """

    devices: Dict[str, float] = {}
    links: Dict[str, float] = {}

    def __post_init__(self) -> None:
        for name, factor in [*self.devices.items(), *self.links.items()]:
            require_amount(f"the factor of {name!r}", factor, MOST_TIMES, least=1.0 / MOST_TIMES)
        for name in self.links:
            require(name.count("->") == 1, f"the link {name!r} is not of the form SOURCE->TARGET")

    def applied(self, workload: Workload, profile: ClusterProfile) -> Tuple[Workload, ClusterProfile]:
        """Return workload and profile as if they had been measured on the cluster of now.

        Devices that differ get kinds of their own, so that a placement tells them apart.

        Raises:
            RecordError: A time is then beyond its bound.
        """
        workload, profile = with_own_kinds(workload, profile)
        kinds = {
            device.id: f"{measured_kind(device.kind)} as {device.id}"
            for device in profile.devices
            if self.devices.get(device.id, 1.0) != 1.0
        }
        sources = {kinds[device.id]: device.kind for device in profile.devices if device.id in kinds}
        devices = tuple(
            msgspec.structs.replace(device, kind=kinds.get(device.id, device.kind)) for device in profile.devices
        )
        layers = tuple(_named(layer, sources) for layer in workload.layers)
        factors = {kind: self.devices[name] for name, kind in kinds.items()}
        return at_speed(
            msgspec.structs.replace(workload, layers=layers),
            with_links(msgspec.structs.replace(profile, devices=devices), self._links(profile)),
            1.0,
            factors,
        )

    def _links(self, profile: ClusterProfile) -> Tuple[Link, ...]:
        if not self.links:
            return profile.links
        host_of = {device.id: device.host for device in profile.devices}
        known = {(link.source, link.target) for link in profile.links}
        # A profile may give one direction for both, but a drift has one.
        reverse = [
            msgspec.structs.replace(link, source=link.target, target=link.source)
            for link in profile.links
            if (link.target, link.source) not in known
        ]
        found = []
        for link in (*profile.links, *reverse):
            ends = "->".join(host_of.get(end, end) for end in (link.source, link.target))
            found.append(slower_link(link, self.links.get(ends, 1.0)))
        return tuple(found)


def _named(layer: Layer, sources: Mapping[str, str]) -> Layer:
    if not layer.measured:
        return layer
    copies = {kind: layer.measured[source] for kind, source in sources.items() if source in layer.measured}
    return msgspec.structs.replace(layer, measured={**layer.measured, **copies})
