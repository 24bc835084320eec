"""What happens once per step: gradients are summed over the replicas, and the optimizer updates the parameters."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from hwaware.cluster import Link
from hwaware.costs.communication import send_time_s
from hwaware.costs.curves import FloatArray
from hwaware.errors import UnusableInputError
from hwaware.workload import Layer


def ring_all_reduce_s(nbytes: float, ring: Sequence[Link]) -> float:
    """Time of a ring all-reduce of n bytes over N members.

    t = 2 (N - 1) max_k send_k(n / N)  =  2 (N - 1) / N  n / W_slowest + 2 (N - 1) L   on straight links

    Each of the 2 (N - 1) rounds moves n / N bytes over every link of the ring at once and ends with the slowest link.

    Args:
        nbytes: n, the bytes of the operand on one member.
        ring: The N directed links, member k to member k + 1 and the last one to the first; empty for one member.

    Returns:
        Seconds; 0 for one member and for no bytes.

    Example:
        >>> there = Link(source="a", target="b", latency_s=0.001, bandwidth_bytes_per_s=1e6)
        >>> back = Link(source="b", target="a", latency_s=0.001, bandwidth_bytes_per_s=2e6)
        >>> ring_all_reduce_s(1e6, [there, back])
        1.002

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    return float(ring_all_reduces_s(np.array([nbytes], dtype=np.float64), len(ring), ring)[0])


def ring_pairs(members: Sequence[str]) -> List[Tuple[str, str]]:
    """Return the source and target of each message in a ring, where each member sends to the one before it.

    gloo's ring does so: where links are slow in one direction only, an all-reduce over four hosts took four times as
    long as the other direction's links would have it.

    Example:
        >>> ring_pairs(("a", "b", "c")), ring_pairs(("a",))
        ([('a', 'c'), ('b', 'a'), ('c', 'b')], [])
    """
    return [(member, members[k - 1]) for k, member in enumerate(members)] if len(members) > 1 else []


def position_rings(placed: Sequence[Sequence[str]]) -> List[List[str]]:
    """Return for each position in the replicas' groups the devices that sum their gradients in one ring.

    Example:
        >>> position_rings([("a:0", "a:1"), ("b:0", "b:1")])
        [['a:0', 'b:0'], ['a:1', 'b:1']]
    """
    return [[devices[k % len(devices)] for devices in placed] for k in range(max(map(len, placed)))]


def ring_all_reduces_s(nbytes: FloatArray, members: int, links: Sequence[Link]) -> FloatArray:
    """`ring_all_reduce_s` for several sizes at once; links that the ring has more than once may be given once.

    Example:
        >>> link = Link(source="a", target="b", latency_s=0.001, bandwidth_bytes_per_s=1e6)
        >>> ring_all_reduces_s(np.array([0.0, 1e6]), 2, [link]).tolist()
        [0.0, 1.002]
    """
    if members < 2:
        return np.zeros(len(nbytes))
    unlike = {(link.latency_s, link.bandwidth_bytes_per_s, link.samples): link for link in links}
    slowest = np.max([send_time_s(link, nbytes / members) for link in unlike.values()], axis=0)
    result: FloatArray = np.where(nbytes > 0, 2 * (members - 1) * slowest, 0.0)
    return result


def adding_time_s(nbytes: FloatArray, bytes_per_s: Sequence[Optional[float]]) -> FloatArray:
    """What the members of a ring all-reduce of n bytes compute beside the network, which waits for it.

    t = 2 (N - 1) / N  n / min_k R_k

    R_k is what member k hands on a second if the network takes no time; members without one count for nothing.

    Args:
        nbytes: n, for several sums at once.
        bytes_per_s: R of each of the N members.

    Example:
        >>> adding_time_s(np.array([0.0, 3e6]), [3e8, 1e8, None]).tolist()
        [0.0, 0.04]

    Source: measured. Sums of 29 MB by gloo took 0.1 s longer than the ring over 0.8 and over 1.6 Gbit/s.
    """
    known = [rate for rate in bytes_per_s if rate is not None]
    if not known:
        return np.zeros(len(nbytes))
    result: FloatArray = ring_all_reduce_volume(1.0, len(bytes_per_s)) * nbytes / min(known)
    return result


def update_time_s(layer: Layer, memory_bandwidth_bytes_per_s: Optional[float], group: int = 1) -> float:
    """Time of the optimizer's update of one layer on one device, bound by memory traffic.

    t = (2 min(p, g) + g + 2 o) / (TP M)

    Parameters p with a gradient and optimizer state o are read and written, gradients g are read, frozen parameters are
    left alone. M is the rate of device memory with reads and writes counted. Not known (None): 0, the update is then
    left out of the prediction.

    Example:
        >>> layer = Layer(name="0", forward_flops=1, backward_flops=2, parameter_bytes=1e6, output_bytes=0,
        ...               activation_bytes=0)
        >>> update_time_s(layer, 7e9), update_time_s(layer, None)
        (0.001, 0.0)

    Source: element-wise updates (SGD, Adam) do a few operations per byte, far below what any device can compute.
    """
    if memory_bandwidth_bytes_per_s is None:
        return 0.0
    updated = min(layer.parameter_bytes, layer.gradient_size_bytes)
    moved = 2 * updated + layer.gradient_size_bytes + 2 * layer.optimizer_size_bytes
    return moved / group / memory_bandwidth_bytes_per_s


def ring_all_reduce_volume(size: float, members: int) -> float:
    """What every member of a ring all-reduce sends, in the unit of `size` (bytes, or parameters): 2 (N - 1) / N size.

    Example:
        >>> ring_all_reduce_volume(100.0, 4), ring_all_reduce_volume(100.0, 1)
        (150.0, 0.0)

    Source: Patarasuk and Yuan, 2009.
    """
    return 2 * (members - 1) / members * size


def communication_share_s(parallel_s: float, alone_s: float, members: int) -> float:
    """What N devices spend on communication, from epoch times: T_N - T_1 / N.

    All that does not scale counts as communication, so it is an upper bound; it can be negative where N devices gain
    more than N times.

    Example:
        >>> communication_share_s(67.0, 38.0, 2)
        48.0
    """
    return parallel_s - alone_s / members


def epoch_bandwidth(size: float, members: int, samples: int, batch: int, communication_s: float) -> float:
    """Ring bandwidth of one epoch: ceil(samples / batch) all-reduces in `communication_s`, in units of `size` a second.

    W = 2 (N - 1) / N  size  ceil(samples / batch) / t.  Give the size in bytes to get bytes a second.

    Example:
        >>> round(epoch_bandwidth(11173962, 2, 50000, 32, 48.0) / 1e9, 6)  # parameters, not bytes: 4 bytes each
        0.363852
    """
    return ring_all_reduce_volume(size, members) * -(-samples // batch) / communication_s


def parameter_server_s(
    nbytes: float, workers: int, worker_bytes_per_s: float, server_bytes_per_s: float, servers: int = 1
) -> float:
    """Time of one synchronisation through parameter servers: every worker pushes n bytes and pulls n bytes.

    t = max(2 n N / (s W_s), 2 n / W_w)

    Pushes end before pulls begin, so both add up. The n bytes are sharded evenly over s servers.

    Example:
        >>> parameter_server_s(1e9, 8, 1e9, 1e9), parameter_server_s(1e9, 8, 1e9, 1e9, servers=8)
        (16.0, 2.0)

    Source: Li et al., "Scaling distributed machine learning with the parameter server", 2014.
    """
    _require_servers(servers)
    return max(2 * nbytes * workers / (servers * server_bytes_per_s), 2 * nbytes / worker_bytes_per_s)


def reduction_server_s(
    nbytes: float, workers: int, worker_bytes_per_s: float, server_bytes_per_s: float, servers: int
) -> float:
    """Time of one synchronisation through reduction servers, which stream: sums leave while gradients still come in.

    t = max(n / W_w, n N / (s W_s))

    Links carry both directions at once, so the time does not grow with N as long as there are N W_w / W_s servers.

    Example:
        >>> reduction_server_s(1e9, 8, 1e9, 1e9, 8), reduction_server_s(1e9, 8, 1e9, 1e9, 2)
        (1.0, 4.0)

    Source: Google Cloud, "Optimize training performance with Reduction Server on Vertex AI", 2021.
    """
    _require_servers(servers)
    return max(nbytes / worker_bytes_per_s, nbytes * workers / (servers * server_bytes_per_s))


class SummationSplit(NamedTuple):
    """How BytePS splits the n bytes: `on_server` bytes on each spare host, `on_worker` on each worker; seconds."""

    on_server: float
    on_worker: float
    seconds: float


def summation_split(
    nbytes: float, workers: int, worker_bytes_per_s: float, server_bytes_per_s: float, servers: int
) -> SummationSplit:
    """BytePS: summation services on k spare CPU hosts and on the N workers themselves, with the split that ends first.

    minimise max(N c / W_s, (n + (N - 2) g) / W_w)   with  k c + N g = n,  c, g >= 0

    A server takes in and gives out N c at once; a worker gives out n - g of its own and (N - 1) g of what it summed.
    For W_s = W_w = W and k <= N:  c = 2 (N - 1) n / D,  g = (N - k) n / D,  t = 2 N (N - 1) n / (D W),
    D = N^2 + k N - 2 k. Without servers it is a ring's time, with N or more n / W.

    Example:
        >>> [round(summation_split(1e9, 4, 1e9, 1e9, k).seconds, 4) for k in (0, 2, 4)]
        [1.5, 1.2, 1.0]

    Source: Jiang et al., "A unified architecture for accelerating distributed DNN training" (BytePS), 2020, section 4.
    """
    if workers < 2:
        return SummationSplit(0.0, 0.0, 0.0)
    alone = nbytes / workers
    if servers < 1:
        return SummationSplit(0.0, alone, (nbytes + (workers - 2) * alone) / worker_bytes_per_s)
    # Both ends equal; g is what remains for the workers, at least nothing.
    server, worker = workers / server_bytes_per_s, (workers - 2) / worker_bytes_per_s
    on_worker = (nbytes * server / servers - nbytes / worker_bytes_per_s) / (worker + server * workers / servers)
    on_worker = min(alone, max(0.0, on_worker))
    on_server = (nbytes - workers * on_worker) / servers
    seconds = max(on_server * server, (nbytes + (workers - 2) * on_worker) / worker_bytes_per_s)
    return SummationSplit(on_server, on_worker, seconds)


def synchronisation_times_s(
    nbytes: float,
    workers: int,
    worker_bytes_per_s: float,
    server_bytes_per_s: Optional[float] = None,
    servers: int = 0,
) -> Dict[str, float]:
    """Every way to sum gradients on this cluster and its time, fastest first.

    Args:
        nbytes: Bytes of the gradients.
        workers: N, hosts that train.
        worker_bytes_per_s: Rate of a worker's link, in each direction.
        server_bytes_per_s: Rate of a spare host's link; as a worker's if left out.
        servers: Spare hosts; without any only the ring and the workers' own summation remain.

    Example:
        >>> list(synchronisation_times_s(1e9, 8, 1e9, servers=4))
        ['byteps', 'ring', 'reduction-server', 'parameter-server']
        >>> list(synchronisation_times_s(1e9, 8, 1e9, servers=0))
        ['ring', 'byteps']
    """
    rate = worker_bytes_per_s if server_bytes_per_s is None else server_bytes_per_s
    times = {
        "ring": ring_all_reduce_volume(nbytes, workers) / worker_bytes_per_s,
        "byteps": summation_split(nbytes, workers, worker_bytes_per_s, rate, servers).seconds,
    }
    if servers:
        times["reduction-server"] = reduction_server_s(nbytes, workers, worker_bytes_per_s, rate, servers)
        times["parameter-server"] = parameter_server_s(nbytes, workers, worker_bytes_per_s, rate, servers)
    return dict(sorted(times.items(), key=lambda item: item[1]))


def _require_servers(servers: int) -> None:
    if servers < 1:
        raise UnusableInputError(f"{servers} servers, expected at least 1.", "give the number of spare hosts.")
