"""Take charge of programs as they are compiled and launched, so that they survive."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional

from hwaware.patching import rescue, stage_option
from hwaware.patching.mechanism import Patch, PatchSet, Target
from hwaware.runtime import settings as runtime
from hwaware.survival import draining, joining, recipes
from hwaware.survival.run import NEWEST, Run
from hwaware.survival.watching import SurvivingWatch
from hwaware.survival.worker import SurvivingWorker
from hwaware.transport import Address

VARIABLE = "HWAWARE_SURVIVE"


class Rescuer:
    """Makes programs survive that are compiled while it is in charge.

    Args:
        steps: Number of steps of each training, if it is known.

    Attributes:
        worker_class: The class of their workers.
        recovering: The program that recovers now, if any.
    """

    worker_class = SurvivingWorker

    def __init__(self, steps: Optional[int] = None) -> None:
        self.recovering: Optional[Run] = None
        self._steps = steps

    def watch(self, members: Any, limit_s: float, head: Address) -> SurvivingWatch:
        """Return the watch over a program."""
        return SurvivingWatch(members, limit_s, head)

    def require(self, arguments: Dict[str, Any]) -> None:
        """Refuse programs that could not be placed again.

        Raises:
            AlpaError: The program fixes its stages, or encrypts.
        """
        recipes.require(arguments)

    def compiled(self, compiled: Any, arguments: Dict[str, Any], config: Any, took_s: float) -> None:
        """Remember how to compile a function again, and the time that it took."""
        recipes.remember(compiled, arguments, config, took_s - stage_option.last_calibration_s())

    def launched(self, group: Any, watch: SurvivingWatch) -> None:
        """Take charge of a launched group of meshes."""
        run = self.recovering
        if run is None:
            run = Run(self)
            run.at_boundary.append(draining.at_boundary)
            NEWEST[:] = [run]
        run.take_up(group, watch)
        if run is not self.recovering:
            joining.watch(run, self._steps)
        run.recovery.clock.ends("start")

    def takes(self, place: Any, secret: bytes, identity: Any) -> bool:
        """Let a worker start over at a place, or start another one there; return False if no program recovers."""
        if self.recovering is None:
            return False
        recovery = self.recovering.recovery
        recovery.clock.ends("place")
        if place.workers > 1:
            return False
        actor = recovery.idle.pop((place.address, place.devices), None)
        if actor is None:
            actor = recovery.started(place)
        else:
            actor.start_over.remote(place, secret, identity, recovery.is_moving)
        recovery.used[place.address, place.devices] = actor
        return True

    def worker(self, place: Any) -> Any:
        """Return the worker that `takes` has found."""
        assert self.recovering is not None
        return self.recovering.recovery.used[place.address, place.devices]

    def keeps(self, worker: Any) -> bool:
        """Return True if a recovery looks after a worker, also if it cannot be launched."""
        return self.recovering is not None and worker in list(self.recovering.recovery.used.values())


def value(original: Any) -> property:
    """Return Alpa's own; if a worker is lost meanwhile, the program recovers, and the new array gives the value."""

    def replacement(self: Any) -> Any:
        from alpa.device_mesh import DistributedArray

        return rescue.retried(lambda: original.fget(self) if isinstance(self, DistributedArray) else self._value)

    return property(replacement)


def prefetch(original: Any) -> Callable[[Any], None]:
    """Call Alpa's own; if a worker is lost meanwhile, the program recovers, and Alpa fetches the new arrays."""

    def replacement(arrays: Any) -> None:
        rescue.retried(lambda: original(arrays))

    return replacement


def is_asked_for(survive: Optional[bool]) -> bool:
    """Return the program's choice, or that of HWAWARE_SURVIVE if the program leaves it out.

    Raises:
        UnusableInputError: HWAWARE_SURVIVE is neither 0 nor 1.
    """
    return runtime.is_on(VARIABLE) if survive is None else survive


# The digests are of Alpa 0.2.3's own sources, printed by `hwaware.patching.mechanism.source_digest`.
PATCHES = PatchSet(
    [
        Patch(Target("alpa.device_mesh", "DistributedArray._value", ("f3bc0c0fa180d4cb",)), value),
        Patch(Target("alpa.device_mesh", "DistributedArray.prefetch", ("aa069032e1a73f65",)), prefetch),
        Patch(Target("alpa.device_mesh", "prefetch", ("3201831b8f7a2001",)), prefetch),
        Patch(
            Target("alpa.parallel_method", "CreateStateParallel.compile_executable", ("fa550fefbd232c52",)),
            recipes.compile_executable,
        ),
        Patch(
            Target("alpa.parallel_method", "FollowParallel.compile_executable", ("7c44dfcfe0fda8c6",)),
            recipes.compile_executable,
        ),
    ]
)
