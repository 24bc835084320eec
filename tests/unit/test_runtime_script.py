"""benchmarks/runtime.py: sizes follow the machine's speed, and the bound on a step is what it says."""

from __future__ import annotations

from types import SimpleNamespace

import builders
import pytest


@pytest.fixture(scope="module")
def script():
    return builders.script("runtime")


class Machine:
    """Stands for a testbed whose stages take so long; every program that it starts has to be closed."""

    def __init__(self, script, monkeypatch, stage_s):
        self.open, self.made = 0, []
        self.stage_s = stage_s
        self.scenario = SimpleNamespace(hosts=lambda: ["a", "b"], rate_mbit=lambda source, target: 200.0)
        monkeypatch.setattr(script, "make_run", self.make_run)

    def make_run(self, bed, name, units, microbatch_size, hidden=1024):
        self.open += 1
        self.made.append((units, microbatch_size, hidden))
        alone = [(self.stage_s(units, microbatch_size, hidden), 0.0, 0.001)]
        return SimpleNamespace(alone_s=lambda: iter(alone), close=self.closed, units=units)

    def closed(self):
        self.open -= 1


@pytest.mark.parametrize(("unit_s", "units"), [(0.02, 3), (0.055, 1), (0.5, 1), (0.001, 60)])
def test_a_stage_has_blocks_for_the_time_that_is_asked_for(script, monkeypatch, unit_s, units):
    machine = Machine(script, monkeypatch, lambda count, samples, hidden: unit_s * count)
    run = script.sized_run(machine, 0.06)
    assert run.units == units
    assert machine.open == 1  # what it only tried is closed


@pytest.mark.parametrize("speed", [0.2, 1.0, 3.0, 10.0])
def test_the_width_puts_the_link_between_half_and_all_of_a_stage(script, monkeypatch, speed):
    machine = Machine(script, monkeypatch, lambda units, samples, hidden: samples * hidden**2 * 2e-10 * speed)
    width = script.overlap_width(machine)
    link_s = 4 * script.OVERLAP_SAMPLES * width * 8 / 200e6
    stage_s = machine.stage_s(1, script.OVERLAP_SAMPLES, width)
    assert 0.5 <= link_s / stage_s <= 1.0
    assert machine.open == 0


def test_a_link_that_never_gets_there_is_said(script, monkeypatch):
    machine = Machine(script, monkeypatch, lambda units, samples, hidden: 1e-9 * hidden)  # far less than any message
    with pytest.raises(SystemExit, match="never within"):
        script.overlap_width(machine)
    assert machine.open == 0


def test_ideal_by_hand(script):
    # Two equal stages and no link: all microbatches on the second one, after the first one's first, and one update.
    assert script.ideal_s([(1.0, 2.0, 0.5), (1.0, 2.0, 9.0)], [0.0]) == 3.0 + 16 * 3.0 + 0.5
    # A link that takes longer than a stage decides: one stage, all messages and the last one's way back.
    assert script.ideal_s([(1.0, 2.0, 0.0), (1.0, 2.0, 0.0)], [10.0]) == 3.0 + 17 * 10.0
