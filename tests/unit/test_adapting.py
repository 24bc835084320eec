"""Changes are noticed and named, and placements follow them where it pays; on load traces, without a cluster."""

import contextlib
import json
import math
import random
import subprocess
import sys
from concurrent.futures import Future
from types import SimpleNamespace

import msgspec
import pytest
from builders import ALL_CASES, cluster, device, layer, link, script, seeds, timed, workload
from click.testing import CliRunner

import hwaware
from hwaware.adapting import POLICIES, Detector, Drift, LoadTrace, Rent, Stand, play, random_trace, ratios
from hwaware.adapting.deciding import least_gain, switch_cost_s
from hwaware.adapting.detector import FIRST_STEPS
from hwaware.adapting.following import WARM_STEPS, Follower
from hwaware.adapting.loads import KINDS, Change
from hwaware.adapting.pace import Pace, StepTimes, Watched
from hwaware.adapting.playing import observed
from hwaware.cli import main
from hwaware.cluster import ClusterProfile, LinkTable, measured_kind
from hwaware.costs import evaluate
from hwaware.errors import RecordError, UnusableInputError
from hwaware.patching.steady import steadiest
from hwaware.runtime.recorder import Recording

NOISE = 0.08
HOSTS = [device("a:0", 1.0), device("b:0", 1.0), device("c:0", 2.0), device("d:0", 2.0)]
PROFILE = cluster(HOSTS)
MODEL = workload([layer(output_bytes=1e4, parameter_bytes=1e6) for _ in range(12)])


@pytest.fixture(scope="module")
def placed():
    return hwaware.plan(MODEL, PROFILE, num_microbatches=8)


def noisy(rng, sigma=NOISE):
    return math.exp(rng.gauss(0.0, sigma))


def test_noise_alone_gives_less_than_one_alarm_in_ten_thousand_steps():
    alarms, steps = 0, 30_000 if ALL_CASES else 12_000
    for seed in range(6):
        rng, detector = random.Random(seed), Detector(8)
        for _ in range(steps // 6):
            alarms += len(detector.observe({str(subject): noisy(rng) for subject in range(8)}))
    assert alarms <= steps / 10_000


@pytest.mark.parametrize(("factor", "within"), [(1.3, 10), (1.6, 6), (4.0, 5), (0.5, 6)])
def test_a_change_is_named_within_ten_steps(factor, within):
    for seed in range(20):
        rng, detector, found = random.Random(seed), Detector(8), []
        for step in range(60 + within):
            times = {str(subject): noisy(rng) for subject in range(8)}
            times["3"] *= factor if step >= 60 else 1.0
            found += detector.observe(times)
        assert {change.subject for change in found} == {"3"}
        assert detector.factors()["3"] == pytest.approx(factor, rel=0.2)


def test_the_end_of_a_change_is_noticed_too():
    rng, detector = random.Random(1), Detector(2)
    for step in range(300):
        slow = 2.0 if 100 <= step < 200 else 1.0
        detector.observe({"a": slow * noisy(rng), "b": noisy(rng)})
        if step == 150:
            assert detector.factors() == {"a": pytest.approx(2.0, rel=0.15)}
    assert detector.factors().get("a", 1.0) == pytest.approx(1.0, rel=0.1)


def test_one_pause_is_no_change():
    rng, detector = random.Random(2), Detector(1)
    for step in range(400):
        assert detector.observe({"a": noisy(rng) * (20.0 if step % 50 == 49 else 1.0)}) == []


def test_a_drift_slows_its_devices_and_its_direction_of_a_link():
    drift = Drift(devices={"a:0": 3.0}, links={"a->b": 4.0})
    one_way = cluster(HOSTS[:2], [link("a", "b", 1e6, 1e-3)])
    slower, there = drift.applied(MODEL, one_way)
    table, before = LinkTable(there), LinkTable(one_way).between("a:0", "b:0")
    assert table.between("a:0", "b:0").bandwidth_bytes_per_s == before.bandwidth_bytes_per_s / 4
    assert table.between("b:0", "a:0").bandwidth_bytes_per_s == before.bandwidth_bytes_per_s
    alone = hwaware.plan(MODEL, one_way, num_microbatches=4, exclude=["b"])
    now, then = (evaluate(alone, *one).stages[0].compute_s for one in ((slower, there), (MODEL, one_way)))
    assert now == pytest.approx(3 * then)


def test_a_slower_device_keeps_its_kind_over_many_trainings():
    model, profile, drift = MODEL, PROFILE, Drift(devices={"a:0": 1.5})
    for _ in range(3):
        model, profile = drift.applied(model, profile)  # as `last_profile` gives it to the next training
    kind = profile.device("a:0").kind
    assert (kind, measured_kind(kind)) == ("cpu as a:0", "cpu")


def test_a_slower_device_may_share_a_stage_with_others_of_its_hardware():
    profile = ClusterProfile.uniform(hosts=2, devices_per_host=4, flops_per_s=1e10, bandwidth_bytes_per_s=1e8)
    model = hwaware.Workload.uniform(layers=3, parameter_bytes=1e6, output_bytes=1e7)
    placed = hwaware.plan(model, profile, num_microbatches=8)
    assert any({"h0:0", "h0:1"} <= set(stage.devices) for stage in placed.stages)
    now = Drift(devices={"h0:1": 1.2}).applied(model, profile)
    assert hwaware.plan(*now, num_microbatches=8).predicted_step_s <= evaluate(placed, *now).step_s


@pytest.mark.parametrize(
    ("devices", "links", "said"),
    [({"a:0": 0.0}, {}, "the factor of 'a:0' is 0"), ({}, {"a": 2.0}, "not of the form SOURCE->TARGET")],
)
def test_what_is_no_drift_is_refused(devices, links, said):
    with pytest.raises(ValueError, match=said):
        Drift(devices=devices, links=links)


@pytest.mark.parametrize(
    ("kind", "steps", "hosts"),
    [("storm", 1000, 4), ("step", 199, 4), ("step", 10**6 + 1, 4), ("link", 1000, 1), ("two hosts", 1000, 1)],
)
def test_a_trace_that_cannot_be_drawn_is_refused(kind, steps, hosts):
    with pytest.raises(UnusableInputError, match=r"choose a kind from step, ramp.*200 to 1000000 steps.*two hosts"):
        random_trace(cluster(HOSTS[:hosts]), kind, 0, steps)


def test_a_load_after_the_last_step_changes_nothing(placed):
    late = LoadTrace(steps=10, changes=(Change(step=50, drift=Drift(devices={"a:0": 9.0})),))
    played = [play(Stand(MODEL, PROFILE, placed, trace), "clairvoyant") for trace in (late, LoadTrace(steps=10))]
    assert played[0] == played[1]


@pytest.mark.parametrize("drift", [Drift(devices={"e:0": 2.0}), Drift(links={"a->e": 2.0})])
def test_a_load_on_what_the_cluster_does_not_have_is_refused(placed, drift):
    (name,) = (*drift.devices, *drift.links)
    with pytest.raises(UnusableInputError, match=f"slows {name}, which the cluster does not have"):
        Stand(MODEL, PROFILE, placed, LoadTrace(steps=10, changes=(Change(step=5, drift=drift),)))


def test_changes_must_be_in_order():
    changes = [{"step": 5, "drift": {}}, {"step": 5, "drift": {}}]
    document = {"schema": "hwaware.load", "schema_version": 1, "steps": 10, "changes": changes}
    with pytest.raises(RecordError, match="expected each later than the last"):
        LoadTrace.from_json(json.dumps(document))


def test_rent_costs_at_most_twice_the_least_whenever_the_load_ends():
    kept_s, best_s, cost_s = 1.5, 1.0, 20.0
    for steps in range(1, 200):
        rent, total_s, now_s = Rent(), 0.0, kept_s
        for _ in range(steps):
            total_s += now_s
            if now_s == kept_s and rent.decide(kept_s=kept_s, best_s=best_s, cost_s=cost_s).switch:
                total_s, now_s = total_s + cost_s, best_s
        extra, least = total_s - steps * best_s, min(steps * (kept_s - best_s), cost_s)
        assert extra <= 2 * least + (kept_s - best_s)


def test_a_known_end_decides_at_once():
    inputs = {"kept_s": 1.5, "best_s": 1.0, "cost_s": 20.0}
    assert Rent().decide(**inputs, steps_left=45).switch
    assert not Rent().decide(**inputs, steps_left=43).switch
    small = Rent().decide(kept_s=1.0 + least_gain() * 0.99, best_s=1.0, cost_s=0.0, steps_left=10**6)
    assert not small.switch
    assert small.lost_s == 0.0


@pytest.mark.parametrize("burst", [1.0, 0.4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_policy_is_near_somebody_who_knows_the_load(placed, kind, burst):
    for seed in seeds(4, every=2):
        trace = random_trace(PROFILE, kind, seed, steps=600, noise=NOISE)
        stand = Stand(MODEL, PROFILE, placed, trace, burst=burst, seed=seed)
        played = {name: play(stand, name) for name in ("ours", "clairvoyant", "never")}
        found = ratios(list(played.values()))
        assert found["ours"] <= 1.25
        # Devices that seem fast while they wait would bring moves to and fro.
        assert played["ours"].switches <= played["clairvoyant"].switches + 1
        assert found["never"] >= 1 - 0.02  # noise
        if kind == "noise":
            assert played["ours"].switches == 0


def test_a_lasting_slowdown_is_removed(placed):
    """At least three quarters of it, the switch included."""
    busiest = placed.stages[0].devices[0]
    trace = LoadTrace(steps=1500, changes=(Change(step=100, drift=Drift(devices={busiest: 3.0})),), noise=NOISE)
    stand = Stand(MODEL, PROFILE, placed, trace)
    ours, never, best = (play(stand, name) for name in ("ours", "never", "clairvoyant"))
    assert ours.switches == 1
    assert ours.switch_steps[0] < 200
    assert never.total_s - ours.total_s >= 0.75 * (never.total_s - best.total_s)


def test_a_slow_link_is_observed_as_a_link(placed):
    hosts = {one.id: one.host for one in PROFILE.devices}
    ends = [hosts[stage.devices[0]] for stage in placed.stages[:2]]
    slow = Drift(links={"->".join(ends): 4.0, "->".join(ends[::-1]): 4.0})
    trace = LoadTrace(steps=80, changes=(Change(step=40, drift=slow),), noise=NOISE)
    stand, detector, found = Stand(MODEL, PROFILE, placed, trace), Detector(8), []
    for step in range(trace.steps):
        found += detector.observe(observed(stand, placed, step))
    assert [change.subject for change in found] == ["<->".join(sorted(ends))]
    assert found[0].factor == pytest.approx(4.0, rel=0.2)


def test_the_command_compares_all_policies(tmp_path):
    PROFILE.save(tmp_path / "cluster.json")
    MODEL.save(tmp_path / "workload.json")
    LoadTrace(steps=30, changes=(Change(step=9, drift=Drift(devices={"a:0": 2.0})),)).save(tmp_path / "load.json")
    files = [str(tmp_path / name) for name in ("cluster.json", "workload.json")]
    done = CliRunner().invoke(main, ["estimate", "adapting", *files, "--load", str(tmp_path / "load.json"), "--json"])
    assert done.exit_code == 0, done.output
    shown = CliRunner().invoke(main, ["show", str(tmp_path / "load.json")])
    assert shown.exit_code == 0, shown.output
    assert "a:0" in shown.stdout
    (row,) = json.loads(done.stdout)["loads"]
    assert [one["policy"] for one in row["policies"]] == list(POLICIES)
    done = CliRunner().invoke(main, ["estimate", "adapting", *files, "--seeds", "1", "--steps", "200"])
    assert done.exit_code == 0, done.output
    assert "two hosts" in done.stdout


def recorded(steps, forward_s, backward_s, slow=1.0):
    """Return recordings of a and b in steps of 10 s with two microbatches; b's clock is 1,000 s ahead of a's.

    A message from a to b takes 0.5 s times `slow`, and one back 0.25 s.
    """
    here, there = [], []
    left, arrived = ({}, {}), ({}, {})
    for step in steps:
        for k in range(2):
            begin, number = 10.0 * step + 2 * k, 2 * step + k + 1
            here += [("fa", begin, begin + forward_s), ("ba", begin + 5, begin + 5 + backward_s)]
            there += [("fb", 1000 + begin + 1, 1000 + begin + 2), ("bb", 1000 + begin + 2, 1000 + begin + 3)]
            left[0][f"g|0.0>1.0#{number}"] = (7, begin + forward_s)
            arrived[1][f"g|0.0>1.0#{number}"] = (7, 1000 + begin + forward_s + 0.5 * slow)
            left[1][f"g|1.0>0.0#{number}"] = (7, 1000 + begin + 3)
            arrived[0][f"g|1.0>0.0#{number}"] = (7, begin + 3.25)
    return Recording(tuple(here), left[0], arrived[0]), Recording(tuple(there), left[1], arrived[1])


def test_recordings_become_times_of_devices_and_links():
    pace = Pace([Watched("a:0", "a", ("fa", "ba")), Watched("b:0", "b", ("fb", "bb"))], num_microbatches=2)
    found = []
    for steps, slow in ((range(2), 1.0), (range(2, 4), 4.0)):
        for worker, recording in enumerate(recorded(steps, 1.0, 2.0, slow)):
            pace.add(worker, recording)
        found += pace.steps()
    assert [one.step_s for one in found] == [10.0, 10.0, 10.0]  # the last step has not ended
    assert [one.seconds["a:0"] for one in found] == [6.0] * 3
    assert [one.seconds["b:0"] for one in found] == [4.0] * 3
    # With a fifth of b's pass; the offset of the clocks cancels.
    assert [one.seconds["a<->b"] for one in found] == pytest.approx([1.15, 1.15, 2.65])


def test_a_slow_link_slows_both_directions(placed):
    follower = following(placed)
    ends = [device.split(":")[0] for stage in placed.stages[:2] for device in stage.devices[:1]]
    rng = random.Random(0)
    for step in range(40):
        link_s = noisy(rng, 0.02) * (4.0 if step >= 30 else 1.0)
        follower.observe(StepTimes({"<->".join(ends): link_s, placed.stages[0].devices[0]: noisy(rng, 0.02)}, 1.0))
    both = ("->".join(ends), "->".join(ends[::-1]))
    assert follower.drift.links == {name: pytest.approx(4.0, rel=0.05) for name in both}
    assert follower.drift.devices == {}


def following(placed, **options):
    """Return a follower whose searches end at once."""

    def search(model, profile):
        found = Future()
        found.set_result(hwaware.plan(model, profile, num_microbatches=8))
        return found

    return Follower(placed, MODEL, PROFILE, search, switch_s=1e-3, **options)


def steps_of(follower, number, slow, step_s):
    """Let a follower observe steps, in which devices take longer than profiled, until it wants to move."""
    events, rng = [], random.Random(number)
    stages = evaluate(follower.plan, MODEL, PROFILE).stages
    for _ in range(number):
        seconds = {
            name: slow.get(name, 1.0) * stage.compute_s * noisy(rng, 0.02) for stage in stages for name in stage.devices
        }
        events += follower.observe(StepTimes(seconds, step_s))
        if follower.wanted is not None:
            break
    return events


def test_a_follower_moves_to_a_cluster_that_has_grown():
    """It learns of the new device alone: no device has become slower."""
    few = cluster(HOSTS[2:])
    follower = following(hwaware.plan(MODEL, few, num_microbatches=8))
    follower.placed(follower.plan, few)
    assert steps_of(follower, 20, {}, 1.0) == []
    follower.grown(MODEL, PROFILE)
    *_, decided = steps_of(follower, 20, {}, 1.0)
    assert decided.what.startswith("moves")
    assert decided.numbers["kept_s"] / decided.numbers["best_s"] > 1.0 + least_gain()
    assert {"a:0", "b:0"} <= {name for stage in follower.wanted.stages for name in stage.devices}


def test_a_link_of_a_byte_per_second_makes_no_move_and_ends_no_training():
    model = workload([layer(parameter_bytes=1e9) for _ in range(4)])
    few, slow = cluster(HOSTS[2:3]), cluster([HOSTS[2], HOSTS[0]], [link("a", "c", 1.0)])
    follower = following(hwaware.plan(model, few, num_microbatches=8))
    follower.grown(model, slow)
    (decided,) = [event for _ in range(5) for event in follower.observe(StepTimes({"c:0": 1.0}, 1.0))]
    assert decided.what.startswith("stays for now")
    assert decided.numbers["cost_s"] > 1e9


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_search_that_fails_ends_no_training(placed, caplog, when):
    def search(model, profile):
        if when == "at once":
            raise ZeroDivisionError("1 / 0")
        found = Future()
        found.set_exception(ZeroDivisionError("1 / 0"))
        return found

    follower = Follower(placed, MODEL, PROFILE, search, switch_s=1e-3)
    steps_of(follower, 40, {}, 1.0)
    events = steps_of(follower, 40, {placed.stages[0].devices[0]: 3.0}, 3.0)
    assert events[-1].what == "stays: the search failed (ZeroDivisionError: 1 / 0)"
    assert follower.wanted is None
    assert [record.exc_info[0] for record in caplog.records] == [ZeroDivisionError]  # with its place in the code


def test_a_follower_notices_decides_and_judges_its_move(placed):
    follower, slow = following(placed), {placed.stages[0].devices[0]: 3.0}
    assert steps_of(follower, 40, {}, 1.0) == []
    noticed, *decided = steps_of(follower, 40, slow, 3.0)
    assert noticed.kind == "noticed"
    assert noticed.call <= 50
    assert list(noticed.numbers) == list(slow)
    assert follower.drift.devices == {name: pytest.approx(3.0, rel=0.05) for name in slow}
    assert decided[-1].what.startswith("moves")
    assert decided[-1].numbers["kept_s"] == 3.0
    assert decided[-1].numbers["best_s"] < 3.0
    wanted = follower.wanted
    follower.moved(wanted, took_s=2.0)
    # In the new placement, the slow device has less to do: its times are as predicted.
    (kept,) = steps_of(follower, WARM_STEPS + FIRST_STEPS, slow, 1.5)
    assert kept.numbers == {"before_s": 3.0, "promised_s": decided[-1].numbers["best_s"], "measured_s": 1.5}
    assert follower.plan == wanted
    assert steps_of(follower, 20, slow, 1.5) == []
    # The load ends: the factors are those of the profile again, and the first placement comes back.
    back = steps_of(follower, 80, {}, 1.5)
    assert back[0].kind == "noticed"
    assert all(factor == pytest.approx(1.0, abs=0.05) for factor in follower.drift.devices.values())
    assert [stage.layers for stage in follower.wanted.stages] == [stage.layers for stage in placed.stages]


def test_only_a_plan_with_another_device_pays_for_a_process(placed):
    without = hwaware.plan(MODEL, PROFILE, num_microbatches=8, exclude=placed.stages[-1].devices[0])
    prices = [
        switch_cost_s(*plans, MODEL, PROFILE, compile_s=1.0, fixed_s=2.0, start_s=start_s)
        for plans in ((placed, without), (without, placed))
        for start_s in (0.0, 100.0)
    ]
    assert [round(after - before) for before, after in zip(prices[::2], prices[1::2])] == [0, 100]


def test_a_move_teaches_what_the_start_of_processes_takes(placed):
    """The next move pays for it only if it starts some."""
    few = hwaware.plan(MODEL, PROFILE, num_microbatches=8, exclude=placed.stages[-1].devices[0])
    follower = following(few, start_s=3.0)
    follower.moved(placed, took_s=9.0, start_s=5.0)
    assert (follower.switch_s, follower.start_s) == (4.0, 5.0)
    follower.moved(few, took_s=2.0)
    assert (follower.switch_s, follower.start_s) == (2.0, 5.0)


def test_a_move_that_brings_nothing_is_undone(placed):
    follower, slow = following(placed), {placed.stages[0].devices[0]: 3.0}
    steps_of(follower, 40, {}, 1.0)
    steps_of(follower, 40, slow, 3.0)
    follower.moved(follower.wanted, took_s=2.0)
    (undone,) = steps_of(follower, WARM_STEPS + FIRST_STEPS, slow, 3.2)
    assert undone.kind == "undone"
    assert follower.wanted == placed
    follower.moved(placed, took_s=2.0)
    assert steps_of(follower, 40, slow, 3.0) == []
    assert follower.wanted is None


def test_a_change_in_the_first_steps_after_a_move_is_noticed(placed):
    """They are compared with what the steps before the move let expect, and not only with each other."""
    follower, slow = following(placed), {placed.stages[0].devices[0]: 3.0}
    steps_of(follower, 40, {}, 1.0)
    steps_of(follower, 40, slow, 3.0)
    follower.moved(follower.wanted, took_s=2.0)
    events = steps_of(follower, WARM_STEPS + FIRST_STEPS, dict.fromkeys(slow, 4.5), 1.5)
    assert [event.kind for event in events].count("noticed") == 1
    assert follower.drift.devices == {name: pytest.approx(4.5, rel=0.05) for name in slow}


@pytest.mark.parametrize("factor", [1.4, 2.0])
def test_a_slowdown_of_all_devices_moves_nothing(placed, factor):
    """It is noticed device by device, but no placement helps."""
    follower = following(placed, steps=10_000)
    assert steps_of(follower, 40, {}, 1.0) == []
    events = steps_of(follower, 40, {one.id: factor for one in HOSTS}, factor)
    assert {name for event in events for name in event.numbers if event.kind == "noticed"} == {one.id for one in HOSTS}
    assert follower.wanted is None


def test_the_placement_that_runs_is_found_again_whatever_its_price(placed):
    stages = (msgspec.structs.replace(one, compute_s=2 * one.compute_s, memory_bytes=1.0) for one in placed.stages)
    found = Future()
    found.set_result(msgspec.structs.replace(placed, stages=tuple(stages)))
    follower = Follower(placed, MODEL, PROFILE, lambda *_: found, switch_s=1e-3)
    follower.grown(MODEL, PROFILE)
    (decided,) = [event for _ in range(5) for event in follower.observe(StepTimes({"a:0": 1.0}, 1.0))]
    assert decided.what == "stays: no other placement is faster"


def test_waits_for_late_passes_count_in_a_promised_gain():
    """The cheapest plan has two stages, whose waits take more than the second device gains."""
    profile = cluster([device("a:0", 0.05, kind="a"), device("b:0", 0.095, kind="b")])
    times = {name: timed(s, s, name, deviation_s=0.05)[name] for name, s in (("a", 0.05), ("b", 0.095))}
    model = workload([layer(measured=times)] * 2)
    cheapest = hwaware.plan(model, profile, num_microbatches=8)
    steady = steadiest(cheapest, model, profile)
    assert (len(cheapest.stages), len(steady.stages)) == (2, 1)
    found = Future()
    found.set_result(cheapest)
    follower = Follower(steady, model, profile, lambda *_: found, switch_s=1e-3)
    follower.grown(model, profile)
    (decided,) = [event for _ in range(5) for event in follower.observe(StepTimes({"a:0": 0.2}, 1.6))]
    assert decided.what.startswith("stays for now")
    assert decided.numbers["best_s"] > decided.numbers["kept_s"]


def test_no_device_counts_as_faster_than_its_profile(placed):
    """A CPU quota lets a device burst that waits for a slower one."""
    follower = following(placed, steps=10_000)
    slow, *others = [name for stage in placed.stages for name in stage.devices]
    steps_of(follower, 40, {}, 1.0)
    steps_of(follower, 40, {slow: 3.0, **dict.fromkeys(others, 0.6)}, 3.0)
    assert follower.drift.devices == {slow: pytest.approx(3.0, rel=0.05)}


@pytest.mark.parametrize(
    ("options", "verb"), [({"acts": False}, "would move"), ({"steps": 60}, "moves"), ({}, "moves")]
)
def test_a_follower_may_only_say_it(placed, options, verb):
    follower, slow = following(placed, **options), {placed.stages[0].devices[0]: 3.0}
    steps_of(follower, 40, {}, 1.0)
    events = steps_of(follower, 15, slow, 3.0)
    assert events[-1].what.startswith(verb)
    assert (follower.wanted is None) == (verb == "would move")


def test_no_move_comes_shortly_before_the_end(placed):
    follower, slow = following(placed, steps=47), {placed.stages[0].devices[0]: 3.0}
    follower.switch_s = 100.0
    steps_of(follower, 40, {}, 1.0)
    assert [event.kind for event in steps_of(follower, 7, slow, 3.0)] == ["noticed", "decided"]
    assert follower.wanted is None


def test_late_messages_change_the_schedule_and_not_the_placement(placed):
    model = workload([layer(output_bytes=1e7) for _ in range(12)])  # 0.01 s each
    hosts = {one.id: one.host for one in PROFILE.devices}
    ends = [hosts[stage.devices[0]] for stage in placed.stages[-2:]]
    late = Drift(links={"->".join(ends): 1000.0, "->".join(ends[::-1]): 1000.0})
    stand = Stand(model, PROFILE, placed, LoadTrace(steps=20, changes=(Change(step=5, drift=late),)))
    morphed, never = play(stand, "pipemorph"), play(stand, "never")
    assert morphed.switch_steps == (5,)
    assert morphed.total_s < never.total_s
    slow = LoadTrace(steps=20, changes=(Change(step=5, drift=Drift(devices={"a:0": 3.0})),))
    assert play(Stand(model, PROFILE, placed, slow), "pipemorph").switches == 0


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        ((None, None), {}, (False, None)),
        ((None, None), {"HWAWARE_ADAPT": "log", "HWAWARE_STEPS": "70"}, ("log", 70)),
        ((True, 9), {"HWAWARE_ADAPT": "log", "HWAWARE_STEPS": "70"}, (True, 9)),
        ((None, None), {"HWAWARE_ADAPT": "yes"}, "expected 0, 1 or log"),
        ((1, None), {}, "expected False, True or 'log'"),
        ((True, None), {"HWAWARE_STEPS": "-3"}, "'-3', expected a whole number above 0"),
    ],
)
def test_arguments_win_over_variables(monkeypatch, given, environment, expected):
    from hwaware.adapter import settings_of

    for name in ("HWAWARE_ADAPT", "HWAWARE_STEPS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, tuple):
        assert tuple(settings_of(*given)) == expected
        return
    with pytest.raises(UnusableInputError, match=expected):
        settings_of(*given)


@pytest.fixture(scope="module")
def benchmark():
    return script("adapting")


def test_a_training_that_hangs_ends_the_benchmark(benchmark, tmp_path, monkeypatch):
    hangs = tmp_path / "hangs.py"
    hangs.write_text("import time; time.sleep(600)")
    bed = SimpleNamespace(driver_environment=dict, hosts=(), address="10.0.0.1:6379")
    monkeypatch.setattr(benchmark.testbed, "running", lambda scenario: contextlib.nullcontext(bed))
    monkeypatch.setattr(benchmark, "__file__", str(hangs))
    monkeypatch.setattr(benchmark, "START_LIMIT_S", 0.2)
    monkeypatch.setattr(benchmark, "STEP_LIMIT_S", 0.0)
    with pytest.raises(subprocess.TimeoutExpired):
        benchmark.of_trace("calm", 60, 60)


def test_a_benchmark_of_too_few_steps_is_refused_before_it_begins(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "of_trace", None)
    monkeypatch.setattr(sys, "argv", ["adapting.py", "--others", str(benchmark.LEAST_STEPS - 1)])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 2
    assert "--others 54, expected at least 55 each" in capsys.readouterr().err
    for trace in benchmark.TRACES:
        for steps in (benchmark.LEAST_STEPS, 200):
            assert all(begin < end for begin, end in benchmark.parts(trace, steps))
