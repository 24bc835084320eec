"""Pairs of accelerators inside a host: each pair is measured, and those unlike the first have links of their own."""

import itertools

import pytest

from hwaware.cluster import ClusterProfile, LinkTable
from hwaware.profiler import InterruptedMeasurement, measure
from hwaware.profiler.partial import merge
from hwaware.profiler.policy import QUICK
from hwaware.profiler.progress import Silent
from hwaware.profiler.selection import Selection

SLOW, FAST = 2e10, 2e11


@pytest.fixture
def host(fakes):
    """Make a crew with one host of four accelerators. A fast bridge joins some pairs."""

    class Accelerators(fakes.crew):
        bridges = ({"a:0", "a:1"}, {"a:2", "a:3"})
        is_processor = False
        scatters = frozenset()

        def identify(self, member):
            return {**super().identify(member), "is_processor": self.is_processor}

        def time_messages(self, member, name, target, policy, limit_s):
            ends = set(name.split(">"))
            rate = FAST if ends in self.bridges else SLOW
            spread = (1.0, 1.4) if ends == set(self.scatters) else (1.0,)
            times = [(n, [fakes.latency_s + k * n / rate for k in spread]) for n in policy.message_bytes]
            return {"tiny_s": [2 * fakes.latency_s], "messages": times}

    return lambda: Accelerators([fakes.spec("a", 1e10) for _ in range(4)])


def rates(profile):
    table = LinkTable(profile)
    pairs = itertools.combinations([device.id for device in profile.devices], 2)
    return {pair: table.between(*pair).bandwidth_bytes_per_s for pair in pairs}


def test_pairs_with_another_connection_have_links_of_their_own(host):
    crew = host()
    found = measure(crew, QUICK, ["float32"], Silent())
    assert rates(found) == {
        pair: pytest.approx(FAST if set(pair) in crew.bridges else SLOW)
        for pair in itertools.combinations([f"a:{k}" for k in range(4)], 2)
    }
    assert ("a", "a") in {(one.source, one.target) for one in found.links}
    assert len(found.links) == 1 + 4  # the other bridge is like the first pair
    assert ClusterProfile.from_json(found.to_json()) == found


def test_hosts_declared_alike_still_measure_their_own_pairs(host):
    crew = host()
    found = measure(crew, QUICK, ["float32"], Silent(), Selection.of((), None, symmetric=True))
    assert found.links == measure(host(), QUICK, ["float32"], Silent()).links


def test_pairs_that_an_interrupt_left_out_are_timed_by_the_next_run(host):
    """A pair without a link of its own would count as like the first one."""
    crew = host()
    outcome, timed = crew.outcome, []

    def interrupted(one, limit_s):
        if one.method == "time_messages":
            timed.append(one.result[0])
            if len(timed) == 2:
                raise KeyboardInterrupt
        return outcome(one, limit_s)

    crew.outcome = interrupted
    with pytest.raises(InterruptedMeasurement) as caught:
        measure(crew, QUICK, ["float32"], Silent())
    part, again = caught.value.found, host()
    assert part.links == ()
    found = measure(again, QUICK, ["float32"], Silent(), Selection.of((), part), part)
    assert rates(found) == rates(measure(host(), QUICK, ["float32"], Silent()))


def test_like_pairs_share_one_link(host):
    crew = host()
    crew.bridges = ()
    found = measure(crew, QUICK, ["float32"], Silent())
    assert [(one.source, one.target) for one in found.links] == [("a", "a")]
    timed = {one[2][0] for batch in crew.batches for one in batch if one[0] == "time_messages"}
    assert len(timed) == 6


def test_a_doubtful_pair_is_timed_once_more_in_its_own_direction(host):
    crew = host()
    crew.scatters = ("a:0", "a:1")
    measure(crew, QUICK, ["float32"], Silent())
    timed = [one[2][0] for batch in crew.batches for one in batch if one[0] == "time_messages"]
    assert (timed.count("a:0>a:1"), timed.count("a:1>a:0")) == (2, 0)


def test_of_processors_one_pair_is_measured(host):
    crew = host()
    crew.is_processor = True
    found = measure(crew, QUICK, ["float32"], Silent())
    assert [(one.source, one.target) for one in found.links] == [("a", "a")]
    timed = {one[2][0] for batch in crew.batches for one in batch if one[0] == "time_messages"}
    assert timed == {"a:0>a:1"}


def test_no_device_is_in_two_pairs_at_once(host):
    crew = host()
    measure(crew, QUICK, ["float32"], Silent())
    batches = [[one for one in batch if one[0] == "time_messages"] for batch in crew.batches]
    for batch in batches:
        ends = [end for one in batch for end in one[2][0].split(">")]
        assert len(ends) == len(set(ends))


def test_an_unsteady_pair_names_its_host_to_measure_again(host):
    crew = host()
    crew.scatters = {"a:0", "a:2"}
    found = measure(crew, QUICK, ["float32"], Silent())
    unsteady = {flag.subjects: flag.only for flag in found.flags if flag.kind == "unsteady"}
    assert unsteady == {("a:0", "a:2"): ("a+a",)}


def test_a_bridge_that_is_gone_leaves_no_old_link(host):
    crew = host()
    crew.bridges = ({"a:0", "a:3"},)
    earlier = measure(crew, QUICK, ["float32"], Silent())
    assert {one.source for one in earlier.links} == {"a", "a:0"}
    crew = host()
    crew.bridges = ()
    selection = Selection.of(["a+a"], earlier)
    found = measure(crew, QUICK, ["float32"], Silent(), selection, earlier)
    assert [(one.source, one.target) for one in found.links] == [("a", "a")]
    assert merge(earlier, earlier).links == earlier.links
