"""The override itself: Alpa's stage construction asks hwaware which layers go on which devices."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any, Callable, List, Optional, Tuple

from hwaware.cluster import ClusterProfile
from hwaware.errors import InfeasibleError, PlanError
from hwaware.patching import meshes
from hwaware.patching.mechanism import Patch, Target
from hwaware.plans import Plan
from hwaware.workload import Workload


# Compared by identity: Alpa's cache of compiled functions hashes the method that holds the option.
@dataclass(frozen=True, repr=False, eq=False)
class PlacementSettings:
    """How hwaware places stages.

    Attributes:
        profile: What was measured of the cluster.
        plan: Use this plan instead of searching for one.
        solver: Which search.
        exclude: Hosts or devices that must not be used.
    """

    profile: ClusterProfile
    plan: Optional[Plan] = None
    solver: str = "exact"
    exclude: Tuple[str, ...] = ()


@dataclass(frozen=True, repr=False, eq=False)
class HardwareAwareStageOption(PlacementSettings):
    """Alpa stage option: hwaware chooses layers, hosts and devices of every stage.

    Takes the fields of PlacementSettings. Making one puts the override in place, which leaves every other stage option
    alone.

    Example (on a running Ray cluster):
        alpa.PipeshardParallel(num_micro_batches=16, stage_option=hwaware.HardwareAwareStageOption(profile))
    """

    def __post_init__(self) -> None:
        from hwaware.patching.activation import install_once

        install_once()


class _Default:
    """The option that `hwaware.enable` gives to Alpa's automatic stage construction, and the newest plan."""

    settings: Optional[PlacementSettings] = None
    newest: Optional[Plan] = None
    newest_workload: Optional[Workload] = None


def last_plan() -> Optional[Plan]:
    """The plan behind the newest function that was compiled with hwaware; None if there is none."""
    return _Default.newest


def last_workload() -> Optional[Workload]:
    """What Alpa's layers of the newest compiled function have to compute, store and send; None if there is none."""
    return _Default.newest_workload


def set_default(settings: Optional[PlacementSettings]) -> Optional[PlacementSettings]:
    """Set what automatic stage construction uses (None: Alpa's own); returns what it used before."""
    previous, _Default.settings = _Default.settings, settings
    return previous


class _LaunchedMeshes(List[Any]):
    """Stands for a launched mesh group while Alpa cuts stages, so that it takes our meshes as given."""

    @property
    def meshes(self) -> List[Any]:
        return self


class _GivenMesh:
    """Stands for a launched mesh."""

    def __init__(self, virtual_mesh: Any) -> None:
        self._virtual_mesh = virtual_mesh
        self.shape = virtual_mesh.shape

    def get_virtual_physical_mesh(self) -> Any:
        return self._virtual_mesh


def _chosen_settings(stage_option: Any) -> Optional[PlacementSettings]:
    from alpa.pipeline_parallel.stage_construction import AutoStageOption

    if isinstance(stage_option, HardwareAwareStageOption):
        return stage_option
    return _Default.settings if isinstance(stage_option, AutoStageOption) else None


def hardware_aware(original: Callable[..., Any]) -> Callable[..., Any]:
    """Alpa's `cluster_layers_and_slice_mesh`, given a plan's stages and meshes where hwaware is asked for."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        settings = _chosen_settings(arguments["stage_option"])
        if settings is None:
            return original(*args, **kwargs)
        virtual_mesh = arguments["virtual_mesh"]
        profile = meshes.restrict(settings.profile, virtual_mesh)
        workload = _traced(arguments)
        plan = _made_plan(settings, profile, workload, arguments)
        sliced = meshes.slice_mesh(virtual_mesh, plan, profile)
        _Default.newest, _Default.newest_workload = plan, workload
        arguments["stage_option"] = _manual_option(plan, sliced)
        virtual_mesh.launched_physical_mesh_group = _LaunchedMeshes(_GivenMesh(mesh) for mesh in sliced)
        try:
            return original(**arguments)
        finally:
            virtual_mesh.launched_physical_mesh_group = None

    return replacement


def _traced(arguments: Any) -> Workload:
    from hwaware.tracing.from_alpa import workload_from_alpa_layers

    return workload_from_alpa_layers(
        arguments["layers"],
        arguments["accumulator_mapping"],
        microbatch_size=arguments["batch_size"],
        name="alpa",
        inference=arguments["pipeline_schedule"] == "inference",
    )


def _made_plan(settings: PlacementSettings, profile: ClusterProfile, workload: Workload, arguments: Any) -> Plan:
    import hwaware.placement

    if settings.plan is not None:
        return _checked_plan(settings.plan, workload, arguments["num_micro_batches"])
    schedule = arguments["pipeline_schedule"]
    plan = hwaware.placement.plan(
        workload,
        profile,
        num_microbatches=arguments["num_micro_batches"],
        solver=settings.solver,
        exclude=settings.exclude,
        schedule="1f1b" if schedule.startswith("1f1b") else schedule,
        max_devices_per_stage=1,  # what the stock-JAX runtime can run so far
    )
    if plan.status == "infeasible":
        raise InfeasibleError(
            f"The model fits on no placement: {plan.reason or 'no reason given'}",
            "use smaller microbatches, more layers to cut at, rematerialisation, or devices with more memory.",
        )
    return plan


def _checked_plan(plan: Plan, workload: Workload, num_microbatches: int) -> Plan:
    found = (plan.stages[-1].layers[1] + 1, plan.num_microbatches)
    expected = (len(workload.layers), num_microbatches)
    if found != expected:
        raise PlanError(
            f"The plan is for {found[0]} layers and {found[1]} microbatches, "
            f"the program has {expected[0]} layers and {expected[1]} microbatches.",
            "make the plan for this program, with the same layer option and num_micro_batches.",
        )
    return plan


def _manual_option(plan: Plan, sliced: List[Any]) -> Any:
    from alpa.pipeline_parallel.stage_construction import ManualStageOption

    layers = [list(range(stage.layers[0], stage.layers[1] + 1)) for stage in plan.stages]
    logical = [(len(stage.replicas), len(stage.replicas[0].devices)) for stage in plan.stages]
    return ManualStageOption(layers, [mesh.shape for mesh in sliced], logical, [{}] * len(sliced))


# The digest is of Alpa 0.2.3's own source, printed by `hwaware.patching.mechanism.source_digest`.
PATCH = Patch(
    Target("alpa.pipeline_parallel.stage_construction", "cluster_layers_and_slice_mesh", ("ea08bc00a17898c2",)),
    hardware_aware,
)
