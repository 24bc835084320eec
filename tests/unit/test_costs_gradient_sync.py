"""Once per step: the ways to sum gradients against each other, and the seed notebook's arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from builders import card, cluster, link, links, script
from hypothesis import given
from hypothesis import strategies as st

from hwaware.cluster import Collective, LinkSample
from hwaware.costs.synchronisation import compare_syncs, servers_s, summation_s
from hwaware.errors import PlanError, UnusableInputError

RECORDED = Path(__file__).parents[2] / "profiling" / "recorded"


def test_the_notebooks_times_and_bandwidths():
    predictions = script("predictions")
    communication_share_s, epoch_bandwidth = predictions.communication_share_s, predictions.epoch_bandwidth
    source = json.loads((RECORDED / "resnet18_data_parallel.json").read_text())
    for devices in (2, 4):
        for batch, alone in source["epoch_s"]["1"].items():
            spent = communication_share_s(source["epoch_s"][str(devices)][batch], alone, devices)
            assert spent == source["communication_s"][str(devices)][batch]
            rate = epoch_bandwidth(source["parameters"], devices, source["dataset_images"], int(batch), spent)
            assert rate / 1e9 == pytest.approx(source["bandwidth_gparams_per_s"][str(devices)][batch], abs=1e-6)
            # The source calls this GB/s; in bytes it is four times as much.
            nbytes = 4 * source["parameters"]
            assert epoch_bandwidth(nbytes, devices, 50000, int(batch), spent) == pytest.approx(4 * rate)


def test_one_server_serves_everybody_in_turn():
    assert servers_s(1e9, 4, 1e9, 1e9, servers=1, passes=2) == 2 * 4
    assert servers_s(1e9, 4, 1e9, 1e9, servers=4, passes=2) == 2
    assert servers_s(1e9, 4, 1e9, 1e9, servers=4, passes=1) == 1


@given(st.integers(2, 64), st.integers(0, 64))
def test_the_time_of_summation_services_is_byteps_own(workers, servers):
    servers = min(servers, workers)
    seconds = summation_s(1e9, workers, 1e9, 1e9, servers)
    divisor = workers**2 + servers * workers - 2 * servers
    assert seconds == pytest.approx(2 * workers * (workers - 1) / divisor, rel=1e-9)


@given(st.integers(2, 16), st.integers(1, 16), st.floats(0.1, 10), st.floats(0, 1))
def test_no_other_split_is_faster(workers, servers, server_rate, fraction):
    best = summation_s(1.0, workers, 1.0, server_rate, servers)
    on_worker = fraction / workers
    on_server = (1.0 - fraction) / servers
    other = max(workers * on_server / server_rate, 1.0 + (workers - 2) * on_worker)
    assert best <= other * (1 + 1e-9)


EIGHT = cluster("abcdefgh", between=(1e9, 0.01))


def workers(count):
    return [f"{host}:0" for host in "abcdefgh"[:count]]


def test_which_is_fastest_depends_on_the_spare_hosts():
    alone = compare_syncs(EIGHT, 1e9, workers(8), servers=0)
    # 14 messages of 125 MB and 0.01 s each; the same bytes with two latencies.
    assert alone.seconds == pytest.approx({"byteps": 1.75 + 0.02, "ring": 14 * 0.135})
    found = compare_syncs(EIGHT, 1e9, workers(4), servers=4)
    by_hand = {
        "ring": 6 * (0.25 + 0.01),
        "byteps": 1.0 + 0.02,
        "reduction-server": 1.0 + 0.02,
        "sharded-parameter-server": 2.0 + 0.02,
        "parameter-server": 8.0 + 0.02,
    }
    assert found.seconds == pytest.approx(by_hand)
    assert list(found.seconds.values()) == sorted(found.seconds.values())
    assert (found.worker_bytes_per_s, found.server_bytes_per_s, found.latency_s) == (1e9, 1e9, 0.01)


def test_servers_are_the_fastest_spare_hosts_and_then_as_fast_as_workers():
    slow = cluster("abcd", [*links(("ab",), 1e9), *links(("ac", "bc"), 4e9), *links(("ad", "bd", "cd"), 1e8)])
    assert compare_syncs(slow, 1e9, workers(2), servers=1).server_bytes_per_s == 4e9
    assert compare_syncs(slow, 1e9, workers(2), servers=2).server_bytes_per_s == 1e8
    assert compare_syncs(slow, 1e9, workers(3), servers=5).server_bytes_per_s == 1e8
    assert compare_syncs(EIGHT, 1e9, workers(8), servers=3).server_bytes_per_s == 1e9


def test_workers_divide_a_shared_card_and_measured_rings_win():
    crowded = cluster({"a": 2, "b": 2}, cards=(card("a:0", "a:1", send=5e8),))
    found = compare_syncs(crowded, 1e9, ["a:0", "a:1", "b:0", "b:1"], servers=0)
    assert found.worker_bytes_per_s == 2.5e8
    points = tuple(LinkSample(bytes=size, seconds=size / 1e8) for size in (1e5, 1e7, 1e9))
    curve = Collective(op="all-reduce", devices=("a:0", "b:0"), dtype="float32", points=points)
    profile = msgspec.structs.replace(EIGHT, collectives=(curve,))
    found = compare_syncs(profile, 1e8, workers(2), servers=0)
    assert found.seconds["ring"] == pytest.approx(1.0)
    assert found.is_measured


def test_one_worker_or_workers_apart_are_refused():
    with pytest.raises(UnusableInputError, match="at least 2 workers"):
        compare_syncs(EIGHT, 1e9, workers(1), servers=0)
    chain = cluster("abc", [link("a", "b"), link("b", "c")])
    with pytest.raises(PlanError, match="no link"):
        compare_syncs(chain, 1e9, ["a:0", "c:0"], servers=0)
