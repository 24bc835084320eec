"""Send pieces to vaults: workers to the vault of their host, and that one to the vault of another host."""

from __future__ import annotations

import json
from typing import Any, Dict, Iterable, NamedTuple, Optional, Tuple

from hwaware.errors import MeasurementError
from hwaware.greeting import Credentials
from hwaware.survival.handing import Handed, Lent
from hwaware.survival.pieces import Piece
from hwaware.transport import Address, Connection

PURPOSE, MARK = "vault", "done"
_LIMIT_S = 60.0


def piece_key(epoch: int, serial: int, piece: Piece) -> str:
    """Return the key of the message with a piece, copied by the order of that serial: no two messages share a key."""
    return f"{epoch}|{serial}|{piece.text()}"


def mark_key(epoch: int, serial: int, sender: str) -> str:
    """Return the key of the message that ends what a sender has for a vault by the order of that serial.

    Example:
        >>> mark_key(0, 12, "stage 1")
        '0|done|12|stage 1'
    """
    return f"{epoch}|{MARK}|{serial}|{sender}"


def forwarder(sender: str) -> str:
    """Return the name under which the vault of a worker's host sends on what the worker gave it.

    Example:
        >>> forwarder("stage 1")
        'stage 1 by its vault'
    """
    return f"{sender} by its vault"


def unreadable(sender: str) -> str:
    """Return the name under which a vault says that it cannot read the memory of a worker.

    Example:
        >>> unreadable("0.0")
        '0.0 cannot be read'
    """
    return f"{sender} cannot be read"


class Forward(NamedTuple):
    """Pieces that a vault sends on.

    Attributes:
        address: Where the other vault takes messages.
        pieces: Their texts.
    """

    address: Address
    pieces: Tuple[str, ...]


class Mark(NamedTuple):
    """Tell a vault, after the last piece, what it shall do.

    Attributes:
        forwards: Pieces to send on.
        handed: Pieces to take out of the sender's memory.
    """

    forwards: Tuple[Forward, ...] = ()
    handed: Optional[Handed] = None


def encoded(mark: Mark) -> bytes:
    """Return a mark as bytes.

    Example:
        >>> mark = Mark((Forward(("10.0.0.1", 7), ("[]",)),), Handed("/proc/7/fd/9", "0|12|3", (("[]", 64),)))
        >>> decoded(encoded(mark)) == mark, decoded(encoded(Mark())) == Mark()
        (True, True)
    """
    return json.dumps(mark).encode() if any(mark) else b""


def decoded(data: Any) -> Mark:
    """Return what `encoded` was given."""
    if not len(data):
        return Mark()
    forwards, handed = json.loads(bytes(data))
    return Mark(
        tuple(Forward((host, port), tuple(pieces)) for (host, port), pieces in forwards),
        None if handed is None else Handed(handed[0], handed[1], tuple((text, start) for text, start in handed[2])),
    )


class Sender:
    """Sends pieces to vaults, over connections that stay open.

    Args:
        name: Name of this end in a vault's errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._connections: Dict[Address, Connection] = {}

    def send(self, address: Address, credentials: Credentials, messages: Iterable[Tuple[str, Any]]) -> None:
        """Send messages, as (key, data), in order.

        Raises:
            MeasurementError: The vault cannot be reached. The next call connects again.
        """
        try:
            if address not in self._connections:
                self._connections[address] = Connection(address, credentials, _LIMIT_S, self._name)
                self._connections[address].give_way()
            connection = self._connections[address]
            for key, data in messages:
                if isinstance(data, Lent):
                    connection.send_file(key, data.file, data.start, len(data))
                else:
                    connection.send(key, data)
        except MeasurementError:
            self._connections.pop(address, None)
            raise
