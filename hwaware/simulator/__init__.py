"""Discrete-event execution of a plan: every pass and every message of one step, on links that messages share.

The closed forms of hwaware.costs.pipeline rank plans; the simulator shows what they leave out: waiting for links that
other messages use, Alpa's blocking order of sends, and where each stage idles.
"""

from __future__ import annotations

from hwaware.simulator.simulate import simulate as simulate

__all__ = ["simulate"]
