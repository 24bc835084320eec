"""A step that was recorded: every instruction once, in an order that can be, in the simulator's own format."""

import pytest
from builders import chosen

pytestmark = pytest.mark.alpa


@pytest.fixture(autouse=True)
def _runtime():
    from hwaware.activation import install_runtime

    install_runtime()


def follows(timeline, stages):
    """Whether each message leaves when its forward pass has ended, and comes before the next stage's begins."""
    by = {(event.kind, event.stage, event.microbatch): event for event in timeline.events}
    pairs = [(stage, microbatch) for stage in range(stages - 1) for microbatch in range(4)]
    return all(
        by["forward", stage, k].end_s <= by["activation", stage, k].start_s + 1e-3
        and by["activation", stage, k].end_s <= by["forward", stage + 1, k].start_s + 1e-3
        for stage, k in pairs
    )


def test_a_stage_of_two_replicas_sends_every_gradient_once(profile, model):
    from hwaware.bench.groups import recorded_step
    from hwaware.bench.training import TrainingRun
    from hwaware.plans import Plan, Replica, Stage

    first, *others = (Replica(devices=(device.id,)) for device in profile.devices)
    stages = (Stage(layers=(0, 1), replicas=(first,)), Stage(layers=(2, 3), replicas=tuple(others)))
    run = TrainingRun("replicas", model, profile, 4, 4, 8, Plan(num_microbatches=4, stages=stages))
    try:
        timeline = recorded_step(run)
    finally:
        run.close()
    for kind in ("activation", "gradient"):  # a half to or from each replica; Alpa's own plan sends gradients twice
        assert sorted(e.microbatch for e in timeline.events if e.kind == kind) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("sends", chosen(["overlapped", "blocking"], 0))
def test_a_recorded_step(sends, profile, model):
    import hwaware
    from hwaware.bench.training import TrainingRun, single_device_losses

    timelines = []
    with hwaware.runtime_settings(sends=sends):
        run = TrainingRun("hwaware", model, profile, 4, 4, 8)
    try:
        run.step()
        for _ in range(3):
            with run.recorded(timelines):
                run.step()
        run.step()
        alone_s = tuple(run.alone_s())
        named = hwaware.StepRecorder(run._executable)
        named.start()
        names = named.stop().devices
    finally:
        run.close()
    assert run.losses == pytest.approx(single_device_losses(model, 32, 5), rel=1e-4)
    stages = len(run.plan.stages)
    # The end of a program is noted by a thread, which a busy machine may wake late: not in each of three steps.
    timeline = next((one for one in timelines if follows(one, stages)), timelines[-1])
    assert follows(timeline, stages)
    assert (timeline.sends, timeline.schedule, timeline.num_microbatches) == (sends, "1f1b", 4)
    assert timeline.devices == tuple(stage.devices for stage in run.plan.stages)
    address = profile.hosts[0].address
    assert names == tuple(tuple(f"{address}:{name[-1]}" for name in stage.devices) for stage in run.plan.stages)
    for stage in range(stages):
        mine = [event for event in timeline.events if event.stage == stage]
        for kind in ("forward", "backward"):
            assert sorted(event.microbatch for event in mine if event.kind == kind) == [0, 1, 2, 3]
        assert sum(event.kind == "update" for event in mine) == 1
        programs = sorted((e.start_s, e.end_s) for e in mine if e.kind in ("forward", "backward", "update"))
        assert all(before[1] <= after[0] for before, after in zip(programs, programs[1:]))
    assert 0 < timeline.step_s == max(event.end_s for event in timeline.events)
    assert all(len(times) == 3 and min(times) > 0 for times in alone_s)
