"""Find the devices of a stage, and let its workers find each other."""

from __future__ import annotations

import inspect
import socket
from typing import Any, List, NamedTuple, Sequence, Tuple

from hwaware.errors import MeasurementError
from hwaware.runtime import backend

# How long the hosts of a stage wait for each other when the program is launched.
MEET_LIMIT_S = 120


class Place(NamedTuple):
    """A worker's place in its stage.

    Attributes:
        mesh_id: Number of the stage's mesh in the pipeline.
        address: The address under which other hosts reach this one.
        devices: Indices of the worker's devices on its host, in the order of the plan.
        rank: Number of the worker among the stage's workers.
        workers: Number of the stage's workers: one for each host, or for each device where several hosts have several.
        uuids: The devices' hardware identities in the same order; empty where they have none.

    Example:
        >>> str(Place(1, "10.0.0.2", (0,)))
        'stage 1 on host 10.0.0.2, device 0'
    """

    mesh_id: int
    address: str
    devices: Tuple[int, ...]
    rank: int = 0
    workers: int = 1
    uuids: Tuple[str, ...] = ()

    def __str__(self) -> str:
        names = ", ".join(map(str, self.devices))
        return f"stage {self.mesh_id} on host {self.address}, device{'s' * (len(self.devices) > 1)} {names}"


def prepare_environment(place: Place) -> None:
    """Set this process's devices and its use of memory; call this before JAX looks for devices."""
    backend.keep_freed_memory()
    backend.show_devices(place.devices, place.uuids)
    backend.make_cpu_devices(len(place.devices), place.workers)


def free_coordinator(address: str) -> str:
    """Return ADDRESS:PORT with a TCP port that is free now, an IPv6 address in brackets."""
    is_ipv6 = ":" in address
    with socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET) as probe:
        probe.bind((address, 0))
        port = probe.getsockname()[1]
    return f"[{address}]:{port}" if is_ipv6 else f"{address}:{port}"


def meet(place: Place, coordinator: str) -> None:
    """Connect with the stage's other workers; call this before JAX looks for devices.

    Raises:
        AlpaError: JAX is too old to run one stage on the CPUs of several hosts.
        MeasurementError: Not all workers came within MEET_LIMIT_S.
    """
    from hwaware.compat.client import distributed_state, register_gloo

    initialize = distributed_state().initialize
    settings = {
        "coordinator_address": coordinator,
        "num_processes": place.workers,
        "process_id": place.rank,
        "initialization_timeout": MEET_LIMIT_S,
        "coordinator_bind_address": coordinator,  # not every address of the host
    }
    if backend.uses_cpus():
        backend.require_gloo()
    try:
        initialize(**{name: settings[name] for name in settings if name in inspect.signature(initialize).parameters})
    except Exception as error:
        raise MeasurementError(
            f"The {place.workers} workers of stage {place.mesh_id} did not all meet at {coordinator} "
            f"within {MEET_LIMIT_S} s: {error}",
            "check that they reach each other (firewall?), and look at the first error of the others.",
        ) from error
    if backend.uses_cpus():
        register_gloo(place.address)


def local_devices(place: Place) -> List[Any]:
    """Return this worker's devices, in the order of the plan.

    Raises:
        MeasurementError: JAX found fewer devices.
    """
    import jax

    found = jax.local_devices()
    if len(found) < len(place.devices):
        raise MeasurementError(
            f"The plan gives {place} to a worker in which JAX finds {len(found)} devices ({found[0].platform}).",
            "profile the cluster again; where devices are CPUs, unset --xla_force_host_platform_device_count.",
        )
    return list(found[: len(place.devices)])


def all_devices(place: Place) -> Sequence[Any]:
    """Return the devices of all workers of the stage, worker by worker."""
    import jax

    if place.workers == 1:
        return local_devices(place)
    return sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
