"""Fixed stages on the best of the equal groups of devices."""

import itertools

import builders
import pytest
from builders import chain, device, layer

from hwaware.costs import PreparedCosts, evaluate
from hwaware.errors import PlanError
from hwaware.patching import choosing
from hwaware.placement.regroup import best_order


def cluster(seconds, hosts, links=True):
    """Build devices d0, d1, ... with these times, on these hosts."""
    devices = [device(f"d{k}", s, host=host) for k, (s, host) in enumerate(zip(seconds, hosts))]
    names = sorted(set(hosts))
    pairs = [(a, b) for a in names for b in names if links or "b" in (a, b)]
    return builders.cluster(devices, builders.links(pairs, 1e8, 1e-5))


def workload(flops):
    of_all = {"parameter_bytes": 1e5, "activation_bytes": 1e5}
    return builders.workload([layer(f * 1e9, output_bytes=1e6 * (k + 1), **of_all) for k, f in enumerate(flops)], 2)


def test_the_heavy_stage_gets_the_fast_device():
    costs = PreparedCosts(workload([1, 1, 3]), cluster([0.1, 0.2, 0.2], "abc"))
    plan = best_order(chain("d0", "d1", "d2"), costs)
    assert plan.stages[2].devices == ("d0",)
    assert [stage.layers for stage in plan.stages] == [(0, 0), (1, 1), (2, 2)]
    assert plan.predicted_step_s == pytest.approx(evaluate(plan, costs.workload, costs.profile).step_s)


@pytest.mark.parametrize("count", [4, 8])
def test_never_slower_and_no_exchange_helps(count):
    seconds = [0.1 + 0.03 * ((5 * k) % count) for k in range(count)]
    costs = PreparedCosts(workload([1 + (3 * k) % 5 for k in range(count)]), cluster(seconds, "abcdefgh"[:count]))
    given = chain(*(f"d{k}" for k in range(count)))
    best = best_order(given, costs)
    assert best.predicted_step_s < evaluate(given, costs.workload, costs.profile).step_s
    names = [stage.devices[0] for stage in best.stages]
    for one, other in itertools.combinations(range(count), 2):
        exchanged = list(names)
        exchanged[one], exchanged[other] = exchanged[other], exchanged[one]
        price = evaluate(chain(*exchanged), costs.workload, costs.profile).step_s
        assert best.predicted_step_s <= price * (1 + 1e-9)


def test_shapes_stay():
    """Two devices of one host, two on two hosts, and one replica of two: none may take the place of another."""
    costs = PreparedCosts(workload([1, 1, 1]), cluster([0.1, 0.1, 0.2, 0.2, 0.3, 0.3], "aabcdd"))
    given = chain(["d0", "d1"], ["d2", "d3"], [("d4", "d5")])
    assert best_order(given, costs).stages == given.stages


def with_memory(*sizes):
    """Return two devices with so many bytes, d0 half as fast as d1."""
    made = [device(f"d{k}", s, host=f"h{k}", memory_bytes=size) for k, (s, size) in enumerate(zip((0.2, 0.1), sizes))]
    return builders.cluster(made)


def test_only_an_order_that_fits_is_taken_whatever_its_speed(caplog):
    caplog.set_level("INFO", "hwaware")
    large = builders.workload([layer(1e9, parameter_bytes=1e6), layer(3e9, parameter_bytes=1e8)], 2)
    profile = with_memory(1e9, 1e7)
    found = choosing.best_order(chain("d0", "d1"), large, profile)
    assert [stage.devices for stage in found.stages] == [("d1",), ("d0",)]
    assert found.predicted_step_s == pytest.approx(evaluate(found, large, profile).step_s)
    assert "Alpa's devices lack memory for them" in caplog.text


def test_no_step_is_predicted_too_long_where_no_order_fits():
    large, profile = builders.workload([layer(1e9, parameter_bytes=1e8)] * 2, 2), with_memory(1e7, 1e7)
    found = best_order(chain("d0", "d1"), PreparedCosts(large, profile))
    assert found.predicted_step_s == pytest.approx(evaluate(found, large, profile).step_s)


def test_a_missing_link_is_named():
    costs = PreparedCosts(workload([1, 1]), cluster([0.1, 0.2, 0.2], "abc", links=False))  # only from and to b
    with pytest.raises(PlanError, match="link"):
        best_order(chain("d0", "d2"), costs)
