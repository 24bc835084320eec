"""Choose how hwaware's runtime runs a step. The driver sends these settings to every worker that it starts."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Dict, Iterator, List, Literal, Optional

from hwaware import cache_folder
from hwaware.deprecation import moved
from hwaware.errors import UnusableInputError
from hwaware.ucx import Way, chosen, require_way

Sends = Literal["overlapped", "blocking"]
_LONGEST_S = 1e9  # Python can wait for 9.2e9 s, the system's own limit of a time in nanoseconds
DIGESTS_VARIABLE, ENCRYPT_VARIABLE = "HWAWARE_MESSAGE_DIGESTS", "HWAWARE_ENCRYPT"


@dataclass(frozen=True)
class RuntimeSettings:
    """Hold the settings of the workers of one program.

    Attributes:
        cache: The driver's HWAWARE_CACHE, which counts before that of the workers; None if the driver has none.
        others: See `runtime_settings`.

    Raises:
        UnusableInputError: `sends` or `transfers` is unknown, or a limit is not between 0 and 1e9 s. Or a switch is
            neither True nor False.
    """

    sends: Sends = "overlapped"
    receive_limit_s: float = 600.0
    step_limit_s: float = 3600.0
    enforce_memory: bool = True
    message_digests: bool = False
    encrypt: bool = False
    transfers: Way = "auto"
    cache: Optional[str] = field(default_factory=cache_folder.setting)

    def __post_init__(self) -> None:
        if self.sends not in ("overlapped", "blocking"):
            raise UnusableInputError(
                f"sends is {self.sends!r}, expected 'overlapped' or 'blocking'.", "give one of the two."
            )
        require_way(self.transfers)
        for name in ("enforce_memory", "message_digests", "encrypt"):
            if not isinstance(getattr(self, name), bool):
                raise UnusableInputError(
                    f"{name} is {getattr(self, name)!r}, expected True or False.", "give one of the two."
                )
        for name in ("receive_limit_s", "step_limit_s"):
            if not (isinstance(getattr(self, name), Real) and 0 < getattr(self, name) <= _LONGEST_S):
                raise UnusableInputError(
                    f"{name} is {getattr(self, name)!r}, expected more than 0 s and at most {_LONGEST_S:g} s.",
                    "give such a number.",
                )


_stack: List[RuntimeSettings] = []


def current() -> RuntimeSettings:
    """Return the settings in force: of the innermost block, or else of the environment.

    Raises:
        UnusableInputError: HWAWARE_MESSAGE_DIGESTS or HWAWARE_ENCRYPT is neither 0 nor 1, or HWAWARE_TRANSFERS unknown.

    Example:
        >>> current().step_limit_s
        3600.0
    """
    if _stack:
        return _stack[-1]
    digests, encrypts = is_on(DIGESTS_VARIABLE), is_on(ENCRYPT_VARIABLE)
    return RuntimeSettings(message_digests=digests, encrypt=encrypts, transfers=chosen())


def is_on(variable: str, default: str = "0") -> bool:
    """Return True if an environment variable is 1, and False if it is 0.

    Args:
        variable: Its name.
        default: Value that counts where the variable is not set.

    Raises:
        UnusableInputError: The value is another one.
    """
    value = os.environ.get(variable, default)
    if value not in ("0", "1"):
        raise UnusableInputError(f"{variable} is {value!r}, expected 0 or 1.", "set it to 1, or unset it.")
    return value == "1"


@contextlib.contextmanager
def runtime_settings(
    *, sends: Optional[Sends] = None, receive_limit_s: Optional[float] = None, step_limit_s: Optional[float] = None,
    enforce_memory: Optional[bool] = None, message_digests: Optional[bool] = None, encrypt: Optional[bool] = None,
    transfers: Optional[Way] = None,
) -> Iterator[None]:  # fmt: skip
    """Run workers that start inside the block with other settings.

    Blocks nest; an option that is None stays as it is outside. Alpa starts a program's workers when it compiles it, and
    they keep their settings.

    Args:
        sends: "overlapped" sends a stage's output as soon as it exists, and receives it while the next stage computes.
            With "blocking", Alpa's own order, both ends of a transfer finish their computation and wait for each other.
            By default "overlapped".
        receive_limit_s: A worker that waits longer for a message ends the step with an error. By default 600 s.
        step_limit_s: A driver that waits longer for a step, or for compilation, ends the program with an error. By
            default 3600 s.
        enforce_memory: Refuse a program that needs more memory than the host declares for its devices. By default
            True.
        message_digests: Every message between workers carries a keyed digest (HMAC-SHA256). A worker ends the step with
            an error if somebody changed, repeated or removed a message on its way. Digests hide nothing. By default
            False, or True where the environment variable HWAWARE_MESSAGE_DIGESTS is 1.
        encrypt: Workers encrypt their connections with each other and with the driver (TLS 1.3). The driver needs the
            package `cryptography`. Ray's and JAX's own connections stay as they are. By default False, or True where
            the environment variable HWAWARE_ENCRYPT is 1.
        transfers: "auto" lets GPUs of one host exchange arrays through UCX, if it is installed (libucx-cu13). "ucx"
            also sends long arrays between CPUs through UCX; "tcp" sends none. Programs with digests or encryption never
            use UCX. By default "auto", or the value of the environment variable HWAWARE_TRANSFERS.

    Raises:
        UnusableInputError: `sends` or `transfers` is unknown, or a limit is not between 0 and 1e9 s. Or a switch is
            neither True nor False.

    Example:
        >>> from hwaware import runtime_settings
        >>> from hwaware.runtime.settings import current
        >>> with runtime_settings(sends="blocking"):
        ...     current().sends
        'blocking'
        >>> current().sends
        'overlapped'
    """
    given: Dict[str, Any] = {
        "sends": sends, "receive_limit_s": receive_limit_s, "step_limit_s": step_limit_s,
        "enforce_memory": enforce_memory, "message_digests": message_digests, "encrypt": encrypt,
        "transfers": transfers,
    }  # fmt: skip
    _stack.append(replace(current(), **{name: value for name, value in given.items() if value is not None}))
    try:
        yield
    finally:
        _stack.pop()


__getattr__ = moved(__name__, {"using": ("hwaware", "runtime_settings")})
