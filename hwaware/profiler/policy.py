"""Define how much the profiler measures: one record of numbers for all probes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple, Tuple

KIB = 1 << 10
MIB = 1 << 20


class Policy(NamedTuple):
    """Say which sizes the profiler measures, how often and for how long.

    Per device and data type, each size of matrix product runs for `device_rounds * product_s`. Per directed link, each
    size of message is sent `repeats` times after the warm-ups.

    Attributes:
        sizes: Edges of the square matrices, ascending. The profiler leaves out sizes where one product would take more
            than `longest_product_s`.
        shapes: Further products, (name, batch, m, n, k): batch times m x k by k x n.
        longest_product_s: Limit for a single product.
        product_s: Time that one size runs back to back, once per round. Many CPU-quota periods (up to 20 ms) fit in.
        device_rounds: Rounds. Each round times all sizes on all devices, so that drift affects all devices alike.
        second_tries: Limit of repeated samples of a device, divided by its number of sizes. The profiler repeats a
            sample if other work disturbed the sample.
        heat_s: Time for which the profiler keeps a device busy before its first timing.
        copy_bytes: Size of the array whose copying gives a processor's memory bandwidth.
        accelerator_copy_bytes: The same for accelerators, whose caches hold tens of MB and whose memory is faster.
        copy_s: Time for which the profiler copies the array.
        copies: Number of timings of each device's memory. Other machines' work uses the same memory, and changes from
            second to second. One timing was up to four times off.
        rests: Number of bursts of work after a pause, which show head starts. All devices run them at once.
        message_bytes: Sizes of messages, ascending. The profiler leaves out sizes that would take longer than
            `longest_message_s`. Once the rate is steady, it also leaves out all larger sizes.
        longest_message_s: Limit for a single message.
        message_warm_ups: Messages of each size that are not timed.
        repeats: Timed messages of each size. If they take longer than `message_s` together, at least `large_repeats`.
        large_repeats: See `repeats`.
        message_s: See `repeats`.
        scattered_s: If the times of the largest messages scatter, the profiler sends more of these messages for at most
            this time.
        steady_s: Only a message that takes at least this time shows if the rate is steady.
        steady: The rate is steady if it differs by less than this part from the rate of the size before.
        tiny_repeats: Messages of one byte that give the latency.
        exchange_s: Approximate time for which both directions of a link, or all transfers of a card, run at once.
        retake_s: Time limit for timing again those links whose times show that something disturbed them.
        collective_bytes: Sizes of the full array of each collective. If empty, the profiler measures no collectives.
        message_limit_s: Time limit of a message. After it, the timing fails.
        probe_limit_s: Time limit of a probe of a device. After it, the profiler gives up the device.
        direction_limit_s: The same for all messages of one directed link.
        setup_limit_s: The same for loading JAX, and for compiling.
    """

    sizes: Tuple[int, ...]
    longest_product_s: float
    product_s: float
    device_rounds: int
    second_tries: float
    heat_s: float
    copy_bytes: int
    copy_s: float
    copies: int
    rests: int
    message_bytes: Tuple[int, ...]
    longest_message_s: float
    repeats: int
    large_repeats: int
    message_s: float
    tiny_repeats: int
    accelerator_copy_bytes: int = 1024 * MIB
    scattered_s: float = 0.5
    steady_s: float = 0.05
    steady: float = 0.02
    message_warm_ups: int = 1
    exchange_s: float = 0.2
    retake_s: float = 0.0
    shapes: Tuple[Tuple[str, int, int, int, int], ...] = ()
    collective_bytes: Tuple[int, ...] = ()
    message_limit_s: float = 15.0
    probe_limit_s: float = 30.0
    direction_limit_s: float = 60.0
    setup_limit_s: float = 180.0

    def portable(self) -> Any:
        """Return the same attributes in a type of the standard library, for workers on hosts without hwaware."""
        return SimpleNamespace(**self._asdict())


#: The default: a curve over more than four decades of FLOPs, messages up to 256 MiB where they are quick enough.
FULL = Policy(
    sizes=(48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 3072, 4096, 6144, 8192),
    shapes=(
        ("tall", 1, 8192, 128, 256),
        ("wide", 1, 128, 8192, 256),
        ("batched", 32, 128, 128, 128),
        ("batched-large", 8, 384, 384, 384),
    ),
    longest_product_s=0.3,
    product_s=0.2,
    device_rounds=2,
    second_tries=0.3,
    heat_s=0.5,
    copy_bytes=64 * MIB,
    copy_s=0.1,
    copies=5,
    rests=64,
    message_bytes=(
        *(KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB),
        *(4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    ),
    longest_message_s=0.6,
    message_warm_ups=5,
    repeats=20,
    large_repeats=5,
    message_s=0.2,
    scattered_s=1.5,
    tiny_repeats=30,
    exchange_s=0.3,
    retake_s=6.0,
    collective_bytes=(4 * KIB, 64 * KIB, MIB, 8 * MIB),
)

#: For a first look: fewer sizes, shorter messages, no further shapes, no collectives.
QUICK = Policy(
    sizes=(128, 256, 512, 1024, 2048, 4096, 8192),
    longest_product_s=0.08,
    product_s=0.12,
    device_rounds=1,
    second_tries=0.15,
    heat_s=0.1,
    copy_bytes=64 * MIB,
    copy_s=0.03,
    copies=3,
    rests=24,
    # Why 16 MiB: at 2 Gbit/s, 64 MiB take too long, and 4 MiB take 17 ms. A slow machine needs 3 ms of that to wake up.
    message_bytes=(KIB, 64 * KIB, 512 * KIB, 4 * MIB, 16 * MIB, 64 * MIB),
    longest_message_s=0.15,
    repeats=5,
    large_repeats=3,
    message_s=0.1,
    scattered_s=0.3,
    # Four messages of 4 MiB agree at 2 Gbit/s (17 ms each); the first of 16 MiB take a tenth longer than later ones.
    steady_s=0.015,
    steady=0.05,
    tiny_repeats=15,
    exchange_s=0.08,
    retake_s=1.0,
)

#: For a host that joins a cluster in use: quick, because the other hosts train meanwhile.
BESIDE = QUICK._replace(rests=8, retake_s=0.5, probe_limit_s=20.0, direction_limit_s=20.0, setup_limit_s=90.0)


def fits_after(edge: int, seconds: float, larger_edge: int, limit_s: float) -> bool:
    """Return True if a product of `larger_edge` stays within `limit_s`, given that one of `edge` took `seconds`.

    The time of a square product grows at most with the cube of its edge, because the rate grows too.
    """
    return seconds * (larger_edge / edge) ** 3 <= limit_s
