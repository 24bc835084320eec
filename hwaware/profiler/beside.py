"""Measure a host that joins a cluster while the other hosts train: its devices, and its links to these hosts."""

from __future__ import annotations

import os
import platform
import threading
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import msgspec

from hwaware import host_devices, ray_cluster
from hwaware._version import __version__
from hwaware.cluster import ClusterProfile, Device, PartialProfile
from hwaware.dtypes import MEASURED
from hwaware.errors import MeasurementError, UnusableInputError
from hwaware.greeting import new_secret
from hwaware.profiler.crew import Member, RayCrew, wait_until_ready
from hwaware.profiler.measurement import measure
from hwaware.profiler.policy import BESIDE
from hwaware.profiler.progress import Silent
from hwaware.profiler.selection import Selection
from hwaware.profiler.worker import Worker
from hwaware.ray_cluster import Node

#: Time limit of the whole measurement [s].
LIMIT_S = 180.0
_VERSIONS_LIMIT_S = 90.0
# With more hosts, one link stands for all links to hosts with the same devices.
_MOST_HOSTS = 8
_FIX = "see the Ray logs of that host (worker-*.err), mend what they say, and start Ray there again."


class Guest(Worker):
    """Serve one device of the host that joins."""

    def __init__(self, address: str, secret: bytes, index: int) -> None:
        # Ray hides the devices from this actor, which reserves none: the training has reserved them.
        os.environ["CUDA_VISIBLE_DEVICES"] = str(index)
        super().__init__(address, secret, index)
        self._joins = True

    def versions(self) -> Dict[str, str]:
        """Return this host's versions, which must equal those of the driver."""
        with host_devices.unthrottled():  # this loads JAX
            return own_versions()


class Neighbour(Worker):
    """Serve the links of a host whose devices train, without a device and without JAX.

    Args:
        address, secret: See `Worker`.
        facts: The profile's facts of the host's first device, in the form of `Worker.identify`.
    """

    def __init__(self, address: str, secret: bytes, facts: Mapping[str, Any]) -> None:
        super().__init__(address, secret, index=0)
        self._joins = True  # it listens on the host's declared ports
        self._facts = facts

    def identify(self) -> Dict[str, Any]:
        """Return the facts of the device, and those of the link's end."""
        return {**self._facts, **self.end_of_links()}


def own_versions() -> Dict[str, str]:
    """Return the versions of this process.

    Example:
        >>> sorted(own_versions())
        ['hwaware', 'jax', 'python']
    """
    import jax

    return {
        "hwaware": __version__,
        "jax": jax.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def profile_beside(profile: ClusterProfile, node: Node, name: str, present: Sequence[str]) -> ClusterProfile:
    """Measure one more host, whose devices nobody uses yet, and return the profile with this host.

    The function measures the host's devices, and its links to the present hosts. The other hosts train meanwhile. So
    links may look slower than they are, and so may devices that share a processor with devices that train.

    Args:
        profile: Profile of the cluster without the host.
        node: The host, on which Ray runs.
        name: The host's name in the profile.
        present: Addresses of the profile's hosts that are up.

    Raises:
        MeasurementError: The host could not be measured within `LIMIT_S`.
        UnusableInputError: The host has other versions than this process.
        RecordError: Another host or device already has one of the host's names.
    """
    actors: List[Any] = []
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        ray_cluster.end_actors(actors)

    timer = threading.Timer(LIMIT_S, end)
    timer.daemon = True
    timer.start()
    try:
        members = _members(profile, node, name, present, actors)
        known = [dtype for dtype in MEASURED if all(dtype in device.throughput for device in profile.devices)]
        earlier = PartialProfile.of(profile)
        hosts = {member.host for member in members}
        selection = Selection.of([name], earlier, symmetric=len(hosts) > _MOST_HOSTS)
        found = measure(RayCrew(members, {}, {}), BESIDE, known or ["float32"], Silent(), selection, earlier)
    except Exception:  # after the end of its workers, a measurement raises many kinds of errors
        if is_late.is_set():
            raise _late() from None
        raise
    finally:
        timer.cancel()
        ray_cluster.end_actors(actors)
    if is_late.is_set():
        raise _late()
    lost = [flag.what for flag in found.flags if flag.kind == "failed" and name in flag.subjects]
    if len([device for device in found.devices if device.host == name]) < node.num_gpus:
        raise MeasurementError(" ".join(lost) or "Its devices could not be measured.", _FIX)
    return with_likely_passes(found, name)


def _late() -> MeasurementError:
    return MeasurementError(f"It was not measured within {LIMIT_S:g} s.", "start Ray there again on a calmer host.")


def _members(
    profile: ClusterProfile, node: Node, name: str, present: Sequence[str], actors: List[Any]
) -> Tuple[Member, ...]:
    """Start a worker on each device of the host, then one on each host that is up."""
    secret = new_secret()
    guests = [_start(Guest, node.id, actors, node.address, secret, index) for index in range(node.num_gpus)]
    wait_until_ready(
        [guest.ready.remote() for guest in guests], [f"device {index} of host {name}" for index in range(node.num_gpus)]
    )
    _require_same_versions(guests[0])
    ids = {each.address: each.id for each in ray_cluster.nodes()}
    members = []
    for host in profile.hosts:
        if host.address in present and host.address in ids:
            device = next(one for one in profile.devices if one.host == host.name)
            actor = _start(Neighbour, ids[host.address], actors, host.address, secret, _facts(device))
            members.append(Member(host.name, host.address, 0, actor))
    wait_until_ready([one.worker.ready.remote() for one in members], [f"host {one.host}" for one in members])
    return (*(Member(name, node.address, index, guest) for index, guest in enumerate(guests)), *members)


def _start(kind: Any, node_id: str, actors: List[Any], *arguments: Any) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    actor = ray.remote(kind).options(num_cpus=0, max_restarts=0, scheduling_strategy=there).remote(*arguments)
    actors.append(actor)
    return actor


def _require_same_versions(guest: Any) -> None:
    (found,) = ray_cluster.fetched([guest.versions.remote()], _VERSIONS_LIMIT_S, "Asking the host for its versions")
    require_same(found, own_versions())


def require_same(found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Refuse a host whose versions differ from the expected ones.

    Raises:
        UnusableInputError: A version differs.

    Example:
        >>> require_same({"jax": "0.4.30"}, {"jax": "0.4.30"})
    """
    unlike = [
        f"{name} {found.get(name)}, expected {expected[name]}" for name in expected if found.get(name) != expected[name]
    ]
    if unlike:
        raise UnusableInputError(
            f"It has {'; '.join(unlike)}.", "install the driver's versions there, and start Ray there again."
        )


def _facts(device: Device) -> Dict[str, Any]:
    return {
        "index": 0,
        "declared_id": device.id,
        "kind": device.kind,
        "is_processor": False,
        "is_share": False,
        "declared_memory_bytes": device.memory_bytes,
        "device_memory_bytes": None,
        "host_memory_bytes": device.memory_bytes,
        "uuid": device.uuid,
        "versions": {},
    }


def with_likely_passes(profile: ClusterProfile, name: str) -> ClusterProfile:
    """Return the profile with likely values of `pass_s` and `sum_bytes_per_s` for a host's devices.

    A device gets the slowest values among other hosts' devices of its kind, else among all other hosts' devices. To
    measure these values, programs would have to train on all devices.

    Example:
        >>> profile = ClusterProfile.uniform(hosts=2, flops_per_s=1e10)
        >>> slow = msgspec.structs.replace(profile.devices[0], pass_s=0.002)
        >>> profile = msgspec.structs.replace(profile, devices=(slow, profile.devices[1]))
        >>> with_likely_passes(profile, "h1").devices[1].pass_s
        0.002
    """
    known = [device for device in profile.devices if device.host != name]

    def like(device: Device) -> Device:
        alike = [one for one in known if one.kind == device.kind] or known
        passes: List[Optional[float]] = [one.pass_s for one in alike]
        rates: List[Optional[float]] = [one.sum_bytes_per_s for one in alike]
        return msgspec.structs.replace(
            device,
            pass_s=max((value for value in passes if value is not None), default=None),
            sum_bytes_per_s=min((value for value in rates if value is not None), default=None),
        )

    devices = tuple(like(device) if device.host == name else device for device in profile.devices)
    return msgspec.structs.replace(profile, devices=devices)
