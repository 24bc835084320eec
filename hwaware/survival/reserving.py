"""Reserve the devices of a host that joins a running training, and give them back."""

from __future__ import annotations

from typing import Any

from hwaware import ray_jobs
from hwaware.ray_cluster import Node

_SOON_S = 5


def reserved_later(node: Node) -> Any:
    """Reserve the devices of a host that joins, and return the placement group.

    If the program lost the host before, Ray may give the devices to the reservation that it had then.

    Raises:
        ClusterUnreachableError: Another job uses the devices.
    """
    import ray

    ray_jobs.require_unused([node])
    bundle = {"GPU": node.num_gpus, f"node:{node.address}": 0.001}
    group = ray.util.placement_group([bundle], strategy="SPREAD")
    try:
        found = {} if group.wait(_SOON_S) else ray_jobs.using([node])
        if found:
            raise ray_jobs.in_use(found)
    except BaseException:
        give_back(group)
        raise
    return group


def give_back(group: Any) -> None:
    """Give back what `reserved_later` has reserved; do nothing for None."""
    import ray
    from ray.util.placement_group import remove_placement_group

    if group is not None and ray.is_initialized():
        remove_placement_group(group)
