"""Name the device or the link whose times have changed, with a stated rate of false alarms."""

from __future__ import annotations

import collections
import math
import statistics
from typing import Collection, Deque, Dict, List, Mapping, NamedTuple, Optional, Tuple

from hwaware.costs.intervals import RECORDED

# Steps whose noise is taken over from another placement. That of this one is learned beside it.
_INHERITED_STEPS = 30
# Steps from which a subject's level and noise are first known, and up to which they are learned.
FIRST_STEPS, KNOWN_STEPS = 12, 100
# False alarms of all subjects together, at most one in so many steps.
STEPS_PER_ALARM = 10_000
# A change of two standard deviations is found fastest; half of it is what a step adds before it counts.
_ALLOWED = 1.0
# Smaller changes are left alone: no placement gains enough by them.
_LEAST_CHANGE = 0.09
# First steps may differ by so much, in logarithms, from what was expected: an error of prediction. It is larger for a
# device that never changed: the price of its stage may be wrong, by the range that holds 90 % of recorded errors.
_LEAST_SURPRISE, _LEAST_FIRST_SURPRISE = 0.15, RECORDED["model"].high - RECORDED["model"].low
# One step counts as at most so many standard deviations: a single pause is no change.
_MOST = 3.0
# Times repeat within this at best. The estimate from few steps may be smaller by chance.
_LEAST_NOISE = 0.01
# Siegmund's correction for the overshoot of a sum beyond its limit.
_OVERSHOOT = 1.166


class Change(NamedTuple):
    """A subject whose times have changed.

    Attributes:
        subject: Its name, as it was observed.
        factor: Its time now over its time in the first steps.
        steps: Number of steps since the change, as far as the detector can tell.
    """

    subject: str
    factor: float
    steps: int


class Level(NamedTuple):
    """The times of a subject, as a detector knows them.

    Attributes:
        time_s: Usual time of now.
        noise: Standard deviation of its logarithm.
        freedom: Degrees of freedom from which the noise was estimated.
    """

    time_s: float
    noise: float
    freedom: int


class Expected(NamedTuple):
    """The first steps of a subject, as they are predicted.

    Attributes:
        least_s, most_s: Bounds of its time.
        noise: Standard deviation of its logarithm.
        freedom: Degrees of freedom from which the noise was estimated.
    """

    least_s: float
    most_s: float
    noise: float
    freedom: int


class Detector:
    """Watch the times of subjects, step by step, for changes that last.

    Each subject has two sums (Page's CUSUM): of its deviations above its level, and below. A sum beyond the limit is a
    change. With z the deviation of the time's logarithm in units of the noise, limited to 3:

    up = max(0, up + z - 1 - d),   down = max(0, down - z - 1 - d),   a change if either exceeds h

    steps per alarm = (e^(2 h') - 2 h' - 1) / 2,   h' = h + 1.166

    for one sum. The level is the mean of n steps, so d = 1 / sqrt(n); the noise counts 1 + d fold, too. h is the value
    at which all sums together give one alarm in `STEPS_PER_ALARM` steps of normal noise.
    A change becomes the subject's new level, so that its end is a change, too. The level follows the mean of the last
    steps; if it creeps by 9 %, this is a change as well. Smaller changes are told once they add up to 9 %.

    Args:
        subjects: Number of subjects that will be observed.
        expected: Predicted times of some subjects in their first steps.

    Example:
        >>> detector = Detector(1)
        >>> times = [*[1.0, 1.02, 0.98, 1.0] * 4, 1.5, 1.5, 1.5]
        >>> found = [change for time in times for change in detector.observe({"a:0": time})]
        >>> [(change.subject, round(change.factor, 2), change.steps) for change in found]
        [('a:0', 1.5, 3)]

    Source: Page, "Continuous inspection schemes", 1954; Siegmund, "Sequential analysis", 1985, for the limit.
    """

    def __init__(self, subjects: int, expected: Optional[Mapping[str, Expected]] = None) -> None:
        self._limit = limit_of(subjects)
        self._states = {name: _State(one) for name, one in (expected or {}).items()}

    def observe(self, seconds: Mapping[str, float]) -> List[Change]:
        """Take the times of one step, and return the changes that it shows.

        Args:
            seconds: Subject -> its time in this step, above 0. Subjects may be left out of a step.
        """
        found = []
        for subject, time_s in seconds.items():
            change = self._states.setdefault(subject, _State()).add(math.log(time_s), self._limit)
            if change is not None:
                found.append(Change(subject, *change))
        return found

    def surprises(self, changed: Collection[str]) -> List[Change]:
        """Return the subjects whose first steps are not as expected.

        Args:
            changed: Subjects that have changed before. A smaller surprise is a change of theirs.
        """
        found = (
            (subject, state.surprise(_LEAST_SURPRISE if subject in changed else _LEAST_FIRST_SURPRISE))
            for subject, state in self._states.items()
        )
        return [Change(subject, *surprise) for subject, surprise in found if surprise is not None]

    def factors(self, steps: int = 0) -> Dict[str, float]:
        """Return the factor of every subject that has changed since its first steps.

        Args:
            steps: Number of last steps that count for subjects without a change so far. Where their median differs by
                more than noise, it gives the factor, though no sum is beyond its limit yet. 0 leaves them out.
        """
        factors = {name: one.factor_in(steps) for name, one in self._states.items()}
        return {name: factor for name, factor in factors.items() if factor != 1.0}

    def levels(self) -> Dict[str, Level]:
        """Return the times of all subjects that are known."""
        return {name: one.known() for name, one in self._states.items() if one.is_known}


def limit_of(subjects: int) -> float:
    """Return h, the limit of the sums in standard deviations.

    Example:
        >>> round(limit_of(1), 2), round(limit_of(20), 2)
        (4.13, 5.63)
    """
    from scipy.optimize import brentq  # half a second, which only trainings that adapt shall pay

    wanted = 2.0 * 2.0 * max(1, subjects) * STEPS_PER_ALARM
    beyond: float = brentq(lambda high: math.exp(2 * high) - 2 * high - 1 - wanted, 0.1, 50.0)
    return beyond - _OVERSHOOT


class _State:
    """Level, noise and sums of one subject, in logarithms."""

    def __init__(self, expected: Optional[Expected] = None) -> None:
        self._recent: Deque[float] = collections.deque(maxlen=FIRST_STEPS)
        self._since: List[List[float]] = [[], []]  # since each sum was last 0
        self._sums = [0.0, 0.0]
        self._level, self._steps = 0.0, 0  # a mean, and of how many steps
        self._squares, self._freedom = 0.0, -1  # around the levels, for the noise
        self._begin: Optional[float] = None
        self._expected = expected
        if expected is not None:
            self._freedom = min(expected.freedom, _INHERITED_STEPS)
            self._squares = expected.noise**2 * self._freedom
        self.is_known, self.factor = False, 1.0

    def known(self) -> Level:
        """Return level and noise."""
        return Level(math.exp(self._level), math.sqrt(self._squares / self._freedom), self._freedom)

    def factor_in(self, steps: int) -> float:
        """Return the factor told last, or that of the last steps where it differs by more than noise."""
        recent = list(self._recent)[-steps:] if steps else []
        if not self.is_known or not recent:
            return self.factor
        factor = statistics.median(recent) - (self._level if self._begin is None else self._begin)
        # A median of n has an error of 1.25 / sqrt(n) of the noise; twice this is rare.
        error = 2.5 * math.sqrt(self._squares / self._freedom / len(recent))
        return self.factor if abs(factor - math.log(self.factor)) < max(_LEAST_CHANGE, error) else math.exp(factor)

    def surprise(self, least: float) -> Optional[Tuple[float, int]]:
        """Return the factor over what was expected, and the number of first steps; None if they are as expected.

        Args:
            least: Smallest surprise, as a logarithm.
        """
        if not self.is_known or self._expected is None:
            return None
        bounds = math.log(self._expected.least_s), math.log(self._expected.most_s)
        nearest = min(max(self._level, bounds[0]), bounds[1])
        if abs(self._level - nearest) <= least:
            return None
        self._begin = nearest
        return self._told(self._steps)

    def add(self, log_s: float, limit: float) -> Optional[Tuple[float, int]]:
        """Return the new factor and the number of steps since a change; None without a change."""
        self._recent.append(log_s)
        if self.is_known:
            noise = max(_LEAST_NOISE, math.sqrt(self._squares / self._freedom))
            # Errors of the noise and of the level, which few steps leave.
            noise *= 1.0 + 1.0 / math.sqrt(self._freedom)
            allowed = _ALLOWED + 1.0 / math.sqrt(self._steps)
            z = max(-_MOST, min(_MOST, (log_s - self._level) / noise))
            for side, sign in enumerate((1.0, -1.0)):
                self._sums[side] = max(0.0, self._sums[side] + sign * z - allowed)
                self._since[side] = [*self._since[side], log_s] if self._sums[side] > 0 else []
                if self._sums[side] > limit:
                    return self._changed(self._since[side])
            if abs(z) == _MOST:  # a pause, or the begin of a change
                return None
        self._learn(log_s)
        if not self.is_known:
            self.is_known = self._steps == FIRST_STEPS
        if self._begin is None:
            self._begin = self._level if self._steps == KNOWN_STEPS else None
        elif self._steps == KNOWN_STEPS and abs(self._level - math.log(self.factor) - self._begin) > _LEAST_CHANGE:
            return self._changed([self._level] * KNOWN_STEPS)
        return None

    def _learn(self, log_s: float) -> None:
        before = self._level
        self._steps = min(KNOWN_STEPS, self._steps + 1)
        self._level += (log_s - before) / self._steps
        if self._freedom < KNOWN_STEPS and (self.is_known or self._expected is None):
            self._squares += (log_s - before) * (log_s - self._level)
            self._freedom += 1

    def _changed(self, since: List[float]) -> Optional[Tuple[float, int]]:
        if self._begin is None:
            self._begin = self._level
        self._level, self._steps = statistics.median(since), len(since)
        self._sums, self._since = [0.0, 0.0], [[], []]
        return self._told(len(since))

    def _told(self, steps: int) -> Optional[Tuple[float, int]]:
        """Return a change that is large enough beside the factor that was told last."""
        assert self._begin is not None
        factor = self._level - self._begin
        if abs(factor - math.log(self.factor)) < _LEAST_CHANGE:
            return None
        self.factor = math.exp(factor)
        return self.factor, steps
