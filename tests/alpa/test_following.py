"""A training whose device becomes slower, by made-up times: hwaware notices, says what it would do, or does it."""

import contextlib

import pytest
from click.testing import CliRunner

from hwaware.cli import main

pytestmark = pytest.mark.alpa
# Four microbatches of seven samples: no stage can have replicas, so every placement is a chain.
BATCH = 28
SLOW_FROM, STEPS = 15, 40


@pytest.fixture(autouse=True)
def _runtime(worker_pool):
    from hwaware.activation import install_runtime

    install_runtime()


@contextlib.contextmanager
def training(profile, model, **options):
    """Yield a function that does a step, and returns its loss."""
    import alpa

    import hwaware
    from hwaware.patching import meshes

    mesh = meshes.cluster_mesh(meshes.device_counts(profile))
    method = alpa.PipeshardParallel(
        devices=mesh, num_micro_batches=4, layer_option=alpa.AutoLayerOption(layer_num=4), stage_option="auto"
    )
    state = [model.initial_state(0)]

    def train(number):
        state[0], loss = step(state[0], model.batch(number, BATCH))
        return float(loss._value)

    with hwaware.enabled(profile, costs="model", **options):
        step = alpa.parallelize(
            lambda state, batch: model.train_step(state, batch, value_and_grad=alpa.value_and_grad), method=method
        )
        try:
            yield train
        finally:
            mesh.launched_physical_mesh_group.shutdown()


@pytest.fixture
def slow_first_device(monkeypatch):
    """Let the driver read times of the first device that are three times as long from a step on."""
    from hwaware.adapting.following import Follower

    observe = Follower.observe

    def slower(self, times):
        self.switch_s = 0.05
        steady = {name: 3.0 if self._number >= SLOW_FROM and name == "here:0" else 1.0 for name in times.seconds}
        return observe(self, times._replace(seconds=steady))

    monkeypatch.setattr(Follower, "observe", slower)


def test_it_says_what_it_would_do_or_does_it_with_equal_losses(slow_first_device, profile, model, tmp_path):
    import hwaware

    losses, plans, histories = [], [], []
    for adapt in (True, "log"):
        with training(profile, model, adapt=adapt) as train:
            losses.append([train(number) for number in range(STEPS)])
            plans.append(hwaware.last_plan())
        histories.append(hwaware.last_history())
        assert hwaware.last_profile() != profile
    assert losses[0] == losses[1]
    for history in histories:
        noticed = history.events[0]
        assert noticed.kind == "noticed"
        assert noticed.numbers == {"here:0": pytest.approx(3.0)}
        assert SLOW_FROM < noticed.call <= SLOW_FROM + 10
    done, said = ([event.kind for event in history.events] for history in histories)
    assert set(said) == {"noticed", "decided"}
    assert histories[1].events[-1].what.startswith("would move")
    assert done.index("noticed") < done.index("decided") < done.index("moved")
    assert plans[0].stages != plans[1].stages
    histories[0].save(tmp_path / "history.json")
    shown = CliRunner().invoke(main, ["show", str(tmp_path / "history.json")])
    assert shown.exit_code == 0, shown.output
    assert "here:0 x 3.00" in shown.stdout


def test_a_program_that_fixes_its_stages_is_told_that_adapt_has_no_effect(pipeline, profile, model, caplog):
    import hwaware

    def step(state, batch):
        import alpa

        return model.train_step(state, batch, value_and_grad=alpa.value_and_grad)

    with hwaware.enabled(profile, costs="model", adapt="log"):
        pipeline(step, model.initial_state(), model.batch(0, 8), stages=2)
    assert "adapt has no effect on a program whose stages hwaware does not choose." in caplog.text
