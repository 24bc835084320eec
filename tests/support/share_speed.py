"""Measure the real speed of a testbed's device, without the profiler."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from hwaware.errors import TestbedError

if TYPE_CHECKING:
    from hwaware.bench.testbed.manager import Testbed

_LIMIT_S = 120.0
# Print the rate of products under the device's share, relative to that on a whole core. Both take turns on one
# processor: two virtual processors of one machine may differ by half for seconds.
_PRODUCTS = """
import os, sys, time
import jax
import jax.numpy as jnp
product, ones = jax.jit(jnp.matmul), jnp.ones((512, 512))
product(ones, ones).block_until_ready()
last = {max(os.sched_getaffinity(0))}
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), last)

def rate(procs, seconds):
    with open(procs, "w") as stream:
        stream.write(str(os.getpid()))
    started, calls = time.monotonic(), 0
    while time.monotonic() - started < seconds:
        product(ones, ones).block_until_ready()
        calls += 1
    return calls / (time.monotonic() - started)

whole, share = sys.argv[1:]
limited = full = 0.0
for _ in range(4):
    full += rate(whole, 0.15)
    rate(share, 0.05)  # uses up what the quota saved
    limited += rate(share, 0.5)
    full += rate(whole, 0.15)
print(2 * limited / full)
"""


def speed_under_share(bed: Testbed, host: str, device: int = 0) -> float:
    """Measure a device's speed in matrix products as a fraction of a whole core's, in a few seconds.

    A share is processor time. It may buy less work: a fifth of a core did 0.18 of a core's work, because the caches
    are cold whenever the device's turn comes.

    Raises:
        UnusableInputError: The testbed has no such host or device.
        TestbedError: The testbed does not shape shares, or the measurement failed.
    """
    groups = bed._state.cpu_groups()
    if groups is None:
        raise TestbedError(f"Testbed {bed.name} does not shape CPU shares.", "start it as root.")
    shares = groups.daemons(host), groups.device_groups(bed.scenario, host).devices[device]
    line = bed.command(host, [sys.executable, "-c", _PRODUCTS, *shares])
    environment = {**os.environ, "NPROC": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(line, env=environment, timeout=_LIMIT_S, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise TestbedError(
            f"The speed of {host} could not be measured: {done.stderr[-500:]}", "see the reason at its end."
        )
    return float(done.stdout)
