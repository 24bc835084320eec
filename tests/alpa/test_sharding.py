"""Which dimension is split over which devices: followed through jaxprs, and said in Alpa's and XLA's words."""

import os
import subprocess
import sys

import numpy
import pytest

pytestmark = pytest.mark.alpa


@pytest.fixture(autouse=True)
def _names():
    from hwaware.patching import stock_jax

    stock_jax.install()


def function_of(function, *shapes, kind="forward"):
    import jax

    from hwaware.compiler.sharding import StageFunction

    arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return StageFunction(jaxpr, jaxpr.invars, jaxpr.outvars, kind)


def followed(function, spec, *shapes, mesh=(2, 2)):
    """The spec of the function's result, from that of its first argument."""
    from hwaware.compat.jaxprs import flatten
    from hwaware.compiler import sharding

    stage = function_of(function, *shapes)
    flat = flatten(stage.jaxpr)
    known = {value: sharding.whole(shape) for value, shape in zip(flat.inputs, shapes)}
    known[flat.inputs[0]] = spec
    return sharding.follow(flat, known, mesh)[flat.outputs[0]]


FOLLOWED = [
    (lambda x: x * 2 + x.mean(), (0, None), [(4, 6)], (0, None)),
    (lambda x: x.T, (0, None), [(4, 6)], (None, 0)),
    (lambda x: x.reshape(4, 2, 3), (0, 1), [(4, 6)], (0, 1, None)),
    (lambda x: x.reshape(4, 3, 2), (0, 1), [(4, 6)], (0, None, None)),  # 3 cannot be halved
    (lambda x: x.reshape(24), (0, None), [(4, 6)], (0,)),
    (lambda x: x.sum(0), (0, 1), [(4, 6)], (1,)),
    (lambda x, w: x @ w, (0, None), [(4, 6), (6, 8)], (0, None)),
    (lambda x, y: x.T @ y, (0, None), [(4, 6), (4, 8)], (None, None)),  # the samples are summed away
    (lambda x, y: x + y[None], (0, None), [(4, 6), (6,)], (0, None)),
    (lambda x: x[:, 1:3], (0, 1), [(4, 6)], (0, None)),
    (lambda x: numpy.ones((10, 3), "float32")[x.astype(int)], (0,), [(4,)], None),
]


@pytest.mark.parametrize(("function", "spec", "shapes", "expected"), FOLLOWED)
def test_dimensions_are_followed(function, spec, shapes, expected):
    import jax.numpy as jnp

    if expected is None:  # a lookup: the samples of the indices are those of the rows
        assert followed(lambda x: jnp.take(jnp.ones((10, 3)), x.astype(int), axis=0), spec, *shapes) == (0, None)
        return
    assert followed(function, spec, *shapes) == expected


def test_a_convolution_keeps_samples_and_splits_channels():
    import jax

    def convolve(images, kernel):
        return jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    assert followed(convolve, (0, None, None, None), (4, 8, 8, 3), (3, 3, 3, 16)) == (0, None, None, None)


def test_inner_functions_are_unfolded_each_time_they_are_called():
    import jax

    half = jax.jit(lambda x: x * 0.5)
    assert followed(lambda x: half(half(x)).T, (0, None), (4, 6)) == (None, 0)


def two_layers(x, up, bias, down, state):
    import jax.numpy as jnp

    return jnp.tanh(x @ up + bias) @ down, state


def test_products_are_split_by_columns_then_by_rows_and_the_optimizer_like_its_weights():
    from hwaware.compiler.sharding import batch_dims, choose

    forward = function_of(two_layers, (4, 16), (16, 64), (64,), (64, 16), ())
    x, up, bias, down, _ = forward.invars

    def update(weight, moment, gradient):
        moment = 0.9 * moment + gradient
        return weight - 0.1 * moment, moment

    later = function_of(update, (16, 64), (16, 64), (16, 64), kind="update")
    later = later._replace(invars=[up, *later.invars[1:]])
    batch = batch_dims([forward, later], [x])
    assert batch[forward.outvars[0]] == 0
    assert up not in batch
    specs = choose([forward, later], batch, {}, (2, 2))
    assert specs[x] == (0, None)
    assert (specs[up], specs[bias], specs[down]) == ((None, 1), (1,), (1, None))
    assert specs[forward.outvars[0]] == (0, None)
    assert [specs[variable] for variable in (*later.invars, *later.outvars)] == [(None, 1)] * 5
    replicas = choose([forward, later], batch, {}, (4, 1))
    assert {replicas[variable] for variable in (up, down)} == {(None, None)}


def test_replicas_keep_sums_of_their_own_until_the_update():
    import jax
    import jax.numpy as jnp

    from hwaware.compat.programs import jaxpr_as_fun
    from hwaware.compiler import deferral

    def gradients(sums, x, error, tokens):
        product, bias, table, whole = sums
        return (
            product + 0.5 * (error.T @ x).T,
            bias + error.sum(0),
            table + jnp.zeros((5, 3)).at[tokens].add(error),
            whole + jnp.tanh(x.sum(0)),  # no sum over samples any more
        )

    generator = numpy.random.default_rng(0)
    x, error = (generator.standard_normal((4, size), dtype="float32") for size in (2, 3))
    tokens = numpy.array([1, 4, 1, 0])
    sums = tuple(generator.standard_normal(shape, dtype="float32") for shape in ((2, 3), (3,), (5, 3), (2,)))
    closed = jax.make_jaxpr(lambda *flat: gradients(flat[:4], *flat[4:]))(*sums, x, error, tokens)
    from hwaware.compiler.sharding import StageFunction, whole

    stage = StageFunction(closed.jaxpr, closed.jaxpr.invars, closed.jaxpr.outvars, "backward")
    specs = {v: whole(v.aval.shape) if i < 4 else (0, *whole(v.aval.shape[1:])) for i, v in enumerate(stage.invars)}
    flat, parts = deferral.parts_of(stage, specs, (2, 1))
    found = parts.accumulators([(place, place) for place in range(4)])
    assert [each.before for each in found] == [0, 1, 2]
    apart = deferral.apart(closed, found, parts, flat, (2, 1))
    stacks = [numpy.concatenate([each, numpy.zeros_like(each)]) for each in sums[:3]]
    results = jaxpr_as_fun(apart)(*stacks, sums[3], x, error, tokens)
    expected = gradients(sums, x, error, tokens)
    for stack, want in zip(results[:3], expected):
        assert stack.shape == (2 * want.shape[0], *want.shape[1:])
        numpy.testing.assert_allclose(stack.reshape(2, *want.shape).sum(0), want, rtol=1e-5, atol=1e-6)
    first = deferral.added_up(jax.make_jaxpr(lambda g, w: w - g)(sums[0], sums[0]), {0}, (2, 1))
    (updated,) = jaxpr_as_fun(first)(stacks[0], sums[0])
    numpy.testing.assert_allclose(updated, 0 * sums[0])


@pytest.mark.parametrize(("tensor_parallel", "exchanges"), [(1, 3), (2, 4)])
def test_small_gradients_are_added_up_together(tensor_parallel, exchanges):
    import jax

    from hwaware.compat.programs import jaxpr_as_fun
    from hwaware.compiler import deferral

    generator = numpy.random.default_rng(0)
    shapes = (((2, 3), "float32"), ((1200, 1000), "float32"), ((5,), "float16"), ((7,), "float32"))
    whole = [generator.standard_normal(shape).astype(kind) for shape, kind in shapes]
    update = jax.make_jaxpr(lambda *gradients: [2 * gradient for gradient in gradients])(*whole)
    first = deferral.added_up(update, {0, 1, 2, 3}, (2, tensor_parallel))
    stacks = [numpy.concatenate([each, 2 * each]) for each in whole]
    for found, each in zip(jaxpr_as_fun(first)(*stacks), whole):
        numpy.testing.assert_allclose(found, 6 * each, rtol=1e-2 if each.dtype == "float16" else 1e-5)
    assert str(first).count("reduce_sum") == exchanges


CONVOLUTION_BY_REPLICA = """
import jax, numpy
from hwaware.compat.client import execute_sharded, load
from hwaware.activation import install_runtime
from hwaware.compiler import deferral
from hwaware.compiler.layouts import Layout, alpa_spec, copied_spec
from hwaware.compiler.programs import lower
from hwaware.compiler.sharding import StageFunction, whole

install_runtime()
generator = numpy.random.default_rng(0)
shapes = ((3, 3, 4, 8), (6, 8, 8, 4), (3, 3, 4, 8))
total, images, kernel = (generator.standard_normal(shape, dtype="float32") for shape in shapes)


def gradient(total, images, kernel):
    def loss(kernel):
        layout = ("NHWC", "HWIO", "NHWC")
        return (jax.lax.conv_general_dilated(images, kernel, (2, 2), "SAME", dimension_numbers=layout) ** 2).sum()

    return (total + jax.grad(loss)(kernel),)


closed = jax.make_jaxpr(gradient)(total, images, kernel)
stage = StageFunction(closed.jaxpr, closed.jaxpr.invars, closed.jaxpr.outvars, "backward")
specs = {v: (0, None, None, None) if place == 1 else whole(v.aval.shape) for place, v in enumerate(stage.invars)}
flat, parts = deferral.parts_of(stage, specs, (2, 1))
apart = deferral.apart(closed, parts.accumulators([(0, 0)]), parts, flat, (2, 1))
(want,) = gradient(total, images, kernel)
stack = numpy.concatenate([total, 0 * total])
cut = alpa_spec((0, None, None, None), (2, 1))
layout = Layout(2, (cut, cut, copied_spec(4, 2)), (cut,))
devices = jax.devices()
compiled = load(lower(apart, "gradient", {}, layout).stablehlo, devices)
arrays = [numpy.split(stack, 2), numpy.split(images, 2), [kernel, kernel]]
shards = [[jax.device_put(part, device) for part, device in zip(each, devices)] for each in arrays]
(found,) = execute_sharded(compiled, shards, devices, False).disassemble_into_single_device_arrays()
numpy.testing.assert_allclose(sum(map(numpy.asarray, found)), want, rtol=1e-4, atol=1e-4)
text = compiled.hlo_modules()[0].to_string()
assert text.count("convolution(") == 2, text
print("exchanged:", [line for line in text.splitlines() if "all-" in line or "collective" in line])
flat, parts = deferral.parts_of(stage, specs, (2, 2))
assert parts.accumulators([(0, 0)]) == []
"""


@pytest.mark.thorough
def test_replicas_keep_gradients_of_convolutions_apart_and_exchange_nothing():
    """On two devices: neither samples nor gradients leave a replica; each makes two convolutions, both its own."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", CONVOLUTION_BY_REPLICA],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "exchanged: []\n"


def test_a_transposed_gradient_becomes_a_product_in_the_other_order():
    """Turning every gradient round in every microbatch made the backward pass of replicas half as long again."""
    import jax

    from hwaware.compat.programs import jaxpr_as_fun
    from hwaware.compiler import deferral
    from hwaware.compiler.sharding import StageFunction, whole

    generator = numpy.random.default_rng(0)
    total, x, error = (generator.standard_normal(shape, dtype="float32") for shape in ((2, 3), (4, 6, 2), (4, 6, 3)))

    def gradient(total, x, error):
        dimensions = (((0, 1), (0, 1)), ((), ()))
        return (total + jax.lax.dot_general(error, x, dimensions).T,)

    closed = jax.make_jaxpr(gradient)(total, x, error)
    stage = StageFunction(closed.jaxpr, closed.jaxpr.invars, closed.jaxpr.outvars, "backward")
    specs = {v: (0, None, None) if len(v.aval.shape) == 3 else whole(v.aval.shape) for v in stage.invars}
    flat, parts = deferral.parts_of(stage, specs, (2, 1))
    apart = deferral.apart(closed, parts.accumulators([(0, 0)]), parts, flat, (2, 1))
    (stack,) = jaxpr_as_fun(apart)(numpy.concatenate([total, 0 * total]), x, error)
    numpy.testing.assert_allclose(stack.reshape(2, 2, 3).sum(0), gradient(total, x, error)[0], rtol=1e-5)
    made = {result: each for each in apart.eqns for result in each.outvars}
    added = [each for each in apart.eqns if each.primitive.name == "add"][-1]  # before it, what nobody reads any more
    assert [made[each].primitive.name for each in added.invars] == ["reshape", "dot_general"]


def test_alpas_and_xlas_words_say_the_same():
    from hwaware.compat.specs import spec_to_indices
    from hwaware.compiler.layouts import alpa_spec, stacked_spec

    texts = {
        (None, None): ("{replicated}", "{}, {}"),
        (0, None): ("{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}", '{"device":(1)2}, {}'),
        (None, 1): ("{devices=[1,2,2]0,2,1,3 last_tile_dim_replicate}", '{}, {"device":(2)2}'),
        (1, 0): ("{devices=[2,2]0,2,1,3}", '{"device":(2)2}, {"device":(1)2}'),
    }
    for spec, (gspmd, shardy) in texts.items():
        assert alpa_spec(spec, (2, 2)).gspmd() == gspmd
        assert alpa_spec(spec, (2, 2)).shardy() == f'<mesh<["device"=4]>, [{shardy}]>'
    assert stacked_spec((1, None), (2, 3)).shardy() == '<mesh<["device"=6]>, [{"device"}, {}]>'
    assert stacked_spec((None, 1), (2, 3)).shardy() == '<mesh<["device"=6]>, [{"device":(1)2}, {"device":(2)3}]>'
    indices = spec_to_indices((4, 6), alpa_spec((1, 0), (2, 2)))
    rows = [(index[0].start or 0, index[1].start or 0) for index in indices]
    assert rows == [(0, 0), (2, 0), (0, 3), (2, 3)]  # device 1 is the first replica's second


def test_jaxs_own_setting_chooses_the_partitioner():
    import jax

    from hwaware.compiler.layouts import Layout, alpa_spec
    from hwaware.compiler.programs import lower

    before = getattr(jax.config, "jax_use_shardy_partitioner", None)
    if before is None:
        pytest.skip("This JAX has no Shardy.")
    doubled = jax.make_jaxpr(lambda x: 2 * x)(numpy.ones((4, 2), "float32"))
    rows = alpa_spec((0, None), (2, 1))
    try:
        for chosen, text in ((True, '#sdy.sharding<mesh<["device"=2]>, [{"device"}, {}]>'), (False, "mhlo.sharding")):
            jax.config.update("jax_use_shardy_partitioner", chosen)
            assert lower(doubled, "double", {}, Layout(2, (rows,), (rows,))).stablehlo.count(text) == 2
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


def test_a_microbatch_that_the_replicas_cannot_share_is_refused(pipeline):
    import alpa

    import hwaware.models
    from hwaware.errors import AlpaError

    model = hwaware.models.make(hwaware.models.MlpConfig(blocks=2, hidden=16))

    def step(state, batch):
        return model.train_step(state, batch, value_and_grad=alpa.value_and_grad)

    with pytest.raises(AlpaError, match=r"2 replicas, but a microbatch has 3 samples.*To fix:"):
        pipeline(step, model.initial_state(0), model.batch(0, 6), 1, logical=(2, 1))


@pytest.mark.parametrize("width", [3, 0])
def test_replicas_share_samples_also_without_elements(width):
    from hwaware.compiler.by_replica import split

    parts = split(numpy.arange(2 * 4 * width).reshape(2, 4, width), 1, 2)
    assert parts.shape == (2, 2, 2, width)
    assert (parts[1] == numpy.arange(2 * 4 * width).reshape(2, 4, width)[:, 2:]).all()
