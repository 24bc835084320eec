"""Timing matrix products and copies on one device, through JAX. Runs on the worker that serves the device."""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, List, Sequence, Tuple

from hwaware.profiler.policy import fits_after

# Long enough that a quota which lets the first milliseconds of a period run at full speed does not decide the
# estimate: periods are up to 5 ms.
_ESTIMATE_S = 0.03
# Work in flight between two waits: enough to hide the launch, short against what is measured.
_BATCH_S = 0.01
_LONGEST_BATCH = 64
_PASSES = 8


def back_to_back(call: Callable[[], Any], minimum_s: float, call_s: float) -> Tuple[int, float]:
    """Run `call` for at least `minimum_s`; how often it ran and how long that took.

    Calls are started in batches of about 10 ms without waiting in between, as a training step starts its kernels, and
    the clock stops when the last result is there.

    Args:
        call: Starts the work and returns a JAX array.
        minimum_s: Least time to run.
        call_s: About what one call takes.
    """
    batch = max(1, min(_LONGEST_BATCH, int(_BATCH_S / call_s)))
    calls = 0
    start = time.perf_counter()
    while True:
        for _ in range(batch):
            result = call()
        result.block_until_ready()
        calls += batch
        elapsed = time.perf_counter() - start
        if elapsed >= minimum_s:
            return calls, elapsed


def estimate_s(call: Callable[[], Any]) -> float:
    """About how long one call takes."""
    calls, seconds = back_to_back(call, _ESTIMATE_S, _BATCH_S)
    return seconds / calls


class Products:
    """The matrix products of one device, compiled once and timed often.

    Args:
        device: The JAX device.
        unthrottled: Context manager in which compilation runs at the machine's full speed.
    """

    def __init__(self, device: Any, unthrottled: Callable[[], Any]) -> None:
        self._device = device
        self._unthrottled = unthrottled
        self._calls: Dict[Tuple[str, int], Tuple[Callable[[], Any], float]] = {}

    def prepare(self, dtype: str, sizes: Sequence[int], longest_s: float, memory_bytes: int) -> List[int]:
        """Compile the products of every size that fits in time and memory; the sizes that do."""
        ready: List[int] = []
        for edge in sizes:
            if 4 * edge * edge * 4 > memory_bytes:
                break
            if ready and not fits_after(ready[-1], self._calls[dtype, ready[-1]][1], edge, longest_s):
                break
            with self._unthrottled():
                call = self._compiled(dtype, edge)
            self._calls[dtype, edge] = (call, estimate_s(call))
            ready.append(edge)
        return ready

    def measure(self, dtype: str, edge: int, minimum_s: float) -> Tuple[int, float]:
        """Products of that edge, back to back: how many, in how many seconds."""
        call, call_s = self._calls[dtype, edge]
        return back_to_back(call, minimum_s, call_s)

    def copy(self, nbytes: int, minimum_s: float) -> float:
        """Bytes read and written per second while a large array is copied with a constant added."""
        import jax
        import jax.numpy as jnp

        with self._unthrottled():
            source = jax.device_put(jnp.zeros(nbytes // 4, jnp.float32), self._device)
            # Several passes a call, so that allocating the result counts little.
            add = jax.jit(lambda x: jax.lax.fori_loop(0, _PASSES, lambda _, y: y + 1, x))
            add(source).block_until_ready()
        calls, seconds = back_to_back(lambda: add(source), minimum_s, minimum_s)
        return 2 * nbytes * _PASSES * calls / seconds

    def _compiled(self, dtype: str, edge: int) -> Callable[[], Any]:
        import jax
        import jax.numpy as jnp

        # Values around one: their sums stay finite in every type, and no value is so small that it slows a processor.
        left, right = (jax.device_put(jnp.full((edge, edge), value, dtype), self._device) for value in (0.5, 1.0))
        product = jax.jit(jnp.matmul)
        product(left, right).block_until_ready()
        return lambda: product(left, right)
