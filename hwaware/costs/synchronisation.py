"""Compare ways to sum gradients: rings, parameter servers, reduction servers, and BytePS's summation services.

The runtime sums in rings, so `evaluate` prices rings alone.
"""

from __future__ import annotations

from typing import Dict, NamedTuple, Sequence

import numpy as np

from hwaware.cluster import ClusterProfile
from hwaware.costs.prepared import PreparedCosts
from hwaware.errors import UnusableInputError
from hwaware.workload import Workload


def servers_s(
    nbytes: float, workers: int, worker_bytes_per_s: float, server_bytes_per_s: float, servers: int, passes: int
) -> float:
    """Return the time in which each of N workers gives n bytes to s servers, and gets n bytes back.

        t = k max(n N / (s W_s), n / W_w)

    The servers share the bytes evenly. With parameter servers, k = 2: pushes end before pulls begin. With reduction
    servers, k = 1: links carry both directions at once, and sums leave while gradients still come in.

    Example:
        >>> [servers_s(1e9, 8, 1e9, 1e9, servers, passes) for servers, passes in ((1, 2), (8, 2), (8, 1))]
        [16.0, 2.0, 1.0]

    Source: Li et al., "Scaling distributed machine learning with the parameter server", 2014. Google Cloud, "Optimize
    training performance with Reduction Server on Vertex AI", 2021.
    """
    return passes * max(nbytes * workers / (servers * server_bytes_per_s), nbytes / worker_bytes_per_s)


def summation_s(
    nbytes: float, workers: int, worker_bytes_per_s: float, server_bytes_per_s: float, servers: int
) -> float:
    """Return the least time in which services on k spare hosts and on N >= 2 workers sum n bytes.

        minimise max(N c / W_s, (n + (N - 2) g) / W_w)   with  k c + N g = n,  c, g >= 0

    A server takes in and gives out N c at once. A worker gives out n - g of its own, and (N - 1) g of its sums. Without
    servers, the time is a ring's.

    Example:
        >>> [round(summation_s(1e9, 4, 1e9, 1e9, k), 4) for k in (0, 2, 4)]
        [1.5, 1.2, 1.0]

    Source: Jiang et al., "A unified architecture for accelerating distributed DNN training" (BytePS), 2020, section 4.
    """
    alone = nbytes / workers
    if servers < 1:
        return (nbytes + (workers - 2) * alone) / worker_bytes_per_s
    # Both ends equal; g is what remains for the workers, at least nothing.
    server, worker = workers / server_bytes_per_s, (workers - 2) / worker_bytes_per_s
    on_worker = (nbytes * server / servers - nbytes / worker_bytes_per_s) / (worker + server * workers / servers)
    on_worker = min(alone, max(0.0, on_worker))
    on_server = (nbytes - workers * on_worker) / servers
    return max(on_server * server, (nbytes + (workers - 2) * on_worker) / worker_bytes_per_s)


class Syncs(NamedTuple):
    """Hold the times of one gradient sum."""

    seconds: Dict[str, float]  # of each way, fastest first
    worker_bytes_per_s: float  # at which each worker sends and receives
    server_bytes_per_s: float
    latency_s: float  # longest of an empty message between two workers
    is_measured: bool  # measured collectives price the ring


def compare_syncs(
    profile: ClusterProfile, nbytes: float, workers: Sequence[str], servers: int, dtype: str = "float32"
) -> Syncs:
    """Price every way to sum gradients of n bytes over at least two devices of a cluster.

    The ring has the price that `evaluate` gives to such replicas. The other ways follow their formulas, plus two
    latencies. Their rates are those of the slowest link, or a worker's part of a shared card. Servers are the hosts
    without workers that have the fastest links, and then as fast as a worker. `dtype` chooses measured collectives.

    Raises:
        UnusableInputError: Fewer than two workers, or no number of servers.
        PlanError: Two workers have no link.

    Example:
        >>> profile = ClusterProfile.uniform(hosts=4, latency_s=0)
        >>> found = compare_syncs(profile, 1e9, ("h0:0", "h1:0"), servers=2)
        >>> {way: round(seconds, 3) for way, seconds in found.seconds.items()}  # doctest: +NORMALIZE_WHITESPACE
        {'ring': 1.0, 'byteps': 1.0, 'reduction-server': 1.0, 'sharded-parameter-server': 2.0, 'parameter-server': 4.0}
    """
    if len(set(workers)) < 2 or servers < 0:
        raise UnusableInputError(
            f"{len(set(workers))} workers and {servers} servers, expected at least 2 workers and 0 servers.",
            "name more devices as workers.",
        )
    costs = PreparedCosts(Workload.uniform(microbatch_size=len(workers), dtype=dtype), profile)
    ring_s = float(costs.gradient_sums_s(np.array([nbytes]), [(worker,) for worker in workers])[0])
    pairs = [costs.link(one, other) for one in workers for other in workers if one != other]
    shared = [(card, sum(worker in card.devices for worker in workers)) for card in profile.shared_cards]
    parts = [min(card.send_bytes_per_s, card.receive_bytes_per_s) / count for card, count in shared if count > 1]
    worker_rate = min([link.bandwidth_bytes_per_s for link in pairs] + parts)
    server_rate = _server_rate(costs, workers, servers, worker_rate)
    both_ways_s, asked = 2 * max(link.latency_s for link in pairs), (nbytes, len(workers), worker_rate, server_rate)
    times = {"ring": ring_s, "byteps": summation_s(*asked, servers) + both_ways_s}
    if servers:
        times["reduction-server"] = servers_s(*asked, servers, 1) + both_ways_s
        times["parameter-server"] = servers_s(*asked, 1, 2) + both_ways_s
    if servers > 1:
        times["sharded-parameter-server"] = servers_s(*asked, servers, 2) + both_ways_s
    fastest_first = dict(sorted(times.items(), key=lambda item: item[1]))
    is_measured = costs.measured_groups.find(workers) is not None
    return Syncs(fastest_first, worker_rate, server_rate, both_ways_s / 2, is_measured)


def _server_rate(costs: PreparedCosts, workers: Sequence[str], servers: int, worker_rate: float) -> float:
    """Return the rate of the slowest server."""
    busy = {costs.devices[worker].host for worker in workers}
    rates: Dict[str, float] = {}
    for device in costs.profile.devices:
        links = [costs.links.between(device.id, worker) for worker in workers]
        if device.host not in busy and device.host not in rates and None not in links:
            rates[device.host] = min(link.bandwidth_bytes_per_s for link in links if link is not None)
    chosen = sorted(rates.values(), reverse=True)[:servers]
    return min([*chosen, worker_rate] if len(chosen) < servers or not chosen else chosen)
