"""Cutting a chain: against all cuttings of small chains, and the rules between near-equal ones."""

import itertools
import random

import pytest
from builders import seeds

from hwaware.tracing.cutting import SMALLEST_PART_OF_MEAN, cut_chain


def parts_of(work, starts):
    return [sum(work[a:b]) for a, b in zip(starts, (*starts[1:], len(work)))]


def all_cuttings(items, parts):
    return [(0, *inner) for inner in itertools.combinations(range(1, items), parts - 1)]


@pytest.mark.parametrize("seed", seeds(30))
def test_least_bytes_among_all_cuttings_within_the_bounds(seed):
    draw = random.Random(seed)
    items, slack = draw.randint(3, 9), draw.choice([0.0, 0.3])
    parts = draw.randint(2, items)
    work = [draw.randint(1, 9) for _ in range(items)]
    crossing = [draw.randint(0, 20) for _ in range(items - 1)]

    def crossed(starts):
        return sum(crossing[start - 1] for start in starts[1:])

    cuttings = all_cuttings(items, parts)
    largest = min(max(parts_of(work, starts)) for starts in cuttings)
    within = [starts for starts in cuttings if max(parts_of(work, starts)) <= (1 + slack) * largest + 1e-9]
    smallest = SMALLEST_PART_OF_MEAN * sum(work) / parts
    even = [starts for starts in within if min(parts_of(work, starts)) >= smallest]

    found = cut_chain(work, crossing, parts, slack)
    assert found in (even or within)
    assert crossed(found) == min(crossed(starts) for starts in (even or within))


def test_without_slack_the_largest_part_is_as_small_as_can_be():
    assert cut_chain([3, 1, 1, 3], [0, 9, 0], 2, slack=0.0) == (0, 2)


def test_balance_breaks_ties_in_bytes():
    assert cut_chain([1] * 9, [7] * 8, 3, slack=1.0) == (0, 3, 6)


def test_one_part_is_the_whole():
    assert cut_chain([1, 2], [5], 1) == (0,)


def test_as_many_parts_as_items():
    assert cut_chain([1, 50, 1], [9, 9], 3) == (0, 1, 2)
