"""hwaware trace on real models: a built-in with options, and a person's own module."""

import json

import pytest
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


@pytest.mark.parametrize(("layers", "message"), [("0", "num_layers is 0"), ("9", "at most 2 layers")])
def test_too_few_and_too_many_layers(layers, message):
    result = CliRunner().invoke(main, ["trace", "mlp", "--blocks", "2", "--layers", layers])
    assert result.exit_code == 2
    assert message in result.stderr
