"""Every pipeline schedule of Alpa runs on hwaware's runtime and computes what plain JAX computes."""

import pytest
from builders import chosen

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
