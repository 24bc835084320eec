"""The simulator: hand-computed timelines, Alpa's own numbers, the judge's closed forms, shared links, and the trace."""

from __future__ import annotations

import heapq
import json
import random
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import hwaware
from hwaware.cli import main
from hwaware.cluster import ClusterProfile, ConcurrentRate, Device, Host, Link, MatrixProduct, SharedCard
from hwaware.costs import pipeline
from hwaware.errors import UnusableInputError
from hwaware.plans import Plan, Replica, Stage
from hwaware.simulator import simulate
from hwaware.simulator.engine import run_blocking, run_overlapped
from hwaware.simulator.messages import Channel, Messages, Part
from hwaware.simulator.simulate import disagreement
from hwaware.timeline import Timeline
from hwaware.workload import Layer, Workload

DATA = Path(__file__).parent.parent / "data"


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


@settings(max_examples=80)
@given(st.randoms(use_true_random=False), st.integers(1, 20), st.sampled_from(["gpipe", "inference"]))
def test_gpipe_and_inference_are_their_closed_forms(rng, count, schedule):
    forward, backward, there, back = random_case(rng, 2.0)
    run = run_overlapped(schedule, forward, backward, [Channel(s) for s in there + back], count)
    closed = pipeline.pipeline_s(schedule, forward, backward, there, back, count)
    assert max(run.ends) == pytest.approx(closed, rel=1e-12)


@settings(max_examples=80)
@given(st.randoms(use_true_random=False), st.integers(1, 20), st.sampled_from(["1f1b", "gpipe", "inference"]))
def test_slower_parts_never_make_a_step_shorter_and_blocking_never_helps(rng, count, schedule):
    parts = [list(values) for values in random_case(rng, 2.0)]

    def ends(engine):
        return max(engine(schedule, parts[0], parts[1], [Channel(s) for s in parts[2] + parts[3]], count).ends)

    before = ends(run_overlapped)
    assert ends(run_blocking) >= before * (1 - 1e-12)
    which = rng.choice([values for values in parts if values])
    which[rng.randrange(len(which))] *= 1.5
    assert ends(run_overlapped) >= before * (1 - 1e-12)


def device(name, host, **more):
    curve = {"float32": (MatrixProduct(flops=1e9, seconds=1.0),)}
    return Device(id=name, host=host, kind="any", memory_bytes=10**12, throughput=curve, **more)


def two_hosts(cards=(), rate=1e9):
    """Two devices on each of two hosts, joined by one link each way."""
    devices = tuple(device(f"{h}{k}", h) for h in "ab" for k in (0, 1))
    links = [Link(source=s, target=t, latency_s=0, bandwidth_bytes_per_s=rate) for s, t in ("ab", "ba", "aa", "bb")]
    hosts = (Host(name="a"), Host(name="b"))
    return ClusterProfile(hosts=hosts, devices=devices, links=tuple(links), shared_cards=tuple(cards))


def model(stages, nbytes=1e9, **more):
    layers = [
        Layer(name=str(k), forward_flops=1e9, backward_flops=2e9, parameter_bytes=0, output_bytes=nbytes,
              activation_bytes=0, **more)
        for k in range(stages)
    ]  # fmt: skip
    return Workload(name="m", microbatch_size=2, dtype="float32", layers=tuple(layers))


def chain(*devices, microbatches=4, **more):
    made = tuple(Stage(layers=(k, k), replicas=(Replica(devices=(d,)),)) for k, d in enumerate(devices))
    return Plan(num_microbatches=microbatches, stages=made, **more)


def spans(timeline, kind, stage):
    found = [(e.microbatch, e.start_s, e.end_s) for e in timeline.events if e.kind == kind and e.stage == stage]
    return sorted(found)


def test_a_timeline_by_hand():
    timeline = simulate(chain("a0", "b0", microbatches=2), model(2), two_hosts())
    assert spans(timeline, "forward", 0) == [(0, 0, 1), (1, 1, 2)]
    assert spans(timeline, "activation", 0) == [(0, 1, 2), (1, 2, 3)]
    assert spans(timeline, "forward", 1) == [(0, 2, 3), (1, 5, 6)]
    assert spans(timeline, "backward", 1) == [(0, 3, 5), (1, 6, 8)]
    assert spans(timeline, "gradient", 1) == [(0, 5, 6), (1, 8, 9)]
    assert spans(timeline, "backward", 0) == [(0, 6, 8), (1, 9, 11)]
    assert timeline.step_s == 11
    assert timeline.busy_s(0) == 6


@pytest.mark.parametrize(
    ("before", "behind", "at_once", "one_by_one"),
    [
        (["a0"], ["b0", "b1"], 0.5, 1.0),  # one worker, which receives both halves
        (["b0", "b1"], ["a0"], 0.5, 1.0),
        (["a0", "b0"], ["a1", "b1"], 0.5, 0.5),  # each host has one message
        (["a0", "a1"], ["b0", "b1"], 0.5, 1.0),
        (["a0"], ["b0"], 1.0, 1.0),
    ],
)
def test_a_host_exchanges_with_replicas_one_after_the_other_if_sends_block(before, behind, at_once, one_by_one):
    stages = tuple(
        Stage(layers=(index, index), replicas=tuple(Replica(devices=(name,)) for name in names))
        for index, names in enumerate((before, behind))
    )
    plan = Plan(num_microbatches=1, stages=stages)
    for sends, seconds in (("overlapped", at_once), ("blocking", one_by_one)):
        timeline = simulate(plan, model(2), two_hosts(), sends=sends, shared_links=False)
        for kind, stage in (("activation", 0), ("gradient", 1)):
            ((_, start_s, end_s),) = spans(timeline, kind, stage)
            assert end_s - start_s == pytest.approx(seconds)


@pytest.mark.parametrize("sends", ["overlapped", "blocking"])
def test_a_group_passes_its_card_at_once_whatever_the_order(sends):
    card = SharedCard(host="a", devices=("a0", "a1"), send_bytes_per_s=0.5e9, receive_bytes_per_s=0.25e9)
    groups = (Replica(devices=("a0", "a1")),), (Replica(devices=("b0", "b1")),)
    stages = tuple(Stage(layers=(k, k), replicas=replicas) for k, replicas in enumerate(groups))
    timeline = simulate(Plan(num_microbatches=1, stages=stages), model(2), two_hosts([card]), sends=sends)
    # Both devices send all of 1 GB, 2 GB through the card.
    for kind, stage, seconds in (("activation", 0, 4.0), ("gradient", 1, 8.0)):
        ((_, start_s, end_s),) = spans(timeline, kind, stage)
        assert end_s - start_s == pytest.approx(seconds)


def test_messages_of_different_stages_share_a_link():
    plan = chain("a0", "b0", "a1", "b1", microbatches=1, schedule="inference")
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
    queue, ends = [], {}
    messages = Messages([Channel(2.0, 1.0, (link,)), Channel(2.0, 1.0, (link,)), Channel(2.0, 1.0)], queue)
    for channel, now in ((0, 0.0), (1, 1.0), (2, 1.0)):
        messages.start(channel, now)
    while queue:
        now, _, who, version = heapq.heappop(queue)
        if messages.ends(~who, version, now):
            ends[~who] = now
    assert ends == {0: 3.0, 1: 4.0, 2: 3.0}


def ahead(profile, seconds):
    """The cluster whose devices are that far ahead when they have waited."""
    devices = tuple(msgspec.structs.replace(d, head_start_s=seconds) for d in profile.devices)
    return msgspec.structs.replace(profile, devices=devices)


def test_who_has_waited_has_a_shorter_pass_and_the_message_its_whole_way():
    timeline = simulate(chain("a0", "b0", microbatches=2), model(2), ahead(two_hosts(), 0.25))
    assert spans(timeline, "forward", 0) == [(0, 0, 1), (1, 1, 2)]
    assert spans(timeline, "activation", 0) == [(0, 1, 2), (1, 2, 3)]
    assert spans(timeline, "forward", 1) == [(0, 2, 2.75), (1, 4.75, 5.75)]  # the second has not waited
    assert spans(timeline, "gradient", 1) == [(0, 4.75, 5.75), (1, 7.75, 8.75)]
    assert spans(timeline, "backward", 0) == [(0, 5.75, 7.5), (1, 8.75, 10.5)]


def test_who_waits_for_a_slower_stage_has_a_shorter_pass():
    """Messages take next to nothing, and where stages wait, it is for each other's passes."""
    workload = model(2, 1.0)
    timeline = simulate(chain("a0", "b0", microbatches=2), workload, ahead(two_hosts(), 0.25))
    assert [round(end - start, 3) for _, start, end in spans(timeline, "forward", 1)] == [0.75, 1.0]
    assert [round(end - start, 3) for _, start, end in spans(timeline, "backward", 0)] == [1.75, 1.75]
    step_s = hwaware.evaluate(chain("a0", "b0", microbatches=2), workload, ahead(two_hosts(), 0.25)).step_s
    assert timeline.step_s == pytest.approx(step_s)


@pytest.mark.parametrize("seconds", [0.25, 1.0, 3.0])
def test_the_judge_and_the_simulator_agree_on_head_starts(seconds):
    """One microbatch: every stage waits for every message."""
    workload, profile = model(3), ahead(two_hosts(), seconds)
    for schedule in ("1f1b", "inference"):
        plan = chain("a0", "b0", "a1", microbatches=1, schedule=schedule)
        step_s = hwaware.evaluate(plan, workload, profile).step_s
        assert simulate(plan, workload, profile).step_s == pytest.approx(step_s)


def test_hidden_messages_share_a_link_all_the_same():
    plan, workload = chain("a0", "b0", "a1", "b1", microbatches=40, schedule="inference"), model(4, 2e9)
    shared = simulate(plan, workload, ahead(two_hosts(), 2.0)).step_s
    assert shared == pytest.approx(4 * 40, rel=0.1)


def test_a_head_start_counts_once_for_messages_that_come_one_after_the_other():
    names = ("a0",), ("b0", "b1")
    stages = tuple(
        Stage(layers=(index, index), replicas=tuple(Replica(devices=(name,)) for name in replicas))
        for index, replicas in enumerate(names)
    )
    plan = Plan(num_microbatches=1, stages=stages)
    timeline = simulate(plan, model(2), ahead(two_hosts(), 0.125), sends="blocking")
    ((_, start_s, end_s),) = spans(timeline, "activation", 0)
    assert end_s - start_s == pytest.approx(1.0)
    ((_, start_s, end_s),) = spans(timeline, "forward", 1)
    assert end_s - start_s == pytest.approx(0.5 - 0.125)  # a replica has half of the samples


def test_each_direction_is_a_link_of_its_own():
    plan, workload = chain("a0", "b0", "a1", microbatches=3, schedule="inference"), model(3, 2e9)
    shared, alone = (simulate(plan, workload, two_hosts(), shared_links=s).step_s for s in (True, False))
    assert shared == alone


@pytest.mark.parametrize(
    ("card", "factor"),
    [
        (SharedCard(host="a", devices=("a0", "a1"), send_bytes_per_s=2e9, receive_bytes_per_s=2e9), 1),
        (SharedCard(host="a", devices=("a0", "a1"), send_bytes_per_s=1e9, receive_bytes_per_s=2e9), 2),
        (
            SharedCard(
                host="a", devices=("a0", "a1"), send_bytes_per_s=9e9, receive_bytes_per_s=9e9,
                concurrent=(ConcurrentRate(k=1, bytes_per_s=1e9), ConcurrentRate(k=2, bytes_per_s=0.25e9)),
            ),
            4,
        ),
    ],
)  # fmt: skip
def test_cards_slow_messages_down(card, factor):
    profile = two_hosts([card])
    pairs = [("a0", "b0"), ("b0", "a0"), ("a1", "b1"), ("b1", "a1"), ("b0", "a1"), ("a1", "b0")]
    links = [Link(source=s, target=t, latency_s=0, bandwidth_bytes_per_s=1e9) for s, t in pairs]
    profile = msgspec.structs.replace(profile, links=tuple(links))
    plan = chain("a0", "b0", "a1", "b1", microbatches=60, schedule="inference")
    busy = simulate(plan, model(4, 4e9), profile).step_s
    assert busy == pytest.approx(4 * factor * 60, rel=0.15)


def test_devices_inside_a_host_do_not_share():
    plan = chain("a0", "a1", "b0", "b1", microbatches=20, schedule="inference")
    workload = model(4, 2e9)
    shared, alone = (simulate(plan, workload, two_hosts(), shared_links=s).step_s for s in (True, False))
    assert shared == alone


def test_the_judge_and_the_simulator_agree_without_sharing():
    rng = random.Random(5)
    profile = two_hosts()
    for _ in range(40):
        order = rng.sample(["a0", "a1", "b0", "b1"], rng.randint(1, 4))
        workload = model(len(order), rng.choice([0, 1e8, 1e9]), gradient_bytes=1e9)
        for schedule in ("1f1b", "gpipe", "inference"):
            plan = chain(*order, microbatches=rng.randint(1, 12), schedule=schedule)
            timeline = simulate(plan, workload, profile, shared_links=False)
            cost = hwaware.evaluate(plan, workload, profile)
            assert timeline.step_s == pytest.approx(cost.step_s, rel=0.05)
            assert disagreement(timeline, cost) is None
            assert len(timeline.events) >= plan.num_microbatches * len(order)


def test_synchronisation_and_update_come_once():
    profile = two_hosts()
    fast = tuple(msgspec.structs.replace(d, memory_bandwidth_bytes_per_s=1e9) for d in profile.devices)
    profile = msgspec.structs.replace(profile, devices=fast)
    layer = Layer(name="0", forward_flops=1e9, backward_flops=2e9, parameter_bytes=1e9, output_bytes=0,
                  activation_bytes=0)  # fmt: skip
    workload = Workload(name="m", microbatch_size=2, dtype="float32", layers=(layer,))
    stage = Stage(layers=(0, 0), replicas=(Replica(devices=("a0",)), Replica(devices=("b0",))))
    plan = Plan(num_microbatches=3, stages=(stage,))
    timeline = simulate(plan, workload, profile)
    assert [e.kind for e in timeline.events[-2:]] == ["synchronisation", "update"]
    assert timeline.step_s == pytest.approx(hwaware.evaluate(plan, workload, profile).step_s)
    assert timeline.step_s == pytest.approx(3 * (1.5 + 1 + 5) + 1 + 7)  # products, weights; sum, update


def test_renaming_changes_nothing():
    plan = chain("a0", "b0", "a1", "b1", microbatches=9)
    profile = two_hosts()
    other = json.loads(profile.to_json().decode().replace('"a', '"x').replace('"xddress', '"address'))
    renamed = ClusterProfile.from_json(json.dumps(other))
    moved = chain("x0", "b0", "x1", "b1", microbatches=9)
    assert simulate(plan, model(4), profile).step_s == simulate(moved, model(4), renamed).step_s


def test_the_timeline_is_a_record_and_a_trace(tmp_path):
    timeline = simulate(chain("a0", "b0", microbatches=2), model(2), two_hosts())
    timeline.save(tmp_path / "timeline.json")
    assert Timeline.load(tmp_path / "timeline.json") == timeline
    trace = timeline.trace()
    spans_ = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans_) == len(timeline.events)
    assert max(event["ts"] + event["dur"] for event in spans_) == pytest.approx(timeline.step_s * 1e6)
    assert {event["pid"] for event in spans_} == {0, 1}


def test_the_command_writes_a_trace(tmp_path):
    files = [str(DATA / name) for name in ("cluster_three.json", "workload_six_layers.json", "plan_by_hand.json")]
    out = tmp_path / "trace.json"
    result = CliRunner().invoke(main, ["simulate", *files, "-o", str(out), "--json"])
    assert result.exit_code == 0, result.output
    trace = json.loads(out.read_text())
    cluster, workload, plan = ClusterProfile.load(files[0]), Workload.load(files[1]), Plan.load(files[2])
    judged = hwaware.evaluate(plan, workload, cluster).step_s
    assert trace["otherData"]["step_s"] == pytest.approx(judged, rel=0.05)
    assert json.loads(result.stdout)["evaluated_step_s"] == judged
    assert all(event["dur"] >= 0 for event in trace["traceEvents"] if event["ph"] == "X")
    blocking = CliRunner().invoke(main, ["simulate", *files, "-o", str(out), "--sends", "blocking"])
    assert "the closed form says" in blocking.output
    missing = CliRunner().invoke(main, ["simulate", *files[:2], str(tmp_path / "no.json"), "-o", str(out)])
    assert missing.exit_code == 2


def test_unknown_sends_are_refused():
    with pytest.raises(UnusableInputError, match="expected 'overlapped' or 'blocking'"):
        simulate(chain("a0"), model(1), two_hosts(), sends="late")
