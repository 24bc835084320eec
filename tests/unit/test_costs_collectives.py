"""The communication model: exact where measured, structure where not, on recorded curves and on made-up clusters."""

from __future__ import annotations

from pathlib import Path

import builders
import numpy as np
import pytest

from hwaware.costs import fit_collectives
from hwaware.costs.patterns import Shape, checked_groups, shapes, traffic
from hwaware.errors import RecordError, UnusableInputError

RECORDED = Path(__file__).parents[2] / "profiling" / "recorded"
GROUPS = [[0, 2], [1, 3]]
read_collectives = builders.script("recorded_curves").read_collectives


@pytest.fixture(scope="module")
def nccl():
    return read_collectives(RECORDED / "nccl_transfers.json")


@pytest.fixture(scope="module")
def v100():
    return read_collectives(RECORDED / "v100_collectives.json")["V100"]


def thinned(curve, count=12):
    sizes = np.array([size for size, _ in curve["points"]], dtype=float)
    usable = np.where(sizes >= 4096)[0]
    wanted = np.geomspace(sizes[usable[0]], sizes[usable[-1]], count)
    indices = sorted({int(usable[np.argmin(np.abs(np.log(sizes[usable] / size)))]) for size in wanted})
    return {**curve, "points": [curve["points"][index] for index in indices]}


def errors(model, curve, points=40):
    asked = {name: curve[name] for name in ("op", "dtype", "devices_per_host", "replica_groups")}
    tested = [point for point in curve["points"] if point[0] >= 4096]
    tested = tested[:: max(1, len(tested) // points)]
    return np.array([abs(model.predict_s(nbytes=size, **asked) / seconds - 1) for size, seconds in tested])


def mean_error(model, curves):
    return float(np.mean(np.concatenate([errors(model, curve) for curve in curves])))


def straight(op, groups, per_host, latency, rate, traffic_per_byte=1.0, dtype="float32"):
    """A curve that a cluster of one link class would show."""
    sizes = [float(4**k) for k in range(6, 16)]
    points = [[size, latency + traffic_per_byte * size / rate] for size in sizes]
    return {"op": op, "dtype": dtype, "devices_per_host": per_host, "replica_groups": groups, "points": points}


def ask(model, op, nbytes, groups, per_host, dtype="float32"):
    return model.predict_s(op=op, nbytes=nbytes, dtype=dtype, devices_per_host=per_host, replica_groups=groups)


def test_recorded_sizes_are_bytes_of_the_full_array(nccl, v100):
    longest = max(v100, key=lambda curve: curve["points"][-1][0])
    assert longest["points"][-1][0] == 4 * 2**30
    a40 = [curve for curve in nccl["A40"] if curve["replica_groups"] == [[0, 2], [1, 3]]]
    by_op = {curve["op"]: curve["points"][-1] for curve in a40}
    assert by_op["all-to-all"][0] == 2 * by_op["all-gather"][0]
    assert all(size > 0 for curves in nccl.values() for curve in curves for size, _ in curve["points"])


def test_measured_points_come_back(nccl):
    curve = nccl["A100"][1]
    model = fit_collectives(nccl["A100"])
    for size, seconds in curve["points"][::30]:
        asked = ask(model, curve["op"], size, curve["replica_groups"], curve["devices_per_host"])
        assert asked == pytest.approx(seconds, rel=1e-9)


def test_twelve_sizes_predict_the_others(nccl, v100):
    few = [thinned(curve) for curve in v100]
    assert mean_error(fit_collectives(few), v100) < 0.029
    a100 = [curve for curve in nccl["A100"] if curve["replica_groups"]]
    assert mean_error(fit_collectives([thinned(curve) for curve in a100]), a100) < 0.0125


def crossing(curve):
    return (
        curve["replica_groups"]
        and shapes(checked_groups(curve["replica_groups"], curve["devices_per_host"]), curve["devices_per_host"])[
            0
        ].crossing
    )


def at_once(curves):
    return [curve for curve in curves if crossing(curve) and len(curve["replica_groups"]) > 1]


def alike(a, b):
    return all(a[name] == b[name] for name in ("replica_groups", "devices_per_host", "hosts"))


def test_groups_at_once_from_the_other_operations_on_them(v100, nccl):
    for curves in (v100, nccl["A40"], nccl["A100"]):
        found = []
        for curve in at_once(curves):
            others = [thinned(c, 20) for c in curves if alike(c, curve) and c["op"] != curve["op"]]
            found.append(errors(fit_collectives(others), curve))
        assert np.mean(np.concatenate(found)) < 0.15


def test_gathers_and_scatters_of_other_groups(v100, nccl):
    for curves in (v100, nccl["A40"], nccl["A100"]):
        found = []
        moving = [curve for curve in at_once(curves) if curve["op"] in ("all-gather", "reduce-scatter")]
        for curve in builders.thinned(moving, every=3):
            elsewhere = [thinned(c, 20) for c in curves if not alike(c, curve)]
            found.append(errors(fit_collectives(elsewhere), curve))
        assert np.mean(np.concatenate(found)) < 0.20


def test_two_hosts_from_one_and_four_sizes(v100):
    few = [curve if curve["hosts"] == 1 else thinned(curve, 4) for curve in v100]
    two = [curve for curve in v100 if curve["hosts"] == 2 and len(curve["replica_groups"][0]) > 1]
    assert mean_error(fit_collectives(few), two) < 0.20


def test_eight_devices_from_two_and_four(nccl):
    sizes = {index: len((curve["replica_groups"] or [[]])[0]) for index, curve in enumerate(nccl["V100"])}
    model = fit_collectives([curve for index, curve in enumerate(nccl["V100"]) if sizes[index] in (2, 4)])
    for index, curve in enumerate(nccl["V100"]):
        if sizes[index] == 8:
            assert errors(model, curve).mean() < 0.15, curve["op"]


def test_groups_at_once_share_the_card():
    alone = straight("all-gather", [[0, 4]], 4, 1e-5, 1e9, 0.5)
    model = fit_collectives([alone])
    one = ask(model, "all-gather", 1e9, [[0, 4]], 4)
    four = ask(model, "all-gather", 1e9, [[0, 4], [1, 5], [2, 6], [3, 7]], 4)
    assert four == pytest.approx(4 * one, rel=0.01)
    inside = ask(model, "all-gather", 1e9, [[0, 4], [1, 2]], 4)
    assert inside == pytest.approx(one, rel=0.01), "a group inside a host does not pass the card"


@pytest.mark.parametrize(
    ("op", "factor"), [("all-reduce", 2.0), ("reduce-scatter", 1.0), ("all-to-all", 0.5), ("send", 2.0)]
)
def test_other_operations_move_their_share(op, factor):
    model = fit_collectives([straight("all-gather", [[0, 1]], 1, 1e-6, 1e9, 0.5)])
    assert ask(model, op, 1e9, [[0, 1]], 1) == pytest.approx(factor * 0.5, rel=0.01)


def test_the_slowest_group_ends_the_operation():
    curves = [straight("send", [[0, 1]], 2, 1e-6, 1e10), straight("send", [[0, 2]], 2, 1e-4, 1e9)]
    model = fit_collectives(curves)
    assert ask(model, "send", 1e9, [[0, 1], [2, 4]], 2) == pytest.approx(ask(model, "send", 1e9, [[2, 4]], 2))


def test_rings_are_no_faster_than_their_part_inside_the_hosts():
    slow_inside = [
        straight("all-gather", [[0, 1]], 2, 1e-6, 1e8, 0.5),
        straight("all-gather", [[0, 2], [1, 3]], 2, 1e-6, 1e10, 1.0),
    ]
    found = ask(fit_collectives(slow_inside), "all-gather", 1e8, [[0, 1, 2, 3]], 2)
    assert found == pytest.approx(0.75, rel=0.05)


def test_another_data_type_has_the_same_bytes():
    model = fit_collectives([straight("all-reduce", [[0, 1]], 2, 1e-5, 1e9)])
    assert ask(model, "all-reduce", 5e6, [[0, 1]], 2, "float16") == ask(model, "all-reduce", 5e6, [[1, 0]], 2)
    assert ask(model, "all-reduce", 5e6, [[0, 1]], 2, "f32") == ask(model, "all-reduce", 5e6, [[0, 1]], 2)


def test_a_source_that_counts_operands_is_noticed():
    groups = [[0, 2], [1, 3]]
    right = [straight("all-gather", groups, 2, 1e-5, 1e9), straight("all-to-all", groups, 2, 1e-5, 1e9, 0.5)]
    by_operand = [right[0], straight("all-to-all", groups, 2, 1e-5, 1e9, 4.0)]
    four = [[0, 1, 2, 3]]
    counted = ask(fit_collectives(right), "all-to-all", 1e9, four, 2)
    assert counted == pytest.approx(0.25, rel=0.1)
    assert ask(fit_collectives(by_operand), "all-to-all", 1e9, four, 2) > 8 * counted


def test_one_size_corrects_what_other_curves_say():
    known = straight("all-gather", GROUPS, 2, 1e-5, 1e9)
    slower = {**straight("reduce-scatter", GROUPS, 2, 1e-5, 1e9), "points": [[1e8, 0.15]]}
    model = fit_collectives([known, slower])
    for size in (1e7, 1e9):
        ratio = ask(model, "reduce-scatter", size, GROUPS, 2) / ask(model, "all-gather", size, GROUPS, 2)
        assert ratio == pytest.approx(1.5, rel=1e-2)


def test_more_bytes_never_take_less_on_straight_curves():
    model = fit_collectives([straight("all-gather", GROUPS, 2, 1e-4, 1e9)])
    for op in ("send", "all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
        times = [ask(model, op, 10.0**k, [[0, 1, 2, 3]], 2) for k in np.arange(0, 11, 0.25)]
        assert all(a <= b for a, b in zip(times, times[1:])), op


def test_groups_of_one_cost_nothing_or_what_was_measured():
    model = fit_collectives([straight("all-gather", [[0, 1]], 2, 1e-5, 1e9)])
    assert ask(model, "all-gather", 1e6, [[0], [1]], 2) == 0
    with_copies = fit_collectives([straight("all-gather", [[0], [1]], 2, 1e-5, 1e9)])
    assert ask(with_copies, "all-gather", 1e6, [[0]], 1) == pytest.approx(1e-5 + 1e-3, rel=0.05)


def test_renamed_ranks_cost_the_same(v100):
    model = fit_collectives([thinned(curve) for curve in v100])
    a = ask(model, "all-reduce", 3e7, [[0, 8], [1, 9]], 8)
    assert a == ask(model, "all-reduce", 3e7, [[9, 1], [8, 0]], 8)
    assert a == pytest.approx(ask(model, "all-reduce", 3e7, [[2, 10], [5, 13]], 8))


def test_traffic_of_uneven_groups():
    uneven = Shape(size=3, layout=(2, 1), crossing=1, stride=1)
    assert traffic("all-gather", uneven, 1e6) == pytest.approx(2 / 3)
    assert traffic("all-to-all", uneven, 1e6) == pytest.approx(2 / 9)
    assert traffic("all-reduce", uneven, 1e12) == pytest.approx(2 * 1.12 / 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "broadcast"}, "expected one of send"),
        ({"replica_groups": [[0, 0]]}, "every rank once"),
        ({"replica_groups": []}, "at least one group"),
        ({"points": [[0, 1e-5]]}, "0 points above 0 bytes"),
        ({"points": [[8, float("nan")]]}, "finite seconds"),
    ],
)
def test_unusable_curves_are_refused(change, message):
    with pytest.raises(UnusableInputError, match=message):
        fit_collectives([{**straight("send", [[0, 1]], 1, 1e-5, 1e9), **change}])


def test_unusable_questions_are_refused():
    with pytest.raises(UnusableInputError, match="no curves"):
        fit_collectives([])
    with pytest.raises(UnusableInputError, match="lacks op"):
        fit_collectives([{}])
    model = fit_collectives([straight("send", [[0, 1]], 1, 1e-5, 1e9)])
    with pytest.raises(UnusableInputError, match="nbytes"):
        ask(model, "send", -1, [[0, 1]], 1)
    with pytest.raises(UnusableInputError, match="expected one of"):
        ask(model, "gather", 1, [[0, 1]], 1)


def test_files_without_curves_are_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text("{}")
    with pytest.raises(RecordError, match="no curves"):
        read_collectives(path)
