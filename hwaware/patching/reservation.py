"""Start and end Alpa on a Ray cluster: leave out hosts that do not answer, name jobs that use devices.

Alpa 0.2.3 counts every host that Ray believes in, and waits 100 s for their devices. Then it says that a placement
group timed out. Ray believes in a lost host for up to a minute.
"""

from __future__ import annotations

import functools
import logging
import time
from typing import Any, Callable, List, NamedTuple, Optional, Sequence

from hwaware import ray_cluster, ray_jobs
from hwaware.errors import AlpaError, ClusterUnreachableError
from hwaware.patching import failures
from hwaware.patching.mechanism import Patch, Target
from hwaware.ray_cluster import Node

# Ray frees an ended program's devices within seconds, and reserves free devices within milliseconds.
_RESERVE_LIMIT_S = 20.0
_RESERVE_LOOK_S = 1
# The limit for a task that asks for its devices; Ray starts a process for it.
_INDICES_LIMIT_S = 60.0
# Attribute of Alpa's cluster: the indices of each host's devices that this program has.
_INDICES = "hwaware_indices"
# Attribute of Alpa's cluster: True if the program asked for the whole cluster.
_WHOLE = "hwaware_whole"
LOG = logging.getLogger("hwaware")
# The platform that JAX had before Alpa let the driver compute on CPUs; empty without `alpa.init`.
_platforms: List[str] = []


class Share(NamedTuple):
    """Hold the devices of a host that a program takes.

    Attributes:
        node: The host.
        devices: The number of its devices that the program takes.
    """

    node: Node
    devices: int


def init(original: Any) -> Callable[..., None]:
    """Wrap Alpa's function: turn a failure into one message, and leave Alpa as it was before."""

    @functools.wraps(original)
    def replacement(cluster: str = "ray", *args: Any, **kwargs: Any) -> None:
        import alpa.api
        import alpa.util
        import ray

        before = alpa.api.is_initialized
        try:
            if cluster == "ray" and not before and not ray.is_initialized():
                ray_cluster.require()
            original(cluster, *args, **kwargs)
        except BaseException as error:
            alpa.api.is_initialized = before  # Alpa sets it before it starts, so a second call would do nothing
            if not before:
                alpa.util.update_jax_platform("gpu")
            if isinstance(error, (ConnectionError, *ray_cluster.errors())):
                fix = "start Ray (ray start --head), or connect before (ray.init(address='HOST:PORT'))."
                if ray_cluster.asks_for_token(error):
                    fix = ray_cluster.TOKEN_FIX
                what = f"alpa.init found no Ray cluster that it can use: {ray_cluster.last_line(error)}."
                raise ClusterUnreachableError(what, fix) from error
            raise

    return replacement


def update_jax_platform(original: Any) -> Callable[[str], None]:
    """Wrap Alpa's function: when Alpa ends, JAX gets its platform of before, and not a GPU, which may be missing."""

    def replacement(platform: str) -> None:
        import jax

        if platform == "cpu":
            _platforms.append(jax.config.read("jax_platform_name"))
            original(platform)
        elif _platforms:
            original(_platforms.pop())

    return replacement


def shutdown(original: Any) -> Callable[[], None]:
    """Wrap Alpa's function: end the workers of all functions, and forget the functions. Later calls compile them again.

    Alpa ends only the newest workers, and keeps every compiled function.
    """

    def replacement() -> None:
        import alpa.api

        try:
            failures.shut_down_groups()
            original()
        finally:
            alpa.api.clear_executable_cache()

    return replacement


def device_cluster(_original: Any) -> Callable[..., None]:
    """Replace Alpa's cluster: take the hosts that answer, and reserve their devices for this program alone."""

    def replacement(
        self: Any, num_nodes: Optional[int] = None, num_devices_per_node: Optional[int] = None, namespace: Any = None
    ) -> None:
        import ray

        self.head_info = _head_info()
        hosts, absent = ray_jobs.reachable_hosts(ray_cluster.device_hosts())
        for node, reason in absent.items():
            LOG.warning("%s", ray_jobs.left_out(node.address, reason))
        shares = chosen(hosts, num_nodes, num_devices_per_node, ray_jobs.using(hosts) if num_nodes else ())
        self.namespace = namespace
        outer = _outer_group()
        setattr(self, _WHOLE, outer is None and num_nodes is None and num_devices_per_node is None)
        if outer is not None:
            self.delete_placement_group = lambda: None  # Ray would end this program with it
        self.placement_group = outer or reserved(shares, f"{namespace}_pg" if namespace else "")
        setattr(self, _INDICES, _indices(self.placement_group, shares))
        self.host_num_devices = [share.devices for share in shares]
        self.host_ips = [share.node.address for share in shares]
        described = {node["NodeID"]: node for node in ray.nodes()}
        self.host_info = [described[share.node.id] for share in shares]

    return replacement


def _head_info() -> Any:
    from ray._private import worker

    node = worker._global_node
    if node is None:
        raise AlpaError(
            "Alpa needs a driver that Ray runs on a node of the cluster; this one is no such node's (ray:// address?).",
            "start the program on a machine where `ray start` ran, with address HOST:PORT or auto.",
        )
    return node.address_info


def chosen(hosts: Sequence[Node], num_nodes: Optional[int], num_devices: Optional[int], used: Any = ()) -> List[Share]:
    """Return the devices that `alpa.init` takes.

    Args:
        hosts: The hosts that answer.
        num_nodes: The most hosts to take; None for all.
        num_devices: The number of devices of each host; None for all.
        used: The addresses of hosts that other jobs use, by job. These hosts come last.

    Raises:
        ClusterUnreachableError: Too few hosts have so many devices.
    """
    busy = {address for job in used for address in used[job]}
    wide = [node for node in hosts if node.num_gpus >= (num_devices or 1)]
    wanted = min(num_nodes or len(hosts), len(hosts))
    if len(wide) < wanted:
        raise ClusterUnreachableError(
            f"{len(wide)} hosts have {num_devices} devices, expected {wanted}: the hosts that answer have "
            f"{', '.join(f'{node.address}: {node.num_gpus}' for node in hosts)}.",
            "ask alpa.init for fewer num_nodes or num_devices_per_node.",
            found=len(wide),
            expected=wanted,
        )
    order = sorted(wide, key=lambda node: node.address in busy)[:wanted]
    return [Share(node, num_devices or node.num_gpus) for node in wide if node in order]


def _outer_group() -> Any:
    """Return the placement group in which Ray runs this program, such as a trial of Ray Tune; None without one."""
    import ray
    from ray._private import worker

    captures = worker.global_worker.should_capture_child_tasks_in_placement_group
    return ray.util.get_current_placement_group() if captures else None


def reserved(shares: Sequence[Share], name: str = "") -> Any:
    """Return a placement group with these devices.

    Raises:
        ClusterUnreachableError: Another job uses the devices, or Ray does not reserve them within seconds.
    """
    import ray
    from ray.util.placement_group import remove_placement_group

    nodes = [share.node for share in shares]
    if all(share.devices == share.node.num_gpus for share in shares):
        ray_jobs.require_unused(nodes)
    # The node's own resource pins each bundle. Without it, Ray could choose a host that is lost.
    bundles = [{"GPU": share.devices, f"node:{share.node.address}": 0.001} for share in shares]
    group = ray.util.placement_group(bundles, strategy="SPREAD", name=name)
    try:
        _wait_for(group, nodes)
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def _wait_for(group: Any, nodes: Sequence[Node]) -> None:
    end_s = time.monotonic() + _RESERVE_LIMIT_S
    while not group.wait(_RESERVE_LOOK_S):
        found = ray_jobs.using(nodes)
        if found and time.monotonic() > end_s - _RESERVE_LIMIT_S + ray_jobs.PATIENCE_S:
            raise ray_jobs.in_use(found)
        if time.monotonic() > end_s:
            raise ClusterUnreachableError(
                f"Ray did not reserve the devices of {', '.join(node.address for node in nodes)} within "
                f"{_RESERVE_LIMIT_S:g} s, and does not say who holds them.",
                "see `ray status` for what is in use (a task of another program may hold a GPU), and end that program.",
            )


def _indices(group: Any, shares: Sequence[Share]) -> List[List[int]]:
    """Return the indices of the reserved devices on each host. If a program takes a part, Ray chooses the devices."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    indices = [list(range(share.devices)) for share in shares]
    parts = [place for place, share in enumerate(shares) if share.devices < share.node.num_gpus]
    if not parts or len(group.bundle_specs) != len(shares):
        return indices
    asked = [
        ray.remote(num_cpus=0, max_retries=0)(ray.get_gpu_ids)
        .options(num_gpus=shares[place].devices, scheduling_strategy=PlacementGroupSchedulingStrategy(group, place))
        .remote()
        for place in parts
    ]
    found = ray_cluster.fetched(asked, _INDICES_LIMIT_S, "Asking Ray which devices of a host it has reserved")
    for place, ids in zip(parts, found):
        if all(isinstance(one, int) for one in ids):  # if GPUs have names, Ray tells no indices
            indices[place] = sorted(ids)
    return indices


def indices_of(cluster: Any) -> Optional[List[List[int]]]:
    """Return the indices of each host's devices that this program has; None if it has the first ones of every host."""
    found: Optional[List[List[int]]] = getattr(cluster, _INDICES, None)
    whole = found is None or all(indices == list(range(len(indices))) for indices in found)
    return None if whole else found


def is_whole(cluster: Any) -> bool:
    """Return True if Alpa's cluster is Ray's whole cluster, because the program named no part in `alpa.init()`."""
    return bool(getattr(cluster, _WHOLE, False))


def require_hosts(addresses: Sequence[str]) -> None:
    """Refuse to launch workers on hosts that do not answer, or whose devices another job uses.

    Raises:
        ClusterUnreachableError: A host does not answer, or another job uses its devices. The message names the host.
    """
    from alpa import device_mesh

    nodes = ray_jobs.at(addresses)
    missing = sorted(set(addresses) - {node.address for node in nodes})
    reasons = dict.fromkeys(missing, "Ray has given it up")
    reasons.update({node.address: reason for node, reason in ray_jobs.silent(nodes).items()})
    if reasons:
        words = ", ".join(f"{address} ({reason})" for address, reason in reasons.items())
        raise ClusterUnreachableError(
            f"Hosts of the plan do not answer: {words}.",
            "see that these hosts run and that their network links are up, or leave them out (exclude) and plan again.",
        )
    if device_mesh.global_cluster is None:  # otherwise alpa.init has reserved the devices
        ray_jobs.require_unused(nodes)


# The digests are of Alpa 0.2.3's own sources, printed by `hwaware.patching.mechanism.source_digest`.
PATCHES = (
    Patch(Target("alpa.api", "init", ("64977fba7572b3b8",)), init),
    Patch(Target("alpa.api", "shutdown", ("83def697396b2d8a",)), shutdown),
    Patch(Target("alpa.util", "update_jax_platform", ("b819d759ad844fa3",)), update_jax_platform),
    Patch(Target("alpa.device_mesh", "DeviceCluster.__init__", ("f83a2f8a9d6c3663",)), device_cluster),
)
