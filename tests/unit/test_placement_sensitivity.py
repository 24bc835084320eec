"""explain: what binds, and what would help."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import hwaware
from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct, SharedCard
from hwaware.placement import explain
from hwaware.plans import Plan, Replica, Stage
from hwaware.workload import Layer, Workload


def two_hosts(rate):
    boxes = tuple(
        Device(
            id=f"{h}:0", host=h, kind="cpu", memory_bytes=1000,
            throughput={"float32": (MatrixProduct(flops=1e9, seconds=0.1),)},
        )
        for h in "ab"
    )  # fmt: skip
    link = Link(source="a", target="b", latency_s=0, bandwidth_bytes_per_s=rate)
    return ClusterProfile(hosts=(Host(name="a"), Host(name="b")), devices=boxes, links=(link,))


def two_layers(first=1e9, second=1e9, parameters=0.0):
    return Workload(
        name="two", microbatch_size=1, dtype="float32",
        layers=tuple(
            Layer(
                name=str(k), forward_flops=flops, backward_flops=flops, parameter_bytes=parameters, output_bytes=1e6,
                activation_bytes=0,
            )
            for k, flops in enumerate((first, second))
        ),
    )  # fmt: skip


PLAN = Plan(
    num_microbatches=8,
    stages=tuple(Stage(layers=(k, k), replicas=(Replica(devices=(f"{h}:0",)),)) for k, h in enumerate("ab")),
)


@pytest.mark.parametrize(
    ("workload", "rate", "binds"),
    [
        (two_layers(first=4e9), 1e9, "stage 0"),
        (two_layers(second=4e9), 1e9, "stage 1"),
        (two_layers(), 1e5, "link 0 -> 1"),
    ],
)
def test_it_says_what_binds(workload, rate, binds):
    found = explain(PLAN, workload, two_hosts(rate))
    assert found.binds == binds
    assert found.sentences()[0].endswith(f"what binds is {binds}.")
    assert found.stages[0].saves_s >= found.stages[1].saves_s >= 0


def test_half_the_time_on_the_link_saves_that_much():
    slow, fast = (hwaware.evaluate(PLAN, two_layers(), two_hosts(rate)).step_s for rate in (1e6, 2e6))
    assert explain(PLAN, two_layers(), two_hosts(1e6)).links[0].saves_s == pytest.approx(slow - fast)


def test_a_card_that_binds_is_twice_as_fast_with_its_link_and_gets_the_new_device():
    boxes = tuple(
        msgspec.structs.replace(two_hosts(1e9).devices[0], id=f"{h}:{k}", host=h) for h in "ab" for k in (0, 1)
    )
    link = Link(source="a", target="b", latency_s=0, bandwidth_bytes_per_s=1e9)
    inside = tuple(Link(source=h, target=h, latency_s=0, bandwidth_bytes_per_s=1e9) for h in "ab")
    card = SharedCard(host="a", devices=("a:0", "a:1"), send_bytes_per_s=1e5, receive_bytes_per_s=1e5)
    profile = ClusterProfile(
        hosts=(Host(name="a"), Host(name="b")), devices=boxes, links=(link, *inside), shared_cards=(card,)
    )
    stages = tuple(
        Stage(layers=(k, k), replicas=tuple(Replica(devices=(f"{h}:{n}",)) for n in (0, 1))) for k, h in enumerate("ab")
    )
    workload, seen = msgspec.structs.replace(two_layers(), microbatch_size=2), []

    def planner(model, changed):
        seen.append(changed.shared_cards[0].devices)
        return hwaware.plan(model, changed, num_microbatches=8)

    plan = Plan(num_microbatches=8, stages=stages)
    found = explain(plan, workload, profile, planner)
    assert found.binds == "link 0 -> 1"
    assert found.links[0].step_s == pytest.approx(hwaware.evaluate(plan, workload, profile).step_s / 2, rel=0.1)
    assert ("a:0", "a:1", "a:0 (one more)") in seen


def test_nearly_full_memory_is_named():
    found = explain(PLAN, two_layers(parameters=245), two_hosts(1e9))  # 4 x 245 of 1000 bytes
    assert found.full == (0, 1)
    assert "Memory is nearly full on stage 0, 1." in found.sentences()


def test_next_best_and_one_more_are_planned_again():
    def planner(workload, profile):
        return hwaware.plan(workload, profile, num_microbatches=8)

    best = planner(two_layers(), two_hosts(1e9))
    found = explain(best, two_layers(), two_hosts(1e9), planner)
    assert found.next_best.saves_s < 0
    assert "more." in found.sentences()[-1]
    assert found.one_more.step_s <= best.predicted_step_s * (1 + 1e-12)


def test_the_command_says_it(tmp_path, capfd):
    from hwaware.cli import main

    data = Path(__file__).parent.parent / "data"
    files = [str(data / "cluster_three.json"), str(data / "workload_six_layers.json")]
    with pytest.raises(SystemExit) as ended:
        main(["plan", *files, "--microbatches", "8", "-o", str(tmp_path / "plan.json"), "--explain"])
    assert not ended.value.code
    assert "what binds is" in capfd.readouterr().err
