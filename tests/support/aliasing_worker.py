"""A worker of programs that survive, whose copies are wrong."""

from ray import cloudpickle

from hwaware.bench.mortal import MortalWorker


class AliasingWorker(MortalWorker):
    """A worker whose copies are the memory of arrays that the next step overwrites."""

    def copy_out(self, order):
        import time

        from hwaware.survival import copier, worker

        aliases = []

        def late(mark):
            time.sleep(0.5)  # the next step has begun by then
            for block, alias in aliases:
                block[...] = alias.view(block.dtype).reshape(block.shape)
            return true_encoded(mark)

        true_encoded = worker.true_encoded = getattr(worker, "true_encoded", worker.encoded)
        copier.copy_into = lambda block, array: aliases.append((block, _alias(array)))
        worker.encoded = late
        return super().copy_out(order)


def _alias(array):
    """Return an array's memory without a reference to it: JAX would not donate what somebody refers to."""
    import ctypes

    import numpy

    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    return numpy.frombuffer(memory, numpy.uint8)


cloudpickle.register_pickle_by_value(__import__(__name__))
