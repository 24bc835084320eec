"""Send a step's batch to the workers microbatch by microbatch: the first stage begins before all samples are there.

Alpa sends each array of a batch as a whole. A worker begins its step once it has all its arrays, and the other stages
wait for it.
"""

from __future__ import annotations

from typing import Any, Callable, List, Sequence, Tuple

import numpy

from hwaware.patching import failures
from hwaware.runtime.feeding import Expected

# Attributes of Alpa's meshes: what sends samples to each worker, and the workers' answers to the newest `expect`.
_FEEDS, _EXPECTING = "hwaware_feeds", "hwaware_expecting"
#: Least bytes of an array's part of a microbatch that is sent by itself. A message takes 0.2 ms of a worker's core.
LEAST_BYTES: float = 1 << 16


def feed(mesh: Any, feeds: Sequence[Any]) -> None:
    """Remember what sends samples to the workers of a launched mesh, in their order."""
    setattr(mesh, _FEEDS, tuple(feeds))
    setattr(mesh, _EXPECTING, [])


def shard_args_to_bufs(original: Any) -> Callable[..., List[Any]]:
    """Wrap Alpa's function: workers expect the samples, and get these microbatch by microbatch.

    Arrays whose part of a microbatch is small go with Alpa's own call.
    """

    def replacement(
        self: Any, shard_indices: Any, donated_invars: Any, batch_invars: Any, num_micro_batches: int, args: Any
    ) -> List[Any]:
        args = [on_mesh(arg, self) for arg in args]
        fed = [
            place
            for place, (arg, is_batch) in enumerate(zip(args, batch_invars))
            if is_batch and num_micro_batches > 1 and _is_fed(arg, num_micro_batches)
        ]
        rest = [place for place in range(len(args)) if place not in fed]
        given = ([values[place] for place in rest] for values in (shard_indices, donated_invars, batch_invars))
        sent = dict(zip(rest, original(self, *given, num_micro_batches, [args[place] for place in rest])))
        if fed:
            arrays = [(numpy.asarray(args[place]), shard_indices[place]) for place in fed]
            sent.update(zip(fed, _fed(self, arrays, num_micro_batches)))
        return [sent[place] for place in range(len(args))]

    return replacement


def on_mesh(arg: Any, mesh: Any) -> Any:
    """Return the copy of an array that a mesh has, or that of another mesh; Alpa fails if a mesh has no copy."""
    from alpa.device_mesh import ReplicatedDistributedArray

    if not isinstance(arg, ReplicatedDistributedArray):
        return arg
    return arg.get_replica_on_mesh(mesh) if arg.is_replicated_on_mesh(mesh) else arg.replica


def _is_fed(arg: Any, num_microbatches: int) -> bool:
    import jax
    from alpa.global_env import global_config

    is_array = isinstance(arg, (numpy.ndarray, jax.Array)) and not global_config.use_dummy_value_for_benchmarking
    return is_array and arg.nbytes >= num_microbatches * LEAST_BYTES


def catch_up(group: Any) -> None:
    """Wait until all workers of a group are at the call before: samples of more calls would fill the memory.

    Raises:
        WorkerFailedError: A worker failed.
    """
    calls = [(mesh, call) for mesh in group for call in vars(mesh).get(_EXPECTING, ())]
    failures.results_of(calls, "The step before the newest", None)


def _fed(mesh: Any, arrays: Sequence[Tuple[Any, Any]], num_microbatches: int) -> List[List[Any]]:
    """Send arrays, each with the indices of its parts (device by device), and return Alpa's references to the parts."""
    from alpa.device_mesh import create_remote_array_refs
    from jax.dtypes import canonicalize_dtype

    width = mesh.num_devices_per_host
    # Copies: the program may write its next batch into the same array.
    copies = [
        [numpy.array(array[index], canonicalize_dtype(array.dtype)) for index in indices] for array, indices in arrays
    ]
    made = [create_remote_array_refs(mesh, num_microbatches) for _ in arrays]
    calls: List[Any] = []
    for host, (worker, one) in enumerate(zip(mesh.workers, getattr(mesh, _FEEDS))):
        expected: List[Expected] = []
        messages: List[Tuple[str, Any]] = []
        for microbatch in range(num_microbatches):
            for parts, (_, uuids) in zip(copies, made):
                own = parts[host * width * num_microbatches + microbatch :: num_microbatches][:width]
                keys = tuple(map(one.numbered, range(width)))
                expected.append(Expected(uuids[microbatch], keys, own[0].shape, own[0].dtype))
                messages += zip(keys, own)
        calls.append(worker.expect.remote(expected))
        one.send(messages)
    setattr(mesh, _EXPECTING, calls)
    return [refs for refs, _ in made]
