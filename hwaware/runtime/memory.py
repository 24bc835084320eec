"""Account for device memory where nothing else limits it: a CPU device may use what its host declares."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, NamedTuple, Optional

from hwaware.errors import OutOfDeviceMemoryError
from hwaware.formatting import BYTES, text


class ProgramMemory(NamedTuple):
    """The memory that a compiled program adds to the memory in use, on each device.

    Attributes:
        output_bytes: Bytes of new arrays that it returns.
        temporary_bytes: Bytes of scratch memory while it runs.
    """

    output_bytes: int = 0
    temporary_bytes: int = 0


def program_memory(compiled: Any) -> ProgramMemory:
    """Return XLA's own analysis of a compiled program; zeros where the back end has none (CPU before JAX 0.4.30)."""
    if not hasattr(compiled, "get_compiled_memory_stats"):
        return ProgramMemory()
    stats = compiled.get_compiled_memory_stats()
    return ProgramMemory(max(0, stats.output_size_in_bytes - stats.alias_size_in_bytes), stats.temp_size_in_bytes)


class MemoryAccount:
    """Compares the arrays of one worker with the memory of its devices.

    An instruction list is the same in every step, so the account is on only for the first two steps. The second step
    has what the first one left, and all later steps are like the second.

    Args:
        limits_bytes: Memory of each device; None for devices that limit their memory themselves.
    """

    def __init__(self, limits_bytes: Optional[List[int]]) -> None:
        self.is_on = False
        self.peak_bytes = 0
        self._limit_bytes = min(limits_bytes) if limits_bytes else None

    def check(self, program: str, needs: ProgramMemory, stores: Iterable[Dict[Any, List[Any]]]) -> None:
        """Refuse to run a program that does not fit beside the existing arrays, while the account is on.

        Raises:
            OutOfDeviceMemoryError: The program does not fit.
        """
        if not self.is_on or self._limit_bytes is None:
            return
        held_bytes = live_bytes(stores)
        needed_bytes = held_bytes + needs.output_bytes + needs.temporary_bytes
        self.peak_bytes = max(self.peak_bytes, needed_bytes)
        if needed_bytes > self._limit_bytes:
            raise OutOfDeviceMemoryError(
                f"Out of memory: program {program} needs {text(needed_bytes, BYTES)} "
                f"({text(held_bytes, BYTES)} are held, {text(needs.output_bytes, BYTES)} are its results, "
                f"{text(needs.temporary_bytes, BYTES)} its scratch), the device has {text(self._limit_bytes, BYTES)}.",
                "give this stage fewer layers or another device, use smaller microbatches, or rematerialisation.",
            )


def live_bytes(stores: Iterable[Dict[Any, List[Any]]]) -> int:
    """Return the bytes of all arrays on the fullest device, where an array in several places counts once."""
    per_device: Dict[int, Dict[int, int]] = {}
    for store in stores:
        for arrays in store.values():
            for device, array in enumerate(arrays):
                if array is not None:
                    per_device.setdefault(device, {})[id(array)] = array.nbytes
    return max((sum(sizes.values()) for sizes in per_device.values()), default=0)
