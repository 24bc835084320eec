"""Arrays between meshes: who sends what to whom, and how they are connected."""

from __future__ import annotations

from typing import Any, Callable, List, Sequence

import numpy

from hwaware.ray_cluster import fetched

_GROUP_LIMIT_S = 60.0
_CONNECTING = "Connecting the workers of the stages"


def compile_send_recv_tasks(original: Any) -> Callable[..., None]:
    """Alpa's own, once for each tile that a device receives.

    0.2.3 goes through an order with an entry for each part of a tile (`generate_naive_order`), and sends all parts for
    each entry: a stage of n replicas hands on n times what the next stage of one device needs, and the last one counts.
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
    """Alpa's own; the one tile of a scalar, on all devices of its stage, for which Alpa counts 1.0 tiles and stops."""

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
    """Instead of NCCL: every worker of the group learns the mailboxes of the others."""

    def replacement(self: Any) -> None:
        if not self.instantiated:
            _joined(self.mesh_workers, lambda worker, *where: worker.join_group.remote(self.group_name, *where))
            self.instantiated = True

    return replacement


def create_cross_mesh_communicators(_original: Any) -> Callable[..., Any]:
    """Instead of an NCCL group over meshes: their workers learn each other's mailboxes."""

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
    """Instead of destroying NCCL groups: the connections end with their workers."""

    def replacement(self: Any) -> None:
        self.instantiated = False

    return replacement


def create_resharding_communicators(_original: Any) -> Callable[..., Any]:
    """Instead of NCCL communicators: nothing, connections open with the first message."""

    def replacement(self: Any) -> None:
        del self

    return replacement
