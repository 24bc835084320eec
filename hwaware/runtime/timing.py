"""Programs timed alone on one device, compiled and run as the runtime does it in a step."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from hwaware import host_devices
from hwaware.reference_kernel import reference_s
from hwaware.runtime import mesh
from hwaware.runtime.programs import StageProgram

# A CPU quota's period is 4 to 10 ms: a time over this long holds dozens of them.
_ROUND_S = 0.3
_FEWEST_RUNS = 3
ROUNDS = 3
# More than the last-level caches of processors and GPUs hold, as a rule: what is touched after this much comes from
# memory again.
_BEYOND_CACHES_BYTES = 128 << 20
_MOST_SETS = 32


class Repeated(NamedTuple):
    """A program as a step repeats it.

    Attributes:
        program: What runs.
        heirs: (argument, result that takes its place in the next run): gradient accumulators, or the whole state.
    """

    program: StageProgram
    heirs: Tuple[Tuple[int, int], ...] = ()

    def argument_bytes(self) -> int:
        """What one run of it reads."""
        import jax.numpy

        # NumPy alone does not know bfloat16.
        return sum(math.prod(shape) * jax.numpy.dtype(dtype).itemsize for shape, dtype in self.program.arguments)


class Timing(NamedTuple):
    """One measurement: seconds of one run, and of the reference kernel just before and after it."""

    seconds: float
    reference_s: float


def at_speed_s(timings: Sequence[Timing], reference_s: Optional[float]) -> float:
    """The median of several timings [s], at the speed of a machine on which the reference kernel takes `reference_s`.

    Args:
        timings: Of one program.
        reference_s: None takes the times as they are.

    Example:
        >>> at_speed_s([Timing(2.0, 0.04), Timing(1.1, 0.02), Timing(1.0, 0.02)], 0.01)
        0.5
    """
    return statistics.median(t.seconds * (1.0 if reference_s is None else reference_s / t.reference_s) for t in timings)


class ProgramTimer:
    """Times programs on one device under its own share of the host; runs in this process or as a Ray actor.

    Args:
        place: Which device of which host.
        prepare: Called before anything is compiled, at full speed.
    """

    def __init__(self, place: mesh.Place, prepare: Callable[[], None] = lambda: None) -> None:
        mesh.prepare_environment(place)
        with host_devices.unthrottled():
            prepare()
            (self._device,) = mesh.local_devices(place)
        host_devices.join(*place.devices)

    def time(
        self, programs: Sequence[Repeated], working_set_bytes: int = 0, rounds: int = ROUNDS
    ) -> List[Tuple[Timing, ...]]:
        """Compile the programs, then time each of them once a round, so that a drifting machine meets all alike.

        A layer that runs again and again finds its weights in the cache; in a step, where its neighbours run in
        between, it does not (a quarter longer was seen). So each program goes round several sets of inputs.

        Args:
            programs: Any number; inputs are made up.
            working_set_bytes: What a step touches before it comes back to the same program: so large the sets of
                inputs are together, or just beyond the caches' size.
            rounds: How many times each is measured; one measurement takes at least 0.3 s.

        Returns:
            The rounds' timings of each program.
        """
        with host_devices.unthrottled():
            runs = [_Run(self._device, program, working_set_bytes) for program in programs]
            for run in runs:
                run.every()  # the first run is slower
        taken: List[List[Timing]] = [[] for _ in runs]
        for _ in range(rounds):
            for run, timings in zip(runs, taken):
                timings.append(_timed(run))
        return [tuple(timings) for timings in taken]


class _Run:
    """A compiled program with its sets of inputs, which take turns."""

    def __init__(self, device: Any, repeated: Repeated, working_set_bytes: int) -> None:
        from jax._src.lib import xla_client

        program = repeated.program
        self._compiled = device.client.compile(program.stablehlo, xla_client.CompileOptions())
        self._heirs: Dict[int, int] = dict(repeated.heirs)
        kinds = list(program.arguments) + [((), "int32")] * program.takes_microbatch
        wanted_bytes = min(working_set_bytes, _BEYOND_CACHES_BYTES)
        count = max(1, math.ceil(wanted_bytes / max(1, repeated.argument_bytes())))
        self._sets = [[_made_up(device, *kind) for kind in kinds] for _ in range(min(count, _MOST_SETS))]
        self._next = 0

    def every(self) -> None:
        """Run it once with each set."""
        for _ in self._sets:
            self.once()

    def once(self) -> None:
        """Run it with the next set and wait for its results."""
        arguments = self._sets[self._next]
        self._next = (self._next + 1) % len(self._sets)
        results = self._compiled.execute(arguments)
        for argument, result in self._heirs.items():
            arguments[argument] = results[result]
        for array in results:
            array.block_until_ready()


def _made_up(device: Any, shape: Sequence[int], dtype: str) -> Any:
    import jax
    import numpy

    # A copy: an array put from NumPy may share its memory, which could not be donated.
    return jax.device_put(numpy.full(shape, 0.5).astype(dtype), device).copy().block_until_ready()


def _timed(run: _Run) -> Timing:
    before_s = _reference_s()
    run.once()  # uses up what the quota saved while nothing ran
    runs, start_s = 0, time.perf_counter()
    while True:
        run.once()
        runs += 1
        elapsed_s = time.perf_counter() - start_s
        if runs >= _FEWEST_RUNS and elapsed_s >= _ROUND_S:
            return Timing(elapsed_s / runs, (before_s + _reference_s()) / 2)


def _reference_s() -> float:
    with host_devices.unthrottled():
        return reference_s(repeats=1)
