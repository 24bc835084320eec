"""Compare the profiler's throughput of this process's device with plain JAX: python benchmarks/gpu_whole.py OUTPUT.

The profiler measures its curve of bfloat16 matrix products. Then plain JAX runs the square product that has about as
many operations as the curve's largest one. Prints and writes both rates and their ratio.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import List

import hwaware

REPEATS, CALLS = 10, 4


def plain_flops_per_s(flops: float) -> float:
    """Return the rate of square bfloat16 products of about so many operations, with nothing but JAX."""
    import jax
    import jax.numpy as jnp

    edge = max(64, round((flops / 2) ** (1 / 3) / 64) * 64)
    keys = jax.random.split(jax.random.PRNGKey(0), 2)
    left, right = (jax.random.uniform(key, (edge, edge), jnp.bfloat16, -1.0, 1.0) for key in keys)
    product = jax.jit(jnp.matmul)
    product(left, right).block_until_ready()
    rates: List[float] = []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        for _ in range(CALLS):
            found = product(left, right)
        found.block_until_ready()
        rates.append(CALLS * 2.0 * edge**3 / (time.perf_counter() - start_s))
    return statistics.median(rates)


def main(output: Path) -> None:
    """Measure both, one after the other; print and write the figures."""
    import jax

    profile = hwaware.profile("local", quick=True, dtypes=("bfloat16",), runtime=False)
    largest = max(profile.devices[0].throughput["bfloat16"], key=lambda one: one.flops)
    rates = {"profiler": largest.flops / largest.seconds, "plain": plain_flops_per_s(largest.flops)}
    found = {"device": jax.devices()[0].device_kind, "flops": largest.flops, "flops_per_s": rates}
    output.write_text(json.dumps(found, indent=1) + "\n")
    ratio = rates["profiler"] / rates["plain"]
    print(f"{found['device']}: {rates['profiler']:.3g} FLOP/s by the profiler, {ratio:.2f} of plain JAX's")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
