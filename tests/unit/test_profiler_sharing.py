"""What several transfers at once show: both directions, shared cards, collectives; and rounds of many hosts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest

from hwaware.cluster import LinkSample, PartialProfile
from hwaware.errors import MeasurementError
from hwaware.greeting import Credentials, new_secret
from hwaware.profiler import measure
from hwaware.profiler.clock import Watch
from hwaware.profiler.collectives import _expected_s, groups
from hwaware.profiler.devices import Subject
from hwaware.profiler.links import by_host, schedule
from hwaware.profiler.policy import FULL, QUICK
from hwaware.profiler.progress import Silent
from hwaware.profiler.rings import OPERATIONS, Group, _Collective, time_collective
from hwaware.records import rebuilt
from hwaware.transport import Mailbox

LIMIT_S = 20.0
CREDENTIALS = Credentials(new_secret(), "test")


def subjects(fakes, counts):
    specs = [fakes.spec(f"h{host}", 1e10) for host, count in enumerate(counts) for _ in range(count)]
    members = fakes.crew(specs).members
    return [Subject(member, {"port": 1}, f"{member.host}:{member.device_index}", 1) for member in members]


def test_64_hosts_take_63_rounds_and_no_host_takes_part_twice(fakes):
    plan = schedule(by_host(subjects(fakes, [1] * 64)))
    assert len(plan) == 63
    pairs = set()
    for one_round in plan:
        ends = [subject.id for pair in one_round for subject in pair]
        assert len(ends) == len(set(ends)) == 64
        pairs |= {frozenset((a.id, b.id)) for a, b in one_round}
    assert len(pairs) == 64 * 63 // 2


def test_64_hosts_of_declared_speeds_are_found(fakes):
    """Every directed link has a speed of its own."""

    def rate(source, target):
        return 1e7 * (1 + int(source[1:]) + int(target[1:]) / 100)

    steps = []

    class Counting(Silent):
        def phase(self, name, count):
            steps.append((name, count))

    crew = fakes.crew([fakes.spec(f"h{i}", 1e10) for i in range(64)], bytes_per_s=rate)
    found = measure(crew, QUICK, ["float32"], Counting())
    assert ("Timing links", 63) in steps
    assert len(found.links) == 64 * 63
    for link in found.links:
        assert link.bandwidth_bytes_per_s == pytest.approx(rate(link.source, link.target))


def test_both_directions_at_once_are_in_the_evidence(fakes):
    crew = fakes.crew([fakes.spec("a", 1e10), fakes.spec("b", 1e10)], lambda a, b: 2e8 if a == "a" else 1e8)
    found = measure(crew, QUICK, ["float32"], Silent())
    both = {(link.source, link.target): link.evidence["both_bytes_per_s"] for link in found.links}
    assert both == {("a", "b"): pytest.approx(2e8, rel=1e-3), ("b", "a"): pytest.approx(1e8, rel=1e-3)}


def test_transfers_that_share_a_card_get_a_part_of_it(fakes):
    """Host a has four devices behind a card of 1e8; the fake lets concurrent exchanges share it evenly."""

    class OneCard(fakes.crew):
        def gather(self, pending, limit_s):
            self.at_once = sum(one.method == "exchange" and one.member.host == "a" for one in pending)
            return super().gather(pending, limit_s)

        def exchange(self, member, name, role, target, out_bytes, in_bytes, count, limit_s):
            result = super().exchange(member, name, role, target, out_bytes, in_bytes, count, limit_s)
            return {**result, "seconds": result["seconds"] * max(1, self.at_once)}

    crew = OneCard([fakes.spec(host, 1e10) for host in "aaaabbcc"])
    found = measure(crew, QUICK, ["float32"], Silent())
    card = next(card for card in found.shared_cards if card.host == "a")
    assert card.devices == ("a:0", "a:1", "a:2", "a:3")
    assert [one.k for one in card.concurrent] == [1, 2, 4]
    for one in card.concurrent:
        assert one.bytes_per_s == pytest.approx(1e8 / one.k, rel=0.01)
    assert card.send_bytes_per_s == pytest.approx(1e8, rel=0.01)
    assert {card.host for card in found.shared_cards} == {"a", "b", "c"}


def test_a_resumed_measurement_measures_cards_over_links_that_it_knows(fakes):
    specs = [fakes.spec(host, 1e10) for host in "aabb"]
    whole = measure(fakes.crew(specs), QUICK, ["float32"], Silent())
    known = rebuilt(PartialProfile.of(whole), shared_cards=())
    assert measure(fakes.crew(specs), QUICK, ["float32"], Silent(), earlier=known).shared_cards == whole.shared_cards


def test_a_cluster_of_single_devices_has_no_shared_cards(fakes):
    assert measure(fakes.crew([fakes.spec(h, 1e10) for h in "abc"]), QUICK, ["float32"], Silent()).shared_cards == ()


def test_groups_are_those_of_submeshes(fakes):
    found = [tuple(one.id for one in group) for group in groups(by_host(subjects(fakes, [2, 2, 2])))]
    assert found == [
        ("h0:0", "h0:1"), ("h1:0", "h1:1"), ("h2:0", "h2:1"),
        ("h0:0", "h1:0"), ("h0:0", "h0:1", "h1:0", "h1:1"),
    ]  # fmt: skip


def test_a_late_short_array_does_not_end_the_sizes_of_a_collective():
    late, longer, slow = (
        LinkSample(bytes=size, seconds=s) for size, s in ((4096, 0.04), (65536, 0.041), (65536, 0.24))
    )
    assert _expected_s([late], 1 << 16) == 0
    assert _expected_s([late, longer], 1 << 20) == pytest.approx(0.057, rel=0.01)
    assert _expected_s([late, slow], 1 << 20) == pytest.approx(3.44, rel=0.01)


def test_collectives_grow_until_they_take_too_long(fakes):
    found = measure(fakes.crew([fakes.spec(h, 1e10) for h in "abcd"]), FULL, ["float32"], Silent())
    assert {one.op for one in found.collectives} == set(OPERATIONS)
    assert {len(one.devices) for one in found.collectives} == {2, 4}
    slow = measure(
        fakes.crew([fakes.spec(h, 1e10) for h in "abcd"], lambda a, b: 1e6), FULL, ["float32"], Silent()
    )  # fmt: skip
    assert max(point.bytes for one in slow.collectives for point in one.points) < 1 << 20


def run_all(size, op, nbytes, spoil=None):
    """A collective over real connections, one thread a member."""
    mailboxes = [Mailbox("127.0.0.1", CREDENTIALS) for _ in range(size)]
    addresses = [("127.0.0.1", mailbox.port) for mailbox in mailboxes]
    try:
        with ThreadPoolExecutor(size) as pool:
            futures = [
                pool.submit(
                    time_collective, mailboxes[rank], CREDENTIALS, Group("g", rank, addresses, LIMIT_S), op, nbytes, 2
                )
                for rank in range(size)
            ]
            return [future.result(LIMIT_S) for future in futures]
    finally:
        for mailbox in mailboxes:
            mailbox.close()


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_clock_that_jumps_on_one_member_costs_one_repeat(op, monkeypatch):
    """A member that ran its part again would wait for the others, and they for it."""
    elapsed_s, seen = Watch.elapsed_s, []

    def jumps_once(watch, start):
        seen.append(watch)
        return None if len(seen) == 4 else elapsed_s(watch, start)

    monkeypatch.setattr(Watch, "elapsed_s", jumps_once)
    results = run_all(3, op, 57_600)
    assert [len(result["seconds"]) for result in results] == [2, 2, 2]
    assert sum(seconds is None for result in results for seconds in result["seconds"]) == 1


def test_a_repeat_in_which_a_clock_jumped_does_not_count(fakes):
    class Jumping(fakes.crew):
        def collective(self, member, name, *rest):
            result = super().collective(member, name, *rest)
            return {**result, "seconds": [None, *result["seconds"][1:]] if member.host == "a" else result["seconds"]}

    steady, jumping = (
        measure(crew([fakes.spec(h, 1e10) for h in "ab"]), FULL, ["float32"], Silent())
        for crew in (fakes.crew, Jumping)
    )
    assert jumping.collectives == steady.collectives


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives_over_the_transport_come_out_right(op, size):
    results = run_all(size, op, 57_600)
    assert [result["bytes"] for result in results] == [57_600] * size
    assert all(len(result["seconds"]) == 2 for result in results)
    assert all(second > 0 for result in results for second in result["seconds"])


def test_a_member_that_sends_nothing_in_time_is_named_with_its_host():
    mailbox, silent = Mailbox("127.0.0.1", CREDENTIALS), Mailbox("127.0.0.1", CREDENTIALS)
    addresses = [("127.0.0.1", one.port) for one in (mailbox, silent)]
    try:
        with pytest.raises(MeasurementError, match=r"Member 0 .* on 127\.0\.0\.1, got no message from member 1, on"):
            time_collective(mailbox, CREDENTIALS, Group("g", 0, addresses, 0.2), "all-reduce", 8, 1)
    finally:
        for one in (mailbox, silent):
            one.close()


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_collective_that_comes_out_wrong_is_an_error(op, monkeypatch):
    real = _Collective._numbers
    spoiled = []

    def numbers(self, message):
        found = real(self, message).copy()
        if self._group.rank == 1 and not spoiled:
            spoiled.append(True)
            found[0] += numpy.float32(1)
        return found

    monkeypatch.setattr(_Collective, "_numbers", numbers)
    with pytest.raises(MeasurementError, match=rf"The {op} of 2 members came out wrong on member \d\. To fix: "):
        run_all(2, op, 8_000)
