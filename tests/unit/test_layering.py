"""Which layer an operation belongs to, on graphs written by hand."""

import pytest

from hwaware.errors import UnusableInputError
from hwaware.tracing.graph import BACKWARD, FORWARD, Graph, Operation, Value
from hwaware.tracing.layering import layer_operations

BATCH, W0, W1 = 0, 1, 2


def graph(*operations):
    """Operations as (name, flops, inputs, outputs, phase); every value has 10 bytes."""
    count = 1 + max(value for operation in operations for value in (*operation[2], *operation[3]))
    values = (Value(10, True),) * count
    return Graph(tuple(Operation(*operation) for operation in operations), values, (BATCH, W0, W1), (count - 1,))


def names(pieces):
    return [[operation.name for operation in piece] for piece in pieces]


CHAIN = (
    ("dot0", 100.0, (BATCH, W0), (3,), FORWARD),
    ("tanh0", 0.0, (3,), (4,), FORWARD),
    ("slope0", 0.0, (4,), (5,), FORWARD),
    ("dot1", 100.0, (4, W1), (6,), FORWARD),
    ("seed", 0.0, (), (7,), BACKWARD),
    ("wide", 0.0, (7,), (8,), BACKWARD),
    ("dW1", 100.0, (4, 8), (9,), BACKWARD),  # reads what layer 0 made, but is layer 1's
    ("dx1", 100.0, (8, W1), (10,), BACKWARD),
    ("turn", 0.0, (10,), (11,), BACKWARD),
    ("dtanh0", 0.0, (11, 5), (12,), BACKWARD),
    ("dW0", 100.0, (BATCH, 12), (13,), BACKWARD),
)


def test_backward_follows_the_gradient_down():
    layered = layer_operations(graph(*CHAIN), [BATCH], 2)
    assert [piece[0] for piece in names(layered.forward)] == ["dot0", "dot1"]
    backward = names(layered.backward)
    assert {"seed", "wide", "dW1", "dx1"} <= set(backward[1])
    assert {"dtanh0", "dW0"} <= set(backward[0])


def test_what_crosses_and_what_is_kept():
    layered = layer_operations(graph(*CHAIN), [BATCH], 2)
    assert layered.crossing == (frozenset({4}), frozenset())
    assert layered.residuals == (frozenset({5}), frozenset({4}))  # the batch and the weights are no residuals
    assert layered.homes[W1] == {1}


def test_recomputation_belongs_to_the_layer_that_it_repeats():
    remat = (
        *CHAIN[:2],
        ("dot1", 100.0, (4, W1), (6,), FORWARD),
        ("dW1", 100.0, (4, 6), (9,), BACKWARD),
        ("dx1", 100.0, (6, W1), (10,), BACKWARD),
        ("again dot0", 100.0, (BATCH, W0), (14,), BACKWARD, (), True),
        ("again tanh0", 0.0, (14,), (15,), BACKWARD, (), True),
        ("dtanh0", 0.0, (10, 15), (12,), BACKWARD),
        ("dW0", 100.0, (BATCH, 12), (13,), BACKWARD),
    )
    backward = names(layer_operations(graph(*remat), [BATCH], 2).backward)
    assert backward == [["again dot0", "again tanh0", "dtanh0", "dW0"], ["dW1", "dx1"]]


def test_casts_of_parameters_sink_to_their_readers():
    casts = (
        ("cast0", 0.0, (W0,), (20,), FORWARD),
        ("cast1", 0.0, (W1,), (21,), FORWARD),
        ("dot0", 100.0, (BATCH, 20), (3,), FORWARD),
        ("dot1", 100.0, (3, 21), (6,), FORWARD),
    )
    layered = layer_operations(graph(*casts), [BATCH], 2)
    assert names(layered.forward) == [["cast0", "dot0"], ["cast1", "dot1"]]
    assert layered.crossing[0] == {3}
    assert layered.homes[W1] == {1}


def test_more_layers_than_products_is_refused():
    with pytest.raises(UnusableInputError, match=r"layers is 3, .* only 2 matrix products.*To fix: .*at most 2"):
        layer_operations(graph(*CHAIN), [BATCH], 3)
