"""Serve each device by one worker on its host, as a Ray actor or in this process.

Ray ships this class and the code it uses by value, so a host needs JAX but no hwaware. If the host has hwaware, the
worker serves the devices that the host declares. Such a device is a share of a processor that stands for an
accelerator. Results have types of the standard library.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import subprocess
import threading
from typing import Any, ContextManager, Dict, List, Optional, Sequence

from hwaware.compat.packages import XLA_PACKAGE
from hwaware.host_load import busy_share
from hwaware.profiler.messages import LinkEnd
from hwaware.profiler.policy import Policy
from hwaware.profiler.products import Products, Shape, square
from hwaware.profiler.rings import Group
from hwaware.reference_kernel import reference_s
from hwaware.transport import Address

_NVIDIA_SMI_LIMIT_S = 10
# Reasons for a lower clock, as nvidia-smi names them. Newer versions still know this prefix.
_REASONS = ("sw_power_cap", "hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
_REASON = "clocks_throttle_reasons."
_LOAD_S = 0.2
# Part of a run of the reference kernel beside each sample. A whole run would take up to 75 ms, half of a sample's time.
_REFERENCE_PART = 0.3


class Worker:
    """Serve one device: identify it, time its products, and be one end of its host's links.

    Args:
        address: The host's address, at which other workers reach this one.
        secret: Secret of the measurement, which all workers share.
        index: Index of the device on its host; None if Ray assigns it.
        visible_index: Index among the devices that JAX shows to this process. Ray shows a worker only its own device.
        transfers: Transport of long messages in training; see `hwaware.runtime_settings`.
    """

    def __init__(
        self, address: str, secret: bytes, index: Optional[int] = None, visible_index: int = 0, transfers: str = "auto"
    ) -> None:
        self._transfers = transfers
        self._index = _assigned_index() if index is None else index
        self._visible_index = visible_index
        self._joins = index is None
        self._link_end = LinkEnd(address, secret)
        self._products: Optional[Products] = None
        self._is_gpu = False

    def ready(self) -> int:
        """Return the device's index on its host. This first call returns once the worker has its device."""
        return self._index

    def identify(self) -> Dict[str, Any]:
        """Load JAX, take the device's share of the processor, and return facts of the device and its host."""
        declared = self._declared_device()
        order_devices_by_bus()
        with _unthrottled():
            device = self._device()
        module = _host_devices()
        if module and self._joins:
            module.join(self._index)
        is_share = declared is not None and declared.group is not None
        self._products = Products(device, _unthrottled, is_share)
        self._link_end.use(self._transfers, device)
        stats = _memory_stats(device)
        self._is_gpu = device.platform == "gpu"
        nvidia = _nvidia_facts(self._index, self._visible_index) if self._is_gpu else {}
        return {
            "index": self._index,
            "declared_id": declared.id if declared else None,
            "kind": declared.kind if declared else _kind(device),
            "is_processor": device.platform == "cpu",
            "is_share": is_share,
            "declared_memory_bytes": declared.memory_bytes if declared else None,
            "device_memory_bytes": stats.get("bytes_limit"),
            "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "uuid": nvidia.pop("uuid", None),
            "versions": {**_versions(), **nvidia, "transfers": "tcp" if self._link_end.wire is None else "ucx"},
            **self.end_of_links(),
        }

    def end_of_links(self) -> Dict[str, Any]:
        """Listen on a declared port if the host declares its devices. Return the port and the machine's name."""
        declared = self._declared_device()
        if declared is not None:
            self._link_end.listen(getattr(declared, "ports", (0,)))  # the host's hwaware may be an older one
        return {"port": self._link_end.port, "machine": _machine()}

    def compile(self, dtype: str, policy: Policy, memory_bytes: int, copy_bytes: int) -> List[int]:
        """Compile the products of the policy's sizes and shapes, and the copy. Return the sizes that fit.

        Raises:
            MeasurementError: The device computes wrongly.
        """
        products = self._require_products()
        sizes = products.prepare(dtype, policy.sizes, policy.longest_product_s, memory_bytes)
        products.prepare_copy(copy_bytes)
        for _, *shape in policy.shapes if sizes else ():
            products.prepare_shape(dtype, tuple(shape))  # type: ignore[arg-type]  # four numbers
        return sizes

    def heat(self, dtype: str, edge: int, seconds: float) -> Dict[str, Any]:
        """Keep the device busy, so that its clock runs as in training; return the clock of an NVIDIA GPU meanwhile.

        Returns:
            As `_nvidia_clock`; empty for other devices.
        """
        found: Dict[str, Any] = {}
        beside = threading.Thread(target=lambda: found.update(_nvidia_clock(self._index, self._visible_index)))
        if self._is_gpu:
            beside.start()
        self._require_products().measure(dtype, square(edge), seconds)
        if self._is_gpu:
            beside.join()
        return found

    def measure(self, dtype: str, shape: Shape, minimum_s: float, before_s: Optional[float] = None) -> Dict[str, Any]:
        """Time products of that shape back to back, and the reference kernel beside them.

        Args:
            dtype: Data type of the products.
            shape: Shape of the products.
            minimum_s: Approximate time to run [s].
            before_s: The reference kernel's time on this machine [s], if a probe took it just now.

        Returns:
            "calls": number of products. "seconds" of all calls, and "laps_s" of each lap. "reference_s": mean of the
            kernel's times just before and just after. "after_s": the kernel's time just after. "clock_jumps_s": see
            `Watch`. "processor_s": processor time that this process took of "seconds".

        Raises:
            MeasurementError: The host's clocks cannot be relied on.
        """
        products = self._require_products()
        with _on_one_processor():
            before = _reference_s() if before_s is None else before_s
            calls, laps, processor_s = products.measure(dtype, (shape[0], shape[1], shape[2], shape[3]), minimum_s)
            after = _reference_s()
        jumps = products.take_jumps()
        return {
            "calls": calls, "seconds": sum(laps), "laps_s": laps, "reference_s": (before + after) / 2,
            "after_s": after, "clock_jumps_s": jumps, "processor_s": processor_s,
        }  # fmt: skip

    def copy(self, minimum_s: float) -> Dict[str, float]:
        """Return "bytes_per_s" read and written by a large copy, and "launch_s" of the smallest kernel."""
        products = self._require_products()
        with _on_one_processor():
            return {"bytes_per_s": products.copy(minimum_s), "launch_s": products.launch_s()}

    def rest(self, dtype: str, count: int) -> List[List[float]]:
        """Return `rest.rested_bursts` of matrix products, on all processors that the device has in training."""
        return self._require_products().rested_bursts(dtype, count)

    def answer(self, name: str, source: Address, limit_s: float) -> int:
        """See `LinkEnd.answer`. It runs at the host's full speed, because the device's share does not limit links."""
        with _unthrottled():
            return self._link_end.answer(name, source, limit_s)

    def time_messages(self, name: str, target: Address, policy: Policy, limit_s: float) -> Dict[str, Any]:
        """See `LinkEnd.time_messages`."""
        with _unthrottled():
            return self._link_end.time_messages(name, target, policy, limit_s)

    def exchange(
        self, name: str, role: int, target: Address, out_bytes: int, in_bytes: int, count: int, limit_s: float
    ) -> Dict[str, Any]:
        """See `LinkEnd.exchange`."""
        with _unthrottled():
            return self._link_end.exchange(name, role, target, out_bytes, in_bytes, count, limit_s)

    def collective(
        self, name: str, rank: int, addresses: Sequence[Address], limit_s: float, op: str, nbytes: int, repeats: int
    ) -> Dict[str, Any]:
        """See `rings.time_collective`."""
        with _unthrottled():
            return self._link_end.collective(Group(name, rank, tuple(addresses), limit_s), op, nbytes, repeats)

    def reopen(self) -> int:
        """See `LinkEnd.reopen`."""
        return self._link_end.reopen()

    def load(self) -> Dict[str, float]:
        """Return how busy other work keeps the host. The profiler asks while it measures nothing.

        Returns:
            "load": mean number of processes that want to run, over the last minute. "busy": part of all processors'
            time that other processes used in the last moments.
        """
        return {"load": os.getloadavg()[0], "busy": busy_share(_LOAD_S)}

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
    """Return hwaware.host_devices if the host has it. The import is by name, so that Ray does not ship the module."""
    try:
        return importlib.import_module("hwaware.host_devices")
    except ImportError:
        return None


def _unthrottled() -> ContextManager[Any]:
    """Return a context in which a share of a processor has full speed, for untimed work (imports, compilation)."""
    module = _host_devices()
    context: ContextManager[Any] = module.unthrottled() if module else contextlib.nullcontext()
    return context


def _on_one_processor() -> ContextManager[Any]:
    """Return a context in which all shares of a processor, and the reference kernel, run on the same processor."""
    module = _host_devices()
    context: ContextManager[Any] = module.on_one_processor() if module else contextlib.nullcontext()
    return context


def _reference_s() -> float:
    with _unthrottled():
        return reference_s(repeats=1, part=_REFERENCE_PART)


def _assigned_index() -> int:
    import ray

    return int(ray.get_gpu_ids()[0])


def _memory_stats(device: Any) -> Dict[str, int]:
    stats = getattr(device, "memory_stats", None)  # not in the oldest JAX; returns None on processors
    return (stats() or {}) if stats else {}


def _kind(device: Any) -> str:
    """Return the device's model. For a processor, return its model name, because JAX calls every processor "cpu"."""
    if device.platform == "cpu":
        with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as stream:
            for line in stream:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return str(device.device_kind)


def order_devices_by_bus() -> None:
    """Let CUDA order devices by bus, as nvidia-smi and Ray do, not by speed. Call this before JAX loads CUDA."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def _nvidia_facts(index: int, visible_index: int) -> Dict[str, str]:
    """Return the identity, driver and highest clock [MHz] of a GPU, or nothing for another vendor's device."""
    fields = {"uuid": "uuid", "driver": "driver_version", "clock_mhz": "clocks.max.sm"}
    return _nvidia_smi(fields, index, visible_index)


def _nvidia_clock(index: int, visible_index: int) -> Dict[str, Any]:
    """Return "clock_mhz" and "temperature_c" of a GPU now, and "slowed_by", the reasons for a lower clock."""
    fields = {"clock_mhz": "clocks.sm", "temperature_c": "temperature.gpu"}
    found = _nvidia_smi({**fields, **{one: _REASON + one for one in _REASONS}}, index, visible_index)
    numbers = {name: float(found[name]) for name in fields if found.get(name, "").isdigit()}
    return {**numbers, "slowed_by": [one for one in _REASONS if found.get(one) == "Active"]} if numbers else {}


def _nvidia_smi(fields: Dict[str, str], index: int, visible_index: int) -> Dict[str, str]:
    """Return what nvidia-smi says of a GPU, by name -> its own name; nothing if it does not answer."""
    visible = [one.strip() for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    gpu = visible[visible_index] if visible_index < len(visible) else str(index)  # a number or a uuid
    if gpu.startswith("MIG-"):  # a part of a GPU, which nvidia-smi does not know by this id
        gpu = str(index)
    command = ["nvidia-smi", f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            [*command, f"--id={gpu}"], capture_output=True, text=True, timeout=_NVIDIA_SMI_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    return {name: value.strip() for name, value in zip(fields, done.stdout.split(",")) if value.strip()}


def _machine() -> str:
    """Return a name that hosts under one kernel share, such as containers, because they use the same processors."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as stream:
        return stream.read().strip()
    return platform.node()


def _versions() -> Dict[str, Any]:
    from importlib import metadata

    import jax

    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        XLA_PACKAGE: metadata.version(XLA_PACKAGE),
        "processors": os.cpu_count(),
    }
