"""Alpa's driver, schedule and interpreter on hwaware's runtime: the plan is run, the losses are plain JAX's."""

import builders
import pytest

pytestmark = pytest.mark.alpa


@pytest.fixture(autouse=True)
def _runtime():
    from hwaware.activation import install_runtime

    install_runtime()


def test_the_placed_model_trains_like_plain_jax(profile, model):
    import hwaware
    from hwaware.bench.training import TrainingRun, single_device_losses

    run = TrainingRun("hwaware", model, profile, num_layers=4, num_microbatches=4, microbatch_size=8)
    try:
        assert all(run.step() > 0 for _ in range(5))
    finally:
        run.close()
    assert run.plan.status == "optimal"
    # The fast device alone, the two slow ones together: replicas of one stage.
    assert [stage.devices for stage in run.plan.stages] == [("here:0",), ("here:1", "here:2")]
    assert len(run.plan.stages[1].replicas) == 2
    assert run.plan == hwaware.last_plan()
    assert run.losses == pytest.approx(single_device_losses(model, 32, 5), rel=1e-4)
    assert run.losses[-1] < run.losses[0]


def test_the_batch_lies_on_the_devices_before_a_steps_time_begins(profile, model, monkeypatch):
    """Each stage's state the first time, and its part of the batch; Alpa itself sends nothing more when it launches."""
    import alpa.device_mesh

    from hwaware.bench.training import TrainingRun
    from hwaware.patching import failures

    happened = []

    def noting(what, function):
        return lambda *args, **options: (happened.append(what), function(*args, **options))[1]

    run = TrainingRun("hwaware", model, profile, num_layers=4, num_microbatches=4, microbatch_size=8)
    try:
        run.step()
        monkeypatch.setattr(alpa.device_mesh, "_shard_array", noting("sent", alpa.device_mesh._shard_array))
        monkeypatch.setattr(failures, "ask_all", lambda _, what, __: happened.append(what))
        monkeypatch.setattr(failures, "wait_for", lambda all_, _: hasattr(all_, "meshes") and happened.append("sync"))
        run.step()
        assert happened == ["sent", "sent", "settle", "work", "sync", "rest"]
    finally:
        run.close()
    assert not any("shard_args_to_bufs" in vars(mesh) for mesh in run._executable.mesh_group)


def test_a_given_plan_is_run_on_its_devices(profile, model):
    from hwaware.bench.training import TrainingRun

    plan = builders.plan((0, 2, "here:2"), (3, 3, "here:0"))
    run = TrainingRun("hand", model, profile, 4, 4, 8, plan)
    try:
        run.step()
        meshes = run._mesh.launched_physical_mesh_group.meshes
        assert [mesh.devices for mesh in meshes] == [[[2]], [[0]]]
    finally:
        run.close()


def test_a_plan_for_another_program_is_refused(profile, model):
    from hwaware.bench.training import TrainingRun
    from hwaware.errors import PlanError

    with pytest.raises(PlanError, match="7 layers and 4 microbatches, the program has 4 layers"):
        TrainingRun("hand", model, profile, 4, 4, 8, builders.plan((0, 6, "here:0")))


def test_a_plan_that_names_an_unknown_device_is_refused(profile, model):
    from hwaware.bench.training import TrainingRun
    from hwaware.errors import PlanError

    with pytest.raises(PlanError, match=r"'mars:0'.*To fix:"):
        TrainingRun("hand", model, profile, 4, 4, 8, builders.plan((0, 3, "mars:0")))


def test_a_profile_of_another_cluster_is_refused(profile):
    import msgspec

    from hwaware.cluster import Host
    from hwaware.errors import ProfileMismatchError
    from hwaware.patching import meshes

    other = msgspec.structs.replace(profile, hosts=(Host(name="here", address="203.0.113.7"),))
    mesh = meshes.cluster_mesh(meshes.device_counts(profile))
    with pytest.raises(ProfileMismatchError, match=r"another cluster.*203\.0\.113\.7.*To fix:"):
        meshes.restrict(other, mesh)


def test_a_model_that_fits_nowhere_is_refused(profile, model):
    from hwaware.bench.training import TrainingRun
    from hwaware.errors import InfeasibleError

    with pytest.raises(InfeasibleError, match="To fix:"):
        TrainingRun("hwaware", model, builders.with_devices(profile, memory_bytes=1000), 4, 4, 8)


def test_alpas_own_mapping_is_alpas_own(profile, model):
    """Equal layers, every device used, and equal submeshes handed out in reverse order."""
    from hwaware.bench.alpa_mapping import alpa_plan

    workload = builders.workload(6, parameter_bytes=1e6, output_bytes=1e5, activation_bytes=1e5)
    # One host of three devices, which Alpa refuses: each counts as a host.
    plan = alpa_plan(workload, profile, 8, ["here"])
    assert [stage.layers for stage in plan.stages] == [(0, 1), (2, 3), (4, 5)]
    assert [stage.devices for stage in plan.stages] == [("here:2",), ("here:1",), ("here:0",)]


def test_what_a_benchmark_times_neither_survives_nor_adapts(model, profile):
    """Whatever the environment says: copies of the state would take part of the steps."""
    import hwaware
    from hwaware.bench.training import TrainingRun
    from hwaware.patching import observing, rescue

    with hwaware.enabled(profile, survive=True, adapt="log"):
        run = TrainingRun("hwaware", model, profile, 4, 4, 8)
        try:
            assert rescue.run_of(run._executable.mesh_group) is None
            assert observing._adapter_of(run._executable) is None
            assert rescue.current() is not None
        finally:
            run.close()
