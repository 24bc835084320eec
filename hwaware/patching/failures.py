"""Wait for Alpa's workers under hwaware's watch. Each wait ends, and a failure says who failed, where and why."""

from __future__ import annotations

import atexit
import logging
import weakref
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

from hwaware import ray_cluster
from hwaware.errors import HwawareError, UnusableInputError, WorkerFailedError
from hwaware.patching import rescue
from hwaware.patching.mechanism import Patch, Target

# Attributes of Alpa's meshes: the members that were launched, and the watch over all members of their program.
_MEMBERS, _WATCH = "hwaware_members", "hwaware_watch"
# A worker finishes its microbatch in less time; a worker that is stuck would never end.
_END_LIMIT_S = 60.0
_CALL_AGAIN = (
    "read and save arrays before alpa.shutdown(); call the function that alpa.parallelize returned, not an executable "
    "from before alpa.shutdown()."
)
LOG = logging.getLogger("hwaware")
# Not empty once the program ends.
_ENDS: List[bool] = []
atexit.register(_ENDS.append, True)
# The launched mesh groups: Alpa itself knows only the newest one.
_groups: Any = weakref.WeakSet()


def put_under_watch(mesh: Any, members: Sequence[Any]) -> None:
    """Remember the launched workers of a mesh for `watch_over`."""
    setattr(mesh, _MEMBERS, members)


def watch_over(group: Any) -> None:
    """Watch over all workers of a launched mesh group."""
    from hwaware.runtime import settings
    from hwaware.runtime.watch import Watch

    members = [member for mesh in group.meshes for member in vars(mesh).pop(_MEMBERS, [])]
    rescuer = rescue.current()
    make = Watch if rescuer is None else rescuer.watch
    watch = make(members, settings.current().step_limit_s, ray_cluster.head_address())
    for mesh in [group, *group.meshes]:
        setattr(mesh, _WATCH, watch)
    _groups.add(group)
    if rescuer is not None:
        rescuer.launched(group, watch)


def wait_for(mesh: Any, what: str) -> None:
    """Wait until the workers of a mesh, or of a group of meshes, have done all they were asked to.

    Raises:
        WorkerFailedError: One of the program's workers failed.
    """
    ask_all(mesh, "sync", what)


def results_of(calls: Sequence[Tuple[Any, Any]], what: str, limit_s: Optional[float]) -> List[Any]:
    """Wait for calls of workers, and return their values.

    Args:
        calls: (mesh, Ray reference) of each call. The meshes may be of several programs.
        what: The name of the awaited work in errors.
        limit_s: The limit on the wait [s]; None for the limit of a step.

    Raises:
        WorkerFailedError: A worker of one of the programs failed.
    """
    watches = {id(vars(mesh)[_WATCH]): vars(mesh)[_WATCH] for mesh, _ in calls}
    values: Dict[int, Any] = {}
    for number, watch in watches.items():
        places = [place for place, (mesh, _) in enumerate(calls) if id(vars(mesh)[_WATCH]) == number]
        values.update(zip(places, watch.wait([calls[place][1] for place in places], what, limit_s)))
    return [values[place] for place in range(len(calls))]


def ask_all(mesh: Any, method: str, what: str) -> None:
    """Call a method of all workers of a mesh or of a group of meshes, and wait for its end.

    Raises:
        WorkerFailedError: A worker failed.
    """
    workers = [worker for one in getattr(mesh, "meshes", [mesh]) for worker in one.workers or ()]
    vars(mesh)[_WATCH].wait([getattr(worker, method).remote() for worker in workers], what)


def waits(what: str) -> Callable[[Any], Callable[..., None]]:
    """Return what replaces a wait of Alpa: a wait for all work of the workers of a mesh or group.

    Workers compute in order, and each waits for all of its devices.
    """

    def make(_original: Any) -> Callable[..., None]:
        def replacement(self: Any, *_: Any, **__: Any) -> None:
            rescue.retried(lambda: wait_for(rescue.now(self), what))

        return replacement

    return make


def block_until_ready(_original: Any) -> Callable[..., Any]:
    """Replace the array's method: wait for its workers, and return the array. Alpa's own asks for a missing attribute.

    `jax.block_until_ready` ignores such errors, and would not wait.
    """

    def replacement(self: Any) -> Any:
        require_kept(self.remote_ref)
        self.device_mesh.block_until_ready_remote_buffers(())
        return self

    return replacement


def check_alive(_original: Any) -> Callable[[Any], None]:
    """Replace Alpa's look after each step, where `pipeline_check_alive` is set: wait for the step under watch."""
    return lambda self: wait_for(self.mesh_group, "A step")


def require_kept(reference: Any) -> None:
    """Refuse an array that the workers do not have any more: they would fail on it.

    Raises:
        UnusableInputError: A step has taken the array's memory.
    """
    if reference is None or reference.is_deleted_on_workers:
        raise UnusableInputError(
            "An array of the workers was deleted, or donated to a step, which took its memory.",
            "use what the newest step returned in its place, or leave its argument out of donate_argnums.",
        )


def require_workers(mesh: Any, fix: str = _CALL_AGAIN) -> None:
    """Refuse a mesh, or a group of meshes, whose workers have ended; `fix` says what to do.

    Raises:
        UnusableInputError: The program itself has ended them.
        WorkerFailedError: A failure has ended the program.
    """
    if any(one.workers is None for one in getattr(mesh, "meshes", [mesh])):
        run = rescue.run_of(mesh)
        if run is not None and run.ended is not None:
            raise run.ended
        raise UnusableInputError("The workers of this array or function have ended.", fix)


def end_program(group: Any, failure: WorkerFailedError) -> None:
    """End all workers of a mesh group: its program cannot go on, not even by a recovery."""
    run = rescue.run_of(group)
    if run is not None:
        run.end(failure)
    vars(group)[_WATCH].give_up(failure)


def get_remote_buffers(original: Any) -> Callable[..., Any]:
    """Fetch arrays under watch. Alpa's own function never returns if a worker fails meanwhile."""

    def replacement(
        self: Any, ary_refs: Any, host_local_ids: Any = None, batching: bool = False, return_ray_ref: bool = False
    ) -> Any:
        are_many = isinstance(ary_refs, Iterable)
        references = list(ary_refs) if are_many else [ary_refs]
        for reference in references:
            require_kept(reference)
        wait_for(self, "A step whose results are asked for")
        require_workers(self)
        if return_ray_ref:
            return original(self, references if are_many else ary_refs, host_local_ids, batching, return_ray_ref)
        if are_many:
            return _fetched(self, references, host_local_ids)
        return _fetched(self, references, [host_local_ids])[0]

    return replacement


def _fetched(mesh: Any, arrays: Sequence[Any], places: Sequence[Sequence[Tuple[int, int]]]) -> List[List[Any]]:
    """Fetch the parts of arrays, with one call for each worker.

    Args:
        mesh: The mesh that has the arrays.
        arrays: Alpa's references.
        places: (worker, device) of each part of each array.
    """
    calls = []
    for host, worker in enumerate(mesh.workers):
        devices = [[device for each, device in of_array if each == host] for of_array in places]
        calls.append(worker.get_buffers.remote([array.uuid for array in arrays], devices))
    parts = [map(iter, of_host) for of_host in vars(mesh)[_WATCH].wait(calls, "Fetching the results of a step")]
    by_array = zip(*parts)
    return [[next(of_hosts[host]) for host, _ in of_array] for of_array, of_hosts in zip(places, by_array)]


def shutdown(original: Any) -> Callable[..., Any]:
    """Wrap Alpa's function: wait only a while for workers to end. hwaware has already ended workers after a failure."""

    def replacement(self: Any, forced: bool = False) -> None:
        import ray

        watch, run = vars(self).get(_WATCH), rescue.run_of(self)
        if run is not None:
            run.close()
        if watch is not None:
            watch.close()  # from here on, it is no failure if a worker ends
            if not forced and self.launched and watch.failure is None:
                _end(watch, self.workers)
            forced = True
        if ray.is_initialized():
            original(self, forced)

    return replacement


def shut_down_groups(virtual_mesh: Any = None) -> None:
    """End the workers of all functions that were compiled for a virtual mesh; without one, of all functions."""
    for group in [one for one in _groups if virtual_mesh in (None, one.parent)]:
        group.shutdown()
        group.parent.launched_physical_mesh_group = None
        _groups.discard(group)


def while_ray_runs(original: Any) -> Callable[..., Any]:
    """Wrap Alpa's function: do nothing once Ray has ended.

    Arrays and executables outlive Ray if a program does not call `alpa.shutdown`. Their calls would start another Ray
    or look for one without an end. After Ray's head was lost, `alpa.shutdown` has no placement group to remove.
    """
    import ray

    ends, is_initialized = _ENDS, ray.is_initialized  # looked up now: at its end, Python empties modules

    def replacement(self: Any, *args: Any) -> None:
        if not ends and is_initialized():
            original(self, *args)

    return replacement


def _end(watch: Any, workers: Any) -> None:
    """Let workers end by themselves, for at most a minute. Nobody will ask for what they still compute."""
    try:
        watch.wait([worker.shutdown.remote() for worker in workers], "The end of a worker", _END_LIMIT_S)
    except HwawareError as error:  # a worker does not end, or was lost since the last wait
        LOG.warning("A worker did not end by itself, and is ended: %s", error.what)


_MESH = "alpa.device_mesh"
# The digests are of Alpa 0.2.3's own sources, printed by `hwaware.patching.mechanism.source_digest`.
PATCHES = (
    Patch(Target(_MESH, "PhysicalDeviceMeshGroup.sync_workers", ("511b81b1176ad5b9",)), waits("A step")),
    Patch(Target(_MESH, "DistributedPhysicalDeviceMesh.sync_workers", ("24dcbee799581a59",)), waits("A step")),
    Patch(Target(_MESH, "DistributedPhysicalDeviceMesh.get_remote_buffers", ("0f912bed79a7f7b7",)), get_remote_buffers),
    Patch(
        Target(_MESH, "DistributedPhysicalDeviceMesh.block_until_ready_remote_buffers", ("6fcac90b7ae8a699",)),
        waits("A step whose results are waited for"),
    ),
    Patch(Target(_MESH, "DistributedArray.block_until_ready", ("1aa54c5804e84258",)), block_until_ready),
    Patch(Target(_MESH, "DistributedPhysicalDeviceMesh.shutdown", ("403c41588f88a716",)), shutdown),
    Patch(Target(_MESH, "DistributedPhysicalDeviceMesh.delete_remote_buffers", ("0f31588bf4ddd0a2",)), while_ray_runs),
    Patch(
        Target(_MESH, "DistributedPhysicalDeviceMesh.delete_remote_executable", ("e35fec4a3a0d3b34",)), while_ray_runs
    ),
    Patch(Target(_MESH, "DeviceCluster.delete_placement_group", ("dd01eab4df9f23c4",)), while_ray_runs),
)
