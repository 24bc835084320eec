"""Alpa's AutoStageOption as a rule for the search."""

import dataclasses
import logging
import math

import pytest
from builders import chosen, cluster, workload

import hwaware.placement
from hwaware.errors import AlpaError
from hwaware.patching import auto_options
from hwaware.patching.stage_option import PlacementSettings
from hwaware.placement import exact


@dataclasses.dataclass
class Option:
    """The fields of Alpa's option, with its defaults."""

    submesh_physical_shape_space: str = "power_of_two"
    manually_specified_submeshes: object = None
    submesh_logical_shape_space: str = "single_node_model_parallel"
    layer_profile_mode: str = "composition"
    stage_imbalance_tolerance: float = math.inf
    use_hlo_cost_model: bool = False
    profiling_database_filename: object = None
    cached_profile_result: object = None


def profile(**counts):
    """Build hosts with that many equal devices each."""
    return cluster(counts, between=(1e12, 1e-3), inside=(1e12, 1e-6))


def twelve(heavy=1e9, layers=12):
    """Build layers, the first one with `heavy` FLOPs."""
    return workload([heavy, *[1e9] * (layers - 1)], 12, output_bytes=4)


def shapes(plan):
    found = []
    for stage in plan.stages:
        hosts = [device.split(":")[0] for device in stage.devices]
        found.append((len(set(hosts)), hosts.count(hosts[0])))
    return found


def planned(option, hosts, work):
    rule = auto_options.rule_of(option, hosts, work)
    return hwaware.placement.plan(work, hosts, num_microbatches=4, rule=rule)


def test_the_defaults_ask_for_nothing():
    assert auto_options.rule_of(Option(), profile(a=2), twelve()) is None


@pytest.mark.parametrize(
    ("named", "expected"), [([(1, 1)], {(1, 1)}), ([(1, 3)], {(1, 3)}), ([(1, 2), (2, 1)], {(1, 2), (2, 1)})]
)
def test_manual_shapes_are_the_only_ones(named, expected):
    plan = planned(Option("manual", named), profile(a=3, b=3), twelve())
    assert plan.status in ("optimal", "feasible")
    assert set(shapes(plan)) <= expected


@pytest.mark.parametrize("count", chosen((3, 9), 0))
def test_shapes_on_a_cluster_too_large_for_the_exact_search(monkeypatch, count):
    monkeypatch.setattr(exact, "MAX_STATES", 0)
    hosts = profile(**{f"h{k}": 8 for k in range(count)})
    option = Option("manual", [(1, 4), (2, 8)])
    rule = auto_options.rule_of(option, hosts, twelve())
    plan = hwaware.placement.plan(twelve(), hosts, num_microbatches=4, rule=rule, time_limit_s=0.5)
    assert plan.status in ("optimal", "feasible")
    assert set(shapes(plan)) <= {(1, 4), (2, 8)}


def test_shapes_that_do_not_exist_are_an_answer_with_a_reason():
    plan = planned(Option("manual", [(1, 7)]), profile(a=2), twelve(layers=2))
    assert plan.status == "infeasible"
    assert plan.reason.startswith("Rule: ")
    assert "To fix: allow more shapes" in plan.reason


@pytest.mark.parametrize("space", ["all", "small_power_of_two"])
def test_spaces_of_shapes(space):
    hosts = profile(a=6, b=6, c=6, d=6, e=6, f=6)
    rule = auto_options.rule_of(Option(space), hosts, twelve())
    by_host = {host.name: [d for d in hosts.devices if d.host == host.name] for host in hosts.hosts}

    def allowed(hosts, width):
        return rule([[device] for host in list(by_host)[:hosts] for device in by_host[host][:width]], 0, 1)

    # Part of a host: powers of two. Whole hosts: any number, or a power of two up to four.
    assert [width for width in range(1, 7) if allowed(1, width)] == [1, 2, 4, 6]
    assert [width for width in range(1, 7) if allowed(2, width)] == [6]
    assert [hosts for hosts in range(1, 7) if allowed(hosts, 6)] == {
        "all": [1, 2, 3, 4, 5, 6],
        "small_power_of_two": [1, 2, 4],
    }[space]


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        ("all", [(4, 1), (2, 2), (1, 4)]),
        ("single_node_model_parallel", [(4, 1), (2, 2)]),
        ("same_as_physical", [(2, 2)]),
        ("data_parallel_only", [(4, 1)]),
        ("model_parallel_only", [(1, 4)]),
    ],
)
def test_logical_shapes_of_two_hosts_with_two_devices(space, expected):
    hosts = profile(a=2, b=2)
    rule = auto_options.rule_of(Option("all", None, space), hosts, twelve())
    groups = {
        (replicas, 4 // replicas): [list(hosts.devices[k : k + 4 // replicas]) for k in range(0, 4, 4 // replicas)]
        for replicas in (4, 2, 1)
    }
    assert [shape for shape, replicas in groups.items() if rule(replicas, 0, 1)] == expected


def test_imbalance_is_kept_within_the_tolerance():
    # One of two equal devices would take the heavy layer alone: 10 of 21 parts of the work for half of the devices.
    work, hosts = twelve(heavy=10e9), profile(a=2)
    rule = auto_options.rule_of(Option(stage_imbalance_tolerance=0.06), hosts, work)
    one = [[hosts.devices[0]]]
    assert [last for last in range(12) if rule(one, 0, last)] == [0, 1]
    assert not rule(one, 2, 3)
    plan = planned(Option("manual", [(1, 1)], stage_imbalance_tolerance=0.06), hosts, work)
    assert [stage.layers for stage in plan.stages] in ([(0, 0), (1, 11)], [(0, 1), (2, 11)])


@pytest.mark.parametrize(
    "option",
    [Option("some"), Option(submesh_logical_shape_space="some"), Option("manual"), Option("manual", [])],
)
def test_what_alpa_does_not_know_is_refused(option):
    with pytest.raises(AlpaError, match=r"submesh.*To fix:"):
        auto_options.rule_of(option, profile(a=2), twelve())


def test_one_line_names_what_does_not_apply(caplog):
    caplog.set_level(logging.INFO, logger="hwaware")
    auto_options.say_what_does_not_apply(Option())
    assert caplog.messages == []
    auto_options.say_what_does_not_apply(Option(use_hlo_cost_model=True, cached_profile_result="costs.npy"))
    (line,) = caplog.messages
    assert "use_hlo_cost_model=True, cached_profile_result='costs.npy'" in line
    assert "layer_profile_mode" not in line


@pytest.mark.parametrize("costs", ["alpa-profile", "alpa-hlo", "some"])
def test_costs_that_cannot_be_had_are_refused(costs):
    with pytest.raises(AlpaError, match=rf"costs='{costs}'.*To fix: use costs=\"auto\", \"model\""):
        PlacementSettings(profile(a=1), costs=costs)


def test_a_plan_may_be_the_path_of_its_file(tmp_path):
    from hwaware.errors import RecordError

    hosts = profile(a=1)
    plan = hwaware.placement.plan(twelve(), hosts, num_microbatches=4)
    plan.save(tmp_path / "plan.json")
    assert PlacementSettings(hosts, plan=tmp_path / "plan.json").plan == plan
    with pytest.raises(RecordError, match=r"no-such\.json"):
        PlacementSettings(hosts, plan=tmp_path / "no-such.json")
