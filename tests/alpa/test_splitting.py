"""A stage's update cut at its all-reduces: what is kept between the parts, and that the parts compute the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hwaware.runtime.memory import MemoryAccount
from hwaware.runtime.recorder import Recorder

pytestmark = pytest.mark.alpa

LARGE = (64, 64)


class Worker:
    """What an executable needs of a worker; alone in its group, it adds 1 to every sum."""

    def __init__(self):
        self.all_devices = jax.devices()[:1]
        self.buffers, self.newest, self.reduced = {}, (), []
        self.account, self.recorder, self.reducer = MemoryAccount(None), Recorder(), self

    def stores(self):
        return (self.buffers,)

    def held(self, uuids):
        return [self.buffers[uuid] for uuid in uuids]

    def put(self, array, index=0):
        return jax.device_put(array)

    def reduce(self, group, operation, value):
        self.reduced.append((group, operation, float(value)))
        return value + 1


@pytest.fixture
def all_reduce():
    from hwaware.activation import install_runtime

    install_runtime()
    from alpa.pipeline_parallel.apply_grad import cross_mesh_allreduce_p

    cross_mesh_allreduce_p.def_abstract_eval(lambda value, **_: value)
    return lambda value: cross_mesh_allreduce_p.bind(value, type=lax.add_p, group_meshes=(1, 0))


def run(function, arguments, donated=()):
    from hwaware.compiler.splitting import has_reductions, lower_in_parts
    from hwaware.runtime.executables import SplitExecutable

    closed = jax.make_jaxpr(function)(*arguments)
    assert has_reductions(closed)
    program = lower_in_parts(closed, "update", donated)
    worker = Worker()
    worker.buffers.update({index: [jnp.asarray(value)] for index, value in enumerate(arguments)})
    outputs = [f"out {index}" for index in range(len(program.outputs))]
    SplitExecutable(worker, 0, program).execute_on_worker(range(len(arguments)), outputs)
    return program, worker, [np.asarray(worker.buffers[name][0]) for name in outputs]


def kinds(program):
    return [type(step).__name__ for step in program.steps]


def test_a_large_cheap_value_is_computed_again_and_a_small_one_kept(all_reduce):
    def update(gradient, weights):
        mean = gradient / 4
        norm = jnp.sqrt(all_reduce(jnp.sum(mean**2)))
        return weights - mean / norm, norm

    gradient, weights = np.ones(LARGE, np.float32), np.full(LARGE, 2, np.float32)
    program, worker, (updated, norm) = run(update, (gradient, weights))
    assert kinds(program) == ["Part", "Reduction", "Part"]
    first, reduction, second = program.steps
    assert first.outputs == (reduction.source,)  # one scalar, no second copy of the gradient
    assert set(second.inputs) == {0, 1, reduction.target}
    assert worker.reduced == [("reduce 0$1$", "add", pytest.approx(256))]
    assert norm == pytest.approx(np.sqrt(257))
    np.testing.assert_allclose(updated, 2 - 0.25 / norm, rtol=1e-6)


def test_a_matrix_product_is_kept(all_reduce):
    def update(gradient):
        product = gradient @ gradient
        return product / all_reduce(jnp.sum(product))

    program, _, (result,) = run(update, (np.eye(64, dtype=np.float32),))
    first, _, second = program.steps
    assert len(first.outputs) == 2
    assert "dot_general" in first.program.stablehlo
    assert "dot_general" not in second.program.stablehlo
    np.testing.assert_allclose(result, np.eye(64) / 65, rtol=1e-6)


def test_a_reduction_that_needs_another_comes_after_it(all_reduce):
    def update(gradient):
        first = all_reduce(jnp.sum(gradient))
        beside = all_reduce(jnp.max(gradient))
        return gradient / all_reduce(jnp.sum(gradient / first)) + beside

    program, worker, (result,) = run(update, (np.ones(LARGE, np.float32),))
    assert kinds(program) == ["Part", "Reduction", "Reduction", "Part", "Reduction", "Part"]
    second = 4096 / 4097 + 1
    assert sorted(value for _, _, value in worker.reduced) == pytest.approx([4096 / 4097, 1, 4096], rel=1e-5)
    np.testing.assert_allclose(result, 1 / second + 2, rtol=1e-5)


def test_donated_inputs_live_until_their_last_part(all_reduce):
    def update(weights, gradient):
        total = all_reduce(jnp.sum(weights * gradient))
        return weights - gradient / total, total

    arguments = (np.full(LARGE, 2, np.float32), np.ones(LARGE, np.float32))
    program, worker, (updated, total) = run(update, arguments, donated=(True, False))
    first, _, second = program.steps
    assert "aliasing_output" not in first.program.stablehlo
    assert "aliasing_output" in second.program.stablehlo
    assert 0 not in worker.buffers
    assert 1 in worker.buffers
    np.testing.assert_allclose(updated, 2 - 1 / total, rtol=1e-6)


def test_a_stage_that_only_exchanges_takes_no_time_alone(all_reduce):
    from hwaware.compiler.splitting import lower_in_parts
    from hwaware.runtime.executables import SplitExecutable

    program = lower_in_parts(jax.make_jaxpr(lambda value: all_reduce(value))(np.float32(1)), "update")
    assert kinds(program) == ["Reduction"]
    assert SplitExecutable(Worker(), 0, program).profile_with_dummy_inputs() == [0.0]
