"""Direct the workers of a measurement, in Ray actors or in this process."""

from __future__ import annotations

import abc
import contextlib
import logging
import platform
import sys
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import MappingProxyType
from typing import Any, Callable, Collection, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from hwaware import ray_cluster, ray_jobs, ucx
from hwaware.device_places import DEVICE_RESOURCE
from hwaware.errors import ClusterUnreachableError, HwawareError, MeasurementError
from hwaware.greeting import new_secret
from hwaware.profiler import summary
from hwaware.profiler.worker import Worker, order_devices_by_bus
from hwaware.ray_cluster import Node, last_line

# Ray starts a worker process per device, and on a busy machine several at once.
START_LIMIT_S = 60.0
# Limit for fetching a finished result.
_FETCH_LIMIT_S = 30.0
_HERE = "127.0.0.1"
# Maps each host's device ids to the hosts that take part.
Choice = Callable[[Mapping[str, Sequence[Optional[str]]]], Collection[str]]
LOG = logging.getLogger("hwaware")


class Member(NamedTuple):
    """One worker of the crew.

    Attributes:
        host: Name of the worker's host.
        address: Address at which other workers reach this one.
        device_index: Index of the worker's device on the host.
        worker: Ray's handle of the actor, or the worker itself.
    """

    host: str
    address: str
    device_index: int
    worker: Any

    def __str__(self) -> str:
        return f"device {self.device_index} of host {self.host}"


class Pending(NamedTuple):
    """Work that a member has begun. `result` is Ray's reference to the result, or a Future."""

    member: Member
    method: str
    result: Any


class Failure(NamedTuple):
    """Work that a member did not do.

    Attributes:
        member: The member.
        method: The method of `Worker` that the member was to run.
        gone: True if the member's worker died or did not answer in time, and so will do no more work.
        what: The fault, as a sentence that names the member and the method.
        fix: The remedy.
    """

    member: Member
    method: str
    gone: bool
    what: str
    fix: str


class Crew(abc.ABC):
    """Workers, one per device, in the order of hosts and indices.

    Attributes:
        members: The workers.
        absent: Hosts that did not answer and so have no workers, each with a sentence that says why.
        addresses: Addresses of all hosts with devices, with or without workers.
    """

    members: Tuple[Member, ...]
    absent: Mapping[str, str] = MappingProxyType({})
    addresses: Mapping[str, str] = MappingProxyType({})

    @abc.abstractmethod
    def begin(self, member: Member, method: str, *arguments: Any) -> Pending:
        """Tell a member to run a method of `Worker`, and do not wait. A Ray actor runs one method after another."""

    @abc.abstractmethod
    def gather(self, pending: Sequence[Pending], limit_s: float) -> List[Any]:
        """Wait for all, at most `limit_s`. Return each result, or a `Failure` that says why it is missing."""

    def collect(self, pending: Sequence[Pending], limit_s: float) -> List[Any]:
        """Wait for all results, at most `limit_s`, and return them.

        Raises:
            MeasurementError: A member failed or took longer. The message names the member and its work.
        """
        results = self.gather(pending, limit_s)
        failures = [result for result in results if isinstance(result, Failure)]
        for failure in sorted(failures, key=lambda one: not one.gone):  # a member that is gone made others fail
            raise MeasurementError(failure.what, failure.fix)
        return results


@contextlib.contextmanager
def in_process() -> Iterator[Crew]:
    """Yield workers in this process, one for each device that JAX shows here."""
    order_devices_by_bus()
    try:
        import jax

        count = len(jax.local_devices())
    except (ImportError, RuntimeError) as error:  # RuntimeError: JAX finds no device of the platform it is told to use
        raise ClusterUnreachableError(
            f"JAX shows no device of this machine: {error}.",
            "install JAX (hwaware[jax] brings it), or name a platform that it has in JAX_PLATFORMS.",
        ) from error
    name = platform.node() or "localhost"
    secret = new_secret()
    way = ucx.chosen()
    workers = [Worker(_HERE, secret, index, visible_index=index, transfers=way) for index in range(count)]
    # Two threads per worker: a worker that answers messages must not keep their sender from ending the timing.
    pool = ThreadPoolExecutor(max_workers=2 * len(workers), thread_name_prefix="hwaware-worker")
    try:
        yield _LocalCrew(tuple(Member(name, _HERE, w.ready(), w) for w in workers), pool)
    finally:
        for worker in workers:
            worker.close()
        pool.shutdown(wait=False)


class _LocalCrew(Crew):
    def __init__(self, members: Tuple[Member, ...], pool: ThreadPoolExecutor) -> None:
        self.members = members
        self._pool = pool

    def begin(self, member: Member, method: str, *arguments: Any) -> Pending:
        return Pending(member, method, self._pool.submit(getattr(member.worker, method), *arguments))

    def gather(self, pending: Sequence[Pending], limit_s: float) -> List[Any]:
        wait([one.result for one in pending], timeout=limit_s)
        return [self._outcome(one, limit_s) for one in pending]

    def _outcome(self, one: Pending, limit_s: float) -> Any:
        future: Future[Any] = one.result
        if not future.done():
            return too_slow(one, limit_s)
        try:
            return future.result()
        except HwawareError as error:
            return failed(one, error.what, error.fix)
        except Exception as error:  # noqa: BLE001 - whatever a probe raises, the others go on; it is reported
            return failed(one, f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def on_ray(address: str, choose: Optional[Choice] = None) -> Iterator[Crew]:
    """Yield workers on every GPU resource of the Ray cluster at `address`, and end them all afterwards.

    Args:
        address: HOST:PORT, or "auto".
        choose: Function that returns the hosts that take part, or raises an error before any worker starts. Its
            argument maps each host to the ids of its devices. Ray knows these ids only on testbeds, else they are None.

    Raises:
        ClusterUnreachableError: No cluster answers at `address`, no host offers a device, or another job uses a device.
    """
    with ray_cluster.connect(address):
        hosts = ray_cluster.device_hosts(address)
        names = summary.host_names([(node.id, node.hostname, node.address) for node in hosts])
        taking_part = names.values() if choose is None else choose({names[node.id]: _ids(node) for node in hosts})
        chosen = [node for node in hosts if names[node.id] in taking_part]
        present, silent = ray_jobs.reachable_hosts(chosen)
        ray_jobs.require_unused(present)
        taken = ray_jobs.partly_taken(present)
        if taken:
            LOG.warning(
                "Waiting for at most %g s: a task of this program or of another Ray job uses devices of host %s.",
                START_LIMIT_S, " and host ".join(names[node.id] for node in taken),
            )  # fmt: skip
        actors: List[Any] = []
        try:
            members = _start(present, names, actors)
            absent = {names[node.id]: _absence(node, reason) for node, reason in silent.items()}
            yield RayCrew(members, absent, {names[node.id]: node.address for node in hosts})
        finally:
            ray_cluster.end_actors(actors)


def _absence(node: Node, reason: str) -> str:
    return (
        f"Ray on host {node.address} did not answer ({reason}), so the host was left out from the start. To fix: see "
        "that it runs and that its network link is up, then profile it."
    )


class RayCrew(Crew):
    """Workers that are Ray actors."""

    def __init__(self, members: Tuple[Member, ...], absent: Mapping[str, str], addresses: Mapping[str, str]) -> None:
        self.members = members
        self.absent = absent
        self.addresses = addresses

    def begin(self, member: Member, method: str, *arguments: Any) -> Pending:
        """Call the actor's method."""
        return Pending(member, method, getattr(member.worker, method).remote(*arguments))

    def gather(self, pending: Sequence[Pending], limit_s: float) -> List[Any]:
        """Wait for the actors."""
        import ray

        results = [one.result for one in pending]
        done, _ = ray.wait(results, num_returns=len(results), timeout=limit_s) if results else ([], [])
        return [self._outcome(one) if one.result in done else too_slow(one, limit_s) for one in pending]

    def _outcome(self, one: Pending) -> Any:
        import ray

        try:
            return ray.get(one.result, timeout=_FETCH_LIMIT_S)
        except ray.exceptions.RayTaskError as error:
            what = getattr(error.cause, "what", last_line(error))
            return failed(one, what, getattr(error.cause, "fix", None))
        except ray.exceptions.GetTimeoutError:
            return too_slow(one, _FETCH_LIMIT_S)
        except ray.exceptions.RayError:
            return died(one)


def _ids(node: Node) -> List[Optional[str]]:
    """Return the ids of a node's devices; None for each if Ray does not know them."""
    named = [name[len(DEVICE_RESOURCE) :] for name in node.resources if name.startswith(DEVICE_RESOURCE)]
    return [*named] or [None] * node.num_gpus


def _start(hosts: Sequence[Node], names: Mapping[str, str], actors: List[Any]) -> Tuple[Member, ...]:
    """Start an actor on each device of each host. Append each to `actors`, so that the caller can end them all."""
    placed = [(node, slot) for node in hosts for slot in range(node.num_gpus)]
    secret = new_secret()
    with _shipped_by_value():
        actors.extend(_actor(node, secret) for node, _ in placed)
        ready = [actor.ready.remote() for actor in actors]
    indices = wait_until_ready(ready, [f"device {slot} of host {names[node.id]}" for node, slot in placed])
    members = [
        Member(names[node.id], node.address, index, actor) for (node, _), index, actor in zip(placed, indices, actors)
    ]
    order = {node.id: place for place, node in enumerate(hosts)}
    by_host = sorted(zip(placed, members), key=lambda pair: (order[pair[0][0].id], pair[1].device_index))
    return tuple(member for _, member in by_host)


def _actor(node: Node, secret: bytes) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return (
        ray.remote(Worker)
        .options(
            num_cpus=0,
            num_gpus=1,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.id, soft=False),
        )
        .remote(node.address, secret, transfers=ucx.chosen())
    )


def wait_until_ready(ready: Sequence[Any], what: Sequence[str]) -> List[int]:
    """Wait until workers have started, and return the indices of their devices.

    Args:
        ready: Ray's references to the results of `Worker.ready`.
        what: Name of each worker's device.

    Raises:
        ClusterUnreachableError: A worker did not start in time.
        MeasurementError: A worker ended, or its class could not be loaded.
    """
    import ray

    _, waiting = ray.wait(list(ready), num_returns=len(ready), timeout=START_LIMIT_S)
    if waiting:
        missing = ", ".join(name for name, reference in zip(what, ready) if reference in waiting)
        raise ClusterUnreachableError(
            f"No worker started on {missing} within {START_LIMIT_S:g} s: a task of this program or of another Ray job "
            "holds its GPU resource, or its host is down.",
            "end that job (`ray list tasks` names it where Ray's dashboard runs), or stop the host's node.",
        )
    try:
        return list(ray.get(list(ready), timeout=START_LIMIT_S))
    except ray.exceptions.RayError as error:
        raise MeasurementError(
            f"A worker could not start: {last_line(error)}.",
            "check that the hosts run the same version of Python and of Ray as this one.",
        ) from error


@contextlib.contextmanager
def _shipped_by_value() -> Iterator[None]:
    """Let Ray ship the worker's code, not its name, so that hosts need no hwaware and never run another version.

    Use this only to create the actors, so that other users of this process keep Ray's own way. Arguments and results
    have types of the standard library, because a host without hwaware could not read other types.
    """
    from ray import cloudpickle

    beside = ("errors", "greeting", "host_load", "reference_kernel", "transport")
    names = ("hwaware.profiler", *(f"hwaware.{name}" for name in beside))
    modules = [sys.modules[name] for name in names]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def too_slow(one: Pending, limit_s: float) -> Failure:
    """Return the failure of work that did not end within `limit_s`."""
    return Failure(
        one.member, one.method, True, f"Not done within {limit_s:g} s: {one.method} on {one.member}.",
        "check that the host is alive, that others reach it on any port, and that no other job keeps it busy.",
    )  # fmt: skip


def died(one: Pending) -> Failure:
    """Return the failure of a worker that has died."""
    return Failure(
        one.member, one.method, True, f"The worker of {one.member} died during {one.method}.",
        "check the host (`ray status`, its memory), then profile again.",
    )  # fmt: skip


def failed(one: Pending, what: str, fix: Optional[str] = None) -> Failure:
    """Return the failure of work that raised an exception."""
    return Failure(
        one.member, one.method, False, f"{one.method} on {one.member} failed: {what}",
        fix or "see the worker's log (ray logs) for the whole error.",
    )  # fmt: skip
