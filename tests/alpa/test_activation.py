"""enable and disable: Alpa's automatic stage construction becomes hardware-aware, and afterwards all is as it was."""

import sys

import pytest

pytestmark = pytest.mark.alpa


def attributes_of_alpa():
    """(module, name) -> the object, for every attribute of every module of Alpa and every attribute of its classes."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name.split(".")[0] != "alpa":
            continue
        for name, value in vars(module).items():
            found[module_name, name] = value
            if isinstance(value, type) and value.__module__.startswith("alpa"):
                found.update({(module_name, name, key): member for key, member in vars(value).items()})
    return found


def difference(before, after):
    return [key for key in before.keys() | after.keys() if before.get(key) is not after.get(key)]


@pytest.fixture
def before():
    from hwaware.patching import leaves, stage_option, stock_jax

    stock_jax.install()
    # Explicit stage options keep the override in place for the life of the process; these tests look at enable alone.
    while any(patch.applied for patch in (*leaves.PATCHES.patches, stage_option.PATCH)):
        for patch in (*leaves.PATCHES.patches, stage_option.PATCH):
            patch.revert()
    from hwaware.patching import activation

    activation._explicit.clear()
    return attributes_of_alpa()


def test_enable_changes_alpa_and_disable_restores_it(before, profile):
    import hwaware

    hwaware.enable(profile)
    assert difference(before, attributes_of_alpa())
    hwaware.disable()
    assert difference(before, attributes_of_alpa()) == []
    hwaware.disable()  # silent


def test_nested_and_after_an_exception(before, profile):
    import hwaware

    with pytest.raises(KeyError), hwaware.enabled(profile), hwaware.enabled(profile, exclude=("here:1",)):
        raise KeyError
    assert difference(before, attributes_of_alpa()) == []


def test_a_bad_profile_changes_nothing(before, tmp_path):
    import hwaware
    from hwaware.errors import RecordError

    with pytest.raises(RecordError):
        hwaware.enable(tmp_path / "none.json")
    assert difference(before, attributes_of_alpa()) == []


def test_auto_is_hardware_aware_while_enabled(before, profile, model):
    import alpa

    import hwaware
    from hwaware.patching import meshes

    with hwaware.enabled(profile, exclude=("here:1",)):
        mesh = meshes.cluster_mesh(meshes.device_counts(profile))
        method = alpa.PipeshardParallel(
            devices=mesh, num_micro_batches=2, layer_option=alpa.AutoLayerOption(layer_num=4), stage_option="auto"
        )
        step = alpa.parallelize(
            lambda state, batch: model.train_step(state, batch, value_and_grad=alpa.value_and_grad), method=method
        )
        _, loss = step(model.initial_state(), model.batch(0, 16))
        assert float(loss._value) > 0
        used = {device for stage in hwaware.last_plan().stages for device in stage.devices}
        assert "here:0" in used
        assert "here:1" not in used
        mesh.launched_physical_mesh_group.shutdown()


def test_every_target_is_the_one_that_was_written_against(before):
    from hwaware.patching import activation

    for patch in activation.patches():
        patch.check()
    assert len(activation.patches()) == 9
