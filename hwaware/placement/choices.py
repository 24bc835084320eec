"""Check and read a caller's choices, with one clear message for each that cannot be."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union, get_args

from hwaware.cluster import ClusterProfile
from hwaware.errors import UnusableInputError
from hwaware.placement.problem import SOLVERS
from hwaware.plans import Objective, Plan, Schedule
from hwaware.records import MOST_COUNT
from hwaware.workload import Workload


def check_choices(
    num_microbatches: Optional[int], global_batch: Optional[int], solver: str, target: str, time_limit_s: float,
    judge: Optional[Callable[[Plan], float]], rule: Optional[Callable[..., bool]], seed: int, schedule: str,
    objective: str, most_devices: Optional[int],
) -> None:  # fmt: skip
    """Raise UnusableInputError for a value that does not exist."""
    counts = (
        ("num_microbatches", num_microbatches), ("global_batch", global_batch),
        ("max_devices_per_stage", most_devices), ("seed", seed),
    )  # fmt: skip
    for name, value in counts:
        said = f"{name} is {value!r}, expected a whole number."
        _require(value is None or isinstance(value, Integral), said, "give an int.", value)
    for name, called in (("judge", judge), ("rule", rule)):
        said = f"{name} is {called!r}, expected a function."
        _require(called is None or callable(called), said, "give a function, or leave it out.", called)
    if num_microbatches is None:
        _require(
            global_batch is not None and 1 <= global_batch <= MOST_COUNT,
            f"the number of microbatches is open and global_batch is {global_batch}.",
            f"give the samples of a step as global_batch, 1 to {MOST_COUNT}, or give num_microbatches.",
        )
    else:
        said = f"num_microbatches is {num_microbatches} and global_batch is {global_batch}, expected one of the two."
        _require(global_batch is None, said, "leave one out; a workload holds the samples of a microbatch.")
    for name, value in counts:
        least = 0 if name == "seed" else 1
        said = f"{name} is {value}, expected at least {least}."
        _require(value is None or value >= least, said, f"give {least} or more.", value)
    said = f"num_microbatches is {num_microbatches}, expected at most {MOST_COUNT}."
    _require((num_microbatches or 0) <= MOST_COUNT, said, "give fewer.", num_microbatches, MOST_COUNT)
    require_solver(solver)
    _require_one_of("target", target, ("alpa", "any"))
    said = f"time_limit_s is {time_limit_s!r}, expected more than 0."
    _require(isinstance(time_limit_s, Real) and time_limit_s > 0, said, "give a time in seconds.", time_limit_s)
    _require_one_of("schedule", schedule, get_args(Schedule))
    _require_one_of("objective", objective, get_args(Objective))
    known = f"the solver {solver!r} knows no other judge."
    _require(judge is None or solver == "annealing", known, "use solver annealing with a judge.")


def _require(right: bool, what: str, fix: str, found: Any = None, expected: Any = None) -> None:
    if not right:
        raise UnusableInputError(what, fix, found=found, expected=expected)


def _require_one_of(name: str, value: str, known: Sequence[str]) -> None:
    choices = f"choose one of {', '.join(known)}."
    _require(value in known, f"there is no {name} {value!r}.", choices, value, tuple(known))


def require_solver(solver: str) -> None:
    """Raise UnusableInputError for a solver that does not exist."""
    _require_one_of("solver", solver, tuple(SOLVERS))


def _listed(what: str, names: Union[str, Iterable[str]]) -> List[str]:
    """Return one name or several as a list, or raise UnusableInputError."""
    said = f"{what} is {names!r}, expected a name or a list of names."
    _require(isinstance(names, Iterable), said, "give hosts or devices of the cluster.", names)
    return [names] if isinstance(names, str) else list(names)


def remaining(profile: ClusterProfile, exclude: Union[str, Iterable[str]]) -> ClusterProfile:
    """Return the profile without the excluded hosts and devices, or raise UnusableInputError."""
    exclude = _listed("exclude", exclude)
    if not exclude:
        return profile
    known = [host.name for host in profile.hosts] + [device.id for device in profile.devices]
    unknown = [name for name in exclude if name not in known]
    if unknown:
        raise UnusableInputError(
            f"cannot exclude {', '.join(map(repr, unknown))}: the cluster has no such host or device.",
            f"choose among {', '.join(known)}.",
        )
    try:
        return profile.without(tuple(exclude))
    except ValueError as error:
        raise UnusableInputError(
            f"without {', '.join(exclude)}, {error}.", "exclude fewer hosts, or measure the missing links."
        ) from error


def with_reserve(profile: ClusterProfile, reserve_bytes: float) -> ClusterProfile:
    """Return the profile with so much less memory on each device, or raise UnusableInputError."""
    said = f"reserve_bytes is {reserve_bytes!r}, expected a number of bytes."
    _require(isinstance(reserve_bytes, Real), said, "give for example 2e9.", reserve_bytes)
    try:
        return profile.keeping_free(reserve_bytes)
    except ValueError as error:
        fix = "reserve less, or exclude that device."
        raise UnusableInputError(f"The reserve of memory cannot be kept: {error}.", fix, found=reserve_bytes) from error


def read_pins(
    pins: Mapping[Union[int, str], Union[str, Sequence[str]]], workload: Workload, profile: ClusterProfile
) -> Dict[int, Tuple[str, ...]]:
    """Return layer numbers and the ids of the devices that may run them, or raise UnusableInputError."""
    said = f"pins is {pins!r}, expected a dict from layers to hosts or devices."
    _require(isinstance(pins, Mapping), said, 'give for example {0: "h1"}.', pins)
    found: Dict[int, Tuple[str, ...]] = {}
    for layer, places in pins.items():
        number = _layer(layer, workload)
        said = f"layer {number} is pinned twice, expected one pin of a layer."
        _require(number not in found, said, "give all its hosts or devices in one pin.")
        found[number] = _devices(_listed(f"the pin of layer {layer!r}", places), profile)
    return found


def _layer(layer: Union[int, str], workload: Workload) -> int:
    names = [one.name for one in workload.layers]
    if isinstance(layer, str) and names.count(layer) == 1:
        return names.index(layer)
    number = int(layer) if str(layer).isdecimal() else -1
    if not 0 <= number < len(names):
        found = names.count(str(layer))
        raise UnusableInputError(
            f"cannot pin layer {layer!r}: the workload has {found if found else 'no'} such layer{'s' * (found > 1)}.",
            f"give a number from 0 to {len(names) - 1}, or a name that only one layer has.",
        )
    return number


def _devices(places: Sequence[str], profile: ClusterProfile) -> Tuple[str, ...]:
    found = tuple(device.id for device in profile.devices if device.id in places or device.host in places)
    known = {device.id for device in profile.devices} | {device.host for device in profile.devices}
    unknown = [place for place in places if place not in known]
    if unknown or not found:
        raise UnusableInputError(
            f"cannot pin a layer to {', '.join(map(repr, unknown or places))}: no such host or device may be used.",
            f"choose among {', '.join(sorted(known))}.",
        )
    return found
