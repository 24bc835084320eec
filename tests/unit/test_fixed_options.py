"""Stage options that do not fit the layers or the devices; and the smallest limit on the size of layers."""

import types

import pytest

from hwaware.errors import AlpaError
from hwaware.patching import fixed_options
from hwaware.tracing.cutting import least_limit


def manual(layers, physical, logical=None, options=None):
    return types.SimpleNamespace(
        forward_stage_layer_ids=layers,
        submesh_physical_shapes=physical,
        submesh_logical_shapes=logical,
        submesh_autosharding_option_dicts=options,
    )


def uniform(stages=None, physical=None, logical=None):
    return types.SimpleNamespace(num_stages=stages, submesh_physical_shape=physical, submesh_logical_shape=logical)


@pytest.mark.parametrize(
    ("option", "devices", "message"),
    [
        (manual([[0], [1]], [(1, 1)] * 2), 2, "the loss has the layers 0 to 2"),
        (manual([[0, 1], [1, 2]], [(1, 1)] * 2), 2, "the loss has the layers 0 to 2"),
        (manual([[0, 1], [2]], [(1, 1)]), 2, "has 2 stages and 1 physical shapes"),
        (manual([[0, 1], [2]], [(1, 1)] * 2, [(1, 1)] * 3), 2, "has 2 stages and 3 logical shapes"),
        (manual([[0, 1], [2]], [(1, 1), (1, 2)], [(1, 1), (1, 1)]), 3, "Stage 1 .* 2 devices .* and 1 by its logical"),
        (manual([[0, 1], [2]], [(1, 1), (1, 2)]), 4, r"use 1 \+ 2 = 3 devices, but there are 4"),
    ],
)
def test_manual_stages_that_do_not_fit(option, devices, message):
    with pytest.raises(AlpaError, match=rf"{message}.*To fix:"):
        fixed_options.require_manual(option, 3, devices)


def test_manual_stages_that_fit():
    fixed_options.require_manual(manual([[0, 1], [2]], [(1, 1), (1, 2)], [(1, 1), (2, 1)], [{}, {}]), 3, 3)
    fixed_options.require_manual(manual([[0, 1], [2]], [(1, 1), (1, 2)]), 3, None)  # any number of devices will do


@pytest.mark.parametrize(
    ("option", "layers", "devices", "per_host", "message"),
    [
        (uniform(), 4, 3, 3, "each of 4 stages, but there are 3 devices.*each: 1, 3;"),
        (uniform(), 2, 12, 4, "each of 2 stages, but there are 12 devices, 4 on a host.*each: 1, 3, 6, 12;"),
        (uniform(2), 4, 4, 4, "has 2 stages, but the loss has 4 layers"),
        (uniform(2, (1, 2)), 4, 4, 4, "no logical shape"),
        (uniform(2, (1, 2), (2, 1)), 4, 6, 6, r"2 stages of the shapes \(1, 2\) and \(2, 1\), but there are 6"),
        (uniform(4, (1, 1), (1, 1)), 2, 4, 4, "only 2 layers"),
    ],
)
def test_uniform_stages_that_do_not_fit(option, layers, devices, per_host, message):
    with pytest.raises(AlpaError, match=rf"{message}.*To fix:|To fix:.*{message}|{message}"):
        fixed_options.require_uniform(option, layers, devices, per_host)


def test_stages_for_which_other_workers_run():
    fixed_options.require_launched(uniform(), 2, 2)
    fixed_options.require_launched(manual([[0, 1], [2]], []), 3, 2)
    for option in (uniform(), uniform(3), manual([[0], [1], [2]], [])):
        with pytest.raises(AlpaError, match=r"has 3 stages, but workers for 2 stages run already.*To fix:"):
            fixed_options.require_launched(option, 3, 2)


def test_uniform_stages_that_fit():
    fixed_options.require_uniform(uniform(), 4, 8, 4)
    fixed_options.require_uniform(uniform(2, (1, 2), (1, 2)), 4, 4, 4)


@pytest.mark.parametrize(
    ("costs", "parts", "fewest", "limit"),
    [
        ([1] * 8, 3, 2, 3),
        ([1] * 10, 4, 2, 3),
        ([1] * 16, 6, 2, 3),
        ([5, 1, 1, 1], 2, 1, 5),
        ([5, 1, 1, 1], 2, 2, 6),  # two in each part
        ([1, 1], 3, 0, 1),  # one part is empty
        ([1, 1], 3, 1, float("inf")),
        ([], 2, 0, 0),
    ],
)
def test_the_lowest_limit_that_some_cut_keeps(costs, parts, fewest, limit):
    assert least_limit([float(cost) for cost in costs], parts, fewest) == limit
