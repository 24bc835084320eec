"""A local Ray with several devices on one host, and a model small enough to train in a second."""

import shutil
import tempfile

import pytest


@pytest.fixture(scope="session")
def local_ray():
    """The address of this machine in a Ray of the tests' own; its files go with it."""
    import ray

    folder = tempfile.mkdtemp(prefix="hwt")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _temp_dir=folder)
    yield ray.nodes()[0]["NodeManagerAddress"]
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def profile(local_ray):
    """Three devices of one host, the first twice as fast, and so slow that the small model is spread over them."""
    from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct

    def device(index, seconds):
        curve = {"float32": (MatrixProduct(flops=1e9, seconds=seconds),)}
        return Device(id=f"here:{index}", host="here", kind="cpu", memory_bytes=1 << 30, throughput=curve)

    return ClusterProfile(
        hosts=(Host(name="here", address=local_ray),),
        devices=(device(0, 50.0), device(1, 100.0), device(2, 100.0)),
        links=(Link(source="here", target="here", latency_s=1e-4, bandwidth_bytes_per_s=1e9),),
    )


@pytest.fixture(scope="session")
def model():
    import hwaware.models

    return hwaware.models.make(hwaware.models.MlpConfig(blocks=4, hidden=64))
