"""Parts of a profile: what --only and --resume choose, how parts join, and that only parts of one cluster do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from types import SimpleNamespace

import msgspec
import pytest
from click.testing import CliRunner

from hwaware.adapting import Drift
from hwaware.cli import main
from hwaware.cluster import ClusterProfile, Collective, Flag, LinkSample, PartialProfile
from hwaware.errors import ProfileMismatchError, UnusableInputError
from hwaware.profiler import InterruptedMeasurement, TerminatedMeasurement, load_any, measure
from hwaware.profiler.fingerprint import differences, fingerprint, require_same
from hwaware.profiler.partial import merge
from hwaware.profiler.policy import FULL, QUICK
from hwaware.profiler.progress import Silent
from hwaware.profiler.selection import Selection
from hwaware.report.flags import flag_lines, remeasure
from hwaware.workload import MeasuredTime, Workload


@pytest.fixture
def run(fakes):
    """Profile hosts h0 to h3; `rate` is that of all links."""

    def profile(only=(), earlier=None, rate=1e8, flops=1e10, hosts=4, uuid=None, kind="fake"):
        specs = [fakes.spec(f"h{i}", flops, kind=kind, uuid=uuid and f"{uuid}{i}") for i in range(hosts)]
        crew = fakes.crew(specs, bytes_per_s=lambda a, b: rate)
        resume = None if earlier is None else PartialProfile.of(earlier)
        return measure(crew, QUICK, ["float32"], Silent(), Selection.of(only, resume), resume), crew

    return profile


def methods(crew):
    """(method, members or names) of everything that was asked."""
    return {(method, arguments[0] if method == "time_messages" else member)
            for batch in crew.batches for method, member, arguments in batch}  # fmt: skip


def timed(crew):
    return {name for method, name in methods(crew) if method == "time_messages"}


def speeds(profile):
    points = {d.id: d.throughput["float32"][-1] for d in profile.devices}
    return {name: point.flops / point.seconds for name, point in points.items()}


def test_one_host_is_measured_again_and_nothing_else(run):
    first = msgspec.structs.replace(run()[0], driver_s=0.02)
    second, crew = run(["h2"], first, rate=5e7, flops=2e10)
    assert second.driver_s == first.driver_s
    assert speeds(second) == {name: pytest.approx(2e10 if name == "h2:0" else 1e10) for name in speeds(first)}
    assert timed(crew) == set()
    assert {name for method, name in methods(crew) if method == "measure"} == {"device 0 of host h2"}
    assert [link.bandwidth_bytes_per_s for link in second.links] == [link.bandwidth_bytes_per_s for link in first.links]
    assert len(second.environment["earlier"]) == 1


def test_a_device_that_is_measured_again_keeps_the_times_of_the_runtime(run):
    first, _ = run()
    timed_devices = [msgspec.structs.replace(one, pass_s=1e-4, sum_bytes_per_s=1e9) for one in first.devices]
    second, _ = run(["h2"], msgspec.structs.replace(first, devices=tuple(timed_devices)), flops=2e10)
    assert {(device.pass_s, device.sum_bytes_per_s) for device in second.devices} == {(1e-4, 1e9)}


def test_one_link_is_measured_again_and_nothing_else(run):
    first, _ = run()
    second, crew = run(["h1+h2"], first, rate=5e7)
    assert timed(crew) == {"h1:0>h2:0", "h2:0>h1:0"}
    assert not [name for method, name in methods(crew) if method == "measure"]
    slow = {(link.source, link.target) for link in second.links if link.bandwidth_bytes_per_s < 6e7}
    assert slow == {("h1", "h2"), ("h2", "h1")}
    assert {flag.subjects for flag in second.flags} == {("h1", "h2"), ("h2", "h1")}, "flags are computed anew"
    third, _ = run(["h1+h2"], second)
    assert third.flags == ()


def test_collectives_over_a_link_that_is_measured_again_are_left_out(run):
    """The link may be mended, and an old all-reduce would still price it as broken."""
    first, _ = run()
    point = LinkSample(bytes=1 << 20, seconds=0.1)
    groups = [("h0:0", "h1:0"), ("h1:0", "h2:0"), ("h0:0", "h1:0", "h2:0", "h3:0")]
    made = tuple(Collective(op="all-reduce", devices=group, dtype="float32", points=(point,)) for group in groups)
    failed = tuple(Flag(kind="failed", subjects=group, what="Late.") for group in groups)
    first = msgspec.structs.replace(first, collectives=made, flags=failed)
    second, _ = run(["h1+h2"], first, rate=5e7)
    assert second.collectives == made[:1]
    assert [flag for flag in second.flags if flag.kind == "failed"] == [failed[0]]
    third, _ = run(["h3"], first)  # a device, and no link
    assert third.collectives == made
    again = merge(PartialProfile.of(first), PartialProfile(collectives=made[2:]))
    assert again.flags == failed[:2], "the third group was measured again"


def test_a_link_asks_only_its_hosts():
    devices = {"a": [None, None], "b": [None], "c": [None]}
    assert Selection.of(["a+b"], PartialProfile()).participants(devices) == {"a", "b"}
    with pytest.raises(UnusableInputError, match=r"names links of a:0, which are devices, expected hosts\. To"):
        Selection.of(["a:0+b"], PartialProfile()).participants({"a": ["a:0"], "b": ["b:0"]})
    assert Selection.of(["a+a"], PartialProfile()).participants(devices) == {"a"}
    assert Selection.of(["a"], None).participants(devices) == devices.keys()
    assert Selection.of([], None).participants(devices) == devices.keys()


def test_hosts_keep_their_order_where_only_some_take_part(fakes, run):
    first, _ = run()
    crew = fakes.crew([fakes.spec(name, 1e10) for name in ("h0", "h2")])
    earlier = PartialProfile.of(first)
    second = measure(crew, QUICK, ["float32"], Silent(), Selection.of(["h0+h2"], earlier), earlier)
    assert [device.id for device in second.devices] == [device.id for device in first.devices]
    assert [host.name for host in second.hosts] == [host.name for host in first.hosts]


def test_devices_keep_their_order_where_only_some_of_a_host_take_part(fakes):
    """Their order gives them their indices."""
    whole = [fakes.spec(host, 1e10) for host in "aaab"]
    first = measure(fakes.crew(whole), QUICK, ["float32"], Silent(), Selection.of([], None), None)
    earlier = PartialProfile.of(first)
    crew = fakes.crew([*whole[2:], fakes.spec("c", 1e10)])
    second = measure(crew, QUICK, ["float32"], Silent(), Selection.of(["c"], earlier), earlier)
    assert [device.id for device in second.devices] == ["a:0", "a:1", "a:2", "b:0", "c:0"]


def test_a_device_without_a_curve_is_left_out_of_cards_and_collectives(fakes):
    for slow in (0, 1):
        specs = [fakes.spec(host, 1.0 if place == slow else 1e10) for place, host in enumerate("aabb")]
        found = measure(fakes.crew(specs), FULL, ["float32"], Silent(), Selection.of([], None), None)
        known = {device.id for device in found.devices}
        assert known == {"a:0", "a:1", "b:0", "b:1"} - {f"a:{slow}"}
        assert {name for one in (*found.shared_cards, *found.collectives) for name in one.devices} <= known
        assert found.collectives


def test_links_alone_are_no_profile(run):
    with pytest.raises(UnusableInputError, match=r"--only h0\+h1 measures links alone.*To fix: add --resume FILE"):
        run(["h0+h1"])


def test_the_links_inside_a_host_are_measured_again(fakes):
    def profile(only, earlier, rate):
        crew = fakes.crew([fakes.spec("a", 1e10), fakes.spec("a", 1e10), fakes.spec("b", 1e10)], lambda *_: rate)
        return measure(crew, QUICK, ["float32"], Silent(), Selection.of(only, earlier), earlier), crew

    first, _ = profile([], None, 1e8)
    second, crew = profile(["a+a"], PartialProfile.of(first), 5e7)
    rates = {(link.source, link.target): link.bandwidth_bytes_per_s for link in second.links}
    assert rates == {("a", "a"): pytest.approx(5e7), ("a", "b"): pytest.approx(1e8), ("b", "a"): pytest.approx(1e8)}
    assert not [method for method, _ in methods(crew) if method == "measure"]


def test_a_host_of_one_device_has_no_links_inside(run):
    first, _ = run()
    with pytest.raises(UnusableInputError, match=r"--only names the links inside h1, where there is one device"):
        run(["h1+h1"], first)


def test_a_direction_that_failed_is_measured_without_being_named(run):
    first, _ = run(hosts=3)
    lacking = PartialProfile.of(first)
    kept = tuple(link for link in lacking.links if (link.source, link.target) != ("h1", "h0"))
    second, crew = run(earlier=msgspec.structs.replace(lacking, links=kept), hosts=3)
    assert timed(crew) == {"h0:0>h1:0", "h1:0>h0:0"}
    assert len(second.links) == 6


def test_facts_of_hosts_outlast_a_profile_of_one_link(run):
    first, _ = run()
    facts = {name: {**known, "busy_before": 0.5} for name, known in first.environment["hosts"].items()}
    busy = {**first.environment, "hosts": facts, "reference_s": 0.5}
    second, _ = run(["h1+h2"], msgspec.structs.replace(first, environment=busy), rate=5e7)
    assert second.environment["hosts"] == facts, "each as it was when its device was measured, or busier"
    assert {flag.subjects for flag in second.flags if flag.kind == "loaded"} == {("h0", "h1", "h2", "h3")}
    assert second.environment["reference_s"] == 0.5, "no device was measured beside another"
    third, _ = run(["h1"], msgspec.structs.replace(first, environment=busy))
    assert third.environment["reference_s"] != 0.5
    [loaded] = [flag for flag in third.flags if flag.kind == "loaded"]
    assert loaded.what.startswith("Hosts h0, h2, h3 did other work when the profiler measured them:")


def test_what_a_person_wrote_of_a_host_loses_no_measurement(run):
    first, _ = run()
    facts = {"h0": {"busy_before": "idle", "busy_after": None}, "h1": {"busy_before": [1]}, "h2": "quiet", "h3": {}}
    for only in (["h1+h2"], ["h1"]):
        second, _ = run(only, msgspec.structs.replace(first, environment={**first.environment, "hosts": facts}))
        assert len(second.devices) == 4
        assert len(second.links) == 12


def test_two_devices_of_one_id_are_refused(fakes):
    crew = fakes.crew([fakes.spec("a", 1e10), fakes.spec("b", 1e10)])
    said = crew.identify
    crew.identify = lambda member: {**said(member), "declared_id": "x:0"}
    with pytest.raises(
        UnusableInputError, match=r"Device 0 of host b has the id 'x:0', which is that of device 0 of host a"
    ):
        measure(crew, QUICK, ["float32"], Silent(), Selection.of([], None), None)
    crew.identify = lambda member: {**said(member), "declared_id": "b"}
    with pytest.raises(UnusableInputError, match=r"the id 'b', which is a host's name already"):
        measure(crew, QUICK, ["float32"], Silent(), Selection.of([], None), None)


def test_what_is_missing_is_measured(run):
    part, _ = run(hosts=3)
    whole, crew = run(earlier=part, rate=5e7)
    assert {name for method, name in methods(crew) if method == "measure"} == {"device 0 of host h3"}
    assert timed(crew) == {f"h{i}:0>h3:0" for i in range(3)} | {f"h3:0>h{i}:0" for i in range(3)}
    assert len(whole.devices) == 4
    assert len(whole.links) == 12
    named, crew = run(["h3"], part, rate=5e7)
    assert len(named.links) == 12, "a host that is new is joined with all others"
    nothing, crew = run(earlier=whole)
    assert not timed(crew)
    assert nothing.devices == whole.devices
    assert nothing.links == whole.links


@pytest.mark.parametrize(("method", "calls"), [("measure", 3), ("copy", 3), ("rest", 0)])
def test_a_device_whose_measurement_was_cut_is_measured_by_a_resumed_run(run, fakes, method, calls):
    class Interrupted(fakes.crew):
        def outcome(self, one, limit_s):
            if sum(entry[0] == method for batch in self.batches for entry in batch) > calls:
                raise KeyboardInterrupt
            return super().outcome(one, limit_s)

    uncut, _ = run(hosts=3)
    specs = [fakes.spec(f"h{i}", 1e10) for i in range(3)]
    with pytest.raises(InterruptedMeasurement) as caught:
        measure(Interrupted(specs), QUICK, ["float32"], Silent())
    resumed, _ = run(earlier=caught.value.found, hosts=3)
    assert [device.throughput for device in resumed.devices] == [device.throughput for device in uncut.devices]
    assert all(device.memory_bandwidth_bytes_per_s == 5e9 for device in resumed.devices)
    assert all("bursts_s" in device.samples for device in resumed.devices)


def test_some_hosts_alone_make_a_smaller_cluster(run):
    found, crew = run(["h0", "h2"])
    assert [device.id for device in found.devices] == ["h0:0", "h2:0"]
    assert timed(crew) == {"h0:0>h2:0", "h2:0>h0:0"}


@pytest.mark.parametrize(
    ("only", "ids", "measured", "refused"),
    [
        (["h0+h9"], {"h0": [None], "h1": [None]}, {}, "h9"),
        (["h0", "h1+h9"], {"h0": [None], "h1": [None]}, {}, "h9"),
        (["mine"], {"h0": [None]}, {}, None),  # a host may have declared a device of that name
        (["h9"], {"h0": ["h0:0"], "h1": ["h1:0"]}, {}, "h9"),
        (["h9"], {"h0": [None], "h1": ["h1:0"]}, {"mine": "h0"}, "h9"),
        (["mine"], {"h0": [None], "h1": ["h1:0"]}, {"mine": "h0"}, None),
        (["h9"], {"h0": [None, None]}, {"mine": "h0"}, None),  # nobody knows the second device
    ],
)
def test_wrong_names_are_refused_before_workers_start_if_ray_or_the_profile_knows_better(only, ids, measured, refused):
    selection = Selection.of(only, PartialProfile())._replace(devices=measured)
    if refused is None:
        assert selection.participants(ids) == ids.keys()
        return
    with pytest.raises(
        UnusableInputError, match=rf"--only names {refused}, which .* To fix: name some of h0, "
    ) as caught:
        selection.participants(ids)
    assert caught.value.found == (refused,)
    assert {"h0", *filter(None, (one for own in ids.values() for one in own))} <= {*caught.value.expected}


@pytest.mark.parametrize("only", ["h9", "h0:7", "h0+h9", "h0+", "+", "", "a+b+c", "h1+h1"])
def test_names_that_nobody_has_are_refused(run, only):
    with pytest.raises(UnusableInputError, match=r"--only .*To fix: "):
        run([only])


def test_a_profile_of_another_cluster_is_not_resumed(run):
    first, _ = run(uuid="GPU-a")
    run(earlier=first, uuid="GPU-a")
    with pytest.raises(ProfileMismatchError, match=r"device h0:0: uuid was 'GPU-a0', is 'GPU-b0'.*To fix: "):
        run(earlier=first, uuid="GPU-b")
    with pytest.raises(ProfileMismatchError, match=r"kind was 'fake', is 'other'"):
        run(earlier=first, kind="other")


@pytest.mark.parametrize(
    ("only", "named"),
    [(["h1"], None), (["h1:0"], None), (["h1+h2"], None), (["h0"], "h0"), (["h0+h2"], "h0"), ([], "h0")],
)
def test_only_the_asked_hosts_have_to_be_as_they_were(run, only, named):
    """Host h0 has another platform now."""
    first, _ = run()
    hosts = {**first.environment["hosts"], "h0": {**first.environment["hosts"]["h0"], "jax": "an older one"}}
    earlier = msgspec.structs.replace(first, environment={**first.environment, "hosts": hosts})
    if named is None:
        assert len(run(only, earlier)[0].devices) == 4
        return
    with pytest.raises(ProfileMismatchError, match=r"running: host h0: jax was 'an older one', is '0'\. To fix"):
        run(only, earlier)


def test_fingerprints_name_what_differs(run):
    first, _ = run(uuid="GPU-a")
    mark = fingerprint(first)
    assert differences(mark, fingerprint(ClusterProfile.from_json(first.to_json()))) == []
    require_same(mark, mark)
    changed = json.loads(json.dumps(mark))
    changed["hosts"]["h1"]["jax"] = "9"
    changed["devices"]["h2:0"]["uuid"] = None  # nothing is known: no contradiction
    assert differences(mark, changed) == ["host h1: jax was '0', is '9'"]
    del changed["hosts"]["h1"], changed["devices"]["h0:0"]
    changed["hosts"]["h8"] = {}
    assert differences(mark, changed) == [
        "host h1 is not there",
        "host h8 was not measured",
        "device h0:0 is not there",
    ]
    with pytest.raises(ProfileMismatchError, match="host h8 was not measured"):
        require_same(mark, changed)


def test_a_profile_that_a_training_has_corrected_is_of_the_same_cluster(run):
    first, _ = run()
    workload = Workload.uniform(measured={"h2:0": {"1,1": MeasuredTime(forward_s=1, backward_s=2)}})
    _, corrected = Drift(devices={"h1:0": 2.0, "h2:0": 3.0}).applied(workload, first)
    assert {device.kind for device in corrected.devices} > {"fake"}
    assert differences(fingerprint(corrected), fingerprint(first)) == []
    again, _ = run(("h1",), corrected)
    assert again.device("h1:0").kind == "fake"


def test_failures_stay_until_their_subjects_are_measured(run):
    first, _ = run(hosts=3)
    lost = Flag(kind="failed", subjects=("h3",), what="The worker died.", only=("h3",))
    broken = Flag(kind="corrupt", subjects=("h0", "h1"), what="Changed.", only=("h0+h1",))
    part = PartialProfile.of(first)
    part = PartialProfile(**{**{k: getattr(part, k) for k in part.__struct_fields__}, "flags": (lost, broken)})
    same = merge(part, PartialProfile())
    assert same.flags == (lost, broken)
    assert run(["h0+h1"], part)[0].flags == (lost,)
    assert run(["h3"], part)[0].flags == (broken,)


def test_flags_come_with_the_command_that_measures_just_that(run):
    first, _ = run()
    slow, _ = run(["h1+h2"], first, rate=5e7)
    lines = flag_lines(slow, "my cluster.json")
    assert lines[0].startswith("slow: h1 -> h2: Link h1 -> h2 reaches 50%")
    assert lines[1].strip() == (
        "measure again: hwaware profile --resume 'my cluster.json' --only h1+h2 -o 'my cluster.json'"
    )
    assert sum("measure again" in line for line in lines) == 1, "one command measures both directions"
    assert lines[-2] == "If a link stays slow, check its cable, its network cards and its switch."
    busy = Flag(kind="loaded", subjects=("h1", "h2"), what="", only=("h1", "h2"))
    [_, command, _] = flag_lines(msgspec.structs.replace(slow, flags=(busy,)), "c.json")
    again = "hwaware profile --resume c.json --only h1 --only h2 --only h1+h2 -o c.json"
    assert command.strip() == f"measure again: {again}"
    other = Flag(kind="loaded", subjects=("h0",), what="", only=("h0",))
    lines = flag_lines(msgspec.structs.replace(slow, flags=(busy, other)), "c.json")
    hosts = "--only h1 --only h2 --only h0 --only h1+h2 --only h0+h1 --only h0+h2"
    again = f"measure again: hwaware profile --resume c.json {hosts} -o c.json"
    assert [line.strip() for line in lines if "measure" in line] == [again], "one command for all loaded hosts"
    other = Flag(kind="loaded", subjects=("h0", "h3"), what="", only=("h0", "h3"))
    lines = flag_lines(msgspec.structs.replace(slow, flags=(busy, other)), "c.json")
    assert [line.strip() for line in lines if "measure" in line] == [
        "measure everything again: hwaware profile -o c.json"
    ]
    everywhere = Flag(kind="loaded", subjects=tuple(host.name for host in slow.hosts), what="", only=("h1",))
    [_, command, _] = flag_lines(msgspec.structs.replace(slow, flags=(everywhere,)), "c.json")
    assert command.strip() == "measure everything again: hwaware profile -o c.json"
    assert remeasure(
        Flag(kind="failed", subjects=("h3",), what="", only=("h3",)), "c.json.partial", ["--address", "10.0.0.1:6379"]
    ) == ("hwaware profile --address 10.0.0.1:6379 --resume c.json.partial --only h3 -o c.json")


def test_flags_of_one_kind_begin_with_the_smallest_percentage(run):
    words = {"a": "reaches 60% of", "b": "reaches 7% of", "c": "is odd", "d": "reaches 100% of", "e": "is odd, too"}
    flags = [Flag(kind="slow", subjects=("h0", name), what=f"Link {what} x.") for name, what in words.items()]
    flags.append(Flag(kind="corrupt", subjects=("h0", "f"), what="Changed."))
    lines = flag_lines(msgspec.structs.replace(run()[0], flags=tuple(flags)), "c.json")
    assert [line.split()[3][0] for line in lines if " -> " in line] == list("fbadce")


def test_what_is_measured_again_keeps_data_types(run):
    """A second measurement of a device replaces all of its curves."""
    first, _ = run()
    slow, _ = run(["h1+h2"], first, rate=5e7)
    command = [
        "hwaware",
        "profile",
        "--quick",
        "--no-runtime",
        "--dtype=float32,bfloat16",
        "--address",
        "10.0.0.1:6379",
        "-o",
        "c.json",
    ]
    made = msgspec.structs.replace(slow, environment={**slow.environment, "command": command})
    options = "--quick --no-runtime --dtype float32,bfloat16 --address 10.0.0.1:6379"
    assert f"hwaware profile {options} --resume c.json --only h1+h2" in flag_lines(made, "c.json")[1]


def test_show_names_suspects_and_commands(run, tmp_path):
    first, _ = run()
    slow, _ = run(["h1+h2"], first, rate=5e7)
    path = tmp_path / "cluster.json"
    slow.save(path)
    result = CliRunner().invoke(main, ["show", str(path)])
    assert result.exit_code == 0, result.output
    assert "These devices, links and measurements need a look (2):" in result.stdout
    assert "Link h1 -> h2 reaches 50% of the median" in result.stdout
    assert f"--resume {path} --only h1+h2 -o {path}" in result.stdout
    assert result.stdout.splitlines()[-1].endswith(f"first run: cp {path} {path}.before")
    shutil.copy(path, f"{path}.before")
    last = CliRunner().invoke(main, ["show", str(path)]).stdout.splitlines()[-1]
    assert last == f"To compare {path} with its earlier copy: hwaware compare {path}.before {path}"
    assert "cp " not in "".join(flag_lines(slow, "c.json.partial")), "the command leaves that file as it is"


def test_ctrl_c_on_the_command_line_keeps_a_partial_file(run, fakes, tmp_path, monkeypatch):
    first, _ = run(hosts=2)
    kept = tmp_path / "cluster.json"
    first.save(kept)
    before = kept.read_bytes()

    def interrupted(*args, **kwargs):
        raise InterruptedMeasurement(PartialProfile(hosts=first.hosts, devices=first.devices))

    monkeypatch.setattr("hwaware.profiler.profile", interrupted)
    result = CliRunner().invoke(main, ["profile", "--address", "local", "-o", str(kept)])
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "Interrupted."
    assert "kept 2 hosts, 2 devices, 0 links. Go on with: hwaware profile --resume" in result.stderr
    assert kept.read_bytes() == before, "what was there is not lost"
    part = load_any(f"{kept}.partial")
    assert len(part.devices) == 2
    whole, crew = run(earlier=part, hosts=2)
    assert not [name for method, name in methods(crew) if method == "measure"]
    assert len(whole.links) == 2
    shown = CliRunner().invoke(main, ["show", f"{kept}.partial"])
    assert shown.exit_code == 0, shown.output
    assert "h1:0" in shown.stdout


def test_the_command_to_go_on_keeps_the_options(run, tmp_path, monkeypatch):
    output = tmp_path / "my c.json"
    options = ["--address", "local", "--quick", "--dtype=float32,bfloat16", "--only", "h0", "--symmetric"]
    monkeypatch.setattr("sys.argv", ["/bin/hwaware", "profile", *options, "-o", str(output)])

    def interrupted(*args, **kwargs):
        raise InterruptedMeasurement(PartialProfile.of(run(hosts=2)[0]))

    monkeypatch.setattr("hwaware.profiler.profile", interrupted)
    result = CliRunner().invoke(main, ["profile", "--address", "local", "-o", str(output)])
    kept = "--address local --quick --dtype float32,bfloat16 --only h0 --symmetric"
    goes_on = f"hwaware profile {kept} --resume '{output}.partial' -o '{output}'"
    assert f"Go on with: {goes_on}" in result.stderr
    shown = CliRunner().invoke(main, ["show", f"{output}.partial"])
    assert shown.stdout.splitlines()[0] == f"Unfinished profile: 2 devices, 2 links; go on with: {goes_on}"
    load_any(f"{output}.partial").complete().save(output)
    assert "Unfinished" not in CliRunner().invoke(main, ["show", str(output)]).stdout


@pytest.mark.parametrize("resumed", ["c.json.partial", "kept.partial"])
def test_a_complete_profile_removes_the_unfinished_one_beside_it(run, tmp_path, monkeypatch, resumed):
    found, _ = run(hosts=2)
    monkeypatch.setattr("hwaware.profiler.profile", lambda *_, **__: found)
    monkeypatch.chdir(tmp_path)
    PartialProfile.of(found).save("c.json.partial")
    PartialProfile.of(found).save("kept.partial")
    result = CliRunner().invoke(main, ["profile", "--address", "local", "--resume", resumed, "-o", "c.json"])
    assert result.exit_code == 0, result.output
    left = {"c.json", "c.json.partial", "kept.partial"} - ({resumed} & {"c.json.partial"})
    assert {path.name for path in tmp_path.iterdir()} == left
    assert "c.json: 2 hosts, 2 devices, 2 links." in result.stderr


def test_sigterm_on_the_command_line_keeps_a_partial_file(run, tmp_path, monkeypatch):
    first, _ = run(hosts=2)

    def terminated(*args, **kwargs):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        except SystemExit as ending:
            raise TerminatedMeasurement(
                ending.code, PartialProfile(hosts=first.hosts, devices=first.devices)
            ) from ending

    monkeypatch.setattr("hwaware.profiler.profile", terminated)
    result = CliRunner().invoke(main, ["profile", "--address", "local", "-o", str(tmp_path / "c.json")])
    assert result.exit_code == 143
    assert "kept 2 hosts, 2 devices, 0 links. Go on with: hwaware profile --resume" in result.stderr
    assert len(load_any(tmp_path / "c.json.partial").devices) == 2


def test_ctrl_c_before_anything_is_finished_says_that_nothing_is_saved(run, tmp_path, monkeypatch):
    first, _ = run(hosts=2)

    def interrupted(*args, **kwargs):
        raise InterruptedMeasurement(PartialProfile(hosts=first.hosts))

    monkeypatch.setattr("hwaware.profiler.profile", interrupted)
    result = CliRunner().invoke(main, ["profile", "--address", "local", "-o", str(tmp_path / "c.json")])
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-2:] == [
        "The profiler had not finished any device or link yet, so nothing is saved.",
        "Interrupted.",
    ]
    assert not list(tmp_path.iterdir())


def test_unknown_names_bring_the_forms_of_hosts_and_links(run):
    with pytest.raises(UnusableInputError) as caught:
        run(["h0-h1"], hosts=2)
    assert str(caught.value).endswith(
        "To fix: name some of h0, h0:0, h1, h1:0, or h0+h1 for the links between two hosts."
    )


def test_a_host_that_vanished_has_one_line_on_standard_error(run, tmp_path, monkeypatch):
    found, _ = run(hosts=2)
    lost = [Flag(kind="failed", subjects=("h9",), what=what, only=("h9",)) for what in ("It died.", "It died again.")]
    slow = Flag(kind="slow", subjects=("h1",), what="It is slow.")
    monkeypatch.setattr(
        "hwaware.profiler.profile", lambda *_, **__: msgspec.structs.replace(found, flags=(*lost, slow))
    )
    result = CliRunner().invoke(main, ["profile", "--address", "local", "-o", str(tmp_path / "c.json")])
    assert result.exit_code == 0
    lines = [line for line in result.stderr.splitlines() if "missing" in line]
    assert lines == ["Host h9 is missing from the profile: It died."]


def test_one_line_names_a_data_type_that_kept_devices_lack(run, tmp_path, monkeypatch):
    found, _ = run(hosts=2)
    monkeypatch.setattr("hwaware.profiler.profile", lambda *_, **__: found)
    monkeypatch.chdir(tmp_path)
    found.save("c.json")
    resumed = ["profile", "--address", "local", "--resume", "c.json", "-o", "d.json"]
    assert "--resume" not in CliRunner().invoke(main, resumed).stderr
    result = CliRunner().invoke(main, [*resumed, "--dtype", "bfloat16"])
    assert result.exit_code == 0
    assert (
        "--resume kept 2 devices as measured, in float32 and not in bfloat16. To fix: measure each again, with "
        "--only h0:0 --dtype float32,bfloat16\n"
    ) in result.stderr


def test_hosts_that_are_not_measured_get_the_addresses_that_ray_knows(fakes, run):
    """Also if hosts have exchanged their addresses; a host that Ray lacks keeps its own."""
    found, _ = run()
    moved = [
        msgspec.structs.replace(host, address=f"address of h{3 - place}") for place, host in enumerate(found.hosts)
    ]
    earlier = PartialProfile.of(msgspec.structs.replace(found, hosts=tuple(moved)))
    crew = fakes.crew([fakes.spec(name, 1e10) for name in ("h1", "h2")])
    crew.addresses = {name: f"address of {name}" for name in ("h0", "h1", "h2")}
    again = measure(crew, QUICK, ["float32"], Silent(), Selection.of(["h1+h2"], earlier), earlier)
    assert again.hosts == (*found.hosts[:3], moved[3])


def test_a_resumed_profile_of_all_hosts_renews_addresses_and_measures_nothing(run):
    found, _ = run(hosts=2)
    moved = tuple(msgspec.structs.replace(host, address="192.0.2.9") for host in found.hosts)
    again, crew = run(earlier=msgspec.structs.replace(found, hosts=moved), hosts=2)
    assert again.hosts == found.hosts
    assert not timed(crew)
    assert not [name for method, name in methods(crew) if method == "measure"]


def test_one_pair_stands_for_all_alike_where_the_user_says_so(fakes):
    kinds = {"h0": "fast", "h1": "fast", "h2": "slow", "h3": "slow", "h4": "slow"}
    rates = {("fast", "fast"): 4e8, ("fast", "slow"): 2e8, ("slow", "fast"): 1e8, ("slow", "slow"): 5e7}
    crew = fakes.crew(
        [fakes.spec(host, 1e10, kind=kind) for host, kind in kinds.items()],
        bytes_per_s=lambda a, b: rates[kinds[a], kinds[b]],
    )
    found = measure(crew, QUICK, ["float32"], Silent(), Selection.of((), None, symmetric=True))
    assert len(timed(crew)) == 2 * 3, "fast with fast, fast with slow, slow with slow"
    assert len(found.links) == 5 * 4
    for link in found.links:
        assert link.bandwidth_bytes_per_s == pytest.approx(rates[kinds[link.source], kinds[link.target]])
    copied = [link for link in found.links if "copied_from" in link.evidence]
    assert len(copied) == 20 - 6


@pytest.mark.parametrize(
    ("text", "clock"),
    [
        (
            "1410, 71, Active, Active, Active, Not Active, Not Active",
            {
                "clock_mhz": 1410,
                "temperature_c": 71,
                "slowed_by": ["sw_power_cap", "hw_slowdown", "hw_thermal_slowdown"],
            },
        ),
        ("1980, [N/A], Not Active, Not Active, [N/A], [N/A], Not Active", {"clock_mhz": 1980, "slowed_by": []}),
        ("[N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A]", {}),
    ],
)
def test_a_gpu_tells_its_clock_while_it_is_busy(monkeypatch, text, clock):
    from hwaware.profiler import worker

    class Done:
        stdout = text + "\n"

    lines = []
    monkeypatch.setattr(worker.subprocess, "run", lambda line, **_: lines.append(line) or Done())
    made = worker.Worker("127.0.0.1", b"s" * 32, index=2)
    try:
        busy = []
        made._products = SimpleNamespace(measure=lambda *arguments: busy.append(arguments))
        assert made.heat("float32", 64, 0.1) == {}  # a processor
        made._is_gpu = True
        assert made.heat("bfloat16", 64, 0.1) == clock
        assert [one[0] for one in busy] == ["float32", "bfloat16"]
        (line,) = lines
        assert "clocks.sm" in line[1]
        assert line[-1] == "--id=2"
    finally:
        made.close()


def test_what_nvidia_smi_says_is_part_of_the_fingerprint(monkeypatch):
    from hwaware.profiler import worker

    class Done:
        stdout = "GPU-12ab, 550.54.15, 1980\n"

    lines = []
    monkeypatch.setattr(worker.subprocess, "run", lambda line, **_: lines.append(line) or Done())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert worker._nvidia_facts(3, 0) == {"uuid": "GPU-12ab", "driver": "550.54.15", "clock_mhz": "1980"}
    # By what CUDA shows to this process: Ray shows one, and a person may show some.
    for visible, index, visible_index in (("3", 3, 0), ("5, 1", 1, 1), ("GPU-77,GPU-78", 0, 1), ("5", 1, 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        worker._nvidia_facts(index, visible_index)
    assert [line[-1] for line in lines] == ["--id=3", "--id=3", "--id=1", "--id=GPU-78", "--id=1"]

    def missing(line, **_):
        raise OSError("no nvidia-smi")

    monkeypatch.setattr(worker.subprocess, "run", missing)
    assert worker._nvidia_facts(0, 0) == {}
