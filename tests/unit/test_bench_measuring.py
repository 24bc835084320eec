"""Measuring many mappings: in groups, some of which cannot run; scenarios, some of which fail; interruptions."""

import contextlib
import time
from pathlib import Path
from types import SimpleNamespace

import builders
import pytest
from builders import plan

from hwaware.bench import comparison, groups
from hwaware.bench.benchmark import Benchmark, named_model, place
from hwaware.bench.comparison import ideal_step_s, make_result
from hwaware.bench.enumeration import every_mapping, name_best, with_fastest
from hwaware.bench.groups import TRIAL_STEPS, measure_groups
from hwaware.bench.harness import StepTimes
from hwaware.bench.mappings import Candidate, Candidates, Wanted, check_names
from hwaware.bench.midway import _before, with_kept
from hwaware.bench.pace import LEAST_ROUNDS
from hwaware.bench.task import Effort, Task
from hwaware.bench.testbed.manager import Testbed
from hwaware.bench.testbed.scenarios import Later, Scenario
from hwaware.errors import MeasurementError, ScenarioError, TestbedError, UnusableInputError, WorkerFailedError
from hwaware.ray_cluster import Node
from hwaware.reference_kernel import Reading, Reference
from hwaware.result import BenchmarkResult, Mapping
from hwaware.timeline import Timeline

TIMELINE = Timeline(step_s=0.0, schedule="1f1b", num_microbatches=1, devices=(("a:0",),), events=())


CLUSTER = builders.cluster("abc", between=(1e8, 1e-4), seconds={1e9: 0.1, 4e9: 0.4})


def workload(layers=5):
    return builders.workload(layers, 4, "mlp", parameter_bytes=1e6, output_bytes=1e5, activation_bytes=1e5)


def candidate(name):
    return Candidate(name, plan((0, 4, "a:0"), num_microbatches=2), 1.0)


class Run:
    def __init__(self, one, log, broken):
        self.name, self.plan, self.losses, self._log, self._broken = one.name, one.plan, [], log, broken
        log.append(("start", one.name))

    def wait_until_compiled(self):
        pass

    def step(self):
        self.losses.append(1.0)
        if self.name in self._broken and len(self.losses) == TRIAL_STEPS:
            raise WorkerFailedError(f"stage 0 of {self.name}", self._broken[self.name], "give it less.")
        return 1.0

    def timed_step(self):
        return StepTimes(self.step(), 0.9)

    def close(self):
        self._log.append(("close", self.name))


class FakeTask(Task):
    log = []
    broken = {}

    def start(self, one):
        return Run(one, self.log, self.broken)


@pytest.fixture
def task(monkeypatch):
    monkeypatch.setattr(groups, "recorded_step", lambda run: TIMELINE)
    monkeypatch.setattr(FakeTask, "log", [])
    monkeypatch.setattr(FakeTask, "broken", {})
    effort = Effort(num_layers=5, num_microbatches=2, microbatch_size=4, repeats=3, together=3)
    return FakeTask(None, CLUSTER, workload(), effort, lambda _: None, Reference("steady", 0.1, lambda: Reading(0.1)))


def test_groups_share_the_first_mapping_and_end_their_runs(task):
    names = ["hwaware", "alpa-1", "alpa-2", "even"]
    measured, left_out, loads = measure_groups(task, [candidate(name) for name in names])
    assert [one.name for one in measured] == names
    assert [len(one.step_s) for one in measured] == [6, 3, 3, 3]  # hwaware's steps are in both groups
    assert (left_out, len(loads)) == ([], 6)
    assert all(one.timeline == TIMELINE for one in measured)
    closed = [name for what, name in task.log if what == "close"]
    assert closed == ["alpa-2", "alpa-1", "even", "hwaware"]


def test_processes_are_started_again_and_steps_know_their_start(task):
    again = task._replace(effort=task.effort._replace(starts=2))
    run = again.start(candidate("hwaware"))
    names = ["hwaware", "alpa-1", "alpa-2", "even"]
    measured, _, loads = measure_groups(again, [candidate(name) for name in names], [run])
    assert [one.starts for one in measured] == [(1,) * 6 + (2,) * 6, *[(1, 1, 1, 2, 2, 2)] * 3]
    assert [len(steps) for steps in measured[0].relative_starts] == [6, 6]
    assert len(loads) == 12
    assert [name for what, name in task.log if what == "start"] == names * 2
    closed = [name for what, name in task.log if what == "close"]
    assert sorted(closed) == sorted(names * 2)
    assert closed.index("hwaware") == 3  # before the second start


def test_the_result_says_when_time_cut_steps_and_starts(task, monkeypatch):
    pytest.importorskip("flax")
    said = []
    effort = task.effort._replace(starts=2, repeats=9, deadline_s=time.monotonic())
    late = task._replace(effort=effort, say=said.append)
    measured, *_ = outcome = measure_groups(late, [candidate("hwaware"), candidate("even")])
    assert [len(one.step_s) for one in measured] == [LEAST_ROUNDS, LEAST_ROUNDS]
    assert "no time is left to start all processes again." in said
    monkeypatch.setattr(comparison, "_expected_losses", lambda *_: (1.0,))
    late = late._replace(model=SimpleNamespace(config=None))
    result = make_result(late, "late", "mlp", Candidates((), (), (), None), *outcome)
    assert result.repeats == LEAST_ROUNDS
    [note] = [one for one in result.notes if "The time limit allowed" in one]
    assert note.startswith(
        "The time limit allowed 5 steps of each mapping in 1 start of its processes, instead of 9 steps in 2"
    )


def test_with_time_all_steps_are_taken_and_nothing_is_said(task, monkeypatch):
    pytest.importorskip("flax")
    effort = task.effort._replace(starts=2, repeats=9, deadline_s=time.monotonic() + 1000)
    early = task._replace(effort=effort, model=SimpleNamespace(config=None))
    outcome = measure_groups(early, [candidate("hwaware"), candidate("even")])
    assert [len(one.step_s) for one in outcome[0]] == [18, 18]
    monkeypatch.setattr(comparison, "_expected_losses", lambda *_: (1.0,))
    result = make_result(early, "early", "mlp", Candidates((), (), (), None), *outcome)
    assert (result.repeats, [one for one in result.notes if "time for" in one]) == (9, [])


def test_what_cannot_run_is_not_started_again(task):
    task.broken["even"] = "Out of memory: program 1 needs 2 GB"
    again = task._replace(effort=task.effort._replace(starts=2))
    measured, left_out, _ = measure_groups(again, [candidate("hwaware"), candidate("even")])
    assert [(one.name, len(one.step_s)) for one in measured] == [("hwaware", 6)]
    assert [one.name for one in left_out] == ["even"]
    assert [name for what, name in task.log if what == "start"] == ["hwaware", "even", "hwaware"]


def test_what_runs_after_one_start_only_is_left_out(task, monkeypatch):
    starts = iter(range(1, 9))
    monkeypatch.setattr(Run, "wait_until_compiled", lambda self: setattr(self, "start", next(starts)))

    def step(self):
        if self.start == 4:  # the second mapping's second start
            raise WorkerFailedError("stage 0", "the host vanished", "look at it.")
        self.losses.append(1.0)
        return 1.0

    monkeypatch.setattr(Run, "step", step)
    again = task._replace(effort=task.effort._replace(starts=2))
    measured, left_out, _ = measure_groups(again, [candidate("hwaware"), candidate("even")])
    assert [(one.name, len(one.step_s)) for one in measured] == [("hwaware", 6)]
    assert [one.name for one in left_out] == ["even"]


def test_other_losses_after_another_start_are_an_error(task, monkeypatch):
    losses = iter([1.0] * 5 + [1.001] * 5)
    monkeypatch.setattr(Run, "step", lambda self: self.losses.append(next(losses)) or 1.0)
    again = task._replace(effort=task.effort._replace(starts=2))
    with pytest.raises(MeasurementError, match=r"hwaware trained differently after a new start of its processes"):
        measure_groups(again, [candidate("hwaware")])


def test_what_does_not_fit_or_cannot_run_is_left_out(task):
    task.broken.update({"even": "Out of memory: program 1 needs 2 GB", "alpa-1": "the host vanished"})
    names = ["hwaware", "even", "alpa-1", "proportional"]
    measured, left_out, _ = measure_groups(task, [candidate(name) for name in names])
    assert [one.name for one in measured] == ["hwaware", "proportional"]
    assert [(one.name, one.out_of_memory) for one in left_out] == [("even", True), ("alpa-1", False)]
    assert "2 GB" in left_out[0].reason
    assert sorted(name for what, name in task.log if what == "close") == sorted(names)


def test_hwaware_itself_may_be_what_does_not_fit(task):
    task.broken["hwaware"] = "Out of memory: program 1 needs 2 GB"
    measured, left_out, _ = measure_groups(task, [candidate("hwaware"), candidate("even")])
    assert [one.name for one in measured] == ["even"]
    assert [one.name for one in left_out] == ["hwaware"]


def test_a_run_that_is_ready_is_used_and_left_open(task):
    run = task.start(candidate("hwaware-kept"))
    measured, _, _ = measure_groups(task, [candidate("hwaware-kept"), candidate("hwaware")], [run])
    assert [one.name for one in measured] == ["hwaware-kept", "hwaware"]
    assert ("close", "hwaware-kept") not in task.log


def test_the_ideal_spreads_all_work_or_takes_a_proved_bound(task):
    # A microbatch of 5 layers of 3 GFLOP takes 1.5 s on one device; two microbatches on three devices at least 1 s.
    assert ideal_step_s(task, None) == pytest.approx(1.0)
    assert ideal_step_s(task, 1.7) == 1.7


@pytest.mark.parametrize(
    ("hosts", "layers", "microbatches", "ideal_s"),
    [("abc", 5, 2, 1.0 - 2 * 0.15), ("abc", 5, 1, 0.5 - 2 * 0.15), ("abcd", 2, 1, None)],
)
def test_the_ideal_allows_for_what_a_stage_gains_by_waiting(task, hosts, layers, microbatches, ideal_s):
    """A stage that waited saves at most 0.15 s each way."""
    ahead = task._replace(
        workload=workload(layers),
        profile=builders.cluster(hosts, seconds=0.1, head_start_s=0.15),
        effort=task.effort._replace(num_microbatches=microbatches),
    )
    assert ideal_step_s(ahead, None) == (None if ideal_s is None else pytest.approx(ideal_s))


def test_every_mapping_of_three_hosts_and_five_layers():
    found = every_mapping(workload(), CLUSTER, 4)
    assert len(found) == 63
    assert len({str(one.plan) for one in found}) == 63
    assert [one.predicted_step_s for one in found] == sorted(one.predicted_step_s for one in found)


def test_too_many_mappings_are_refused():
    with pytest.raises(UnusableInputError, match=r"3 devices and 9 layers have more than 100 mappings.*To fix:"):
        every_mapping(workload(9), CLUSTER, 4)


def test_the_fastest_is_called_best_measured():
    def measured(name, step_s):
        return Mapping(name=name, plan=candidate(name).plan, predicted_step_s=1, step_s=(step_s,), loss=())

    assert name_best([]) == []
    found = name_best([measured("hwaware", 2.0), measured("each-7", 1.9)])
    assert [one.also for one in found] == [(), ("best-measured",)]


def test_the_fastest_are_measured_again_unless_known():
    every = every_mapping(workload(), CLUSTER, 4)
    known = Candidate("hwaware", every[0].plan, 1.0)
    assert [one.name for one in with_fastest([known], every[:2])] == ["hwaware", every[1].name]


def test_names_of_mappings():
    assert check_names(["even", "hwaware", "even"]) == ("hwaware", "even")
    with pytest.raises(UnusableInputError, match=r"no mapping .evn..*To fix: choose from hwaware, alpa"):
        check_names(["evn"])


def test_places():
    assert place("10.0.0.1:6379") == "10.0.0.1:6379"
    assert place("auto") == "auto"
    assert place("two-racks").name == "two-racks"
    with pytest.raises(ScenarioError, match="no scenario 'nowhere'"):
        place("nowhere")


def test_models_take_the_sizes_that_they_have():
    model = named_model("gpt-small", {"blocks": 2, "width": 8})
    assert (model.name, model.config.hidden, model.config.blocks) == ("gpt-small", 384, 2)
    with pytest.raises(UnusableInputError, match="no built-in model 'gptt'"):
        named_model("gptt", {})


def scenario(name, **more):
    return Scenario(name=name, shares={"a": 0.5}, default_mbit=100, **more)


class Bed(Testbed):
    """A testbed that is not there, shaped as far as the test says."""

    notes, cpu = (), True

    def __init__(self, scenario):
        self._scenario = scenario

    @property
    def scenario(self):
        return self._scenario

    def describe(self):
        return {"kind": "root", "shaped": {"links": True, "cpu": self.cpu}}


@pytest.fixture
def benchmark(tmp_path, monkeypatch):
    """A benchmark of two models whose clusters and measurements are stand-ins; `behave` says what each does."""
    lines, open_clusters = [], []
    from hwaware import activation

    monkeypatch.setattr(activation, "install_runtime", lambda: None)

    @contextlib.contextmanager
    def its_cluster(self, each):
        if each.name == "broken":
            raise MeasurementError("no host answers.", "look at it.")
        open_clusters.append(each.name)
        try:
            yield Bed(each)
        finally:
            open_clusters.remove(each.name)
        if each.name == "lasting":
            raise TestbedError("its processes did not end.", "see why.")

    def its_result(self, each, bed, model, say):
        answer = behave.get((each.name, model.name))
        if answer is not None:
            raise answer
        mapping = Mapping(name="hwaware", plan=candidate("x").plan, predicted_step_s=1, step_s=(1.0,), loss=())
        return BenchmarkResult(
            environment={}, scenario=each.name, model=model.name, num_microbatches=2, repeats=1, mappings=(mapping,)
        )

    behave = {}
    monkeypatch.setattr(Benchmark, "_cluster", its_cluster)
    monkeypatch.setattr(Benchmark, "_result", its_result)
    effort = Effort(num_layers=0, num_microbatches=2, microbatch_size=4)
    made = Benchmark([named_model("mlp", {}), named_model("gpt", {})], effort, tmp_path, True, lines.append)
    return made, behave, open_clusters, lines


def test_each_pair_has_its_own_file_and_what_fails_is_said(benchmark, tmp_path):
    made, behave, _, lines = benchmark
    behave["one", "gpt"] = MeasurementError("it broke.", "mend it.")
    outcome = made.run([scenario("one"), scenario("broken"), scenario("two")])
    assert [path.name for path in outcome.paths] == ["one-mlp.json", "two-mlp.json", "two-gpt.json"]
    assert [(one.scenario, one.model) for one in outcome.failures] == [
        ("one", "gpt"), ("broken", "mlp"), ("broken", "gpt"),
    ]  # fmt: skip
    assert sorted(path.name for path in tmp_path.glob("*.json")) == sorted(path.name for path in outcome.paths)
    assert "5 of 6 done" in "\n".join(lines)


def test_nothing_is_measured_beside_a_testbed_that_cannot_be_taken_down(benchmark, tmp_path):
    made, *_ = benchmark
    with pytest.raises(TestbedError, match="did not end"):
        made.run([scenario("lasting"), scenario("two")])
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["lasting-gpt.json", "lasting-mlp.json"]


def test_each_pair_gets_its_part_of_the_time_that_is_left(tmp_path, monkeypatch, benchmark):
    _, _, _, lines = benchmark
    effort = Effort(num_layers=0, num_microbatches=2, microbatch_size=4)
    models = [named_model("mlp", {}), named_model("gpt", {})]
    made = Benchmark(models, effort, tmp_path, True, lines.append, within_s=400)
    answer, parts_s = Benchmark._result, []

    def noting(self, *arguments):
        parts_s.append(self._deadline_s() - time.monotonic())
        return answer(self, *arguments)

    monkeypatch.setattr(Benchmark, "_result", noting)
    made.run([scenario("one"), scenario("two")])
    # 40 s are for the report, 20 s for what follows the steps of each pair; these take no time.
    assert parts_s == pytest.approx([360 / 4 - 20, 360 / 3 - 20, 360 / 2 - 20, 360 - 20], abs=5)


def test_an_interruption_keeps_results_and_closes_the_cluster(benchmark, tmp_path):
    made, behave, open_clusters, _ = benchmark
    behave["one", "gpt"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        made.run([scenario("one"), scenario("two")])
    assert [path.name for path in tmp_path.glob("*.json")] == ["one-mlp.json"]
    assert open_clusters == []


def test_a_kept_mapping_is_measured_beside_new_ones_once():
    first, second, third = every_mapping(workload(), CLUSTER, 4)[:3]
    kept = Candidate("hwaware-kept", first.plan, 1.0)
    assert [one.name for one in with_kept([second, third], kept)] == [second.name, "hwaware-kept", third.name]
    same = with_kept([second, first], kept)
    assert [(one.name, one.also) for one in same] == [(second.name, ()), (first.name, ("hwaware-kept",))]


def test_the_earlier_mapping_is_measured_after_trial_steps(task):
    one = candidate("hwaware-kept")
    before = _before(task, task.start(one), one, 4)
    assert (before.name, before.predicted_step_s) == ("hwaware-before", 1.0)
    assert (len(before.step_s), len(before.loss)) == (4, TRIAL_STEPS + 4)
    assert before.profile_reference_s == 0.1


def test_the_conditions_of_the_machine_are_recorded(benchmark, monkeypatch):
    made, _, _, _ = benchmark
    monkeypatch.setattr("os.getloadavg", lambda: (7.25, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    (result, _) = made.run([scenario("one")]).results
    assert result.environment["load_average_before"] == 7.25
    assert any("busy before" in note and "7.2 on 2 cores" in note for note in result.notes)
    assert any("add up to 0.50 of 2 cores" in note for note in result.notes)
    assert result.environment["testbed"] == {"kind": "root", "shaped": {"links": True, "cpu": True}}
    monkeypatch.setattr("os.getloadavg", lambda: (0.1, 0.0, 0.0))
    (result, _) = made.run([scenario("one")]).results[-2:]
    assert not any("busy before" in note for note in result.notes)
    monkeypatch.setattr(Bed, "cpu", False)
    monkeypatch.setattr(Bed, "notes", ("Not shaped: CPU shares.",))
    (result, _) = made.run([scenario("one")]).results[-2:]
    assert result.notes == ("Not shaped: CPU shares.",)


def test_a_result_names_its_versions_also_if_hwaware_is_on_the_path_alone(monkeypatch):
    """As in benchmarks/gpu.sh: no package of that name is installed."""
    from importlib import metadata

    from hwaware import __version__
    from hwaware.bench.environment import environment

    def version(name):
        if name == "hwaware":
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(metadata, "version", version)
    versions = environment(SimpleNamespace(name="kernel", usual_s=0.1))["versions"]
    assert versions["hwaware"] == __version__
    assert versions["alpa"] == "1.0"


def test_what_ray_reports_fails_one_pair_and_not_the_others(benchmark, capsys):
    exceptions = pytest.importorskip("ray.exceptions")
    made, behave, _, _ = benchmark
    behave["one", "mlp"] = exceptions.RayActorError()
    outcome = made.run([scenario("one")])
    assert [path.name for path in outcome.paths] == ["one-gpt.json"]
    [failed] = outcome.failures
    assert "Ray reports RayActorError" in str(failed.error)
    assert "Traceback" in capsys.readouterr().err


def test_places_that_share_a_file_or_change_midway_are_refused(benchmark):
    made, _, open_clusters, lines = benchmark
    with pytest.raises(UnusableInputError, match=r"Two scenarios are called one.*To fix: "):
        made.run([scenario("one"), scenario("two"), scenario("one")])
    effort = Effort(num_layers=0, num_microbatches=2, microbatch_size=4, wanted=Wanted(("hwaware", "best-measured")))
    made = Benchmark([named_model("mlp", {})], effort, Path("nowhere"), True, lines.append)
    with pytest.raises(UnusableInputError, match=r"slow changes midway.*To fix: "):
        made.run([scenario("one"), scenario("slow", later=Later(after_steps=0, shares={"a": 0.2}))])
    assert (open_clusters, lines) == ([], [])


def test_too_many_mappings_are_refused_before_anything_is_measured(benchmark, monkeypatch):
    _, _, open_clusters, lines = benchmark
    wanted = Wanted(("hwaware", "best-measured"))
    effort = Effort(num_layers=9, num_microbatches=2, microbatch_size=4, wanted=wanted)
    made = Benchmark([named_model("mlp", {})], effort, Path("nowhere"), True, lines.append)
    with pytest.raises(UnusableInputError, match=r"3 devices and 9 layers have more than 100 mappings.*To fix: "):
        made.run([scenario("one"), scenario("large", devices={"a": 3})])
    assert (open_clusters, lines) == ([], [])


def test_too_many_mappings_of_a_running_cluster_are_refused_before_it_is_measured(monkeypatch):
    nodes = [Node("", "", "", {"GPU": 3.0}), Node("", "", "", {})]
    monkeypatch.setattr("hwaware.ray_cluster.nodes", lambda: nodes)
    lines = []
    wanted = Wanted(("hwaware", "best-measured"))
    effort = Effort(num_layers=9, num_microbatches=2, microbatch_size=4, wanted=wanted)
    made = Benchmark([named_model("mlp", {})], effort, Path("nowhere"), True, lines.append)
    with pytest.raises(UnusableInputError, match=r"3 devices and 9 layers have more than 100 mappings"):
        made._result("10.0.0.1:6379", "10.0.0.1:6379", made._models[0], lines.append)
    assert lines == []


def test_a_mapping_that_diverges_is_left_out_with_its_reason(task, monkeypatch):
    pytest.importorskip("flax")
    monkeypatch.setattr(comparison, "_expected_losses", lambda *_: (1.0,))
    task = task._replace(model=SimpleNamespace(config=None))
    good, bad = (
        Mapping(name=name, plan=candidate(name).plan, predicted_step_s=1, step_s=(1.0,), loss=(1.0, loss))
        for name, loss in (("hwaware", 0.5), ("even", float("nan")))
    )
    found = make_result(task, "one", "mlp", Candidates((), (), (), None), [good, bad], [], [])
    assert [one.name for one in found.mappings] == ["hwaware"]
    assert [(one.name, one.reason) for one in found.unmeasured] == [("even", "its losses are not finite: 1, nan ...")]
    assert BenchmarkResult.from_json(found.to_json()) == found
