"""Stages that the program fixes stay, on the best devices on request; where hwaware does not apply, Alpa's own runs."""

import itertools
import logging
from types import SimpleNamespace

import msgspec
import pytest
from builders import chosen

pytestmark = pytest.mark.alpa


def compiled(address, model, stage_option, layers, devices):
    """(step function, Alpa's mesh) for a stage option; call it while hwaware is enabled."""
    import alpa

    from hwaware.patching import meshes

    mesh = meshes.cluster_mesh([(address, devices)])
    method = alpa.PipeshardParallel(
        devices=mesh,
        num_micro_batches=2,
        layer_option=alpa.AutoLayerOption(layer_num=layers),
        stage_option=stage_option,
    )
    step = alpa.parallelize(
        lambda state, batch: model.train_step(state, batch, value_and_grad=alpa.value_and_grad), method=method
    )
    return step, mesh


def three_d(address):
    """The stage option of Alpa's get_3d_parallel_method for two stages on two devices."""
    import alpa

    from hwaware.patching import meshes

    alpa.set_global_virtual_physical_mesh(meshes.cluster_mesh([(address, 2)]))
    try:
        return alpa.get_3d_parallel_method(2, data_parallel=1, operator_parallel=1, pipeline_parallel=2).stage_option
    finally:
        alpa.set_global_virtual_physical_mesh(None)


def devices_of_stages(mesh):
    return [list(worker_mesh.devices[0]) for worker_mesh in mesh.launched_physical_mesh_group.meshes]


@pytest.mark.parametrize(
    ("kind", "request_it"), chosen([*itertools.product(["manual", "uniform", "3d"], [False, True])], 3)
)
def test_stages_that_the_program_fixes(local_ray, profile, model, caplog, monkeypatch, request_it, kind):
    import hwaware
    from hwaware.patching import choosing

    given, best_order = [], choosing.best_order
    monkeypatch.setattr(choosing, "best_order", lambda *how: (given.append(how[-1]), best_order(*how))[1])
    caplog.set_level(logging.INFO, logger="hwaware")
    # Ten times as fast, so that the gain exceeds the error of predictions.
    (first, *others) = profile.devices
    products = tuple(msgspec.structs.replace(one, seconds=one.seconds / 10) for one in first.throughput["float32"])
    fast = msgspec.structs.replace(first, throughput={"float32": products})
    profile = msgspec.structs.replace(profile, devices=(fast, *others))
    with hwaware.enabled(profile, place_fixed_stages=request_it, reserve_bytes=1e6):
        from alpa import ManualStageOption, UniformStageOption

        # Under Alpa equal meshes get devices in reverse order.
        option, layers, alpas = {
            "manual": (ManualStageOption([[0, 1], [2], [3]], [(1, 1)] * 3, [(1, 1)] * 3, [{}] * 3), 4, [[2], [1], [0]]),
            "uniform": (UniformStageOption(2), 2, [[1], [0]]),
            "3d": (three_d(local_ray), 2, [[1], [0]]),
        }[kind]
        step, mesh = compiled(local_ray, model, option, layers, devices=len(alpas))
        _, loss = step(model.initial_state(), model.batch(0, 16))
        assert float(loss._value) > 0
        found = devices_of_stages(mesh)
        mesh.launched_physical_mesh_group.shutdown()
        mesh.launched_physical_mesh_group = None
    told = [message for message in caplog.messages if "the program's own" in message]
    if not request_it:
        assert (found, told) == (alpas, [])
        return
    assert len(told) == 1
    assert [one.memory_bytes for one in given[0].devices] == [
        one.memory_bytes - 1e6 for one in profile.devices[: len(alpas)]
    ]
    assert [stage.devices for stage in hwaware.last_plan().stages] == [(f"here:{each}",) for (each,) in found]
    assert sorted(found) == sorted(alpas)
    if kind == "manual":
        assert hwaware.last_plan().stages[0].layers == (0, 1)
        assert found[0] == [0]  # two layers on the fastest device


@pytest.fixture
def construction():
    """The override around a stand-in for Alpa's stage construction, called with an automatic option."""
    from hwaware.patching import stage_option, stock_jax

    stock_jax.install()

    def original(virtual_mesh, stage_option):
        return "Alpa's own"

    def call(virtual_mesh, option=None):
        from alpa import AutoStageOption

        return stage_option.hardware_aware(original)(virtual_mesh, option or AutoStageOption())

    return call


@pytest.fixture
def another_cluster(profile):
    """The profile of a cluster that does not run."""
    host = msgspec.structs.replace(profile.hosts[0], address="203.0.113.9")
    return msgspec.structs.replace(profile, hosts=(host,))


def test_another_clusters_profile_leaves_alpa_alone(
    construction, local_ray, profile, another_cluster, monkeypatch, caplog
):
    import hwaware
    from hwaware.patching import meshes, stage_option, stock_jax

    mesh = meshes.cluster_mesh(meshes.device_counts(profile))
    monkeypatch.setattr(stock_jax, "is_needed", lambda: False)
    monkeypatch.setattr(stage_option._Default, "settings", stage_option.PlacementSettings(another_cluster))
    assert construction(mesh) == "Alpa's own"
    (line,) = caplog.messages
    assert line.startswith("Alpa's own mapping runs. The profile is of another cluster")
    assert hwaware.last_plan() is None


def test_without_alpas_jaxlib_or_with_an_option_of_ones_own_it_is_an_error(
    construction, local_ray, profile, another_cluster, monkeypatch
):
    import hwaware
    from hwaware.errors import ProfileMismatchError
    from hwaware.patching import meshes, stage_option, stock_jax

    mesh = meshes.cluster_mesh(meshes.device_counts(profile))
    monkeypatch.setattr(stage_option._Default, "settings", stage_option.PlacementSettings(another_cluster))
    with pytest.raises(ProfileMismatchError):
        construction(mesh)  # stock JAX: Alpa's own search cannot run
    monkeypatch.setattr(stock_jax, "is_needed", lambda: False)
    with pytest.raises(ProfileMismatchError):
        construction(mesh, hwaware.HardwareAwareStageOption(another_cluster))


def test_another_clusters_profile_is_refused_before_the_program_is_traced(local_ray, model, another_cluster):
    import hwaware
    from hwaware.errors import ProfileMismatchError

    def traced(*_, **__):
        raise AssertionError("the program was traced")

    with hwaware.enabled(another_cluster):
        step, _ = compiled(local_ray, SimpleNamespace(train_step=traced), "auto", layers=2, devices=2)
        with pytest.raises(ProfileMismatchError):
            step(model.initial_state(), model.batch(0, 16))
