"""How much is measured: one record of numbers that every probe is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple, Tuple

KIB = 1 << 10
MIB = 1 << 20

#: Data types that a throughput curve can be measured for.
DTYPES = ("float32", "bfloat16", "float16")


class Policy(NamedTuple):
    """What is measured, how often and for how long. Per device and data type each size of matrix product runs for
    `device_rounds * product_s`; per directed link each size of message is sent `repeats` times after one warm-up.

    Attributes:
        sizes: Edges of the square matrices, ascending. Larger ones are left out where one product would take more
            than `longest_product_s`.
        longest_product_s: Limit for a single product.
        product_s: Time that one size runs back to back, once per round. Many CPU-quota periods (up to 5 ms) fit in.
        device_rounds: How often all sizes of all devices are gone through, so that drift meets all devices alike.
        second_tries: How many samples of a device may be taken again per round because other work disturbed them, as a
            part of its number of sizes.
        heat_s: Time that a device is kept busy before its first timing.
        copy_bytes: Size of the array whose copying gives the memory bandwidth.
        message_bytes: Sizes of messages, ascending. Larger ones are left out where one would take more than
            `longest_message_s`, or once the rate is steady.
        longest_message_s: Limit for a single message.
        repeats: Messages timed of each size; `large_repeats` where they take longer than `message_s` together.
        large_repeats: See `repeats`.
        message_s: See `repeats`.
        tiny_repeats: Messages of one byte that give the latency.
    """

    sizes: Tuple[int, ...]
    longest_product_s: float
    product_s: float
    device_rounds: int
    second_tries: float
    heat_s: float
    copy_bytes: int
    message_bytes: Tuple[int, ...]
    longest_message_s: float
    repeats: int
    large_repeats: int
    message_s: float
    tiny_repeats: int

    def portable(self) -> Any:
        """The same attributes in a type of the standard library, for workers on hosts without hwaware."""
        return SimpleNamespace(**self._asdict())


#: The default: a curve over more than four decades of FLOPs, messages up to 16 MiB.
FULL = Policy(
    sizes=(64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
    longest_product_s=0.4,
    product_s=0.25,
    device_rounds=2,
    second_tries=0.5,
    heat_s=0.5,
    copy_bytes=64 * MIB,
    message_bytes=(KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB),
    longest_message_s=0.8,
    repeats=20,
    large_repeats=5,
    message_s=0.2,
    tiny_repeats=30,
)

#: For a first look: fewer sizes, shorter messages.
QUICK = Policy(
    sizes=(64, 128, 256, 512, 768, 1536, 3072, 6144),
    longest_product_s=0.15,
    product_s=0.25,
    device_rounds=1,
    second_tries=0.5,
    heat_s=0.2,
    copy_bytes=32 * MIB,
    message_bytes=(KIB, 64 * KIB, MIB, 4 * MIB),
    longest_message_s=0.3,
    repeats=5,
    large_repeats=3,
    message_s=0.2,
    tiny_repeats=15,
)


def fits_after(edge: int, seconds: float, larger_edge: int, limit_s: float) -> bool:
    """Whether a product of `larger_edge` stays within `limit_s`, given that one of `edge` took `seconds`.

    The time of a square product grows with the cube of its edge; the rate only improves with the size.
    """
    return seconds * (larger_edge / edge) ** 3 <= limit_s
