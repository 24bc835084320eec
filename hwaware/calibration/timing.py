"""Programs timed on devices, compiled and run as the runtime does it in a step."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import socket
import statistics
import time
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, NamedTuple, Optional, Protocol, Sequence, Tuple

from hwaware import host_devices
from hwaware.calibration.cache import AGAIN
from hwaware.costs.compute import joint_deviation_s
from hwaware.host_load import BUSY, busy_share
from hwaware.runtime import mesh

# A CPU quota's period is 10 to 20 ms: a reading of this length holds fifty of them.
_READING_S = 1.0
# As many readings of that length, or fewer longer ones: where one takes seconds it holds as many periods by itself.
_ROUNDS = 3
# Every fourth host rests while the others compute, each in its turn.
RESTING = 4
# More than the last-level caches of processors and GPUs hold, as a rule: what is touched after this much comes from
# memory again.
_BEYOND_CACHES_BYTES = 128 << 20
_MOST_SETS = 32
_LOAD_S, _LOAD_TRIES = 0.3, 3
# Parts of a time limit: compiling may take the first, and the first run of all programs the second of what is left.
_COMPILING, _ONCE = 0.6, 0.4
# A shorter reading holds too few periods of a quota.
_SHORTEST_S = 0.25
# Readings take a little longer than asked for: the last run of each ends after them.
_SLACK = 1.1
if TYPE_CHECKING:
    from hwaware.compiler.programs import StageProgram

LOG = logging.getLogger("hwaware")


class Repeated(NamedTuple):
    """A program as a step repeats it.

    Attributes:
        program: The program.
        heirs: (argument, result that takes its place in the next run): gradient accumulators, or the whole state.
    """

    program: StageProgram
    heirs: Tuple[Tuple[int, int], ...] = ()

    def argument_bytes(self) -> int:
        """Return how many bytes one run reads."""
        import jax.numpy

        # NumPy alone does not know bfloat16.
        return sum(math.prod(shape) * jax.numpy.dtype(dtype).itemsize for shape, dtype in self.program.arguments)


class Timing(NamedTuple):
    """A program as it was timed on a device, or on several alike.

    Attributes:
        readings_s: The mean seconds of one run, one figure a reading.
        deviation_s: Standard deviation of one run from the next, drift of the machine left out.
    """

    readings_s: Tuple[float, ...]
    deviation_s: float


def together(timings: Sequence[Timing]) -> Timing:
    """Join timings of a program on several devices: all readings, and the root mean square of the deviations."""
    return Timing(
        tuple(itertools.chain.from_iterable(timing.readings_s for timing in timings)),
        joint_deviation_s(timing.deviation_s for timing in timings) or 0.0,
    )


def deviation_s(runs: Sequence[float]) -> float:
    """Return the standard deviation of runs around a mean that drifts: sqrt(mean of (x_i+1 - x_i)^2 / 2).

    Source: von Neumann et al., "The mean square successive difference", 1941.

    Example:
        >>> deviation_s([1.0, 1.0]), deviation_s([1.0]), round(deviation_s([1.0, 3.0, 1.0, 3.0]), 3)
        (0.0, 0.0, 1.414)
    """
    squares = [(later - earlier) ** 2 for earlier, later in zip(runs, runs[1:])]
    return math.sqrt(statistics.fmean(squares) / 2) if squares else 0.0


class ProgramTimer:
    """Time programs on one device, in this process or as a Ray actor.

    It runs under the device's share of the host, and leaves the share while it waits, as workers do.

    Args:
        place: The device and its host.
    """

    def __init__(self, place: mesh.Place) -> None:
        mesh.prepare_environment(place)
        with host_devices.unthrottled():
            (self._device,) = mesh.local_devices(place)
        host_devices.join(*place.devices)
        self._outside_share = contextlib.ExitStack()
        self._rest()
        self._runs: List[_Run] = []
        self._executables: Dict[str, Any] = {}

    def _rest(self) -> None:
        self._outside_share.enter_context(host_devices.unthrottled())

    def start(self) -> bool:
        """Return True; who waits for this waits until the timer runs."""
        return True

    def compile(self, programs: Sequence[Repeated], working_set_bytes: int, limit_s: float = math.inf) -> int:
        """Compile programs that it does not have yet, and run each at full speed; see `timed`.

        Returns:
            How many of the programs are ready: the first ones, if the time limit ends this early.
        """
        each_bytes = min(working_set_bytes, _BEYOND_CACHES_BYTES) / max(1, len(programs))  # they run in turn
        end_s = time.perf_counter() + limit_s
        with host_devices.unthrottled():
            self._runs = []  # their inputs end before others are made
            for program in programs:
                if time.perf_counter() >= end_s:
                    break
                run = _Run(self._device, self._compiled(program), program, each_bytes)
                run.every()  # the first run is slower
                self._runs.append(run)
        return len(self._runs)

    def _compiled(self, repeated: Repeated) -> Any:
        from hwaware.compat.client import load

        text = repeated.program.stablehlo
        if text not in self._executables:
            self._executables[text] = load(text, [self._device])
        return self._executables[text]

    def turns(self, duration_s: float, limit_s: float = math.inf) -> List[List[float]]:
        """Run the programs one by one, again and again, for so long or at least once; return all runs' seconds.

        After the time limit it starts no run, so the last programs may have none.
        """
        self._outside_share.close()
        try:
            return self._turns(duration_s, limit_s)
        finally:
            self._rest()

    def _turns(self, duration_s: float, limit_s: float) -> List[List[float]]:
        spent_s: List[List[float]] = [[] for _ in self._runs]
        start_s = now_s = time.perf_counter()
        if self._runs:
            self._runs[-1].once()  # uses up what the quota saved while nothing ran
            now_s = time.perf_counter()
            limit_s, start_s = limit_s - (now_s - start_s), now_s
        for run, seconds in itertools.cycle(zip(self._runs, spent_s)):
            if (seconds and now_s - start_s >= duration_s) or now_s - start_s >= limit_s:
                break
            before_s = now_s
            run.once()
            now_s = time.perf_counter()
            seconds.append(now_s - before_s)
        return spent_s

    def busy(self) -> Tuple[str, float]:
        """Return the host's name, and the part of its processors that other work takes now."""
        return socket.gethostname(), busy_share(_LOAD_S)


class Each(NamedTuple):
    """An argument that has another value for each timer."""

    values: Sequence[Any]


class Ask(Protocol):
    """Calls a method of every timer and returns what they return, in their order; see `Each`."""

    def __call__(self, method: str, *arguments: Any, resting: Optional[int] = None) -> List[Any]:
        """Call it on all at once; but not on every fourth host, counted from `resting` on: None stands for these."""
        ...


def asking(timer: ProgramTimer) -> Ask:
    """Return the `Ask` for one timer in this process, on the first of four hosts, which rests from 0 on."""

    def ask(method: str, *arguments: Any, resting: Optional[int] = None) -> List[Any]:
        given = (one.values[0] if isinstance(one, Each) else one for one in arguments)
        return [None if resting == 0 else getattr(timer, method)(*given)]

    return ask


def readings(ask: Ask, duration_s: float, limit_s: float = math.inf) -> List[List[List[List[float]]]]:
    """Return three readings of all programs by each timer: its `turns` while each fourth of the hosts rested."""
    found = [ask("turns", duration_s, limit_s, resting=first) for first in range(RESTING)]
    return [[reading for reading in of_timer if reading is not None] for of_timer in zip(*found)]


class Timed(NamedTuple):
    """Programs as timed on devices.

    Attributes:
        timings: For each timer each program's timing; None where time ran out, or the timer did not answer.
        busy: Hosts that did other work, which makes times too long.
    """

    timings: List[List[Optional[Timing]]]
    busy: List[str]


def timed(
    ask: Ask,
    programs: Sequence[Repeated],
    working_set_bytes: int = 0,
    limit_s: float = math.inf,
    counts: Optional[Sequence[int]] = None,
    warned: Sequence[str] = (),
) -> Timed:
    """Time programs on several devices while others of these compute, as they do in a step.

    All devices of a host run at once, since they share its memory, power and caches. Together they took 3 to 15 %
    longer than alone. Three of four hosts run at once, since stages wait for each other. (n stages with B
    microbatches compute for B / (B + n - 1) of a step.) Layers timed so took 0.93 to 1.04 times as long as in steps.

    On each device the programs take turns, as in a step, so that a drifting machine meets all alike. A layer that
    repeats alone finds its weights in the cache, and is a quarter faster than in a step. So each program goes round
    several sets of inputs. All sets together are as large as what a step touches in between, or beyond the caches.

    Args:
        ask: The devices' timers.
        programs: At least one, all unlike, the most important first; inputs are made up.
        working_set_bytes: Bytes that a step touches before it comes back to the same program.
        limit_s: Time for all of this. Where it is short, programs have fewer readings, then one run, then none.
        counts: For each timer, how many of the programs it times, the first ones; by default all.
        warned: Hosts that an earlier call has named in its warning.

    Returns:
        Three readings a round, in three rounds. Rounds are fewer where the slowest device takes longer than a second
        for all programs. A warning is logged for each host that does other work, and is not in `warned`.
    """
    end_s = time.monotonic() + limit_s
    ask("start")
    given: Any = list(programs) if counts is None else Each([list(programs[:count]) for count in counts])
    ask("compile", given, working_set_bytes, _COMPILING * max(0.0, end_s - time.monotonic()))
    loads = [_load(ask)]
    first = ask("turns", 0.0, _ONCE * (end_s - time.monotonic()))
    # The slowest device is through once: the others compute until it is.
    slowest_s = max((math.fsum(run[0] for run in runs if run) for runs in first if runs), default=0.0)
    duration_s = max(_READING_S, slowest_s)
    rounds = math.ceil(_ROUNDS * (_READING_S / duration_s))
    left_s = end_s - time.monotonic()
    if left_s < rounds * RESTING * duration_s:
        longest_s = left_s / (RESTING * _SLACK)
        duration_s = max(slowest_s, _SHORTEST_S, min(duration_s, longest_s))
        rounds = int(longest_s / duration_s)
    found = [readings(ask, duration_s, limit_s / RESTING) for _ in range(rounds)]
    if not found:
        # One reading of all hosts at once. A single run tells little: a quota saved before lets it go at full speed.
        last = ask("turns", left_s / 2, left_s) if left_s > _SHORTEST_S else first
        found = [[[] if one is None else [one] for one in last]]
    loads.append(_load(ask))
    timings = [_timings(list(itertools.chain(*of_timer)), len(programs)) for of_timer in zip(*found)]
    return Timed(timings, _warn_of(loads, warned))


def _timings(found: Sequence[Sequence[Sequence[float]]], programs: int) -> List[Optional[Timing]]:
    """Return the timing of each program from a device's readings; a program beyond the device's last has none."""
    each = [[runs for runs in of_program if runs] for of_program in zip(*found)]
    timings = [_timing(of_program) if of_program else None for of_program in each]
    return timings + [None] * (programs - len(timings))


def once_s(ask: Ask) -> float:
    """Return how long the slowest device takes for all programs, each run once."""
    return max(math.fsum(runs[0] for runs in of_device) for of_device in ask("turns", 0.0))


def _timing(found: Sequence[Sequence[float]]) -> Timing:
    """Return the timing of a program from its runs, reading by reading."""
    return Timing(tuple(map(statistics.fmean, found)), deviation_s(list(itertools.chain.from_iterable(found))))


def _load(ask: Ask) -> Dict[str, float]:
    """Return how busy others keep each host: the least of a few readings, since a compilation may still be ending."""
    found: Dict[str, float] = dict(one for one in ask("busy") if one)
    for _ in range(_LOAD_TRIES - 1):
        if max(found.values(), default=0.0) <= BUSY:
            break
        found = {host: min(found.get(host, busy), busy) for host, busy in (one for one in ask("busy") if one)}
    return found


def _warn_of(loads: Sequence[Mapping[str, float]], warned: Sequence[str]) -> List[str]:
    """Warn of the hosts that did other work, once of each, and return these."""
    busy = {host: max(load.get(host, 0.0) for load in loads) for host in loads[0]}
    found = [host for host, part in busy.items() if part > BUSY]
    fresh = [host for host in found if host not in warned]
    if fresh:
        LOG.warning(
            "Layers were timed while hosts did other work, expected less than %s of their processors: %s. Their times, "
            "and what is predicted from them, may be too long. To fix: %s",
            f"{BUSY:.0%}",
            ", ".join(f"{host} ({busy[host]:.0%} busy)" for host in fresh),
            AGAIN,
        )
    return found


class _Run:
    """A compiled program with its sets of inputs, which take turns."""

    def __init__(self, device: Any, compiled: Any, repeated: Repeated, inputs_bytes: float) -> None:
        program = repeated.program
        self._compiled = compiled
        self._heirs: Dict[int, int] = dict(repeated.heirs)
        kinds = list(program.arguments) + [((), "int32")] * program.takes_microbatch
        count = max(1, math.ceil(inputs_bytes / max(1, repeated.argument_bytes())))
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
    import jax.numpy  # NumPy alone does not know bfloat16
    import numpy

    from hwaware.compat.client import put

    # A copy: an array may share NumPy's memory, which could not be donated. JAX's own copy compiles for each shape.
    made = numpy.full(shape, 0.5).astype(jax.numpy.dtype(dtype))
    return put(made, device, copy=True).block_until_ready()
