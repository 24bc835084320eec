"""Other programs' measurement files: what they say becomes links and collectives, whatever a launcher made of them."""

from __future__ import annotations

import itertools
import json
import os
import random
import re

import msgspec
import pytest
from builders import cluster, examples, link, plan, workload
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import hwaware
from hwaware import formatting
from hwaware.cli import main
from hwaware.cluster import ClusterProfile, Collective, Flag, LinkSample, LinkTable
from hwaware.errors import UnusableInputError
from hwaware.interop import merged, read
from hwaware.interop.nccl_tests import OPERATIONS, bus_factor
from hwaware.interop.readings import End, FoundLink, Reading


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def imported(tmp_path):
    """Import texts and return the profile, and what the command says."""

    def run_import(name, *texts, options=(), into=None):
        files = []
        for number, text in enumerate(texts):
            path = tmp_path / f"{number}.txt"
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
            files.append(path)
        if into is not None:
            into.save(tmp_path / "into.json")
            options = (*options, "--into", tmp_path / "into.json")
        made = tmp_path / "made.json"
        result = run("import", name, *files, "-o", made, *options)
        assert result.exit_code == 0, result.output
        return ClusterProfile.load(made), result.stderr

    return run_import


def refused(name, text, tmp_path, *options):
    """Return the one message of a file that is not taken."""
    (tmp_path / "file").write_bytes(text if isinstance(text, bytes) else text.encode())
    result = run("import", name, tmp_path / "file", "-o", tmp_path / "out.json", *options)
    assert result.exit_code == 2, result.output
    assert not (tmp_path / "out.json").exists()
    [line] = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert line.count("To fix:") == 1
    return line


def between(profile, source, target):
    return LinkTable(profile).between(source, target)


# nccl-tests

NEW = (
    "#       size         count      type   redop    root     time   algbw   busbw #wrong    time  algbw  busbw #wrong"
)
OLD = "#       size         count      type   redop     time   algbw   busbw  error     time   algbw   busbw  error"
UNITS = "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)"


def ranks(hosts=("h0", "h0", "h1", "h1"), devices=(0, 1, 0, 1), buses=None, numbers=None, groups=None):
    for k, (host, device) in enumerate(zip(hosts, devices)):
        bus = buses[k] if buses else f"0000:{device + 4:02x}:00"
        rank = numbers[k] if numbers else k
        group = f"Group {groups[k]:2d} " if groups else ""
        yield f"#  Rank {rank:2d} {group}Pid {6899 + k:6d} on {host:>10} device {device:2d} [{bus}] Some GPU"


def rows(sizes=(1024, 2048), times=(10.0, 12.5), dtype="float", redop="sum", root=True, wrong="0"):
    for size, time in zip(sizes, times):
        rate = f"{size / time / 1e3:6.2f}"
        own = f"{time:8.2f} {rate} {rate} {wrong:>6}"
        yield f"{size:12d} {size // 4:13d} {dtype:>9} {redop:>7} {'     -1' if root else ''} {own}  {own}"


def log(program="all_reduce", listed=None, table=None, header=NEW, verdict="0 OK"):
    starting = [f"# Collective test starting: {program}_perf"] if program else []
    body = ["# nThread 1 nGpus 1 minBytes 1024 maxBytes 2048", "#", "# Using devices", *(listed or ranks()), "#"]
    lines = [*starting, *body, "#      out-of-place   in-place", header, UNITS, *(table or rows())]
    return "\n".join([*lines, f"# Out of bounds values : {verdict}", "# Avg bus bandwidth : 0.2", "#", ""])


def json_log(program="all_reduce", **changes):
    timed = {"time": 10.0, "alg_bw": 0.1, "bus_bw": 0.15, "nwrong": 0.0}
    devices = [
        {"rank": r, "group": 0, "hostname": f"h{r // 2}", "device": r % 2, "device_hex": f"0000:0{r % 2}:00"}
        for r in range(4)
    ]
    row = {"size": 1024, "count": 256, "type": "float", "redop": "sum", "out_of_place": timed, "in_place": timed}
    return {
        "version": 1, "args": [f"/x/{program}_perf"], "nccl_version": 22807, "config": {"devices": devices},
        "results": [{**row, **changes}, {**row, "size": 2048, "out_of_place": None}],
    }  # fmt: skip


FOUR = {"h0": 2, "h1": 2}


@pytest.mark.parametrize("op", [op for op in OPERATIONS.values() if op != "send"])
@pytest.mark.parametrize("form", ["text", "json"])
def test_nccl_tests_become_collectives(op, form, imported):
    program = next(name for name, found in OPERATIONS.items() if found == op)
    text = log(program) if form == "text" else json.dumps(json_log(program))
    profile, _ = imported("nccl-tests", text, into=cluster(FOUR))
    [found] = profile.collectives
    unit = 4 if op == "all-to-all" else 1
    assert (found.op, found.dtype, found.devices) == (op, "float32", ("h0:0", "h0:1", "h1:0", "h1:1"))
    assert [point.bytes for point in found.points] == [1024 * unit, 2048 * unit]
    assert found.points[0].seconds == pytest.approx(1e-5)
    assert found.evidence["program"] == "nccl-tests"
    assert found.evidence["file"].endswith("0.txt")
    again, _ = imported("nccl-tests", text, into=profile)
    assert len(again.collectives) == 1, "replaced, not doubled"


def test_a_new_profile_derives_links_from_collectives_and_says_so(imported):
    profile, said = imported("nccl-tests", log(table=rows((1 << 20,), (100.0,))))
    link = between(profile, "h0:0", "h1:1")
    assert link.bandwidth_bytes_per_s == pytest.approx((1 << 20) / 100e-6 * bus_factor("all-reduce", 4))
    assert link.evidence["assumed"] == ["bandwidth_bytes_per_s", "latency_s"]
    assert "derived it from collectives" in said
    assert "assumed 17.18 GB" in said
    assert "assumed 1.000 TFLOP/s" in said
    assert {flag.kind for flag in profile.flags} == {"assumed"}


def test_the_verdict_decides_not_the_error_column(imported, tmp_path):
    table = list(rows(root=False, wrong="5e-07"))
    profile, _ = imported("nccl-tests", log(table=table, header=OLD), into=cluster(FOUR))
    assert len(profile.collectives[0].points) == 2
    assert "found 7 wrong values" in refused("nccl-tests", log(verdict="7 FAILED", table=table, header=OLD), tmp_path)
    assert "found 3 wrong values" in refused("nccl-tests", log(table=rows(wrong="3")), tmp_path)
    assert "found 7.0 wrong" in refused(
        "nccl-tests", json.dumps(json_log(in_place=None, out_of_place={"time": 1.0, "nwrong": 7.0})), tmp_path
    )
    in_place_only = {**json_log(), "out_of_bounds": {"count": 5, "okay": "false"}}
    assert "found 5 wrong values in table 1" in refused("nccl-tests", json.dumps(in_place_only), tmp_path)
    imported("nccl-tests", json.dumps({**json_log(), "out_of_bounds": {"count": 0, "okay": "true"}}))


def test_bitwise_mismatches_are_a_remark(imported):
    """The option that repeats operations adds a column, two lines, and keys of JSON (src/util.cu of nccl-tests)."""
    half = "   10.00    0.10    0.10       0         5"
    table = [f"        1024           256     float     sum      -1{half}{half}"]
    header = NEW.replace("#wrong", "#wrong  #bitdiff")
    verdict = "0 OK\n# Bitwise mismatches   : 2 FAILED"
    text = log(table=table, header=header, verdict=verdict)
    document = {**json_log(), "version": 2, "bitwise_mismatches": {"count": 2, "okay": "false"}}
    for content in (text, json.dumps(document)):
        profile, said = imported("nccl-tests", content)
        assert profile.collectives[0].points[0].seconds == pytest.approx(1e-5)
        assert said.count("has bitwise mismatches") == 1
    assert "has bitwise" not in imported("nccl-tests", text.replace("2 FAILED", "0 OK"))[1]
    document["bitwise_mismatches"]["okay"] = "true"
    assert "has bitwise" not in imported("nccl-tests", json.dumps(document))[1]


def test_wrong_values_name_the_number_that_table_takes(tmp_path):
    """Tables without a rate have no number."""
    text = log() + log(table=rows(sizes=(0,))) + log(verdict="7 FAILED")
    assert "in table 2." in refused("nccl-tests", text, tmp_path)


def test_the_first_versions_had_milliseconds(imported):
    header = (
        "#      bytes             N    type      op     time  algbw  busbw      res     time  algbw  busbw      res"
    )
    table = [
        "     1048576        262144   float     sum    0.100  10.49  15.73    1e-06    0.110   9.53  14.30    1e-06"
    ]
    listed = [f"#   Rank {k:2d} on      h{k // 2} device {k % 2:2d} [0x0{k % 2}] Some GPU" for k in range(4)]
    profile, _ = imported("nccl-tests", log(header=header, table=table, listed=listed), into=cluster(FOUR))
    assert profile.collectives[0].points[0].seconds == pytest.approx(1e-4)


def test_tables_of_other_operations_are_kept_apart(imported):
    both = log() + log("all_gather", table=rows(times=(30.0, 40.0)))
    profile, _ = imported("nccl-tests", both, into=cluster(FOUR))
    times = {one.op: [point.seconds for point in one.points] for one in profile.collectives}
    assert times == {"all-reduce": pytest.approx([1e-5, 1.25e-5]), "all-gather": pytest.approx([3e-5, 4e-5])}


def test_tables_of_other_settings_are_refused_or_chosen(imported, tmp_path):
    both = "NCCL_ALGO=Ring\n" + log() + "NCCL_ALGO=Tree\n" + log(table=rows(times=(20.0, 25.0)))
    message = refused("nccl-tests", both, tmp_path)
    assert re.search(r"table 1 \(line 12\), table 2 \(line \d+\)", message)
    profile, _ = imported("nccl-tests", both, into=cluster(FOUR), options=("--table", "2"))
    assert profile.collectives[0].points[0].seconds == pytest.approx(2e-5)
    assert "not a table 3" in refused("nccl-tests", both, tmp_path, "--table", "3")


def test_tables_of_other_rings_over_the_same_hosts_are_refused_or_chosen(imported, tmp_path):
    first = log("sendrecv", listed=ranks(("a", "b"), (0, 0)), table=rows((1 << 30,), (89498.0,)))
    both = first + log("sendrecv", listed=ranks(("a", "b"), (1, 1)), table=rows((1 << 30,), (44749.0,)))
    message = refused("nccl-tests", both, tmp_path)
    assert "has several tables of send from a to b: table 1 (line 9), table 2 (line 23)." in message
    profile, _ = imported("nccl-tests", both, options=("--table", "2"))
    assert between(profile, "a:1", "b:1").bandwidth_bytes_per_s == pytest.approx(24e9, rel=0.01)
    unlike = first + log("sendrecv", listed=ranks(("a", "b"), (0, 0)), table=rows(dtype="half"))
    assert len(between(imported("nccl-tests", unlike)[0], "a:0", "b:0").samples) == 2


def test_one_point_a_size(imported):
    table = [*rows(), *rows(times=(20.0, 22.5)), *rows(times=(11.0, 13.0)), *rows(times=(99.0, 99.0), redop="max")]
    profile, _ = imported("nccl-tests", log(table=[*table, *rows(dtype="half")]), into=cluster(FOUR))
    found = {one.dtype: [point.seconds for point in one.points] for one in profile.collectives}
    assert found == {"float32": pytest.approx([1.1e-5, 1.3e-5]), "float16": pytest.approx([1e-5, 1.25e-5])}


def test_the_operation_of_redirected_output_is_an_option(imported, tmp_path):
    message = refused("nccl-tests", log(program=None), tmp_path)
    assert "--op all-reduce" in message
    profile, _ = imported("nccl-tests", log(program=None), into=cluster(FOUR), options=("--op", "all-gather"))
    assert profile.collectives[0].op == "all-gather"
    assert "not all-gather" in refused("nccl-tests", log(), tmp_path, "--op", "all-gather")
    assert "--op" in run("import", "nccl-tests", "--help").stdout


PREFIXES = [
    "[1,0]<stdout>:", "[1,0]<stdout>: ", "Thu Nov 26 11:36:59 2026[1,0]<stdout>:", "[prterun-h0-12@1,0]<stdout>: ",
    "0: ", " 0: ", "[0] ", "[rank0]: ", "[default0]:", "host1: ", "node-3.local: ",
    "2026-11-26T11:36:59.123456789Z ", "2026-11-26T11:36:59.123456789Z stdout F ", "[2026-11-26 11:36:59] ",
    "Nov 26 11:36:59 h0 job[12]: ", "[pod/nccl-launcher-x/main] ", "nccl-1  | ", "\x1b[32m", "(pid=123, ip=10.0.0.1) ",
    "[1,0]<stdout>:2026-11-26T11:36:59Z 0: ",
]  # fmt: skip


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes_of_launchers_do_no_harm(prefix, tmp_path):
    """Text and JSON alike."""
    texts = {
        "nccl-tests": log(), "p2p": P2P, "nvbandwidth": NVBANDWIDTH, "ib": IB, "topo": TOPO,
        "iperf3": json.dumps(iperf3_test(), indent=1),
    }  # fmt: skip
    for name, text in texts.items():
        plain, marked = tmp_path / "plain", tmp_path / "marked"
        plain.write_text(text)
        marked.write_text("\r\n".join(prefix + line for line in text.split("\n")))
        expected, found = (read(name, str(path))._replace(file="") for path in (plain, marked))
        assert found._replace(remarks=()) == expected._replace(remarks=()) or name == "topo", name
        assert found.links or found.collectives, name
        assert len(found.remarks) == len(expected.remarks), found.remarks


def test_a_build_without_mpi_is_refused_with_the_reason(tmp_path):
    interleaved = log(listed=ranks(("a", "b"), (0, 0), numbers=(0, 0)))
    message = refused("nccl-tests", interleaved, tmp_path)
    assert "2 processes say Rank 0" in message
    assert "MPI=1" in message
    message = refused("nccl-tests", log(listed=ranks(numbers=(0, 1, 1, 2))), tmp_path)
    assert "2 processes say Rank 1" in message
    one_by_one = log(listed=ranks(("a",), (0,))) + log(listed=ranks(("b",), (0,)))
    message = refused("nccl-tests", one_by_one, tmp_path)
    assert "group of one device" in message
    assert "MPI=1" in message


@pytest.mark.parametrize("buses", [["0000:47:00", "0000:0a:00"] * 2, ["0x47", "0x0a"] * 2])
def test_devices_that_all_say_0_are_told_apart_by_bus_id(buses, imported, tmp_path):
    text = log(listed=ranks(devices=(0, 0, 0, 0), buses=buses))
    profile, _ = imported("nccl-tests", text, into=cluster(FOUR))
    assert profile.collectives[0].devices == ("h0:1", "h0:0", "h1:1", "h1:0")
    same = log(listed=ranks(devices=(0, 0, 0, 0), buses=["0000:47:00"] * 4))
    assert "same bus id" in refused("nccl-tests", same, tmp_path)


def test_what_is_whole_of_a_cut_file_is_taken(imported):
    text = log(table=rows((1024, 2048, 4096), (10.0, 12.5, 20.0)))
    for cut in (text.index("20.00") + 3, text.index("4096") + 2, text.index("20.00") + 8):
        profile, said = imported("nccl-tests", text[:cut], into=cluster(FOUR))
        assert [point.bytes for point in profile.collectives[0].points] == [1024, 2048]
        assert "ends after 2 rows" in said
    document = json.dumps(json_log())
    profile, said = imported("nccl-tests", document[: document.rindex('"size"') + 9], into=cluster(FOUR))
    assert [point.bytes for point in profile.collectives[0].points] == [1024]
    assert "middle of a document" in said


def test_a_later_run_gives_no_verdict_on_one_that_was_cut_off(imported):
    whole = log()
    text = whole[: whole.index("        2048")] + log("all_gather")
    profile, said = imported("nccl-tests", text, into=cluster(FOUR))
    assert {one.op: len(one.points) for one in profile.collectives} == {"all-reduce": 1, "all-gather": 2}
    assert "table 1 (line 11) ends after 1 rows" in said
    assert "table 2" not in said


def test_messages_of_nccl_between_the_halves_of_a_row(imported):
    lines = log().split("\n")
    place = next(k for k, line in enumerate(lines) if line.startswith("        1024"))
    start, first, second = re.fullmatch(r"(.*-1)(.*?0)(  .*)", lines[place]).groups()
    said = "h0:12:12 [0] NCCL INFO 1024 Bytes -> Algo 1 proto 0 time 9.3"
    lines[place : place + 1] = [start + said, said, f"[0] {first}", second]
    profile, _ = imported("nccl-tests", "\n".join(lines), into=cluster(FOUR))
    assert [point.seconds for point in profile.collectives[0].points] == pytest.approx([1e-5, 1.25e-5])


def test_groups_of_a_split_are_collectives_of_their_own(imported):
    text = log(listed=ranks(groups=(0, 0, 1, 1)))
    profile, _ = imported("nccl-tests", text, into=cluster(FOUR))
    assert [one.devices for one in profile.collectives] == [("h0:0", "h0:1"), ("h1:0", "h1:1")]


def test_sendrecv_gives_links(imported):
    text = log("sendrecv", listed=ranks(("a", "b"), (0, 0)), table=rows((1024, 1 << 30), (20.09, 89498.0)))
    profile, _ = imported("nccl-tests", text)
    for source, target in itertools.permutations(("a:0", "b:0")):
        link = between(profile, source, target)
        assert link.bandwidth_bytes_per_s == pytest.approx(12e9, rel=0.01)
        assert link.latency_s == pytest.approx(20e-6, rel=0.01)
        assert [sample.bytes for sample in link.samples] == [1024, 1 << 30]
        assert "all sending at once" in link.evidence["table"]
    inside, _ = imported("nccl-tests", log("sendrecv", listed=ranks(("a", "a"), (2, 5))))
    assert {(link.source, link.target) for link in inside.links} == {("a:2", "a:5"), ("a:5", "a:2")}
    ring, said = imported("nccl-tests", log("sendrecv"))
    assert between(ring, "h0:0", "h1:1").samples
    assert not between(ring, "h0:0", "h0:1").samples, "the ring's slowest links are those between the hosts"
    assert "assumed: 15.75 GB/s" in said


@pytest.mark.parametrize(("content", "message"), [
    (log("broadcast"), "does not price"),
    ("", "not the output of nccl-tests"), ("{", "not the output of nccl-tests"),
    (log(table=[line.replace(" 10.00 ", " x ") for line in rows((1024,), (10.0,))]), "no device or no result"),
    ("all_reduce_perf", "no device or no result"), ("\x00\xff", "not the output"),
    (json.dumps(json_log(type=7)), "data type '7'"), (json.dumps(json_log(type="dance")), "data type 'dance'"),
    (log(table=rows(dtype="dance")), "data type 'dance'"),
    (json.dumps(json_log(size=-4)), "size -4"), (json.dumps(json_log(out_of_place={"time": "nan"})), "time nan"),
    (json.dumps(json_log(out_of_place={"cpu_time": 3.0})), "CPU times"),
    (json.dumps({"nccl_version": 1, "results": []}), "no 'config'"),
    (json.dumps({"nccl_version": 1, "config": {"devices": [{"rank": "x"}]}, "args": ["all_reduce_perf"]}), "no rank"),
    (log(table=[next(rows((1024,))).split(" 10.00 ")[0], " 1e-320 0.1 0.1 0"]), "no device or no result"),
    (log(table=rows((10**15,), (1e-9,)), program="alltoall").replace("    0.00 ", "  1e+30 "), "hardware"),
])  # fmt: skip
def test_what_is_not_nccls_is_one_message(content, message, tmp_path):
    assert message in refused("nccl-tests", content.encode("latin-1"), tmp_path)


def test_a_result_of_0_bytes_is_left_out(imported, tmp_path):
    profile, _ = imported("nccl-tests", json.dumps(json_log("sendrecv", size=0)))
    assert [sample.bytes for sample in between(profile, "h0:0", "h1:0").samples] == [2048]
    document = json_log("sendrecv", size=0)
    document["results"].pop()
    assert "no device or no result" in refused("nccl-tests", json.dumps(document), tmp_path)


def test_a_table_without_devices_is_refused_by_its_number(imported, tmp_path):
    text = log() + log("all_gather", listed=["#"])
    assert "table 2 (line 25) has no list of devices" in refused("nccl-tests", text, tmp_path)
    profile, _ = imported("nccl-tests", text, into=cluster(FOUR), options=("--table", "1"))
    assert [one.op for one in profile.collectives] == ["all-reduce"]


def test_nccl_tests_of_other_hosts_are_refused(tmp_path):
    cluster(FOUR).save(tmp_path / "c.json")
    text = log(listed=ranks(("h0", "h0", "h7", "h7")))
    message = refused("nccl-tests", text, tmp_path, "--into", tmp_path / "c.json")
    assert "device 0 of host h7, the profile has 0 devices there" in message
    assert "--rename h7=NAME" in message


def test_a_host_that_the_profile_lacks_is_refused_with_the_option_for_it(tmp_path):
    path = tmp_path / "c.json"
    cluster({"amd": 1, "two": 1}).save(path)
    message = refused("iperf3", json.dumps(iperf3_test()), tmp_path, "--into", path)
    assert "iperf3 ran on host one, the profile has no such host." in message
    assert message.endswith("this one has amd, two. If the host has another name there, add --client NAME.")
    for name, text, option in (("iperf3", json.dumps(iperf3_test()), "--client"), ("p2p", P2P, "--host")):
        message = refused(name, text, tmp_path, "--into", path, option, "amdd")
        end = "names amdd, which the profile does not have; it has amd, two. To fix: name one of these hosts."
        assert message == f"Error: {option} {end}"


def test_a_rename_to_a_host_that_the_profile_lacks_names_those_it_has(tmp_path):
    cluster(FOUR).save(tmp_path / "c.json")
    message = refused("nccl-tests", log(), tmp_path, "--rename", "h1=h7", "--into", tmp_path / "c.json")
    assert message.endswith(
        "--rename names h7, which the profile does not have; it has h0, h1. To fix: name one of these hosts."
    )


def test_a_rename_of_a_host_that_no_file_names_is_refused(tmp_path):
    message = refused("iperf3", json.dumps(iperf3_test()), tmp_path, "--rename", "h7=h0")
    assert "--rename names h7, expected host names or addresses in the files: one, 10.0.0.1, two, 10.0.0.2." in message


def test_two_names_for_one_host_are_refused(tmp_path):
    message = refused("iperf3", json.dumps(iperf3_test()), tmp_path, "--rename", "two=h0", "--rename", "two=h1")
    assert "--rename gives two two names, h0 and h1." in message


def test_hosts_may_be_renamed(imported):
    text = log(listed=ranks(("pod-0", "pod-0", "pod-1", "pod-1")))
    options = ("--rename", "pod-0=h0", "--rename", "pod-1=h1")
    assert imported("nccl-tests", text, into=cluster(FOUR), options=options)[0].collectives
    by_address, _ = imported("iperf3", json.dumps(iperf3_test()), options=("--rename", "10.0.0.1=h0"))
    assert [host.name for host in by_address.hosts] == ["h0", "two"]


def test_bus_bandwidth_is_nccl_tests_own():
    """The published run on 16 H100: 8 GiB all-reduce in 47535 us, algbw 180.71, busbw 338.82 GB/s."""
    algbw = 8589934592 / 47535e-6 / 1e9
    assert algbw == pytest.approx(180.71, abs=0.01)
    assert algbw * bus_factor("all-reduce", 16) == pytest.approx(338.82, abs=0.02)
    assert bus_factor("broadcast", 4) is None


# p2pBandwidthLatencyTest

P2P = r"""[P2P (Peer-to-Peer) GPU Bandwidth Latency Test]
Device: 0, NVIDIA GeForce RTX 4090, pciBusID: 2, pciDeviceID: 0, pciDomainID:0
Device: 1, Tesla V100-SXM2-16GB, pciBusID: 17, pciDeviceID: 0, pciDomainID:0
P2P Connectivity Matrix
     D\D     0     1
     0	     1     1
     1	     1     1
Unidirectional P2P=Disabled Bandwidth Matrix (GB/s)
   D\D     0      1
     0 911.08   5.00
     1   5.00 920.20
Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)
   D\D     0      1
     0 912.68   9.90
     1  10.90 922.37
Unidirectional P2P=Enabled Bandwidth (P2P Reads) Matrix (GB/s)
   D\D     0      1
     0 911.08   7.00
     1   8.00 922.37
Bidirectional P2P=Enabled Bandwidth Matrix (GB/s)
   D\D     0      1
     0 912.68  18.00
     1  18.00 922.37
P2P=Disabled Latency Matrix (us)
   GPU     0      1
     0   2.61  14.95
     1  11.09   2.10

   CPU     0      1
     0   2.67   6.78
     1   6.71   2.62
P2P=Enabled Latency (P2P Writes) Matrix (us)
   GPU     0      1
     0   2.59   2.31
     1   2.26   2.10

   CPU     0      1
     0   2.71   1.91
     1   2.11   2.77
"""


def test_p2p_becomes_directed_links_of_one_host(imported):
    profile, said = imported("p2p", P2P, options=("--host", "box"))
    there, back = between(profile, "box:0", "box:1"), between(profile, "box:1", "box:0")
    assert (there.bandwidth_bytes_per_s, back.bandwidth_bytes_per_s) == (9.9e9, 10.9e9)
    assert (there.latency_s, back.latency_s) == (pytest.approx(2.31e-6), pytest.approx(2.26e-6))
    assert there.evidence["program"] == "p2pBandwidthLatencyTest"
    assert "P2P Writes" in there.evidence["table"]
    first, second = profile.devices
    assert (first.kind, first.memory_bandwidth_bytes_per_s) == ("NVIDIA GeForce RTX 4090", 912.68e9)
    assert (second.memory_bytes, first.samples["assumed"]) == (16 * 10**9, ["throughput", "memory_bytes"])
    assert "latency" not in said
    unnamed, _ = imported("p2p", "\n".join(line for line in P2P.split("\n") if not line.startswith("Device:")))
    assert [device.kind for device in unnamed.devices] == ["unknown", "unknown"]
    assert [device.memory_bandwidth_bytes_per_s for device in unnamed.devices] == [912.68e9, 922.37e9]


def test_p2p_says_what_it_replaces_of_a_link_inside_a_host(imported):
    into = cluster({"box": 2, "other": 1}, between=(1e8, 7e-5), inside=(1e9, 1e-5))
    profile, said = imported("p2p", P2P, options=("--host", "box"), into=into)
    rate = formatting.text(between(profile, "box:0", "box:1").bandwidth_bytes_per_s, formatting.BYTES_PER_S)
    assert f"Replaced box:0 -> box:1: 1.000 GB/s -> {rate}." in said


def test_a_size_in_a_cards_name_is_not_called_assumed(imported):
    _, said = imported("p2p", P2P)
    assert "No file gives memory_bytes of 1 device, so hwaware assumed 17.18 GB." in said
    assert "No file gives throughput of 2 devices, so hwaware assumed 1.000 TFLOP/s." in said


def test_tables_of_p2p_in_their_order_of_worth(imported):
    lines = P2P.split("\n")
    reads = "\n".join([*lines[:3], *lines[15:19]])
    profile, said = imported("p2p", reads)
    assert between(profile, "host:1", "host:0").bandwidth_bytes_per_s == 7e9, "row 0 reads from column 1"
    assert "assumed: 10.00 µs" in said
    both, _ = imported("p2p", "\n".join([*lines[:3], *lines[19:23]]))
    assert between(both, "host:0", "host:1").bandwidth_bytes_per_s == 9e9
    cut, said = imported("p2p", P2P[: P2P.index("10.90") + 3], options=("--host", "h"))
    assert between(cut, "h:0", "h:1").bandwidth_bytes_per_s == 9.9e9
    assert between(cut, "h:1", "h:0").bandwidth_bytes_per_s == 5e9, "from the table before"
    assert "middle of a table" in said


def test_p2p_onto_a_profile_keeps_what_it_does_not_measure(imported, tmp_path):
    into = cluster({"box": 2}, inside=(1e9, 5e-6))
    profile, _ = imported("p2p", P2P[: P2P.index("P2P=Disabled Latency")], into=into)
    link = between(profile, "box:0", "box:1")
    assert (link.bandwidth_bytes_per_s, link.latency_s) == (9.9e9, 5e-6)
    assert "assumed" not in link.evidence
    assert profile.devices == into.devices
    assert profile.environment["imports"][0]["program"] == "p2pBandwidthLatencyTest"
    cluster(FOUR).save(tmp_path / "c.json")
    assert "--host NAME" in refused("p2p", P2P, tmp_path, "--into", tmp_path / "c.json")
    cluster({"box": 1, "b": 1}).save(tmp_path / "c.json")
    message = refused("p2p", P2P, tmp_path, "--into", tmp_path / "c.json", "--host", "box")
    assert "device 1 of host box, the profile has 1 devices there" in message


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ("gpu.west", "gpu.west"),
        ("gpu.west.example.com", "gpu.west"),
        ("cpu", "cpu.east"),
        ("10.0.0.2", "gpu.west"),
        ("fpga.east", "fpga"),
    ],
)
def test_results_go_to_the_host_that_the_name_means(named, found, imported):
    into = cluster({"gpu.east": 2, "gpu.west": 2, "cpu.east": 2, "fpga": 2}, addresses={"gpu.west": "10.0.0.2"})
    profile, _ = imported("p2p", P2P, into=into, options=("--host", named))
    assert {link.source.partition(":")[0] for link in profile.links if link not in into.links} == {found}


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("gpu", "host gpu, which could be gpu.east or gpu.west of the profile"),
        ("gpu.north", "--host names gpu.north, which the profile does not have"),
        ("10", "--host names 10, which the profile does not have"),
    ],
)
def test_a_name_that_means_no_host_or_several_is_refused(named, message, tmp_path):
    cluster({"gpu.east": 2, "gpu.west": 2}, addresses={"gpu.east": "10.0.0.1"}).save(tmp_path / "c.json")
    assert message in refused("p2p", P2P, tmp_path, "--host", named, "--into", tmp_path / "c.json")


# nvbandwidth

NVBANDWIDTH = """nvbandwidth Version: v0.6
Built from Git version: v0.6

CUDA Runtime Version: 12040
Driver Version: 550.54.14

Device 0: NVIDIA H100 80GB HBM3 (00000000:1b:00)
Device 1: NVIDIA H100 80GB HBM3 (00000000:43:00)

Running host_to_device_memcpy_ce.
memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)
           0         1
 0     55.63     55.64

SUM host_to_device_memcpy_ce 111.27

Running device_to_device_memcpy_read_ce.
memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)
           0         1
 0       N/A    370.00
 1    380.00       N/A

SUM device_to_device_memcpy_read_ce 750.00

Running device_to_device_memcpy_write_ce.
memcpy CE GPU(row) <- GPU(column) bandwidth (GB/s)
           0         1
 0      0.00    390.00
 1    395.00      0.00

Running device_to_device_bidirectional_memcpy_write_ce.
memcpy CE GPU(row) <-> GPU(column) Total bandwidth (GB/s)
           0         1
 0       N/A    600.00
 1    600.00       N/A

Running device_to_device_latency_sm.
Device to Device Latency SM GPU(row) <-> GPU(column) (ns)
           0         1
 0       N/A    760.00
 1    770.00       N/A
"""


def nvbandwidth_json(*tests):
    made = [
        {"name": name, "status": "Passed", "bandwidth_description": title, "bandwidth_matrix": matrix}
        for name, title, matrix in tests
    ]
    return json.dumps({"nvbandwidth": {"version": "v0.6", "testcases": made}})


WRITES = (
    "device_to_device_memcpy_write_ce",
    "memcpy CE GPU(row) <- GPU(column) bandwidth (GB/s)",
    [["N/A", "390"], ["395", "N/A"]],
)
READS = (
    "device_to_device_memcpy_read_ce",
    "memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)",
    [["N/A", "370"], ["380", "N/A"]],
)
TOTAL = (
    "device_to_device_bidirectional_memcpy_write_ce",
    "memcpy CE Total bandwidth (GB/s)",
    [["N/A", "600"], ["600", "N/A"]],
)
LATENCY = ("device_to_device_latency_sm", "Latency SM GPU(row) <-> GPU(column) (ns)", [["N/A", "760"], ["770", "N/A"]])


@pytest.mark.parametrize("text", [NVBANDWIDTH, nvbandwidth_json(READS, WRITES, TOTAL, LATENCY)], ids=["text", "json"])
def test_nvbandwidth_becomes_directed_links(text, imported):
    profile, _ = imported("nvbandwidth", text)
    there, back = between(profile, "host:0", "host:1"), between(profile, "host:1", "host:0")
    assert (there.bandwidth_bytes_per_s, back.bandwidth_bytes_per_s) == (390e9, 395e9)
    assert (there.latency_s, back.latency_s) == (pytest.approx(760e-9), pytest.approx(770e-9))
    assert there.evidence["table"] == "device_to_device_memcpy_write_ce"


def test_reads_and_totals_of_nvbandwidth(imported, tmp_path):
    reads, _ = imported("nvbandwidth", nvbandwidth_json(READS))
    assert between(reads, "host:1", "host:0").bandwidth_bytes_per_s == 370e9, "row 0 reads from column 1"
    total, _ = imported("nvbandwidth", nvbandwidth_json(TOTAL))
    assert between(total, "host:0", "host:1").bandwidth_bytes_per_s == 300e9
    failed = json.dumps({"nvbandwidth": {"error": "No CUDA-capable device"}})
    assert "No CUDA-capable device" in refused("nvbandwidth", failed, tmp_path)
    assert "no rate between" in refused("nvbandwidth", NVBANDWIDTH[: NVBANDWIDTH.index("Running device")], tmp_path)


def test_processes_of_nvbandwidth_are_on_their_hosts(imported):
    text = NVBANDWIDTH.replace("device_to_device", "multinode_device_to_device")
    text = text.replace("Device 0:", "Process  0 (n1): device 0:").replace("Device 1:", "Process  1 (n2): device 0:")
    profile, _ = imported("nvbandwidth", text)
    assert between(profile, "n1:0", "n2:0").bandwidth_bytes_per_s == 390e9


# iperf3


def iperf3_test(start=None, end=None, **settings):
    ends = {"local_host": "10.0.0.1", "local_port": 1, "remote_host": "::ffff:10.0.0.2", "remote_port": 5201}
    return {
        "start": {
            "connected": [ends], "system_info": "Linux one 5.15.0 #1 SMP x86_64", "connecting_to": {"host": "two"},
            "test_start": {"protocol": "TCP", "num_streams": 1, "reverse": 0, **settings}, **(start or {}),
        },
        "intervals": [],
        "end": {
            "streams": [{"sender": {"min_rtt": 80}}],
            "sum_sent": {"bits_per_second": 9.5e9}, "sum_received": {"bits_per_second": 8e9}, **(end or {}),
        },
    }  # fmt: skip


def test_iperf3_becomes_a_link_from_client_to_server(imported):
    profile, said = imported("iperf3", json.dumps(iperf3_test()))
    [link] = profile.links
    assert (link.source, link.target) == ("one", "two")
    assert link.bandwidth_bytes_per_s == 1e9, "8 Gbit/s at the receiver"
    assert link.latency_s == pytest.approx(40e-6)
    assert (link.evidence["program"], link.evidence["counted_by"]) == ("iperf3", "receiver")
    assert link.evidence["assumed"] == ["latency_s"]
    assert "took half the round trip under load, which may be too long: 40.00 µs." in said
    into = cluster(addresses={"a": "10.0.0.1", "b": "10.0.0.2"})
    named, _ = imported("iperf3", json.dumps(iperf3_test()), into=into)
    assert between(named, "a:0", "b:0").bandwidth_bytes_per_s == 1e9
    assert between(named, "a:0", "b:0").evidence["file"].endswith("0.txt")


def test_a_range_of_assumed_values_names_the_links_at_its_ends(imported):
    """Use three latencies: one link has the smallest, and another one the largest."""
    tests = [
        iperf3_test(
            {"connected": [{"local_host": "a", "remote_host": b}], "connecting_to": {"host": b}, "system_info": ""},
            {"streams": [{"sender": {"min_rtt": trip_us}}]},
        )
        for b, trip_us in (("b", 200), ("c", 80), ("d", 300))
    ]
    _, said = imported("iperf3", *map(json.dumps, tests))
    assert "which may be too long: 40.00 µs (a -> c) to 150.0 µs (a -> d)." in said


def test_an_import_ends_flags_of_its_links_and_none_of_their_hosts(imported):
    flags = [Flag(kind=kind, subjects=("one", "two"), what=kind) for kind in ("loaded", "unsteady", "corrupt")]
    into = msgspec.structs.replace(cluster({"one": 1, "two": 1}), flags=tuple(flags))
    profile, _ = imported("iperf3", json.dumps(iperf3_test()), into=into)
    assert [flag.kind for flag in profile.flags if flag.kind != "assumed"] == ["loaded"]


def iperf3_of(rates):
    """The output of iperf3 for each (client, server), with its Gbit/s."""
    starts = [{"connected": [{"local_host": a, "remote_host": b}], "connecting_to": {"host": b}} for a, b in rates]
    return [
        json.dumps(iperf3_test({**start, "system_info": ""}, {"sum_received": {"bits_per_second": 1e9 * rate}}))
        for start, rate in zip(starts, rates.values())
    ]


def test_earlier_collectives_over_an_imported_link_are_left_out(imported):
    """The link may be mended, and an old all-reduce would still price it as broken."""
    points = (LinkSample(bytes=1 << 20, seconds=1.0),)
    made = tuple(
        Collective(op="all-reduce", devices=devices, dtype="float32", points=points)
        for devices in (("a:0", "b:0"), ("b:0", "c:0"), ("a:0", "b:0", "c:0"))
    )
    into = msgspec.structs.replace(cluster("abc"), collectives=made)
    profile, said = imported("iperf3", *iperf3_of({("a", "b"): 8}), into=into)
    assert profile.collectives == made[1:2]
    assert "Left out 2 earlier collectives over links that have new measurements." in said
    assert "hwaware profile --address HOST:PORT --resume " in said


def test_imported_links_are_compared_as_measured_ones(imported):
    profile, said = imported("iperf3", *iperf3_of({("a", "b"): 8, ("b", "c"): 8, ("a", "c"): 2, ("b", "a"): 4}))
    flags = [flag for flag in profile.flags if flag.kind != "assumed"]
    assert {(flag.kind, flag.subjects) for flag in flags} == {
        ("slow", ("a", "c")), ("slow", ("b", "a")), ("asymmetric", ("b", "a")),
    }  # fmt: skip
    assert "Link b -> a reaches 50% of the rate of the other direction" in said
    assert not any(flag.only for flag in flags), "`hwaware profile --resume` refuses devices of other kinds"


def test_an_import_compares_all_links_of_a_profile_again(imported):
    """Before, a slow link and one that an import measures as slow; the other flags of the profile stay."""
    slow = [Flag(kind="slow", subjects=subjects, what="old") for subjects in (("a", "b"), ("a:0",), ("b", "b"))]
    ends = itertools.permutations("abc", 2)
    links = [link(*pair, 1e9 if pair == ("a", "b") else 2e9) for pair in ends]
    into = msgspec.structs.replace(cluster("abc", links), flags=tuple(slow))
    profile, _ = imported("iperf3", *iperf3_of({("a", "b"): 16, ("b", "c"): 2}), into=into)
    assert {(flag.kind, flag.subjects, flag.only) for flag in profile.flags} == {
        ("slow", ("a:0",), ()), ("slow", ("b", "b"), ()),
        ("slow", ("b", "c"), ("b+c",)), ("asymmetric", ("b", "c"), ("b+c",)),
    }  # fmt: skip
    rates = [one.bandwidth_bytes_per_s for one in profile.links]
    assert sorted(rates) == [0.25e9, *[2e9] * 5]


def test_an_import_onto_a_profile_names_what_it_replaced(imported, tmp_path):
    links = [link(*pair, 2e8 if pair == ("a", "b") else 2e9) for pair in itertools.permutations("abc", 2)]
    _, said = imported("iperf3", *iperf3_of({("a", "c"): 8}), into=cluster("abc", links))
    first, *_, last = said.splitlines()
    assert first == "Replaced a -> c: 2.000 GB/s -> 1.000 GB/s."
    assert last == f"4 flags; `hwaware show {tmp_path / 'made.json'}` lists them."
    assert "reaches" not in said, "the sentences of flags are those of `hwaware show`"


BOTH = {"sum_sent_bidir_reverse": {"bits_per_second": 5e9}, "sum_received_bidir_reverse": {"bits_per_second": 4e9}}
UDP = {"sum_sent": {}, "sum_received": {}, "sum": {"bits_per_second": 1e9, "lost_percent": 20.0}}


@pytest.mark.parametrize(("test", "expected"), [
    (iperf3_test(reverse=1), {("two", "one"): 1e9}),
    (iperf3_test(end=BOTH, bidir=1), {("one", "two"): 1e9, ("two", "one"): 5e8}),
    (iperf3_test(end=UDP, protocol="UDP"), {("one", "two"): 1e8}),
    (iperf3_test(end={"sum_received": {"bits_per_second": 0}}), {("one", "two"): 9.5e9 / 8}),
    ({**iperf3_test(), "error": "interrupt - the client has terminated"}, {("one", "two"): 1e9}),
])  # fmt: skip
def test_directions_of_iperf3(test, expected, imported):
    profile, _ = imported("iperf3", json.dumps(test))
    found = {(link.source, link.target): link.bandwidth_bytes_per_s for link in profile.links}
    assert found == pytest.approx(expected)


def test_a_server_of_iperf3_and_a_client_name_the_same_hosts(imported):
    start = {"accepted_connection": {"host": "10.0.0.2"}, "system_info": "Linux one 5.15.0 x"}
    served = iperf3_test(start=start)
    del served["start"]["connecting_to"]
    back = iperf3_test(reverse=0)
    profile, _ = imported("iperf3", json.dumps(back), json.dumps(served))
    assert [host.name for host in profile.hosts] == ["one", "two"]
    assert {(link.source, link.target) for link in profile.links} == {("one", "two"), ("two", "one")}


def test_names_of_a_host_in_several_files_are_joined_in_any_order():
    """Take one file with the name of a host, another with its address, and a third with both."""
    names = (("one",), ("1.1.1.1",), ("one", "1.1.1.1"))
    found = [FoundLink(End(own), End((f"to{k}",)), 1e9) for k, own in enumerate(names)]
    for order in itertools.permutations(found):
        profile = merged([Reading("iperf3", f"{k}.txt", links=(link,)) for k, link in enumerate(order)])
        assert len(profile.hosts) == 4
        assert len({link.source for link in profile.links}) == 1


def test_repeated_keys_of_bidir_and_streams_of_json(imported):
    text = json.dumps(iperf3_test())
    text = text.replace('"sum_received"', '"sum_received": {"bits_per_second": 2.4e9}, "sum_received"')
    profile, _ = imported("iperf3", text)
    assert between(profile, "one:0", "two:0").bandwidth_bytes_per_s == 3e8
    assert {link.source: link.bandwidth_bytes_per_s for link in profile.links} == {"one": 3e8, "two": 1e9}
    test = iperf3_test()
    stream = "\n".join(json.dumps({"event": name, "data": test[name]}) for name in ("start", "end"))
    assert imported("iperf3", stream)[0].links[0].bandwidth_bytes_per_s == 1e9


def test_doubts_about_iperf3(imported, tmp_path):
    rate = {"sum": {"bits_per_second": 1e6, "lost_percent": 0}, "sum_received": {}, "sum_sent": {}}
    assert "UDP sent at a given rate" in imported("iperf3", json.dumps(iperf3_test(end=rate, protocol="UDP")))[1]
    assert "--bitrate" in imported("iperf3", json.dumps(iperf3_test(target_bitrate=1e8)))[1]
    failed = {"start": {"connected": []}, "end": {}, "error": "unable to connect to server: Connection refused"}
    assert "Connection refused" in refused("iperf3", json.dumps(failed), tmp_path)
    alone = iperf3_test(start={"connected": [{"local_host": "127.0.0.1", "remote_host": "127.0.0.1"}]})
    assert "to itself" in refused("iperf3", json.dumps(alone), tmp_path)
    assert "--json" in refused("iperf3", "[ ID] Interval           Transfer     Bitrate\n[  5] 0-1 sec", tmp_path)
    cut = json.dumps(iperf3_test())
    for place in ('"end"', '"sum_received"'):
        said = refused("iperf3", cut[: cut.index(place)], tmp_path)
        assert "has no rate of iperf3: it ends in the middle of a result." in said


def test_ends_without_names_are_options(imported, tmp_path):
    test = {"start": {"connected": [{"remote_host": "10.0.0.2"}]}, "end": {"sum_received": {"bits_per_second": 8e9}}}
    profile, said = imported("iperf3", json.dumps(test))
    assert "--client NAME" in said
    assert (profile.links[0].source, profile.links[0].target) == ("client", "10.0.0.2")
    named, said = imported("iperf3", json.dumps(test), options=("--client", "a", "--server", "b"))
    assert (named.links[0].source, named.links[0].target) == ("a", "b")
    assert "does not name" not in said
    pair = cluster(addresses={"a": "10.0.0.1", "b": "10.0.0.2"})
    known, _ = imported("iperf3", json.dumps(test), into=pair)
    assert known.links[-1].source == "a", "the other host of two"
    cluster("abc", addresses={"b": "10.0.0.2"}).save(tmp_path / "c.json")
    empty = ("--client", "", "--server", "b")
    assert "--client names " in refused("iperf3", json.dumps(test), tmp_path, *empty, "--into", tmp_path / "c.json")
    assert "--client NAME" in refused("iperf3", json.dumps(test), tmp_path, "--into", tmp_path / "c.json")


def test_iperf3_keeps_the_latency_of_a_profile(imported):
    into = cluster({"one": 1, "two": 1}, between=(1e8, 7e-5))
    profile, said = imported("iperf3", json.dumps(iperf3_test()), into=into)
    link = between(profile, "one:0", "two:0")
    assert (link.bandwidth_bytes_per_s, link.latency_s) == (1e9, 7e-5)
    assert "assumed" not in link.evidence
    assert not any("under load" in flag.what for flag in profile.flags)
    assert "Replaced one -> two: 100.0 MB/s -> 1.000 GB/s." in said
    first, _ = imported("iperf3", json.dumps(iperf3_test()))
    faster = iperf3_test(end={"streams": [{"sender": {"min_rtt": 60}}]})
    again, said = imported("iperf3", json.dumps(faster), into=first)
    assert "Replaced one -> two: 40.00 µs -> 30.00 µs." in said
    assert between(again, "one:0", "two:0").latency_s == pytest.approx(30e-6), "the old one was assumed too"
    test = iperf3_test(end={"streams": []})
    kept, _ = imported("iperf3", json.dumps(test), into=first)
    assert between(kept, "one:0", "two:0").latency_s == pytest.approx(40e-6)
    assert any("under load" in flag.what for flag in kept.flags)


def test_one_way_rates_have_a_flag_of_the_other_direction(imported):
    what = "No file measures two -> one, so hwaware uses the rate and latency of the opposite direction."
    profile, said = imported("iperf3", json.dumps(iperf3_test()))
    assert [flag.subjects for flag in profile.flags if flag.what == what] == [("one", "two")]
    assert what in said
    both, said = imported("iperf3", json.dumps(iperf3_test()), json.dumps(iperf3_test(reverse=1)))
    assert len(both.links) == 2
    assert "opposite direction" not in said
    onto, _ = imported("iperf3", json.dumps(iperf3_test(reverse=1)), into=profile)
    assert what not in [flag.what for flag in onto.flags], "both are measured now"


@pytest.mark.parametrize("name", ["iperf3", "ib"])
def test_options_name_two_different_hosts(name, tmp_path):
    cluster().save(tmp_path / "c.json")
    text = json.dumps(iperf3_test()) if name == "iperf3" else IB
    for into in ((), ("--into", tmp_path / "c.json")):
        message = refused(name, text, tmp_path, "--client", "a", "--server", "a", *into)
        assert "from a to itself, expected two ends" in message
        assert "--client NAME --server OTHER" in message


def test_a_host_with_several_devices_may_be_both_ends(tmp_path):
    several = cluster({"a": 2, "b": 1}, inside=(5e9, 1e-5))
    several.save(tmp_path / "c.json")
    (tmp_path / "t.json").write_text(json.dumps(iperf3_test()))
    options = ("--client", "a", "--server", "a", "--into", tmp_path / "c.json", "-o", tmp_path / "d.json")
    result = run("import", "iperf3", tmp_path / "t.json", *options)
    assert result.exit_code == 0, result.stderr
    before = {(link.source, link.target): link.bandwidth_bytes_per_s for link in several.links}
    after = {
        (link.source, link.target): link.bandwidth_bytes_per_s
        for link in ClusterProfile.load(tmp_path / "d.json").links
    }
    assert after["a", "a"] != before.get(("a", "a"))
    assert {pair: rate for pair, rate in after.items() if pair != ("a", "a")} == {
        pair: rate for pair, rate in before.items() if pair != ("a", "a")
    }


def test_files_of_one_link_do_not_overwrite_each_other(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(json.dumps(iperf3_test()))
    result = run("import", "iperf3", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "c.json")
    assert result.exit_code == 2
    assert "measured the rate from one to two" in result.stderr


# perftest

IB = """---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 Dual-port       : OFF		Device         : mlx5_0
 Mtu             : 4096[B]
---------------------------------------------------------------------------------------
 local address: LID 0000 QPN 0x0108 PSN 0x63ad7d RKey 0x17eedf VAddr 0x007f760c947000
 GID: 00:00:00:00:00:00:00:00:00:00:255:255:10:00:00:05
 remote address: LID 0000 QPN 0x0076 PSN 0xf3810c RKey 0x201600 VAddr 0x007fbb4c981000
 GID: 00:00:00:00:00:00:00:00:00:00:255:255:10:00:00:04
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 2          5000           10.00              8.00                 4.194304
 65536      5000           11021.43           11021.10		   0.176338
---------------------------------------------------------------------------------------
"""
IB_LATENCY = """                    RDMA_Write Latency Test
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]  99% percentile[usec]
 2       1000          1.10           2.05         1.11     	       1.12        	0.00   		1.19
 4096    1000          2.10           3.05         2.11     	       2.12        	0.00   		2.19
"""


@pytest.mark.parametrize(("unit", "rate", "bytes_per_s"), [
    ("MB/sec", "11021.10", 11021.10 * 2**20), ("MiB/sec", "11021.10", 11021.10 * 2**20),
    ("Gb/sec", "92.45", 92.45e9 / 8),
])  # fmt: skip
def test_units_of_perftest(unit, rate, bytes_per_s, imported):
    text = IB.replace("MB/sec", unit).replace("11021.10", rate)
    profile, said = imported("ib", text)
    [link] = profile.links
    assert (link.source, link.target) == ("10.0.0.5", "10.0.0.4"), "addresses in the GIDs"
    assert link.bandwidth_bytes_per_s == pytest.approx(bytes_per_s)
    assert link.bandwidth_bytes_per_s == pytest.approx(65536 * 0.176338e6, rel=1e-3)
    assert "assumed: 100.0 µs" in said


def test_directions_of_perftest(imported):
    reads, _ = imported("ib", IB.replace("RDMA_Write", "RDMA_Read"))
    assert (reads.links[0].source, reads.links[0].target) == ("10.0.0.4", "10.0.0.5")
    server, _ = imported("ib", "* Waiting for client to connect... *\n" + IB)
    assert (server.links[0].source, server.links[0].target) == ("10.0.0.4", "10.0.0.5")
    both, _ = imported("ib", IB.replace("Write BW", "Write Bidirectional BW"))
    assert {link.source for link in both.links} == {"10.0.0.4", "10.0.0.5"}
    assert both.links[0].bandwidth_bytes_per_s == pytest.approx(11021.10 * 2**20 / 2)
    command, _ = imported("ib", "$ ib_send_bw -d mlx5_0 --report_gbits node2\n" + IB.replace("RDMA_Write", "Send"))
    assert command.links[0].target == "node2"


def test_rate_and_latency_of_two_files_become_one_link(imported, tmp_path):
    options = ("--client", "a", "--server", "b")
    profile, said = imported("ib", IB, IB_LATENCY, options=options)
    [link] = profile.links
    assert link.latency_s == pytest.approx(1.12e-6)
    assert link.bandwidth_bytes_per_s == pytest.approx(11021.10 * 2**20)
    assert link.evidence["file"].count(".txt") == 2
    assert "latency_s" not in said
    assert "no rate" in refused("ib", IB_LATENCY, tmp_path, *options)
    onto, _ = imported("ib", IB_LATENCY, into=cluster(between=(1e9, 1e-3)), options=options)
    link = between(onto, "a:0", "b:0")
    assert (link.bandwidth_bytes_per_s, link.latency_s) == (1e9, pytest.approx(1.12e-6))
    assert [sample.seconds for sample in link.samples] == pytest.approx([1.12e-6, 2.12e-6])


@pytest.mark.parametrize("rate", [11021.10, 92.45])
def test_json_of_perftest_tells_its_unit_by_the_messages(rate, imported):
    results = {"MsgSize": 65536, "n_iterations": 5000, "BW_peak": rate, "BW_average": rate, "MsgRate": 0.176338}
    text = json.dumps({"test_info": {"test": "RDMA_Write_BW_Test"}, "results": results})
    profile, _ = imported("ib", text)
    assert profile.links[0].bandwidth_bytes_per_s == pytest.approx(65536 * 0.176338e6, rel=1e-3)


# nvidia-smi topo -m

TOPO = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV12\tSYS\tPIX\t0-63\t0\t\tN/A\nGPU1\tNV12\t X \tSYS\tSYS\t0-63\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tSYS\t0-63\t0\t\tN/A\nNIC0\tPIX\tSYS\tSYS\t X \n\nLegend:\n\n  X    = Self\n"
)


def test_a_topology_is_a_note_and_never_a_measured_speed(imported):
    profile, said = imported("topo", TOPO)
    link = between(profile, "host:0", "host:1")
    assert link.bandwidth_bytes_per_s == 300e9
    assert link.evidence["assumed"] == ["bandwidth_bytes_per_s", "latency_s"]
    assert link.evidence["connection"] == "NV12: NVLink"
    assert between(profile, "host:0", "host:2").bandwidth_bytes_per_s == pytest.approx(15.75e9, rel=1e-3)
    assert "no speeds" in said
    measured = cluster({"box": 3}, inside=(1e9, 1e-6))
    noted, _ = imported("topo", TOPO, into=measured)
    [link] = noted.links
    assert (link.bandwidth_bytes_per_s, link.latency_s) == (1e9, 1e-6)
    assert link.evidence["connections"]["box:0 -> box:1"] == "NV12: NVLink"
    assert noted.flags == ()


def test_what_is_measured_later_replaces_what_was_assumed(imported):
    topology, _ = imported("topo", TOPO.replace("\tGPU2", "").replace("GPU2\tSYS", "x"))
    measured, _ = imported("p2p", P2P[: P2P.index("P2P=Disabled Latency")], into=topology)
    assert between(measured, "host:0", "host:1").bandwidth_bytes_per_s == 9.9e9
    said = " ".join(flag.what for flag in measured.flags)
    assert "bandwidth" not in said
    assert "latency_s of 2 links" in said, "still assumed"
    again, _ = imported("topo", TOPO.replace("\tGPU2", "").replace("GPU2\tSYS", "x"), into=measured)
    assert between(again, "host:0", "host:1").bandwidth_bytes_per_s == 9.9e9
    assert again.environment["imports"][-1]["program"] == "nvidia-smi topo -m"


# All formats

TEXTS = {
    "nccl-tests": [log(), log("sendrecv"), json.dumps(json_log())],
    "p2p": [P2P],
    "nvbandwidth": [NVBANDWIDTH, nvbandwidth_json(READS, LATENCY)],
    "iperf3": [json.dumps(iperf3_test(end=BOTH))],
    "ib": [IB, IB_LATENCY + IB],
    "topo": [TOPO],
}


@pytest.mark.parametrize("name", TEXTS)
def test_show_and_plan_take_what_is_imported(name, imported, tmp_path):
    workload(2).save(tmp_path / "workload.json")
    for text in TEXTS[name]:
        imported(name, text)
        shown = run("show", tmp_path / "made.json")
        assert shown.exit_code == 0
        assert "These values are doubtful or assumed" in shown.stdout
        planned = run("plan", tmp_path / "made.json", tmp_path / "workload.json", "--microbatches", 2, "--json")
        assert planned.exit_code == 0, planned.output
        assert json.loads(planned.stdout)["status"] in ("optimal", "feasible")


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("other", TEXTS)
def test_a_file_of_another_program_is_sent_to_its_command(name, other, tmp_path):
    if name != other:
        for text in TEXTS[other]:
            assert f"run `hwaware import {other}` with the other arguments" in refused(name, text, tmp_path)


@pytest.mark.parametrize("name", TEXTS)
def test_files_of_hwaware_alpa_and_nobody(name, tmp_path):
    assert "a file of hwaware itself" in refused(name, cluster().to_json(), tmp_path)
    assert "hwaware import alpa-db" in refused(name, b"\x80\x04}\x94.", tmp_path)
    assert "is not the output of" in refused(name, "hello", tmp_path)
    assert "output of iperf3 --json." in refused("iperf3", "hello", tmp_path)
    assert "is not the output of" in refused(name, "", tmp_path)
    assert "output of nvbandwidth, as text or with --format json." in refused("nvbandwidth", "", tmp_path)


def test_the_help_lists_each_format_in_one_line():
    told = run("import", "--help").stdout
    for name in (*TEXTS, "alpa-db"):
        [line] = [line for line in told.splitlines() if line.split()[:1] == [name]]
        assert len(line.split()) > 2
    assert all(op in run("import", "nccl-tests", "--help").stdout for op in OPERATIONS.values())


def test_windows_wrote_it(imported):
    text = "\ufeff" + IB.replace("\n", "\r\n")
    assert imported("ib", text.encode("utf-16-le"))[0].links
    assert imported("ib", text.encode())[0].links


def test_names_that_are_no_text(tmp_path):
    path = tmp_path / os.fsdecode(b"x\xff.json")
    test = json.dumps(iperf3_test()).replace("Linux one", "Linux o\\ud800ne")
    path.write_text(test)
    result = run("import", "iperf3", path, "-o", tmp_path / "made.json")
    assert result.exit_code == 0, result.output
    assert ClusterProfile.load(tmp_path / "made.json").hosts[0].name == "o?ne"


WORDS = [
    "nan",
    "-1",
    "1e308",
    "9" * 400,
    "0",
    "N/A",
    "",
    "1e-300",
    "\x00",
    "{",
    "]",
    "Infinity",
    "true",
    "null",
    '"',
    "#",
    "99999",
]


@examples(300, deadline=None)
@given(st.sampled_from(sorted(TEXTS)), st.integers(0, 1 << 30))
def test_any_change_ends_in_a_profile_or_in_one_message(tmp_path_factory, name, seed):
    rng = random.Random(seed)
    text = rng.choice(TEXTS[name])
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(4)
        if kind == 0:  # a word
            places = [match.span() for match in re.finditer(r"[\w.]+", text)]
            start, end = rng.choice(places or [(0, 0)])
            text = text[:start] + rng.choice(WORDS) + text[end:]
        elif kind == 1:  # a cut
            text = text[: rng.randint(0, len(text))]
        elif kind == 2:  # lines twice or in another order
            lines = text.split("\n")
            lines.insert(rng.randint(0, len(lines)), rng.choice(lines))
            text = "\n".join(lines)
        else:  # a piece left out
            start = rng.randint(0, len(text))
            text = text[:start] + text[start + rng.randint(1, 30) :]
    path = tmp_path_factory.mktemp("mutated") / "file"
    path.write_text(text)
    try:
        profile = merged([read(name, str(path), op="all-reduce" if name == "nccl-tests" else None)])
    except UnusableInputError:
        return
    assert ClusterProfile.from_json(profile.to_json()) == profile
    one_stage = plan((0, 1, profile.devices[0].id))
    assert hwaware.evaluate(one_stage, workload(2), profile).step_s > 0
