"""Override Alpa's stage construction: it asks hwaware which layers go on which devices."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import os
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Literal, NamedTuple, Optional, Sequence, Tuple, get_args

from hwaware.calibration import cache
from hwaware.calibration import layers as layer_times
from hwaware.calibration.programs import LayerSource
from hwaware.cluster import ClusterProfile
from hwaware.compat.packages import ALPAS_JAXLIB
from hwaware.device_places import require_same_kinds
from hwaware.errors import AlpaError, InfeasibleError, PlanError, ProfileMismatchError, UnusableInputError
from hwaware.patching import auto_options, choosing, fixed_options, meshes, stock_jax, unequal
from hwaware.patching.mechanism import Patch, Target
from hwaware.placement import StageRule
from hwaware.placement.choices import remaining, require_solver, with_reserve
from hwaware.plans import Plan, schedule_of
from hwaware.records import MOST_SECONDS
from hwaware.workload import Workload

Costs = Literal["auto", "model", "measured"]
COSTS = get_args(Costs)
COSTS_VARIABLE = "HWAWARE_COSTS"
# Source of costs that hwaware lacks -> what it would need.
_NEEDED = {
    "alpa-profile": f"Alpa's own profiling compiles every stage candidate with {ALPAS_JAXLIB} and runs it on its GPUs",
    "alpa-hlo": f"Alpa's HLO cost model is part of {ALPAS_JAXLIB}, and compiles every stage candidate for its GPUs",
}


def require_costs(costs: str, name: str = "costs") -> None:
    """Refuse an unknown source of costs, given as the setting `name`; explain why hwaware lacks Alpa's own sources.

    Raises:
        AlpaError: `costs` is none of COSTS.
    """
    if costs in COSTS:
        return
    what = f"{name}={costs!r}: " + (
        f"{_NEEDED[costs]}, version 0.3.22, which no registry carries any more: hwaware does not have it"
        if costs in _NEEDED
        else "there is no such source"
    )
    fix = f'use {name}="auto", "model" or "measured". `hwaware import alpa-db` reads a database that Alpa measured.'
    raise AlpaError(f"{what}.", fix, found=costs, expected=" or ".join(COSTS))


def _limit_s(given: Optional[float]) -> float:
    """Return the time limit of a calibration [s]: the given one, that of the environment, or the default."""
    found = os.environ.get(cache.LIMIT_VARIABLE) if given is None else given
    try:
        limit_s = layer_times.LIMIT_S if found in (None, "") else float(found)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        limit_s = math.nan
    if not 0 < limit_s <= MOST_SECONDS:  # the cache keeps no longer limit
        raise UnusableInputError(
            f"The time limit of the calibration is {found!r}, expected a number of seconds above 0, at most 1e8.",
            f"set calibration_s or {cache.LIMIT_VARIABLE}, for example to {layer_times.LIMIT_S:g}.",
        )
    return limit_s


# Settings compare by identity, because Alpa's cache of compiled functions hashes the method that holds the option.
@dataclass(frozen=True, repr=False, eq=False)
class PlacementSettings:
    """Choose how hwaware places stages.

    Attributes: See `HardwareAwareStageOption`, and `hwaware.enable`.

    Raises:
        AlpaError: `costs` is unknown, or is "alpa-profile" or "alpa-hlo", which need the XLA that Alpa brings.
        RecordError: The profile or the plan cannot be read.
        UnusableInputError: The solver is unknown, the profile lacks a host or device to exclude, or `reserve_bytes`
            leaves a device no memory.
    """

    profile: ClusterProfile
    plan: Optional[Plan] = None
    solver: str = "exact"
    exclude: Tuple[str, ...] = ()
    place_fixed_stages: bool = False
    costs: Costs = "auto"
    reserve_bytes: float = 0.0
    calibration_s: Optional[float] = None

    def __post_init__(self) -> None:
        name = "costs"
        if self.costs == "auto":
            name = COSTS_VARIABLE
            object.__setattr__(self, "costs", os.environ.get(name) or "auto")
        require_costs(self.costs, name)
        object.__setattr__(self, "calibration_s", _limit_s(self.calibration_s))
        require_solver(self.solver)
        if not isinstance(self.profile, ClusterProfile):
            object.__setattr__(self, "profile", ClusterProfile.load(self.profile))
        if not isinstance(self.plan, (Plan, type(None))):
            object.__setattr__(self, "plan", Plan.load(self.plan))
        object.__setattr__(self, "exclude", (self.exclude,) if isinstance(self.exclude, str) else tuple(self.exclude))
        with_reserve(remaining(self.profile, self.exclude), self.reserve_bytes)


class Known(NamedTuple):
    """Hold what a program that is placed again knows from its first placement.

    Attributes:
        workload: The program's layers with their times.
        sources: The sources of the programs that hwaware timed.
        plan: The plan to use; None to search for one.
    """

    workload: Workload
    sources: Sequence[LayerSource]
    plan: Optional[Plan]


class _Default:
    """Hold the option that `hwaware.enable` gives to Alpa's automatic stage construction, and the newest plan."""

    settings: Optional[PlacementSettings] = None
    newest: Optional[Plan] = None
    newest_workload: Optional[Workload] = None
    # The sources of its layers' programs, if hwaware timed these.
    newest_sources: Sequence[LayerSource] = ()
    # The ManualStageOption behind the newest plan.
    newest_option: Any = None
    known: Optional[Known] = None
    calibration_s = 0.0
    # Name of the function that Alpa compiles; empty if it has none.
    function = ""


def last_plan() -> Optional[Plan]:
    """Return the plan behind the newest function that Alpa compiled with hwaware; None without one.

    Example:
        >>> from hwaware import last_plan
        >>> last_plan() is None  # nothing was compiled
        True
    """
    return _Default.newest


def last_workload() -> Optional[Workload]:
    """Return the Workload, with its times, of the newest function that Alpa compiled with hwaware; None without one.

    Example:
        >>> from hwaware import last_workload
        >>> last_workload() is None  # nothing was compiled
        True
    """
    return _Default.newest_workload


def last_layer_sources() -> Sequence[LayerSource]:
    """Return the sources of the programs of `last_workload`'s layers; none if hwaware did not time these."""
    return _Default.newest_sources


def last_calibration_s() -> float:
    """Return the time for which hwaware measured the layers of the newest compiled function [s]."""
    return _Default.calibration_s


def set_default(settings: Optional[PlacementSettings]) -> None:
    """Set the settings of automatic stage construction; None restores Alpa's own."""
    _Default.settings = settings


def has_default() -> bool:
    """Return True while automatic stage construction uses hwaware."""
    return _Default.settings is not None


def _remember(
    plan: Optional[Plan], workload: Optional[Workload], option: Any, sources: Sequence[LayerSource] = ()
) -> None:
    _Default.newest, _Default.newest_workload, _Default.newest_option = plan, workload, option
    _Default.newest_sources = sources


@contextlib.contextmanager
def placed_again(known: Known) -> Iterator[None]:
    """Use `known` to place programs that Alpa compiles in the block, without timing their layers."""
    _Default.known = known
    try:
        yield
    finally:
        _Default.known = None


class _LaunchedMeshes(List[Any]):
    """Stand for a launched mesh group while Alpa cuts stages, so that Alpa takes hwaware's meshes as given."""

    @property
    def meshes(self) -> List[Any]:
        return self


class _GivenMesh:
    """Stand for a launched mesh."""

    def __init__(self, virtual_mesh: Any) -> None:
        self._virtual_mesh = virtual_mesh
        self.shape = virtual_mesh.shape

    def get_virtual_physical_mesh(self) -> Any:
        return self._virtual_mesh


def settings_of(stage_option: Any) -> Optional[PlacementSettings]:
    """Return the settings by which hwaware places a program with this stage option; None if Alpa places it."""
    from alpa.pipeline_parallel.stage_construction import AutoStageOption

    if isinstance(stage_option, PlacementSettings):  # HardwareAwareStageOption is one
        return stage_option
    return _Default.settings if isinstance(stage_option, AutoStageOption) else None


def set_function(function: Any) -> None:
    """Remember the function that Alpa compiles from now on: the next workload has its name."""
    _Default.function = str(getattr(function, "__name__", ""))


def require_profile(stage_option: Any, virtual_mesh: Any) -> None:
    """Refuse the profile of another cluster before Alpa traces the program for long."""
    settings = settings_of(stage_option)
    if settings is not None and _Default.known is None:
        profile = meshes.whole(settings.profile, virtual_mesh)
        meshes.restrict(profile, virtual_mesh)
        require_same_kinds(remaining(profile, settings.exclude), virtual_mesh.host_info)


def hardware_aware(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace Alpa's `cluster_layers_and_slice_mesh`: give it a plan's stages and meshes if hwaware is in charge."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        settings = settings_of(arguments["stage_option"])
        if settings is None:
            layers = len(arguments["layers"]) // (1 if arguments["pipeline_schedule"] == "inference" else 2)
            fixed_options.require_fits(arguments["stage_option"], layers, arguments["virtual_mesh"])
            default = _Default.settings
            # Workers that run already stay where they are.
            launched = arguments["virtual_mesh"].launched_physical_mesh_group is not None
            if default is not None and default.place_fixed_stages and not launched:
                return _regrouped(original, default, arguments)
            return original(*args, **kwargs)
        try:
            return _placed(original, settings, arguments)
        except _NOT_APPLICABLE as error:
            # Alpa cannot run an explicit option of hwaware. Its own search needs its own XLA, and would leave out
            # devices of unequal hosts.
            unable = stock_jax.is_needed() or unequal.is_unequal(arguments["virtual_mesh"])
            if settings is arguments["stage_option"] or unable:
                raise
            choosing.say_why_not(error)
            _remember(None, None, None)
            return original(*args, **kwargs)

    return replacement


def _regrouped(original: Callable[..., Any], settings: PlacementSettings, arguments: Dict[str, Any]) -> Any:
    """Return Alpa's own result, with each stage on the group of devices that suits it best."""
    stages, stage_to_mesh, sliced, option = result = original(**arguments)
    virtual_mesh = arguments["virtual_mesh"]
    try:
        whole = meshes.whole(settings.profile, virtual_mesh)
        profile = meshes.restrict(whole, virtual_mesh)
        workload = _traced(arguments)
        schedule = schedule_of(arguments["pipeline_schedule"])
        fixed = meshes.plan_of(option, sliced, whole, arguments["num_micro_batches"], schedule)
        plan = choosing.best_order(fixed, workload, with_reserve(profile, settings.reserve_bytes))
        sliced = meshes.slice_mesh(virtual_mesh, plan, whole)
    except (ProfileMismatchError, PlanError) as error:
        choosing.say_why_not(error)
        _remember(None, None, None)
        return result
    _remember(plan, workload, option)
    return stages, stage_to_mesh, sliced, option


# After these errors, Alpa may still find a mapping: the profile is of another cluster, or hwaware finds none that fits.
_NOT_APPLICABLE = (ProfileMismatchError, InfeasibleError)


def _placed(original: Callable[..., Any], settings: PlacementSettings, arguments: Dict[str, Any]) -> Any:
    """Return the stages and meshes of a plan in the form that Alpa expects."""
    virtual_mesh = arguments["virtual_mesh"]
    known = _Default.known
    whole = meshes.whole(settings.profile, virtual_mesh)
    profile = meshes.restrict(whole, virtual_mesh)
    if known is not None:
        workload, sources, given_plan = known.workload, known.sources, known.plan
    else:
        (workload, sources), given_plan = _calibrated(settings, whole, profile, arguments), settings.plan
    if given_plan is not None:
        plan = _checked_plan(given_plan, workload, arguments["num_micro_batches"])
    else:
        plan = searched(settings, profile, workload, arguments)
    meshes.require_runnable(plan, profile)
    sliced = meshes.slice_mesh(virtual_mesh, plan, whole)
    option = _manual_option(plan, sliced)
    _remember(plan, workload, option, sources)
    given = {**arguments, "stage_option": option}
    virtual_mesh.launched_physical_mesh_group = _LaunchedMeshes(_GivenMesh(mesh) for mesh in sliced)
    try:
        return original(**given)
    finally:
        virtual_mesh.launched_physical_mesh_group = None


def searched(
    settings: PlacementSettings, profile: ClusterProfile, workload: Workload, arguments: Any, level: int = logging.INFO
) -> Plan:
    """Return the best plan for Alpa's layers on the devices of a profile.

    Args:
        settings: The settings of the placement.
        profile: The profile of the devices that may be used.
        workload: Alpa's layers.
        arguments: Arguments of Alpa's stage construction, at least those that `choosing.best_plan` and the rule read.
        level: The logging level of the lines about the plan.

    Raises:
        InfeasibleError: The model fits on no placement.
    """
    from alpa.pipeline_parallel.stage_construction import AutoStageOption

    option = arguments["stage_option"]
    if level >= logging.INFO and isinstance(option, AutoStageOption):
        auto_options.say_what_does_not_apply(option)
    rule = rule_of(option, profile, workload)
    return choosing.best_plan(settings, profile, workload, arguments, rule, level)


def _calibrated(
    settings: PlacementSettings, whole: ClusterProfile, profile: ClusterProfile, arguments: Dict[str, Any]
) -> Tuple[Workload, Sequence[LayerSource]]:
    """Return Alpa's layers with the times that the settings ask for, and the sources of the programs timed.

    hwaware does not time devices of the whole profile that the running cluster lacks.
    """
    _Default.calibration_s = 0.0
    workload = _traced(arguments)
    # Times choose a plan; a given plan needs none.
    if settings.costs == "model" or (settings.costs == "auto" and settings.plan is not None):
        return workload, ()
    from hwaware.patching.layer_programs import layer_sources

    begin_s = time.monotonic()
    sources = layer_sources(arguments, workload.microbatch_size)
    present = {device.id for device in profile.devices}
    gone = [device.id for device in whole.devices if device.id not in present]
    given = (workload, sources, whole, (*settings.exclude, *gone))
    if settings.costs == "measured":
        found = layer_times.measured(*given)
    else:
        assert settings.calibration_s is not None  # set when the settings were made
        found = layer_times.measured_within(*given, settings.calibration_s)
    _Default.calibration_s = time.monotonic() - begin_s
    return found, sources


def rule_of(option: Any, profile: ClusterProfile, workload: Workload) -> Optional[StageRule]:
    """Return the rule for stages in a stage option; None if it allows all."""
    from alpa.pipeline_parallel.stage_construction import AutoStageOption

    return auto_options.rule_of(option, profile, workload) if isinstance(option, AutoStageOption) else None


def _traced(arguments: Any) -> Workload:
    from hwaware.tracing.from_alpa import workload_from_alpa_layers

    donations, returned = arguments["apply_grad_global_info"]
    if arguments["batch_size"] is None:
        raise AlpaError(
            "The function has no batch: batch_argnums of alpa.parallelize names no argument with an array.",
            "let batch_argnums name the arguments with the samples, counted from 0: batch_argnums=(1,).",
        )
    return workload_from_alpa_layers(
        arguments["layers"],
        arguments["accumulator_mapping"],
        microbatch_size=arguments["batch_size"],
        name=_Default.function or "alpa",
        inference=arguments["pipeline_schedule"] == "inference",
        updates=arguments["jax_apply_layers"],
        donations=donations,
        returned=returned,
    )


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


def get_last_dp_result(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace Alpa's function: describe hwaware's stages if they are the newest.

    Otherwise read the name of Alpa's costs file now. Alpa's own function copies that name at import, before the file
    exists.
    """

    @functools.wraps(original)
    def replacement() -> Tuple[Any, ...]:
        from alpa.pipeline_parallel import stage_profiling

        option = _Default.newest_option
        if option is None:
            return (stage_profiling.last_compute_cost_file_name, *original()[1:])
        # hwaware measures no costs of stages, so it has no file of costs.
        return (
            None,
            option.forward_stage_layer_ids,
            option.submesh_physical_shapes,
            option.submesh_logical_shapes,
            option.submesh_autosharding_option_dicts,
        )

    return replacement


_STAGES = "alpa.pipeline_parallel.stage_construction"
# The digests are of Alpa 0.2.3's own sources, printed by `hwaware.patching.mechanism.source_digest`.
PATCH = Patch(Target(_STAGES, "cluster_layers_and_slice_mesh", ("ea08bc00a17898c2",)), hardware_aware)
PATCHES = (
    PATCH,
    Patch(Target(_STAGES, "get_last_dp_result", ("7f9cf9a9385e9eec",)), get_last_dp_result),
    *unequal.PATCHES,
)
