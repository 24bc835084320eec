"""Several functions whose stages hwaware chooses, on the same devices: each has workers of its own."""

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
    make, _ = compiled
    first, second = make(), make()
    for function in (first, second):
        function(weights(), numpy.ones((4, WIDTH), numpy.float32))
    assert "compiled" not in caplog.text
    first(weights(), numpy.ones((2, WIDTH), numpy.float32))
    assert "Alpa has compiled step again, for arguments of other shapes or types." in caplog.text
