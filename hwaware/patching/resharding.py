"""Send arrays between meshes: choose who sends what to whom, and connect the workers."""

from __future__ import annotations

from typing import Any, Callable, List, Sequence

import numpy

from hwaware.ray_cluster import fetched

_GROUP_LIMIT_S = 60.0
_CONNECTING = "Connecting the workers of the stages"


def compile_send_recv_tasks(original: Any) -> Callable[..., None]:
    """Wrap Alpa's function: take each tile that a device receives once.

    Alpa 0.2.3 goes through an order with an entry for each part of a tile (`generate_naive_order`). For each entry it
    sends all parts. So a stage of n replicas sends everything n times to a next stage of one device. Only the last copy
    counts.
    """

    def replacement(self: Any) -> None:
        strategy = self.task_spec.strategy
        every = strategy.order
        strategy.order = list({(tile, receiver): (tile, receiver, 0) for tile, receiver, _ in every}.values())
        try:
            original(self)
        finally:
            strategy.order = every

    return replacement


def tiles(original: Any) -> property:
    """Wrap Alpa's property: give a scalar one tile, on all devices of its stage. Alpa counts 1.0 tiles, and stops."""

    def replacement(self: Any) -> Any:
        from alpa.pipeline_parallel.resharding_tensor import Tile

        if self.tensor_rank > 0:
            return original.fget(self)
        if self._tiles is None:
            devices = range(self.device_mesh.num_devices)
            names = [self.device_mesh.device_strs[device] for device in devices]
            self._tiles = numpy.empty((), dtype=object)
            self._tiles[()] = Tile([], 0, list(devices), names, [])
        return self._tiles

    return property(replacement)


def instantiate_now(_original: Any) -> Callable[..., Any]:
    """Replace NCCL: let every worker of the group learn the mailboxes of the others."""

    def replacement(self: Any) -> None:
        if not self.instantiated:
            _joined(self.mesh_workers, lambda worker, *where: worker.join_group.remote(self.group_name, *where))
            self.instantiated = True

    return replacement


def create_cross_mesh_communicators(_original: Any) -> Callable[..., Any]:
    """Replace an NCCL group over meshes: let the meshes' workers learn each other's mailboxes."""

    def replacement(meshes: Any, key: bytes) -> List[Any]:
        workers = [worker for mesh in meshes for worker in mesh.workers]
        ranks = iter(range(len(workers)))
        by_mesh = [[next(ranks) for _ in mesh.workers] for mesh in meshes]

        def join(worker: Any, rank: int, addresses: List[Any]) -> Any:
            return worker.join_reduction.remote(f"reduce {key.decode()}", rank, by_mesh, addresses)

        return _joined(workers, join)

    return replacement


def _joined(workers: Sequence[Any], join: Callable[[Any, int, List[Any]], Any]) -> List[Any]:
    """Let each worker join a group, given its rank and the mailboxes of all."""
    addresses = fetched([worker.mailbox_address.remote() for worker in workers], _GROUP_LIMIT_S, _CONNECTING)
    joins = [join(worker, rank, addresses) for rank, worker in enumerate(workers)]
    fetched(joins, _GROUP_LIMIT_S, _CONNECTING)
    return joins


def destroy(_original: Any) -> Callable[..., Any]:
    """Replace the destruction of NCCL groups: only forget the group. Its connections end with the workers."""

    def replacement(self: Any) -> None:
        self.instantiated = False

    return replacement


def create_resharding_communicators(_original: Any) -> Callable[..., Any]:
    """Replace NCCL communicators by nothing, because connections open with the first message."""

    def replacement(self: Any) -> None:
        del self

    return replacement
