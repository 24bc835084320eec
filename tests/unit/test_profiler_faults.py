"""Planted faults: each is found and named, and what the others measured is kept."""

from __future__ import annotations

import errno
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from hwaware.cluster import ClusterProfile, LinkTable
from hwaware.errors import MeasurementError
from hwaware.profiler import IncompleteError, InterruptedMeasurement, TerminatedMeasurement, measure
from hwaware.profiler import clock as clocks
from hwaware.profiler.flags import all_flags
from hwaware.profiler.messages import first_difference, pattern
from hwaware.profiler.policy import FULL, QUICK
from hwaware.profiler.products import Products, Program, square
from hwaware.profiler.progress import Lines, Silent
from hwaware.profiler.selection import Selection

LIMIT_S = 10.0
POLICY = QUICK._replace(message_bytes=(1024, 65536), repeats=3, large_repeats=2, tiny_repeats=4)


@pytest.fixture
def alike(fakes):
    """Four hosts that are alike, with links of 1e8 bytes/s but for what the test says."""

    def make(crew=fakes.crew, slow=None, **options):
        rates = slow or {}
        specs = [fakes.spec(f"h{i}", 1e10) for i in range(4)]
        return crew(specs, bytes_per_s=lambda a, b: rates.get((a, b), 1e8), **options)

    return make


def flags(profile, kind):
    return [flag for flag in profile.flags if flag.kind == kind]


def named(profile):
    return {(flag.kind, flag.subjects) for flag in profile.flags}


def test_nothing_is_said_of_a_cluster_without_faults(alike):
    assert measure(alike(), FULL, ["float32"], Silent()).flags == ()


def test_a_link_at_half_rate(alike):
    slow = {("h1", "h2"): 5e7, ("h2", "h1"): 5e7}
    found = measure(alike(slow=slow), QUICK, ["float32"], Silent())
    assert named(found) == {("slow", ("h1", "h2")), ("slow", ("h2", "h1"))}
    assert "50% of the median of the 12 links" in found.flags[0].what
    assert {flag.only for flag in found.flags} == {("h1+h2",), ("h2+h1",)}


def test_a_slow_link_between_hosts_without_a_like(fakes):
    specs = [fakes.spec("h0", 1e10, kind="big"), *(fakes.spec(host, 1e10, kind="small") for host in ("h1", "h2"))]
    crew = fakes.crew(specs, bytes_per_s=lambda a, b: 1e7 if {a, b} == {"h1", "h2"} else 1e8)
    found = measure(crew, QUICK, ["float32"], Silent())
    assert named(found) == {("slow", ("h1", "h2")), ("slow", ("h2", "h1"))}
    assert "10% of the median of the 6 links between hosts" in found.flags[0].what


@pytest.mark.parametrize(("hosts", "links"), [("h1 h2", 6), ("h1 h2 h3", 12)])
def test_a_slow_pair_that_is_half_of_its_group_is_compared_with_all(fakes, hosts, links):
    """Links between h0 and two others are four, those of the slow pair two: their median lies between both rates."""
    specs = [fakes.spec("h0", 1e10, kind="big"), *(fakes.spec(host, 1e10, kind="small") for host in hosts.split())]
    crew = fakes.crew(specs, bytes_per_s=lambda a, b: 5e7 if {a, b} == {"h0", "h1"} else 1e8)
    found = measure(crew, QUICK, ["float32"], Silent())
    assert named(found) == {("slow", ("h0", "h1")), ("slow", ("h1", "h0"))}
    group = f"{links} links between hosts" if links == 6 else "6 links between such hosts"
    assert f"50% of the median of the {group}" in found.flags[0].what


def test_an_unsteady_link_is_timed_again(alike, fakes):
    class Once(fakes.crew):
        timings = 0

        def time_messages(self, member, name, target, policy, limit_s):
            result = super().time_messages(member, name, target, policy, limit_s)
            if name == "h1:0>h3:0":
                self.timings += 1
                nbytes, [seconds] = result["messages"][-1]
                scattered = [seconds * factor for factor in ((1.0, 1.3, 1.5) if self.timings == 1 else (1, 1, 1))]
                result["messages"][-1] = (nbytes, scattered)
            return result

    crew = alike(Once)
    found = measure(crew, FULL, ["float32"], Silent())
    assert crew.timings == 2
    assert found.flags == ()
    link = next(one for one in found.links if (one.source, one.target) == ("h1", "h3"))
    assert link.bandwidth_bytes_per_s == pytest.approx(1e8)
    assert link.evidence["timings"] == 2
    assert link.evidence["both_bytes_per_s"] > 0


def test_one_direction_at_half_rate(alike):
    found = measure(alike(slow={("h3", "h0"): 5e7}), QUICK, ["float32"], Silent())
    assert named(found) == {("slow", ("h3", "h0")), ("asymmetric", ("h3", "h0"))}
    assert "50% of the rate of the other direction" in flags(found, "asymmetric")[0].what


@pytest.mark.parametrize(("policy", "after"), [(QUICK, 12), (FULL, 45)])
def test_a_share_that_drops_midway(alike, fakes, policy, after):
    class Drops(fakes.crew):
        def flops_per_s(self, member):
            return 1e10 * (0.45 if member.host == "h2" and self.measured > after else 1.0)

    found = measure(alike(Drops), policy, ["float32"], Silent())
    [flag] = flags(found, "slowed")
    assert flag.subjects == ("h2:0",)
    assert "2.22 times as long as before, while the reference kernel" in flag.what
    assert {subjects for kind, subjects in named(found)} == {("h2:0",)}


def test_a_machine_that_slows_is_not_a_device_that_slows(alike, fakes):
    """The reference kernel slows alike: other work, not the device."""

    class Disturbed(fakes.crew):
        def flops_per_s(self, member):
            return 1e10 * (0.45 if self.measured > 12 else 1.0)

    crew = alike(Disturbed, reference_s=lambda n: 0.025 if n <= 12 else 0.055)
    assert flags(measure(crew, QUICK, ["float32"], Silent()), "slowed") == []


@pytest.mark.parametrize("factor", [1.3, 1.9])
def test_a_share_that_drops_on_a_disturbed_machine(alike, fakes, factor):
    class Drops(fakes.crew):
        def flops_per_s(self, member):
            return 1e10 * (0.4 if member.host == "h2" and self.measured > 12 else 1.0)

    crew = alike(Drops, reference_s=lambda n: 0.025 * (factor if n % 3 else 1.0))
    assert [flag.subjects for flag in flags(measure(crew, QUICK, ["float32"], Silent()), "slowed")] == [("h2:0",)]


@pytest.mark.parametrize(("late", "slowed"), [((0.045, 0.025), True), ((0.05, 0.05), False)])
def test_one_wrong_reading_of_the_kernel_hides_no_device_that_slows(alike, late, slowed):
    """Both sizes take twice as long; one reading beside them is 1.8 times too long, or both are twice as long."""
    [device, *_] = measure(alike(), QUICK, ["float32"], Silent()).devices
    readings = {256: (0.025, late[0]), 512: (0.025, late[1])}
    products = [
        {"edge": edge, "calls": 1, "seconds": 0.01 * 2**later, "reference_s": readings[edge][later]}
        for later in (0, 1)
        for edge in readings
    ]
    found = all_flags([msgspec.structs.replace(device, samples={"products": {"float32": products}})], [], [])
    assert [flag.kind for flag in found if flag.kind == "slowed"] == ["slowed"] * slowed


class Killed:
    """Mixed into a crew: from a call on, one host does not answer any more."""

    host = "h2"
    after = 10
    fault = "died"
    calls = 0

    def outcome(self, one, limit_s):
        if one.member.host == self.host:
            self.calls += 1
            if self.calls > self.after:
                return self.said(one, limit_s)
        elif one.method in ("answer", "time_messages", "exchange") and self.calls > self.after:
            name = one.result[0]
            if f"{self.host}:" in name:  # its peer waits for it in vain, and lives
                return type(self).failure(one.member, one.method, False, f"{one.method} waited", "wait")
        return super().outcome(one, limit_s)


@pytest.fixture(params=["died", "too_slow"])
def lossy(request, fakes):
    """A crew of which a host dies, or hangs, after so many calls."""

    def make(after):
        said = getattr(fakes, request.param)

        class Lossy(Killed, fakes.crew):
            failure = fakes.failure

            def said(self, one, limit_s):
                return said(one) if request.param == "died" else said(one, limit_s)

        Lossy.after = after
        return Lossy

    make.message = "died during" if request.param == "died" else "Not done within"
    return make


@pytest.mark.parametrize("after", [0, 1, 2, 4, 7, 9, 11])
def test_a_host_that_dies_or_hangs_is_named_and_the_rest_is_kept(alike, lossy, after):
    crew = alike(lossy(after))
    found = measure(crew, QUICK, ["float32"], Silent())
    assert [host.name for host in found.hosts] == ["h0", "h1", "h3"]
    assert {(link.source, link.target) for link in found.links} == {
        (a, b) for a in ("h0", "h1", "h3") for b in ("h0", "h1", "h3") if a != b
    }
    own = [flag for flag in flags(found, "failed") if flag.subjects == ("h2",)]
    assert len(own) == 1
    assert lossy.message in own[0].what
    assert own[0].only == ("h2",)
    assert crew.calls <= after + 2, "it is not asked again, save in the batch in which it was lost"
    assert ClusterProfile.from_json(found.to_json()) == found


@pytest.mark.parametrize("lost", ["h1", "h2", "h4"])
def test_another_pair_stands_for_alike_ones_where_the_first_is_lost(fakes, lost):
    """A host dies when its first link is timed; one of these pairs stands for all fast ones."""

    class Lossy(fakes.crew):
        def outcome(self, one, limit_s):
            if one.member.host == lost and one.method in ("answer", "time_messages"):
                return fakes.died(one)
            return super().outcome(one, limit_s)

    kinds = {"h0": "fast", "h1": "fast", "h2": "fast", "h3": "fast", "h4": "slow"}
    crew = Lossy([fakes.spec(host, 1e10, kind=kind) for host, kind in kinds.items()], bytes_per_s=lambda *_: 1e8)
    found = measure(crew, QUICK, ["float32"], Silent(), Selection.of((), None, symmetric=True))
    left = [host.name for host in found.hosts]
    assert lost not in left
    assert {(link.source, link.target) for link in found.links} == {(a, b) for a in left for b in left if a != b}


def test_a_cluster_of_which_nothing_is_left(alike, fakes):
    class Gone(fakes.crew):
        def outcome(self, one, limit_s):
            return fakes.died(one) if one.method == "compile" else super().outcome(one, limit_s)

    with pytest.raises(IncompleteError, match=r"^\S.* died during compile.* no whole cluster.*To fix: ") as caught:
        measure(alike(Gone), QUICK, ["float32"], Silent())
    assert caught.value.exit_code == 1


def test_a_type_that_no_device_can_compute_is_the_first_fault(alike, fakes, capsys):
    class Short(fakes.crew):
        def outcome(self, one, limit_s):
            if one.method == "compile":
                return fakes.failure(one.member, one.method, False, "compile failed: int4 is short.", "leave it.")
            return super().outcome(one, limit_s)

    with pytest.raises(IncompleteError, match=r"^Compile failed: int4 .*no whole cluster.* To fix: leave it\.$"):
        measure(alike(Short), QUICK, ["int4"], Lines())
    said = capsys.readouterr().err
    assert "Compiling" in said
    assert "Timing devices" not in said


def test_a_pair_that_cannot_talk_is_left_out_and_named(alike, fakes):
    class Silenced(fakes.crew):
        def outcome(self, one, limit_s):
            if one.method == "time_messages" and one.result[0] == "h0:0>h1:0":
                return fakes.failure(one.member, one.method, False, "no route to host", "look at the firewall.")
            return super().outcome(one, limit_s)

    found = measure(alike(Silenced), QUICK, ["float32"], Silent())
    assert len(found.links) == 11
    [flag] = found.flags
    assert (flag.kind, flag.subjects, flag.only) == ("failed", ("h0", "h1"), ("h0+h1",))
    assert LinkTable(found).between("h0:0", "h1:0") is not None, "the other direction stands for it"


def test_an_end_that_cannot_be_opened_again_is_named(alike, fakes):
    class Shut(fakes.crew):
        def outcome(self, one, limit_s):
            if one.method == "time_messages" and one.result[0] == "h0:0>h1:0":
                return fakes.failure(one.member, one.method, False, "it took too long", "wait.")
            if one.method == "reopen" and one.member.host == "h1":
                return fakes.failure(one.member, one.method, False, "no port is free", "give more ports.")
            return super().outcome(one, limit_s)

    found = measure(alike(Shut), QUICK, ["float32"], Silent())
    assert named(found) == {("failed", ("h0", "h1")), ("failed", ("h1",))}
    [flag] = [flag for flag in found.flags if flag.subjects == ("h1",)]
    assert (flag.what, flag.only) == ("no port is free To fix: give more ports.", ("h1",))
    assert len(found.links) == 11


@pytest.mark.parametrize(
    "method", ["identify", "compile", "measure", "copy", "rest", "time_messages", "exchange", "load"]
)
def test_ctrl_c_keeps_what_was_measured(alike, fakes, method):
    class Interrupted(fakes.crew):
        def outcome(self, one, limit_s):
            if one.method == method and len(self.batches) > 6 * (method == "measure"):
                raise KeyboardInterrupt
            return super().outcome(one, limit_s)

    with pytest.raises(InterruptedMeasurement) as caught:
        measure(alike(Interrupted), QUICK, ["float32"], Silent())
    found = caught.value.found
    assert len(found.devices) == (4 if method in ("time_messages", "exchange") else 0), "no half-measured one"
    assert len(found.links) == (4 if method == "exchange" else 0)


def test_sigterm_keeps_what_was_measured(alike, fakes):
    class Terminated(fakes.crew):
        def outcome(self, one, limit_s):
            if one.method == "exchange":
                raise SystemExit(143)  # as the commands' handler of SIGTERM
            return super().outcome(one, limit_s)

    with pytest.raises(TerminatedMeasurement) as caught:
        measure(alike(Terminated), QUICK, ["float32"], Silent())
    assert caught.value.code == 143
    assert (len(caught.value.found.devices), len(caught.value.found.links)) == (4, 4)


def test_a_host_that_does_not_answer_from_the_start_is_flagged(alike, fakes):
    class Absent(fakes.crew):
        absent = {"h9": "Ray on host 10.0.0.9 did not answer."}

    found = measure(alike(Absent), QUICK, ["float32"], Silent())
    [flag] = found.flags
    assert (flag.kind, flag.subjects, flag.only) == ("failed", ("h9",), ("h9",))
    assert len(found.hosts) == 4


# A clock that jumps.


def jumping(monkeypatch, jumps):
    """The steady clock jumps by the first of `jumps` at its first reading, and so on."""
    real = time.perf_counter
    state = {"offset": 0.0}

    def perf_counter():
        if jumps:
            state["offset"] += jumps.pop(0)
        return real() + state["offset"]

    fake = type("FakeTime", (), {"perf_counter": staticmethod(perf_counter), "time": staticmethod(time.time)})
    monkeypatch.setattr(clocks, "time", fake)


@pytest.mark.parametrize("jump", [5.0, -5.0, 0.1])
def test_what_a_clock_jumped_in_is_timed_again(monkeypatch, jump):
    jumping(monkeypatch, [0.0, jump])
    watch, calls = clocks.Watch(), []
    seconds = watch.timed(lambda: calls.append(1), lambda: calls.append(2))
    assert calls == [1, 2, 1, 2]
    assert 0 <= seconds < 0.05
    assert watch.take_jumps() == [pytest.approx(-jump, abs=0.01)]
    assert watch.take_jumps() == []


def test_a_clock_that_always_jumps_is_an_error(monkeypatch):
    jumping(monkeypatch, [1.0] * 50)
    with pytest.raises(MeasurementError, match=r"clocks of this host disagree by -1 s, 3 times in a row\. To fix: "):
        clocks.Watch().timed(lambda: None)


def test_links_and_devices_are_timed_right_though_clocks_jump(ends, monkeypatch):
    jumping(monkeypatch, [0.0] * 7 + [30.0])
    timing, _ = both(ends)
    assert timing["clock_jumps_s"] == [pytest.approx(-30.0, abs=0.1)]
    assert max(*timing["tiny_s"], *(s for _, seconds in timing["messages"] for s in seconds)) < 5
    products = Products(None, None)
    products._programs["float32", square(8)] = Program(Ready, 1e-3, products=1)
    jumping(monkeypatch, [0.0, 30.0])
    calls, laps, _ = products.measure("float32", square(8), 0.01)
    assert calls > 0
    assert sum(laps) < 1
    assert len(products.take_jumps()) == 1


class Ready:
    def block_until_ready(self):
        time.sleep(1e-3)


def test_a_host_whose_clock_jumps_is_named(alike, fakes):
    class Jumps(fakes.crew):
        def measure(self, member, *arguments):
            result = super().measure(member, *arguments)
            return {**result, "clock_jumps_s": [-30.0] if member.host == "h1" and self.measured == 6 else []}

    found = measure(alike(Jumps), QUICK, ["float32"], Silent())
    [flag] = found.flags
    assert (flag.kind, flag.subjects) == ("clock", ("h1",))
    assert "jumped by -30 s" in flag.what


# A transfer that corrupts one byte.


class Corrupter:
    """Between the two ends of each connection to a port; the byte at `place` towards the port is changed once."""

    def __init__(self, monkeypatch, target, place):
        self._place = place
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connect = socket.create_connection
        self._target = ("127.0.0.1", target)
        monkeypatch.setattr(socket, "create_connection", self._redirected)
        threading.Thread(target=self._run, daemon=True).start()

    def _redirected(self, address, *options, **named):
        """Connect to this object in place of the target, as a router on the way would."""
        return self._connect(self._listener.getsockname() if address == self._target else address, *options, **named)

    def _run(self):
        stream, _ = self._listener.accept()
        with stream, self._connect(self._target) as target:
            back = threading.Thread(target=self._pass_on, args=(target, stream, -1), daemon=True)
            back.start()
            self._pass_on(stream, target, self._place)
            back.join(LIMIT_S)

    @staticmethod
    def _pass_on(source, target, place):
        seen = 0
        while data := bytearray(source.recv(1 << 16)):
            if 0 <= place - seen < len(data):
                data[place - seen] ^= 0x10
            seen += len(data)
            target.sendall(data)
        try:
            target.shutdown(socket.SHUT_WR)
        except OSError as error:
            if error.errno != errno.ENOTCONN:  # both ends may have closed while the last bytes were on the way
                raise

    def close(self):
        self._listener.close()


def both(ends):
    source, target = ends
    answered = []
    thread = threading.Thread(target=lambda: answered.append(target.answer("a>b", ("127.0.0.1", source.port), LIMIT_S)))
    thread.start()
    timing = source.time_messages("a>b", ("127.0.0.1", target.port), POLICY, LIMIT_S)
    thread.join(LIMIT_S)
    return timing, answered


def test_one_byte_changed_on_the_way_is_found_where_it_is(ends, monkeypatch):
    proxy = Corrupter(monkeypatch, ends[1].port, 150_000)
    timing, _ = both(ends)
    proxy.close()
    [(nbytes, place)] = timing["corrupt"]
    assert nbytes == 65536
    assert 0 <= place < 65536
    assert len(timing["messages"]) == 2, "the measurement goes on"


def test_a_link_that_corrupts_is_named(alike, fakes):
    class Corrupts(fakes.crew):
        def time_messages(self, member, name, target, policy, limit_s):
            result = super().time_messages(member, name, target, policy, limit_s)
            return {**result, "corrupt": [(65536, 1234)] if name == "h1:0>h3:0" else []}

    found = measure(alike(Corrupts), QUICK, ["float32"], Silent())
    [flag] = found.flags
    assert (flag.kind, flag.subjects, flag.only) == ("corrupt", ("h1", "h3"), ("h1+h3",))
    assert "byte 1234 was the first that differed" in flag.what


def test_an_exchange_is_checked_too(ends, monkeypatch):
    a, b = ends
    proxy = Corrupter(monkeypatch, b.port, 100_000)
    with ThreadPoolExecutor(2) as pool:
        there = pool.submit(a.exchange, "x", 0, ("127.0.0.1", b.port), 70_000, 50_000, 2, LIMIT_S)
        back = pool.submit(b.exchange, "x", 1, ("127.0.0.1", a.port), 50_000, 70_000, 2, LIMIT_S)
        sent, received = there.result(LIMIT_S), back.result(LIMIT_S)
    proxy.close()
    assert sent["corrupt"] == []
    assert [nbytes for nbytes, _ in received["corrupt"]] == [70_000]
    assert sent["seconds"] > 0


@pytest.mark.parametrize("nbytes", [0, 1, 250, 251, 252, 1000])
def test_patterns_have_their_length_and_every_change_shows(nbytes):
    whole = pattern(nbytes)
    assert len(whole) == nbytes
    for place in range(0, nbytes, 97):
        changed = bytearray(whole)
        changed[place] ^= 1
        assert first_difference(changed, whole) == place
    assert first_difference(bytearray(whole), whole) is None
    assert first_difference(whole + b"x", whole) == nbytes


def test_a_gpu_that_heat_slows_is_flagged(fakes):
    class Hot(fakes.crew):
        def heat(self, member, dtype, edge, seconds):
            reasons = {"a": ["hw_thermal_slowdown", "sw_power_cap"], "b": ["sw_power_cap"]}.get(member.host)
            return {} if reasons is None else {"clock_mhz": 1200.0, "temperature_c": 90.0, "slowed_by": reasons}

    found = measure(Hot([fakes.spec(name, 1e10) for name in "abc"]), QUICK, ["float32"], Silent())
    assert [flag.subjects for flag in flags(found, "throttled")] == [("a:0",)]
    assert [(device.samples.get("clocks") or {}).get("float32", {}).get("clock_mhz") for device in found.devices] == [
        1200.0, 1200.0, None,
    ]  # fmt: skip
