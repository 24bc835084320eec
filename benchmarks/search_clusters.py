"""The clusters and models that search.py and search_solvers.py plan, each made from a seed."""

from __future__ import annotations

import random
from typing import Tuple

from hwaware.bench.testbed.scenarios import Scenario
from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct
from hwaware.workload import Layer, Workload


def large_cluster(
    seed: int, devices: int, layers: int, samples: int, directed: bool = False, kinds: int = 4, per_host: int = 8
) -> Tuple[Workload, ClusterProfile]:
    """GPT-like layers on hosts of 8 devices, 4 kinds; links alike between two kinds, or random in each direction."""
    rng = random.Random(seed)
    hosts, speeds = devices // per_host, [rng.uniform(0.4, 1.0) for _ in range(kinds)]

    def curve(speed: float) -> Tuple[MatrixProduct, ...]:
        # Small products run at 0.3 to 1 of the full rate.
        return tuple(
            MatrixProduct(flops=f, seconds=f / (1e14 * speed) / (0.3 + 0.7 * min(1.0, (f / 1e12) ** 0.25)))
            for f in (1e9, 1e10, 1e11, 1e12, 1e13)
        )

    boxes = tuple(
        Device(
            id=f"h{h}:{d}", host=f"h{h}", kind=f"k{h % kinds}", memory_bytes=(24 + 8 * (h % kinds)) << 30,
            memory_bandwidth_bytes_per_s=1e12, throughput={"float16": curve(speeds[h % kinds])},
        )
        for h in range(hosts)
        for d in range(per_host)
    )  # fmt: skip
    rates = {(a, b): rng.uniform(1.2e10, 5e10) for a in range(kinds) for b in range(a, kinds)}
    links = [Link(source=f"h{h}", target=f"h{h}", latency_s=5e-6, bandwidth_bytes_per_s=1.5e11) for h in range(hosts)]
    for a in range(hosts):
        for b in range(hosts):
            if a == b or (a > b and not directed):
                continue
            one, other = sorted((a % kinds, b % kinds))
            rate = rng.uniform(5e9, 5e10) if directed else rates[one, other]
            links.append(Link(source=f"h{a}", target=f"h{b}", latency_s=2e-5, bandwidth_bytes_per_s=rate))
    made = []
    for index in range(layers):
        work = rng.uniform(0.8, 1.2)
        made.append(
            Layer(
                name=str(index), forward_flops=work * samples * 1e12, backward_flops=2 * work * samples * 1e12,
                parameter_bytes=work * 4e8, output_bytes=samples * 1024 * 4096 * 2.0, activation_bytes=samples * 1e8,
                tensor_parallel_bytes=samples * 4 * 1024 * 4096 * 2.0, tensor_parallel_collectives=4,
            )
        )  # fmt: skip
    profile = ClusterProfile(hosts=tuple(Host(name=f"h{h}") for h in range(hosts)), devices=boxes, links=tuple(links))
    return Workload(name="large", microbatch_size=samples, dtype="float16", layers=tuple(made)), profile


def scenario_profile(scenario: Scenario) -> ClusterProfile:
    """Return a perfect profile of a scenario: 50 GFLOP/s a core, the set link rates, 1 ms latency."""
    boxes, links = [], []
    for host in scenario.hosts():
        for index in range(scenario.devices_of(host)):
            share = scenario.shares[host]
            boxes.append(
                Device(
                    id=f"{host}:{index}", host=host, kind=f"cpu {share:g}", memory_bytes=scenario.memory_bytes(host),
                    throughput={"float32": (MatrixProduct(flops=1e9, seconds=0.02 / share),)},
                )
            )  # fmt: skip
        for other in scenario.hosts():
            inside = scenario.inside_mbit or 20_000.0
            rate = inside if other == host else scenario.rate_mbit(host, other)
            links.append(Link(source=host, target=other, latency_s=1e-3, bandwidth_bytes_per_s=rate * 1e6 / 8))
    hosts = tuple(Host(name=host) for host in scenario.hosts())
    return ClusterProfile(hosts=hosts, devices=tuple(boxes), links=tuple(links))


def scenario_model(layers: int = 24, split: bool = False) -> Workload:
    """Layers of uneven work with about 1 MB between them; `split`: ones that tensor parallelism divides."""
    rng = random.Random(0)
    made = []
    for index in range(layers):
        work = rng.uniform(0.6, 1.6)
        made.append(
            Layer(
                name=str(index), forward_flops=work * 2e8, backward_flops=work * 4e8, parameter_bytes=work * 2e6,
                output_bytes=rng.uniform(0.3, 1.5) * 1e6, activation_bytes=4e6,
                tensor_parallel_bytes=2e5 if split else None,
            )
        )  # fmt: skip
    return Workload(name="scenario", microbatch_size=4, dtype="float32", layers=tuple(made))
