"""Start workers before their places are known: they load JAX and Alpa while the driver still traces the program.

A worker needs seconds for that, longer on a slow host. The hosts of the plan take their workers when the program is
launched; then the others end.
"""

from __future__ import annotations

import threading
from typing import Any, Dict, Iterable, Optional, Tuple

from hwaware.ray_cluster import end_actors

# (Ray's job, address of the host) -> (class of the worker, its actor).
_waiting: Dict[Tuple[str, str], Tuple[Any, Any]] = {}
_lock = threading.Lock()


def start(addresses: Iterable[str]) -> None:
    """Start a worker without a place on each of these hosts, and end those that still wait."""
    end()
    kind = worker_class()
    for address in addresses:
        _waiting[_job(), address] = kind, new_worker(address, kind)


def worker_class() -> Any:
    """Return the class of the program's workers."""
    from hwaware.patching import rescue
    from hwaware.runtime.worker import HostWorker

    rescuer = rescue.current()
    return HostWorker if rescuer is None else rescuer.worker_class


def new_worker(address: str, kind: Any) -> Any:
    """Start the process of a worker, and return its Ray actor at once; it takes a place later.

    Args:
        address: Its host.
        kind: HostWorker, or a class made from it.
    """
    import ray

    from hwaware.patching.stock_jax import prepare_worker
    from hwaware.runtime.worker import CONTROL

    node = {f"node:{address}": 0.001}
    return ray.remote(num_cpus=0, resources=node, concurrency_groups={CONTROL: 1})(kind).remote(prepare_worker)


def taken(address: str, kind: Any) -> Optional[Any]:
    """Return the worker of this class that waits on a host, for the caller to keep; None if none waits there."""
    with _lock:
        if _waiting.get((_job(), address), (None,))[0] is not kind:
            return None
        return _waiting.pop((_job(), address))[1]


def end() -> None:
    """End the workers that still wait."""
    with _lock:
        job = _job()
        left = [actor for (owner, _), (_, actor) in _waiting.items() if owner == job]
        _waiting.clear()
    end_actors(left)


def _job() -> str:
    """Return Ray's job; the workers of an earlier connection have ended with it."""
    import ray

    return str(ray.get_runtime_context().get_job_id())
