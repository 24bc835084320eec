"""benchmarks/variation.py: without variation it is the simulator, and variation costs what neighbours wait."""

from __future__ import annotations

import json

import numpy as np
import pytest
from builders import ROOT, script

import hwaware
from hwaware.costs.evaluate import prepared_for

RECORDED = ROOT / "benchmarks" / "results" / "make-bench" / "fast-and-slow-gpt-small.json"


@pytest.fixture(scope="module")
def variation():
    return script("variation")


def test_without_variation_it_is_the_simulator(variation):
    result = hwaware.BenchmarkResult.load(RECORDED)
    for mapping in result.mappings:
        one = variation.chain(mapping.plan, prepared_for(mapping.plan, result.workload, result.profile))
        events = hwaware.simulate(mapping.plan, result.workload, result.profile, shared_links=False).events
        last = max(event.end_s for event in events if event.kind == "backward" and event.stage == 0)
        assert variation.pipeline_s(one, 0.0, steps=1) == pytest.approx(last)


def test_neighbours_that_take_equally_long_wait_for_each_other(variation):
    def added(*turns):
        nothing = [0.0] * (len(turns) - 1)
        one = variation.Chain(
            8, [t / 3 for t in turns], [2 * t / 3 for t in turns], [0.1] * len(turns), nothing, nothing,
            [0.0, *nothing], [*nothing, 0.0],
        )  # fmt: skip
        return variation.pipeline_s(one, 1.0, steps=2000) - variation.pipeline_s(one, 0.0, steps=1)

    alone, unlike, alike = added(1.0), added(1.0, 0.4), added(1.0, 1.0)
    assert alone == pytest.approx(0.0, abs=0.03), "a sum of passes has the sum of their means"
    assert unlike < 0.2 * alike
    # Nothing is as bad as two stages in step: 16 passes, each the later of two.
    assert alike < 16 * 0.1 / np.sqrt(np.pi)


def test_the_recorded_figures_are_of_the_recorded_results(variation):
    rows = json.loads((ROOT / "benchmarks" / "results" / "variation.json").read_text())["rows"]
    assert {row["part"] for row in rows} == set(variation.PARTS)
    result = hwaware.BenchmarkResult.load(ROOT / "benchmarks/results/best-measured/starts/three-hosts-gpt-small.json")
    off = np.abs(variation.errors(result, result.mappings, 1.0))
    [row] = [row for row in rows if row["set"] == "the fastest of them in three starts" and row["part"] == 1.0]
    assert (len(off), off.max()) == (row["n"], pytest.approx(row["largest"]))
