"""What runs on each device's host: one worker per device, as a Ray actor or in this process.

Ray ships this class and what it uses by value, so a host needs JAX but no hwaware; where hwaware is installed, its
declared devices (a share of a processor that stands for an accelerator) are respected. Results are plain numbers.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import subprocess
from typing import Any, ContextManager, Dict, List, Optional, Sequence, Tuple

from hwaware.profiler.messages import LinkEnd
from hwaware.profiler.policy import Policy
from hwaware.profiler.products import Products
from hwaware.reference_kernel import reference_s
from hwaware.transport import Address

_NVIDIA_SMI_LIMIT_S = 10


class Worker:
    """Serves one device: says what it is, times its products, and is one end of its host's links.

    Args:
        index: Which of the host's devices; None if Ray assigns it.
        visible_index: Which of the devices that JAX shows to this process. Ray shows a worker only its own.
    """

    def __init__(self, index: Optional[int] = None, visible_index: int = 0) -> None:
        self._index = _assigned_index() if index is None else index
        self._visible_index = visible_index
        self._joins = index is None
        self._link_end = LinkEnd()
        self._products: Optional[Products] = None

    def ready(self) -> int:
        """The device's index on its host. The first call, which returns once the worker has its device."""
        return self._index

    def identify(self) -> Dict[str, Any]:
        """What the device and its host are; takes the device's share of the processor, and loads JAX."""
        declared = self._declared_device()
        with _unthrottled():
            device = self._device()
        if declared is not None:
            _host_devices().join(self._index)
        self._products = Products(device, _unthrottled)
        stats = _memory_stats(device)
        return {
            "index": self._index,
            "declared_id": declared.id if declared else None,
            "kind": declared.kind if declared else _kind(device),
            "declared_memory_bytes": declared.memory_bytes if declared else None,
            "device_memory_bytes": stats.get("bytes_limit"),
            "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "uuid": _nvidia_uuid(self._index) if device.platform == "gpu" else None,
            "port": self._link_end.port,
            "machine": _machine(),
            "versions": _versions(),
        }

    def prepare(self, dtype: str, policy: Policy, memory_bytes: int) -> List[int]:
        """Compile the products of the policy's sizes and heat the device up; the sizes that can be measured."""
        products = self._require_products()
        sizes = products.prepare(dtype, policy.sizes, policy.longest_product_s, memory_bytes)
        if sizes:
            products.measure(dtype, sizes[-1], policy.heat_s)
        return sizes

    def measure(self, dtype: str, edge: int, minimum_s: float) -> Tuple[int, float, float]:
        """Products of that edge back to back: how many, in how many seconds, and the reference kernel's time beside.

        The reference is the slower of the times just before and just after.
        """
        before = _unthrottled_reference_s()
        calls, seconds = self._require_products().measure(dtype, edge, minimum_s)
        return calls, seconds, max(before, _unthrottled_reference_s())

    def copy(self, nbytes: int, minimum_s: float) -> float:
        """Bytes read and written per second by a large copy."""
        return self._require_products().copy(nbytes, minimum_s)

    def answer(self, name: str, source: Address, limit_s: float) -> int:
        """See `LinkEnd.answer`."""
        return self._link_end.answer(name, source, limit_s)

    def time_messages(self, name: str, target: Address, policy: Policy, limit_s: float) -> Dict[str, Any]:
        """See `LinkEnd.time_messages`."""
        return self._link_end.time_messages(name, target, policy, limit_s)

    def load(self) -> float:
        """Processes that want to run on this host, averaged over the last minute."""
        return os.getloadavg()[0]

    def close(self) -> None:
        """Stop listening."""
        self._link_end.close()

    def _require_products(self) -> Products:
        if self._products is None:
            raise RuntimeError("identify() comes before any measurement")
        return self._products

    def _device(self) -> Any:
        import jax

        return jax.local_devices()[self._visible_index]

    def _declared_device(self) -> Any:
        module = _host_devices()
        declared: Sequence[Any] = module.declared() if module and self._joins else ()
        return declared[self._index] if self._index < len(declared) else None


def _host_devices() -> Any:
    """hwaware.host_devices, if this host has it. By name: it must not be shipped, it belongs to the host."""
    try:
        return importlib.import_module("hwaware.host_devices")
    except ImportError:
        return None


def _unthrottled() -> ContextManager[Any]:
    """Where the device is a share of a processor: full speed for what is not measured (imports, compilation)."""
    module = _host_devices()
    context: ContextManager[Any] = module.unthrottled() if module else contextlib.nullcontext()
    return context


def _unthrottled_reference_s() -> float:
    with _unthrottled():
        return reference_s(repeats=1)


def _assigned_index() -> int:
    import ray

    return int(ray.get_gpu_ids()[0])


def _memory_stats(device: Any) -> Dict[str, int]:
    stats = getattr(device, "memory_stats", None)  # not in the oldest JAX; returns None on processors
    return (stats() or {}) if stats else {}


def _kind(device: Any) -> str:
    """The device's model; for a processor its model name, because JAX calls all of them "cpu"."""
    if device.platform == "cpu":
        with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as stream:
            for line in stream:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return str(device.device_kind)


def _nvidia_uuid(index: int) -> Optional[str]:
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader", f"--id={index}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None  # another vendor's device
    return done.stdout.strip() or None


def _machine() -> str:
    """What is the same for hosts that share one kernel, and so one set of processors: containers, namespaces."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as stream:
        return stream.read().strip()
    return platform.node()


def _versions() -> Dict[str, Any]:
    import jax
    import jaxlib

    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "processors": os.cpu_count(),
    }
