"""The loss, a scalar of which each replica keeps its own sum until the update."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.alpa

LOSS_BY_REPLICA = """
import sys
import jax, numpy
from hwaware.compat.client import execute_sharded, load
from hwaware.activation import install_runtime
from hwaware.compiler import deferral
from hwaware.compiler.layouts import Layout, alpa_spec, copied_spec
from hwaware.compiler.programs import lower
from hwaware.compiler.sharding import StageFunction

install_runtime()
mesh = (2, int(sys.argv[1]))
devices = jax.devices()
assert len(devices) == mesh[0] * mesh[1]
generator = numpy.random.default_rng(0)
errors = generator.standard_normal((2, 6, 3), dtype="float32")  # of two microbatches


def forward(loss, error):
    return (loss + (error**2).sum() / 18,)


def run(closed, layout, *arrays):
    compiled = load(lower(closed, "part", {}, layout).stablehlo, devices)
    text = compiled.hlo_modules()[0].to_string()
    results = execute_sharded(compiled, arrays, devices, False).disassemble_into_single_device_arrays()
    return results, [line for line in text.splitlines() if "all-" in line or "collective" in line]


closed = jax.make_jaxpr(forward)(numpy.float32(0), errors[0])
stage = StageFunction(closed.jaxpr, closed.jaxpr.invars, closed.jaxpr.outvars, "forward")
specs = dict(zip(stage.invars, [(), (0, None)]))
loss = stage.invars[0]
assert deferral.deferred([stage], specs, {loss: stage.outvars[0]}, mesh) == {loss: stage.outvars[0]}
flat, parts = deferral.parts_of(stage, specs, mesh)
apart = deferral.apart(closed, parts.accumulators([(0, 0)]), parts, flat, mesh)
count = len(devices)
scalar = copied_spec(0, count)
layout = Layout(count, (scalar, alpa_spec((0, None), mesh)), (scalar,))
totals = [jax.device_put(numpy.float32(0), device) for device in devices]
for error in errors:
    halves = [error[3 * (index // mesh[1]) :][:3] for index in range(count)]
    given = [jax.device_put(half, device) for half, device in zip(halves, devices)]
    (totals,), exchanged = run(apart, layout, totals, given)
    assert exchanged == [], exchanged
for index, total in enumerate(totals):  # each replica's own
    mine = errors[:, 3 * (index // mesh[1]) :][:, :3]
    numpy.testing.assert_allclose(total, (mine**2).sum() / 18, rtol=1e-5)

update = jax.make_jaxpr(lambda loss, weight: [loss / 2, weight + 1])(numpy.float32(0), errors[0])
first = deferral.added_up(update, {0}, mesh)
copies = (scalar, copied_spec(2, count))
layout = Layout(count, copies, copies)
weights = [jax.device_put(errors[0], device) for device in devices]
(means, _), exchanged = run(first, layout, totals, weights)
assert len([line for line in exchanged if "all-reduce(" in line]) == 1, exchanged
for mean in means:
    numpy.testing.assert_allclose(mean, (errors**2).sum() / 36, rtol=1e-5)
"""


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_replicas_keep_their_own_loss_and_exchange_nothing_until_the_update(tensor_parallel):
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={2 * tensor_parallel}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", LOSS_BY_REPLICA, str(tensor_parallel)],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
