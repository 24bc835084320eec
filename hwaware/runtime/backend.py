"""The one place of the runtime that depends on the back end: which devices a worker sees, how hosts exchange, memory.

Everything else is the same on CPUs and GPUs: stages are StableHLO that `client.compile` takes, arrays between hosts go
through NumPy copies in the host's memory.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Sequence

from hwaware.compat.packages import install_jax
from hwaware.errors import AlpaError

# glibc's M_MMAP_MAX (no allocation by mmap) and M_TRIM_THRESHOLD (free memory at the heap's end that is kept).
_KEEPING = ((-4, 0), (-1, (1 << 31) - 1))


def show_devices(indices: Sequence[int], uuids: Sequence[str] = ()) -> None:
    """Let this process see only those GPUs of its host; call it before JAX is imported.

    Ray hides devices from an actor that asked it for none; the plan says which ones are ours. CPUs ignore it.

    Args:
        indices: Of the devices on their host.
        uuids: Their hardware identities, which win: an index may mean another GPU to another program.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(uuids or map(str, indices))
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # by which Ray and the profiler number them


def make_cpu_devices(count: int, workers: int) -> None:
    """Where devices are CPUs, give this process `count` of them, one core each; GPUs do not read what is set here."""
    if count > 1:
        flag = f"--xla_force_host_platform_device_count={count}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    if count * workers > 1:
        os.environ.setdefault("NPROC", "1")  # without it every device takes all cores


def keep_freed_memory() -> None:
    """Let this process keep what it frees for its next arrays, instead of giving it back to the operating system.

    A CPU program's temporary arrays of over 32 MiB together, and every large result, are otherwise mapped anew in each
    run: page by page, cleared by the kernel. That took a quarter of the backward pass of five GPT blocks. The process
    stays as large as it has once been. Only glibc can be told, and threads with heaps of their own do not obey: start
    Ray with MALLOC_ARENA_MAX=1 on hosts whose devices are CPUs.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return
    for option, value in _KEEPING:
        mallopt(option, value)


def uses_cpus() -> bool:
    """Whether JAX will use CPUs, as far as can be told without starting it."""
    import jax

    from hwaware.compat.client import accelerators

    named = jax.config.jax_platforms or os.environ.get("JAX_PLATFORMS", "")
    if named:
        return str(named).split(",")[0] == "cpu"
    has_driver = any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg"))
    return not any(name != "cuda" or has_driver for name in accelerators())


def require_gloo() -> None:
    """Refuse a stage on the CPUs of several hosts where this JAX cannot run one.

    Raises:
        AlpaError: It is too old.
    """
    import jax

    from hwaware.compat.client import has_gloo

    if not has_gloo():
        raise AlpaError(
            f"JAX {jax.__version__} cannot run one stage on the CPUs of several hosts; JAX 0.4.30 and newer can.",
            f"{install_jax('0.4.30')}, or use stages within one host.",
        )


def live_bytes(device: Any, key: str = "bytes_in_use") -> int:
    """Bytes of a device's memory in use: what its allocator says, or on a CPU the arrays that exist.

    Args:
        device: JAX's.
        key: What to ask the allocator for, such as "peak_bytes_in_use", the most that were in use at once.
    """
    statistics = device.memory_stats() if device.platform != "cpu" else None
    if statistics is not None:
        return int(statistics[key])
    return sum(array.nbytes for array in device.client.live_arrays() if device in array.devices())
