"""Samples from the driver to a worker: in the background, in order, and no wait for a worker that takes none."""

import time

import numpy
import pytest

from hwaware.errors import MeasurementError
from hwaware.greeting import Credentials, new_secret
from hwaware.runtime.feeding import Feed
from hwaware.runtime.settings import RuntimeSettings
from hwaware.runtime.transfers import FROM_DRIVER, MAILBOX_BOUND, Transfers
from hwaware.transport import Mailbox

CREDENTIALS = Credentials(new_secret(), "test")
PART = numpy.arange(1000, dtype=numpy.float32)


@pytest.fixture
def worker():
    """A mailbox as a worker has it: what it holds unread has a bound, and its peers have to say farewell."""
    mailbox = Mailbox("127.0.0.1", CREDENTIALS, bound=MAILBOX_BOUND, peers_stay=True, strict=FROM_DRIVER)
    transfers = Transfers(mailbox, CREDENTIALS, pytest.fail, "a worker", RuntimeSettings(receive_limit_s=5.0))
    transfers.mailbox = mailbox
    yield transfers
    transfers.close()


class Lifeline:
    lost = None

    def is_lost(self):
        return self.lost


def feed_of(worker, lifeline=None):
    return Feed(("127.0.0.1", worker.mailbox.port), CREDENTIALS, 5.0, lifeline or Lifeline())


def messages(feed, count, part=PART):
    return [(feed.numbered(0), part) for _ in range(count)]


def taken(worker, key, part=PART):
    return numpy.frombuffer(worker.take(key, part.nbytes), part.dtype)


def wait_until(condition):
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_many_messages_are_handed_over_before_any_is_taken(worker):
    feed = feed_of(worker)
    sent = [(key, PART + place) for place, (key, _) in enumerate(messages(feed, 5 * MAILBOX_BOUND))]
    feed.send(sent)
    for key, part in sent:
        assert taken(worker, key).tolist() == part.tolist()
    feed.close()
    wait_until(lambda: not worker.mailbox._senders)
    assert worker.mailbox.failure is None


def test_the_end_of_a_feed_waits_for_nothing(worker):
    feed = feed_of(worker)
    feed.send(messages(feed, 3 * MAILBOX_BOUND, numpy.zeros(1 << 20, numpy.float32)))
    wait_until(lambda: worker.mailbox.pending() == MAILBOX_BOUND)
    start = time.monotonic()
    feed.close()
    assert time.monotonic() - start < 2
    feed_of(worker).close()  # it never sent anything


def test_samples_that_never_come_are_named(worker):
    worker._settings = RuntimeSettings(receive_limit_s=0.1)
    with pytest.raises(MeasurementError, match=r"driver\|0\.0>1\.0#1.*did not arrive within 0\.1 s"):
        worker.take("driver|0.0>1.0#1", 4)


def test_samples_keep_to_their_bound_while_the_worker_waits_for_a_peer(worker):
    """A late stage waits for an early one, and samples of two steps would fill its memory."""
    feed = feed_of(worker)
    sent = messages(feed, 3 * MAILBOX_BOUND)
    feed.send(sent)
    wait_until(lambda: worker.mailbox.pending() == MAILBOX_BOUND)
    with pytest.raises(MeasurementError, match="did not arrive"):
        worker.mailbox.take("of a peer", 0.2)
    assert worker.mailbox.pending() == MAILBOX_BOUND
    assert taken(worker, sent[-1][0]).tolist() == PART.tolist()  # behind more than the bound
    feed.close()


@pytest.mark.parametrize("lost", [None, "its process ended"])
def test_a_failed_feed_is_told_unless_the_worker_is_lost(worker, caplog, lost):
    lifeline = Lifeline()
    lifeline.lost = lost
    feed = feed_of(worker, lifeline)
    feed.send(messages(feed, 1))
    wait_until(lambda: worker.mailbox.pending() == 1)
    worker.mailbox.close()
    end = time.monotonic() + 5
    while not feed._peer._ended.is_set() and time.monotonic() < end:
        feed.send(messages(feed, 1))
        time.sleep(0.01)
    feed.send(messages(feed, 1))  # takes no notice
    feed.close()
    assert ("The driver sends no samples any more. Sending to 127.0.0.1" in caplog.text) == (lost is None)
