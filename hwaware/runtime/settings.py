"""How hwaware's runtime runs a step: what the driver chooses and every worker is told when it starts."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any, Iterator, List, Literal

from hwaware.errors import UnusableInputError

Sends = Literal["overlapped", "blocking"]


@dataclass(frozen=True)
class RuntimeSettings:
    """What workers do that are launched while these settings hold.

    Attributes:
        sends: "overlapped": a stage's output leaves as soon as it exists and is received while the stage computes.
            "blocking": Alpa's own order, in which both ends of a transfer finish what they compute and wait for each
            other at the consumer's tick.
        receive_limit_s: A worker that waits longer than this for a message ends the step with an error.
        step_limit_s: A driver that waits longer than this for a step, or for compilation, ends the program with an
            error.
        enforce_memory: Refuse a program that would need more memory than the host declares for its devices.

    Raises:
        UnusableInputError: A value does not fit.
    """

    sends: Sends = "overlapped"
    receive_limit_s: float = 600.0
    step_limit_s: float = 3600.0
    enforce_memory: bool = True

    def __post_init__(self) -> None:
        if self.sends not in ("overlapped", "blocking"):
            raise UnusableInputError(
                f"sends is {self.sends!r}, expected 'overlapped' or 'blocking'.", "give one of the two."
            )
        for name in ("receive_limit_s", "step_limit_s"):
            if not getattr(self, name) > 0:
                raise UnusableInputError(
                    f"{name} is {getattr(self, name)!r}, expected a number of seconds above 0.", f"raise {name}."
                )


_stack: List[RuntimeSettings] = [RuntimeSettings()]


def current() -> RuntimeSettings:
    """The settings that hold now.

    Example:
        >>> with using(sends="blocking"):
        ...     current().sends
        'blocking'
        >>> current().sends
        'overlapped'
    """
    return _stack[-1]


@contextlib.contextmanager
def using(**changes: Any) -> Iterator[None]:
    """Workers that are launched inside the block run with these fields of RuntimeSettings.

    Raises:
        UnusableInputError: A value does not fit.
    """
    _stack.append(replace(current(), **changes))
    try:
        yield
    finally:
        _stack.pop()
