"""Build a heterogeneous multi-host Ray cluster on one Linux machine.

Ray and TCP are real, only slowed down. The scenario sets every speed, so a measurement has a known truth.

    bed = testbed.up("fast-and-slow")
    os.environ.update(bed.driver_environment())
    bed.enter()
    ray.init(address=bed.address, _node_ip_address=bed.head_address)
    ...
    testbed.down(bed.name)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, List

if TYPE_CHECKING:
    from hwaware.bench.testbed.manager import Testbed as Testbed
    from hwaware.bench.testbed.manager import down as down
    from hwaware.bench.testbed.manager import find as find
    from hwaware.bench.testbed.manager import find_by_name as find_by_name
    from hwaware.bench.testbed.manager import list_testbeds as list_testbeds
    from hwaware.bench.testbed.manager import running as running
    from hwaware.bench.testbed.manager import up as up
    from hwaware.bench.testbed.scenarios import Scenario as Scenario
    from hwaware.bench.testbed.scenarios import load_scenario as load_scenario
    from hwaware.bench.testbed.scenarios import shipped_names as shipped_names

_HOMES = {
    "Scenario": "scenarios",
    "Testbed": "manager",
    "down": "manager",
    "find": "manager",
    "find_by_name": "manager",
    "list_testbeds": "manager",
    "load_scenario": "scenarios",
    "running": "manager",
    "shipped_names": "scenarios",
    "up": "manager",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    # Import on first use: the launcher is a module of this package, and starts before every command of a host.
    if name not in _HOMES:
        raise AttributeError(f"module 'hwaware.bench.testbed' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hwaware.bench.testbed.{_HOMES[name]}"), name)


def __dir__() -> List[str]:
    return __all__
