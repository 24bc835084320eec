"""Time matrix products and copies on one device, through JAX. The worker that serves the device runs this module."""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, List, Sequence, Tuple

from hwaware.errors import MeasurementError
from hwaware.profiler.clock import Watch, read
from hwaware.profiler.policy import fits_after
from hwaware.profiler.rest import rested_bursts

# A quota lets the first milliseconds of a period run at full speed. Periods are up to 20 ms, so these milliseconds do
# not decide an estimate of this length.
_ESTIMATE_S = 0.03
# Work in flight between two waits: long enough to hide launches, and short against the measured time.
_BATCH_S = 0.01
_LONGEST_BATCH = 64
# Time after which a quota's burst is used up and its period under way: then the device runs at the rate it can keep up.
_LEAD_IN_S = 0.03
# A pause of this length without processor time means that a quota is used up. The quota's next period follows. A device
# that does not pause within `_LONGEST_PERIOD_S`, twice the longest period, has no quota.
_PAUSE_S = 1e-3
_LONGEST_PERIOD_S = 0.04
_LAUNCH_S = 0.02
_WARM_UPS = 5
# Starting a program costs an accelerator 40 us or more, in which an H100 does 2e10 operations. So one program there
# computes several small products, just as one program computes the layers of a stage.
_PROGRAM_FLOPS = 2e10
_MOST_PRODUCTS = 32
# Two operands, their product, and room for one more matrix, of float32 at most.
_MATRICES = 4
_LARGEST_NUMBER_BYTES = 4
# The operands repeat this many numbers. It is odd, so that no two rows are alike.
_NUMBERS = 65537
# The check accepts an error of this factor times the sum of the absolute values of an element's terms. Accelerators
# compute float32 with 10 bits of each factor. They may sum shorter types in the precision of these types.
_TOLERANCE_OF_FLOAT32, _TOLERANCE = 1e-3, 1e-2
# Types with fewer bits of fraction than bfloat16 round by more than this factor allows.
_FEWEST_BITS = 7
# The check also accepts at most this part of the element itself, so that 0 never passes. Rounding to 1 bit costs 1/4.
_LARGEST_PART = 0.5
# The check takes the largest of so many elements: the terms of a small one nearly cancel, which hides errors.
_CANDIDATES = 64

#: (batch, m, n, k): batch products of m x k by k x n.
Shape = Tuple[int, int, int, int]


def flops_of(shape: Shape) -> float:
    """Return the floating-point operations of the product: as many additions as multiplications [FLOP].

    Example:
        >>> flops_of((1, 10, 10, 10))
        2000.0
    """
    batch, m, n, k = shape
    return 2.0 * batch * m * n * k


def square(edge: int) -> Shape:
    """Return the shape of the product of two square matrices.

    Args:
        edge: Rows of each matrix, as many as its columns.
    """
    return 1, edge, edge, edge


def back_to_back(
    call: Callable[[], Any], minimum_s: float, call_s: float, in_periods: bool = False
) -> Tuple[int, List[float]]:
    """Run `call` for about `minimum_s`. Return the number of calls, and the time of each lap [s].

    In a lap of about 10 ms, calls start without waiting in between, as a training step starts its kernels. A lap ends
    when its last result is there, and the next lap begins at once. So the laps add up to the whole time, which is at
    least `minimum_s` without a quota.

    Args:
        call: Starts the work and returns its last JAX array.
        minimum_s: Least time to run [s].
        call_s: About what one call takes [s].
        in_periods: True if the process has a quota. Then the run ends after a lap in which the process paused: the one
            nearest to `minimum_s`. If the previous run ended so too, the laps hold whole periods of the quota. On a
            share of 0.2, windows that ended when their time was over measured 3 to 5 % too much.
    """
    batch = max(1, min(_LONGEST_BATCH, int(_BATCH_S / call_s)))
    laps: List[float] = []
    pauses = 0
    start = lap = time.perf_counter()
    processor_s = time.process_time()
    while True:
        for _ in range(batch):
            result = call()
        result.block_until_ready()
        now, processor_now_s = time.perf_counter(), time.process_time()
        laps.append(now - lap)
        paused = in_periods and laps[-1] - (processor_now_s - processor_s) > _PAUSE_S
        lap, processor_s, elapsed_s, pauses = now, processor_now_s, now - start, pauses + paused
        if paused and elapsed_s >= minimum_s - elapsed_s / pauses / 2:
            break
        if elapsed_s >= minimum_s + (_LONGEST_PERIOD_S if in_periods else 0.0):
            break
    return batch * len(laps), laps


def estimate_s(call: Callable[[], Any]) -> float:
    """Return about how long one call takes after the warm-ups [s]."""
    start = time.perf_counter()
    for _ in range(_WARM_UPS):
        call().block_until_ready()
        if time.perf_counter() - start > _ESTIMATE_S:
            break
    calls, laps = back_to_back(call, _ESTIMATE_S, _BATCH_S)
    return sum(laps) / calls


def products_a_program(shape: Shape, is_processor: bool) -> int:
    """Return the number of products of that shape that are timed as one program.

    Example:
        >>> products_a_program((1, 512, 512, 512), False), products_a_program((1, 1024, 1024, 1024), False)
        (32, 9)
        >>> products_a_program((1, 4096, 4096, 4096), False), products_a_program((1, 512, 512, 512), True)
        (1, 1)
    """
    return 1 if is_processor else max(1, min(_MOST_PRODUCTS, int(_PROGRAM_FLOPS / flops_of(shape))))


class Program:
    """Hold a timed program. One `call` starts `products` matrix products, which take about `call_s` [s] together.

    The class is no NamedTuple, because Ray cannot ship classes made by NamedTuple by value.
    """

    def __init__(self, call: Callable[[], Any], call_s: float, products: int) -> None:
        self.call, self.call_s, self.products = call, call_s, products


def _unprepared() -> Any:
    raise RuntimeError("prepare_copy() comes before copy() and launch_s()")


class Products:
    """Time the matrix products of one device, compiled once.

    Args:
        device: The JAX device.
        unthrottled: Context manager in which compilation runs at the machine's full speed.
        is_share: True if a quota makes the device a share of a processor.
    """

    def __init__(self, device: Any, unthrottled: Callable[[], Any], is_share: bool = False) -> None:
        self._device = device
        self._unthrottled = unthrottled
        self._is_share = is_share
        self._programs: Dict[Tuple[str, Shape], Program] = {}
        self._watch = Watch()
        self._copy: Tuple[Callable[[], Any], int] = (_unprepared, 0)
        self._smallest: Callable[[], Any] = _unprepared

    def prepare(self, dtype: str, sizes: Sequence[int], longest_s: float, memory_bytes: int) -> List[int]:
        """Compile the square products of every size that fits in time and memory. Return these sizes.

        Args:
            dtype: The data type.
            sizes: Rows of the matrices, the smallest first.
            longest_s: Longest time of one product [s].
            memory_bytes: Memory for the operands and the result [bytes].
        """
        ready: List[int] = []
        for edge in sizes:
            if _MATRICES * edge * edge * _LARGEST_NUMBER_BYTES > memory_bytes:
                break
            if ready and not fits_after(ready[-1], self._product_s(dtype, square(ready[-1])), edge, longest_s):
                break
            self.prepare_shape(dtype, square(edge))
            ready.append(edge)
        return ready

    def prepare_shape(self, dtype: str, shape: Shape) -> None:
        """Compile the program of one product, or of several small ones."""
        products = products_a_program(shape, self._device.platform == "cpu")
        with self._unthrottled():
            call = self._compiled(dtype, shape, products)
        self._programs[dtype, shape] = Program(call, estimate_s(call), products)

    def measure(self, dtype: str, shape: Shape, minimum_s: float) -> Tuple[int, List[float], float]:
        """Run that product back to back for about `minimum_s` [s].

        Returns:
            The number of products, the time of each lap [s], and the processor time of this process [s].

        Raises:
            MeasurementError: A clock of the host jumped in every try.
        """
        program = self._programs[dtype, shape]
        # Lead in with the same product, so that the timing begins at the place in a quota's period where it ends.
        back_to_back(program.call, _LEAD_IN_S, program.call_s, self._is_share)
        taken: List[Tuple[int, List[float], float]] = []

        def run() -> None:
            before_s = time.process_time()
            calls, laps = back_to_back(program.call, minimum_s, program.call_s, self._is_share)
            taken.append((calls * program.products, laps, time.process_time() - before_s))

        self._watch.timed(run)
        return taken[-1]

    def rested_bursts(self, dtype: str, count: int) -> List[List[float]]:
        """Return `rest.rested_bursts` of the largest product that takes at most 10 ms [s]."""
        known = {flops_of(shape): program for (one, shape), program in self._programs.items() if one == dtype}
        flops = max((size for size, program in known.items() if program.call_s <= _BATCH_S), default=min(known))
        return rested_bursts(known[flops].call, count)

    def prepare_copy(self, nbytes: int) -> None:
        """Compile the copy of an array of `nbytes`, and the smallest kernel."""
        import jax
        import numpy

        with self._unthrottled():
            latest = [jax.device_put(numpy.zeros(nbytes // 4, numpy.float32), self._device)]
            # In place, because a processor takes longer to get the pages of a new result than to write to them.
            add_one = jax.jit(lambda x: x + numpy.float32(1), donate_argnums=0)

            def copy() -> Any:
                latest[0] = add_one(latest[0])
                return latest[0]

            copy().block_until_ready()
            one = jax.device_put(numpy.zeros(1, numpy.float32), self._device)
            add = jax.jit(lambda x: x + 1)
            add(one).block_until_ready()
        self._copy = copy, nbytes
        self._smallest = lambda: add(one)

    def copy(self, minimum_s: float) -> float:
        """Return the rate at which adding a constant to the large array reads and writes memory [bytes/s]."""
        call, nbytes = self._copy
        call_s = estimate_s(call)  # this also uses up a quota's burst
        calls, laps = back_to_back(call, minimum_s, call_s)
        return 2 * nbytes * calls / sum(laps)

    def launch_s(self) -> float:
        """Return the time from the start of the smallest kernel until its result is there [s]: no kernel is faster."""
        times: List[float] = []
        deadline = read()[0] + _LAUNCH_S
        while read()[0] < deadline or len(times) < _WARM_UPS:
            start = time.perf_counter()
            self._smallest().block_until_ready()
            times.append(time.perf_counter() - start)
        return sorted(times)[len(times) // 2]

    def take_jumps(self) -> List[float]:
        """Return the jumps of the host's clocks since the last call [s]; see `Watch`."""
        return self._watch.take_jumps()

    def _product_s(self, dtype: str, shape: Shape) -> float:
        program = self._programs[dtype, shape]
        return program.call_s / program.products

    def _compiled(self, dtype: str, shape: Shape, products: int) -> Callable[[], Any]:
        import jax
        import jax.numpy as jnp
        import numpy

        if not jnp.issubdtype(dtype, jnp.floating):
            raise MeasurementError(
                f"{dtype} is no floating-point type, and the profiler measures only these.",
                "leave it out of hwaware.dtypes.MEASURED.",
            )
        batch, m, n, k = shape
        lead = (batch,) if batch > 1 else ()
        pairs = [
            (_operand((*lead, m, k), jnp.dtype(dtype), 2 * i), _operand((*lead, k, n), jnp.dtype(dtype), 2 * i + 1))
            for i in range(products)
        ]
        # Each product has its own operands, because XLA would compute equal products once.
        arguments = jax.device_put(pairs, self._device)
        program = jax.jit(lambda pairs: [jnp.matmul(left, right) for left, right in pairs])
        result = numpy.asarray(program(arguments)[-1])
        if result.dtype.name != dtype:
            raise MeasurementError(
                f"JAX computed a product of {dtype} in {result.dtype}, expected {dtype}.",
                f"do for {dtype} what hwaware/dtypes.py says, or leave it out of --dtype.",
            )
        _require_right(dtype, result, *pairs[-1])
        return lambda: program(arguments)[-1]


def _operand(edges: Tuple[int, ...], dtype: Any, number: int) -> Any:
    """Return a matrix of numbers between -1 and 1.

    No value is so small that it slows a processor. Equal values would let a GPU run faster than in training.
    """
    import numpy

    numbers = numpy.random.default_rng(number).uniform(-1.0, 1.0, _NUMBERS).astype(dtype)
    return numpy.resize(numbers, edges)


def _require_right(dtype: str, result: Any, left: Any, right: Any) -> None:
    """Compare one element of a product with the sum of its terms in double precision.

    Raises:
        MeasurementError: The element differs too much.
    """
    import numpy

    terms = _terms(left, right)
    sums = terms.sum(axis=0)
    column = int(numpy.abs(sums).argmax())
    expected = float(sums[column])
    found = float(result.reshape(-1)[column])
    tolerance = min(_factor(left.dtype) * float(numpy.abs(terms[:, column]).sum()), _LARGEST_PART * abs(expected))
    if not abs(found - expected) <= tolerance:
        raise MeasurementError(
            f"A product of {dtype} came out as {found:g}, expected {expected:g} to within {tolerance:.2g}.",
            "the device computes wrongly: check its memory and its driver.",
        )


def _factor(dtype: Any) -> float:
    """Return the accepted error of an element, as a part of the sum of its terms' absolute values.

    The element is at most this sum. Rounding the element to b bits of fraction costs up to 2^-(b + 1) of it.
    """
    from ml_dtypes import finfo

    bits = int(finfo(dtype).nmant)  # type: ignore[no-untyped-call]  # older ml_dtypes
    if str(dtype) == "float32":
        return _TOLERANCE_OF_FLOAT32
    return _TOLERANCE + (2.0 ** -(bits + 1) if bits < _FEWEST_BITS else 0.0)


def _terms(left: Any, right: Any) -> Any:
    """Return the terms of the first elements of (the first of) their product, one column for each element.

    The terms are in double precision.
    """
    import numpy

    row = left.reshape(-1, left.shape[-1])[0]
    columns = right.reshape(-1, *right.shape[-2:])[0, :, :_CANDIDATES]
    return row.astype(numpy.float64)[:, None] * columns.astype(numpy.float64)
