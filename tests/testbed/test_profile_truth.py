"""The profile of a testbed against the shares and rates that it was built with, through the command line."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

import pytest

from hwaware.bench import testbed
from hwaware.cluster import ClusterProfile

pytestmark = pytest.mark.testbed

SCENARIO = "fast-and-slow"
# Sizes from which the launch of a product no longer counts: 2 * 256^3 FLOPs.
LARGE_FLOPS = 2 * 256**3
# 5 % on a quiet machine (benchmarks/profiler.py). Beside other programs a device with a small share gets its processor
# time, to the percent, but finds its caches emptied after every pause: each product took up to a fifth more of it.
SHARE_TOLERANCE = 0.10
RATE_TOLERANCE = 0.08
FULL_LIMIT_S = 90
QUICK_LIMIT_S = 20
# Where other programs share the machine: starting the workers, loading JAX in each, and samples taken again.
START_S = 15


@pytest.fixture(scope="module")
def bed():
    if os.geteuid() != 0:
        pytest.skip("shares and rates are set as root only")
    with testbed.running(SCENARIO) as made:
        yield made


def run_profile(bed, path, *options):
    """The profile of the testbed and the seconds it took; the tests' own process stays out of the cluster."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", "from hwaware.cli import main; main()", "profile",
         "--address", bed.address, "-o", str(path), *options],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return ClusterProfile.load(path), time.monotonic() - start


@pytest.fixture(scope="module")
def full(bed, tmp_path_factory):
    return run_profile(bed, tmp_path_factory.mktemp("profile") / "cluster.json")


def relative_speeds(profile):
    """Each device's rate relative to the first one's: the median over the larger sizes that both were measured at."""
    curves = {
        device.id: {p.flops: p.flops / p.seconds for p in device.throughput["float32"] if p.flops >= LARGE_FLOPS}
        for device in profile.devices
    }
    first = curves[profile.devices[0].id]
    return {
        identifier: statistics.median(rate / first[flops] for flops, rate in curve.items() if flops in first)
        for identifier, curve in curves.items()
    }


def check_speeds(profile, scenario):
    first = scenario.shares[profile.devices[0].host]
    speeds = relative_speeds(profile)
    expected = {device.id: scenario.shares[device.host] / first for device in profile.devices}
    assert speeds == {name: pytest.approx(value, rel=SHARE_TOLERANCE) for name, value in expected.items()}


def check_rates(profile, scenario):
    found = {(one.source, one.target): one.bandwidth_bytes_per_s * 8e-6 for one in profile.links}
    hosts = [host.name for host in profile.hosts]
    expected = {(a, b): scenario.rate_mbit(a, b) for a in hosts for b in hosts if a != b}
    assert found == {pair: pytest.approx(rate, rel=RATE_TOLERANCE) for pair, rate in expected.items()}


def test_device_speeds_are_the_set_shares(bed, full):
    check_speeds(full[0], bed.scenario)


def test_link_rates_are_the_set_rates_in_each_direction(bed, full):
    check_rates(full[0], bed.scenario)


def test_the_devices_are_the_declared_ones(bed, full):
    profile, _ = full
    assert {host.name: host.address for host in profile.hosts} == bed.hosts
    assert [device.id for device in profile.devices] == [f"{host}:0" for host in bed.hosts]
    assert [device.memory_bytes for device in profile.devices] == [
        bed.scenario.memory_bytes(host) for host in bed.hosts
    ]
    assert len({device.kind for device in profile.devices}) == len(set(bed.scenario.shares.values()))


def test_the_full_profile_of_four_hosts_takes_under_90_seconds(full):
    assert full[1] < FULL_LIMIT_S


def test_the_quick_profile_is_quick_and_shows_the_rates(bed, tmp_path):
    profile, elapsed_s = run_profile(bed, tmp_path / "cluster.json", "--quick")
    assert elapsed_s < QUICK_LIMIT_S + START_S
    check_rates(profile, bed.scenario)


def test_nothing_is_left_on_the_cluster(bed, tmp_path):
    """A second profile right after the first gets every device: none is still held."""
    run_profile(bed, tmp_path / "first.json", "--quick")
    run_profile(bed, tmp_path / "second.json", "--quick")
