"""A worker of programs that survive, whose copies are wrong."""

from ray import cloudpickle

from hwaware.bench.mortal import MortalWorker


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
