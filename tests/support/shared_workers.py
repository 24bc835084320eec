"""Workers whose processes outlive a test: importing JAX and Alpa takes most of the time of a small training.

A process that ran one program takes the next program's place on the same number of devices. A worker that failed, does
not answer, or belongs to a stage of several workers is ended for good.
"""

import contextlib
import gc

import ray
from ray import cloudpickle

from hwaware.runtime.worker import CONTROL, HostWorker

RETIRE_LIMIT_S = 20.0


class SharedWorker(HostWorker):
    """A HostWorker that can take the place of one program's worker after another's."""

    def __init__(self, devices):
        from hwaware.patching.stock_jax import prepare_worker
        from hwaware.runtime import mesh

        mesh.prepare_environment(mesh.Place(0, "", tuple(range(devices))))
        prepare_worker()

    def take(self, *arguments):
        """Become another worker, with the arguments of a HostWorker."""
        HostWorker.__init__(self, *arguments)

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


cloudpickle.register_pickle_by_value(__import__(__name__))


class Pool:
    """Idle workers by their number of devices, and what it needs to hand them out in place of new ones.

    Args:
        start: Starts a worker of its own for a mesh, `hwaware.patching.leaves`.
        place: Tells a worker's place.
    """

    def __init__(self, start, place):
        self.is_on = True
        self._start, self._place = start, place
        self._idle = {}
        self._taken = {}
        self._kill = ray.kill

    def started(self, mesh, rank):
        """Start a worker in place of `leaves._started`."""
        from hwaware.patching.leaves import program_identity, program_secret
        from hwaware.patching.stock_jax import prepare_worker
        from hwaware.runtime import settings

        place = self._place(mesh, rank)
        if place.workers > 1 or not self.is_on:
            return self._start(mesh, rank)
        devices = len(place.devices)
        idle = self._idle.setdefault(devices, [])
        worker = idle.pop() if idle else self._new(place.address, devices)
        self._taken[worker._actor_id] = devices
        worker.take.remote(place, prepare_worker, settings.current(), program_secret(), program_identity())
        return worker

    def _new(self, address, devices):
        node = {f"node:{address}": 0.001}
        made = ray.remote(num_cpus=0, resources=node, concurrency_groups={CONTROL: 1})(SharedWorker)
        return made.remote(devices)

    def kill(self, actor, **options):
        """Keep a worker that is well; end every other actor, as `ray.kill`."""
        devices = self._taken.pop(actor._actor_id, None)
        if devices is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                if ray.get(actor.retire.remote(), timeout=RETIRE_LIMIT_S):
                    self._idle[devices].append(actor)
                    return
        self._kill(actor, **options)
