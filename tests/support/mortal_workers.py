"""Workers of programs that survive, which end themselves at a chosen moment, or copy their state wrongly."""

import os
import signal

from ray import cloudpickle

from hwaware.survival.rescuer import Rescuer
from hwaware.survival.worker import SurvivingWorker

# Moments of a step, of a copy and of a recovery.
KINDS = ("run", "send", "receive", "copy", "abandon", "start over", "compile", "take in")


class MortalWorker(SurvivingWorker):
    """A worker that kills its own process when it has come to a moment for the given time."""

    moment = None

    def die_at(self, kind, times):
        """End at the start of the work of this kind, the given number of times from now."""
        self.moment = [kind, times]

    def _come_to(self, kind):
        if self.moment is not None and self.moment[0] == kind:
            self.moment[1] -= 1
            if self.moment[1] <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def run_executable(self, uuid, *arguments, **options):
        if self.buffers is not self._resident:
            self._come_to("run")
        super().run_executable(uuid, *arguments, **options)

    def run_resharding_send_task(self, *arguments):
        self._come_to("send")
        super().run_resharding_send_task(*arguments)

    def run_resharding_recv_task(self, *arguments):
        self._come_to("receive")
        super().run_resharding_recv_task(*arguments)

    def copy_out(self, order):
        self._come_to("copy")
        return super().copy_out(order)

    def _send_to(self, *arguments):
        self._come_to("send copies")
        super()._send_to(*arguments)

    def abandon(self, sentence):
        self._come_to("abandon")
        super().abandon(sentence)

    def start_over(self, *arguments):
        self._come_to("start over")
        super().start_over(*arguments)

    def put_executable(self, *arguments):
        self._come_to("compile")
        return super().put_executable(*arguments)

    def take_in(self, wanted, *gifts):
        self._come_to("take in")
        super().take_in(wanted, *gifts)


class AliasingWorker(MortalWorker):
    """A worker whose copies are the memory of arrays that the next step overwrites."""

    def copy_out(self, order):
        import time

        from hwaware.survival import worker

        def late(data):
            time.sleep(0.05)
            return worker_digest(data)

        worker_digest = getattr(worker, "true_digest", worker.digest_of)
        worker.true_digest = worker_digest
        worker.bytes_of = _alias
        worker.digest_of = late
        return super().copy_out(order)


def _alias(array):
    """Return an array's memory without a reference to it: JAX would not donate what somebody refers to."""
    import ctypes

    import numpy

    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    return numpy.frombuffer(memory, numpy.uint8)


cloudpickle.register_pickle_by_value(__import__(__name__))


def rescuer_of(kind):
    """Return a rescuer whose workers are of this class."""
    made = Rescuer()
    made.worker_class = kind
    return made
