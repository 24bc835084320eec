"""Prices of whole plans: hand-computed cases, refusals, monotonicity and renaming."""

from __future__ import annotations

import itertools
import random
import re

import instances
import msgspec
import numpy as np
import pytest
from builders import (
    DATA,
    card,
    cluster,
    device,
    examples,
    layer,
    link,
    links,
    plan,
    seeds,
    timed,
    with_devices,
    with_links,
    workload,
)
from hypothesis import given
from hypothesis import strategies as st

from hwaware import ClusterProfile, Plan, Workload, evaluate, explain, simulate
from hwaware.cluster import LinkSample
from hwaware.costs import PreparedCosts
from hwaware.costs.evaluate import prepared_for
from hwaware.costs.stages import LocatedStage, in_groups, price_stage, stage_table
from hwaware.errors import PlanError, UnusableInputError
from hwaware.plans import Replica
from hwaware.workload import MeasuredTime

GB = 1e9
TWO = cluster("ab")
IN_ORDER = plan((0, 0, "a:0"), (1, 1, "b:0"))


def model(*layers):
    return workload(layers, microbatch_size=4)


def test_two_equal_stages_by_hand():
    work = model(layer(), layer())
    cost = evaluate(IN_ORDER, work, TWO)
    assert cost.step_s == pytest.approx(2 * 3 + 3 * 3)
    assert cost.period_s == pytest.approx(3)
    assert [stage.compute_s for stage in cost.stages] == pytest.approx([3, 3])
    assert cost.alpa_objective_s == pytest.approx(15)


@pytest.mark.parametrize("judge", [evaluate, explain, simulate])
@pytest.mark.parametrize(
    ("swapped", "message"),
    [
        ((1, 0, 2), "plan is a Workload, expected a Plan. To fix: give the plan, as hwaware.Plan.load returns it."),
        ((0, 2, 1), "workload is a ClusterProfile, expected a Workload."),
        ((0, 1, 0), "profile is a Plan, expected a ClusterProfile."),
        ((0, 1, 3), "profile is a str, expected a ClusterProfile."),
    ],
)
def test_swapped_records_are_named(judge, swapped, message):
    given = IN_ORDER, model(layer(), layer()), TWO, "cluster.json"
    with pytest.raises(UnusableInputError, match=re.escape(message)):
        judge(*(given[place] for place in swapped))


def test_sends_are_priced_on_the_directed_link():
    work = model(layer(output_bytes=2.0e9), layer())
    two = cluster("ab", [link("a", "b", 1e9, 0.5), link("b", "a", 4e9)])
    cost = evaluate(plan((0, 0, "a:0"), (1, 1, "b:0"), num_microbatches=1), work, two)
    assert [stage.receive_s for stage in cost.stages] == pytest.approx([0.5, 2.5])
    assert cost.step_s == pytest.approx(6 + 2.5 + 0.5)


def test_memory_counts_microbatches_in_flight_by_position():
    work = workload(2, 4, parameter_bytes=1e9, activation_bytes=0.5e9)
    two = cluster("ab", memory_bytes=5 * 10**9)
    cost = evaluate(IN_ORDER, work, two)
    assert [stage.memory_bytes for stage in cost.stages] == [5.0 * GB, 4.5 * GB]
    assert cost.fits
    tight = cluster([device("a:0", memory_bytes=5 * 10**9 - 1), "b"])
    cost = evaluate(IN_ORDER, work, tight)
    assert not cost.fits
    assert cost.stages[0].memory_excess_bytes == 1
    gpipe = evaluate(plan((0, 0, "a:0"), (1, 1, "b:0"), schedule="gpipe"), work, two)
    assert [stage.memory_bytes for stage in gpipe.stages] == [6.0 * GB, 6.0 * GB]
    inference = evaluate(plan((0, 0, "a:0"), (1, 1, "b:0"), schedule="inference"), work, two)
    assert [stage.memory_bytes for stage in inference.stages] == [1.5 * GB, 1.5 * GB]
    assert inference.stages[0].backward_s == 0


def test_a_steps_samples_lie_on_the_stages_that_read_them():
    work = model(layer(activation_bytes=0.5e9, batch_bytes=0.25 * GB), layer(), layer(batch_bytes=0.5 * GB))
    cost = evaluate(plan((0, 1, "a:0"), (2, 2, "b:0"), num_microbatches=3), work, TWO)
    assert [stage.memory_bytes for stage in cost.stages] == [(2 * 0.5 + 3 * 0.25) * GB, 3 * 0.5 * GB]
    replicated = evaluate(plan((0, 2, "a:0", "b:0"), num_microbatches=3), work, TWO)
    assert replicated.stages[0].memory_bytes == (0.5 + 3 * 0.75) / 2 * GB


def test_replicas_share_the_microbatch_and_synchronise_gradients():
    work = model(layer(4e9, parameter_bytes=0.5e9))
    two = cluster(["a", device("b:0", 3.0)])
    equal = evaluate(plan((0, 0, "a:0", "b:0"), num_microbatches=2), work, two)
    assert equal.stages[0].compute_s == pytest.approx(3 * 4 * 3 / 2)
    assert equal.stages[0].gradient_sync_s == pytest.approx(2 * 1 / 2 * 0.5)
    assert equal.step_s == pytest.approx(2 * 18 + 0.5)
    shares = [Replica(devices=("a:0",), share=0.75), Replica(devices=("b:0",), share=0.25)]
    assert evaluate(plan((0, 0, *shares)), work, two).stages[0].compute_s == pytest.approx(9)


def test_an_all_reduce_goes_to_the_replica_before():
    """As gloo's ring does; on a ring of links that is slow in one direction, the order of the replicas decides."""
    three = cluster("abc", [*links(("ba", "ac", "cb"), 1e8), *links(("ab", "ca", "bc"))])
    costs = PreparedCosts(model(layer()), three)
    against = costs.all_reduces_s(np.array([3e8]), ["a:0", "b:0", "c:0"])[0]  # b hands on to a
    along = costs.all_reduces_s(np.array([3e8]), ["c:0", "b:0", "a:0"])[0]
    assert (against, along) == pytest.approx((4.0, 0.4))


def test_tensor_parallelism_divides_and_all_reduces():
    split = layer(4e9, parameter_bytes=1e9, tensor_parallel_bytes=1e9, tensor_parallel_collectives=2)
    group = ("a:0", "b:0")
    stage = evaluate(plan((0, 0, group)), model(split), TWO).stages[0]
    assert stage.compute_s == pytest.approx(12 / 2 + 1.0)  # 2 (N - 1) / N of 1 GB at 1 GB/s
    assert stage.memory_bytes == 2 * GB
    whole = evaluate(plan((0, 0, group)), model(layer(4e9, parameter_bytes=1e9)), TWO).stages[0]
    assert whole.compute_s == pytest.approx(12)
    assert whole.memory_bytes == 4 * GB


def test_measured_times_win():
    work = model(layer(measured=timed(0.1, 0.3, "kind of a", update_s=0.7)), layer())
    three = cluster([device("a:0", kind="kind of a"), "b", "c"])
    one = evaluate(plan((0, 1, "a:0"), num_microbatches=1), work, three)
    assert one.stages[0].compute_s == pytest.approx(0.4 + 3)
    assert one.step_s == pytest.approx(0.4 + 3 + 0.7)
    halves = evaluate(plan((0, 0, "a:0", "c:0"), (1, 1, "b:0")), work, three)
    assert halves.stages[0].compute_s == pytest.approx(1.5)  # c was not measured: half of 3 s


@pytest.mark.parametrize("samples", [1, 2, 8])
def test_a_device_keeps_its_own_times_at_other_microbatch_sizes(samples):
    slow = {**timed(0.1, 0.2), **timed(0.4, 0.8, "b:0")}
    for name, seconds in (("a:0", 0.3), ("b:0", 1.2)):
        placed = msgspec.structs.replace(plan((0, 0, name)), microbatch_size=samples)
        cost = evaluate(placed, model(layer(measured=slow)), TWO)
        assert cost.stages[0].compute_s == pytest.approx(seconds * samples / 4)  # the workload has 4 samples


def test_measured_groups_of_devices_with_own_times_hold_their_collectives():
    times = {kind: {"1,2": MeasuredTime(forward_s=t, backward_s=2 * t)} for kind, t in (("cpu", 0.1), ("b:0", 0.2))}
    split = layer(4e9, tensor_parallel_bytes=1e9, measured=times)
    assert evaluate(plan((0, 0, ("a:0", "b:0"))), model(split), TWO).stages[0].compute_s == pytest.approx(0.6)
    unlike = cluster(["a", device("b:0", kind="other")])
    # Of unlike hardware, no time holds the collectives of both: 1 GB at 1 GB/s.
    assert evaluate(plan((0, 0, ("a:0", "b:0"))), model(split), unlike).stages[0].compute_s == pytest.approx(0.6 + 1)


@pytest.mark.parametrize(("measured", "seconds"), [(("1,2",), 1.1 * 0.15), (("1,2", "4,2"), 0.1 + 0.2 / 3)])
def test_shares_of_measured_groups_hold_their_collectives(measured, seconds):
    """Times of a whole, or of a whole and a quarter, tell those of a half, and the sums in them."""
    known = {"1,2": MeasuredTime(forward_s=0.1, backward_s=0.2), "4,2": MeasuredTime(forward_s=0.05, backward_s=0.05)}
    split = layer(4e9, tensor_parallel_bytes=1e9, measured={"cpu": {name: known[name] for name in measured}})
    four = cluster("abcd")
    halves = plan((0, 0, Replica(devices=("a:0", "b:0")), Replica(devices=("c:0", "d:0"))))
    alone = evaluate(halves, model(msgspec.structs.replace(split, tensor_parallel_bytes=0.0)), four).stages[0]
    found = evaluate(halves, model(split), four).stages[0]
    assert found.compute_s == pytest.approx(alone.compute_s)
    assert found.compute_s == pytest.approx(seconds)


def test_the_update_is_bound_by_memory_bandwidth():
    work, known = model(layer(parameter_bytes=1e9)), cluster("a", memory_bandwidth_bytes_per_s=7e9)
    assert evaluate(plan((0, 0, "a:0")), work, known).stages[0].update_s == pytest.approx(1.0)
    assert evaluate(plan((0, 0, "a:0")), work, cluster("a")).stages[0].update_s == 0


def test_a_measured_update_counts_where_groups_or_replicas_measured_none():
    known = {"cpu": {**timed(1.0, 2.0, update_s=0.8)["cpu"], "2,1": MeasuredTime(forward_s=0.5, backward_s=1.0)}}
    whole, split = layer(measured=known), layer(tensor_parallel_bytes=1e9, measured=known)
    for one, placed, update_s in (
        (whole, plan((0, 0, "a:0", "b:0")), 0.8), (whole, plan((0, 0, ("a:0", "b:0"))), 0.8),
        (split, plan((0, 0, ("a:0", "b:0"))), 0.4),
    ):  # fmt: skip
        assert evaluate(placed, model(one), TWO).stages[0].update_s == pytest.approx(update_s)


def two_of_two():
    return model(layer(output_bytes=0.1e9), layer()), TWO


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (
            plan((0, 0, "a:0"), (1, 1, "z:0")),
            "stage 1 of the plan names unknown device 'z:0'; the cluster has a:0, b:0",
        ),
        (plan((0, 0, "a:0")), "the plan covers 1 layers, but the workload 'model' has 2"),
        (plan((0, 2, "a:0")), "the plan covers 3 layers, but the workload 'model' has 2"),
        (plan((0, 1, Replica(devices=("a:0",), share=0.3), Replica(devices=("b:0",)))), "share 0.3 of 4 samples"),
        (plan((0, 1, Replica(devices=("a:0",), share=0.5))), "the shares of stage 0 add up to 0.5, expected 1"),
        (Plan(num_microbatches=1, stages=(), status="infeasible", reason="too large"), "no stages: too large"),
    ],
)
def test_plans_that_do_not_fit_are_refused(bad, said):
    with pytest.raises(PlanError, match=re.escape(said)) as caught:
        evaluate(bad, *two_of_two())
    assert "To fix:" in str(caught.value)


def test_neighbours_need_a_link():
    three = cluster("abc", links(("ac", "bc")))
    with pytest.raises(PlanError, match=r"'a:0' and 'b:0' have to exchange data, but .* no link .*To fix:"):
        evaluate(IN_ORDER, two_of_two()[0], three)
    assert evaluate(plan((0, 0, "a:0"), (1, 1, "c:0")), two_of_two()[0], three).step_s > 0


def test_an_unmeasured_data_type_is_refused():
    work, two = two_of_two()
    with pytest.raises(UnusableInputError, match=r"'a:0' has no throughput curve for bfloat16, only for .*To fix:"):
        evaluate(plan((0, 1, "a:0")), msgspec.structs.replace(work, dtype="bfloat16"), two)


def test_prepared_costs_give_the_same_price():
    work, two = two_of_two()
    costs = PreparedCosts(work, two)
    for schedule in ("1f1b", "gpipe", "inference"):
        placed = plan((0, 0, "a:0"), (1, 1, "b:0"), schedule=schedule)
        assert evaluate(placed, work, two, costs) == evaluate(placed, work, two)


def chain(scales, memory_rate):
    flops = [GB * s for s in scales]
    layers = [layer(f, parameter_bytes=f / 10, output_bytes=f / 5, activation_bytes=f / 10) for f in flops]
    devices = [device(f"{n}:0", t, memory_bandwidth_bytes_per_s=memory_rate) for n, t in zip("abc", (1.0, 0.5, 0.7))]
    return model(*layers), cluster(devices, links(itertools.permutations("abc", 2)))


@examples(50)
@given(
    st.lists(st.floats(0.01, 10), min_size=3, max_size=3),
    st.floats(1e8, 1e12),
    st.floats(1.0, 4.0),
    st.integers(1, 12),
    st.sampled_from("abc"),
    st.sampled_from(list(itertools.permutations("abc", 2))),
)
def test_a_faster_device_or_link_never_raises_the_price(scales, memory_rate, factor, microbatches, name, pair):
    work, before = chain(scales, memory_rate)
    placed = plan((0, 0, "a:0"), (1, 1, "b:0"), (2, 2, "c:0"), num_microbatches=microbatches)
    price = evaluate(placed, work, before).step_s
    quick = device(seconds=before.device(f"{name}:0").throughput["float32"][0].seconds / factor).throughput
    faster = with_devices(before, throughput=lambda each: quick if each.host == name else each.throughput)
    assert evaluate(placed, work, faster).step_s <= price * (1 + 1e-12)
    faster = with_links(before, bandwidth_bytes_per_s=lambda x: factor * GB if (x.source, x.target) == pair else GB)
    assert evaluate(placed, work, faster).step_s <= price * (1 + 1e-12)


def test_renaming_and_reordering_change_nothing():
    work, three = chain([1, 2, 3], 1e9)
    price = evaluate(plan((0, 0, "a:0"), (1, 1, "b:0"), (2, 2, "c:0")), work, three)
    other = dict(zip("abc", "zxy"))
    renamed = [msgspec.structs.replace(d, id=f"{other[d.host]}:0", host=other[d.host]) for d in three.devices[::-1]]
    again = evaluate(plan((0, 0, "z:0"), (1, 1, "x:0"), (2, 2, "y:0")), work, cluster(renamed))
    assert again.step_s == price.step_s
    assert [s.memory_bytes for s in again.stages] == [s.memory_bytes for s in price.stages]


def test_samples_price_the_sizes_that_they_span():
    samples = tuple(LinkSample(bytes=b, seconds=s) for b, s in ((1e6, 0.2), (1e6, 0.1), (1e6, 0.1), (1e8, 1.0)))
    two = cluster("ab", [link("a", "b", samples=samples)])
    for gigabytes, seconds in ((0.01, 10**-0.5), (0.001, 0.1), (0.1, 1.0), (10.0, 10.0), (1e-6, 1e-6), (0.5, 1.0)):
        work = model(layer(output_bytes=gigabytes * GB), layer())
        cost = evaluate(IN_ORDER, work, two)
        assert cost.stages[1].receive_s == pytest.approx(seconds)


def two_by_two(*cards):
    return cluster({"a": 2, "b": 2}, cards=cards)


@pytest.mark.parametrize(
    ("cards", "received_s"),
    [
        ((), (0.5, 0.5)),  # 1 GB in two halves at once, each over a link of 1 GB/s
        (
            (card("a:0", "a:1", send=1e9, receive=9e9),),
            (0.5, 1.0),
        ),  # activations leave together at 1 GB/s; gradients come in as before
        ((card("a:0", "a:1", receive=0.5e9),), (2.0, 0.5)),  # gradients come in together at 0.5 GB/s
        ((card("b:0", "b:1", receive=0.25e9),), (0.5, 4.0)),
        (
            (card("a:0", "a:1", send=1e9, receive=9e9, concurrent={1: 1e9, 2: 0.2e9}),),
            (0.5, 2.5),
        ),  # measured: two get 0.2 GB/s each
        ((card("a:0", "a:1", send=4e9, receive=9e9),), (0.5, 0.5)),  # faster than both links together
    ],
)
def test_replicas_that_send_at_once_share_the_card(cards, received_s):
    work = model(layer(output_bytes=1.0e9), layer())
    placed = plan((0, 0, "a:0", "a:1"), (1, 1, "b:0", "b:1"))
    assert [s.receive_s for s in evaluate(placed, work, two_by_two(*cards)).stages] == pytest.approx(received_s)
    # One transfer alone, and what stays on a host, is priced by its link.
    one = IN_ORDER
    assert [s.receive_s for s in evaluate(one, work, two_by_two(*cards)).stages] == pytest.approx([1.0, 1.0])
    inside = plan((0, 0, "a:0"), (1, 1, "a:1"))
    assert [s.receive_s for s in evaluate(inside, work, two_by_two(*cards)).stages] == pytest.approx([1.0, 1.0])


def test_rings_that_hand_on_at_once_share_the_card():
    work = model(layer(parameter_bytes=1.0e9))
    alternating = plan((0, 0, "a:0", "b:0", "a:1", "b:1"))
    # Four members hand on a quarter of 1 GB six times; two of them leave each card at a time.
    assert evaluate(alternating, work, two_by_two()).stages[0].gradient_sync_s == pytest.approx(6 * 0.25)
    slow = two_by_two(card("a:0", "a:1", send=0.5e9, receive=9e9))
    assert evaluate(alternating, work, slow).stages[0].gradient_sync_s == pytest.approx(6 * 0.5 / 0.5)
    in_order = plan((0, 0, "a:0", "a:1", "b:0", "b:1"))  # one of them leaves each card at a time
    assert evaluate(in_order, work, slow).stages[0].gradient_sync_s == pytest.approx(6 * 0.25)


def test_the_same_records_are_prepared_once():
    two, work = cluster([device("a:0"), device("b:0", 2.0)]), model(layer(), layer())
    first, slower = IN_ORDER, cluster([device("a:0", 3.0), device("b:0", 2.0)])
    before_s = evaluate(first, work, two).step_s
    assert prepared_for(first, work, two) is prepared_for(plan((0, 1, "a:0")), work, two)
    assert prepared_for(first, work, two) is not prepared_for(
        msgspec.structs.replace(first, schedule="gpipe"), work, two
    )
    assert evaluate(first, work, slower).step_s > before_s
    again = cluster([device("a:0"), device("b:0", 2.0)])
    assert again == two
    assert prepared_for(first, work, again) is not prepared_for(first, work, two)
    assert evaluate(first, work, again).step_s == before_s


def test_the_hand_written_files_are_priced():
    work, profile = Workload.load(DATA / "workload_six_layers.json"), ClusterProfile.load(DATA / "cluster_three.json")
    placed = Plan.load(DATA / "plan_by_hand.json")
    cost = evaluate(placed, work, profile)
    assert cost.fits
    assert len(cost.stages) == 3


@pytest.mark.parametrize("seed", seeds(60))
def test_searches_read_the_prices_of_evaluate(seed):
    rng = random.Random(seed)
    one = instances.with_state(instances.replicated_stages(rng), rng)
    names, samples = [each.id for each in one.profile.devices], one.workload.microbatch_size
    costs, count, layers = PreparedCosts(one.workload, one.profile), one.num_microbatches, len(one.workload.layers)
    group = rng.choice(
        [k for k in range(1, len(names) + 1) if len(names) % k == 0 and samples % (len(names) // k) == 0]
    )
    replicas = in_groups(names, group)
    table = stage_table(replicas, costs, count)
    for first, last in itertools.combinations_with_replacement(range(layers), 2):
        place = first, last + 1
        for held in (1, 2, count):
            price = price_stage(LocatedStage(first, last, replicas), costs, count, held)
            assert (held <= table.most_in_flight[place]) == (price.memory_bytes <= price.memory_limit_bytes)
        assert (table.forward_s[place], table.backward_s[place]) == (price.forward_s, price.backward_s)
        assert table.per_step_s[place] == pytest.approx(price.gradient_sync_s + price.update_s, rel=1e-12)
