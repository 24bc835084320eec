"""Several functions whose stages hwaware chooses, on the same devices: each has workers of its own."""

import os
import signal

import jax
import numpy
import pytest

pytestmark = pytest.mark.alpa
WIDTH = 16


def weights():
    return {f"w{k}": numpy.full((WIDTH, WIDTH), 0.1 * (k + 1), numpy.float32) for k in range(4)}


def network(params, batch, mark=lambda: None):
    for number, name in enumerate(sorted(params)):
        if number == 2:
            mark()
        batch = jax.numpy.tanh(batch @ params[name])
    return batch


@pytest.fixture
def compiled(profile):
    """Return a function that parallelizes a training step on two stages, and their mesh."""
    import hwaware
    from hwaware.activation import install_runtime
    from hwaware.patching import failures, meshes
    from hwaware.plans import Plan, Replica, Stage

    install_runtime()
    import alpa

    stages = [Stage(layers=(2 * k, 2 * k + 1), replicas=(Replica(devices=(f"here:{k}",)),)) for k in range(2)]
    plan = Plan(num_microbatches=2, stages=tuple(stages))
    with hwaware.enabled(profile, plan=plan, exclude=("here:2",)):
        mesh = meshes.cluster_mesh([(profile.hosts[0].address, 2)])
        method = alpa.PipeshardParallel(
            devices=mesh, num_micro_batches=2, layer_option=alpa.AutoLayerOption(layer_num=4), stage_option="auto"
        )

        def make():
            def step(params, batch):
                loss, grads = alpa.value_and_grad(lambda params: (network(params, batch) ** 2).mean())(params)
                return jax.tree_util.tree_map(lambda p, g: p - 0.1 * g, params, grads), loss

            return alpa.parallelize(step, method=method, donate_argnums=())

        yield make, mesh
        failures.shut_down_groups(mesh)


def test_a_function_that_follows_runs_on_the_workers_of_the_followed_one(compiled):
    import alpa

    make, mesh = compiled
    first, second = make(), make()
    batch = numpy.ones((4, WIDTH), numpy.float32)
    state, _ = first(weights(), batch)
    second(weights(), batch)
    executable, newest = first.get_last_executable(), mesh.launched_physical_mesh_group
    evaluate = alpa.parallelize(
        lambda params, batch: network(params, batch, alpa.mark_pipeline_boundary),
        method=alpa.FollowParallel(first, get_input_placement_specs=executable.get_input_placement_specs),
        donate_argnums=(),
    )
    values = {name: array._value for name, array in state.items()}
    numpy.testing.assert_allclose(evaluate(state, batch)._value, network(values, batch), rtol=1e-5)
    assert evaluate.get_last_executable().mesh_group is executable.mesh_group
    create = alpa.parallelize(
        lambda: {f"w{k}": jax.numpy.full((WIDTH, WIDTH), k, "float32") for k in range(4)},
        method=alpa.CreateStateParallel(first, batch),
    )
    made = create()
    assert [float(made[f"w{k}"]._value[0, 0]) for k in range(4)] == [0.0, 1.0, 2.0, 3.0]
    assert create.get_last_executable().mesh_group is first.get_last_executable().mesh_group
    assert newest is not executable.mesh_group


def test_a_second_set_of_workers_of_one_function_is_told(compiled, caplog):
    import alpa

    make, mesh = compiled
    first, second = make(), make()
    other_method = alpa.PipeshardParallel(
        devices=mesh, num_micro_batches=2, layer_option=alpa.AutoLayerOption(layer_num=4),
        stage_option="auto", pipeline_schedule="gpipe",
    )  # fmt: skip
    third = alpa.parallelize(first.fun, method=other_method, donate_argnums=())
    for function in (first, second, third):
        function(weights(), numpy.ones((4, WIDTH), numpy.float32))
    assert "compiled" not in caplog.text
    first(weights(), numpy.ones((2, WIDTH), numpy.float32))
    assert "Alpa has compiled step again, for arguments of other shapes or types, or with another" in caplog.text


def test_a_step_that_the_driver_starts_by_half_ends_the_program(compiled, monkeypatch):
    """The later stage would pair its next step with the earlier stage's interrupted one."""
    from hwaware.errors import WorkerFailedError

    make, _ = compiled
    step, batch = make(), numpy.ones((4, WIDTH), numpy.float32)
    _, loss = step(weights(), batch)
    meshes = step.get_last_executable().mesh_group.meshes

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(meshes[0], "shard_args_to_bufs", interrupt)
        with pytest.raises(KeyboardInterrupt):
            step(weights(), batch)
    _, again = step(weights(), batch)  # no stage had begun
    assert float(again._value) == float(loss._value)
    monkeypatch.setattr(meshes[1], "shard_args_to_bufs", interrupt)
    with pytest.raises(KeyboardInterrupt):
        step(weights(), batch)
    monkeypatch.undo()
    for _ in range(2):
        with pytest.raises(WorkerFailedError, match=r"interrupted while the driver started it, by KeyboardInterrupt"):
            _ = step(weights(), batch)[1]._value


def test_a_program_waits_for_arrays_as_in_jax(compiled, monkeypatch):
    from hwaware.patching import failures

    make, _ = compiled
    state, loss = make()(weights(), numpy.ones((4, WIDTH), numpy.float32))
    waits, wait_for = [], failures.wait_for
    monkeypatch.setattr(failures, "wait_for", lambda mesh, what: (waits.append(mesh), wait_for(mesh, what)))
    assert loss.block_until_ready() is loss
    assert waits == [loss.device_mesh]
    jax.block_until_ready(state)
    assert {mesh for array in state.values() for mesh in [array.device_mesh]} <= set(waits)


def test_a_lost_worker_ends_a_step_that_alpa_checks(compiled, monkeypatch):
    import ray
    from alpa.global_env import global_config

    from hwaware.errors import WorkerFailedError

    make, _ = compiled
    monkeypatch.setattr(global_config, "pipeline_check_alive", True)
    step, batch = make(), numpy.ones((4, WIDTH), numpy.float32)
    step(weights(), batch)
    (worker,) = step.get_last_executable().mesh_group.meshes[1].workers
    os.kill(ray.get(worker.process_id.remote()), signal.SIGKILL)
    with pytest.raises(WorkerFailedError):
        step(weights(), batch)


def test_a_step_computes_with_made_up_numbers_if_alpa_is_asked_to(compiled, monkeypatch):
    from alpa.global_env import global_config

    make, _ = compiled
    monkeypatch.setattr(global_config, "use_dummy_value_for_benchmarking", True)
    _, loss = make()(weights(), numpy.ones((4, WIDTH), numpy.float32))
    monkeypatch.undo()
    assert 0 <= float(loss._value) < 1e-12  # of weights that are 1e-8


def test_a_failed_placement_of_weights_is_the_failure_that_is_told(compiled):
    from hwaware.errors import WorkerFailedError

    make, _ = compiled
    step, batch = make(), numpy.ones((4, WIDTH), numpy.float32)
    step(weights(), batch)
    (worker,) = step.get_last_executable().mesh_group.meshes[0].workers
    worker.put_buffers.remote([123], ["no array"])
    with pytest.raises(WorkerFailedError, match="not a valid JAX"):
        _ = step(weights(), batch)[1]._value


def test_a_function_follows_one_whose_workers_have_ended(compiled):
    import alpa

    from hwaware.errors import UnusableInputError
    from hwaware.patching import failures

    make, mesh = compiled
    first, batch = make(), numpy.ones((4, WIDTH), numpy.float32)
    early = alpa.parallelize(
        lambda params, batch: network(params, batch, alpa.mark_pipeline_boundary),
        method=alpa.FollowParallel(first, get_input_placement_specs=list), donate_argnums=(),
    )  # fmt: skip
    with pytest.raises(UnusableInputError, match=r"has no workers yet\. To fix: call the followed function"):
        early(weights(), batch)
    by_default = alpa.parallelize(early.fun, method=alpa.FollowParallel(first), donate_argnums=())
    with pytest.raises(UnusableInputError, match=r"has no workers yet\. To fix: call the followed function"):
        by_default(weights(), batch)
    first(weights(), batch)
    with pytest.raises(UnusableInputError, match=r"arguments \(dict, .*expected a state with `params`.*To fix: give"):
        by_default(weights(), batch)
    failures.shut_down_groups(mesh)
    evaluate = alpa.parallelize(
        lambda params, batch: network(params, batch, alpa.mark_pipeline_boundary),
        method=alpa.FollowParallel(
            first, get_input_placement_specs=first.get_last_executable().get_input_placement_specs
        ),
        donate_argnums=(),
    )
    with pytest.raises(UnusableInputError, match=r"To fix: call the followed function after alpa\.init"):
        evaluate(weights(), batch)


def test_a_shutdown_ends_the_workers_of_all_functions(compiled):
    """Also of those on a mesh of their own, as here."""
    from hwaware.patching import reservation

    make, _ = compiled
    step = make()
    step(weights(), numpy.ones((4, WIDTH), numpy.float32))
    group, ended = step.get_last_executable().mesh_group, []
    reservation.shutdown(lambda: ended.append(True))()
    assert ended
    assert all(mesh.workers is None for mesh in group.meshes)


def test_a_function_without_a_pipeline_is_refused_before_workers_start(compiled):
    from alpa.device_mesh import DeviceCluster

    from hwaware.errors import AlpaError

    with pytest.raises(AlpaError, match=r"without a pipeline .*needs Alpa's own jaxlib"):
        DeviceCluster.get_physical_mesh(None)


def test_arguments_whose_class_takes_nothing_but_arrays_have_numbers_in_messages(monkeypatch):
    from hwaware.patching import compiling

    class Pair:
        def __init__(self, one, other):
            self.both, self.shape = (one, other), one.shape + other.shape

    jax.tree_util.register_pytree_node(Pair, lambda pair: (pair.both, None), lambda _, both: Pair(*both))
    tree = jax.tree_util.tree_structure(Pair(numpy.ones(2), numpy.ones(3)))
    monkeypatch.setattr(compiling._Context, "trees", (tree, lambda: tree))
    assert compiling.names_of_step().argument(1) == "argument 1"
    assert compiling.names_of_step().result(1) == "Result 1"
