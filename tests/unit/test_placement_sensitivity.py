"""explain: what binds, and what would help."""

from __future__ import annotations

import re

import msgspec
import pytest
from builders import DATA, card, chain, cluster, device, layer, timed, workload

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


def test_a_plan_that_does_not_fit_is_no_alternative():
    """Without c, a and b hold one layer each, and three are to be placed."""
    devices = [device(f"{host}:0", seconds, memory_bytes=1100) for host, seconds in (("a", 0.1), ("b", 0.1), ("c", 1))]
    model, profile = workload(3, parameter_bytes=250), cluster(devices)

    def planner(workload, profile):
        return hwaware.plan(workload, profile, num_microbatches=8, solver="even")

    found = explain(planner(model, profile), model, profile, planner=planner)
    assert planner(model, profile.without(("c:0",))).status == "infeasible"
    assert found.next_best.what.startswith("If stages ")


def test_one_more_device_like_one_that_the_workload_names_by_id():
    """Its layers take 3 s there, and 0.3 s by the device's products."""
    times = {f"{host}:0": timed(1, 2)["cpu"] for host in "abc"}
    model, three = workload(3, measured=times), cluster("abc", seconds=0.1)

    def planner(workload, profile):
        return hwaware.plan(workload, profile, num_microbatches=4, solver="even")

    two = three.without(("c:0",))
    found = explain(planner(model, two), model, two, planner=planner)
    assert found.one_more.what == "One more device like a:0 (cpu)"
    assert found.one_more.step_s == pytest.approx(planner(model, three).predicted_step_s)


def explained(tmp_path, capfd, profile, model, *options):
    from hwaware.cli import main

    profile.save(tmp_path / "cluster.json")
    model.save(tmp_path / "workload.json")
    with pytest.raises(SystemExit) as ended:
        main(["plan", *(str(tmp_path / f"{name}.json") for name in ("cluster", "workload")), "--explain", *options])
    assert not ended.value.code
    return capfd.readouterr().out


def fast_and_slow(**of_devices):
    return cluster([device("a:0", seconds=0.1, **of_devices), device("b:0", seconds=0.2, **of_devices)])


def test_the_next_best_plan_keeps_pins(tmp_path, capfd):
    options, exchange = ("--microbatches", "8"), "If stages 0 and 1 exchange their devices"
    model = two_layers(first=3e9)
    assert exchange in explained(tmp_path, capfd, fast_and_slow(), model, *options)
    said = explained(tmp_path, capfd, fast_and_slow(), model, *options, "--pin", "0=b", "--pin", "1=a")
    assert "If stage" not in said, "each of the other plans breaks a pin"
    assert "Stage 0 limits it." in said


def test_the_next_best_plan_keeps_the_reserve(tmp_path, capfd):
    layers = [layer(1e9, parameter_bytes=100), layer(3e9, parameter_bytes=200)]
    profile = cluster(
        [device("a:0", seconds=0.1, memory_bytes=900), device("b:0", seconds=0.2, memory_bytes=1000)], between=(1e9,)
    )
    free = explained(tmp_path, capfd, profile, workload(layers), "--microbatches", "8", "--max-devices-per-stage", "1")
    assert "If stages 0 and 1 exchange their devices" in free
    kept = explained(tmp_path, capfd, profile, workload(layers), "--microbatches", "8", "--reserve", "150")
    assert "b:0" in kept, "the second layer needs 800 bytes, and a:0 has 750"
    assert "exchange their devices" not in kept


def test_the_plan_with_one_more_device_reserves_once(tmp_path, capfd):
    profile = cluster("ab", seconds=0.1, memory_bytes=1000)
    said = explained(
        tmp_path, capfd, profile, workload(3, parameter_bytes=50), "--microbatches", "8", "--reserve", "550"
    )
    assert "One more device like" in said, "two layers need 400 bytes of the 450 that the reserve leaves"


def test_the_command_says_it(tmp_path, capfd):
    from hwaware.cli import main

    files = [str(DATA / "cluster_three.json"), str(DATA / "workload_six_layers.json")]
    with pytest.raises(SystemExit) as ended:
        main(["plan", *files, "--microbatches", "8", "-o", str(tmp_path / "plan.json"), "--explain"])
    assert not ended.value.code
    assert " limits it." in capfd.readouterr().out
