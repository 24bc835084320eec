"""The simulator: hand-computed timelines, Alpa's own numbers, the judge's closed forms, shared links, and the trace."""

from __future__ import annotations

import heapq
import json
import random

import msgspec
import pytest
from builders import DATA, card, chain, cluster, examples, layer, links, seeds, workload
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import hwaware
from hwaware.cli import main
from hwaware.cluster import ClusterProfile
from hwaware.costs import pipeline
from hwaware.errors import UnusableInputError
from hwaware.plans import Plan
from hwaware.simulator import simulate
from hwaware.simulator.engine import run_blocking, run_overlapped
from hwaware.simulator.messages import Channel, Messages, Part
from hwaware.simulator.simulate import disagreement
from hwaware.timeline import Event, Timeline
from hwaware.workload import Workload


def channels(links):
    return [Channel(seconds) for seconds in links] * 2


@pytest.mark.parametrize(
    ("links", "blocking", "overlapped"),
    # Blocking: Alpa's PipeDreamFlush with its own emission order. Overlapped: messages of one direction follow each
    # other (233 for the last case if they may all travel at once).
    [([0, 0, 0], 105, 105), ([0.5] * 3, 170.5, 131), ([0, 2, 0], 232, 169), ([0, 4, 0], 360, 235)],
)
def test_alpas_own_numbers(links, blocking, overlapped):
    assert max(run_blocking("1f1b", [1] * 4, [2] * 4, channels(links), 32).ends) == blocking
    assert max(run_overlapped("1f1b", [1] * 4, [2] * 4, channels(links), 32).ends) == overlapped


def random_case(rng, slowest):
    n = rng.randint(1, 6)
    forward = [rng.uniform(0.3, 2) for _ in range(n)]
    backward = [rng.uniform(0.5, 4) for _ in range(n)]
    there = [slowest * rng.random() for _ in range(n - 1)]
    back = [slowest * rng.random() for _ in range(n - 1)]
    return forward, backward, there, back


@examples(80)
@given(st.randoms(use_true_random=False), st.integers(1, 20), st.sampled_from(["gpipe", "inference"]))
def test_gpipe_and_inference_are_their_closed_forms(rng, count, schedule):
    forward, backward, there, back = random_case(rng, 2.0)
    run = run_overlapped(schedule, forward, backward, [Channel(s) for s in there + back], count)
    closed = pipeline.pipeline_and_period_s(schedule, forward, backward, there, back, count)[0]
    assert max(run.ends) == pytest.approx(closed, rel=1e-12)


@examples(80)
@given(st.randoms(use_true_random=False), st.integers(1, 20), st.sampled_from(["1f1b", "gpipe", "inference"]))
def test_slower_parts_and_blocking_never_shorten_a_step(rng, count, schedule):
    parts = [list(values) for values in random_case(rng, 2.0)]

    def ends(engine):
        return max(engine(schedule, parts[0], parts[1], [Channel(s) for s in parts[2] + parts[3]], count).ends)

    before = ends(run_overlapped)
    assert ends(run_blocking) >= before * (1 - 1e-12)
    which = rng.choice([values for values in parts if values])
    which[rng.randrange(len(which))] *= 1.5
    assert ends(run_overlapped) >= before * (1 - 1e-12)


def two_hosts(*cards, **of_devices):
    """Build two devices on each of two hosts, joined by one link each way."""
    return cluster({"a": 2, "b": 2}, links(("ab", "ba", "aa", "bb")), cards=cards, **of_devices)


def model(stages, nbytes=1e9, **more):
    return workload(stages, 2, output_bytes=nbytes, **more)


def spans(timeline, kind, stage):
    found = [(e.microbatch, e.start_s, e.end_s) for e in timeline.events if e.kind == kind and e.stage == stage]
    return sorted(found)


def test_a_timeline_by_hand():
    timeline = simulate(chain("a:0", "b:0", num_microbatches=2), model(2), two_hosts())
    assert spans(timeline, "forward", 0) == [(0, 0, 1), (1, 1, 2)]
    assert spans(timeline, "activation", 0) == [(0, 1, 2), (1, 2, 3)]
    assert spans(timeline, "forward", 1) == [(0, 2, 3), (1, 5, 6)]
    assert spans(timeline, "backward", 1) == [(0, 3, 5), (1, 6, 8)]
    assert spans(timeline, "gradient", 1) == [(0, 5, 6), (1, 8, 9)]
    assert spans(timeline, "backward", 0) == [(0, 6, 8), (1, 9, 11)]
    assert timeline.step_s == 11
    assert timeline.busy_s(0) == 6


def test_a_stage_is_busy_once_while_its_replicas_work():
    """A recorded step has the passes of all replicas."""
    one = [Event(kind="forward", stage=0, start_s=0, end_s=2), Event(kind="backward", stage=0, start_s=2, end_s=3)]
    other = [
        Event(kind="forward", stage=0, start_s=1, end_s=2.5),
        Event(kind="backward", stage=0, start_s=2.5, end_s=4),
    ]
    timeline = Timeline(step_s=5, schedule="1f1b", num_microbatches=1, devices=(("a:0", "b:0"),), events=(*one, *other))
    assert (timeline.spent_s(0, "forward"), timeline.spent_s(0, "backward"), timeline.busy_s(0)) == (2.5, 2, 4)


@pytest.mark.parametrize(
    ("before", "behind", "at_once", "one_by_one"),
    [
        (["a:0"], ["b:0", "b:1"], 0.5, 1.0),  # one worker, which receives both halves
        (["b:0", "b:1"], ["a:0"], 0.5, 1.0),
        (["a:0", "b:0"], ["a:1", "b:1"], 0.5, 0.5),  # each host has one message
        (["a:0", "a:1"], ["b:0", "b:1"], 0.5, 1.0),
        (["a:0"], ["b:0"], 1.0, 1.0),
    ],
)
def test_blocking_sends_reach_replicas_one_by_one(before, behind, at_once, one_by_one):
    plan = chain(before, behind, num_microbatches=1)
    for sends, seconds in (("overlapped", at_once), ("blocking", one_by_one)):
        timeline = simulate(plan, model(2), two_hosts(), sends=sends, shared_links=False)
        for kind, stage in (("activation", 0), ("gradient", 1)):
            ((_, start_s, end_s),) = spans(timeline, kind, stage)
            assert end_s - start_s == pytest.approx(seconds)


@pytest.mark.parametrize("sends", ["overlapped", "blocking"])
def test_a_group_passes_its_card_at_once_whatever_the_order(sends):
    profile = two_hosts(card("a:0", "a:1", send=0.5e9, receive=0.25e9))
    groups = [("a:0", "a:1")], [("b:0", "b:1")]
    timeline = simulate(chain(*groups, num_microbatches=1), model(2), profile, sends=sends)
    # Both devices send all of 1 GB, 2 GB through the card.
    for kind, stage, seconds in (("activation", 0, 4.0), ("gradient", 1, 8.0)):
        ((_, start_s, end_s),) = spans(timeline, kind, stage)
        assert end_s - start_s == pytest.approx(seconds)


def test_messages_of_different_stages_share_a_link():
    plan = chain("a:0", "b:0", "a:1", "b:1", num_microbatches=1, schedule="inference")
    # One microbatch: messages follow each other anyway.
    assert simulate(plan, model(4), two_hosts()).step_s == 4 + 3
    busy = msgspec.structs.replace(plan, num_microbatches=40)
    shared = simulate(busy, model(4, 2e9), two_hosts()).step_s
    alone = simulate(busy, model(4, 2e9), two_hosts(), shared_links=False).step_s
    assert alone == pytest.approx(4 + 3 * 2 + 39 * 2)
    # a -> b carries the first and the last message of every microbatch: 4 seconds each.
    assert shared == pytest.approx(4 * 40, rel=0.1)


def test_two_messages_share_a_link_from_when_both_travel():
    link = Part(("link", "a", "b"), lambda loads: float(len(loads)))
    ends = {}
    messages = Messages([Channel(2.0, 1.0, (link,)), Channel(2.0, 1.0, (link,)), Channel(2.0, 1.0)])
    for channel, now in ((0, 0.0), (1, 1.0), (2, 1.0)):
        messages.start(channel, now)
    while messages.queue:
        now, _, who, version = heapq.heappop(messages.queue)
        if messages.ends(~who, version, now):
            ends[~who] = now
    assert ends == {0: 3.0, 1: 4.0, 2: 3.0}


def test_waiting_shortens_the_pass_and_not_the_message():
    timeline = simulate(chain("a:0", "b:0", num_microbatches=2), model(2), two_hosts(head_start_s=0.25))
    assert spans(timeline, "forward", 0) == [(0, 0, 1), (1, 1, 2)]
    assert spans(timeline, "activation", 0) == [(0, 1, 2), (1, 2, 3)]
    assert spans(timeline, "forward", 1) == [(0, 2, 2.75), (1, 4.75, 5.75)]  # the second has not waited
    assert spans(timeline, "gradient", 1) == [(0, 4.75, 5.75), (1, 7.75, 8.75)]
    assert spans(timeline, "backward", 0) == [(0, 5.75, 7.5), (1, 8.75, 10.5)]


def test_who_waits_for_a_slower_stage_has_a_shorter_pass():
    """Messages take next to nothing, and where stages wait, it is for each other's passes."""
    work = model(2, 1.0)
    timeline = simulate(chain("a:0", "b:0", num_microbatches=2), work, two_hosts(head_start_s=0.25))
    assert [round(end - start, 3) for _, start, end in spans(timeline, "forward", 1)] == [0.75, 1.0]
    assert [round(end - start, 3) for _, start, end in spans(timeline, "backward", 0)] == [1.75, 1.75]
    step_s = hwaware.evaluate(chain("a:0", "b:0", num_microbatches=2), work, two_hosts(head_start_s=0.25)).step_s
    assert timeline.step_s == pytest.approx(step_s)


@pytest.mark.parametrize("seconds", [0.25, 1.0, 3.0])
def test_the_judge_and_the_simulator_agree_on_head_starts(seconds):
    """One microbatch: every stage waits for every message."""
    work, profile = model(3), two_hosts(head_start_s=seconds)
    for schedule in ("1f1b", "inference"):
        plan = chain("a:0", "b:0", "a:1", num_microbatches=1, schedule=schedule)
        step_s = hwaware.evaluate(plan, work, profile).step_s
        assert simulate(plan, work, profile).step_s == pytest.approx(step_s)


def test_hidden_messages_share_a_link_all_the_same():
    plan, work = chain("a:0", "b:0", "a:1", "b:1", num_microbatches=40, schedule="inference"), model(4, 2e9)
    shared = simulate(plan, work, two_hosts(head_start_s=2.0)).step_s
    assert shared == pytest.approx(4 * 40, rel=0.1)


def test_a_head_start_counts_once_for_successive_messages():
    plan = chain("a:0", ["b:0", "b:1"], num_microbatches=1)
    timeline = simulate(plan, model(2), two_hosts(head_start_s=0.125), sends="blocking")
    ((_, start_s, end_s),) = spans(timeline, "activation", 0)
    assert end_s - start_s == pytest.approx(1.0)
    ((_, start_s, end_s),) = spans(timeline, "forward", 1)
    assert end_s - start_s == pytest.approx(0.5 - 0.125)  # a replica has half of the samples


def test_each_direction_is_a_link_of_its_own():
    plan, work = chain("a:0", "b:0", "a:1", num_microbatches=3, schedule="inference"), model(3, 2e9)
    shared, alone = (simulate(plan, work, two_hosts(), shared_links=s).step_s for s in (True, False))
    assert shared == alone


@pytest.mark.parametrize(
    ("slow", "factor"),
    [
        (card("a:0", "a:1", send=2e9), 1),
        (card("a:0", "a:1", send=1e9, receive=2e9), 2),
        (card("a:0", "a:1", concurrent={1: 1e9, 2: 0.25e9}), 4),
    ],
)
def test_cards_slow_messages_down(slow, factor):
    pairs = [("a:0", "b:0"), ("b:0", "a:0"), ("a:1", "b:1"), ("b:1", "a:1"), ("b:0", "a:1"), ("a:1", "b:0")]
    profile = cluster({"a": 2, "b": 2}, links(pairs), cards=[slow])
    plan = chain("a:0", "b:0", "a:1", "b:1", num_microbatches=60, schedule="inference")
    busy = simulate(plan, model(4, 4e9), profile).step_s
    assert busy == pytest.approx(4 * factor * 60, rel=0.15)


def test_devices_inside_a_host_do_not_share():
    plan = chain("a:0", "a:1", "b:0", "b:1", num_microbatches=20, schedule="inference")
    work = model(4, 2e9)
    shared, alone = (simulate(plan, work, two_hosts(), shared_links=s).step_s for s in (True, False))
    assert shared == alone


def test_the_judge_and_the_simulator_agree_without_sharing():
    rng = random.Random(5)
    profile = two_hosts()
    for _ in seeds(40):
        order = rng.sample(["a:0", "a:1", "b:0", "b:1"], rng.randint(1, 4))
        work = model(len(order), rng.choice([0, 1e8, 1e9]), gradient_bytes=1e9)
        for schedule in ("1f1b", "gpipe", "inference"):
            plan = chain(*order, num_microbatches=rng.randint(1, 12), schedule=schedule)
            timeline = simulate(plan, work, profile, shared_links=False)
            cost = hwaware.evaluate(plan, work, profile)
            assert timeline.step_s == pytest.approx(cost.step_s, rel=0.05)
            assert disagreement(timeline, cost) is None
            assert len(timeline.events) >= plan.num_microbatches * len(order)


def test_the_note_on_a_price_names_only_effects_that_can_cause_it():
    alike = ClusterProfile.uniform(hosts=3, flops_per_s=1e10, bandwidth_bytes_per_s=1e8, latency_s=0)
    late_sums = workload([layer(1e10), layer(1e9, parameter_bytes=1e9)], 2), chain("h0:0", ["h1:0", "h2:0"])
    slow = links(["ab"], 1e8) + links(["ba"], 2e8)
    waits = workload([layer(1e9, 1.1e10, output_bytes=2e8)] * 2), chain("a:0", "b:0")
    cases = (alike, late_sums, "-9.3"), (cluster(links=slow, seconds=0.1), waits, "+6.7")
    notes = []
    for profile, (work, plan), off in cases:
        plan = msgspec.structs.replace(plan, num_microbatches=4)
        notes.append(disagreement(simulate(plan, work, profile), hwaware.evaluate(plan, work, profile)))
        assert f"({off} %)" in notes[-1]
    assert "messages" not in notes[0]
    assert notes[1].endswith("some waits for slow messages.")


def test_synchronisation_and_update_come_once():
    profile = two_hosts(memory_bandwidth_bytes_per_s=1e9)
    work, plan = workload(1, 2, parameter_bytes=1e9), chain(["a:0", "b:0"], num_microbatches=3)
    timeline = simulate(plan, work, profile)
    assert [e.kind for e in timeline.events[-2:]] == ["synchronisation", "update"]
    assert timeline.step_s == pytest.approx(hwaware.evaluate(plan, work, profile).step_s)
    assert timeline.step_s == pytest.approx(3 * (1.5 + 1 + 5) + 1 + 7)  # products, weights; sum, update


@pytest.mark.parametrize(("parameter_bytes", "microbatches"), [(1e9, 4), (1e9, 8), (3e9, 8), (3e9, 16)])
def test_the_judge_and_the_simulator_agree_on_sums_that_gpipe_hides(parameter_bytes, microbatches):
    profile = ClusterProfile.uniform(hosts=3, flops_per_s=1e10, bandwidth_bytes_per_s=1e8, latency_s=0)
    work = workload([layer(1e10), layer(1e9, parameter_bytes=parameter_bytes)], 2)
    plan = chain("h0:0", ["h1:0", "h2:0"], num_microbatches=microbatches, schedule="gpipe")
    timeline = simulate(plan, work, profile)
    assert hwaware.evaluate(plan, work, profile).step_s == pytest.approx(timeline.step_s)
    ends_s = [event.end_s for event in timeline.events]
    assert ends_s == sorted(ends_s), "the last stage sums up while the first one computes"


def test_renaming_changes_nothing():
    plan = chain("a:0", "b:0", "a:1", "b:1", num_microbatches=9)
    profile = two_hosts()
    other = json.loads(profile.to_json().decode().replace('"a', '"x').replace('"xddress', '"address'))
    renamed = ClusterProfile.from_json(json.dumps(other))
    moved = chain("x:0", "b:0", "x:1", "b:1", num_microbatches=9)
    assert simulate(plan, model(4), profile).step_s == simulate(moved, model(4), renamed).step_s


def test_the_timeline_is_a_record_and_a_trace(tmp_path):
    timeline = simulate(chain("a:0", "b:0", num_microbatches=2), model(2), two_hosts())
    timeline.save(tmp_path / "timeline.json")
    assert Timeline.load(tmp_path / "timeline.json") == timeline
    trace = timeline.trace()
    spans_ = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans_) == len(timeline.events)
    assert max(event["ts"] + event["dur"] for event in spans_) == pytest.approx(timeline.step_s * 1e6)
    assert {event["pid"] for event in spans_} == {0, 1}


def test_a_trace_keeps_names_of_devices_with_commas():
    timeline = Timeline(step_s=1.0, schedule="1f1b", num_microbatches=1, devices=(("a, 0", "a, 1"),), events=())
    trace = timeline.trace()
    assert Timeline.from_trace(trace).devices == timeline.devices
    for event in trace["traceEvents"]:
        event["args"].pop("devices", None)  # as older versions wrote it
    assert Timeline.from_trace(trace).devices == (("a", "0", "a", "1"),)


def test_the_command_writes_a_trace(tmp_path):
    files = [str(DATA / name) for name in ("cluster_three.json", "workload_six_layers.json", "plan_by_hand.json")]
    out = tmp_path / "trace.json"
    result = CliRunner().invoke(main, ["simulate", *files, "-o", str(out), "--json"])
    assert result.exit_code == 0, result.output
    trace = json.loads(out.read_text())
    profile, work, plan = ClusterProfile.load(files[0]), Workload.load(files[1]), Plan.load(files[2])
    judged = hwaware.evaluate(plan, work, profile).step_s
    assert trace["otherData"]["step_s"] == pytest.approx(judged, rel=0.05)
    assert json.loads(result.stdout)["evaluated_step_s"] == judged
    assert all(event["dur"] >= 0 for event in trace["traceEvents"] if event["ph"] == "X")
    blocking = CliRunner().invoke(main, ["simulate", *files, "-o", str(out), "--sends", "blocking"])
    assert "`hwaware evaluate` predicts" in blocking.stderr
    assert "share links, and that stages wait for them." in blocking.stderr
    missing = CliRunner().invoke(main, ["simulate", *files[:2], str(tmp_path / "no.json"), "-o", str(out)])
    assert missing.exit_code == 2


def test_unknown_sends_are_refused():
    with pytest.raises(UnusableInputError, match="expected 'overlapped' or 'blocking'"):
        simulate(chain("a:0"), model(1), two_hosts(), sends="late")
