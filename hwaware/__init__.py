"""Place the pipeline stages of a JAX model on the machines of a heterogeneous cluster, inside Alpa.

Python imports each public name on its first use, so `import hwaware` loads neither JAX, Ray, Alpa nor matplotlib.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, List

from hwaware._version import __version__ as __version__

if TYPE_CHECKING:
    from hwaware import costs as costs
    from hwaware import placement as placement
    from hwaware.activation import HardwareAwareStageOption as HardwareAwareStageOption
    from hwaware.activation import disable as disable
    from hwaware.activation import enable as enable
    from hwaware.activation import enabled as enabled
    from hwaware.adapter import last_history as last_history
    from hwaware.adapter import last_profile as last_profile
    from hwaware.bench.differences import Comparison as Comparison
    from hwaware.bench.differences import compare as compare
    from hwaware.bench.profiling import profile as profile
    from hwaware.cluster import ClusterProfile as ClusterProfile
    from hwaware.costs import Cost as Cost
    from hwaware.costs import StageCost as StageCost
    from hwaware.costs import evaluate as evaluate
    from hwaware.errors import HwawareError as HwawareError
    from hwaware.history import History as History
    from hwaware.patching import last_plan as last_plan
    from hwaware.patching import last_workload as last_workload
    from hwaware.patching import restore_newest as restore_newest
    from hwaware.placement import Explanation as Explanation
    from hwaware.placement import explain as explain
    from hwaware.placement import plan as plan
    from hwaware.plans import Plan as Plan
    from hwaware.result import BenchmarkResult as BenchmarkResult
    from hwaware.runtime.settings import runtime_settings as runtime_settings
    from hwaware.runtime.step_recorder import StepRecorder as StepRecorder
    from hwaware.simulator import simulate as simulate
    from hwaware.timeline import Timeline as Timeline
    from hwaware.tracing import trace as trace
    from hwaware.workload import Workload as Workload

_HOMES = {
    "BenchmarkResult": "hwaware.result",
    "ClusterProfile": "hwaware.cluster",
    "Comparison": "hwaware.bench.differences",
    "Cost": "hwaware.costs",
    "Explanation": "hwaware.placement",
    "HardwareAwareStageOption": "hwaware.activation",
    "History": "hwaware.history",
    "HwawareError": "hwaware.errors",
    "Plan": "hwaware.plans",
    "StageCost": "hwaware.costs",
    "StepRecorder": "hwaware.runtime.step_recorder",
    "Timeline": "hwaware.timeline",
    "Workload": "hwaware.workload",
    "compare": "hwaware.bench.differences",
    "disable": "hwaware.activation",
    "enable": "hwaware.activation",
    "enabled": "hwaware.activation",
    "evaluate": "hwaware.costs",
    "explain": "hwaware.placement",
    "last_history": "hwaware.adapter",
    "last_plan": "hwaware.patching",
    "last_profile": "hwaware.adapter",
    "last_workload": "hwaware.patching",
    "plan": "hwaware.placement",
    "profile": "hwaware.bench.profiling",
    "restore_newest": "hwaware.patching",
    "runtime_settings": "hwaware.runtime.settings",
    "simulate": "hwaware.simulator",
    "trace": "hwaware.tracing",
}

# Packages with public names of their own: hwaware.costs.fit_collectives, hwaware.placement.training_dp.
_ROOMS = ("costs", "placement")

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"hwaware.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'hwaware' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> List[str]:
    return sorted([*__all__, *_ROOMS])
