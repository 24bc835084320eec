"""A local Ray with several devices on one host, and a model small enough to train in a second."""

import os
import shutil
import tempfile

import pytest


@pytest.fixture(autouse=True)
def _devices_as_before(monkeypatch):
    """Commands that run in the tests' own process choose their devices for good: no later test is to inherit that."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


@pytest.fixture(scope="session")
def worker_pool():
    """Let programs of this process take workers of ended ones instead of new processes."""
    import ray
    from shared_workers import Pool

    from hwaware.patching import leaves

    pool = Pool(leaves.start_worker)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(leaves, "start_worker", pool.started)
        patched.setattr(ray, "kill", pool.kill)
        yield pool


@pytest.fixture
def own_workers(worker_pool, monkeypatch):
    """Give the test's programs processes of their own, which end with them."""
    monkeypatch.setattr(worker_pool, "is_on", False)


@pytest.fixture
def short_readings(monkeypatch):
    """Time programs for hundredths of a second: such tests look at the way of the times, not at their truth."""
    from hwaware.calibration import timers, timing

    for module in (timing, timers):
        monkeypatch.setattr(module, "_READING_S", 0.05)


@pytest.fixture(scope="session")
def local_ray(worker_pool):
    """Start a Ray of the tests' own; return this machine's address in it."""
    import ray

    folder = tempfile.mkdtemp(prefix="hwt")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _temp_dir=folder)
    yield ray.nodes()[0]["NodeManagerAddress"]
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def profile(local_ray):
    """Three devices of one host, the first twice as fast, and so slow that the small model is spread over them.

    Where HWAWARE_TESTS_GPU holds the UUID of a GPU, that GPU stands for all three.
    """
    from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct

    def device(index, seconds):
        curve = {"float32": (MatrixProduct(flops=1e9, seconds=seconds),)}
        uuid = os.environ.get("HWAWARE_TESTS_GPU")
        return Device(id=f"here:{index}", host="here", kind="cpu", memory_bytes=1 << 30, throughput=curve, uuid=uuid)

    return ClusterProfile(
        hosts=(Host(name="here", address=local_ray),),
        devices=(device(0, 50.0), device(1, 100.0), device(2, 100.0)),
        links=(Link(source="here", target="here", latency_s=1e-4, bandwidth_bytes_per_s=1e9),),
    )


@pytest.fixture(scope="session")
def model():
    import hwaware.models

    return hwaware.models.make(hwaware.models.MlpConfig(blocks=4, hidden=64))


@pytest.fixture
def nothing_overridden():
    """Alpa as it is. Explicit stage options keep the override in place for the process: it is taken back."""
    from hwaware import activation
    from hwaware.patching import stock_jax

    stock_jax.install()
    while any(patch.applied for patch in activation.patches()):
        for patch in activation.patches():
            patch.revert()
    activation._explicit.clear()


class Pipeline:
    """A training step under Alpa with one layer per stage, every stage on devices of its own.

    Attributes:
        executable: Alpa's.
        state: The newest state, on the workers.
    """

    def __init__(self, address, train_step, state, batch, stages, microbatches=2, **method):
        import alpa
        import jax
        from alpa.pipeline_parallel.stage_construction import ManualStageOption

        from hwaware.patching import meshes

        remat = method.pop("remat", False)
        donate = method.pop("donate", "auto")
        layers = method.pop("layer_option", None) or alpa.AutoLayerOption(
            layer_num=stages, remat_mode="coarse_grained_remat" if remat else "none"
        )
        logical = method.pop("logical", (1, 1))  # replicas x devices of each, of every stage
        width = logical[0] * logical[1]
        self.mesh = meshes.cluster_mesh([(address, stages * width)])
        parallel = alpa.PipeshardParallel(
            devices=self.mesh,
            num_micro_batches=microbatches,
            layer_option=layers,
            stage_option=ManualStageOption(
                [[index] for index in range(stages)], [(1, width)] * stages, [logical] * stages, [{}] * stages
            ),
            **method,
        )
        self.step_function = alpa.parallelize(train_step, method=parallel, donate_argnums=donate)
        # Alpa deletes what is donated to it; the caller's arrays stay.
        self.state = jax.tree_util.tree_map(lambda leaf: leaf + 0 if hasattr(leaf, "devices") else leaf, state)
        try:
            self.executable = self.step_function.get_executable(self.state, batch)
        except BaseException:
            self.close()
            raise

    def step(self, batch):
        """One step; returns what the step returned beside the state, as NumPy arrays."""
        import jax
        import numpy

        self.state, *rest = self.step_function(self.state, batch)
        self.executable.sync()
        return jax.tree_util.tree_map(lambda leaf: numpy.asarray(leaf._value), rest)

    @property
    def workers(self):
        return [worker for mesh in self.mesh.launched_physical_mesh_group.meshes for worker in mesh.workers]

    def close(self):
        if self.mesh.launched_physical_mesh_group is not None:
            self.mesh.launched_physical_mesh_group.shutdown()
            self.mesh.launched_physical_mesh_group = None


@pytest.fixture
def pipeline(local_ray):
    """Makes pipelines and closes them at the test's end."""
    from hwaware.activation import install_runtime

    install_runtime()
    made = []

    def make(*args, **kwargs):
        made.append(Pipeline(local_ray, *args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()
