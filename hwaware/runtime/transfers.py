"""Arrays between workers: sent as soon as they are computed, received until they are taken, both in the background."""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Any, Callable, Dict, List, Optional, Tuple

from hwaware.errors import MeasurementError
from hwaware.transport import FAILURE_KEY, Address, Connection, Mailbox

# Each peer's arrays that wait to be sent. The schedule bounds the microbatches in flight; this bounds a stage that runs
# ahead.
_WAITING_SENDS = 64
_FLUSH_LIMIT_S = 60.0
_FAILURE_LIMIT_S = 5.0


class Peer:
    """One other worker: a thread that sends arrays to it in the order in which they were handed over.

    Args:
        address: Its mailbox.
        on_failure: Called with a sentence if sending fails.
    """

    def __init__(self, address: Address, on_failure: Callable[[str], None]) -> None:
        self._address = address
        self._on_failure = on_failure
        self._waiting: queue.Queue[Optional[Tuple[str, Any, Any]]] = queue.Queue(maxsize=_WAITING_SENDS)
        self._thread = threading.Thread(target=self._run, name="hwaware-send", daemon=True)
        self._thread.start()

    def send(self, key: str, array: Any, index: Any) -> None:
        """Hand over `array[index]`; it leaves when it is computed and the messages before it are out."""
        self._waiting.put((key, array, index))

    def close(self) -> None:
        """Send what waits, then close the connection; waits at most a minute."""
        self._waiting.put(None)
        self._thread.join(_FLUSH_LIMIT_S)

    def _run(self) -> None:
        import numpy

        connection: Optional[Connection] = None
        try:
            while True:
                item = self._waiting.get()
                if item is None:
                    break
                key, array, index = item
                connection = connection or Connection(self._address)
                connection.send(key, _bytes_of(numpy.asarray(array)[index]))  # waits until the array is computed
        # The thread must tell why it ends, whatever the reason: nobody else would learn of it.
        except Exception as error:  # noqa: BLE001
            self._on_failure(f"Sending to {self._address[0]}:{self._address[1]} failed: {error}")
        finally:
            if connection is not None:
                connection.close()


class Transfers:
    """What one worker sends and receives, by group, rank and message number.

    Args:
        mailbox: Where this worker receives.
        on_failure: Called with a sentence if a background send fails.
    """

    def __init__(self, mailbox: Mailbox, on_failure: Callable[[str], None]) -> None:
        self._mailbox = mailbox
        self._on_failure = on_failure
        self._groups: Dict[str, Tuple[int, List[Address]]] = {}
        self._peers: Dict[Address, Peer] = {}
        self._sent: Dict[str, int] = {}
        self._received: Dict[str, int] = {}

    def join_group(self, name: str, rank: int, addresses: List[Address]) -> None:
        """Learn who the members of a group are, and this worker's rank among them."""
        self._groups[name] = (rank, addresses)

    def send(self, group: str, target: Tuple[int, int], source_device: int, array: Any, index: Any) -> None:
        """Send `array[index]` from a device of this worker to `target`, a (rank, device) of the group."""
        rank, addresses = self._groups[group]
        key = _numbered(self._sent, group, (rank, source_device), target)
        address = addresses[target[0]]
        if address not in self._peers:
            self._peers[address] = Peer(address, self._on_failure)
        self._peers[address].send(key, array, index)

    def receive(self, group: str, source: Tuple[int, int], target_device: int, timeout_s: float) -> bytearray:
        """The next message from `source`, a (rank, device) of the group, to a device of this worker.

        Raises:
            MeasurementError: It did not arrive within `timeout_s`.
        """
        rank, _ = self._groups[group]
        return self._mailbox.take(_numbered(self._received, group, source, (rank, target_device)), timeout_s)

    def tell_failure(self, sentence: str) -> None:
        """Tell every member of every group, so that nobody waits for messages that will not come."""
        for address in {address for _, addresses in self._groups.values() for address in addresses}:
            with contextlib.suppress(MeasurementError):  # whoever cannot be reached has failed too
                connection = Connection(address, _FAILURE_LIMIT_S)
                connection.send(FAILURE_KEY, sentence.encode())
                connection.close()

    def close(self) -> None:
        """Flush and close every connection."""
        for peer in self._peers.values():
            peer.close()
        self._mailbox.close()


def _numbered(counts: Dict[str, int], group: str, source: Tuple[int, int], target: Tuple[int, int]) -> str:
    """The key of the next message from `source` to `target`; both ends count, so order is all they must agree on."""
    channel = f"{group}|{source[0]}.{source[1]}>{target[0]}.{target[1]}"
    counts[channel] = counts.get(channel, 0) + 1
    return f"{channel}#{counts[channel]}"


def _bytes_of(array: Any) -> Any:
    """The array's memory; bfloat16 and its like have no buffer protocol of their own, so they go as plain bytes."""
    import numpy

    contiguous = numpy.ascontiguousarray(array)
    return contiguous.reshape(-1).view(numpy.uint8)
