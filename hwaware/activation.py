"""Switch the override on and off: `enable`, `enabled`, `disable`, and the stage option that a program gives to Alpa."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from dataclasses import dataclass
from typing import Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

from hwaware import adapter, autoload, cache_folder, host_devices, ucx
from hwaware.adapter import Adapt
from hwaware.calibration import cache
from hwaware.cluster import ClusterProfile
from hwaware.compat.packages import ALPAS_JAXLIB
from hwaware.errors import AlpaError
from hwaware.patching import leaves, observing, rescue, stage_option, stock_jax
from hwaware.patching.mechanism import Patch, PatchSet
from hwaware.patching.stage_option import Costs, PlacementSettings
from hwaware.plans import Plan
from hwaware.runtime import settings
from hwaware.survival import joining, rescuer, vaults
from hwaware.survival.rescuer import Rescuer

ProfileOrPath = Union[ClusterProfile, str, "os.PathLike[str]"]
PlanOrPath = Union[Plan, str, "os.PathLike[str]"]
LOG = logging.getLogger("hwaware")
# A unit test compares both with the names in the sources.
VARIABLES = (
    autoload.VARIABLE, adapter.VARIABLE, adapter.STEPS_VARIABLE, rescuer.VARIABLE, joining.VARIABLE, vaults.NOTICE,
    stage_option.COSTS_VARIABLE, cache.LIMIT_VARIABLE, cache_folder.VARIABLE, settings.DIGESTS_VARIABLE,
    settings.ENCRYPT_VARIABLE, host_devices.VARIABLE, ucx.VARIABLE,
)  # fmt: skip
OF_TESTS = (
    "HWAWARE_ALL_CASES",
    "HWAWARE_LOSSES_FILE",
    "HWAWARE_TABLES",
    "HWAWARE_TESTBED",
    "HWAWARE_TESTS_GPU",
    "HWAWARE_TEST_MARK",
)
_OVERRIDE = PatchSet(stage_option.PATCHES)
_lock = threading.RLock()


class _Enabled(NamedTuple):
    """Remember one `enable` until its `disable`: what it has put in place, and what decides about programs."""

    settings: Optional[PlacementSettings] = None
    on_stock_jax: bool = False
    rescuer: Optional[Rescuer] = None
    observer: Optional[adapter.Observer] = None


# The newest last: it decides. Without one, the entry of explicit stage options decides, once one was made.
_stack: List[_Enabled] = []
_explicit: List[_Enabled] = []


def enable(
    profile: ProfileOrPath,
    *,
    plan: Optional[PlanOrPath] = None,
    solver: str = "exact",
    exclude: Union[str, Sequence[str]] = (),
    place_fixed_stages: bool = False,
    costs: Costs = "auto",
    reserve_bytes: float = 0.0,
    calibration_s: Optional[float] = None,
    survive: Optional[bool] = None,
    adapt: Optional[Adapt] = None,
    steps: Optional[int] = None,
) -> None:
    """Make Alpa's automatic stage construction hardware-aware from here on.

    Call it before `import alpa` on stock JAX, where it also puts hwaware's runtime under Alpa. Calls nest: `disable`
    undoes the newest one.

    Args:
        profile: A profile, or the path of its file.
        plan: Use this plan, or the one in the file at this path, instead of a search.
        solver: The search, as for `hwaware.plan`.
        exclude: Hosts or devices that stay idle.
        place_fixed_stages: Choose the devices behind each stage also where the program fixes layers and shapes itself
            (UniformStageOption, ManualStageOption, get_3d_parallel_method). By default such a program runs unchanged.
        costs: With "auto", the first start of a program times its layers on the cluster, within a limit. The times
            stay on disk, where later starts read them. With "model", prices follow from the profile and from the FLOPs
            and bytes of Alpa's layers. With "measured", every start times all layers, however long that takes. The
            variable HWAWARE_COSTS replaces "auto".
        reserve_bytes: Memory that each device keeps free, for other programs or for what predictions miss.
        calibration_s: Time limit of "auto" [s]; by default HWAWARE_CALIBRATION_S, or 30.
        survive: Let programs that are compiled from here on go on where a worker or a host is lost (docs/survival.md).
            They also take in hosts that join, unless HWAWARE_JOIN is 0. By default HWAWARE_SURVIVE, or False.
        adapt: Let trainings that are compiled from here on move to another placement (docs/adapting.md). A training
            moves where devices or links become slower, and the gain pays for the switch. This implies survive=True.
            "log" only says what it would do. By default HWAWARE_ADAPT (0, 1 or log), or False.
        steps: Number of steps of the training, with which it decides better about a move. By default HWAWARE_STEPS, or
            unknown.

    Raises:
        AlpaError: Alpa is missing or of another version, or `costs` is unknown. Or the JAX that Alpa brings cannot
            `survive` or `adapt`. Nothing has changed.
        RecordError: The profile cannot be read.
        UnusableInputError: The solver does not exist, or the profile lacks an excluded host or the reserved memory.
            Or `adapt` or `steps` has an unknown value.

    Example:
        Write one line before a program imports Alpa::

            hwaware.enable("cluster.json", exclude="slow-host")
    """
    autoload.cancel()
    given = (profile, plan, solver, exclude, place_fixed_stages, costs, reserve_bytes, calibration_s)
    chosen = PlacementSettings(*given)  # type: ignore[arg-type]  # it reads files itself
    adapts = adapter.settings_of(adapt, steps)
    survives = _survives(survive, adapts)
    with _lock:
        _stack.append(_installed(chosen, survives, adapts))
        _let_newest_decide()


def _let_newest_decide() -> None:
    newest = [_Enabled(), *_explicit, *_stack][-1]
    stage_option.set_default(newest.settings)
    rescue.set_default(newest.rescuer)
    observing.set_default(newest.observer)


@contextlib.contextmanager
def unattended() -> Iterator[None]:
    """Let programs that are compiled in the block neither survive nor adapt, whatever HWAWARE_SURVIVE says."""
    with _lock:
        rescue.set_default(None)
        observing.set_default(None)
        try:
            yield
        finally:
            _let_newest_decide()


def _survives(survive: Optional[bool], adapts: adapter.Settings) -> bool:
    """Return True if programs shall survive, which those need that adapt."""
    if adapts.adapt is True and survive is False:
        raise AlpaError("adapt=True and survive=False exclude each other: copies carry the state.", "leave one out.")
    return adapts.adapt is True or rescuer.is_asked_for(survive)


def disable() -> None:
    """Undo the newest `enable`; do nothing without one.

    Raises:
        AlpaError: Other code replaced one of hwaware's replacements. Nothing has changed.

    Example:
        >>> from hwaware import disable
        >>> disable()  # nothing was enabled
    """
    with _lock:
        if _stack:
            _disable(_stack[-1])


def _disable(entry: _Enabled) -> None:
    with _lock:
        places = [place for place, each in enumerate(_stack) if each is entry]
        if not places:  # a `disable` inside the block was first
            return
        _OVERRIDE.refuse_foreign()
        leaves.PATCHES.refuse_foreign()
        _OVERRIDE.revert()
        _remove_runtime(entry.on_stock_jax, entry.rescuer is not None)
        del _stack[places[0]]
        _let_newest_decide()


@contextlib.contextmanager
def enabled(
    profile: ProfileOrPath,
    *,
    plan: Optional[PlanOrPath] = None,
    solver: str = "exact",
    exclude: Union[str, Sequence[str]] = (),
    place_fixed_stages: bool = False,
    costs: Costs = "auto",
    reserve_bytes: float = 0.0,
    calibration_s: Optional[float] = None,
    survive: Optional[bool] = None,
    adapt: Optional[Adapt] = None,
    steps: Optional[int] = None,
) -> Iterator[None]:
    """Enable hwaware inside a block, with the options of `enable`.

    The end of the block, also by an exception, undoes this `enable` and no other. The newest `enable` of the process
    decides, in every thread.

    Args:
        profile: A profile, or the path of its file.
        plan: Use this plan, or the one in the file at this path, instead of a search.
        solver: The search, as for `hwaware.plan`.
        exclude: Hosts or devices that stay idle.
        place_fixed_stages: Choose devices also for stages that the program fixes itself.
        costs: "auto", "model" or "measured".
        reserve_bytes: Memory that each device keeps free.
        calibration_s: Time limit of "auto" [s].
        survive: Go on where a worker or a host is lost.
        adapt: Place again where devices or links become slower, or say so ("log").
        steps: Number of steps of the training.

    Raises:
        AlpaError: As `enable`.
        RecordError: The profile cannot be read.

    Example:
        Place one function with hwaware::

            with hwaware.enabled("cluster.json", costs="measured"):
                state = train_step(state, batch)
    """
    with _lock:  # another thread may enable, too
        enable(
            profile, plan=plan, solver=solver, exclude=exclude, place_fixed_stages=place_fixed_stages, costs=costs,
            reserve_bytes=reserve_bytes, calibration_s=calibration_s, survive=survive, adapt=adapt, steps=steps,
        )  # fmt: skip
        entry = _stack[-1]
    try:
        yield
    finally:
        _disable(entry)


def install_runtime() -> bool:
    """Put hwaware's runtime under Alpa on stock JAX, and return True if this JAX is a stock one.

    Raises:
        AlpaError: Alpa is missing or of another version, or Alpa was never seen to run on this JAX.
    """
    stock_jax.install()
    if not stock_jax.is_needed():
        return False
    leaves.PATCHES.apply()
    return True


def install_once() -> None:
    """Put the override in place for explicit stage options, once, without changing what "auto" means."""
    with _lock:
        if not _explicit:
            autoload.act()
            adapts = adapter.settings_of(None, None)
            _explicit.append(_installed(None, _survives(None, adapts), adapts))
            _let_newest_decide()


def _installed(settings: Optional[PlacementSettings], survives: bool, adapts: adapter.Settings) -> _Enabled:
    """Put override and, if needed, runtime in place, all or none."""
    _warn_of_unknown_variables()
    on_stock_jax = install_runtime()
    try:
        if (survives or adapts.adapt) and not on_stock_jax:
            name = "adapt" if adapts.adapt else "survive"
            raise AlpaError(
                f"{name} needs hwaware's runtime under Alpa, which {ALPAS_JAXLIB} leaves out.",
                f"use stock JAX, or leave {name} out.",
            )
        _OVERRIDE.apply()
        if survives:
            rescuer.PATCHES.apply()
    except BaseException:
        _remove_runtime(on_stock_jax, False)
        raise
    observer = adapter.Observer(adapts) if adapts.adapt else None
    return _Enabled(settings, on_stock_jax, Rescuer(adapts.steps) if survives else None, observer)


def _warn_of_unknown_variables() -> None:
    unknown = {name for name in os.environ if name.startswith("HWAWARE_")}.difference(VARIABLES, OF_TESTS)
    if unknown:
        names, known = (", ".join(sorted(some)) for some in (unknown, VARIABLES))
        LOG.warning("hwaware does not read %s, only %s. To fix: correct the name, or unset it.", names, known)


def _remove_runtime(on_stock_jax: bool, survives: bool) -> None:
    if survives:
        rescuer.PATCHES.revert()
    if on_stock_jax:
        leaves.PATCHES.revert()


def patches() -> Tuple[Patch, ...]:
    """Return every patch of Alpa that hwaware has, for `doctor` and the tests."""
    return leaves.PATCHES.patches + rescuer.PATCHES.patches + _OVERRIDE.patches


# Compared by identity: Alpa's cache of compiled functions hashes the method that holds the option.
@dataclass(frozen=True, repr=False, eq=False)
class HardwareAwareStageOption(PlacementSettings):
    """Let hwaware choose layers, hosts and devices of every stage of one program, as Alpa's stage option.

    To make one puts the override in place for good. It leaves every other stage option alone.

    Attributes:
        profile: A profile, or the path of its file.
        plan: Use this plan, or the one in the file at this path, instead of a search.
        solver: The search, as for `hwaware.plan`.
        exclude: Hosts or devices that stay idle.
        place_fixed_stages: Without effect here: the program fixes no stages.
        costs: "auto", "model" or "measured", as for `hwaware.enable`.
        reserve_bytes: Memory that each device keeps free.
        calibration_s: Time limit of "auto", as for `hwaware.enable`.

    Raises:
        AlpaError: Alpa is missing, or is of a version that hwaware does not override, or `costs` is unknown.
        RecordError: The profile cannot be read.

    Example:
        On a running Ray cluster::

            option = hwaware.HardwareAwareStageOption("cluster.json")
            alpa.PipeshardParallel(num_micro_batches=16, stage_option=option)
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        install_once()
