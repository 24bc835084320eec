"""enable and disable: Alpa's automatic stage construction becomes hardware-aware, and afterwards all is as it was."""

import sys
import threading

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
    nothing = object()
    return [key for key in before.keys() | after.keys() if before.get(key, nothing) is not after.get(key, nothing)]


@pytest.fixture
def before(nothing_overridden):
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


def test_twice_in_a_row(before, profile):
    import hwaware

    for _ in range(2):
        with hwaware.enabled(profile):
            assert difference(before, attributes_of_alpa())
        assert difference(before, attributes_of_alpa()) == []


def test_a_failure_while_enabling_changes_nothing(before, profile, monkeypatch):
    import hwaware
    from hwaware.patching import stage_option

    def broken(original):
        raise KeyError

    monkeypatch.setattr(stage_option.PATCH, "_make", broken)
    with pytest.raises(KeyError):
        hwaware.enable(profile)
    assert difference(before, attributes_of_alpa()) == []
    hwaware.disable()  # silent: nothing is enabled


@pytest.mark.thorough
def test_in_threads(before, profile):
    """Blocks that overlap, none inside another: each ends its own, and the last one restores all."""
    import hwaware
    from hwaware.patching.stage_option import _Default

    settings = [("here:1",), ("here:2",)]
    at_once, failures = threading.Barrier(2, timeout=60), []

    def run(index):
        try:
            for _ in range(20):
                at_once.wait()
                with hwaware.enabled(profile, exclude=settings[index]):
                    assert _Default.settings is not None
        except Exception as error:  # noqa: BLE001 - the main thread reports it
            failures.append(error)
            at_once.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert failures == []
    assert _Default.settings is None
    assert difference(before, attributes_of_alpa()) == []


def test_a_block_ends_its_own_enable_only(before, profile):
    import hwaware
    from hwaware.patching.stage_option import _Default

    first, second = hwaware.enabled(profile, exclude=("here:1",)), hwaware.enabled(profile, exclude=("here:2",))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert _Default.settings.exclude == ("here:2",)
    second.__exit__(None, None, None)
    assert _Default.settings is None
    assert difference(before, attributes_of_alpa()) == []


@pytest.mark.parametrize("place", ["override", "leaf"])
def test_a_foreign_patch_on_top_is_refused_and_nothing_is_changed(before, profile, place):
    import alpa.pipeline_parallel.compile_executable as compile_executable

    import hwaware
    from hwaware.errors import AlpaError

    name = {"override": "cluster_layers_and_slice_mesh", "leaf": "shard_each_stage"}[place]
    hwaware.enable(profile)
    ours = getattr(compile_executable, name)
    setattr(compile_executable, name, lambda *_, **__: "foreign")
    with_both = attributes_of_alpa()
    with pytest.raises(AlpaError, match=f"{name} was replaced by somebody else.*To fix:"):
        hwaware.disable()
    assert difference(with_both, attributes_of_alpa()) == []
    setattr(compile_executable, name, ours)
    hwaware.disable()
    assert difference(before, attributes_of_alpa()) == []


def test_inside_a_worker_of_ray(local_ray, profile):
    import ray

    def run():
        import hwaware
        from hwaware.patching import stock_jax

        stock_jax.install()
        before = attributes_of_alpa()
        with hwaware.enabled(profile):
            changed = len(difference(before, attributes_of_alpa()))
        return changed, len(before), difference(before, attributes_of_alpa())

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    changed, count, left = ray.get(ray.remote(num_cpus=0)(run).remote(), timeout=120)
    assert changed > 0
    assert count > 1000
    assert left == []


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


@pytest.mark.parametrize("named", [(), (-1,)])
def test_a_function_whose_batch_has_no_name_is_refused(before, profile, model, named):
    import alpa

    import hwaware
    from hwaware.errors import AlpaError
    from hwaware.patching import meshes

    with hwaware.enabled(profile):
        method = alpa.PipeshardParallel(devices=meshes.cluster_mesh(meshes.device_counts(profile)), stage_option="auto")
        step = alpa.parallelize(
            lambda state, batch: model.train_step(state, batch, value_and_grad=alpa.value_and_grad),
            method=method,
            batch_argnums=named,
        )
        with pytest.raises(AlpaError, match=r"has no batch: batch_argnums.*To fix:"):
            step(model.initial_state(), model.batch(0, 16))


def test_what_was_placed_in_a_block_is_shut_down_after_it(before, profile, model, tmp_path):
    import alpa

    import hwaware
    from hwaware import activation
    from hwaware.patching import meshes

    profile.save(tmp_path / "cluster.json")
    assert hwaware.HardwareAwareStageOption(str(tmp_path / "cluster.json")).profile == profile
    for patch in activation.patches():
        patch.revert()
    activation._explicit.clear()
    with hwaware.enabled(str(tmp_path / "cluster.json")):
        mesh = meshes.cluster_mesh(meshes.device_counts(profile))
        method = alpa.PipeshardParallel(
            devices=mesh,
            num_micro_batches=2,
            layer_option=alpa.AutoLayerOption(layer_num=4),
            stage_option="auto",
        )
        step = alpa.parallelize(
            lambda state, batch: model.train_step(state, batch, value_and_grad=alpa.value_and_grad), method=method
        )
        _, loss = step(model.initial_state(), model.batch(0, 16))
        assert float(loss._value) > 0
    assert not any(patch.applied for patch in activation.patches())
    group = mesh.launched_physical_mesh_group
    assert group.get_max_memory_allocated() > 0
    assert all(worker is not None for one in group.meshes for worker in one.workers)
    group.shutdown()
    assert all(one.workers is None for one in group.meshes)


def test_a_step_that_raises_leaves_jax_as_it_was(before, profile):
    import alpa
    import jax

    import hwaware
    from hwaware.patching import meshes

    samplers = {name: getattr(jax.random, name) for name in ("uniform", "normal", "bernoulli", "fold_in")}
    with hwaware.enabled(profile):
        mesh = meshes.cluster_mesh(meshes.device_counts(profile))
        method = alpa.PipeshardParallel(devices=mesh, num_micro_batches=2, stage_option="auto")

        def broken(state, batch):
            raise KeyError

        with pytest.raises(KeyError):
            alpa.parallelize(broken, method=method)(jax.numpy.ones(4), jax.numpy.ones((8, 4)))
    assert {name: getattr(jax.random, name) for name in samplers} == samplers


def test_every_target_is_the_one_that_was_written_against(before):
    from hwaware import activation

    for patch in activation.patches():
        patch.check()
    assert len(activation.patches()) > 9


def test_alpa_is_imported_without_cupy_where_there_is_a_gpu(tmp_path):
    """Alpa takes a host whose nvidia-smi answers for one with GPUs, and imports CuPy there."""
    import os
    import subprocess
    import sys

    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\nexit 0\n")
    driver.chmod(0o755)
    text = "from hwaware.patching import stock_jax; stock_jax.install(); import alpa; " + (
        "from alpa.global_env import global_config; import sys; print(global_config.has_cuda, 'cupy' in sys.modules)"
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text],
        env={**os.environ, "PATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == ["True", "False"], done.stderr[-2000:]
