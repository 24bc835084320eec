"""Prices of whole plans: hand-computed cases, refusals, monotonicity and renaming."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwaware import ClusterProfile, Plan, Workload, evaluate
from hwaware.cluster import ConcurrentRate, Device, Host, Link, LinkSample, MatrixProduct, SharedCard
from hwaware.costs import PreparedCosts
from hwaware.costs.evaluate import prepared_for
from hwaware.errors import PlanError, UnusableInputError
from hwaware.plans import Replica, Stage
from hwaware.workload import Layer, MeasuredTime

DATA = Path(__file__).parent.parent / "data"
GIGA = 10**9


def device(name, seconds=1.0, memory=10 * GIGA, **more):
    """A device that computes 1 GFLOP in `seconds`."""
    curve = {"float32": (MatrixProduct(flops=1e9, seconds=seconds),)}
    return Device(id=f"{name}:0", host=name, kind=f"kind of {name}", memory_bytes=memory, throughput=curve, **more)


def cluster(devices, links=None):
    names = [d.host for d in devices]
    if links is None:
        pairs = itertools.permutations(names, 2)
        links = [Link(source=a, target=b, latency_s=0.0, bandwidth_bytes_per_s=1e9) for a, b in pairs]
    return ClusterProfile(hosts=tuple(Host(name=n) for n in names), devices=tuple(devices), links=tuple(links))


def layer(gflops=1.0, parameters=0.0, output=0.0, activations=0.0, **more):
    return Layer(
        name="layer", forward_flops=gflops * 1e9, backward_flops=2e9 * gflops, parameter_bytes=parameters * GIGA,
        output_bytes=output * GIGA, activation_bytes=activations * GIGA, **more,
    )  # fmt: skip


def workload(*layers, microbatch_size=4):
    return Workload(name="model", microbatch_size=microbatch_size, dtype="float32", layers=tuple(layers))


def plan(*stages, microbatches=4, **more):
    """Stages as (first, last, device, ...) with one replica for each device, or lists of devices as replicas."""
    made = tuple(
        Stage(
            layers=(first, last),
            replicas=tuple(r if isinstance(r, Replica) else Replica(devices=(r,)) for r in replicas),
        )
        for first, last, *replicas in stages
    )
    return Plan(num_microbatches=microbatches, stages=made, **more)


def test_two_equal_stages_by_hand():
    model = workload(layer(), layer())
    cost = evaluate(plan((0, 0, "a:0"), (1, 1, "b:0")), model, cluster([device("a"), device("b")]))
    assert cost.step_s == pytest.approx(2 * 3 + 3 * 3)
    assert cost.period_s == pytest.approx(3)
    assert [stage.compute_s for stage in cost.stages] == pytest.approx([3, 3])
    assert cost.alpa_objective_s == pytest.approx(15)


def test_sends_are_priced_on_the_directed_link():
    model = workload(layer(output=2.0), layer())
    links = [
        Link(source="a", target="b", latency_s=0.5, bandwidth_bytes_per_s=1e9),
        Link(source="b", target="a", latency_s=0.0, bandwidth_bytes_per_s=4e9),
    ]
    cost = evaluate(
        plan((0, 0, "a:0"), (1, 1, "b:0"), microbatches=1), model, cluster([device("a"), device("b")], links)
    )
    assert [stage.receive_s for stage in cost.stages] == pytest.approx([0.5, 2.5])
    assert cost.step_s == pytest.approx(6 + 2.5 + 0.5)


def test_memory_counts_microbatches_in_flight_by_position():
    model = workload(layer(parameters=1, activations=0.5), layer(parameters=1, activations=0.5))
    two = cluster([device("a", memory=5 * GIGA), device("b", memory=5 * GIGA)])
    cost = evaluate(plan((0, 0, "a:0"), (1, 1, "b:0")), model, two)
    assert [stage.memory_bytes for stage in cost.stages] == [5.0 * GIGA, 4.5 * GIGA]
    assert cost.fits
    tight = cluster([device("a", memory=5 * GIGA - 1), device("b", memory=5 * GIGA)])
    cost = evaluate(plan((0, 0, "a:0"), (1, 1, "b:0")), model, tight)
    assert not cost.fits
    assert cost.stages[0].memory_excess_bytes == 1
    gpipe = evaluate(plan((0, 0, "a:0"), (1, 1, "b:0"), schedule="gpipe"), model, two)
    assert [stage.memory_bytes for stage in gpipe.stages] == [6.0 * GIGA, 6.0 * GIGA]
    inference = evaluate(plan((0, 0, "a:0"), (1, 1, "b:0"), schedule="inference"), model, two)
    assert [stage.memory_bytes for stage in inference.stages] == [1.5 * GIGA, 1.5 * GIGA]
    assert inference.stages[0].backward_s == 0


def test_the_samples_of_a_whole_step_lie_on_the_stages_that_read_them():
    model = workload(layer(activations=0.5, batch_bytes=0.25 * GIGA), layer(), layer(batch_bytes=0.5 * GIGA))
    two = cluster([device("a"), device("b")])
    cost = evaluate(plan((0, 1, "a:0"), (2, 2, "b:0"), microbatches=3), model, two)
    assert [stage.memory_bytes for stage in cost.stages] == [(2 * 0.5 + 3 * 0.25) * GIGA, 3 * 0.5 * GIGA]
    replicated = evaluate(plan((0, 2, "a:0", "b:0"), microbatches=3), model, two)
    assert replicated.stages[0].memory_bytes == (0.5 + 3 * 0.75) / 2 * GIGA


def test_replicas_share_the_microbatch_and_synchronise_gradients():
    model = workload(layer(gflops=4, parameters=0.5))
    two = cluster([device("a"), device("b", seconds=3.0)])
    equal = evaluate(plan((0, 0, "a:0", "b:0"), microbatches=2), model, two)
    assert equal.stages[0].compute_s == pytest.approx(3 * 4 * 3 / 2)
    assert equal.stages[0].gradient_sync_s == pytest.approx(2 * 1 / 2 * 0.5)
    assert equal.step_s == pytest.approx(2 * 18 + 0.5)
    shares = [Replica(devices=("a:0",), share=0.75), Replica(devices=("b:0",), share=0.25)]
    assert evaluate(plan((0, 0, *shares)), model, two).stages[0].compute_s == pytest.approx(9)


def test_an_all_reduce_goes_round_from_each_replica_to_the_one_before():
    """As gloo's ring does; on a ring of links that is slow in one direction, the order of the replicas decides."""
    devices = [device(name) for name in "abc"]
    slow = {("b", "a"), ("a", "c"), ("c", "b")}
    links = [
        Link(source=one, target=other, latency_s=0.0, bandwidth_bytes_per_s=1e8 if (one, other) in slow else 1e9)
        for one, other in itertools.permutations("abc", 2)
    ]
    costs = PreparedCosts(workload(layer()), cluster(devices, links))
    against = costs.all_reduce_s(3e8, ["a:0", "b:0", "c:0"])  # b hands on to a
    along = costs.all_reduce_s(3e8, ["c:0", "b:0", "a:0"])
    assert (against, along) == pytest.approx((4.0, 0.4))


def test_tensor_parallelism_divides_and_all_reduces():
    split = layer(gflops=4, parameters=1, tensor_parallel_bytes=1e9, tensor_parallel_collectives=2)
    two = cluster([device("a"), device("b")])
    group = Replica(devices=("a:0", "b:0"))
    stage = evaluate(plan((0, 0, group)), workload(split), two).stages[0]
    assert stage.compute_s == pytest.approx(12 / 2 + 1.0)  # 2 (N - 1) / N of 1 GB at 1 GB/s
    assert stage.memory_bytes == 2 * GIGA
    whole = evaluate(plan((0, 0, group)), workload(layer(gflops=4, parameters=1)), two).stages[0]
    assert whole.compute_s == pytest.approx(12)
    assert whole.memory_bytes == 4 * GIGA


def test_measured_times_win():
    times = {"1,1": MeasuredTime(forward_s=0.1, backward_s=0.3, update_s=0.7)}
    model = workload(layer(measured={"kind of a": times}), layer())
    one = evaluate(plan((0, 1, "a:0"), microbatches=1), model, cluster([device("a")]))
    assert one.stages[0].compute_s == pytest.approx(0.4 + 3)
    assert one.step_s == pytest.approx(0.4 + 3 + 0.7)
    halves = evaluate(
        plan((0, 0, "a:0", "c:0"), (1, 1, "b:0")), model, cluster([device("a"), device("b"), device("c")])
    )
    assert halves.stages[0].compute_s == pytest.approx(1.5)  # c was not measured: half of 3 s


def test_the_update_is_bound_by_memory_bandwidth():
    known = device("a", memory_bandwidth_bytes_per_s=7e9)
    model = workload(layer(parameters=1))
    assert evaluate(plan((0, 0, "a:0")), model, cluster([known])).stages[0].update_s == pytest.approx(1.0)
    assert evaluate(plan((0, 0, "a:0")), model, cluster([device("a")])).stages[0].update_s == 0


def two_of_two():
    return workload(layer(output=0.1), layer()), cluster([device("a"), device("b")])


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
    links = [Link(source=a, target="c", latency_s=0, bandwidth_bytes_per_s=1e9) for a in "ab"]
    three = cluster([device("a"), device("b"), device("c")], links)
    with pytest.raises(PlanError, match=r"'a:0' and 'b:0' have to exchange data, but .* no link .*To fix:"):
        evaluate(plan((0, 0, "a:0"), (1, 1, "b:0")), two_of_two()[0], three)
    assert evaluate(plan((0, 0, "a:0"), (1, 1, "c:0")), two_of_two()[0], three).step_s > 0


def test_an_unmeasured_data_type_is_refused():
    model, two = two_of_two()
    with pytest.raises(UnusableInputError, match=r"'a:0' has no throughput curve for bfloat16, only for .*To fix:"):
        evaluate(plan((0, 1, "a:0")), msgspec.structs.replace(model, dtype="bfloat16"), two)


def test_prepared_costs_give_the_same_price_and_follow_the_schedule():
    model, two = two_of_two()
    costs = PreparedCosts(model, two)
    for schedule in ("1f1b", "gpipe", "inference"):
        placed = plan((0, 0, "a:0"), (1, 1, "b:0"), schedule=schedule)
        assert evaluate(placed, model, two, costs) == evaluate(placed, model, two)


def chain(scales, memory_rate):
    layers = [layer(s, parameters=s / 10, output=s / 5, activations=s / 10) for s in scales]
    devices = [device(n, seconds=t, memory_bandwidth_bytes_per_s=memory_rate) for n, t in zip("abc", (1.0, 0.5, 0.7))]
    return workload(*layers), devices


@settings(max_examples=50)
@given(
    st.lists(st.floats(0.01, 10), min_size=3, max_size=3),
    st.floats(1e8, 1e12),
    st.floats(1.0, 4.0),
    st.integers(1, 12),
    st.sampled_from("abc"),
    st.sampled_from(list(itertools.permutations("abc", 2))),
)
def test_a_faster_device_or_link_never_raises_the_price(scales, memory_rate, factor, microbatches, name, pair):
    model, devices = chain(scales, memory_rate)
    placed = plan((0, 0, "a:0"), (1, 1, "b:0"), (2, 2, "c:0"), microbatches=microbatches)
    before = cluster(devices)
    price = evaluate(placed, model, before).step_s
    faster = [device(d.host, d.throughput["float32"][0].seconds / (factor if d.host == name else 1)) for d in devices]
    faster = [msgspec.structs.replace(d, memory_bandwidth_bytes_per_s=memory_rate) for d in faster]
    assert evaluate(placed, model, cluster(faster)).step_s <= price * (1 + 1e-12)
    links = [
        msgspec.structs.replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor)
        if (link.source, link.target) == pair
        else link
        for link in before.links
    ]
    assert evaluate(placed, model, cluster(devices, links)).step_s <= price * (1 + 1e-12)


def test_renaming_and_reordering_change_nothing():
    model, devices = chain([1, 2, 3], 1e9)
    price = evaluate(plan((0, 0, "a:0"), (1, 1, "b:0"), (2, 2, "c:0")), model, cluster(devices))
    other = dict(zip("abc", "zxy"))
    renamed = [msgspec.structs.replace(d, id=f"{other[d.host]}:0", host=other[d.host]) for d in devices[::-1]]
    again = evaluate(plan((0, 0, "z:0"), (1, 1, "x:0"), (2, 2, "y:0")), model, cluster(renamed))
    assert again.step_s == price.step_s
    assert [s.memory_bytes for s in again.stages] == [s.memory_bytes for s in price.stages]


def test_samples_price_the_sizes_that_they_span():
    samples = tuple(LinkSample(bytes=b, seconds=s) for b, s in ((1e6, 0.2), (1e6, 0.1), (1e6, 0.1), (1e8, 1.0)))
    link = Link(source="a", target="b", latency_s=0.0, bandwidth_bytes_per_s=1e9, samples=samples)
    two = cluster([device("a"), device("b")], [link])
    for gigabytes, seconds in ((0.01, 10**-0.5), (0.001, 0.1), (0.1, 1.0), (10.0, 10.0), (1e-6, 1e-6), (0.5, 1.0)):
        model = workload(layer(output=gigabytes), layer())
        cost = evaluate(plan((0, 0, "a:0"), (1, 1, "b:0")), model, two)
        assert cost.stages[1].receive_s == pytest.approx(seconds)


def two_by_two(*cards):
    """Two devices on each of two hosts; every pair of devices has a link of 1 GB/s."""
    boxes = [device(h) for h in "ab"]
    boxes = tuple(msgspec.structs.replace(box, id=f"{box.host}:{k}", kind="any") for box in boxes for k in (0, 1))
    ends = [*itertools.permutations("ab", 2), ("a", "a"), ("b", "b")]
    links = [Link(source=s, target=t, latency_s=0.0, bandwidth_bytes_per_s=1e9) for s, t in ends]
    hosts = tuple(Host(name=h) for h in "ab")
    return ClusterProfile(hosts=hosts, devices=boxes, links=tuple(links), shared_cards=cards)


def card(host, send=9e9, receive=9e9, *concurrent):
    names = (f"{host}:0", f"{host}:1")
    rates = tuple(ConcurrentRate(k=k, bytes_per_s=rate) for k, rate in concurrent)
    return SharedCard(host=host, devices=names, send_bytes_per_s=send, receive_bytes_per_s=receive, concurrent=rates)


@pytest.mark.parametrize(
    ("cards", "received_s"),
    [
        ((), (0.5, 0.5)),  # 1 GB in two halves at once, each over a link of 1 GB/s
        ((card("a", send=1e9),), (0.5, 1.0)),  # activations leave together at 1 GB/s; gradients come in as before
        ((card("a", receive=0.5e9),), (2.0, 0.5)),  # gradients come in together at 0.5 GB/s
        ((card("b", receive=0.25e9),), (0.5, 4.0)),
        ((card("a", 1e9, 9e9, (1, 1e9), (2, 0.2e9)),), (0.5, 2.5)),  # measured: two get 0.2 GB/s each
        ((card("a", 4e9),), (0.5, 0.5)),  # faster than both links together
    ],
)
def test_replicas_that_send_at_once_share_the_card(cards, received_s):
    model = workload(layer(output=1.0), layer())
    placed = plan((0, 0, "a:0", "a:1"), (1, 1, "b:0", "b:1"))
    assert [s.receive_s for s in evaluate(placed, model, two_by_two(*cards)).stages] == pytest.approx(received_s)
    # One transfer alone, and what stays on a host, is priced by its link.
    one = plan((0, 0, "a:0"), (1, 1, "b:0"))
    assert [s.receive_s for s in evaluate(one, model, two_by_two(*cards)).stages] == pytest.approx([1.0, 1.0])
    inside = plan((0, 0, "a:0"), (1, 1, "a:1"))
    assert [s.receive_s for s in evaluate(inside, model, two_by_two(*cards)).stages] == pytest.approx([1.0, 1.0])


def test_rings_that_hand_on_at_once_share_the_card():
    model = workload(layer(parameters=1.0))
    alternating = plan((0, 0, "a:0", "b:0", "a:1", "b:1"))
    # Four members hand on a quarter of 1 GB six times; two of them leave each card at a time.
    assert evaluate(alternating, model, two_by_two()).stages[0].gradient_sync_s == pytest.approx(6 * 0.25)
    slow = two_by_two(card("a", send=0.5e9))
    assert evaluate(alternating, model, slow).stages[0].gradient_sync_s == pytest.approx(6 * 0.5 / 0.5)
    in_order = plan((0, 0, "a:0", "a:1", "b:0", "b:1"))  # one of them leaves each card at a time
    assert evaluate(in_order, model, slow).stages[0].gradient_sync_s == pytest.approx(6 * 0.25)


def test_the_same_records_are_prepared_once_and_changed_ones_anew():
    two, model = cluster([device("a"), device("b", 2.0)]), workload(layer(), layer())
    first, slower = plan((0, 0, "a:0"), (1, 1, "b:0")), cluster([device("a", 3.0), device("b", 2.0)])
    before_s = evaluate(first, model, two).step_s
    assert prepared_for(first, model, two) is prepared_for(plan((0, 1, "a:0")), model, two)
    assert prepared_for(first, model, two) is not prepared_for(
        msgspec.structs.replace(first, schedule="gpipe"), model, two
    )
    assert evaluate(first, model, slower).step_s > before_s
    again = cluster([device("a"), device("b", 2.0)])
    assert again == two
    assert prepared_for(first, model, again) is not prepared_for(first, model, two)
    assert evaluate(first, model, again).step_s == before_s


def test_the_hand_written_files_are_priced():
    model, profile = Workload.load(DATA / "workload_six_layers.json"), ClusterProfile.load(DATA / "cluster_three.json")
    placed = Plan.load(DATA / "plan_by_hand.json")
    cost = evaluate(placed, model, profile)
    assert cost.fits
    assert len(cost.stages) == 3
