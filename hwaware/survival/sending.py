"""Send pieces to vaults: workers to the vault of their host, and that one to the vault of another host."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import msgspec

from hwaware.errors import MeasurementError
from hwaware.greeting import Credentials
from hwaware.survival.handing import Handed, Part, joined
from hwaware.survival.pieces import Piece
from hwaware.transport import Address, Connection

PURPOSE, MARK = "vault", "done"
_CONNECT_LIMIT_S, _ROOM_LIMIT_S = 10.0, 60.0


def block_key(epoch: int, serial: int, number: int, sender: str) -> str:
    """Return the key of a message with pieces, which no other message has; `serial` is that of the copies' order.

    Example:
        >>> block_key(0, 12, 3, "stage 1")
        '0|12|3|stage 1'
    """
    return f"{epoch}|{serial}|{number}|{sender}"


def mark_key(epoch: int, serial: int, sender: str) -> str:
    """Return the key of a sender's last message to a vault for the order of that serial.

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
        places: Places of these pieces among the mark's pieces.
        send_s: Seconds over which to spread them; 0 to send as fast as possible.
    """

    address: Address
    places: Tuple[int, ...]
    send_s: float = 0.0


class Mark(NamedTuple):
    """Tell a vault, after the last message with pieces, what it has, and what it shall do.

    Attributes:
        pieces: Each piece, the number of its message, and where it begins there.
        forwards: Pieces to send on.
        handed: The sender's memory, which has the pieces; None if messages had them.
    """

    pieces: Tuple[Tuple[Piece, int, int], ...] = ()
    forwards: Tuple[Forward, ...] = ()
    handed: Optional[Handed] = None


_MARKS = msgspec.msgpack.Decoder(Mark)


def encoded(mark: Mark) -> bytes:
    """Return a mark as bytes.

    Example:
        >>> piece = Piece((3, 1), (0,), (2,), "float32", 7)
        >>> mark = Mark(((piece, 0, 64),), (Forward(("10.0.0.1", 7), (0,)),), Handed("/proc/7/fd/9", "0|12|3"))
        >>> decoded(encoded(mark)) == mark, decoded(encoded(Mark())) == Mark()
        (True, True)
    """
    return msgspec.msgpack.encode(mark)


def decoded(data: Any) -> Mark:
    """Return what `encoded` was given."""
    return _MARKS.decode(data)


def messages_of(
    epoch: int, serial: int, sender: str, pieces: Sequence[Tuple[Piece, Part]], forwards: Tuple[Forward, ...] = ()
) -> List[Tuple[str, Any]]:
    """Return the messages that bring pieces to a vault, and the mark behind them."""
    blocks, places = joined([part for _, part in pieces])
    found: List[Tuple[str, Any]] = [
        (block_key(epoch, serial, number, sender), block) for number, block in enumerate(blocks)
    ]
    mark = Mark(tuple((piece, *place) for (piece, _), place in zip(pieces, places)), forwards)
    return [*found, (mark_key(epoch, serial, sender), encoded(mark))]


class Sender:
    """Sends pieces to vaults, over connections that stay open.

    Args:
        name: Name of this end in a vault's errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._connections: Dict[Address, Connection] = {}

    def send(
        self,
        address: Address,
        credentials: Credentials,
        messages: Sequence[Tuple[str, Any]],
        bytes_per_s: Optional[float] = None,
    ) -> None:
        """Send messages, as (key, data), in order; no faster than `bytes_per_s`, where the system can limit that.

        If an open connection has broken, all messages are sent again over another one.

        Raises:
            MeasurementError: The vault cannot be reached, or `break_off` was called. The next call connects again.
        """
        known = self._connections  # `break_off` puts another dictionary in its place
        connection = known.get(address)
        if connection is not None:
            try:
                if connection.is_lost() is None:
                    return _send(connection, messages, bytes_per_s)
            except MeasurementError:
                if known is not self._connections:
                    raise
            connection.break_off()
            connection.close()
        known[address] = connection = Connection(address, credentials, _CONNECT_LIMIT_S, self._name, _ROOM_LIMIT_S)
        connection.give_way()
        if known is not self._connections:
            connection.break_off()
        return _send(connection, messages, bytes_per_s)

    def break_off(self) -> None:
        """End all connections, from any thread; what is being sent fails at once."""
        connections, self._connections = self._connections, {}
        for connection in list(connections.values()):
            connection.break_off()


def _send(connection: Connection, messages: Sequence[Tuple[str, Any]], bytes_per_s: Optional[float]) -> None:
    connection.pace(bytes_per_s)
    for key, data in messages:
        if isinstance(data, Part) and data.is_in_file:
            connection.send_file(key, data.source, data.start, len(data))
        else:
            connection.send(key, data.view if isinstance(data, Part) else data)
