"""Every error that hwaware raises on purpose.

An error says what is wrong, what was found against what was expected, and after "To fix:" what to do about it. The
command line prints it as one message without a traceback and exits with `exit_code`.
"""

from __future__ import annotations

from typing import Any


class HwawareError(Exception):
    """A failure of hwaware's own work: something that should have succeeded did not.

    Attributes:
        what: What went wrong, with the values found and expected, as one or more sentences.
        fix: What the reader can do about it.
        found, expected: The value that was found and what it should have been, for programs; None where the error is
            not about a value.
        exit_code: The exit code of the command line.

    Example:
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
    """Arguments, files or an environment that hwaware cannot work with; nothing was changed."""

    exit_code = 2


class RecordError(UnusableInputError):
    """A record (cluster, workload, plan, result) that is not valid, or a file that does not hold one."""


class ScenarioError(UnusableInputError):
    """A testbed scenario that does not exist or cannot be read."""


class ClusterUnreachableError(UnusableInputError):
    """No Ray cluster answers at the given address, or its hosts lack what is needed."""


class ProfileMismatchError(UnusableInputError):
    """The profile describes other hosts than the cluster that is running."""


class PlanError(UnusableInputError):
    """A plan that does not fit its workload or its cluster."""


class InfeasibleError(UnusableInputError):
    """No placement exists: the model does not fit on the devices that may be used."""


class AlpaError(UnusableInputError):
    """Alpa is missing, or is not a version that hwaware knows how to override."""


class TestbedError(HwawareError):
    """The testbed could not be set up or taken down."""

    __test__ = False  # not a test class, whatever pytest thinks of its name


class MeasurementError(HwawareError):
    """A probe or a measured step failed, or did not end within its time limit."""


class OutOfDeviceMemoryError(HwawareError):
    """A program needs more memory than its device has."""


class WorkerFailedError(HwawareError):
    """A worker failed, or was lost, while a program ran.

    Attributes:
        where: Which one: its stage, host and devices.
        cause: What happened to it.
    """

    def __init__(self, where: str, cause: str, fix: str) -> None:
        super().__init__(f"{where[:1].upper()}{where[1:]} failed: {cause}", fix)
        self.where = where
        self.cause = cause
