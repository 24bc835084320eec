"""The whole measurement over a crew with declared speeds: what is measured when, and what becomes of it."""

from __future__ import annotations

import pytest

from hwaware.cluster import ClusterProfile, LinkTable, PartialProfile
from hwaware.errors import MeasurementError, UnusableInputError
from hwaware.profiler import measure, profile
from hwaware.profiler.policy import FULL, QUICK
from hwaware.profiler.progress import Lines, Silent
from hwaware.profiler.selection import Selection
from hwaware.profiler.summary import ProductSample


@pytest.fixture
def four_hosts(fakes):
    return lambda **options: fakes.crew([fakes.spec(f"h{i}", 1e10 * (i + 1)) for i in range(4)], **options)


def test_a_profile_shows_the_declared_speeds(fakes, four_hosts):
    rates = {("h0", "h1"): 2e7, ("h1", "h0"): 9e7}
    crew = four_hosts(bytes_per_s=lambda source, target: rates.get((source, target), 1e8))
    found = measure(crew, FULL, ["float32"], Silent())
    assert [host.name for host in found.hosts] == ["h0", "h1", "h2", "h3"]
    assert [device.id for device in found.devices] == ["h0:0", "h1:0", "h2:0", "h3:0"]
    for number, device in enumerate(found.devices):
        for point in device.throughput["float32"]:
            assert point.flops / point.seconds == pytest.approx(1e10 * (number + 1))
    assert len(found.links) == 12
    for one in found.links:
        assert one.bandwidth_bytes_per_s == pytest.approx(rates.get((one.source, one.target), 1e8))
        assert one.latency_s == pytest.approx(fakes.latency_s)
    assert ClusterProfile.from_json(found.to_json()) == found


def test_evidence_is_kept(four_hosts):
    found = measure(four_hosts(), FULL, ["float32"], Silent())
    environment = found.environment
    assert environment["reference_s"] > 0
    assert len(environment["reference_samples_s"]) == 2 + 3, "two, and one beside each round"
    assert environment["time"].endswith("Z")
    assert environment["hosts"]["h2"]["load_before"] == 0.5
    assert {"hwaware", "python", "numpy", "jax"} <= set(environment["versions"])
    samples = [ProductSample(**sample) for sample in found.devices[0].samples["products"]["float32"]]
    sizes = {sample.edge for sample in samples}
    assert len(samples) == FULL.device_rounds * len(sizes) + 2, "and two again at the end"
    assert len(sizes) == len(found.devices[0].throughput["float32"])


def batches_of(crew, method):
    return [[entry for entry in batch if entry[0] == method] for batch in crew.batches if batch[0][0] == method]


def test_devices_that_are_faster_after_a_pause_have_a_head_start(fakes):
    class Quotas(fakes.crew):
        def rest(self, member, dtype, count):
            first = 0.03 if member.host == "a" else 0.04
            return [[first, 0.041, 0.039]] * count

    crew = Quotas([fakes.spec("a", 1e10, kind="cpu-0.4"), fakes.spec("b", 2e10, kind="cpu")])
    found = measure(crew, QUICK, ["float32"], Silent())
    assert {device.host: device.head_start_s for device in found.devices} == {"a": pytest.approx(0.01), "b": None}
    assert found.devices[0].samples["bursts_s"] == [[0.03, 0.041, 0.039]] * QUICK.rests


def test_devices_of_one_machine_are_measured_one_by_one(fakes):
    crew = fakes.crew(
        [fakes.spec("a", 1e10, machine="m"), fakes.spec("b", 1e10, machine="m"), fakes.spec("c", 1e10, machine="n")]
    )
    measure(crew, QUICK, ["float32"], Silent())
    together = {tuple(name for _, name, _ in batch) for batch in batches_of(crew, "measure")}
    assert together == {("device 0 of host a", "device 0 of host c"), ("device 0 of host b",)}


@pytest.mark.parametrize("hosts", [2, 5, 64])
def test_no_host_takes_part_twice_in_a_round_of_links(hosts, fakes):
    crew = fakes.crew([fakes.spec(f"h{i}", 1e10) for i in range(hosts)])
    found = measure(crew, QUICK, ["float32"], Silent())
    batches = batches_of(crew, "time_messages")
    assert len(batches) == 2 * (hosts - 1 if hosts % 2 == 0 else hosts)
    for batch in batches:
        ends = [end for _, _, (name, *_) in batch for end in name.split(">")]
        assert len(ends) == len(set(ends))
    assert len(found.links) == hosts * (hosts - 1)


def test_two_devices_of_a_host_show_the_link_inside_it(fakes):
    crew = fakes.crew(
        [fakes.spec("a", 1e10), fakes.spec("a", 2e10), fakes.spec("b", 3e10)], lambda s, t: 5e7 if s == t else 1e8
    )
    found = measure(crew, QUICK, ["float32"], Silent())
    table = LinkTable(found)
    assert table.between("a:0", "a:1").bandwidth_bytes_per_s == pytest.approx(5e7)
    assert table.between("a:1", "b:0").bandwidth_bytes_per_s == pytest.approx(1e8)
    assert [device.memory_bytes for device in found.devices] == [4 << 30, 4 << 30, 8 << 30]


def test_declared_devices_keep_their_ids_and_memory(fakes):
    found = measure(fakes.crew([fakes.spec("a", 1e10, declared=True)]), QUICK, ["float32"], Silent())
    assert [(device.id, device.host, device.memory_bytes) for device in found.devices] == [("a/0", "a", 1 << 20)]
    assert found.links == ()


def test_disturbed_samples_are_taken_again_but_not_for_ever(four_hosts):
    quiet = four_hosts()
    measure(quiet, QUICK, ["float32"], Silent())
    once = four_hosts(reference_s=lambda n: 0.25 if n == 7 else 0.025)
    found = measure(once, QUICK, ["float32"], Silent())
    assert once.measured == quiet.measured + 1
    assert len(found.devices[2].samples["products"]["float32"]) == len(found.devices[2].throughput["float32"]) + 1 + 2
    always = four_hosts(reference_s=lambda n: 0.025 if n == 1 else 0.25)
    measure(always, QUICK, ["float32"], Silent())
    assert quiet.measured < always.measured <= 1.5 * quiet.measured


def test_several_data_types(four_hosts):
    found = measure(four_hosts(), QUICK, ["float32", "bfloat16"], Silent())
    assert all(set(device.throughput) == {"float32", "bfloat16"} for device in found.devices)


def test_a_device_without_room_for_the_smallest_product(fakes):
    class Tiny(fakes.crew):
        def compile(self, member, dtype, policy, memory_bytes, copy_bytes):
            return []

    with pytest.raises(MeasurementError, match=r"device a:0 do not hold the smallest product.*no devices.* To fix: "):
        measure(Tiny([fakes.spec("a", 1e10)]), QUICK, ["float32"], Silent())


@pytest.mark.parametrize("dtypes", [(), ("float64",), ("float32", "int8")])
def test_unknown_data_types_are_refused_before_anything_starts(dtypes):
    with pytest.raises(UnusableInputError, match=r"expected some of float32, bfloat16, float16\. To fix: "):
        profile("10.255.255.1:1", dtypes=dtypes)


def test_lines_are_written_where_there_is_no_terminal(capsys, four_hosts):
    measure(four_hosts(), QUICK, ["float32"], Lines())
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Timing links ...\n" in printed.err


@pytest.mark.parametrize(
    ("hosts", "only", "without"),
    [(1, (), "Timing links"), (2, ("h0+h1",), "Timing devices"), (2, ("h0",), "Timing links")],
)
def test_no_line_names_a_phase_without_work(capsys, fakes, hosts, only, without):
    crew = fakes.crew([fakes.spec(f"h{i}", 1e10) for i in range(hosts)])
    earlier = PartialProfile.of(measure(crew, QUICK, ["float32"], Silent())) if only else None
    found = measure(crew, QUICK, ["float32"], Lines(), Selection.of(only, earlier), earlier)
    assert len(found.devices) == hosts
    assert without not in capsys.readouterr().err


def test_one_reference_reading_stands_between_two_probes(fakes):
    class Told(fakes.crew):
        def measure(self, member, dtype, shape, minimum_s, before_s=None):
            self.told = [*getattr(self, "told", []), before_s]
            return {**super().measure(member, dtype, shape, minimum_s), "after_s": float(self.measured)}

    alone = Told([fakes.spec("a", 1e10, machine="m"), fakes.spec("b", 1e10, machine="m")])
    measure(alone, QUICK, ["float32"], Silent())
    assert alone.told[:4] == [None, 1.0, 2.0, 3.0]
    disturbed = Told([fakes.spec("a", 1e10, machine="m")], reference_s=lambda count: 0.02 * (1 + (count == 2)))
    measure(disturbed, QUICK, ["float32"], Silent())
    assert disturbed.told[:4] == [None, 1.0, None, 3.0], "after a disturbed probe it is taken anew"


def test_processors_of_one_machine_are_compared_at_one_speed(fakes):
    """From the sixth sample on the machine is slower, and so is the reference kernel."""

    class Drifting(fakes.crew):
        is_processor = True

        def identify(self, member):
            return {**super().identify(member), "is_processor": self.is_processor}

        def flops_per_s(self, member):
            return 1e10 if self.measured <= 5 else 1e10 * 0.025 / 0.028

    class Gpus(Drifting):
        is_processor = False

    def rates(crew):
        hosts = [fakes.spec("a", 1e10, machine="m"), fakes.spec("b", 1e10, machine="m")]
        found = measure(crew(hosts, reference_s=lambda n: 0.025 if n <= 5 else 0.028), QUICK, ["float32"], Silent())
        return [
            [point.flops / point.seconds for point in device.throughput["float32"]] for device in found.devices
        ], found.environment.get("reference_s")

    (one, other), reference_s = rates(Drifting)
    assert one == pytest.approx(other)
    assert one == pytest.approx([1e10 * 0.025 / reference_s] * len(one))
    curves, reference_s = rates(Gpus)
    assert reference_s is None  # it says nothing of their speed
    as_they_are = [rate for curve in curves for rate in curve]
    assert max(as_they_are) / min(as_they_are) == pytest.approx(0.028 / 0.025)


def test_drift_does_not_change_the_ratio_of_processor_shares(fakes):
    """Every sample meets another speed of the processor; of the second machine another one still, not mixed in."""

    class Shares(fakes.crew):
        shares = {"a": 0.8, "b": 0.2, "c": 0.4}

        def identify(self, member):
            return {**super().identify(member), "is_share": True}

        def measure(self, member, dtype, shape, minimum_s, before_s=None):
            found = super().measure(member, dtype, shape, minimum_s)
            processor_s = found["seconds"] * (1 + 0.2 * (self.measured % 3))
            seconds = processor_s / self.shares[member.host]
            return {**found, "seconds": seconds, "laps_s": [seconds], "processor_s": processor_s}

    places = (("a", 1e10, "m"), ("b", 1e10, "m"), ("c", 3e10, "n"))
    crew = Shares([fakes.spec(name, speed, machine=machine) for name, speed, machine in places])
    one, other, elsewhere = (
        {point.flops: point.flops / point.seconds for point in device.throughput["float32"]}
        for device in measure(crew, QUICK, ["float32"], Silent()).devices
    )
    assert set(one) & set(other)
    for flops in set(one) & set(other):
        assert other[flops] / one[flops] == pytest.approx(0.2 / 0.8)
    # The slowest sample's rate may come out one rounding below it: sums are compensated from Python 3.12 on.
    assert all(0.4 * 3e10 / 1.4 * (1 - 1e-12) <= rate <= 0.4 * 3e10 * 1.001 for rate in elsewhere.values())
