"""Numbers as text: one unit for a group, three significant digits for its largest, nothing lost at the edges."""

import math

import pytest

from hwaware.formatting import BYTES, BYTES_PER_S, FLOPS_PER_S, SECONDS, column, common_unit, percent, ratio, text


@pytest.mark.parametrize(
    ("value", "quantity", "expected"),
    [
        (1.5e-7, SECONDS, "0.150 µs"),
        (2.25e-4, SECONDS, "225.0 µs"),
        (0.0225, SECONDS, "22.50 ms"),
        (0.99996, SECONDS, "1.000 s"),
        (7200.0, SECONDS, "7200.0 s"),
        (999, BYTES, "999 B"),
        (1000, BYTES, "1.000 kB"),
        (25e6, BYTES_PER_S, "25.00 MB/s"),
        (6.5e10, FLOPS_PER_S, "65.00 GFLOP/s"),
        (0.0, BYTES, "0 B"),
        (0.0, SECONDS, "0 s"),
        (-0.002, SECONDS, "-2.000 ms"),
        (None, SECONDS, "-"),
        (math.nan, SECONDS, "-"),
        (math.inf, BYTES, "-"),
    ],
)
def test_one_number_has_the_unit_that_fits_it(value, quantity, expected):
    assert text(value, quantity) == expected


def test_a_group_shares_the_unit_and_the_decimals_of_its_largest():
    assert column([0.0225, 0.0004, None, math.inf], SECONDS) == ("ms", ["22.50", "0.40", "-", "-"])


def test_a_group_without_numbers_has_the_base_unit():
    assert column([None, math.nan], SECONDS) == ("s", ["-", "-"])


def test_no_value_rounds_up_to_four_digits():
    for exponent in range(-6, 12):
        number = text(9.9999 * 10.0**exponent, BYTES if exponent >= 0 else SECONDS).split()[0]
        assert float(number) < 1000


def test_unit_size_undoes_the_scaling():
    unit = common_unit([1.5e9], BYTES)
    assert float(unit.text(1.5e9)) * unit.size == 1.5e9


def test_ratios_and_percentages():
    assert [ratio(1.4286), ratio(None), percent(0.0523), percent(0.1, signed=True), percent(math.nan)] == [
        "1.43x",
        "-",
        "5.2 %",
        "+10.0 %",
        "-",
    ]
