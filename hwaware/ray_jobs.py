"""Tell which hosts of the connected Ray cluster answer, and which jobs use their devices.

Ray itself believes in a lost host for up to a minute. While a program waits for a resource, Ray does not say who holds
it. Works with Ray 2.9 and newer, without Ray's dashboard.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Collection, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from hwaware import ray_cluster
from hwaware.errors import ClusterUnreachableError
from hwaware.ray_cluster import Node

LOG = logging.getLogger("hwaware")
_MOST_AT_ONCE = 64
# Ray needs a moment to notice that a driver has ended, and to free what it held.
PATIENCE_S = 3.0
_ASK_AGAIN_S = 0.5
_DRIVERS_LIMIT_S = 8.0
_LONGEST_LINE = 120
# hwaware's workers that use devices without asking Ray for the resource.
_OWN_CLASSES = ("HostWorker", "SurvivingWorker", "ProgramTimer")
_DEVICE = "GPU"


class Job(NamedTuple):
    """A program that is connected to the cluster.

    Attributes:
        id: Ray's job id, in hexadecimal.
        driver: The driver's command line, process and host, as far as Ray tells.

    Example:
        >>> str(Job("02000000", "python train.py, process 4711 on 10.0.0.1"))
        'Ray job 02000000 (python train.py, process 4711 on 10.0.0.1)'
    """

    id: str
    driver: str = ""

    def __str__(self) -> str:
        return f"Ray job {self.id}{f' ({self.driver})' if self.driver else ''}"


class Holder(NamedTuple):
    """A placement group or an actor that may use devices.

    Ray ends both with their job, except those that were made to outlive it.

    Attributes:
        job: Id of its job.
        nodes: Ids of the nodes on which it is.
        reserves: True if it holds the resource; False if it is a worker that asked for none.
    """

    job: str
    nodes: Tuple[str, ...]
    reserves: bool


def is_gone(error: Exception) -> bool:
    """Return True if the host answered, and only its program is gone."""
    return isinstance(error, ConnectionRefusedError)


def silent(nodes: Sequence[Node]) -> Dict[Node, str]:
    """Return the nodes on which Ray does not answer, each with the reason, within seconds."""
    if not nodes:
        return {}
    with ThreadPoolExecutor(min(len(nodes), _MOST_AT_ONCE)) as pool:
        errors = list(pool.map(lambda node: ray_cluster.fails_to_answer(node.address, node.port), nodes))
    return {node: _reason(error) for node, error in zip(nodes, errors) if error is not None}


def _reason(error: Exception) -> str:
    if is_gone(error):
        return "Ray has ended there"
    return f"{error}".strip().rstrip(".") or type(error).__name__


def left_out(address: str, reason: str) -> str:
    """Return the one line about a host that does not answer, where the others go on without it."""
    return (
        f"Host {address} is left out: it does not answer ({reason}). To fix: see that the host runs, that its network "
        f"link is up (ping {address}) and that Ray runs there (ray start --address=...), then start this program again."
    )


def using(nodes: Collection[Node]) -> Dict[str, Tuple[str, ...]]:
    """Return the ids of other jobs that use devices of these nodes, each with the addresses of the nodes."""
    import ray

    own = ray.get_runtime_context().get_job_id()
    return users(_holders(), {node.id: node.address for node in nodes}, str(own))


def users(holders: Sequence[Holder], addresses: Dict[str, str], own: str) -> Dict[str, Tuple[str, ...]]:
    """Return `using` for these holders.

    Args:
        holders: All placement groups and actors that may use devices.
        addresses: Id -> address of the nodes that are asked about.
        own: Id of the own job, which does not count.

    Example:
        >>> users([Holder("02000000", ("n1",), True)], {"n1": "10.0.0.2"}, "01000000")
        {'02000000': ('10.0.0.2',)}
    """
    # A job that reserves devices of a node keeps its workers on these.
    reserved = {(holder.job, node) for holder in holders if holder.reserves for node in holder.nodes}
    found: Dict[str, List[str]] = {}
    for holder in holders:
        for node in holder.nodes if holder.job != own else ():
            if node in addresses and (holder.reserves or (holder.job, node) not in reserved):
                found.setdefault(holder.job, []).append(addresses[node])
    return {job: tuple(dict.fromkeys(places)) for job, places in found.items()}


def partly_taken(nodes: Sequence[Node]) -> List[Node]:
    """Return the nodes on which some program has devices from Ray; none if this version of Ray does not tell."""
    with contextlib.suppress(ImportError, AttributeError):
        free = importlib.import_module("ray._private.state").available_resources_per_node()
        return [node for node in nodes if free.get(node.id, node.resources).get(_DEVICE, 0) < node.num_gpus]
    return []


def require_unused(nodes: Collection[Node]) -> None:
    """Refuse nodes whose devices another job uses; wait for seconds if one seems to be ending.

    Raises:
        ClusterUnreachableError: Another job uses a device; the message names the job.
    """
    end_s = time.monotonic() + PATIENCE_S
    while True:
        found = using(nodes)
        if not found:
            return
        if time.monotonic() > end_s:
            raise in_use(found)
        time.sleep(_ASK_AGAIN_S)


def in_use(found: Dict[str, Tuple[str, ...]]) -> ClusterUnreachableError:
    """Return the error for devices that other jobs use, as `using` names them."""
    addresses = sorted({address for places in found.values() for address in places})
    hosts = f"host{'s' * (len(addresses) > 1)} {', '.join(addresses)}"
    drivers = _drivers()
    names = [str(Job(job, drivers.get(job, ""))) for job in found]
    return ClusterUnreachableError(
        f"The devices of {hosts} are in use by {' and by '.join(names)}.",
        "wait for that program, or end it (on its host: kill with its process number), then start this one again.",
    )


def _drivers() -> Dict[str, str]:
    """Return Job.driver of each job; none if Ray does not tell within seconds.

    Ray asks every driver before it answers, also one that is busy or stopped.
    """
    answers: List[Dict[str, str]] = []

    def ask() -> None:
        with contextlib.suppress(ImportError, AttributeError):
            accessor, pb = _tables()
            jobs = map(pb.JobTableData.FromString, accessor.get_job_table())
            answers.append({job.job_id.hex(): _driver(job) for job in jobs})

    asking = threading.Thread(target=ask, name="hwaware-jobs", daemon=True)
    asking.start()
    asking.join(_DRIVERS_LIMIT_S)
    return answers[0] if answers else {}


def _driver(job: Any) -> str:
    address = getattr(getattr(job, "driver_address", None), "ip_address", "") or job.driver_ip_address
    line = textwrap.shorten(job.entrypoint, _LONGEST_LINE, placeholder=" ...")  # it may hold a whole program
    words = f"{line}, " if line else ""
    return f"{words}process {job.driver_pid} on {address}"


def _tables() -> Tuple[Any, Any]:
    """Return what answers for Ray's tables, and the classes of their rows.

    Raises:
        ImportError, AttributeError: This version of Ray keeps them elsewhere.
    """
    state = importlib.import_module("ray._private.state").state
    if hasattr(state, "_check_connected"):
        state._check_connected()
        accessor = state.global_state_accessor
    else:  # Ray 2.60
        accessor = state._connect_and_get_accessor()
    return accessor, importlib.import_module("ray.core.generated.gcs_pb2")


def _holders() -> List[Holder]:
    """Return all placement groups and actors that may use devices; none, with a warning, if this Ray does not tell."""
    try:
        accessor, pb = _tables()
        groups = map(pb.PlacementGroupTableData.FromString, accessor.get_placement_group_table())
        actors = map(pb.ActorTableData.FromString, accessor.get_actor_table(None, "ALIVE"))
        return [*_groups(groups), *_actors(actors)]
    except (ImportError, AttributeError) as error:
        _say_untold(str(error))
        return []


@functools.lru_cache(maxsize=None)  # once
def _say_untold(reason: str) -> None:
    LOG.warning("This version of Ray does not tell hwaware which programs use devices: %s.", reason)


def _groups(entries: Iterable[Any]) -> Iterable[Holder]:
    for entry in entries:
        nodes = [bundle.node_id.hex() for bundle in entry.bundles if bundle.unit_resources.get(_DEVICE, 0)]
        # A bundle without a place holds nothing, in whatever state its group is.
        placed = tuple(node for node in nodes if node.strip("f"))
        if placed and entry.state != entry.REMOVED:
            yield Holder(entry.creator_job_id.hex(), placed, True)


def _actors(entries: Iterable[Any]) -> Iterable[Holder]:
    for entry in entries:
        reserves = any(name == _DEVICE and amount for name, amount in entry.required_resources.items())
        if reserves or entry.class_name in _OWN_CLASSES:
            node = entry.address.node_id if hasattr(entry.address, "node_id") else entry.address.raylet_id  # Ray 2.9
            yield Holder(entry.job_id.hex(), (node.hex(),), reserves)


def reachable_hosts(nodes: Sequence[Node]) -> Tuple[List[Node], Dict[Node, str]]:
    """Split nodes into those on which Ray answers, and the others with the reason.

    Raises:
        ClusterUnreachableError: None answers.
    """
    absent = silent(nodes)
    if len(absent) == len(nodes):
        reasons = "; ".join(f"{node.address}: {reason}" for node, reason in absent.items())
        raise ClusterUnreachableError(
            f"No host with devices answers ({reasons}).",
            "see that they run, that their network links are up, and that Ray runs there (ray start --address=...).",
        )
    return [node for node in nodes if node not in absent], absent


def at(addresses: Collection[str]) -> List[Node]:
    """Return the living nodes with these addresses, as Ray knows them."""
    return [node for node in ray_cluster.nodes() if node.address in addresses]


def daemon_fails(address: str) -> Optional[Exception]:
    """Return why Ray's daemon on the host with this address does not answer; None if it does."""
    known = at([address]) or [node for node in ray_cluster.nodes(alive=False) if node.address == address]
    errors = (ray_cluster.fails_to_answer(address, node.port) for node in known)
    return next((error for error in errors if error is not None), None)


def is_there(address: str) -> bool:
    """Return True if Ray lists the host as alive, and the host's daemon answers."""
    return bool(at([address])) and daemon_fails(address) is None
