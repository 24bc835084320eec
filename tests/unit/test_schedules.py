"""Steps whose passes vary: without variation they are the simulator's; neighbours that take equally long wait most."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from builders import cluster, device, layer, plan, timed, workload

import hwaware
from hwaware.costs import step_interval
from hwaware.costs.intervals import RECORDED, late_s
from hwaware.schedules import varied_steps_s

NOTHING = ([0.0], [0.0])


def two_stages(first_s=1.0, second_s=1.0, deviation_s=None, **more):
    """Build a plan, a workload and a cluster of two stages; backward takes twice the seconds of forward."""
    times = [timed(each, 2 * each, deviation_s=deviation_s) for each in (first_s, second_s)]
    model = workload([layer(measured=each, output_bytes=1e8) for each in times])
    profile = cluster([device("a:0", **more), device("b:0", **more)], between=(1e9,))
    return plan((0, 0, "a:0"), (1, 1, "b:0"), num_microbatches=8), model, profile


@pytest.mark.parametrize("head_start_s", [None, 0.04, 0.4])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "inference"])
def test_without_variation_a_step_is_the_simulators(schedule, head_start_s):
    two, model, profile = two_stages(0.7, 0.9, head_start_s=head_start_s)
    two = msgspec.structs.replace(two, schedule=schedule)
    events = hwaware.simulate(two, model, profile, shared_links=False).events
    last = max(event.end_s for event in events if event.kind in ("forward", "backward"))
    sent = ([0.1], [0.1])
    ahead = ([head_start_s or 0.0], [head_start_s or 0.0])
    assert varied_steps_s(schedule, 8, ([0.7, 0.9], [1.4, 1.8]), [0.0, 0.0], sent, ahead, 1) == pytest.approx([last])


def test_neighbours_that_take_equally_long_wait_for_each_other():
    def added(*turns):
        passes = [t / 3 for t in turns], [2 * t / 3 for t in turns]
        given = "1f1b", 8, passes
        one = varied_steps_s(*given, [0.1] * len(turns), NOTHING, NOTHING, 2000)
        return one.mean() - varied_steps_s(*given, [0.0] * len(turns), NOTHING, NOTHING, 1).mean()

    alone, unlike, alike = added(1.0), added(1.0, 0.4), added(1.0, 1.0)
    assert alone == pytest.approx(0.0, abs=0.03), "a sum of passes has the sum of their means"
    assert unlike < 0.2 * alike
    # Nothing is as bad as two stages in step: 16 passes, each the later of two.
    assert alike < 16 * 0.1 / np.sqrt(np.pi)


def test_the_likely_step_includes_the_waits():
    two, model, profile = two_stages(deviation_s=0.2)
    found = step_interval(two, model, profile)
    late = late_s(two, model, profile)
    assert 0.02 * found.step_s < late < 0.2 * found.step_s
    assert np.log(found.likely_s / (found.step_s + late)) == pytest.approx(RECORDED["measured"].middle)
    assert late_s(*two_stages()) == 0.0, "nobody measured how passes vary"


def test_the_waits_of_many_microbatches_are_scaled_up():
    two, model, profile = two_stages(deviation_s=0.2)
    few, many = (late_s(msgspec.structs.replace(two, num_microbatches=n), model, profile) for n in (1000, 4000))
    assert many == pytest.approx(4 * few)
