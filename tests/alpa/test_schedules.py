"""Every pipeline schedule of Alpa has the order that hwaware says, and computes what plain JAX computes."""

import types

import pytest
from builders import chosen

from hwaware.schedules import pass_order

pytestmark = pytest.mark.alpa


@pytest.fixture(autouse=True)
def _runtime():
    from hwaware.activation import install_runtime

    install_runtime()


@pytest.mark.parametrize("schedule", chosen(["1f1b", "gpipe", "1f1b_overlap_friendly"], 2))
def test_training_schedules(schedule, profile, model):
    from hwaware.bench.training import TrainingRun, single_device_losses

    run = TrainingRun("hwaware", model, profile, 4, 4, 8, schedule=schedule)
    try:
        for _ in range(3):
            run.step()
    finally:
        run.close()
    assert len(run.plan.stages) > 1
    assert run.losses == pytest.approx(single_device_losses(model, 32, 3), rel=1e-4)


@pytest.mark.parametrize(("schedule", "name"), [("1f1b", "PipeDreamFlush"), ("gpipe", "GpipeSchedule")])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 1), (3, 4), (4, 2)])
def test_stages_have_the_order_of_alpas_schedule(schedule, name, stages, microbatches):
    from alpa.pipeline_parallel import schedules

    given = types.SimpleNamespace(
        num_batch=microbatches, num_mesh=stages, apply_grad_placement={}, last_backward_batch_index=microbatches - 1
    )
    ticks = getattr(schedules, name)._generate_schedule(given)
    for stage in range(stages):
        passes = [tick[stage] for tick in ticks if tick[stage]]  # microbatch, and stage or 2 x stages - 1 - stage
        expected = [2 * microbatch + (program >= stages) for microbatch, program in passes]
        assert pass_order(schedule, stage, stages, microbatches) == expected
