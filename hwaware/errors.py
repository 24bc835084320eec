"""Define every error that hwaware raises on purpose.

An error says what is wrong, and compares the found with the expected value. After "To fix:" it says what to do. The
command line prints it as one message without a traceback, and exits with `exit_code`.
"""

from __future__ import annotations

from typing import Any


class HwawareError(Exception):
    """A failure of hwaware's own work, and the base class of its errors.

    Attributes:
        what: The problem in one or more sentences, with the found and the expected value.
        fix: The remedy, as it follows "To fix:".
        found, expected: The found and the expected value, for programs; None if the error concerns no value.
        exit_code: The exit code of the command line.

    Example:
        >>> from hwaware import HwawareError
        >>> error = HwawareError("Two hosts answered, expected 3.", "start the third.", found=2, expected=3)
        >>> str(error), error.found, error.expected
        ('Two hosts answered, expected 3. To fix: start the third.', 2, 3)
    """

    exit_code = 1

    def __init__(self, what: str, fix: str, *, found: Any = None, expected: Any = None) -> None:
        super().__init__(what, fix)
        self.what = what
        self.fix = fix
        self.found = found
        self.expected = expected

    def __str__(self) -> str:
        return f"{self.what} To fix: {self.fix}"


class UnusableInputError(HwawareError):
    """Arguments, files or an environment that hwaware cannot use; it changed nothing."""

    exit_code = 2


class RecordError(UnusableInputError):
    """An invalid record (cluster, workload, plan, result), or a file without one."""


class DamagedCheckpointError(RecordError):
    """A checkpoint, or a part of one, that is not as it was written."""


class ScenarioError(UnusableInputError):
    """A testbed scenario that does not exist or cannot be read."""


class ClusterUnreachableError(UnusableInputError):
    """No Ray cluster answers at the given address, or its hosts lack what is needed."""


class ProfileMismatchError(UnusableInputError):
    """The profile describes other hosts than the running cluster has."""


class PlanError(UnusableInputError):
    """A plan that does not fit its workload or its cluster."""


class InfeasibleError(UnusableInputError):
    """No placement exists: the model does not fit on the usable devices."""


class AlpaError(UnusableInputError):
    """Alpa is missing, or is not a version that hwaware knows how to override."""


class TestbedError(HwawareError):
    """The testbed could not be set up or taken down."""

    __test__ = False  # pytest would take the name for a test class


class MeasurementError(HwawareError):
    """A probe or a measured step failed or exceeded its time limit."""


class OutOfDeviceMemoryError(HwawareError):
    """A program needs more memory than its device has."""


class CheckpointError(HwawareError):
    """A checkpoint could not be written or read; those that were there before are untouched."""


class WorkerFailedError(HwawareError):
    """A worker failed, or was lost, while a program ran.

    Attributes:
        where: The worker's stage, host and devices.
        cause: The event that ended it, as a sentence.
    """

    def __init__(self, where: str, cause: str, fix: str) -> None:
        super().__init__(f"{where[:1].upper()}{where[1:]} failed: {cause}", fix)
        self.where = where
        self.cause = cause


def cause_of(error: BaseException) -> str:
    """Return the text of an error for a log: the message of hwaware's errors, and type and text of others.

    Example:
        >>> cause_of(KeyError("a")), cause_of(AlpaError("It is old.", "update it."))
        ("KeyError: 'a'", 'It is old. To fix: update it.')
    """
    return str(error) if isinstance(error, HwawareError) else f"{type(error).__name__}: {error}"
