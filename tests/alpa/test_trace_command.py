"""hwaware trace on real models: a built-in with options, and a person's own module."""

import json

import pytest
from builders import cluster, device
from click.testing import CliRunner

from hwaware.cli import main
from hwaware.workload import Workload

pytestmark = pytest.mark.alpa

OWN = """
import jax, jax.numpy as jnp

def train_step(weights, batch):
    loss = lambda weights: jnp.mean((jnp.tanh(batch @ weights[0]) @ weights[1]) ** 2)
    return [weight - 0.1 * change for weight, change in zip(weights, jax.grad(loss)(weights))]

def example():
    return train_step, [jnp.ones((8, 8))] * 2, jnp.ones((16, 8))
"""


def test_built_in_with_options(tmp_path):
    path = tmp_path / "workload.json"
    arguments = ["trace", "mlp", "-o", str(path), "--blocks", "3", "--hidden", "8", "--microbatch-size", "2"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "Workload mlp: microbatches of 2, float32" in result.stdout
    workload = Workload.load(path)
    assert [layer.forward_flops for layer in workload.layers] == [2 * 2 * 8 * 8] * 3


def test_own_module_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "hwaware_test_own_model.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # and taken away again
    result = CliRunner().invoke(main, ["trace", "hwaware_test_own_model:example", "--layers", "2", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["name"], document["microbatch_size"]) == ("example", 4)
    assert [layer["backward_flops"] for layer in document["layers"]] == [512, 1024]


@pytest.mark.parametrize(("layers", "message"), [("0", "number of layers is 0"), ("9", "at most 2 layers")])
def test_too_few_and_too_many_layers(layers, message):
    result = CliRunner().invoke(main, ["trace", "mlp", "--blocks", "2", "--layers", layers])
    assert result.exit_code == 2
    assert message in result.stderr


def cluster_of(kinds):
    devices = [device(f"a:{k}", 0.1 * (k + 1), kind=kind, memory_bytes=1 << 30) for k, kind in enumerate(kinds)]
    return cluster(devices, inside=(1e9, 1e-4))


def test_measured_layers(short_readings, tmp_path):
    from hwaware.greeting import new_secret
    from hwaware.profiler.worker import Worker

    here = Worker("127.0.0.1", new_secret(), index=0)
    kind = here.identify()["kind"]
    here.close()
    cluster_of([kind, "half as fast"]).save(tmp_path / "cluster.json")
    arguments = ["trace", "mlp", "--blocks", "3", "--hidden", "32", "--measure", str(tmp_path / "cluster.json")]
    path = tmp_path / "workload.json"
    result = CliRunner().invoke(main, [*arguments, "-o", str(path)])
    assert result.exit_code == 0, result.output
    for layer in Workload.load(path).layers:
        times, slower = layer.measured[kind]["1,1"], layer.measured["half as fast"]["1,1"]
        assert 0 < times.forward_s < 1
        assert 0 < times.backward_s < 1
        assert slower.backward_s == pytest.approx(2 * times.backward_s)


def test_layers_cannot_be_measured_for_a_cluster_of_other_machines(tmp_path):
    cluster_of(["abacus"]).save(tmp_path / "cluster.json")
    arguments = ["trace", "mlp", "--blocks", "2", "--measure", str(tmp_path / "cluster.json")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "abacus" in result.stderr
    assert "To fix:" in result.stderr


def test_layers_as_functions_do_what_the_step_does():
    import jax
    import jax.numpy as jnp
    import numpy as np

    from hwaware.tracing.function import trace_programs

    def loss(weights, batch):
        stream = jnp.tanh(batch @ weights[0]) * 0.5
        return jnp.mean((jnp.where(stream > 0, stream, 2.0 * stream) @ weights[1]) ** 2)

    def step(weights, batch):
        return [weight - change for weight, change in zip(weights, jax.grad(loss)(weights, batch))]

    random = np.random.default_rng(0)
    weights = [random.standard_normal((8, 8)).astype(np.float32) for _ in range(2)]
    batch = random.standard_normal((4, 8)).astype(np.float32)
    _, (first, second) = trace_programs(step, weights, batch, num_layers=2, microbatch_size=4)
    # The step's inputs are the graph's first values. What nobody makes is the 1.0 that the backward pass begins with.
    values = {0: weights[0], 1: weights[1], 2: batch}
    for function in (first.forward, second.forward, second.backward, first.backward):
        arguments = [
            values.get(value, jnp.ones(aval.shape, aval.dtype))
            for value, aval in zip(function.takes, function.arguments)
        ]
        kinds = function.arguments[len(function.takes) :]  # of sums of gradients
        results = function.run(*arguments, *(jnp.full(aval.shape, 2.0, aval.dtype) for aval in kinds))
        added = {place for _, place in function.sums}
        values.update(
            (value, array - 2.0 if place in added else array)
            for place, (value, array) in enumerate(zip(function.gives, results))
        )
    assert [len(function.sums) for layer in (first, second) for function in layer] == [0, 1, 0, 1]
    made = [value for value in values.values() if value.shape == (8, 8)]
    for gradient in jax.grad(loss)(weights, batch):
        assert any(np.allclose(value, gradient, atol=1e-6) for value in made)
