"""Arrays between workers: in order, in the background, and nobody waits for a peer that has failed."""

import threading

import numpy
import pytest

from hwaware.errors import MeasurementError
from hwaware.greeting import Credentials, new_secret
from hwaware.runtime.recorder import Recorder
from hwaware.runtime.settings import RuntimeSettings
from hwaware.runtime.transfers import Outgoing, Peer, Transfers
from hwaware.transport import Mailbox

CREDENTIALS = Credentials(new_secret(), "test")


@pytest.fixture
def pair():
    failures, mailboxes = [], [Mailbox("127.0.0.1", CREDENTIALS), Mailbox("127.0.0.1", CREDENTIALS)]
    addresses = [("127.0.0.1", mailbox.port) for mailbox in mailboxes]
    ends = [
        Transfers(mailbox, CREDENTIALS, failures.append, f"end {rank}", RuntimeSettings(receive_limit_s=3.0))
        for rank, mailbox in enumerate(mailboxes)
    ]
    for rank, end in enumerate(ends):
        end.join_group("g", rank, addresses)
    yield ends
    for end in ends:
        end.close()
    assert failures == []


def test_tiles_arrive_in_the_order_in_which_they_were_sent(pair):
    array = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)
    for row in range(3):
        pair[0].send("g", (1, 0), 0, array, (slice(row, row + 1), slice(1, 3)))
    for row in range(3):
        data = numpy.frombuffer(pair[1].receive("g", (0, 0), 0)[1], numpy.float32)
        assert data.tolist() == array[row, 1:3].tolist()


def test_both_directions_have_numbers_of_their_own(pair):
    pair[0].send("g", (1, 0), 0, numpy.float32([1]), ())
    pair[1].send("g", (0, 0), 0, numpy.float32([2]), ())
    assert numpy.frombuffer(pair[0].receive("g", (1, 0), 0)[1], numpy.float32).tolist() == [2]
    assert numpy.frombuffer(pair[1].receive("g", (0, 0), 0)[1], numpy.float32).tolist() == [1]


def test_a_failure_ends_the_waiting_of_the_others(pair):
    pair[0].tell_failure("In stage 0: out of memory")
    with pytest.raises(MeasurementError, match="In stage 0: out of memory"):  # not its own limit's message
        pair[1].receive("g", (0, 0), 0)


def test_a_send_that_fails_once_its_program_starts_over_is_no_failure_of_the_new_one(pair):
    computed = threading.Event()

    class Computing:  # a result whose program still runs on the device
        def __array__(self, *_, **__):
            computed.wait(5)
            return numpy.ones(4, numpy.float32)

    pair[0].send("g", (1, 0), 0, numpy.ones(4, numpy.float32), ...)
    pair[1].receive("g", (0, 0), 0)
    pair[0].send("g", (1, 0), 0, Computing(), ...)
    pair[0].abandon("the program is placed again")
    computed.set()
    (peer,) = pair[0]._peers.values()
    peer._thread.join(5)
    assert peer._ended.is_set()  # and the fixture finds no failure


def test_nobody_waits_for_what_comes_after_the_end_of_the_sender():
    mailbox, failures, raised = Mailbox("127.0.0.1", CREDENTIALS), [], []
    mailbox.close()
    peer = Peer(mailbox._address, CREDENTIALS, "an end", Recorder(), failures.append, 3.0)
    peer._thread.join(5)
    peer._waiting.put(Outgoing("key", numpy.ones(1), ...))  # as `send`, if it looked just before the end

    def wait():
        with pytest.raises(MeasurementError, match="has failed") as caught:
            peer.wait_until_sent()
        raised.append(caught)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(5)
    assert (len(failures), len(raised)) == (1, 1)


def test_a_message_that_never_comes_is_named(pair):
    with pytest.raises(MeasurementError, match=r"g\|0\.0>1\.0#1.*did not arrive within 3 s"):
        pair[1].receive("g", (0, 0), 0)


def test_peers_that_hang_at_the_end_are_waited_for_together(pair):
    both, closed = threading.Barrier(2), []

    class Hanging:
        def close(self):
            both.wait(5)  # raises if nobody else comes
            closed.append(self)

    pair[0]._peers = {"one": Hanging(), "other": Hanging()}
    pair[0].close()
    assert len(closed) == 2
