"""Random pipelines with random delays and small bounds: everything arrives, in order, bounded, and nobody is locked."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace
from typing import List, NamedTuple, Tuple

import numpy
import pytest
from builders import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from hwaware import ucx
from hwaware.greeting import Credentials, new_secret
from hwaware.runtime import transfers
from hwaware.runtime.settings import RuntimeSettings
from hwaware.runtime.transfers import Transfers
from hwaware.transport import Mailbox

BOUND = 2
LIMIT_S = 20.0
CREDENTIALS = Credentials(new_secret(), "test")


class Case(NamedTuple):
    """A pipeline: its schedule, size, links that skip stages, the seed of its delays, and how messages travel."""

    schedule: str
    stages: int
    microbatches: int
    skips: Tuple[Tuple[int, int], ...]
    sends: str
    seed: int
    way: str

    def sources(self, stage, kind):
        pairs = [(index, index + 1) for index in range(self.stages - 1)] + list(self.skips)
        if kind == "f":
            return [a for a, b in pairs if b == stage], [b for a, b in pairs if a == stage]
        return [b for a, b in pairs if a == stage], [a for a, b in pairs if b == stage]

    def order(self, stage) -> List[Tuple[str, int]]:
        forward = [("f", m) for m in range(self.microbatches)]
        backward = [("b", m) for m in range(self.microbatches)]
        if self.schedule == "inference":
            return forward
        if self.schedule == "gpipe":
            return forward + backward
        ahead = min(self.stages - stage, self.microbatches)
        mixed = [item for pair in zip(backward, forward[ahead:]) for item in pair]
        return forward[:ahead] + mixed + backward[self.microbatches - ahead :]


@st.composite
def cases(draw):
    stages = draw(st.integers(2, 4))
    pairs = [(a, b) for a in range(stages) for b in range(a + 2, stages)]
    sends = draw(st.sampled_from(["overlapped", "overlapped", "blocking"]))
    # In Alpa's blocking order a message that skips stages would have to wait for its consumer's tick.
    skips = tuple(pair for pair in pairs if draw(st.booleans())) if sends == "overlapped" else ()
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "inference"]))
    if sends == "blocking":
        schedule = draw(
            st.sampled_from(["gpipe", "inference"])
        )  # 1F1B's own order is Alpa's business, run in tests/alpa
    way = draw(st.sampled_from(["tcp"] if ucx.version() is None else ["tcp", "ucx"]))
    return Case(schedule, stages, draw(st.integers(1, 12)), skips, sends, draw(st.integers(0, 1 << 30)), way)


def run_stage(case, stage, end, received):
    """Receive, compute for a while, send; as a worker goes through its instructions."""
    delays = random.Random(case.seed * 31 + stage)
    for kind, microbatch in case.order(stage):
        sources, targets = case.sources(stage, kind)
        for source in sources:
            data = end.receive("g", (source, 0), 0)[1]
            received[stage].append((kind, source, *numpy.frombuffer(data, numpy.int64).tolist()))
        time.sleep(delays.choice([0, 0, 0.001, 0.003]))
        for target in targets:
            end.send("g", (target, 0), 0, numpy.int64([microbatch, stage]), ...)


@given(cases())
@examples(40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_no_pipeline_is_locked_and_every_message_is_in_order(monkeypatch, case):
    monkeypatch.setattr(transfers, "WAITING_SENDS", BOUND)
    mailboxes = [Mailbox("127.0.0.1", CREDENTIALS, bound=BOUND, peers_stay=True) for _ in range(case.stages)]
    failures: List[str] = []
    received: List[List[Tuple[str, int, int, int]]] = [[] for _ in range(case.stages)]
    monkeypatch.setattr(ucx.Wire, "least_bytes", 1)
    runtime = RuntimeSettings(sends=case.sends, receive_limit_s=LIMIT_S, transfers=case.way)
    ends = [Transfers(mailbox, CREDENTIALS, failures.append, settings=runtime) for mailbox in mailboxes]
    addresses = [("127.0.0.1", mailbox.port) for mailbox in mailboxes]
    for rank, end in enumerate(ends):
        end.open_wire([SimpleNamespace(platform="cpu")], "127.0.0.1")
        end.join_group("g", rank, addresses)
    threads = [
        threading.Thread(target=run_stage, args=(case, stage, end, received), daemon=True)
        for stage, end in enumerate(ends)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    locked = [stage for stage, thread in enumerate(threads) if thread.is_alive()]
    for end in ends:
        end.close()
    assert (locked, failures) == ([], [])
    for stage, messages in enumerate(received):
        expected = [
            (kind, source, microbatch, source)
            for kind, microbatch in case.order(stage)
            for source in case.sources(stage, kind)[0]
        ]
        assert messages == expected


def test_a_stage_that_computes_holds_its_sender_back(monkeypatch):
    """Inference: nothing ever comes back, so only the bounds keep the first stage from running far ahead."""
    monkeypatch.setattr(transfers, "WAITING_SENDS", BOUND)
    mailboxes = [Mailbox("127.0.0.1", CREDENTIALS, bound=BOUND, peers_stay=True) for _ in range(2)]
    failures: List[str] = []
    ends = [Transfers(mailbox, CREDENTIALS, failures.append) for mailbox in mailboxes]
    for rank, end in enumerate(ends):
        end.join_group("g", rank, [("127.0.0.1", mailbox.port) for mailbox in mailboxes])
    handed_over = []

    def sender():
        for microbatch in range(12):
            ends[0].send("g", (1, 0), 0, numpy.zeros(16 << 20, numpy.uint8), ...)
            handed_over.append(microbatch)

    thread = threading.Thread(target=sender, daemon=True)
    thread.start()
    time.sleep(1.0)
    # Two lie in the mailbox, one is being sent (the system holds parts of it and of the next), two wait to be sent.
    assert len(handed_over) <= 2 * BOUND + 3
    assert mailboxes[1].pending() <= BOUND
    for _ in range(12):
        ends[1].receive("g", (0, 0), 0)
    thread.join(LIMIT_S)
    assert len(handed_over) == 12
    for end in ends:
        end.close()
    assert failures == []


@pytest.mark.parametrize("sends", ["overlapped", "blocking"])
def test_only_blocking_sends_wait_for_the_receiver(sends):
    mailboxes = [Mailbox("127.0.0.1", CREDENTIALS) for _ in range(2)]
    ends = [
        Transfers(mailbox, CREDENTIALS, lambda _: None, settings=RuntimeSettings(sends=sends)) for mailbox in mailboxes
    ]
    for rank, end in enumerate(ends):
        end.join_group("g", rank, [("127.0.0.1", mailbox.port) for mailbox in mailboxes])
    done = threading.Event()
    thread = threading.Thread(
        target=lambda: (ends[0].send("g", (1, 0), 0, numpy.zeros(4), ...), done.set()), daemon=True
    )
    thread.start()
    assert done.wait(0.5) is (sends == "overlapped")
    assert len(ends[1].receive("g", (0, 0), 0)[1]) == 32
    assert done.wait(LIMIT_S)
    for end in ends:
        end.close()


def test_a_blocking_send_waits_until_its_receiver_has_all_of_it(monkeypatch):
    mailboxes = [Mailbox("127.0.0.1", CREDENTIALS) for _ in range(2)]
    ends = [
        Transfers(mailbox, CREDENTIALS, lambda _: None, settings=RuntimeSettings(sends="blocking"))
        for mailbox in mailboxes
    ]
    for rank, end in enumerate(ends):
        end.join_group("g", rank, [("127.0.0.1", mailbox.port) for mailbox in mailboxes])
    taken, done = threading.Event(), threading.Event()
    take = mailboxes[1].take

    def late(key, limit_s, nbytes=None):
        data = take(key, limit_s, nbytes)
        taken.wait(LIMIT_S)
        return data

    monkeypatch.setattr(mailboxes[1], "take", late)
    sender = threading.Thread(
        target=lambda: (ends[0].send("g", (1, 0), 0, numpy.zeros(4), ...), done.set()), daemon=True
    )
    receiver = threading.Thread(target=lambda: ends[1].receive("g", (0, 0), 0), daemon=True)
    sender.start()
    receiver.start()
    assert not done.wait(0.5)  # it has long been in the receiver's system
    taken.set()
    assert done.wait(LIMIT_S)
    for end in ends:
        end.close()
