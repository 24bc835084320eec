"""Records: what is valid is read back unchanged, what is not ends in one message that names the place and the mend."""

import json
import os
import stat

import pytest

from hwaware.cluster import ClusterProfile, Flag, LinkTable
from hwaware.errors import RecordError
from hwaware.plans import Plan
from hwaware.records import rebuilt, require_writable, write_bytes
from hwaware.result import BenchmarkResult
from hwaware.workload import Workload


def cluster_document():
    curve = {"float32": [{"flops": 1e9, "seconds": 0.01}]}
    devices = [
        {"id": f"{host}:0", "host": host, "kind": "cpu", "memory_bytes": 1 << 30, "throughput": curve} for host in "abc"
    ]
    links = [
        {"source": "a", "target": "b", "latency_s": 1e-4, "bandwidth_bytes_per_s": 1e8},
        {"source": "b", "target": "c", "latency_s": 1e-4, "bandwidth_bytes_per_s": 2e8},
        {"source": "c", "target": "b", "latency_s": 1e-4, "bandwidth_bytes_per_s": 3e8},
        {"source": "a:0", "target": "c:0", "latency_s": 1e-4, "bandwidth_bytes_per_s": 4e8},
    ]
    return {
        "schema": "hwaware.cluster",
        "schema_version": 1,
        "hosts": [{"name": "a"}, {"name": "b"}, {"name": "c", "address": "10.0.0.3"}],
        "devices": devices,
        "links": links,
    }


def layer_document(**changes):
    layer = {"name": "0", "forward_flops": 1e9, "backward_flops": 2e9, "parameter_bytes": 4e6}
    return {**layer, "output_bytes": 1e5, "activation_bytes": 1e6, **changes}


def workload_document(**changes):
    document = {"schema": "hwaware.workload", "schema_version": 1, "name": "m", "microbatch_size": 4}
    return {**document, "dtype": "float32", "layers": [layer_document(), layer_document(name="1")], **changes}


def plan_document(**changes):
    stages = [
        {"layers": [0, 0], "replicas": [{"devices": ["a:0"]}]},
        {"layers": [1, 1], "replicas": [{"devices": ["b:0"]}]},
    ]
    return {"schema": "hwaware.plan", "schema_version": 1, "num_microbatches": 4, "stages": stages, **changes}


def result_document():
    mapping = {"name": "hwaware", "plan": {"num_microbatches": 4, "stages": plan_document()["stages"]}}
    mapping.update(predicted_step_s=1.0, step_s=[1.0, 2.0], reference_s=[0.1, 0.2], loss=[3.0, 2.0, 1.0])
    document = {"schema": "hwaware.benchmark", "schema_version": 1, "environment": {"jax": "0.4.30"}, "scenario": "s"}
    return {**document, "model": "gpt", "num_microbatches": 4, "repeats": 2, "mappings": [mapping]}


CASES = [
    (ClusterProfile, cluster_document()),
    (Workload, workload_document()),
    (Plan, plan_document()),
    (BenchmarkResult, result_document()),
]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reference_s": [0.1]}, "has 1 references for 2 steps"),
        ({"slowdowns": {"cpu": []}}, "has 0 slowdowns of 'cpu' for 2 steps"),
        ({"slowdowns": {"cpu": [1.0, 0.0]}}, "a value of the slowdowns of 'cpu' is 0.0"),
    ],
)
def test_what_was_timed_beside_steps_has_a_value_for_each(changes, message):
    document = result_document()
    document["mappings"][0].update(changes)
    with pytest.raises(RecordError, match=message):
        BenchmarkResult.from_json(json.dumps(document))


@pytest.mark.parametrize(("record", "document"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_written_is_read_back(record, document, tmp_path):
    first = record.from_json(json.dumps(document))
    first.save(tmp_path / "file.json")
    assert record.load(tmp_path / "file.json") == first
    assert json.loads((tmp_path / "file.json").read_text())["schema"] == record.SCHEMA


@pytest.mark.parametrize(("record", "document"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_unknown_keys_are_ignored(record, document):
    assert record.from_json(json.dumps({**document, "later": {"x": 1}})) == record.from_json(json.dumps(document))


def refusal(record, document):
    with pytest.raises(RecordError) as caught:
        record.from_json(document if isinstance(document, (str, bytes)) else json.dumps(document), name="file.json")
    message = str(caught.value)
    assert "To fix:" in message
    assert "file.json" in message
    assert caught.value.exit_code == 2
    return message


def changed_cluster(change):
    document = cluster_document()
    change(document)
    return document


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda d: d["devices"][0].update(memory_bytes=-1), "memory_bytes"),
        (lambda d: d["devices"][0].update(memory_bytes=0), "more than 0"),
        (lambda d: d["devices"][0]["throughput"]["float32"][0].update(seconds=0), "seconds is 0"),
        (lambda d: d["devices"][0]["throughput"].update(float32=[]), "empty throughput curve"),
        (lambda d: d["devices"][0].pop("kind"), "kind"),
        (lambda d: d["devices"][0].update(kind="\x1b[31mred"), "is '\\x1b[31mred', expected no control characters"),
        (lambda d: d["hosts"][0].update(address="1\x1b[2J"), "address of host 'a' is '1\\x1b[2J', expected no control"),
        (lambda d: d["devices"][1].update(id="a:0"), "'a:0' occurs more than once"),
        (lambda d: d["devices"][1].update(id="a"), "'a' occurs more than once"),
        (lambda d: d["devices"][0].update(host="z"), "unknown host 'z'"),
        (lambda d: d["links"].append(dict(d["links"][0])), "occurs more than once"),
        (lambda d: d["links"][0].update(target="z"), "unknown host or device 'z'"),
        (lambda d: d["links"][0].update(target="b:0"), "joins a host and a device"),
        (lambda d: d["links"][3].update(target="a:0"), "a link to itself"),
        (lambda d: d["links"][0].update(bandwidth_bytes_per_s=0), "bandwidth_bytes_per_s"),
        (lambda d: d["links"][0].update(latency_s=-1e-9), "latency_s"),
        (lambda d: d.update(links=d["links"][:1]), "unconnected"),
        (lambda d: d.update(devices=[]), "no devices"),
        (lambda d: d.pop("links"), "links"),
        (lambda d: d["devices"][0].update(throughput="fast"), "throughput"),
    ],
)
def test_a_bad_cluster_is_refused_by_name(change, expected):
    assert expected in refusal(ClusterProfile, changed_cluster(change))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "not valid JSON"),
        ("[]", "holds a JSON array, expected an object"),
        ("null", "holds a JSON null, expected an object"),
        ("true", "holds a JSON boolean, expected an object"),
        ('"text"', "holds a JSON string, expected an object"),
        ("3", "holds a JSON number, expected an object"),
        ("0.5", "holds a JSON number, expected an object"),
        ('{"schema": "hwaware.plan", "schema_version": 1}', "has schema 'hwaware.plan', expected 'hwaware.cluster'"),
        ("{}", "has no \"schema\", expected 'hwaware.cluster'"),
        ('{"schema": "hwaware.cluster", "schema_version": 2}', "too new"),
        ('{"schema": "hwaware.cluster", "schema_version": 0}', "too old"),
        ('{"schema": "hwaware.cluster"}', "schema_version None"),
        ('{"schema": "hwaware.cluster", "schema_version": NaN}', "not valid JSON"),
        ("[" * 100000, "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
    ],
)
def test_what_is_no_cluster_file_is_refused(text, expected):
    assert expected in refusal(ClusterProfile, text)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_of_windows_is_no_part_of_the_document(encoding):
    text = plan_document()
    assert Plan.from_json(json.dumps(text).encode(encoding)) == Plan.from_json(json.dumps(text))


def test_numbers_beyond_floating_point_are_refused():
    text = json.dumps(cluster_document()).replace("100000000.0", "1e999")
    assert refusal(ClusterProfile, text)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layers": []}, "no layers"),
        ({"microbatch_size": 0}, "microbatch_size is 0"),
        ({"name": "gpt\x1b]0;"}, "name is 'gpt\\x1b]0;', expected no control characters"),
        ({"layers": [layer_document(forward_flops=-1)]}, "forward_flops"),
        ({"layers": [layer_document(measured={"cpu": {"1,1": {"forward_s": -1, "backward_s": 1}}})]}, "forward_s"),
    ],
)
def test_a_bad_workload_is_refused_by_name(changes, expected):
    assert expected in refusal(Workload, workload_document(**changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"stages": []}, "no stages"),
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"reason": "too\x07"}, "reason is 'too\\x07', expected no control characters"),
        ({"schedule": "interleaved"}, "`$.schedule`, expected one of 1f1b, gpipe, inference."),
        ({"layer_times": "guessed"}, "`$.layer_times`, expected one of measured, model."),
        ({"stages": [{"layers": [1, 1], "replicas": [{"devices": ["a:0"]}]}]}, "starts with layer 1, expected layer 0"),
        ({"stages": [{"layers": [0, 1], "replicas": [{"devices": ["a:0", "a:0"]}]}]}, "occurs more than once"),
        ({"stages": [{"layers": [1, 0], "replicas": [{"devices": ["a:0"]}]}]}, "first <= last"),
        ({"stages": [{"layers": [0, 1], "replicas": [{"devices": []}]}]}, "no devices"),
    ],
)
def test_a_bad_plan_is_refused_by_name(changes, expected):
    assert expected in refusal(Plan, plan_document(**changes))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(RecordError, match="cannot be read"):
        Plan.load(tmp_path / "none.json")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    plan = Plan.from_json(json.dumps(plan_document()))
    with pytest.raises(RecordError, match="cannot be written"):
        plan.save(tmp_path)  # a directory
    assert list(tmp_path.iterdir()) == []


def test_links_are_found_by_precedence():
    table = LinkTable(ClusterProfile.from_json(json.dumps(cluster_document())))
    rates = {pair: table.between(*pair).bandwidth_bytes_per_s for pair in [("a:0", "b:0"), ("b:0", "a:0")]}
    assert rates == {("a:0", "b:0"): 1e8, ("b:0", "a:0"): 1e8}  # a missing reverse means symmetric
    assert table.between("b:0", "c:0").bandwidth_bytes_per_s == 2e8  # directed
    assert table.between("c:0", "b:0").bandwidth_bytes_per_s == 3e8
    assert table.between("c:0", "a:0").bandwidth_bytes_per_s == 4e8  # a device pair, reversed
    assert LinkTable(ClusterProfile.from_json(json.dumps(cluster_document())).without(("b",))).between("a:0", "c:0")


def test_a_removed_host_takes_its_flags_with_it():
    named = [("h0",), ("h1",), ("h1:0",), ("h0", "h1"), ("h2", "h0"), ("h0:0", "h1:0")]
    flags = [Flag(kind="slow", subjects=subjects, what="slow") for subjects in named]
    flags += [Flag(kind="loaded", subjects=hosts, what="busy", only=hosts) for hosts in (("h0", "h1"), ("h1",))]
    left = rebuilt(ClusterProfile.uniform(hosts=3), flags=tuple(flags)).without(("h1",)).flags
    assert [flag.subjects for flag in left] == [("h0",), ("h2", "h0"), ("h0",)]
    assert left[-1].only == ("h0",)


def test_a_reserve_leaves_each_device_a_byte():
    profile = ClusterProfile.uniform(memory_bytes=1024)
    assert profile.keeping_free(1023).devices[0].memory_bytes == 1
    with pytest.raises(ValueError, match=r"reserve_bytes \(--reserve\) is 1023.5"):
        profile.keeping_free(1023.5)


def test_two_devices_of_a_host_without_a_link_are_no_neighbours():
    document = cluster_document()
    document["devices"].append({**document["devices"][0], "id": "a:1"})
    profile = ClusterProfile.from_json(json.dumps(document))
    assert LinkTable(profile).between("a:0", "a:1") is None
    document["links"].append({"source": "a", "target": "a", "latency_s": 0, "bandwidth_bytes_per_s": 5e8})
    profile = ClusterProfile.from_json(json.dumps(document))
    assert LinkTable(profile).between("a:1", "a:0").bandwidth_bytes_per_s == 5e8


@pytest.mark.parametrize("key", ["1x1", "1", "1,1,1", "0,1", " 1 , 1", "1,-1", ""])
def test_times_of_no_sharding_are_refused(key):
    times = {"forward_s": 1.0, "backward_s": 2.0}
    bad = layer_document(measured={"cpu": {key: times}})
    assert 'expected "DP,TP"' in refusal(Workload, workload_document(layers=[bad]))
    Workload.from_json(json.dumps(workload_document(layers=[layer_document(measured={"cpu": {"16,8": times}})])))


@pytest.mark.parametrize("count", [0, -1, 10**9 + 1, 10**400])
def test_counts_are_of_things_that_run(count):
    assert "microbatch_size is " in refusal(Workload, workload_document(microbatch_size=count))
    assert "num_microbatches is " in refusal(Plan, plan_document(num_microbatches=count))


def test_links_are_followed_and_pipes_written_into(tmp_path):
    target, link, pipe = tmp_path / "there" / "plan.json", tmp_path / "link.json", tmp_path / "pipe"
    target.parent.mkdir()
    link.symlink_to(target)
    write_bytes(link, b"1")
    assert (link.is_symlink(), target.read_bytes()) == (True, b"1")
    os.mkfifo(pipe)
    require_writable(pipe)
    with pytest.raises(RecordError, match="The name of the output is empty"):
        require_writable("")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_bytes(pipe, b"2")
    assert os.read(reader, 10) == b"2"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    write_bytes("/dev/null", b"3")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
