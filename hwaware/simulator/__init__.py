"""Run a plan event by event: every pass and every message of one step, on links that messages share.

The closed forms of hwaware.costs.pipeline rank plans. The simulator adds the wait for links that other messages use,
and Alpa's blocking order of sends. It shows where each stage idles.
"""

from __future__ import annotations

from hwaware.simulator.simulate import simulate as simulate

__all__ = ["simulate"]
