"""What a message takes of a step: its time on the link, less what a device that has waited for it catches up."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from builders import chain, cluster, device, link, timed, workload
from hypothesis import given
from hypothesis import strategies as st

from hwaware import simulate
from hwaware.cluster import LinkSample
from hwaware.costs import evaluate
from hwaware.costs.links import exposed_time_s, send_time_s
from hwaware.plans import Replica, Stage


def exposed_s(nbytes, link, source=None, target=None):
    (seconds,) = exposed_time_s(link, np.array([nbytes]), source or device("a:0"), target or device("b:0"))
    return seconds


SAMPLES = LinkSample(bytes=1e3, seconds=2e-3), LinkSample(bytes=1e6, seconds=1)
LINK = link("a", "b", 1e6, 0.001)


def test_only_what_is_longer_than_the_head_start_counts():
    ahead = device("b:0", head_start_s=0.005)
    assert exposed_s(4e3, LINK, target=ahead) == pytest.approx(0.0)
    assert exposed_s(9e3, LINK, target=ahead) == pytest.approx(0.005)


def test_a_pass_may_gain_more_than_its_message_takes():
    ahead = device("b:0", head_start_s=0.005)
    assert exposed_s(1e3, LINK, target=ahead) == pytest.approx(0.002 - 0.005)


def test_it_is_the_waiting_end_s_head_start_that_counts():
    assert exposed_s(9e3, LINK, source=device("a:0", head_start_s=0.005)) == pytest.approx(0.010)


def test_both_ends_work_takes_of_it():
    ahead = device("b:0", head_start_s=0.005, sum_bytes_per_s=9e6)  # 1 ms for 9 kB
    assert exposed_s(9e3, LINK, target=ahead) == pytest.approx(0.006)
    assert exposed_s(9e3, LINK, device("a:0", sum_bytes_per_s=3e6), ahead) == pytest.approx(0.009)
    assert exposed_s(90e3, LINK, target=ahead) == pytest.approx(0.091), "never longer than the message takes"


RATES = st.one_of(st.none(), st.floats(1e4, 1e9))


@given(
    sizes=st.lists(st.floats(0, 1e8), min_size=2, max_size=5), head_start_s=st.floats(0, 0.1), here=RATES, there=RATES,
    samples=st.booleans(),
)  # fmt: skip
def test_more_bytes_never_take_less_nor_more_than_on_the_link(sizes, head_start_s, here, there, samples):
    link = msgspec.structs.replace(LINK, samples=SAMPLES if samples else ())
    nbytes = np.array(sorted(sizes))
    source, target = (
        device("a:0", sum_bytes_per_s=here),
        device("b:0", sum_bytes_per_s=there, head_start_s=head_start_s),
    )
    found = exposed_time_s(link, nbytes, source, target)
    on_link = send_time_s(link, nbytes)
    assert np.all(np.diff(found) >= -1e-12)
    assert np.all(found <= on_link)
    assert np.all(found >= on_link - head_start_s - 1e-12)


def step_s(head_start_s):
    """Price two equal stages, 0.1 s there and 0.1 s back, 10 kB between: 11 ms each way."""
    two = workload(2, measured=timed(0.1, 0.1), output_bytes=1e4)
    profile = cluster("ab", [LINK], head_start_s=head_start_s)
    return evaluate(chain("a:0", "b:0", num_microbatches=5), two, profile).step_s


def test_a_step_is_shorter_by_what_its_devices_catch_up():
    """Five microbatches turn three times through both stages: 3 x (0.4 + 2 messages)."""
    assert step_s(None) == pytest.approx(3 * 0.4 + 6 * 0.011)
    assert step_s(0.004) == pytest.approx(3 * 0.4 + 6 * 0.007)
    assert step_s(0.031) == pytest.approx(0.4 - 2 * 0.02 + 4 * 0.2), "the second stage never waits again"
    assert step_s(0.5) == step_s(0.1) == pytest.approx(2 * 0.011 + 5 * 0.2), "no pass takes less than none"


def test_a_pass_gains_up_to_its_whole_stage_and_no_more():
    """A stage of two layers, 0.2 s forward, gains 0.15 s; a stage of one layer gains its 0.1 s."""
    profile = cluster("ab", [LINK], head_start_s=0.15)

    def priced(*ends):
        model = workload(sum(ends), measured=timed(0.1, 0.1), output_bytes=1e5)  # 101 ms on the link
        plan = msgspec.structs.replace(
            chain("a:0", "b:0", num_microbatches=1),
            stages=(Stage(layers=(0, ends[0] - 1), replicas=(Replica(devices=("a:0",)),)),
                    Stage(layers=(ends[0], sum(ends) - 1), replicas=(Replica(devices=("b:0",)),))),
        )  # fmt: skip
        return evaluate(plan, model, profile).step_s

    assert priced(2, 2) == pytest.approx(0.8 + 2 * (0.101 - 0.15))
    assert priced(1, 1) == pytest.approx(0.4 + 2 * (0.101 - 0.1))
    assert priced(1, 2) == pytest.approx(0.6 + 0.101 - 0.15 + 0.101 - 0.1)


def test_a_link_that_is_never_idle_carries_whole_messages():
    """Ten microbatches of 1.001 s each on the link: a head start shortens only the wait for the first."""
    model = workload(2, measured=timed(0.1, 0.1), output_bytes=1e6)
    profile = cluster("ab", [LINK], head_start_s=0.05)
    step = evaluate(chain("a:0", "b:0", num_microbatches=10), model, profile).step_s
    assert step >= 9 * 1.001 + 0.4
    assert step <= simulate(chain("a:0", "b:0", num_microbatches=10), model, profile).step_s * (1 + 1e-9)
