"""benchmarks/fastest_again.py: what is measured once more are the earlier result's mappings, each once."""

from __future__ import annotations

import builders
import pytest

import hwaware
from hwaware.bench.mappings import Candidate

EARLIER = builders.ROOT / "benchmarks" / "results" / "best-measured" / "three-hosts-gpt-small.json"


@pytest.fixture(scope="module")
def script():
    return builders.script("fastest_again")


@pytest.mark.parametrize("again", ["hwaware", "each"])
def test_earlier_mappings_are_measured_beside_new_ones(script, again):
    earlier = hwaware.BenchmarkResult.load(EARLIER)
    plans = {mapping.name: mapping.plan for mapping in earlier.mappings}
    others = [name for name in plans if name.startswith("each")]
    assert {"hwaware"} < set(plans)
    assert len(others) >= 2
    assert any(name.startswith("alpa") for name in plans)
    placed = plans["hwaware"] if again == "hwaware" else plans[others[0]]
    found = script.with_earlier([Candidate("hwaware", placed, 7.0)], earlier, lambda plan: float(len(plan.stages)))
    # Today's by its own price, Alpa's not at all, and none twice: what hwaware placed before has another name.
    expected = {"hwaware": placed, **{name: plans[name] for name in others}}
    if again == "each":
        expected = {**expected, "earlier": plans["hwaware"]}
        del expected[others[0]]
    assert {one.name: one.plan for one in found} == expected
    assert [one.predicted_step_s for one in found] == [7.0, *(len(one.plan.stages) for one in found[1:])]
