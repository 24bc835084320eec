"""Samples from the driver to a worker: in the background, in order, and no wait for a worker that takes none."""

import time

import numpy
import pytest

from hwaware.errors import MeasurementError
from hwaware.greeting import Credentials, new_secret
from hwaware.runtime.feeding import Feed
from hwaware.runtime.settings import RuntimeSettings
from hwaware.runtime.transfers import MAILBOX_BOUND, Transfers
from hwaware.transport import Mailbox

CREDENTIALS = Credentials(new_secret(), "test")
PART = numpy.arange(1000, dtype=numpy.float32)


@pytest.fixture
def worker():
    """A mailbox as a worker has it: what it holds unread has a bound, and its peers have to say farewell."""
    mailbox = Mailbox("127.0.0.1", CREDENTIALS, bound=MAILBOX_BOUND, peers_stay=True)
    transfers = Transfers(mailbox, CREDENTIALS, pytest.fail, "a worker", RuntimeSettings(receive_limit_s=5.0))
    transfers.mailbox = mailbox
    yield transfers
    transfers.close()


def feed_of(worker):
    return Feed(("127.0.0.1", worker.mailbox.port), CREDENTIALS, 5.0)


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


def test_a_lost_worker_is_no_error_of_the_feed(worker):
    feed = feed_of(worker)
    feed.send(messages(feed, 1))
    wait_until(lambda: worker.mailbox.pending() == 1)
    worker.mailbox.close()
    for _ in range(3):
        feed.send(messages(feed, 1))
    feed.close()
