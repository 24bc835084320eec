"""The workers of a measurement, and how they are told what to do: the same for Ray actors and for this process."""

from __future__ import annotations

import contextlib
import platform
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Iterator, List, NamedTuple, Optional, Protocol, Sequence, Tuple

from hwaware import ray_cluster
from hwaware.errors import ClusterUnreachableError, HwawareError, MeasurementError
from hwaware.profiler import summary
from hwaware.profiler.worker import Worker
from hwaware.ray_cluster import Node

# Ray starts a worker process per device, and on a busy machine several at once.
START_LIMIT_S = 60.0


class Member(NamedTuple):
    """One worker of the crew.

    Attributes:
        host: Name of its host.
        address: Where other workers reach it.
        device_index: Its device's index on the host.
        worker: Ray's handle of the actor, or the worker itself.
    """

    host: str
    address: str
    device_index: int
    worker: Any

    def __str__(self) -> str:
        return f"device {self.device_index} of host {self.host}"


class Pending(NamedTuple):
    """Work that a member was told to do and has not handed in yet."""

    member: Member
    method: str
    result: Any


class Crew(Protocol):
    """Workers, one per device, in the order of hosts and indices."""

    @property
    def members(self) -> Tuple[Member, ...]:
        """The workers."""

    def begin(self, member: Member, method: str, *arguments: Any) -> Pending:
        """Tell a member to run that method of `Worker`, and do not wait. A member does one thing after another."""

    def collect(self, pending: Sequence[Pending], limit_s: float) -> List[Any]:
        """Wait for all results, at most `limit_s`.

        Raises:
            MeasurementError: A member failed, or took longer; the message names it and its work.
        """


@contextlib.contextmanager
def in_process() -> Iterator[Crew]:
    """Workers in this process, one for each device that JAX shows here."""
    import jax

    name = platform.node() or "localhost"
    workers = [Worker(index, visible_index=index) for index in range(len(jax.local_devices()))]
    # Two threads each, because a worker that answers another's messages must not keep it from ending the timing.
    pool = ThreadPoolExecutor(max_workers=2 * len(workers), thread_name_prefix="hwaware-worker")
    try:
        yield _LocalCrew(tuple(Member(name, "127.0.0.1", w.ready(), w) for w in workers), pool)
    finally:
        for worker in workers:
            worker.close()
        pool.shutdown(wait=False)


class _LocalCrew:
    def __init__(self, members: Tuple[Member, ...], pool: ThreadPoolExecutor) -> None:
        self.members = members
        self._pool = pool

    def begin(self, member: Member, method: str, *arguments: Any) -> Pending:
        return Pending(member, method, self._pool.submit(getattr(member.worker, method), *arguments))

    def collect(self, pending: Sequence[Pending], limit_s: float) -> List[Any]:
        return [self._result(one, limit_s) for one in pending]

    def _result(self, one: Pending, limit_s: float) -> Any:
        future: Future[Any] = one.result
        try:
            return future.result(timeout=limit_s)
        except FutureTimeoutError as error:
            raise _too_slow([one], limit_s) from error


@contextlib.contextmanager
def on_ray(address: str) -> Iterator[Crew]:
    """Workers on every GPU resource of the Ray cluster at `address`; none is left behind.

    Raises:
        ClusterUnreachableError: Nobody answers there, no host offers a device, or another job holds one.
    """
    with ray_cluster.connect(address):
        hosts = [node for node in ray_cluster.nodes() if node.num_gpus]
        if not hosts:
            raise ClusterUnreachableError(
                f"No host of the Ray cluster at {address} offers a device: none has the resource GPU.",
                "start the training hosts with `ray start --address=... --num-gpus=N` (on hosts without GPUs, N shares "
                "of the processor stand for devices).",
            )
        actors: List[Any] = []
        try:
            yield _RayCrew(_start(hosts, actors))
        finally:
            _kill(actors)


class _RayCrew:
    def __init__(self, members: Tuple[Member, ...]) -> None:
        self.members = members

    def begin(self, member: Member, method: str, *arguments: Any) -> Pending:
        return Pending(member, method, getattr(member.worker, method).remote(*arguments))

    def collect(self, pending: Sequence[Pending], limit_s: float) -> List[Any]:
        import ray

        try:
            # In one wait: whichever member fails first ends it, and the others' limits do not add up.
            return list(ray.get([one.result for one in pending], timeout=limit_s))
        except ray.exceptions.GetTimeoutError as error:
            done, _ = ray.wait([one.result for one in pending], num_returns=len(pending), timeout=0)
            raise _too_slow([one for one in pending if one.result not in done], limit_s) from error
        except ray.exceptions.RayError as error:
            raise _failed(pending, error) from error


def _start(hosts: Sequence[Node], actors: List[Any]) -> Tuple[Member, ...]:
    """An actor on each device of each host; also appended to `actors`, so that they end whatever happens."""
    names = summary.host_names([(node.id, node.hostname, node.address) for node in hosts])
    placed = [(node, slot) for node in hosts for slot in range(node.num_gpus)]
    with _shipped_by_value():
        actors.extend(_actor(node) for node, _ in placed)
        ready = [actor.ready.remote() for actor in actors]
    indices = _wait_until_ready(ready, [f"device {slot} of host {names[node.id]}" for node, slot in placed])
    members = [
        Member(names[node.id], node.address, index, actor) for (node, _), index, actor in zip(placed, indices, actors)
    ]
    order = {node.id: place for place, node in enumerate(hosts)}
    by_host = sorted(zip(placed, members), key=lambda pair: (order[pair[0][0].id], pair[1].device_index))
    return tuple(member for _, member in by_host)


def _actor(node: Node) -> Any:
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
        .remote()
    )


def _wait_until_ready(ready: Sequence[Any], what: Sequence[str]) -> List[int]:
    import ray

    _, waiting = ray.wait(list(ready), num_returns=len(ready), timeout=START_LIMIT_S)
    if waiting:
        missing = ", ".join(name for name, reference in zip(what, ready) if reference in waiting)
        raise ClusterUnreachableError(
            f"No worker started on {missing} within {START_LIMIT_S:g} s: its GPU resource is held by another job, "
            "or its host is down.",
            "see `ray status` for who holds it; end that job, or stop the host's node.",
        )
    try:
        return list(ray.get(list(ready), timeout=START_LIMIT_S))
    except ray.exceptions.RayError as error:
        raise MeasurementError(
            f"A worker could not start: {_innermost_line(error)}.",
            "check that the hosts run the same version of Python and of Ray as this one.",
        ) from error


@contextlib.contextmanager
def _shipped_by_value() -> Iterator[None]:
    """Send the worker's code along instead of its name: hosts need no hwaware, and never run another version of it.

    Only while the actors are created: other users of this process keep Ray's own way. Arguments and results are of
    the standard library's types, because a host without hwaware could not read others.
    """
    from ray import cloudpickle

    names = ("hwaware.profiler", "hwaware.errors", "hwaware.reference_kernel", "hwaware.transport")
    modules = [sys.modules[name] for name in names]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _kill(actors: Sequence[Any]) -> None:
    import ray

    for actor in actors:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):  # it may have died before
            ray.kill(actor, no_restart=True)


def _too_slow(pending: Sequence[Pending], limit_s: float) -> MeasurementError:
    what = ", ".join(sorted({f"{one.method} on {one.member}" for one in pending}))
    return MeasurementError(
        f"Not done within {limit_s:g} s: {what}.",
        "check that these hosts are alive, reach each other on any port, and that no other job keeps them busy.",
    )


def _failed(pending: Sequence[Pending], error: Exception) -> HwawareError:
    """One message for an exception that came from a worker, or for a worker that died."""
    import ray

    for one in pending:
        with contextlib.suppress(ray.exceptions.GetTimeoutError):
            try:
                ray.get(one.result, timeout=0.01)
            except ray.exceptions.RayTaskError as found:
                fix = getattr(found.cause, "fix", "see the worker's log (ray logs) for the whole error.")
                what = getattr(found.cause, "what", _innermost_line(found))
                return MeasurementError(f"{one.method} on {one.member} failed: {what}", fix)
            except ray.exceptions.RayError:
                return MeasurementError(
                    f"The worker of {one.member} died during {one.method}.",
                    "check the host (`ray status`, its memory), then profile again.",
                )
    return MeasurementError(f"A worker failed: {_innermost_line(error)}.", "profile again; see `ray status`.")


def _innermost_line(error: BaseException) -> str:
    """The last line of Ray's report, where the worker's own exception stands."""
    lines: Optional[List[str]] = str(error).strip().splitlines()
    return (lines[-1] if lines else type(error).__name__).rstrip(".")
