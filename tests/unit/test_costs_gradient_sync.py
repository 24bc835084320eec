"""Once per step: the ways to sum gradients against each other, and the seed notebook's arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwaware.costs.gradient_sync import (
    communication_share_s,
    epoch_bandwidth,
    parameter_server_s,
    reduction_server_s,
    ring_all_reduce_volume,
    summation_split,
    synchronisation_times_s,
)
from hwaware.errors import UnusableInputError

RECORDED = Path(__file__).parents[2] / "profiling" / "recorded"


def test_the_notebooks_times_and_bandwidths():
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
    assert parameter_server_s(1e9, 4, 1e9, 1e9) == 2 * 4
    assert parameter_server_s(1e9, 4, 1e9, 1e9, servers=4) == 2
    assert reduction_server_s(1e9, 4, 1e9, 1e9, servers=4) == 1
    with pytest.raises(UnusableInputError, match="at least 1"):
        reduction_server_s(1e9, 4, 1e9, 1e9, servers=0)


@given(st.integers(2, 64), st.integers(0, 64))
def test_the_split_is_byteps_own(workers, servers):
    servers = min(servers, workers)
    split = summation_split(1e9, workers, 1e9, 1e9, servers)
    divisor = workers**2 + servers * workers - 2 * servers
    assert split.seconds == pytest.approx(2 * workers * (workers - 1) / divisor, rel=1e-9)
    assert servers * split.on_server + workers * split.on_worker == pytest.approx(1e9)
    assert split.on_worker == pytest.approx((workers - servers) / divisor * 1e9, abs=1)


@given(st.integers(2, 16), st.integers(1, 16), st.floats(0.1, 10), st.floats(0, 1))
def test_no_other_split_is_faster(workers, servers, server_rate, fraction):
    best = summation_split(1.0, workers, 1.0, server_rate, servers).seconds
    on_worker = fraction / workers
    on_server = (1.0 - fraction) / servers
    other = max(workers * on_server / server_rate, 1.0 + (workers - 2) * on_worker)
    assert best <= other * (1 + 1e-9)


def test_which_is_fastest_depends_on_the_spare_hosts():
    assert next(iter(synchronisation_times_s(1e9, 8, 1e9))) == "ring"
    times = synchronisation_times_s(1e9, 8, 1e9, server_bytes_per_s=1e9, servers=4)
    assert next(iter(times)) == "byteps"
    assert times["ring"] == pytest.approx(1.75)
    assert list(times.values()) == sorted(times.values())
    assert summation_split(1e9, 1, 1e9, 1e9, 3).seconds == 0
    assert ring_all_reduce_volume(8.0, 2) == 8.0
