"""Build records for tests: each function fills in what a test does not care about."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import sys
from collections import Counter
from pathlib import Path

import msgspec

from hwaware.cluster import ClusterProfile, ConcurrentRate, Device, Host, Link, MatrixProduct, SharedCard
from hwaware.plans import Plan, Replica, Stage
from hwaware.workload import Layer, MeasuredTime, Workload

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parents[1] / "data"
ALL_CASES = bool(os.environ.get("HWAWARE_ALL_CASES"))


def enable_x64():
    """Let JAX compute in float64 inside a block; older JAX has this among its experiments."""
    import jax

    return (jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")).enable_x64(True)


def thinned(cases, every=5):
    """Return every fifth case, or every one with HWAWARE_ALL_CASES=1."""
    return list(cases)[:: 1 if ALL_CASES else every]


def chosen(cases, *places):
    """Return the cases at these places, or every one with HWAWARE_ALL_CASES=1."""
    return list(cases) if ALL_CASES else [cases[place] for place in places]


def seeds(*bounds, every=5):
    """Return every fifth seed of a range, or every one with HWAWARE_ALL_CASES=1."""
    return thinned(range(*bounds), every)


def examples(count, every=5, **more):
    """Return the settings for a fifth of `count` Hypothesis examples, or for all with HWAWARE_ALL_CASES=1."""
    from hypothesis import settings

    return settings(max_examples=len(thinned(range(count), every)), **more)


def device(name="a:0", seconds=1.0, **more):
    """Build a device on the host before the colon; 1 GFLOP takes `seconds`, or {FLOPs: seconds} is its curve."""
    curve = seconds if isinstance(seconds, dict) else {1e9: seconds}
    products = tuple(MatrixProduct(flops=flops, seconds=each) for flops, each in curve.items())
    given = {"host": name.split(":")[0], "kind": "cpu", "memory_bytes": 1 << 40, "throughput": {"float32": products}}
    return Device(**{"id": name, **given, **more})


def link(source, target, bytes_per_s=1e9, latency_s=0.0, **more):
    """Build a directed link."""
    return Link(source=source, target=target, latency_s=latency_s, bandwidth_bytes_per_s=bytes_per_s, **more)


def links(ends, bytes_per_s=1e9, latency_s=0.0):
    """Build equal links; a pair of ends may be written "ab"."""
    return [link(*pair, bytes_per_s, latency_s) for pair in ends]


def card(*devices, host=None, send=9e9, receive=None, concurrent=None):
    """Build the card that these devices share; `concurrent` maps numbers of transfers to the rate of each."""
    rates = tuple(ConcurrentRate(k=k, bytes_per_s=rate) for k, rate in (concurrent or {}).items())
    return SharedCard(
        host=host or devices[0].split(":")[0], devices=devices, send_bytes_per_s=send,
        receive_bytes_per_s=send if receive is None else receive, concurrent=rates,
    )  # fmt: skip


def cluster(devices="ab", links=None, *, between=(1e9,), inside=None, cards=(), addresses=None, **of_devices):
    """Build a cluster.

    Args:
        devices: Records, ids, or names of hosts with one device each; or {host: number of devices}.
        links: Links instead of one for each pair of hosts and one inside each host with several devices.
        between: Bytes per second, and seconds of latency, of the links between hosts.
        inside: The same of the links inside hosts; `between` if left out.
        cards: Shared cards.
        addresses: {host: address} of hosts that are part of a Ray cluster.
        of_devices: Fields of those devices that are given as names.
    """
    if isinstance(devices, dict):
        devices = [f"{host}:{k}" for host, count in devices.items() for k in range(count)]
    made = tuple(
        device(each if ":" in each else f"{each}:0", **of_devices) if isinstance(each, str) else each
        for each in devices
    )
    counts = Counter(each.host for each in made)
    if links is None:
        pairs = itertools.combinations_with_replacement(counts, 2)
        links = [
            link(a, b, *(between if a != b or inside is None else inside)) for a, b in pairs if a != b or counts[a] > 1
        ]
    hosts = tuple(Host(name=host, address=(addresses or {}).get(host)) for host in counts)
    return ClusterProfile(hosts=hosts, devices=made, links=tuple(links), shared_cards=tuple(cards))


def layer(flops=1e9, backward_flops=None, **more):
    """Build a layer without parameters, output or activations; backward takes twice the FLOPs of forward."""
    given = {"name": "layer", "parameter_bytes": 0, "output_bytes": 0, "activation_bytes": 0}
    backward = 2 * flops if backward_flops is None else backward_flops
    return Layer(**{**given, "forward_flops": flops, "backward_flops": backward, **more})


def timed(forward_s, backward_s, kind="cpu", **more):
    """Build what `Layer.measured` holds of whole microbatches on one kind of device."""
    return {kind: {"1,1": MeasuredTime(forward_s=forward_s, backward_s=backward_s, **more)}}


def workload(layers=2, microbatch_size=1, name="model", **of_layers):
    """Build a workload of so many equal layers, of layers with these FLOPs, or of these layers."""
    layers = [1e9] * layers if isinstance(layers, int) else layers
    made = [
        each if isinstance(each, Layer) else layer(each, **{"name": str(k), **of_layers})
        for k, each in enumerate(layers)
    ]
    return Workload(name=name, microbatch_size=microbatch_size, dtype="float32", layers=tuple(made))


def random_workload(rng, layers, microbatch_size=16):
    """Build a workload of unlike layers that tensor parallelism can split."""
    made = [
        layer(
            rng.uniform(0.5, 2) * 1e9, rng.uniform(1, 4) * 1e9, name=str(k), parameter_bytes=rng.uniform(0, 1e8),
            output_bytes=rng.uniform(0, 2e8), activation_bytes=rng.uniform(0, 1e8),
            tensor_parallel_bytes=rng.uniform(0, 1e8),
        )
        for k in range(layers)
    ]  # fmt: skip
    return workload(made, microbatch_size)


def stage(first, last, *replicas, **more):
    """Build a stage; a replica is a device, a tuple of devices for tensor parallelism, or a record."""
    made = tuple(
        each if isinstance(each, Replica) else Replica(devices=(each,) if isinstance(each, str) else tuple(each))
        for each in replicas
    )
    return Stage(layers=(first, last), replicas=made, **more)


def plan(*stages, num_microbatches=4, **more):
    """Build a plan of stages, each a record or (first, last, replica, ...)."""
    made = tuple(each if isinstance(each, Stage) else stage(*each) for each in stages)
    return Plan(num_microbatches=num_microbatches, stages=made, **more)


def chain(*stages, **more):
    """Build a plan with one layer a stage; a stage is its device, or a list of its replicas."""
    listed = ([each] if isinstance(each, str) else each for each in stages)
    return plan(*((k, k, *replicas) for k, replicas in enumerate(listed)), **more)


def _with_each(records, changes):
    return tuple(
        msgspec.structs.replace(
            each, **{name: change(each) if callable(change) else change for name, change in changes.items()}
        )
        for each in records
    )


def with_devices(profile, **changes):
    """Change all devices of a cluster; a change may be a function of the device."""
    return msgspec.structs.replace(profile, devices=_with_each(profile.devices, changes))


def with_links(profile, **changes):
    """Change all links of a cluster; a change may be a function of the link."""
    return msgspec.structs.replace(profile, links=_with_each(profile.links, changes))


def with_layers(model, **changes):
    """Change all layers of a workload; a change may be a function of the layer."""
    return msgspec.structs.replace(model, layers=_with_each(model.layers, changes))


def with_cards(profile, send, receive=None):
    """Put all devices of each host on one card."""
    by_host = {host.name: [each.id for each in profile.devices if each.host == host.name] for host in profile.hosts}
    cards = tuple(card(*ids, host=host, send=send, receive=receive) for host, ids in by_host.items())
    return msgspec.structs.replace(profile, shared_cards=cards)


def script(name):
    """Import a file of benchmarks/, which is no package."""
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


@contextlib.contextmanager
def applied(patches):
    """Apply patches inside the block, and revert them at its end."""
    patches.apply()
    try:
        yield
    finally:
        patches.revert()
