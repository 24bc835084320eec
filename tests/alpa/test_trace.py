"""Tracing a plain JAX train step: every figure of a small model by hand, totals of the large ones by formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hwaware
from hwaware import models
from hwaware.errors import UnusableInputError
from hwaware.tracing.flops import jaxpr_flops

pytestmark = pytest.mark.alpa

WIDTHS = (8, 16, 4, 2)
SAMPLES = 4
FLOAT = 4  # bytes


def weights():
    return [jnp.ones(shape) for shape in zip(WIDTHS, WIDTHS[1:])]


def loss_of(layer):
    def loss(state, batch):
        for weight in state[:-1]:
            batch = layer(weight, batch)
        return jnp.mean(batch @ state[-1])

    return loss


def square_layer(weight, inputs):
    product = inputs @ weight
    return product * product


def gradient_step(loss):
    def train_step(state, batch):
        value, gradients = jax.value_and_grad(loss)(state, batch)
        return jax.tree_util.tree_map(lambda old, change: old - 0.1 * change, state, gradients), value

    return train_step


def trace(step, state=None, **options):
    options = {"num_layers": 3, "microbatch_size": SAMPLES, **options}
    return hwaware.trace(step, weights() if state is None else state, np.ones((32, WIDTHS[0]), np.float32), **options)


def figures(workload, *names):
    return [tuple(getattr(layer, name) for name in names) for layer in workload.layers]


PRODUCTS = [2 * SAMPLES * a * b for a, b in zip(WIDTHS, WIDTHS[1:])]
MADE = [SAMPLES * width * FLOAT for width in WIDTHS]


@pytest.mark.parametrize("wrap", [lambda step: step, jax.jit, lambda step: jax.jit(jax.jit(step))])
def test_every_figure_of_a_small_model(wrap):
    workload = trace(wrap(gradient_step(loss_of(square_layer))), name="small")
    assert (workload.name, workload.microbatch_size, workload.dtype) == ("small", SAMPLES, "float32")
    assert figures(workload, "forward_flops") == [(flops,) for flops in PRODUCTS]
    # Gradients of weights and inputs cost one product each; nothing needs the gradient of the batch.
    assert figures(workload, "backward_flops") == [(PRODUCTS[0],), (2 * PRODUCTS[1],), (2 * PRODUCTS[2],)]
    assert figures(workload, "parameter_bytes") == [(a * b * FLOAT,) for a, b in zip(WIDTHS, WIDTHS[1:])]
    assert figures(workload, "output_bytes") == [(MADE[1],), (MADE[2],), (0,)]
    # Kept: the product for its square, and the layer's input for its weights, which for the first is the batch.
    assert figures(workload, "activation_bytes") == [(MADE[1],), (MADE[1] + MADE[2],), (MADE[2],)]
    assert figures(workload, "optimizer_bytes") == [(0,)] * 3


def test_checkpoints_keep_less_and_compute_more():
    workload = trace(gradient_step(loss_of(jax.checkpoint(square_layer))))
    assert figures(workload, "forward_flops") == [(flops,) for flops in PRODUCTS]
    assert figures(workload, "backward_flops") == [(2 * PRODUCTS[0],), (3 * PRODUCTS[1],), (2 * PRODUCTS[2],)]
    assert figures(workload, "activation_bytes") == [(0,), (MADE[1],), (MADE[2],)]


def test_inner_functions_with_jit_and_own_derivatives():
    @jax.custom_vjp
    def layer(weight, inputs):
        return square_layer(weight, inputs)

    layer.defvjp(
        lambda weight, inputs: (square_layer(weight, inputs), (weight, inputs)),
        lambda kept, change: jax.vjp(square_layer, *kept)[1](change),  # computes the product again
    )
    workload = trace(gradient_step(loss_of(jax.jit(layer))))
    assert figures(workload, "forward_flops") == [(flops,) for flops in PRODUCTS]
    assert figures(workload, "activation_bytes") == [(0,), (MADE[1],), (MADE[2],)]


def test_fewer_layers_than_products():
    workload = trace(gradient_step(loss_of(square_layer)), num_layers=np.int64(2), microbatch_size=np.int64(SAMPLES))
    assert type(workload.microbatch_size) is int  # files hold no numbers of NumPy
    assert figures(workload, "forward_flops") == [(PRODUCTS[0],), (PRODUCTS[1] + PRODUCTS[2],)]
    assert figures(workload, "activation_bytes") == [(MADE[1],), (MADE[1] + 2 * MADE[2],)]


def test_a_skip_connection_crosses_every_cut_that_it_spans():
    def loss(state, batch):
        first = batch @ state[0]
        return jnp.mean(jnp.tanh(first @ state[1]) @ state[2] + first)

    state = [jnp.ones((8, 8))] * 3
    workload = trace(gradient_step(loss), state)
    width = SAMPLES * 8 * FLOAT
    assert figures(workload, "output_bytes") == [(width,), (2 * width,), (0,)]


def test_casts_make_the_data_type_and_belong_to_their_layer():
    def half(weight, inputs):
        return square_layer(weight.astype(jnp.bfloat16), inputs.astype(jnp.bfloat16))

    workload = trace(gradient_step(loss_of(half)), num_layers=3)
    assert workload.dtype == "bfloat16"
    assert figures(workload, "parameter_bytes") == [(a * b * FLOAT,) for a, b in zip(WIDTHS, WIDTHS[1:])]


def test_state_belongs_to_the_layers_that_read_or_change_it():
    def train_step(state, batch):
        def loss(weights):
            product = batch @ weights[0] - state["mean"]
            return jnp.mean((product * product) @ weights[1]), product.mean(0)

        (value, mean), gradients = jax.value_and_grad(loss, has_aux=True)(state["weights"])
        moved = [m * 0.9 + g for m, g in zip(state["momentum"], gradients)]
        return {"weights": moved, "momentum": moved, "mean": mean, "count": state["count"] + 1}, value

    pair = [jnp.ones((8, 8)), jnp.ones((8, 24))]
    state = {"weights": pair, "momentum": pair, "mean": jnp.ones(8), "count": 0}
    workload = trace(train_step, state, num_layers=2)
    mean, count = 32, 4  # the first layer reads the mean, which has an accumulator; nothing says who counts
    assert figures(workload, "parameter_bytes", "gradient_bytes") == [(256 + mean,) * 2, (768,) * 2]
    assert sum(layer.optimizer_bytes for layer in workload.layers) == 1024 + count
    assert [layer.optimizer_bytes // 256 for layer in workload.layers] == [1, 3]


WIDE = 64
MATRIX = WIDE * WIDE * FLOAT


def wide_step(frozen):
    """Three products, the last by the first's weights transposed; `frozen` are not trained."""

    def train_step(state, batch):
        def loss(trained):
            weights = {**state["weights"], **trained}
            x = jnp.tanh(batch @ weights["tied"])
            return jnp.mean((jnp.tanh(x @ weights["own"]) @ weights["tied"].T + constant[0]) ** 2)

        trained = {name: value for name, value in state["weights"].items() if name not in frozen}
        gradients = jax.grad(loss)(trained)
        moments = {name: 0.9 * state["moments"][name] + gradients[name] for name in trained}
        new = {name: trained[name] - 0.1 * moments[name] for name in trained}
        return {"weights": {**state["weights"], **new}, "moments": moments}

    constant = jnp.ones((1024, WIDE))
    weights = {"tied": jnp.ones((WIDE, WIDE)), "own": jnp.ones((WIDE, WIDE))}
    return train_step, {"weights": weights, "moments": {n: w for n, w in weights.items() if n not in frozen}}


def test_frozen_and_tied_weights_lie_on_the_layers_that_read_them():
    names = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "update_bytes")
    batch = np.ones((4, WIDE), np.float32)
    constant = 1024 * WIDE * FLOAT
    step, state = wide_step(frozen=())
    tied = hwaware.trace(step, state, batch, num_layers=3)
    # Each copy of the tied weights is updated with the other layer's gradient.
    assert figures(tied, *names) == [
        (MATRIX, MATRIX, MATRIX, MATRIX), (MATRIX, MATRIX, MATRIX, None), (MATRIX + constant, MATRIX, MATRIX, MATRIX)
    ]  # fmt: skip
    (shared,) = tied.shared
    assert (shared.layers, shared.parameter_bytes, shared.optimizer_bytes) == ((0, 2), MATRIX, MATRIX)
    kept = hwaware.trace(step, state, batch, num_layers=3, donate=False)
    # Without donation, Alpa updates shared weights on the last stage alone.
    assert figures(kept, *names[2:]) == [(0, None), (MATRIX, 2 * MATRIX), (MATRIX, 3 * MATRIX)]
    step, state = wide_step(frozen=("tied",))
    frozen = hwaware.trace(step, state, batch, num_layers=3)
    assert figures(frozen, *names) == [
        (MATRIX, 0, 0, None), (MATRIX, MATRIX, MATRIX, None), (MATRIX + constant, 0, 0, None)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        models.MlpConfig(hidden=32),
        models.GptConfig(blocks=3, hidden=32, heads=2, sequence=16, vocabulary=64),
        models.MoeConfig(blocks=4, hidden=16, heads=2, sequence=8, vocabulary=32, experts=2),
        models.WresnetConfig(blocks=3, width=8, image=8),
    ],
)
def test_built_in_models_add_up(config):
    model = models.make(config)
    state, batch = model.abstract_state(), model.batch(0, 4)
    workload = hwaware.trace(model.train_step, state, batch, num_layers=4)
    total = jaxpr_flops(jax.make_jaxpr(model.train_step)(state, batch))
    parameters = sum(leaf.size * FLOAT for leaf in jax.tree_util.tree_leaves(state.params))
    assert sum(layer.forward_flops + layer.backward_flops for layer in workload.layers) == total
    # Some layers also read a mask, which is a constant.
    assert parameters <= sum(layer.parameter_bytes for layer in workload.layers) <= 1.01 * parameters
    # Every layer has Adam's number of steps, one has the state's own.
    steps = 4 * (len(workload.layers) + 1)
    assert sum(layer.optimizer_size_bytes for layer in workload.layers) == 2 * parameters + steps
    # No gradient of the batch is needed; all other products cost twice their forward part in the backward pass.
    for layer in workload.layers[1:]:
        assert layer.backward_flops == 2 * layer.forward_flops


def test_scratch_is_more_where_the_products_are_convolutions():
    def per_activation(config):
        model = models.make(config)
        layers = hwaware.trace(model.train_step, model.abstract_state(), model.batch(0, 1), num_layers=2).layers
        return [layer.temporary_bytes / layer.activation_bytes for layer in layers]

    assert per_activation(models.MlpConfig(hidden=32)) == pytest.approx([0.4, 0.4])
    convolutions, with_a_product = per_activation(models.WresnetConfig(blocks=3, width=8, image=8))
    assert convolutions == pytest.approx(0.57)
    assert 0.5 < with_a_product < 0.57


def test_samples_count_where_they_are_read():
    model = models.make(models.MlpConfig(blocks=4, hidden=32))
    workload = hwaware.trace(model.train_step, model.abstract_state(), model.batch(0, 1), 4, SAMPLES)
    inputs, labels = (leaf.nbytes * SAMPLES for leaf in jax.tree_util.tree_leaves(model.batch(0, 1)))
    assert figures(workload, "batch_bytes") == [(inputs,), (0,), (0,), (labels,)]


def test_gpt_is_what_the_formula_says():
    config = models.GptConfig(blocks=4, hidden=64, heads=4, sequence=32, vocabulary=128)
    model = models.make(config)
    workload = hwaware.trace(model.train_step, model.abstract_state(), model.batch(0, 1), num_layers=4)
    tokens = workload.microbatch_size * config.sequence
    block = 24 * config.hidden**2 * tokens + 4 * config.sequence * config.hidden * tokens
    head = 2 * config.hidden * config.vocabulary * tokens
    assert figures(workload, "forward_flops") == [(block,)] * 3 + [(block + head,)]
    assert figures(workload, "output_bytes") == [(tokens * config.hidden * FLOAT,)] * 3 + [(0,)]


def no_gradient(state, batch):
    return state, jnp.mean(batch @ state[0])


def in_a_scan(state, batch):
    step = gradient_step(loss_of(square_layer))
    return jax.lax.scan(lambda carry, _: step(carry, batch), state, None, length=2)


def not_traceable(state, batch):
    return state if batch.sum() > 0 else [weight * 2 for weight in state]


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        (no_gradient, {}, "takes no gradient"),
        (in_a_scan, {}, "takes no gradient.*not inside lax.scan"),
        (not_traceable, {}, "cannot be traced"),
        (gradient_step(loss_of(square_layer)), {"num_layers": 4}, "only 3 matrix products.*at most 3 layers"),
        (gradient_step(loss_of(square_layer)), {"num_layers": 0}, "number of layers is 0"),
        (gradient_step(loss_of(square_layer)), {"microbatch_size": 2.5}, "samples per microbatch is 2.5"),
    ],
)
def test_what_cannot_be_traced_is_refused(step, options, message):
    with pytest.raises(UnusableInputError, match=f"(?s){message}.*To fix:|To fix:.*{message}|{message}"):
        trace(step, **options)


def picks(state, batch):
    made = batch @ state[0]
    return made[made > 0].sum()


@pytest.mark.parametrize(
    ("step", "state", "error"),
    [
        (gradient_step(picks), weights(), ""),
        (lambda state, _: state, [*weights(), "a name"], "TypeError: "),
        (lambda state, _: state["params"], {}, "KeyError: 'params'"),
    ],
)
def test_errors_of_jax_and_of_the_step_say_that_it_cannot_be_traced(step, state, error):
    with pytest.raises(UnusableInputError, match=f"The train step cannot be traced: {error}"):
        trace(step, state)


def test_a_state_of_one_array_is_not_taken_for_a_loss():
    def loss(state, batch):
        return jnp.mean((batch @ state) ** 2)

    def step(state, batch):
        value, gradient = jax.value_and_grad(loss)(state, batch)
        return jnp.sqrt(value), state - gradient

    (layer,) = trace(step, weights()[0], num_layers=1, donate=False).layers
    assert layer.gradient_bytes == layer.update_bytes == layer.parameter_bytes == WIDTHS[0] * WIDTHS[1] * FLOAT


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("same", [lambda state: state, lambda state: [jnp.cos(leaf) for leaf in state]])
def test_a_result_of_the_form_of_the_state_is_not_taken_for_it(first, same):
    plain = gradient_step(loss_of(square_layer))

    def step(state, batch):
        new, value = plain(state, batch)
        return (same(state), new, value) if first else (new, same(state), value)

    assert figures(trace(step), "gradient_bytes", "optimizer_bytes") == [
        (a * b * FLOAT, 0) for a, b in zip(WIDTHS, WIDTHS[1:])
    ]


def test_complex_parameters_have_gradients():
    def loss(state, batch):
        return jnp.mean(jnp.abs(batch @ state[0]) ** 2)

    (layer,) = trace(gradient_step(loss), [jnp.ones((8, 4), jnp.complex64)], num_layers=1).layers
    assert layer.gradient_bytes == layer.parameter_bytes == 8 * 4 * 2 * FLOAT


def test_a_scan_counts_each_turn_for_the_data_type():
    def loss(state, batch):
        made, _ = jax.lax.scan(lambda made, weight: (made @ weight, None), batch.astype(jnp.bfloat16), state["blocks"])
        return jnp.mean((made.astype(jnp.float32) @ state["head"]) ** 2)

    state = {"blocks": jnp.ones((50, 8, 8), jnp.bfloat16), "head": jnp.ones((8, 32))}
    workload = trace(gradient_step(loss), state, num_layers=2)
    blocks, head = workload.layers
    assert blocks.forward_flops > head.forward_flops
    assert workload.dtype == "bfloat16"


@pytest.mark.parametrize("batch", [{}, np.float32(1.0), {"a": np.ones((4, 8)), "b": np.ones((2, 8))}])
def test_a_batch_without_a_common_axis_is_refused(batch):
    with pytest.raises(UnusableInputError, match="same axis 0"):
        hwaware.trace(gradient_step(loss_of(square_layer)), weights(), batch)
