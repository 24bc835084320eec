"""Rounds of disjoint pairs: every pair once, nobody twice in a round, as few rounds as there can be."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwaware.profiler.rounds import rounds


@pytest.mark.parametrize(("hosts", "expected"), [(0, 0), (1, 0), (2, 1), (3, 3), (4, 3), (5, 5), (64, 63), (65, 65)])
def test_number_of_rounds(hosts, expected):
    assert len(rounds(range(hosts))) == expected


@given(st.integers(0, 40))
def test_every_pair_once_and_nobody_twice_in_a_round(hosts):
    plan = rounds(range(hosts))
    met = sorted(tuple(sorted(pair)) for pairs in plan for pair in pairs)
    assert met == list(combinations(range(hosts), 2))
    for pairs in plan:
        assert len(pairs) == hosts // 2
        members = [member for pair in pairs for member in pair]
        assert len(set(members)) == len(members)


def test_names_are_kept():
    assert rounds(["a", "b"]) == ((("a", "b"),),)
