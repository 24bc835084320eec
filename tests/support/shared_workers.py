"""Workers whose processes outlive a test: importing JAX and Alpa takes most of the time of a small training.

A process that ran one program takes the place of the next program's worker of that kind. A worker that failed, does
not answer, or belongs to a stage of several workers is ended for good.
"""

import contextlib
import gc

import ray
from ray import cloudpickle

from hwaware.runtime.worker import CONTROL

RETIRE_LIMIT_S = 20.0


def shared(kind):
    """Return a class of workers of this kind that can take the place of one program's worker after another's."""

    class SharedWorker(kind):
        """A worker that outlives programs.

        Args:
            devices: How many devices of its host it uses.
        """

        def __init__(self, devices):
            from hwaware.patching.stock_jax import prepare_worker
            from hwaware.runtime import mesh

            mesh.prepare_environment(mesh.Place(0, "", tuple(range(devices))))
            prepare_worker()

        def take(self, *arguments):
            """Become another worker, with the arguments of a HostWorker."""
            kind.__init__(self, *arguments)

        def retire(self):
            """Forget the program; return False where its worker failed, so that nobody uses what is left."""
            from alpa.timer import timers, tracer

            failure = self._failure
            self.shutdown()
            self._outside_share.close()
            arrays = list(self.client.live_arrays())
            vars(self).clear()
            gc.collect()
            for array in arrays:
                if not array.is_deleted():
                    array.delete()
            timers.timers.clear()
            tracer.events.clear()
            return failure is None

    return SharedWorker


cloudpickle.register_pickle_by_value(__import__(__name__))


class Pool:
    """Idle workers by their kind and number of devices, and what it needs to hand them out in place of new ones.

    Args:
        start: Starts a worker of its own at a place, as `hwaware.patching.leaves.start_worker`.
    """

    def __init__(self, start):
        self.is_on = True
        self._start = start
        self._idle = {}
        self._taken = {}
        self._kill = ray.kill

    def started(self, place, kind):
        """Start a worker in place of `leaves.start_worker`."""
        from hwaware.patching.leaves import preparation, program_identity, program_secret
        from hwaware.runtime import settings

        if place.workers > 1 or not self.is_on:
            return self._start(place, kind)
        like = kind, len(place.devices)
        idle = self._idle.setdefault(like, [])
        worker = idle.pop() if idle else self._new(place.address, *like)
        self._taken[worker._actor_id] = like
        worker.take.remote(place, preparation(), settings.current(), program_secret(), program_identity())
        return worker

    def _new(self, address, kind, devices):
        node = {f"node:{address}": 0.001}
        made = ray.remote(num_cpus=0, resources=node, concurrency_groups={CONTROL: 1})(shared(kind))
        return made.remote(devices)

    def kill(self, actor, **options):
        """Keep a worker that is well; end every other actor, as `ray.kill`."""
        like = self._taken.pop(actor._actor_id, None)
        if like is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                if ray.get(actor.retire.remote(), timeout=RETIRE_LIMIT_S):
                    self._idle[like].append(actor)
                    return
        self._kill(actor, **options)
