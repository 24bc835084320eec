"""The report of a benchmark: made out of result files alone, complete, and without a need for the network."""

import re
import struct
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

import hwaware
from hwaware import records
from hwaware.cli import main
from hwaware.errors import TestbedError
from hwaware.report import bench_pictures
from hwaware.result import Unmeasured

pytest.importorskip("matplotlib")
# Of all: speed-ups, predictions. Of one: steps, stages, cluster, two timelines, all mappings. Of the other: two.
PICTURES = 2 + 6 + 2
# Written before results held profile, workload and timelines.
DEMO = Path(__file__).parent / "data" / "demo-of-an-older-version"


@pytest.fixture(scope="module")
def recorded():
    """The demo's result as `hwaware bench` would have written it, with a step of each mapping."""
    result = hwaware.BenchmarkResult.load(DEMO / "result.json")
    profile = hwaware.ClusterProfile.load(DEMO / "cluster.json")
    workload = hwaware.Workload.load(DEMO / "workload.json")
    mappings = tuple(
        msgspec.structs.replace(one, timeline=hwaware.simulate(one.plan, workload, profile)) for one in result.mappings
    )
    return msgspec.structs.replace(
        result,
        mappings=mappings,
        profile=profile,
        workload=workload,
        ideal_step_s=1.2,
        enumerated=mappings[1:],
        unmeasured=(Unmeasured(name="even", reason="Out of memory: <big>", out_of_memory=True, plan=mappings[1].plan),),
        notes=("The machine changed its speed.",),
    )


@pytest.fixture(scope="module")
def report(recorded, tmp_path_factory):
    """(directory, what the command printed) of a report on two results."""
    directory = tmp_path_factory.mktemp("results")
    recorded.save(directory / "a.json")
    bare = tuple(msgspec.structs.replace(one, timeline=None) for one in recorded.mappings)
    (directory / "cluster.json").write_bytes((DEMO / "cluster.json").read_bytes())  # no result
    msgspec.structs.replace(recorded, scenario="four-equal", mappings=bare, profile=None).save(directory / "b.json")
    outcome = CliRunner().invoke(main, ["bench", "--report-only", "-o", str(directory)])
    assert outcome.exit_code == 0, outcome.output
    return directory, outcome.output


def test_the_page_holds_everything_and_fetches_nothing(report):
    page = (report[0] / "index.html").read_text()
    assert not re.search(r'(src|href)="(https?:)?//', page)
    assert "default-src 'none'" in page
    for words in (
        "Speed-ups of hwaware", "Over all results", "out of memory", "could not be measured: Out of memory: &lt;big",
        "The machine changed its speed.", "Measured: ", "Simulated: ", "no plan takes less than 1.200 s", "h3:0",
        "Predicted against measured", "Link bandwidth", "versions", "All 3 mappings of gpt",
    ):  # fmt: skip
        assert words in page, words
    assert page.count("<svg") == page.count("<figure") == PICTURES


def test_every_picture_is_a_file_too(report):
    names = sorted(path.name for path in report[0].glob("*.png"))
    assert len(names) == PICTURES
    assert {"speed-ups.png", "predictions.png", "four-equal-gpt-steps.png", "fast-and-slow-gpt-map.png"} <= set(names)
    for name in names:
        data = (report[0] / name).read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert min(struct.unpack(">II", data[16:24])) > 200


def test_the_tables_name_every_figure(report):
    text = report[1]
    for words in ("fast-and-slow", "1.80 (1.58-2.02)", "1.66-1.92 (3)", "out of memory", "geometric mean", "1 faster"):
        assert words in text, words


def test_an_older_versions_result_has_a_report_and_json(tmp_path):
    (tmp_path / "old.json").write_bytes((DEMO / "result.json").read_bytes())
    outcome = CliRunner().invoke(main, ["bench", "--report-only", "--json", "-o", str(tmp_path)])
    assert outcome.exit_code == 0, outcome.output
    document = msgspec.json.decode(outcome.stdout)
    assert document["overall"]["speed_ups"]["alpa"]["geometric_mean"] == pytest.approx(1.80, abs=0.01)
    assert document["results"]["old.json"]["median_alpa"] == "alpa-shuffled"
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "fast-and-slow-gpt-steps.png", "predictions.png", "speed-ups.png",
    ]  # fmt: skip


def test_what_is_shown_when_a_host_slowed_down_midway(recorded):
    kept = msgspec.structs.replace(recorded.mappings[1], name="hwaware-kept")
    result = msgspec.structs.replace(recorded, mappings=(recorded.mappings[0], kept, recorded.mappings[2]))
    shown = bench_pictures.shown_mappings(result, {"median_alpa": "alpa-reversed"})
    assert [one.name for one in shown] == ["hwaware", "hwaware-kept", "alpa-reversed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "There is no scenario 'nowhere'"),
        (["two-racks", "--model", "gpt-smal"], "There is no built-in model 'gpt-smal'; there are gpt-small, "),
        (["two-racks", "--model", "mine:make"], "moe, wresnet. To fix: name one of these.\n"),
        (["two-racks", "--mappings", "hwaware,alpha"], "There is no mapping 'alpha'"),
        (["two-racks", "--model", "mlp", "--experts", "2"], "None of mlp has an option --experts"),
        (["two-racks", "--hidden", "7"], "hidden is 7, expected a multiple of heads"),
        (["--report-only"], "holds no results"),
        (["two-racks", "--report-only", "--model", "mlp"], "bench --report-only does not use SCENARIO, --model."),
        (["two-racks", "--faults", "--model", "mlp"], "bench --faults does not use --model."),
        (["two-racks", "--faults", "--kind", "loopback"], "two-racks has 4 hosts, of kind loopback, expected a link"),
        (["127.0.0.1:1"], "No Ray cluster answers at 127.0.0.1:1"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(arguments, message, tmp_path):
    outcome = CliRunner().invoke(main, ["bench", "-o", str(tmp_path), *arguments])
    assert outcome.exit_code == 2
    assert message in outcome.output
    assert "To fix:" in outcome.output
    assert list(tmp_path.iterdir()) == []


def test_faults_are_measured_on_the_kind_of_testbed_that_was_checked(monkeypatch):
    """Other processes train, so this one's threads do not matter."""
    pytest.importorskip("ray")
    from hwaware.bench import faults, testbed
    from hwaware.bench.testbed import kinds

    monkeypatch.setattr(kinds, "_works", lambda kind: kind != "root")
    monkeypatch.setattr(kinds.namespaces, "has_one_thread", lambda: False)
    faults.require_links([testbed.load_scenario("two-racks")], "auto")

    def running(scenario, kind):
        raise TestbedError(f"asked for {kind}.", "see the test.")

    monkeypatch.setattr(testbed, "running", running)
    with pytest.raises(TestbedError, match="asked for user"):
        faults.on_testbed("two-racks", 1, 1)


def test_results_of_faults_never_replace_each_other(tmp_path, monkeypatch):
    from hwaware.bench import faults

    monkeypatch.setattr(faults, "require_links", lambda *_: None)
    monkeypatch.setattr(faults, "on_testbed", lambda name, *_: {"scenario": name})
    monkeypatch.setattr(faults, "summary", lambda found: "")
    for folder, name in (("a", "../one"), ("b", "../one"), ("c", "two")):
        (tmp_path / folder).mkdir()
        text = f"name = '{name}'\nshares = {{ a = 0.5, b = 0.5 }}\ndefault_mbit = 1"
        (tmp_path / folder / "mine.toml").write_text(text)
    files = [str(tmp_path / folder / "mine.toml") for folder in "abc"]
    output = tmp_path / "out"
    run = ["bench", "--faults", "-o", str(output)]
    refused = CliRunner().invoke(main, [*run, *files])
    assert refused.exit_code == 2
    assert "Two scenarios are called" in refused.output
    done = CliRunner().invoke(main, [*run, *files[1:]])
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in output.iterdir()) == ["faults-..-one.json", "faults-two.json"]
    before = (output / "faults-two.json").read_bytes()
    monkeypatch.setattr(
        records, "replace_file", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    full = CliRunner().invoke(main, [*run, *files[2:]])
    assert full.exit_code == 2
    (kept,) = re.findall(r"two.json cannot be written: No space left .* is kept in (\S+)\. To fix", full.output)
    assert Path(kept).read_bytes() == before == (output / "faults-two.json").read_bytes()


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_an_interruption_is_said_and_leaves_at_once(tmp_path, monkeypatch, error, code):
    from hwaware.bench.benchmark import Benchmark
    from hwaware.cli import bench

    left = []

    def interrupted(self, places):
        raise error

    monkeypatch.setattr(Benchmark, "run", interrupted)
    monkeypatch.setattr(bench, "_leave_at_once", left.append)
    outcome = CliRunner().invoke(main, ["bench", "two-racks", "-o", str(tmp_path)])
    assert (outcome.exit_code, left) == (code, [code])
    assert f"hwaware bench --report-only -o {tmp_path}" in outcome.output


@pytest.mark.parametrize(("bound", "expected"), [(None, 1.7), (1.6, 1.7), (1.75, 1.75), (2.3, 1.7)])
def test_a_bound_covers_no_figure_of_a_speed_up(bound, expected):
    from hwaware.report.bench_pictures import draw_speed_ups

    row = {"median": 1.6, "low": 1.5, "high": 1.7, "outcome": "faster", "most": bound}
    figure = draw_speed_ups([{"scenario": "a", "model": "b", "speed_ups": {"alpa": row}}])
    [words] = [one for one in figure.axes[0].texts if one.get_text() == "1.60"]
    assert words.xy[0] == expected


@pytest.mark.parametrize(
    ("names", "expected"), [(("hwaware", "best-measured"), ["over best measured"]), (("hwaware",), None)]
)
def test_every_baseline_has_its_bar_and_a_picture_has_some(recorded, names, expected):
    from hwaware.bench.summary import summary

    mappings = tuple(msgspec.structs.replace(one, name=name) for name, one in zip(names, recorded.mappings))
    figures = [summary(msgspec.structs.replace(recorded, mappings=mappings, enumerated=(), unmeasured=()))]
    assert bool(bench_pictures.compared_baselines(figures)) == (expected is not None)
    if expected is not None:
        (axis,) = bench_pictures.draw_speed_ups(figures).axes
        assert [label.get_text() for label in axis.get_legend().get_texts()] == expected
        assert len(axis.patches) == 1


def test_a_result_of_one_mapping_has_no_empty_picture(recorded, tmp_path):
    bare = tuple(msgspec.structs.replace(one, timeline=None) for one in recorded.mappings[:1])
    msgspec.structs.replace(recorded, mappings=bare, profile=None, enumerated=(), unmeasured=()).save(
        tmp_path / "a.json"
    )
    assert CliRunner().invoke(main, ["bench", "--report-only", "-o", str(tmp_path)]).exit_code == 0
    names = [path.name for path in tmp_path.glob("*.png")]
    assert "predictions.png" in names
    assert "speed-ups.png" not in names


def test_two_results_of_one_scenario_and_model_keep_their_pictures(recorded, tmp_path):
    plain = msgspec.structs.replace(recorded, profile=None)
    for name in ("new", "old"):
        plain.save(tmp_path / f"{name}.json")
    assert CliRunner().invoke(main, ["bench", "--report-only", "-o", str(tmp_path)]).exit_code == 0
    assert len(list(tmp_path.glob("*-steps.png"))) == 2
    ids = re.findall(r'<figure id="([^"]+)"', (tmp_path / "index.html").read_text())
    assert len(ids) == len(set(ids))


def test_every_mapping_is_drawn_beside_what_its_prediction_is_of(recorded):
    slow, fast = (
        msgspec.structs.replace(one, step_s=(s + 9.0,) * count, pipeline_s=(s,) * count, reference_s=())
        for one, s, count in zip(recorded.mappings, (5.0, 2.0), (3, 6))
    )
    (axis,) = bench_pictures.draw_enumerated(msgspec.structs.replace(recorded, enumerated=(slow, fast))).axes
    assert [bar.get_height() for bar in axis.patches] == [2.0, 5.0]
    assert "measured, median of 3 steps or more" in [label.get_text() for label in axis.get_legend().get_texts()]


def test_files_that_are_no_results_are_passed_over(recorded, tmp_path):
    from hwaware.bench.benchmark import load_results

    recorded.save(tmp_path / "a.json")
    (tmp_path / "notes.json").write_text("[1, 2]")
    assert [path.name for path, _ in load_results(tmp_path)] == ["a.json"]


def test_missing_picture_libraries_are_named_before_measuring(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("hwaware.bench.benchmark.Benchmark.run", lambda *_: pytest.fail("nothing may be measured"))
    outcome = CliRunner().invoke(main, ["bench", "two-racks", "-o", str(tmp_path)])
    assert outcome.exit_code == 2
    assert "matplotlib is not installed" in outcome.stderr
    assert "To fix: pip install matplotlib" in outcome.stderr
