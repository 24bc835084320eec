"""What stops Alpa's own search, or misleads after it, does neither while hwaware is enabled."""

import pytest
from builders import cluster

pytestmark = pytest.mark.alpa


def fast_profile(address, seconds):
    return cluster({"here": 2}, inside=(1e19, 1e-13), addresses={"here": address}, seconds=seconds)


@pytest.fixture
def compiled(local_ray, model):
    """Compiles the small model by automatic stage construction; its workers end with the test."""
    import alpa

    from hwaware.patching import meshes

    made = []

    def compile_it():
        made.append(meshes.cluster_mesh([(local_ray, 2)]))
        method = alpa.PipeshardParallel(
            devices=made[-1], num_micro_batches=8, layer_option=alpa.AutoLayerOption(layer_num=4), stage_option="auto"
        )
        step = alpa.parallelize(
            lambda state, batch: model.train_step(state, batch, value_and_grad=alpa.value_and_grad), method=method
        )
        step.get_executable(model.initial_state(), model.batch(0, 64))
        return made[-1]

    yield compile_it
    for mesh in made:
        if mesh.launched_physical_mesh_group is not None:
            mesh.launched_physical_mesh_group.shutdown()
            mesh.launched_physical_mesh_group = None


def test_stages_of_less_than_a_microsecond_without_profiling_and_what_alpa_says_of_the_last_search(
    nothing_overridden, compiled, local_ray, monkeypatch
):
    import hwaware

    with hwaware.enabled(fast_profile(local_ray, 1e-9)):
        from alpa.pipeline_parallel import stage_construction

        def profiled(*_, **__):
            raise AssertionError("Alpa profiled")

        monkeypatch.setattr(stage_construction, "get_compute_cost", profiled)
        compiled()
        plan = hwaware.last_plan()
        assert 0 < max(stage.compute_s for stage in plan.stages) < 1e-6  # Alpa's search finds no solution there
        layers = [list(range(stage.layers[0], stage.layers[1] + 1)) for stage in plan.stages]
        sizes = [len(stage.devices) for stage in plan.stages]
        _, found, shapes, logical, options = stage_construction.get_last_dp_result()
        assert found == layers
        assert [hosts * width for hosts, width in shapes] == [dp * tp for dp, tp in logical] == sizes
        assert options == [{}] * len(sizes)
    assert stage_construction.get_last_dp_result()[1] != layers


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it is what Alpa drops
def test_a_failure_of_a_launching_thread_is_raised(compiled, local_ray, monkeypatch):
    import hwaware
    from hwaware.patching import leaves

    def broken(mesh, rank):
        raise KeyError(f"launch of {mesh.mesh_id}")

    with hwaware.enabled(fast_profile(local_ray, 10.0)):
        monkeypatch.setattr(leaves, "_started", broken)
        with pytest.raises(KeyError, match="launch of"):
            compiled()


def test_shard_parallel_says_what_it_needs():
    """Functions without a pipeline are compiled by Alpa's jaxlib."""
    import hwaware
    from hwaware.errors import AlpaError

    with hwaware.enabled(fast_profile("10.9.0.1", 1.0)):
        import jax
        from alpa.util import jaxpr_to_hlo

        program = jaxpr_to_hlo("train_step", jax.make_jaxpr(lambda x: x @ x)(jax.numpy.ones((4, 4))), [False])
        assert program.get_module().flops() == 2 * 4**3
        with pytest.raises(AlpaError, match=r"train_step is to be compiled by Alpa's own jaxlib.*To fix:"):
            program.set_input_shardings([])
