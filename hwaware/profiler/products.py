"""Timing matrix products and copies on one device, through JAX. Runs on the worker that serves the device."""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, List, Sequence, Tuple

from hwaware.errors import MeasurementError
from hwaware.profiler.clock import Watch, read
from hwaware.profiler.policy import fits_after

# Long enough that a quota which lets the first milliseconds of a period run at full speed does not decide the
# estimate: periods are up to 10 ms.
_ESTIMATE_S = 0.03
# Work in flight between two waits: enough to hide the launch, short against what is measured.
_BATCH_S = 0.01
_LONGEST_BATCH = 64
# A quota's burst is used up and its period under way: what follows is what the device can keep up.
_LEAD_IN_S = 0.015
# Passes over the array in one call: enough to hide the launch.
_PASSES = 2
_LAUNCH_S = 0.02
_WARM_UPS = 5

#: (batch, m, n, k): batch products of m x k by k x n.
Shape = Tuple[int, int, int, int]


def flops_of(shape: Shape) -> float:
    """Operations of the product: as many additions as multiplications.

    Example:
        >>> flops_of((1, 10, 10, 10))
        2000.0
    """
    batch, m, n, k = shape
    return 2.0 * batch * m * n * k


def square(edge: int) -> Shape:
    """The product of two square matrices."""
    return 1, edge, edge, edge


def back_to_back(call: Callable[[], Any], minimum_s: float, call_s: float) -> Tuple[int, List[float]]:
    """Run `call` for at least `minimum_s`; how often it ran, and the seconds of each lap.

    Calls are started in laps of about 10 ms without waiting in between, as a training step starts its kernels; a lap
    ends when its last result is there, and the next begins at once: their sum is the whole time.

    Args:
        call: Starts the work and returns a JAX array.
        minimum_s: Least time to run.
        call_s: About what one call takes.
    """
    batch = max(1, min(_LONGEST_BATCH, int(_BATCH_S / call_s)))
    laps: List[float] = []
    start = lap = time.perf_counter()
    while lap - start < minimum_s:
        for _ in range(batch):
            result = call()
        result.block_until_ready()
        now = time.perf_counter()
        laps.append(now - lap)
        lap = now
    return batch * len(laps), laps


def estimate_s(call: Callable[[], Any]) -> float:
    """About how long one call takes, after the warm-ups."""
    start = time.perf_counter()
    for _ in range(_WARM_UPS):
        call().block_until_ready()
        if time.perf_counter() - start > _ESTIMATE_S:
            break
    calls, laps = back_to_back(call, _ESTIMATE_S, _BATCH_S)
    return sum(laps) / calls


def _unprepared() -> Any:
    raise RuntimeError("prepare_copy() comes before copy() and launch_s()")


class Products:
    """The matrix products of one device, compiled once and timed often.

    Args:
        device: The JAX device.
        unthrottled: Context manager in which compilation runs at the machine's full speed.
    """

    def __init__(self, device: Any, unthrottled: Callable[[], Any]) -> None:
        self._device = device
        self._unthrottled = unthrottled
        self._calls: Dict[Tuple[str, Shape], Tuple[Callable[[], Any], float]] = {}
        self._watch = Watch()
        self._copy: Tuple[Callable[[], Any], int] = (_unprepared, 0)
        self._smallest: Callable[[], Any] = _unprepared

    def prepare(self, dtype: str, sizes: Sequence[int], longest_s: float, memory_bytes: int) -> List[int]:
        """Compile the square products of every size that fits in time and memory; the sizes that do."""
        ready: List[int] = []
        for edge in sizes:
            if 4 * edge * edge * 4 > memory_bytes:
                break
            if ready and not fits_after(ready[-1], self._calls[dtype, square(ready[-1])][1], edge, longest_s):
                break
            self.prepare_shape(dtype, square(edge))
            ready.append(edge)
        return ready

    def prepare_shape(self, dtype: str, shape: Shape) -> None:
        """Compile one product."""
        with self._unthrottled():
            call = self._compiled(dtype, shape)
        self._calls[dtype, shape] = (call, estimate_s(call))

    def measure(self, dtype: str, shape: Shape, minimum_s: float) -> Tuple[int, List[float]]:
        """That product, back to back: how often, and the seconds of each lap.

        Raises:
            MeasurementError: A clock of the host jumped in every try.
        """
        call, call_s = self._calls[dtype, shape]
        # One long product would take too long for that: a short one uses the burst up as well.
        leading = (call, call_s) if call_s < _LEAD_IN_S else min(self._calls.values(), key=lambda entry: entry[1])
        back_to_back(leading[0], _LEAD_IN_S, leading[1])
        taken: List[Tuple[int, List[float]]] = []
        self._watch.timed(lambda: taken.append(back_to_back(call, minimum_s, call_s)))
        return taken[-1]

    def prepare_copy(self, nbytes: int) -> None:
        """Compile the copy of an array of that size, and the smallest kernel."""
        import jax
        import numpy

        with self._unthrottled():
            latest = [jax.device_put(numpy.zeros(nbytes // 4, numpy.float32), self._device)]
            # In place: the pages of a new result take a processor longer than what is written to them.
            passes = jax.jit(
                lambda x: jax.lax.fori_loop(0, _PASSES, lambda _, y: y + numpy.float32(1), x), donate_argnums=0
            )

            def copy() -> Any:
                latest[0] = passes(latest[0])
                return latest[0]

            copy().block_until_ready()
            one = jax.device_put(numpy.zeros(1, numpy.float32), self._device)
            add = jax.jit(lambda x: x + 1)
            add(one).block_until_ready()
        self._copy = copy, nbytes
        self._smallest = lambda: add(one)

    def copy(self, minimum_s: float) -> float:
        """Bytes read and written per second while a constant is added to the large array."""
        call, nbytes = self._copy
        call().block_until_ready()  # what a quota saved is used up
        calls, laps = back_to_back(call, minimum_s, minimum_s)
        return 2 * nbytes * _PASSES * calls / sum(laps)

    def launch_s(self) -> float:
        """Seconds from starting the smallest kernel until its result is there: no kernel is faster."""
        times: List[float] = []
        deadline = read()[0] + _LAUNCH_S
        while read()[0] < deadline or len(times) < _WARM_UPS:
            start = time.perf_counter()
            self._smallest().block_until_ready()
            times.append(time.perf_counter() - start)
        return sorted(times)[len(times) // 2]

    def take_jumps(self) -> List[float]:
        """Jumps of the host's clocks since the last call; see `Watch`."""
        return self._watch.take_jumps()

    def _compiled(self, dtype: str, shape: Shape) -> Callable[[], Any]:
        import jax
        import jax.numpy as jnp
        import numpy

        batch, m, n, k = shape
        lead = (batch,) if batch > 1 else ()
        # Values around one: their sums stay finite in every type, and no value is so small that it slows a processor.
        left, right = (
            jax.device_put(numpy.full((*lead, *edges), value, jnp.dtype(dtype)), self._device)
            for edges, value in (((m, k), 0.5), ((k, n), 1.0))
        )
        product = jax.jit(jnp.matmul)
        found = float(numpy.asarray(product(left, right)).ravel()[0])
        # The shorter types may be summed in their own precision, where large sums stand still.
        if not (abs(found - 0.5 * k) <= 0.01 * k if dtype == "float32" else 0 < found < float("inf")):
            raise MeasurementError(
                f"A product of {dtype} came out as {found}, expected {0.5 * k}.",
                "the device computes wrongly: check its memory and its driver.",
            )
        return lambda: product(left, right)
