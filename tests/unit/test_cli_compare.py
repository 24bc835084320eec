"""compare: ratios with intervals, and "same" where nothing was shown."""

import json
import random
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

import hwaware
from hwaware.bench.differences import compare
from hwaware.cli import main
from hwaware.cluster import Collective, LinkSample
from hwaware.errors import UnusableInputError
from hwaware.plans import Plan, Replica, Stage
from hwaware.reference_kernel import NAME

DEMO = Path(__file__).parents[2] / "benchmarks" / "results" / "demo"
PROFILE = hwaware.ClusterProfile.load(DEMO / "cluster.json")
RECORDED = Path(__file__).parents[2] / "profiling" / "recorded"
RESULT = hwaware.BenchmarkResult.load(DEMO / "result.json")


def slower(result, factor, noise=0.0):
    """The result with every step `factor` times as long, give or take."""
    rng = random.Random(1)
    mappings = tuple(
        msgspec.structs.replace(m, step_s=tuple(s * factor * (1 + rng.uniform(-noise, noise)) for s in m.step_s))
        for m in result.mappings
    )
    return msgspec.structs.replace(result, mappings=mappings)


def test_a_result_is_the_same_as_itself():
    found = compare(RESULT, RESULT)
    assert {row.verdict for row in found.differences} == {"same"}
    assert found.geometric_mean == pytest.approx(1.0)
    assert found.only_in_a == found.only_in_b == ()


def test_noise_is_no_difference_and_half_as_much_again_is_one():
    assert {row.verdict for row in compare(RESULT, slower(RESULT, 1.0, 0.02)).differences} == {"same"}
    worse = compare(RESULT, slower(RESULT, 1.5, 0.02))
    assert {row.verdict for row in worse.differences} == {"slower"}
    assert {row.verdict for row in compare(slower(RESULT, 1.5), RESULT).differences} == {"faster"}
    assert worse.geometric_mean == pytest.approx(1.5, rel=0.03)


def test_a_machine_that_is_slower_throughout_is_no_difference():
    """Twice the step beside twice the reference kernel."""
    mappings = tuple(
        msgspec.structs.replace(
            m, step_s=tuple(2 * s for s in m.step_s), reference_s=tuple(2 * r for r in m.reference_s)
        )
        for m in RESULT.mappings
    )
    found = compare(RESULT, msgspec.structs.replace(RESULT, mappings=mappings))
    assert {row.verdict for row in found.differences} == {"same"}


def test_steps_beside_other_kernels_are_compared_as_they_are():
    """As with a result of an older version, whose kernel took another time."""
    mappings = tuple(
        msgspec.structs.replace(m, reference_s=tuple(2 * r for r in m.reference_s)) for m in RESULT.mappings
    )
    environment = {**RESULT.environment, "reference_kernel": "another"}
    found = compare(RESULT, msgspec.structs.replace(RESULT, mappings=mappings, environment=environment))
    assert {row.verdict for row in found.differences} == {"same"}
    assert any("same reference kernel" in note for note in found.notes)


def test_mappings_of_one_result_only():
    fewer = msgspec.structs.replace(RESULT, mappings=RESULT.mappings[:1], scenario="other")
    found = compare(RESULT, fewer)
    assert found.only_in_a == ("alpa-given", "alpa-reversed", "alpa-shuffled")
    assert "Scenario differs: 'fast-and-slow' and 'other'." in found.notes


def test_a_mapping_that_equals_another_in_one_file_is_compared_by_each_of_its_names():
    """A benchmark measures equal mappings once, under the first name."""
    ours, alpa, *others = RESULT.mappings
    merged = msgspec.structs.replace(ours, also=(alpa.name,))
    found = compare(RESULT, msgspec.structs.replace(RESULT, mappings=(merged, *others)))
    assert [row.what for row in found.differences] == [one.name for one in RESULT.mappings]
    assert found.only_in_a == found.only_in_b == ()
    assert found.differences[1].b_s == ours.median_step_s
    both = msgspec.structs.replace(RESULT, mappings=(merged,))
    assert [row.what for row in compare(both, both).differences] == [ours.name]


def test_a_time_that_only_the_second_plan_has_is_valid_json(tmp_path):
    plan = hwaware.Plan.load(DEMO / "plan.json")
    for name, seconds in (("a.json", 0.0), ("b.json", 0.1)):
        stage = msgspec.structs.replace(plan.stages[0], gradient_sync_s=seconds)
        msgspec.structs.replace(plan, stages=(stage, *plan.stages[1:])).save(tmp_path / name)
    outcome = CliRunner().invoke(main, ["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--json"])
    assert outcome.exit_code == 0, outcome.output
    rows = {row["what"]: row for row in json.loads(outcome.stdout)["differences"]}
    assert rows["stage 0 gradient sync"]["verdict"] == "slower"
    assert rows["stage 0 gradient sync"]["ratio"]["median"] is None


def test_profiles_device_by_device_and_link_by_link():
    profile = hwaware.ClusterProfile.load(RECORDED / "fast-and-slow.json")
    host, *others = profile.devices
    points = tuple(msgspec.structs.replace(p, seconds=2 * p.seconds) for p in host.throughput["float32"])
    changed = (msgspec.structs.replace(host, throughput={"float32": points}), *others)
    found = compare(profile, msgspec.structs.replace(profile, devices=changed))
    verdicts = {row.what: row.verdict for row in found.differences}
    assert verdicts["h0:0 float32"] == "slower"
    assert verdicts["h1:0 float32"] == verdicts["h0 -> h1"] == "kept"
    assert len(verdicts) == 4 + 12
    assert found.geometric_mean == pytest.approx(2.0), "rows that are only copied do not count"
    assert any(note.startswith("15 of 16 rows have exactly the same times in both files") for note in found.notes)
    assert not any("smallest ratio" in note for note in found.notes), "kept rows have no range"
    assert not any("in twenty" in note for note in found.notes)
    assert compare(profile, profile).geometric_mean is None


def test_profiles_of_clusters_with_the_same_names(tmp_path):
    slow, fast = (hwaware.ClusterProfile.uniform(kind=kind) for kind in ("slow", "fast"))
    assert compare(slow, fast).notes[0] == (
        "The files may be of different clusters: the kind of 2 devices differs. h0:0 is slow in A, and fast in B."
    )
    assert not any("different clusters" in note for note in compare(slow, slow).notes)


@pytest.mark.parametrize(
    ("factor", "verdict"), [(8.0, "slower"), (1 / 8, "faster"), (1.6, "too few"), (1 / 1.6, "too few")]
)
def test_few_sizes_show_only_a_change_beyond_every_drift(factor, verdict):
    """The largest size decides: a thinner link leaves short messages as they were."""
    profile = hwaware.ClusterProfile.load(RECORDED / "fast-and-slow.json")
    first, *others = profile.links
    *short, longest = first.samples
    changed = msgspec.structs.replace(
        first, samples=(*short, msgspec.structs.replace(longest, seconds=factor * longest.seconds))
    )
    found = compare(profile, msgspec.structs.replace(profile, links=(changed, *others)))
    row = next(row for row in found.differences if row.what == f"{first.source} -> {first.target}")
    assert row.points < 6
    assert row.verdict == verdict
    assert row.ratio.median == pytest.approx(factor)
    assert (min(1.0, factor), max(1.0, factor)) == pytest.approx((row.ratio.low, row.ratio.high))


def test_a_large_change_of_the_largest_size_counts_although_small_messages_are_all_latency():
    """A mended link: messages of 16 MiB take an eighth, those of 1 kB as long as before."""
    times = {1 << (10 + 2 * k): 1e-4 * 4**k for k in range(8)}

    def linked(factor):
        samples = tuple(
            LinkSample(bytes=size, seconds=seconds / (factor if size > 1 << 20 else 1.0))
            for size, seconds in times.items()
        )
        links = tuple(msgspec.structs.replace(link, samples=samples) for link in PROFILE.links)
        return msgspec.structs.replace(PROFILE, links=links)

    rows = [row for row in compare(linked(1.0), linked(8.0)).differences if "->" in row.what]
    assert {(row.verdict, row.points) for row in rows} == {("faster", 8)}
    assert {tuple(row.ratio) for row in rows} == {(0.125, 0.125, 1.0)}
    assert {row.sizes for row in rows} == {("4.194 MB", "1.049 MB")}
    [note] = [note for note in compare(linked(1.0), linked(8.0)).notes if "smallest ratio" in note]
    assert note.startswith(f"{rows[0].what}, ")
    assert note.endswith(": smallest ratio of the range at 4.194 MB, largest at 1.049 MB.")


def test_collectives_are_compared():
    def with_all_reduce(seconds):
        made = Collective(
            op="all-reduce", devices=tuple(device.id for device in PROFILE.devices[:2]), dtype="float32",
            points=tuple(LinkSample(bytes=1 << k, seconds=seconds * 2**k) for k in (16, 18, 20)),
        )  # fmt: skip
        return msgspec.structs.replace(PROFILE, collectives=(made,))

    (row,) = [row for row in compare(with_all_reduce(1e-6), with_all_reduce(4e-6)).differences if "all" in row.what]
    assert (row.verdict, row.ratio.median, row.points) == ("slower", 4.0, 3)


def test_links_without_a_common_size_are_compared_by_their_rates():
    """As a measured link and an imported one."""
    profile = hwaware.ClusterProfile.load(RECORDED / "fast-and-slow.json")
    first, *others = profile.links
    rate = first.bandwidth_bytes_per_s / 4
    imported = msgspec.structs.replace(first, samples=(), bandwidth_bytes_per_s=rate)
    found = compare(profile, msgspec.structs.replace(profile, links=(imported, *others)))
    row = next(row for row in found.differences if row.what == f"{first.source} -> {first.target}")
    assert (row.points, row.verdict) == (2, "slower")
    assert row.b_s == pytest.approx(first.latency_s + 1e6 / rate)
    assert found.only_in_a == found.only_in_b == ()
    assert any(note.startswith(f"{row.what}: ") and note.endswith("for 1 kB and 1 MB.") for note in found.notes)


def test_a_device_without_a_common_size_is_in_both_files():
    profile = hwaware.ClusterProfile.load(RECORDED / "fast-and-slow.json")
    first, *others = profile.devices
    points = tuple(msgspec.structs.replace(p, flops=1.5 * p.flops) for p in first.throughput["float32"])
    changed = (msgspec.structs.replace(first, throughput={"float32": points}), *others)
    found = compare(profile, msgspec.structs.replace(profile, devices=changed))
    assert found.only_in_a == ()
    assert "h0:0 float32: the two files have no size in common." in found.notes


def test_rows_without_an_interval_are_no_comparisons_at_95_per_cent():
    profile = hwaware.ClusterProfile.load(RECORDED / "fast-and-slow.json")
    links = tuple(
        msgspec.structs.replace(
            link, samples=tuple(msgspec.structs.replace(one, seconds=1.1 * one.seconds) for one in link.samples)
        )
        for link in profile.links
    )
    notes = " ".join(compare(profile, msgspec.structs.replace(profile, links=links)).notes)
    assert "in twenty" not in notes
    assert "reference kernel" not in notes, "nobody timed it again"


def test_a_note_says_that_the_machine_s_speed_may_explain_differences():
    profile = hwaware.ClusterProfile.load(RECORDED / "fast-and-slow.json")
    first, second = (
        msgspec.structs.replace(profile, environment={"reference_s": seconds, "reference_kernel": NAME})
        for seconds in (1.0, 0.97)
    )
    notes = compare(first, second).notes
    [note] = [note for note in notes if note.startswith("The reference kernel took 0.97 times as long")]
    assert note.endswith("If a device differs by about this factor, the cause may be the machine's speed.")


def test_two_plans_step_by_stage(tmp_path):
    workload = hwaware.Workload.load(DEMO / "workload.json")
    hwaware.plan(workload, PROFILE, num_microbatches=8).save(tmp_path / "all.json")
    hwaware.plan(workload, PROFILE, num_microbatches=8, exclude=["h0"]).save(tmp_path / "fewer.json")
    arguments = ["compare", str(tmp_path / "all.json"), str(tmp_path / "fewer.json")]
    a, b = (hwaware.Plan.load(path) for path in arguments[1:])
    document = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    step, *stages = document["differences"]
    assert (step["what"], step["verdict"]) == ("predicted step", "slower")
    assert step["ratio"]["median"] == pytest.approx(b.predicted_step_s / a.predicted_step_s)
    assert {row["what"] for row in stages} >= {"stage 0 compute", "stage 1 receive"}
    assert any(note.startswith("receive: ") for note in document["notes"])
    text = CliRunner().invoke(main, arguments).stdout
    assert "95 % interval" not in text
    assert f"on {a.stages[0].devices[0]} in all.json; " in text
    hwaware.plan(workload, PROFILE, num_microbatches=4).save(tmp_path / "fewer.json")
    of_step, of_microbatch = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)["differences"][:2]
    assert (of_step["verdict"], of_microbatch["verdict"]) == ("faster", "slower")  # fewer samples, less well filled
    same = CliRunner().invoke(main, ["compare", arguments[1], arguments[1]]).stdout
    assert "Both plans have the same stages" in same
    assert "price one plan on both profiles" in text
    assert "price one plan on both profiles" not in same
    assert "does not show which one is faster" not in same


@pytest.mark.parametrize(
    ("batches", "sizes", "what", "verdict"),
    [
        ((8, 4), (2, 4), None, None),  # as many samples
        ((8, 6), (4, 2), "predicted step / number of samples", "slower"),  # 32 samples, then 12 in half of the time
        ((8, 6), (None, 2), None, None),  # the plans do not tell how many samples the first has
        ((8, 4), (2, 2), "predicted step / number of microbatches", "same"),
    ],
)
def test_plans_of_unlike_microbatches_are_compared_by_samples(batches, sizes, what, verdict):
    first, second = (
        hwaware.Plan(
            num_microbatches=count,
            microbatch_size=size,
            predicted_step_s=step_s,
            stages=(Stage(layers=(0, 0), replicas=(Replica(devices=("h0:0",)),)),),
        )
        for count, size, step_s in zip(batches, sizes, (2.0, 1.0))
    )
    found = compare(first, second)
    assert {row.what: row.verdict for row in found.differences[1:]} == ({what: verdict} if what else {})
    said = any(note.startswith("Microbatch size differs: ") for note in found.notes)
    assert said == (sizes[0] != sizes[1])


@pytest.mark.parametrize(
    ("factor", "source", "verdict", "limit"),
    [
        (1.03, "measured", "too close", "9 %"),
        (0.95, "model", "too close", "17 %"),
        (1.0001, "model", "same", None),
        (1.12, "measured", "slower", None),
        (1.12, "model", "too close", "17 %"),
        (1.12, None, "too close", "17 %"),
        (1.2, None, "slower", None),
        (0.8, "measured", "faster", None),
    ],
)
def test_steps_closer_than_predictions_are_right_show_no_winner(factor, source, verdict, limit):
    """Plans tell the source of their layer times; those of older versions do not."""
    plan = hwaware.plan(hwaware.Workload.uniform(), hwaware.ClusterProfile.uniform(), num_microbatches=2)
    assert plan.layer_times == "model"
    of_a, of_b = ("measured", source) if source == "model" else (source, source)  # the larger errors count
    found = compare(
        msgspec.structs.replace(plan, layer_times=of_a),
        msgspec.structs.replace(plan, layer_times=of_b, predicted_step_s=factor * plan.predicted_step_s),
    )
    assert found.differences[0].verdict == verdict
    said = " ".join(note for note in found.notes if "layer times" in note)
    assert ("does not show which one is faster" in said) == bool(limit)
    if limit:
        assert said.startswith(f"The predicted steps differ by {100 * abs(factor - 1):.1f} %.")
        assert f"off by up to {limit} from the ratios of the measured steps." in said
        assert said.count("off by up to") == 1, "one limit, that which applies"
        assert ("The files do not say if their layer times are measured. To fix: price" in said) == (source is None)


def test_a_stage_is_no_surer_than_the_step():
    plan = hwaware.plan(hwaware.Workload.uniform(), hwaware.ClusterProfile.uniform(), num_microbatches=2)
    shorter, *others = plan.stages
    shorter = msgspec.structs.replace(shorter, compute_s=0.96 * shorter.compute_s)
    found = compare(plan, msgspec.structs.replace(plan, stages=(shorter, *others)))
    verdicts = {row.what: row.verdict for row in found.differences}
    assert (verdicts["predicted step"], verdicts["stage 0 compute"]) == ("same", "too close")
    halved = msgspec.structs.replace(shorter, compute_s=0.5 * shorter.compute_s)
    found = compare(plan, msgspec.structs.replace(plan, stages=(halved, *others)))
    assert next(row for row in found.differences if row.what == "stage 0 compute").verdict == "faster"


def test_a_range_in_place_of_an_interval_is_called_one(tmp_path):
    profile = PROFILE
    first, *rest = profile.links
    samples = tuple(msgspec.structs.replace(one, seconds=one.seconds / 3) for one in first.samples)
    faster = msgspec.structs.replace(profile, links=(msgspec.structs.replace(first, samples=samples), *rest))
    for name, one in (("a", profile), ("b", faster)):
        one.save(tmp_path / f"{name}.json")
    arguments = ["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    lines = CliRunner().invoke(main, arguments, env={"COLUMNS": "160"}).stdout.splitlines()
    (row,) = [line for line in lines if "faster" in line and "->" in line]
    assert "range 0.333-0.333" in row
    assert not [line for line in lines if "same" in line and "range" in line and "->" in line]


def test_a_plan_without_prices_is_refused_with_the_way_to_price_it():
    by_hand = hwaware.Plan.load(Path(__file__).parents[1] / "data" / "plan_by_hand.json")
    with pytest.raises(UnusableInputError, match=r"plan B has no predicted_step_s.*To fix: .*hwaware evaluate"):
        compare(msgspec.structs.replace(by_hand, predicted_step_s=1.0), by_hand)


def test_a_plan_that_does_not_fit_is_refused_with_its_reason():
    large = hwaware.Workload.uniform(layers=2, parameter_bytes=1e18)
    plan = hwaware.plan(large, hwaware.ClusterProfile.uniform(hosts=2), num_microbatches=2)
    with pytest.raises(UnusableInputError, match=r"plan A is infeasible\. Memory: .*needs.*To fix: compare plans"):
        compare(plan, plan)


def test_files_of_two_kinds():
    with pytest.raises(UnusableInputError) as caught:
        compare(PROFILE, RESULT)
    assert caught.value.found == ("hwaware.cluster", "hwaware.benchmark")


def test_the_command(tmp_path):
    slower(RESULT, 1.5).save(tmp_path / "b.json")
    arguments = ["compare", str(DEMO / "result.json"), str(tmp_path / "b.json")]
    text = CliRunner().invoke(main, arguments, env={"COLUMNS": "140"}).stdout
    assert text.count("  slower  ") == 4
    assert {"result.json", "b.json"} <= set(text.split("\n")[0].split())
    assert "Each ratio is the time in b.json divided by the time in result.json" in text
    assert "Geometric mean of the ratios: 1.500" in text
    document = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    assert document["differences"][0]["ratio"]["median"] == pytest.approx(1.5)
    assert document["schema"] == "hwaware.benchmark"


def test_nothing_in_both(tmp_path):
    other = str(Path(__file__).parents[1] / "data" / "cluster_three.json")
    outcome = CliRunner().invoke(main, ["compare", str(DEMO / "cluster.json"), other])
    assert outcome.exit_code == 0
    assert "The two files have no placement, device or link in common" in outcome.stdout


def test_plans_without_any_time(tmp_path):
    plan = Plan.load(DEMO / "plan.json")
    stages = [msgspec.structs.replace(one, compute_s=0.0, receive_s=0.0, gradient_sync_s=0.0) for one in plan.stages]
    plan = msgspec.structs.replace(plan, stages=tuple(stages), predicted_step_s=0.0, bound_s=None, step_interval_s=None)
    plan.save(tmp_path / "zero.json")
    outcome = CliRunner().invoke(main, ["compare", str(tmp_path / "zero.json"), str(tmp_path / "zero.json"), "--json"])
    (row,) = json.loads(outcome.stdout)["differences"]
    assert (row["what"], row["verdict"]) == ("predicted step", "same")
