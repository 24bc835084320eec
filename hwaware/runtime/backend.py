"""Hold the runtime's code that differs between CPUs and GPUs: which devices a worker sees, and how it uses memory.

Everything else is the same on both, except that UCX sends GPUs' arrays without NumPy copies. Stages are StableHLO that
`client.compile` takes.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Sequence

from hwaware.compat.packages import install_jax
from hwaware.errors import AlpaError

# Options of glibc: M_MMAP_MAX (no allocation by mmap), and M_TRIM_THRESHOLD (keep free memory at the heap's end).
_KEEPING = ((-4, 0), (-1, (1 << 31) - 1))

# Files of the drivers of accelerators: JAX has code for some of these also where no such device is.
_DRIVERS = {"cuda": ("/dev/nvidiactl", "/dev/dxg"), "rocm": ("/dev/kfd",), "tpu": ("/dev/accel0",)}


def show_devices(indices: Sequence[int], uuids: Sequence[str] = ()) -> None:
    """Let this process see only these GPUs of its host; call this before JAX is imported.

    Ray hides all devices from an actor that asked Ray for none, so hwaware shows those of the plan. CPUs ignore this.

    Args:
        indices: Indices of the devices on their host.
        uuids: Their hardware identities, used instead of indices where given: programs may number GPUs differently.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(uuids or map(str, indices))
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order in which Ray and the profiler number GPUs


def make_cpu_devices(count: int, workers: int) -> None:
    """Make `count` CPU devices in this process, with one core each if the stage has several; GPUs ignore this."""
    if count > 1:
        flag = f"--xla_force_host_platform_device_count={count}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    if count * workers > 1:
        os.environ.setdefault("NPROC", "1")  # without it every device takes all cores


def keep_freed_memory() -> None:
    """Let this process keep freed memory for its next arrays, instead of giving it back to the operating system.

    Otherwise the kernel maps and clears new pages in each run of a CPU program. It does so for large results, and for
    temporary arrays of over 32 MiB together. That took a quarter of the backward pass of five GPT blocks. The process
    stays as large as it has once been. Only glibc has this setting, and threads with heaps of their own ignore it. So
    start Ray with MALLOC_ARENA_MAX=1 on hosts whose devices are CPUs.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return
    for option, value in _KEEPING:
        mallopt(option, value)


def uses_cpus() -> bool:
    """Return True if JAX will use CPUs, as far as this process can tell without starting JAX."""
    import jax

    from hwaware.compat.client import accelerators

    named = jax.config.jax_platforms or os.environ.get("JAX_PLATFORMS", "")
    if named:
        return str(named).split(",")[0] == "cpu"
    return not any(os.path.exists(path) for name in accelerators() for path in _DRIVERS[name])


def require_gloo() -> None:
    """Refuse a stage on the CPUs of several hosts where this JAX cannot run one.

    Raises:
        AlpaError: JAX is too old.
    """
    import jax

    from hwaware.compat.client import has_gloo

    if not has_gloo():
        raise AlpaError(
            f"JAX {jax.__version__} cannot run one stage on the CPUs of several hosts; JAX 0.4.30 and newer can.",
            f"{install_jax('0.4.30')}, or use stages within one host.",
        )


def live_bytes(device: Any, key: str = "bytes_in_use") -> int:
    """Return the bytes in use on a device, by its allocator, or on a CPU by the arrays that exist.

    Args:
        device: JAX's device.
        key: Statistic of the allocator, such as "peak_bytes_in_use", the most in use at once; a CPU ignores it.
    """
    statistics = device.memory_stats() if device.platform != "cpu" else None
    if statistics is not None:
        return int(statistics[key])
    return sum(array.nbytes for array in device.client.live_arrays() if device in array.devices())
