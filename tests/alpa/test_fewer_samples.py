"""A program on one replica's samples: what it computes, and what cannot be made smaller."""

import numpy
import pytest
from builders import chosen

pytestmark = pytest.mark.alpa


def smaller(function, shapes, dims, replicas=2):
    import jax

    from hwaware.compiler.fewer_samples import with_part_of_samples

    closed_jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes))
    return with_part_of_samples(closed_jaxpr, dims, replicas)


@pytest.mark.parametrize("name", chosen(["mlp", "gpt", "moe", "wresnet"], 0))
def test_each_layer_of_the_models_has_its_part(name):
    import jax

    import hwaware.models
    from hwaware.patching.layer_programs import function_programs
    from hwaware.tracing.function import trace_programs

    model = hwaware.models.make(hwaware.models.configure(name, {}))
    _, functions = trace_programs(
        lambda state, batch: model.train_step(state, batch, value_and_grad=jax.value_and_grad),
        model.abstract_state(), model.batch(0, 1), num_layers=3, microbatch_size=6,
    )  # fmt: skip
    layers = function_programs(functions, 6)
    assert len(layers) == 3
    for layer in layers:
        assert [part.replicas for part in layer.parts] == [2, 6]
        for part in layer.parts:
            assert len(part.programs()) == 2
            for smaller_one, whole in zip(part.programs(), layer.whole()):
                changed = [(a, b) for a, b in zip(smaller_one.program.arguments, whole.program.arguments) if a != b]
                assert changed
                assert all(part.replicas * numpy.prod(a[0]) == numpy.prod(b[0]) for a, b in changed)


def test_sums_of_the_parts_are_the_whole():
    import jax
    import jax.numpy as jnp

    from hwaware.compat.programs import jaxpr_as_fun

    def loss(weights, x, labels):
        hidden = jnp.tanh(x.reshape(8, 3 * 4) @ weights).reshape(8, 5)
        chances = jax.nn.log_softmax(hidden)
        chosen = jnp.take_along_axis(chances, labels.astype("int32")[:, None], axis=1)
        return -chosen.sum() / 8 + (hidden * jnp.ones((8, 1)) ** 2).sum()

    def step(weights, x, labels, total):
        value, gradient = jax.value_and_grad(loss)(weights, x, labels)
        return [value, total + gradient]

    part = smaller(step, [(12, 5), (8, 3, 4), (8,), (12, 5)], [None, 0, 0, None])
    assert [aval.shape for aval in part.in_avals] == [(12, 5), (4, 3, 4), (4,), (12, 5)]
    random = numpy.random.RandomState(0)
    weights, x = random.randn(12, 5).astype("f"), random.randn(8, 3, 4).astype("f")
    labels, zeros = random.randint(0, 5, 8).astype("f"), numpy.zeros((12, 5), "f")
    run = jaxpr_as_fun(part)
    parts = [run(weights, x[half], labels[half], zeros) for half in (slice(0, 4), slice(4, 8))]
    for whole, first, second in zip(step(weights, x, labels, zeros), *parts):
        numpy.testing.assert_allclose(whole, first + second, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_made_smaller_is_left_out(caplog):
    import jax

    with caplog.at_level("DEBUG", "hwaware"):
        assert smaller(lambda x: x.swapaxes(0, 1).reshape(-1), [(4, 3)], [0]) is None
        assert "A layer is not timed with 1/2 of its samples" in caplog.text
        assert smaller(lambda x: jax.lax.scan(lambda c, y: (c + y, y), x[0], x)[1], [(4, 3)], [0]) is None
    assert "ValueError: scan has a program of its own" in caplog.text
    assert smaller(lambda x: x + 1, [(4, 3)], [None]) is None  # has no samples
    assert smaller(lambda x: x + 1, [(5, 3)], [0]) is None  # not in equal parts
    assert smaller(lambda x: x + 1, [(4, 3)], [0]).out_avals[0].shape == (2, 3)


def test_a_layer_without_all_parts_has_none():
    from hwaware.calibration.programs import LayerPrograms

    assert LayerPrograms("forward", "backward", None).with_part(2, "half of forward", None).parts == ()
    (part,) = LayerPrograms("forward", None, None).with_part(2, "half of forward", None).parts
    assert (part.replicas, part.programs()) == (2, ["half of forward"])
