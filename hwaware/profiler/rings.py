"""Time collectives over the workers' own transport, and check their results. Workers run this module.

All-gather, reduce-scatter and all-reduce use ring algorithms (Thakur, Rabenseifner and Gropp, 2005). All-to-all uses
pairwise exchange. Values are whole numbers, so that sums are exact in any order.
"""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Optional, Sequence

from hwaware.errors import MeasurementError
from hwaware.greeting import Credentials
from hwaware.profiler.clock import Watch, read
from hwaware.transport import Address, Connection, Mailbox, PeerFailedError

#: Operations, as nccl-tests and XLA name them.
OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


class Group:
    """Hold the members of a collective, as one member sees them.

    The class is no NamedTuple, because Ray cannot ship classes made by NamedTuple by value.

    Args:
        name: Unique name of the collective.
        rank: Rank of this member.
        addresses: Addresses of all members' mailboxes, by rank.
        limit_s: Time limit of each message [s].
    """

    def __init__(self, name: str, rank: int, addresses: Sequence[Address], limit_s: float) -> None:
        self.name = name
        self.rank = rank
        self.addresses = addresses
        self.limit_s = limit_s

    @property
    def size(self) -> int:
        """Return the number of members."""
        return len(self.addresses)


def time_collective(
    mailbox: Mailbox, credentials: Credentials, group: Group, op: str, nbytes: int, repeats: int
) -> Dict[str, Any]:
    """Run a collective on float32 numbers, once untimed and then `repeats` times. All members call this at once.

    Args:
        mailbox: This member's mailbox.
        credentials: Credentials that all members share.
        group: All members.
        op: One of `OPERATIONS`.
        nbytes: Size of the full logical array, rounded down to whole chunks of each member.
        repeats: Number of timed runs.

    Returns:
        "bytes": size of the full array. "seconds": time of each repeat on this member, None if a clock jumped.
        "clock_jumps_s": as in `Watch`.

    Raises:
        MeasurementError: The result is wrong, or a member did not send in time.
    """
    chunk = max(1, nbytes // _NUMBER_BYTES // (group.size**2 if op == "all-to-all" else group.size))
    watch = Watch()
    times: List[Optional[float]] = []
    right = True
    with _connections(credentials, group, op) as connections:
        work = _Collective(mailbox, group, connections, chunk)
        for number in range(repeats + 1):
            work.meet(f"meet {number}")
            start = read()
            getattr(work, op.replace("-", "_"))()
            times.append(watch.elapsed_s(start))  # one member alone cannot run it again
            right = right and work.is_right(op)
    if not right:  # only now: the others would wait for a member that stopped
        raise MeasurementError(
            f"The {op} of {group.size} members came out wrong on member {group.rank}.",
            "check the network and the memory of these hosts before training on them.",
        )
    full = chunk * _NUMBER_BYTES * (group.size**2 if op == "all-to-all" else group.size)
    return {"bytes": full, "seconds": times[1:], "clock_jumps_s": watch.take_jumps()}


_NUMBER_BYTES = 4


@contextlib.contextmanager
def _connections(credentials: Credentials, group: Group, op: str) -> Iterator[Dict[int, Connection]]:
    """Connect to the next member, or for an all-to-all to all other members."""
    ranks = range(group.size) if op == "all-to-all" else [(group.rank + 1) % group.size]
    made: Dict[int, Connection] = {}
    try:
        for rank in {*ranks, (group.rank + 1) % group.size} - {group.rank}:
            made[rank] = Connection(group.addresses[rank], credentials, timeout_s=group.limit_s)
        yield made
    finally:
        for connection in made.values():
            connection.close()


def _factor(number: int) -> int:
    """Return the whole number that marks a member or a chunk. Float32 sums 10,000 products of such numbers exactly."""
    return number % 37 + 1


class _Collective:
    """One member's part in a collective. Each message holds `chunk` numbers."""

    def __init__(self, mailbox: Mailbox, group: Group, connections: Dict[int, Connection], chunk: int) -> None:
        import numpy

        self._numpy = numpy
        self._mailbox = mailbox
        self._group = group
        self._connections = connections
        self._chunk = chunk
        self._runs = 0
        self.result: Any = None

    def meet(self, name: str) -> None:
        """Wait until all members are here: a token goes around the ring twice."""
        for lap in range(2):
            if self._group.rank > 0:
                self._take(f"{name}/{lap}")
            self._send((self._group.rank + 1) % self._group.size, f"{name}/{lap}", b"\0")
            if self._group.rank == 0:
                self._take(f"{name}/{lap}")

    def reduce_scatter(self) -> None:
        """Give every member the sum of one chunk."""
        chunks = self._operand()
        self.result = chunks[self._reduce(chunks)]

    def all_gather(self) -> None:
        """Give every member the chunks of all members."""
        chunks: List[Any] = [None] * self._group.size
        chunks[self._group.rank] = self._own(self._group.rank)
        self._gather(chunks, self._group.rank)
        self.result = chunks

    def all_reduce(self) -> None:
        """Give every member the sums of all chunks."""
        chunks = self._operand()
        self._gather(chunks, self._reduce(chunks))
        self.result = chunks

    def all_to_all(self) -> None:
        """Give every member its chunk from every other member."""
        self._runs += 1
        rank, size = self._group.rank, self._group.size
        operand = self._operand()
        for step in range(1, size):
            target = (rank + step) % size
            self._send(target, f"all-to-all/{self._runs}/{rank}", operand[target])
        received = {rank: operand[rank]}
        for step in range(1, size):
            source = (rank - step) % size
            received[source] = self._numbers(self._take(f"all-to-all/{self._runs}/{source}", source))
        self.result = [received[source] for source in range(size)]

    def is_right(self, op: str) -> bool:
        """Return True if the result is correct."""
        rank, size = self._group.rank, self._group.size
        total = sum(map(_factor, range(size)))
        expected = {
            "all-reduce": [self._own(index, total) for index in range(size)],
            "all-gather": [self._own(index) for index in range(size)],
            "reduce-scatter": self._own((rank + 1) % size, total),
            "all-to-all": [self._own(rank, _factor(source)) for source in range(size)],
        }[op]
        return bool(self._numpy.array_equal(self._numpy.asarray(self.result), self._numpy.asarray(expected)))

    def _operand(self) -> List[Any]:
        """Return this member's chunks. Each value is the chunk's factor times the member's factor, and shows both."""
        return [self._own(index, _factor(self._group.rank)) for index in range(self._group.size)]

    def _own(self, index: int, times: int = 1) -> Any:
        return self._numpy.full(self._chunk, _factor(index) * times, self._numpy.float32)

    def _reduce(self, chunks: List[Any]) -> int:
        """Run a ring reduce-scatter; return the index of the chunk that this member holds fully reduced."""
        self._runs += 1
        rank, size = self._group.rank, self._group.size
        for step in range(size - 1):
            self._pass_on(f"reduce/{self._runs}/{step}", chunks[(rank - step) % size])
            chunks[(rank - step - 1) % size] += self._numbers(self._take(f"reduce/{self._runs}/{step}"))
        return (rank + 1) % size

    def _gather(self, chunks: List[Any], own: int) -> None:
        """Run a ring all-gather that begins with the chunk `own`."""
        self._runs += 1
        size = self._group.size
        for step in range(size - 1):
            self._pass_on(f"gather/{self._runs}/{step}", chunks[(own - step) % size])
            chunks[(own - step - 1) % size] = self._numbers(self._take(f"gather/{self._runs}/{step}"))

    def _pass_on(self, name: str, numbers: Any) -> None:
        self._send((self._group.rank + 1) % self._group.size, name, numbers)

    def _send(self, rank: int, name: str, payload: Any) -> None:
        self._connections[rank].send(f"{self._group.name}/{name}", payload)

    def _take(self, name: str, source: Optional[int] = None) -> memoryview:
        """Return a message of another member, by default of the previous member in the ring."""
        group = self._group
        rank = (group.rank - 1) % group.size if source is None else source
        try:
            message: memoryview = self._mailbox.take(f"{group.name}/{name}", group.limit_s)
        except PeerFailedError:
            raise
        except MeasurementError as error:
            raise MeasurementError(
                f"Member {group.rank} of the collective, on {group.addresses[group.rank][0]}, got no message from "
                f"member {rank}, on {group.addresses[rank][0]}, within {group.limit_s:g} s.",
                "check the network between these hosts, and that both still answer.",
            ) from error
        return message

    def _numbers(self, message: memoryview) -> Any:
        return self._numpy.frombuffer(message, self._numpy.float32)
