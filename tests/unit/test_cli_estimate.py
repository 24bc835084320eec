"""estimate: sums, memory and iterations against values by hand, and hostile input."""

import json
import math
from pathlib import Path

import builders
import msgspec
import pytest
from builders import cluster, layer, workload
from click.testing import CliRunner

import hwaware
from hwaware.cli import main
from hwaware.cluster import Collective, LinkSample
from hwaware.costs import Correction, evaluate
from hwaware.costs.iterations import COLUMNS
from hwaware.plans import Plan, Replica, Stage
from hwaware.workload import Shared

ROOT = Path(__file__).parents[2]
A100 = ROOT / "profiling" / "recorded" / "a100_iterations.csv"
DEMO = ROOT / "benchmarks" / "results" / "demo" / "result.json"
V100 = ROOT / "profiling" / "recorded" / "v100-two-hosts.json"


def run(*arguments):
    return CliRunner().invoke(main, ["estimate", *map(str, arguments)], env={"COLUMNS": "140"})


def answer(*arguments):
    outcome = run(*arguments, "--json")
    assert outcome.exit_code == 0, outcome.output
    return json.loads(outcome.stdout)


def refused(*arguments):
    outcome = run(*arguments)
    assert outcome.exit_code == 2, outcome.output
    assert outcome.stdout == ""
    assert "Traceback" not in outcome.stderr
    assert len([line for line in outcome.stderr.splitlines() if line.startswith("Error: ")]) == 1
    return outcome.stderr


@pytest.fixture
def saved(tmp_path):
    """Write a record to a file, and return its path."""

    def save(record, name="record.json"):
        record.save(tmp_path / name)
        return tmp_path / name

    return save


def test_sync_takes_spare_hosts_as_servers(saved):
    path = saved(cluster("abcd", between=(1e9, 0.01)))
    found = answer("sync", path, "--bytes", "1GB", "--workers", "a", "--workers", "b:0")
    assert (found["workers"], found["servers"], found["fastest"]) == (["a:0", "b:0"], 2, "ring")
    by_hand = {
        "ring": 2 * (0.5 + 0.01),
        "byteps": 1.0 + 0.02,
        "reduction-server": 1.0 + 0.02,
        "sharded-parameter-server": 2.0 + 0.02,
        "parameter-server": 4.0 + 0.02,
    }
    assert found["seconds"] == pytest.approx(by_hand)


def test_sync_prints_the_ways_by_their_times(saved):
    path = saved(cluster("abcd", between=(1e9, 0.01)))
    lines = run("sync", path, "--bytes", "1GB", "--servers", "8").stdout.splitlines()
    assert lines[0].startswith("4 workers, 8 servers")
    ways = [line.split()[0] for line in lines[3:8]]
    # 1 s for servers that stream; rings send 1.5 GB in six messages; parameter servers take in all and give out all.
    assert ways == ["byteps", "reduction-server", "ring", "sharded-parameter-server", "parameter-server"]


def test_the_ring_is_what_evaluate_says_also_where_it_was_measured(saved):
    points = tuple(LinkSample(bytes=size, seconds=size / 3e7) for size in (1e5, 1e6, 1e7, 1e8))
    curve = Collective(op="all-reduce", devices=("a:0", "b:0", "c:0"), dtype="float32", points=points)
    profile = msgspec.structs.replace(cluster("abc"), collectives=(curve,))
    found = answer("sync", saved(profile), "--bytes", "64MB")
    assert found["is_measured"]
    assert found["seconds"]["ring"] == pytest.approx(64e6 / 3e7)
    model = workload([layer(parameter_bytes=64e6)], microbatch_size=3)
    plan = builders.plan((0, 0, "a:0", "b:0", "c:0"))
    assert found["seconds"]["ring"] == evaluate(plan, model, profile).stages[0].gradient_sync_s
    assert "measured" in run("sync", saved(profile), "--bytes", "64MB").stdout


def zero_workload():
    sizes = {"parameter_bytes": 100.0, "gradient_bytes": 100.0, "optimizer_bytes": 200.0, "activation_bytes": 40.0}
    return workload([layer(**sizes), layer(**sizes), layer(**sizes)], microbatch_size=4)


def test_memory_of_each_level_by_hand(saved):
    path = saved(zero_workload())
    found = answer("memory", path, "--devices", "4", "--microbatches", "2", "--host-rate", "1000")
    rows = {(row["level"], row["offload"]): row for row in found["levels"]}
    state = {key: row["state_bytes"] for key, row in rows.items()}
    assert state == {
        (0, False): 1200.0, (0, True): 600.0, (1, False): 750.0, (1, True): 600.0,
        (2, False): 525.0, (2, True): 375.0, (3, False): 300.0, (3, True): 150.0,
    }  # fmt: skip
    # One microbatch of a quarter of 120 bytes of activations is in flight.
    assert {row["memory_bytes"] - row["state_bytes"] for row in rows.values()} == {30.0}
    sent = [rows[level, False]["sent_bytes"] for level in range(4)]
    # At level 2, both microbatches sum their gradients, and the parameters travel once.
    assert sent == [450.0, 450.0, 0.75 * (2 * 300 + 300), 0.75 * 2 * (300 + 600)]
    assert rows[0, True]["offload_s"] == pytest.approx(0.6)
    assert rows[2, True]["offload_s"] == pytest.approx(0.15)
    assert rows[2, False]["offload_s"] is None


def test_memory_at_level_zero_is_what_evaluate_counts_and_shared_weights_count_once(saved, tmp_path):
    shared = (Shared(layers=(0, 2), parameter_bytes=60.0, optimizer_bytes=120.0),)
    model = msgspec.structs.replace(zero_workload(), shared=shared)
    profile = cluster("ab", memory_bytes=1300)
    found = answer(
        "memory", saved(model), "--cluster", saved(profile, "cluster.json"), "--microbatches", "3", "--layers", "0-2"
    )
    plan = Plan(
        num_microbatches=3,
        stages=(Stage(layers=(0, 2), replicas=(Replica(devices=("a:0",)), Replica(devices=("b:0",)))),),
    )
    level = found["levels"][0]
    assert level["memory_bytes"] == evaluate(plan, model, profile).stages[0].memory_bytes
    assert level["state_bytes"] == 1200 - 180
    assert level["fits"] == 2
    one = answer("memory", saved(model), "--cluster", tmp_path / "cluster.json", "--layers", "1")
    assert one["levels"][0]["state_bytes"] == 400
    later = answer("memory", saved(model), "--microbatches", "9", "--later-stages", "2")
    assert later["levels"][0]["memory_bytes"] == 1020 + 3 * 120


def test_iterations_of_a_tenth_predict_another_row(tmp_path):
    lines = A100.read_text().splitlines()
    header, rows = lines[1], lines[2:]
    tenth = tmp_path / "tenth.csv"
    tenth.write_text("\n".join(["# a tenth", header, *rows[::10]]) + "\n")
    names = header.split(",")
    other = dict(zip(names, rows[5].split(",")))
    asked = ",".join(f"{name}={other[name]}" for name in COLUMNS if name != "sequence_length")
    found = answer("iterations", tenth, "--at", asked)
    assert found["rows"] == 144
    assert found["errors"]["mean"] < 0.08
    (predicted,) = found["predicted"]
    assert predicted["sequence_length"] == 1024
    assert predicted["iteration_s"] == pytest.approx(float(other["iteration_ms"]) / 1e3, rel=0.3)
    assert "iteration" in run("iterations", tenth, "--at", asked).stdout


ROW = "8,1,1024,16,24,1024,1,1,1"


def test_iterations_in_seconds_and_in_milliseconds_are_the_same(tmp_path):
    for name, factor in (("iteration_s", 1), ("iteration_ms", 1000)):
        rows = [f"8,1,1024,16,{layers},1024,1,1,1,{layers * 0.02 * factor}" for layers in (4, 8, 16)]
        (tmp_path / f"{name}.csv").write_text("\n".join([",".join([*COLUMNS, name]), *rows]))
    seconds, thousandths = (
        answer("iterations", tmp_path / f"{name}.csv", "--at", "layers=12") for name in ("iteration_s", "iteration_ms")
    )
    assert seconds["predicted"][0]["iteration_s"] == pytest.approx(0.24, rel=0.02)
    assert thousandths["predicted"][0]["iteration_s"] == pytest.approx(seconds["predicted"][0]["iteration_s"], rel=1e-4)
    assert seconds["errors"] is None
    assert "Ten rows or more" in run("iterations", tmp_path / "iteration_s.csv").stdout


HEADER = ",".join([*COLUMNS, "iteration_s"])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "no rows"),
        (b"a,b\n1,2\n", "lacks the columns global_batch"),
        (f"{HEADER}\n".encode(), "no rows"),
        (f"{HEADER}\n{ROW}\n".encode(), "iteration_s ''"),
        (f"{HEADER}\n{ROW},nan\n".encode(), "iteration_s 'nan'"),
        (f"{HEADER}\n{ROW},-1\n".encode(), "iteration_s '-1'"),
        (f"{HEADER}\n{ROW},1e300\n".encode(), "iteration_s '1e300'"),
        (f"{HEADER}\n{ROW.replace('8,', '0.5,', 1)},1\n".encode(), "0.5 microbatches"),
        (b"\xff\xfe\x00", "no CSV file"),
        (b'"' + b"x" * 200_000, "no CSV file"),
    ],
)
def test_files_that_hold_no_iterations_are_refused(tmp_path, content, says):
    (tmp_path / "bad.csv").write_bytes(content)
    assert says in refused("iterations", tmp_path / "bad.csv")


def test_iterations_from_a_program_of_windows_begin_with_a_mark(tmp_path):
    (tmp_path / "marked.csv").write_text(f"{HEADER}\n{ROW},1\n", encoding="utf-8-sig")
    assert answer("iterations", tmp_path / "marked.csv")["rows"] == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["iterations", "none.csv"], "none.csv"),
        (["iterations", A100, "--at", "layers=48"], "lacks global_batch"),
        (["iterations", A100, "--at", "depth=48"], "depth=48"),
        (["iterations", A100, "--at", "layers=many"], "layers=many"),
        (["iterations", A100, "--at", "layers=-1"], "layers=-1"),
        (["iterations", A100, "--at", "layers=48,layers=24"], "gives layers two values"),
        (["adapting", V100, A100, "--compile", "inf"], "--compile"),
        (["sync", V100], "--bytes"),
        (["sync", V100, "--bytes", "much"], "much"),
        (["sync", V100, "--bytes", "1e99"], "1e99"),
        (["sync", V100, "--bytes", "1GB", "--workers", "mars"], "mars"),
        (["sync", V100, "--bytes", "1GB", "--workers", "h0:0"], "at least 2 workers"),
        (["sync", V100, "--bytes", "1GB", "--servers", "-1"], "-1"),
        (["sync", A100, "--bytes", "1GB"], "a100_iterations.csv"),
        (["memory", V100], "expected 'hwaware.workload'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert says in refused(*arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--layers", "0-9"], "layers 0 to 9"),
        (["--layers", "2-1"], "layers 2 to 1"),
        (["--layers", "few"], "few"),
        (["--devices", "5"], "5 devices share"),
        (["--devices", "2", "--cluster", V100], "--cluster and --devices"),
        (["--host-rate", "0"], "--host-rate"),
        (["--microbatches", "0"], "0"),
    ],
)
def test_stages_that_cannot_be_are_refused(arguments, says, saved):
    assert says in refused("memory", saved(zero_workload()), *arguments)


def test_no_bytes_take_no_time(saved):
    found = answer("sync", saved(cluster("ab")), "--bytes", "0")
    assert found["seconds"]["ring"] == 0.0
    assert all(math.isfinite(seconds) for seconds in found["seconds"].values())
    assert run("sync", saved(cluster("ab")), "--bytes", "0").exit_code == 0


def test_refit_finds_the_slower_kind_and_writes_files_that_predict_the_steps(tmp_path):
    demo = hwaware.BenchmarkResult.load(DEMO)
    truth = Correction(compute={"cpu-0.20": 1.5}, communication=1.0).applied(demo.workload, demo.profile)
    mappings = tuple(
        msgspec.structs.replace(one, step_s=(evaluate(one.plan, *truth).step_s,) * 6, pipeline_s=(), timeline=None)
        for one in demo.mappings
    )
    path = tmp_path / "result.json"
    msgspec.structs.replace(demo, mappings=mappings).save(path)
    written = tmp_path / "cluster.json", tmp_path / "workload.json"
    found = answer("refit", path, "-o", written[0], "--workload", written[1])
    assert found["compute"] == pytest.approx({"cpu-0.20": 1.5, "cpu-0.40": 1.0, "cpu-0.80": 1.0}, rel=0.02)
    assert found["errors"]["after"] < 0.02 < found["errors"]["before"]
    profile, model = hwaware.ClusterProfile.load(written[0]), hwaware.Workload.load(written[1])
    for one in mappings:
        assert evaluate(one.plan, model, profile).step_s == pytest.approx(one.median_step_s, rel=0.05)
    assert "cpu-0.20" in run("refit", path).stdout


def test_refit_leaves_out_what_ran_before_the_cluster_changed(tmp_path):
    path = ROOT / "benchmarks" / "results" / "bench" / "slows-midway-gpt-small.json"
    midway = hwaware.BenchmarkResult.load(path)
    after = tuple(one for one in midway.mappings if one.name != "hwaware-before")
    assert len(after) == len(midway.mappings) - 1
    msgspec.structs.replace(midway, mappings=after).save(tmp_path / "after.json")
    assert answer("refit", path) == answer("refit", tmp_path / "after.json")


def test_refit_needs_what_ran(tmp_path):
    demo = hwaware.BenchmarkResult.load(DEMO)
    msgspec.structs.replace(demo, profile=None).save(tmp_path / "old.json")
    assert "lacks the workload or the profile" in refused("refit", tmp_path / "old.json")
    assert "expected 'hwaware.benchmark'" in refused("refit", V100)
