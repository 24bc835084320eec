"""FLOPs against figures worked out by hand."""

import random
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import seeds
from jax import lax

from hwaware.tracing.flops import equation_flops, jaxpr_flops

pytestmark = pytest.mark.alpa


def flops(function, *shapes):
    return jaxpr_flops(jax.make_jaxpr(function)(*(jnp.ones(shape) for shape in shapes)))


def convolution(x, kernel, strides=(1, 1), **groups):
    return lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **groups)


PRODUCT = 2 * 3 * 4 * 5


def test_matrix_product_and_batched_product():
    assert flops(jnp.dot, (3, 4), (4, 5)) == PRODUCT
    assert flops(lambda a, b: jnp.einsum("bij,bkj->bik", a, b), (7, 3, 4), (7, 5, 4)) == 7 * PRODUCT


@pytest.mark.skipif(not hasattr(lax, "ragged_dot_general"), reason="older JAX")
def test_each_row_of_a_ragged_product_meets_one_group():
    ragged = lambda rows, groups: lax.ragged_dot(rows, groups, jnp.array([1, 4, 2]))  # noqa: E731
    once = 2 * 7 * 4 * 5
    assert flops(ragged, (7, 4), (3, 4, 5)) == once
    both = flops(lambda *given: jax.grad(lambda *given: (ragged(*given) ** 2).sum(), (0, 1))(*given), (7, 4), (3, 4, 5))
    assert both == 3 * once


def test_element_wise_operations_count_as_none():
    assert flops(lambda x: jnp.tanh(x).sum(), (8, 8)) == 0


def test_convolution_with_stride():
    # 2 x batch x out height x out width x out channels x kernel height x width x in channels
    assert flops(convolution, (2, 8, 8, 3), (3, 3, 3, 16)) == 2 * 2 * 8 * 8 * 16 * 3 * 3 * 3
    strided = lambda x, k: convolution(x, k, (2, 2))  # noqa: E731
    assert flops(strided, (2, 8, 8, 3), (3, 3, 3, 16)) == 2 * 2 * 4 * 4 * 16 * 3 * 3 * 3


def test_grouped_convolution_divides_by_the_groups():
    grouped = lambda x, k: convolution(x, k, feature_group_count=4)  # noqa: E731
    assert flops(grouped, (2, 8, 8, 8), (3, 3, 2, 16)) == 2 * 2 * 8 * 8 * 16 * 3 * 3 * 2


@pytest.mark.parametrize("strides", [(1, 1), (2, 2)])
def test_gradients_of_a_convolution_cost_as_much_as_the_convolution_each(strides):
    forward = lambda x, k: convolution(x, k, strides).sum()  # noqa: E731
    once = flops(forward, (2, 8, 8, 4), (3, 3, 4, 16))
    both = flops(lambda x, k: jax.grad(lambda x, k: (convolution(x, k, strides) ** 2).sum(), (0, 1))(x, k), *SHAPES)
    assert both == 3 * once


SHAPES = ((2, 8, 8, 4), (3, 3, 4, 16))


@jax.custom_vjp
def custom(a, b):
    return a @ b


custom.defvjp(lambda a, b: (a @ b, (a, b)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))


@jax.custom_jvp
def with_jvp(a, b):
    return a @ b


with_jvp.defjvp(lambda primals, tangents: (primals[0] @ primals[1], tangents[0] @ primals[1]))


@pytest.mark.parametrize(
    "wrapped",
    [
        jax.jit(jnp.dot),
        jax.jit(jax.jit(jnp.dot)),
        jax.checkpoint(jnp.dot),
        with_jvp,
        custom,
        jax.named_call(jnp.dot, name="product"),
    ],
)
def test_calls_are_looked_into(wrapped):
    assert flops(wrapped, (3, 4), (4, 5)) == PRODUCT


def test_scan_counts_each_turn_while_counts_one_and_cond_the_dearest_branch():
    square = lambda x, _: (x @ x, None)  # noqa: E731
    assert flops(lambda x: lax.scan(square, x, None, length=6)[0], (4, 4)) == 6 * 2 * 4**3
    loop = lambda x: lax.while_loop(lambda x: x.sum() > 0, lambda x: x @ x, x)  # noqa: E731
    assert flops(loop, (4, 4)) == 2 * 4**3
    branch = lambda x: lax.cond(x.sum() > 0, lambda x: x @ x, lambda x: x @ x @ x, x)  # noqa: E731
    assert flops(branch, (4, 4)) == 2 * 2 * 4**3


@pytest.mark.parametrize("seed", seeds(30, every=10))
def test_a_loss_is_cut_into_the_layers_that_alpa_cuts(nothing_overridden, seed):
    from alpa.pipeline_parallel.layer_construction import cluster_jaxpr_by_cost

    from hwaware.patching import even_layers

    rng = random.Random(seed)
    count, layers = rng.randint(12, 60), rng.randint(1, 4)
    heavy = np.array([rng.random() < 0.7 for _ in range(count)], np.int32)
    work = np.array([product * rng.choice([1e6, 1e6, 2e6, rng.uniform(0, 2e6)]) for product in heavy])
    crossing_bytes = np.zeros((count + 1, count + 1), np.float32)
    for first in range(count):
        crossing_bytes[first, first + 1 :] = np.cumsum([rng.choice([0, 4096, 4100]) for _ in range(first, count)])
    given = types.SimpleNamespace(eqns=list(range(count))), layers, 0.6, (heavy, crossing_bytes, work)
    criterion = rng.choice(["flops", "count"])
    expected, told = cluster_jaxpr_by_cost(*given, criterion)
    found, ours = even_layers.cluster_jaxpr_by_cost(None)(*given, criterion)
    assert [each for layer in expected for each in layer] == list(range(count))  # Alpa finds layers, too
    assert (found, ours) == (expected, told)


@pytest.mark.thorough
def test_alpas_layers_of_a_convolutional_network_are_cut_by_the_convolutions():
    from hwaware import models
    from hwaware.activation import install_runtime

    install_runtime()
    from alpa.pipeline_parallel.layer_construction import cluster_jaxpr_by_cost, get_layer_construction_costs

    model = models.make(models.WresnetConfig(blocks=6, width=16, image=16))
    state, batch = model.initial_state(), model.batch(0, 4)
    with jax.disable_jit():
        program = jax.make_jaxpr(
            lambda p: model.loss(state.apply_fn({"params": p}, batch["inputs"]), batch["targets"])
        )(state.params)
    costs = get_layer_construction_costs(program)
    convolutions = [at for at, equation in enumerate(program.eqns) if equation.primitive.name == "conv_general_dilated"]
    assert len(convolutions) == 1 + 6 * 2 + 2  # the first, two a block, a shortcut where the width changes
    assert costs[2].sum() == jaxpr_flops(program)
    assert costs[2][convolutions].sum() > 0.99 * costs[2].sum()
    layers = cluster_jaxpr_by_cost(program, 3, 0.6, costs, "flops")[0]
    flops_of_layers = [sum(map(equation_flops, layer)) for layer in layers]
    assert max(flops_of_layers) < 1.6 * costs[2].sum() / 3
    assert min(flops_of_layers) > 0.4 * costs[2].sum() / 3
