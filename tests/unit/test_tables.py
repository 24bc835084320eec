"""Tables: what a record holds is on the screen, with units, and brackets in names are text."""

import io

import builders
import msgspec
import pytest
from builders import link, stage
from rich.console import Console

from hwaware.errors import UnusableInputError
from hwaware.plans import Plan
from hwaware.records import FileRecord
from hwaware.report import tables
from hwaware.report.console import make_console
from hwaware.report.fitting import build_table
from hwaware.result import BenchmarkResult, Mapping


def shown(record):
    console = Console(file=io.StringIO(), width=160)
    tables.show(record, console)
    return console.file.getvalue()


def row(output, first):
    return next(line.split() for line in output.splitlines() if line.split()[:1] == [first])


@pytest.fixture
def cluster():
    links = [link("a", "b", 25e6, 1e-4), link("b", "a", 100e6, 1e-4), link("b", "c", 50e6, 3e-4)]
    found = builders.cluster("abc", links, seconds={1e9: 0.02, 8e9: 0.1}, memory_bytes=2 * 10**9)
    hosts = (msgspec.structs.replace(found.hosts[0], address="10.0.0.1"), *found.hosts[1:])
    return msgspec.structs.replace(found, hosts=hosts)


@pytest.fixture
def plan():
    first = stage(0, 2, "a:0", compute_s=0.1, memory_bytes=1e9)
    second = stage(3, 3, "b:0", compute_s=0.05, receive_s=0.01)
    return builders.plan(first, second, solver="exact", predicted_step_s=0.6)


def test_cluster_shows_hosts_devices_and_the_directed_links(cluster):
    output = shown(cluster)
    assert "float32 [GFLOP/s]" in output
    assert row(output, "a") == ["a", "10.0.0.1", "1"]
    assert row(output, "a:0") == ["a:0", "a", "cpu", "80.00", "2.000"]  # the better of 50 and 80 GFLOP/s
    bandwidths = output[output.index("Link bandwidth [MB/s]") : output.index("Link latency [µs]")]
    assert row(bandwidths, "a:0") == ["a:0", "-", "25.0", "-"]  # a and c have no link
    assert row(bandwidths, "b:0") == ["b:0", "100.0", "-", "50.0"]
    assert row(bandwidths, "c:0") == ["c:0", "-", "50.0", "-"]  # the missing reverse means symmetric


def test_workload_shows_each_layer_and_the_sums():
    layers = {"name": "x[0]", "parameter_bytes": 4e6, "output_bytes": 1e5, "activation_bytes": 1e6}
    output = shown(builders.workload([builders.layer(**layers)] * 2, 4, "m"))
    assert "Workload m: microbatches of 4, float32" in output
    assert row(output, "x[0]") == ["x[0]", "1.000", "2.000", "4.000", "8.000", "100.0", "1.000"]
    assert "6.000 GFLOP per microbatch, 8.000 MB of parameters" in output


def test_plan_shows_stages_in_order_and_gaps_as_dashes(plan):
    output = shown(plan)
    assert "Plan by exact: feasible, 4 microbatches, 1f1b" in output
    assert row(output, "0") == ["0", "0-2", "a:0", "100.0", "-", "-", "1.000"]
    assert row(output, "1") == ["1", "3", "b:0", "50.0", "10.0", "-", "-"]
    assert all(f"{name} [ms]" in output for name in ("compute", "receive", "gradient sync"))  # one unit for all times
    assert "predicted step 600.0 ms" in output
    assert "receive: time to get one microbatch's activations" in output
    likely = "90 % of steps take 500.0 ms to 700.0 ms. `hwaware evaluate` also prints the likely step."
    assert likely in " ".join(shown(msgspec.structs.replace(plan, step_interval_s=(0.5, 0.7))).split())


def test_infeasible_plan_shows_its_reason():
    output = shown(Plan(num_microbatches=4, stages=(), status="infeasible", reason="layer 3 needs 2 GB more"))
    assert "infeasible" in output
    assert "layer 3 needs 2 GB more" in output
    assert "gradient sync" not in output  # no empty table


def test_result_shows_predicted_beside_measured_and_the_speed_up(plan):
    common = {"plan": plan, "loss": (2.0, 1.5)}
    slow = Mapping(name="alpa", predicted_step_s=1.2, step_s=(1.0, 1.2, 1.1), reference_s=(1.0,) * 3, **common)
    # The machine was half as fast beside this mapping: its steps count half.
    fast = Mapping(name="hwaware", predicted_step_s=0.6, step_s=(0.8,) * 3, reference_s=(2.0,) * 3, **common)
    result = BenchmarkResult(
        environment={}, scenario="two", model="gpt", num_microbatches=4, repeats=3, mappings=(slow, fast)
    )
    named = msgspec.structs.replace(slow, name="alpa-12")
    assert "speed-up over alpa-12" in shown(msgspec.structs.replace(result, mappings=(fast, named)))
    output = shown(result)
    assert "speed-up over alpa" in output
    assert row(output, "alpa")[-7:] == ["1.200", "1.100", "1.000", "1.200", "3", "1.00x", "1.5"]
    assert row(output, "hwaware")[-7:] == ["0.600", "0.800", "0.800", "0.800", "3", "2.75x", "1.5"]


def test_no_colours_where_there_is_no_terminal(plan, capsys):
    tables.show(plan)
    output = capsys.readouterr().out
    assert "a:0" in output
    assert "\x1b" not in output


def test_unknown_record_is_refused():
    class Other(FileRecord, frozen=True):
        SCHEMA = "hwaware.other"

    with pytest.raises(UnusableInputError, match=r"no tables of a hwaware\.other yet.*To fix: .*--json"):
        tables.render(Other())


def test_the_words_around_a_narrow_table_are_not_folded(capsys):
    words = "The price of the ring comes from links."
    make_console().print(build_table("Measured over predicted time", [("way", ["ring"])], [("time [s]", ["1"])], words))
    printed = capsys.readouterr().out.splitlines()
    assert (printed[0], printed[-1]) == ("Measured over predicted time", words)


def test_a_large_cluster_shows_its_slowest_links_and_not_thousands_of_lines():
    names = [f"node{number}" for number in range(40)]
    pairs = [link(a, b, 1e9, 1e-4) for a in names for b in names]
    slow = link("node7", "node31", 2e8, 3e-4)
    links = [slow if (one.source, one.target) == ("node7", "node31") else one for one in pairs]
    output = shown(builders.cluster(dict.fromkeys(names, 4), links))
    assert len(output.splitlines()) < 40 + 160 + 40
    slowest = output[output.index("Slowest links") :].splitlines()
    assert slowest[3].split() == ["node7", "node31", "0.200", "300.0"]
    assert "The slowest of 1,600 links. Median bandwidth of all links: 1.000 GB/s" in output
