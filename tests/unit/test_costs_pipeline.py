"""The closed forms against an independent simulation of the same rules, and against Alpa's own schedule objects."""

from __future__ import annotations

import random

import pytest
from builders import examples, seeds
from hypothesis import given
from hypothesis import strategies as st

from hwaware.costs import pipeline


def order_of(schedule, stage, stages, microbatches):
    if schedule == "gpipe":
        return [("F", k) for k in range(microbatches)] + [("B", k) for k in range(microbatches)]
    warm_up = min(microbatches, stages - stage)
    order = [("F", k) for k in range(warm_up)]
    for k in range(microbatches):
        order.append(("B", k))
        if k + warm_up < microbatches:
            order.append(("F", k + warm_up))
    return order


def simulate(*case, schedule="1f1b"):
    """When the first stage's last backward ends."""
    return ends(*case, schedule=schedule)[0]


def ends(forward, backward, activations, gradients, microbatches, schedule="1f1b"):
    """When each stage's last backward ends: strict order, eager sends, one message at a time a direction."""
    n = len(forward)
    orders = [order_of(schedule, stage, n, microbatches) for stage in range(n)]
    at, clock, link_down, link_up, arrived = [0] * n, [0.0] * n, [0.0] * n, [0.0] * n, {}
    moved = True
    while moved:
        moved = False
        for i in range(n):
            while at[i] < len(orders[i]):
                what, k = orders[i][at[i]]
                needed = (what, i, k) if (what == "F" and i > 0) or (what == "B" and i < n - 1) else None
                if needed is not None and needed not in arrived:
                    break
                clock[i] = max(clock[i], arrived.get(needed, 0.0)) + (forward[i] if what == "F" else backward[i])
                if what == "F" and i < n - 1:
                    link_down[i] = max(link_down[i], clock[i]) + activations[i]
                    arrived["F", i + 1, k] = link_down[i]
                if what == "B" and i > 0:
                    link_up[i] = max(link_up[i], clock[i]) + gradients[i - 1]
                    arrived["B", i - 1, k] = link_up[i]
                at[i] += 1
                moved = True
    assert all(at[i] == len(orders[i]) for i in range(n))
    return clock


@pytest.mark.parametrize(
    ("links", "simulated", "closed"),
    # Alpa's own PipeDreamFlush objects with eager sends: 105, 131, 169 and 233 (links in both directions may overlap
    # their messages there; here messages of one direction follow each other, hence 235).
    [([0, 0, 0], 105, 105), ([0.5, 0.5, 0.5], 131, 129), ([0, 2, 0], 169, 169), ([0, 4, 0], 235, 235)],
)
def test_the_cases_simulated_on_alpas_own_schedule(links, simulated, closed):
    assert simulate([1] * 4, [2] * 4, links, links, 32) == simulated
    assert pipeline.one_f_one_b_s([1] * 4, [2] * 4, links, links, 32)[0] == closed
    assert closed == pytest.approx(simulated, rel=0.02)


def random_pipeline(rng, microbatches_per_stage, slowest_link, most_gained=0.0):
    n = rng.randint(2, 8)
    forward = [rng.uniform(0.3, 2) for _ in range(n)]
    backward = [f * rng.uniform(1.5, 2.5) for f in forward]
    activations = [slowest_link * rng.random() ** 2 for _ in range(n - 1)]
    gradients = [a * rng.uniform(0.8, 1.2) for a in activations]
    gained = [most_gained * rng.random() for _ in range(n)]
    activations = [a - gained[k + 1] for k, a in enumerate(activations)]
    gradients = [g - gained[k] for k, g in enumerate(gradients)]
    return forward, backward, activations, gradients, n * microbatches_per_stage + rng.randint(0, 8)


@pytest.mark.parametrize("microbatches_per_stage", [1, 2, 4])
@pytest.mark.parametrize("slowest_link", [0.0, 0.5, 2.0, 4.0])
@pytest.mark.parametrize("most_gained", [0.0, 0.3])
def test_random_uneven_stages_are_priced_as_they_run(microbatches_per_stage, slowest_link, most_gained):
    rng = random.Random(f"{microbatches_per_stage} {slowest_link} {most_gained}")
    errors = []
    for _ in range(150):
        case = random_pipeline(rng, microbatches_per_stage, slowest_link, most_gained)
        errors.append(pipeline.one_f_one_b_s(*case)[0] / simulate(*case) - 1)
    errors.sort()
    assert errors[-1] <= 1e-12, "a chain of dependent work cannot be longer than the whole"
    assert errors[len(errors) // 2] > -0.005
    assert errors[len(errors) // 20] > -0.05  # one in twenty may be further off
    assert errors[0] > -0.12


def test_a_slow_link_delays_the_first_and_the_last_passes_of_the_stage_behind_it():
    # Stage 1 runs 7 forwards before its first backward: 7 messages there, its last forward and first backward, and 7
    # messages back, between a forward and a backward of stage 0.
    case = [1] * 8, [2] * 8, [20, *[0] * 6], [20, *[0] * 6], 7
    assert simulate(*case) == 1 + 7 * 20 + 1 + 2 + 7 * 20 + 2
    assert pipeline.one_f_one_b_s(*case)[0] == simulate(*case)


def test_few_microbatches_over_slow_links_are_priced_as_they_run():
    rng, errors = random.Random(1), []
    for _ in range(1000):
        case = random_pipeline(rng, 0, rng.choice([0.5, 2, 4, 10, 30]))[:4]
        microbatches = rng.randint(1, 24)
        errors.append(pipeline.one_f_one_b_s(*case, microbatches)[0] / simulate(*case, microbatches) - 1)
    errors.sort()
    assert errors[-1] <= 1e-12
    assert errors[len(errors) // 20] > -0.07
    assert errors[0] > -0.19


@examples(60)
@given(st.randoms(use_true_random=False), st.integers(1, 30))
def test_between_the_slowest_stage_and_the_simulation(rng, microbatches):
    most_gained = rng.choice([0.0, 0.3])  # as long as the shortest pass
    forward, backward, activations, gradients, _ = random_pipeline(rng, 1, rng.choice([0, 1, 5]), most_gained)
    closed = pipeline.one_f_one_b_s(forward, backward, activations, gradients, microbatches)[0]
    assert closed <= simulate(forward, backward, activations, gradients, microbatches) * (1 + 1e-12)
    assert closed >= microbatches * max(f + b for f, b in zip(forward, backward)) * (1 - 1e-12) - most_gained


@examples(300)
@given(st.randoms(use_true_random=False), st.integers(1, 40), st.floats(0.0, 3.0))
def test_segments_that_are_left_out_cannot_be_the_longest(rng, microbatches, slowest_link):
    most_gained = rng.choice([0.0, 0.3])
    forward, backward, activations, gradients, _ = random_pipeline(rng, 1, slowest_link, most_gained)
    if rng.random() < 0.5:  # a few times that are alike: several slowest stages, equal means
        forward, backward = [[rng.choice([1.0, 2.0, 4.0]) for _ in forward] for _ in range(2)]
        activations = [slowest_link * rng.choice([0.0, 0.25, 1.0]) - most_gained for _ in activations]
    turn = [f + b for f, b in zip(forward, backward)]
    link = [*(a + g for a, g in zip(activations, gradients)), 0.0]
    n = len(turn)
    beyond = [sum(turn[j + 1 :]) + sum(link[j:]) for j in range(n)]
    sends = zip([0.0, *activations], [0.0, *gradients])
    ends = [
        pipeline.segment_end_s(beyond[j], forward[j], backward[j], there, back, n - 1 - j, microbatches)
        for j, (there, back) in enumerate(sends)
    ]
    chains = [sum(turn) + sum(link) + (microbatches - 1) * max([0.0, *activations, *gradients])]
    for i in range(n):
        fill = sum(turn[:i]) + sum(link[:i])
        chains.append(fill + ends[i] if microbatches <= n - i else 0.0)
        for j in range(i, n if microbatches > n - i else i):
            turns, rest = divmod(microbatches - n + j, j - i + 1)
            segment = sum(turn[i : j + 1]) + sum(link[i:j])
            chains.append(fill + segment * (turns + 1) + ends[j] + rest * max(turn[i : j + 1]))
    found = pipeline.one_f_one_b_s(forward, backward, activations, gradients, microbatches)[0]
    assert found == pytest.approx(max(chains), rel=1e-12)


def test_segments_between_equally_slow_stages_count():
    assert pipeline.one_f_one_b_s([1, 3, 1, 3, 1], [2, 6, 2, 6, 2], [1, 0, 5, 1], [1, 0, 5, 1], 4)[0] == 69
    times = [3, 1, 3, 1, 1, 3], [3, 3, 1, 2, 0, 3], [10, 20, 10, 30, 30], [20, 10, 0, 20, 20]
    assert pipeline.one_f_one_b_s(*times, 7)[0] == 414


@examples(300)
@given(st.randoms(use_true_random=False), st.floats(0.0, 6.0))
def test_the_period_is_the_largest_mean_of_all_segments(rng, slowest_link):
    forward, backward, activations, gradients, _ = random_pipeline(rng, 1, slowest_link, rng.choice([0.0, 0.3]))
    n, link = len(forward), [a + g for a, g in zip(activations, gradients)]
    turn = [f + b for f, b in zip(forward, backward)]
    means = [(sum(turn[i : j + 1]) + sum(link[i:j])) / (j + 1 - i) for i in range(n) for j in range(i, n)]
    found = pipeline.pipeline_and_period_s("1f1b", forward, backward, activations, gradients, 1)[1]
    assert found == pytest.approx(max([*means, *activations, *gradients]), rel=1e-12)
    both = pipeline.pipeline_and_period_s("1f1b", forward, backward, activations, gradients, 3 * n)
    assert both == (pipeline.one_f_one_b_s(forward, backward, activations, gradients, 3 * n)[0], found)


@examples(60)
@given(st.randoms(use_true_random=False), st.integers(1, 20), st.sampled_from(["1f1b", "gpipe", "inference"]))
def test_slower_parts_never_make_the_step_shorter(rng, microbatches, schedule):
    case = list(random_pipeline(rng, 1, 2.0)[:4])
    before = pipeline.pipeline_and_period_s(schedule, *case, microbatches)[0]
    which = rng.randrange(4)
    slower = list(case[which])
    slower[rng.randrange(len(slower))] *= 1 + rng.random()
    case[which] = slower
    assert pipeline.pipeline_and_period_s(schedule, *case, microbatches)[0] >= before * (1 - 1e-12)


@examples(40)
@given(st.randoms(use_true_random=False))
def test_the_period_is_what_one_more_microbatch_adds(rng):
    case = random_pipeline(rng, 1, 2.0)[:4]
    period = pipeline.pipeline_and_period_s("1f1b", *case, 1)[1]
    n = len(case[0])
    many, more = 60 * n, 60 * n + 840  # 840 is a multiple of every segment's length
    assert (simulate(*case, more) - simulate(*case, many)) / 840 == pytest.approx(period, rel=1e-3)


def test_gpipe_is_exact():
    rng = random.Random(3)
    for _ in seeds(50):
        case = random_pipeline(rng, 1, 2.0)
        assert pipeline.pipeline_and_period_s("gpipe", *case)[0] == pytest.approx(
            simulate(*case, schedule="gpipe"), rel=1e-12
        )


def test_gpipe_hides_what_happens_once_a_step_as_far_as_later_stages_end_earlier():
    rng = random.Random(4)
    for _ in seeds(100):
        forward, backward, _, gradients, microbatches = case = random_pipeline(rng, 1, 2.0)
        once = [rng.choice([0.0, 1.0, 30.0]) * rng.random() for _ in forward]
        found = pipeline.pipeline_and_period_s("gpipe", *case)[0]
        found += pipeline.tail_s("gpipe", backward, gradients, once, microbatches)
        assert found == pytest.approx(max(map(sum, zip(ends(*case, schedule="gpipe"), once))), rel=1e-12)
    # Sixteen backwards of 0.1 s after the forwards, and the sum; against the first of them and sixteen of 2 s.
    assert 0.1 + 16 * 2 > 16 * 0.1 + 30
    assert pipeline.tail_s("gpipe", [2, 0.1], [0], [0, 30], 16) == 0
    assert pipeline.tail_s("gpipe", [2, 0.1], [0], [0, 31], 16) == pytest.approx((1.6 + 31) - 32.1)


def test_one_microbatch_and_one_stage():
    assert pipeline.one_f_one_b_s([1, 2], [3, 4], [5], [6], 1)[0] == 21
    assert pipeline.one_f_one_b_s([1], [2], [], [], 7)[0] == 21
    assert pipeline.pipeline_and_period_s("gpipe", [1, 2], [3, 4], [5], [6], 1)[0] == 21


def test_the_tail_hides_behind_backward_of_earlier_stages():
    assert pipeline.tail_s("1f1b", [2, 2, 2], [1, 1], [0.5, 3.5, 7], 4) == 1
    assert pipeline.tail_s("1f1b", [2, 2, 2], [1, 1], [0, 3, 6], 4) == 0
    assert pipeline.tail_s("1f1b", [2], [], [0.25], 4) == 0.25
