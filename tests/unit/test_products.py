"""The check that a device computes rightly."""

import numpy
import pytest

from hwaware.profiler.products import _operand, _terms


@pytest.mark.parametrize("lead", [(), (3,)])
def test_the_terms_add_up_to_the_product_s_first_element(lead):
    left, right = _operand((*lead, 4, 5), numpy.float32, 0), _operand((*lead, 5, 6), numpy.float32, 1)
    assert _terms(left, right).sum() == pytest.approx((left @ right).ravel()[0], rel=1e-5)
