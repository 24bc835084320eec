"""Turn a program's `alpa.AutoStageOption` into a rule for the search, and log which settings have no effect."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import math
from typing import Any, List, Optional, Sequence, Tuple

from hwaware.cluster import ClusterProfile, Device
from hwaware.errors import AlpaError
from hwaware.placement import StageRule
from hwaware.workload import Workload

LOG = logging.getLogger("hwaware")
# Space of submesh shapes -> the most hosts of a stage, and True if their number must be a power of two. Alpa's default,
# "power_of_two", asks for nothing, because stage_option="auto" means it.
_HOSTS = {"all": (math.inf, False), "small_power_of_two": (4, True)}
_PHYSICAL = ("power_of_two", "manual", *_HOSTS)
_LOGICAL = ("single_node_model_parallel", "all", "same_as_physical", "data_parallel_only", "model_parallel_only")
# Settings for the ways in which Alpa finds a stage's costs. hwaware takes costs from the cluster's profile.
_COSTS = ("layer_profile_mode", "use_hlo_cost_model", "profiling_database_filename", "cached_profile_result")
# (hosts, devices of each host)
Shape = Tuple[int, int]


def rule_of(option: Any, profile: ClusterProfile, workload: Workload) -> Optional[StageRule]:
    """Return the rule that says which stages an AutoStageOption allows; None if it allows all.

    Args:
        option: The AutoStageOption.
        profile: The profile of the mesh's devices.
        workload: Alpa's layers.

    Raises:
        AlpaError: The option names a space that Alpa does not know.
    """
    physical, logical = option.submesh_physical_shape_space, option.submesh_logical_shape_space
    _require("submesh_physical_shape_space", physical, _PHYSICAL)
    _require("submesh_logical_shape_space", logical, _LOGICAL)
    if physical == "manual" and not option.manually_specified_submeshes:
        raise AlpaError(
            'submesh_physical_shape_space is "manual" and manually_specified_submeshes is empty.',
            "list the shapes (hosts, devices of each) that a stage may have.",
        )
    tolerance = option.stage_imbalance_tolerance
    if physical == "power_of_two" and logical == "single_node_model_parallel" and math.isinf(tolerance):
        return None
    widths = collections.Counter(device.host for device in profile.devices)
    named = [(int(hosts), int(width)) for hosts, width in option.manually_specified_submeshes or ()]
    balance = _balance(workload, len(profile.devices), tolerance)

    def rule(replicas: Sequence[Sequence[Device]], first: int, last: int) -> bool:
        hosts = [device.host for replica in replicas for device in replica]
        shape = (len(set(hosts)), hosts.count(hosts[0]))
        return (
            (shape in named if physical == "manual" else _has_shape(shape, {widths[host] for host in hosts}, physical))
            and _has_replicas(shape, (len(replicas), len(replicas[0])), logical)
            and balance(len(hosts), first, last)
        )

    return rule


def _require(name: str, found: Any, expected: Sequence[str]) -> None:
    if found not in expected:
        raise AlpaError(
            f"{name} is {found!r}, expected one of {', '.join(expected)}.", "correct alpa.AutoStageOption.", found=found
        )


def _is_power_of_two(count: int) -> bool:
    return count & (count - 1) == 0


def _has_shape(shape: Shape, widths: Any, space: str) -> bool:
    """Return True if a space has a shape. A space in `_HOSTS` has 2^n or all devices of a host, or whole hosts."""
    hosts, width = shape
    if space not in _HOSTS or hosts == 1:
        return space not in _HOSTS or _is_power_of_two(width) or widths == {width}
    most, powers = _HOSTS[space]
    return widths == {width} and hosts <= most and (_is_power_of_two(hosts) or not powers)


def _has_replicas(shape: Shape, replicas: Tuple[int, int], space: str) -> bool:
    """Return True if Alpa's space of logical shapes has `replicas`, (replicas, devices of each), for that shape."""
    if space == "same_as_physical":
        return replicas == shape
    if space == "single_node_model_parallel":
        return replicas[1] <= shape[1]
    return {"data_parallel_only": replicas[1] == 1, "model_parallel_only": replicas[0] == 1}.get(space, True)


def _balance(workload: Workload, devices: int, tolerance: float) -> Any:
    """Return a function that tells if a stage's share of FLOPs matches its share of devices within the tolerance."""
    sums = [0.0, *itertools.accumulate(layer.forward_flops + layer.backward_flops for layer in workload.layers)]

    def balanced(count: int, first: int, last: int) -> bool:
        if math.isinf(tolerance):
            return True
        work, part = sums[last + 1] - sums[first], count / devices * sums[-1]
        return bool(part <= work * (1 + tolerance) and work <= part * (1 + tolerance))

    return balanced


def say_what_does_not_apply(option: Any) -> None:
    """Log the settings about measuring costs that the program set; log nothing if it set none."""
    defaults = {field.name: field.default for field in dataclasses.fields(option)}
    found: List[str] = [
        f"{name}={getattr(option, name)!r}" for name in _COSTS if getattr(option, name) != defaults[name]
    ]
    if found:
        LOG.info(
            "stages are priced by the profile of the cluster: %s of AutoStageOption do not apply.", ", ".join(found)
        )
