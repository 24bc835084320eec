"""Send the samples of a step from the driver to a worker, microbatch by microbatch, while the worker computes."""

from __future__ import annotations

import contextlib
import logging
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from hwaware.errors import MeasurementError
from hwaware.greeting import Credentials
from hwaware.runtime.recorder import Recorder
from hwaware.runtime.transfers import FROM_DRIVER, Outgoing, Peer, numbered
from hwaware.transport import Address, Connection

LOG = logging.getLogger("hwaware")


class Expected(NamedTuple):
    """A part of a batch that a worker shall expect from the driver.

    Attributes:
        uuid: The number under which the worker keeps the part.
        keys: The key of its message to each device of the worker.
        shape, dtype: Shape and type of the message on each device.
    """

    uuid: int
    keys: Tuple[str, ...]
    shape: Tuple[int, ...]
    dtype: Any


class Promised(List[Any]):
    """A part of a batch on each device of a worker; empty until the worker needs it.

    Args:
        expected: The part.
    """

    def __init__(self, expected: Expected) -> None:
        super().__init__()
        self.expected = expected


class Feed:
    """Sends samples to one worker, in the background. Its thread starts with the first ones.

    Args:
        address: Address of the worker's mailbox.
        credentials: Credentials of the program.
        limit_s: Limit [s] for the worker to make room: it may be compiling.
        lifeline: The driver's idle connection to the worker.
    """

    def __init__(self, address: Address, credentials: Credentials, limit_s: float, lifeline: Connection) -> None:
        self._address, self._credentials, self._limit_s = address, credentials, limit_s
        self._lifeline, self._is_closed = lifeline, False
        self._peer: Optional[Peer] = None
        self._counts: Dict[str, int] = {}

    def numbered(self, device: int) -> str:
        """Return the key of the next message to a device of the worker."""
        return numbered(self._counts, FROM_DRIVER, (0, 0), (1, device))

    def send(self, messages: Sequence[Tuple[str, Any]]) -> None:
        """Hand over messages, in the order of their numbers; wait for nothing.

        Args:
            messages: The key and the array of each; nobody may change the arrays later.
        """
        if self._peer is None:
            self._peer = Peer(
                self._address, self._credentials, "the driver", Recorder(), self._failed, self._limit_s, bound=0
            )
        # The sending has failed, which was told, or the worker is lost, which the driver's next wait tells.
        with contextlib.suppress(MeasurementError):
            for key, array in messages:
                self._peer.send(Outgoing(key, array, ...), self._limit_s)

    def _failed(self, sentence: str) -> None:
        """Tell why samples do not reach a worker that is there: it only knows that it waits for them."""
        if not self._is_closed and self._lifeline.is_lost() is None:
            LOG.warning("The driver sends no samples any more. %s", sentence)

    def close(self) -> None:
        """End the sending at once; say farewell if nothing waits."""
        self._is_closed = True
        if self._peer is None:
            return
        if self._peer.unsent():
            self._peer.abandon()  # a worker that takes nothing is not waited for
        else:
            self._peer.close()
