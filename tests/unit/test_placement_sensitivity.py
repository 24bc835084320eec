"""explain: what binds, and what would help."""

from __future__ import annotations

import re

import msgspec
import pytest
from builders import DATA, card, chain, cluster, layer, workload

import hwaware
from hwaware.placement import explain


def two_hosts(rate):
    return cluster("ab", between=(rate,), seconds=0.1, memory_bytes=1000)


def two_layers(first=1e9, second=1e9, parameter_bytes=0.0):
    layers = [layer(flops, flops, parameter_bytes=parameter_bytes, output_bytes=1e6) for flops in (first, second)]
    return workload(layers)


PLAN = chain("a:0", "b:0", num_microbatches=8)


@pytest.mark.parametrize(
    ("model", "rate", "binds"),
    [
        (two_layers(first=4e9), 1e9, "stage 0"),
        (two_layers(second=4e9), 1e9, "stage 1"),
        (two_layers(), 1e5, "link 0 -> 1"),
    ],
)
def test_it_says_what_binds(model, rate, binds):
    found = explain(PLAN, model, two_hosts(rate))
    assert found.binds == binds
    assert found.sentences()[0].endswith(f" {binds[0].upper()}{binds[1:]} limits it.")
    assert found.stages[0].saves_s >= found.stages[1].saves_s >= 0


def test_half_the_time_on_the_link_saves_that_much():
    slow, fast = (hwaware.evaluate(PLAN, two_layers(), two_hosts(rate)).step_s for rate in (1e6, 2e6))
    assert explain(PLAN, two_layers(), two_hosts(1e6)).links[0].saves_s == pytest.approx(slow - fast)


def test_a_binding_card_doubles_with_its_link():
    slow = card("a:0", "a:1", send=1e5)
    profile = cluster({"a": 2, "b": 2}, cards=[slow], seconds=0.1, memory_bytes=1000)
    model, seen = msgspec.structs.replace(two_layers(), microbatch_size=2), []

    def planner(model, changed):
        seen.append(changed.shared_cards[0].devices)
        return hwaware.plan(model, changed, num_microbatches=8)

    plan = chain(["a:0", "a:1"], ["b:0", "b:1"], num_microbatches=8)
    found = explain(plan, model, profile, planner=planner)
    assert found.binds == "link 0 -> 1"
    assert found.links[0].step_s == pytest.approx(hwaware.evaluate(plan, model, profile).step_s / 2, rel=0.1)
    assert ("a:0", "a:1", "a:0 (one more)") in seen


def test_nearly_full_memory_is_named():
    found = explain(PLAN, two_layers(parameter_bytes=245), two_hosts(1e9))  # 4 x 245 of 1000 bytes
    assert found.full == (0, 1)
    assert "Memory is nearly full on stage 0, 1." in found.sentences()


def test_next_best_and_one_more_are_planned_again():
    def planner(workload, profile):
        return hwaware.plan(workload, profile, num_microbatches=8)

    best = planner(two_layers(), two_hosts(1e9))
    found = explain(best, two_layers(), two_hosts(1e9), planner=planner)
    assert found.next_best.saves_s < 0
    sentence = r"(If stage \d+ ends with layer \d+|If stages \d+ and \d+ exchange their devices|Without \S+): "
    sentence += r"the step gets \S+ m?s longer\. This is the next-best plan\."
    assert re.fullmatch(sentence, found.sentences()[-1])
    assert found.one_more.step_s <= best.predicted_step_s * (1 + 1e-12)


def test_the_command_says_it(tmp_path, capfd):
    from hwaware.cli import main

    files = [str(DATA / "cluster_three.json"), str(DATA / "workload_six_layers.json")]
    with pytest.raises(SystemExit) as ended:
        main(["plan", *files, "--microbatches", "8", "-o", str(tmp_path / "plan.json"), "--explain"])
    assert not ended.value.code
    assert " limits it." in capfd.readouterr().out
