"""Every picture of every record, and the page that holds them: out of the files alone, with units."""

import itertools
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from builders import chain, cluster, with_devices
from click.testing import CliRunner

import hwaware
from hwaware.adapting import LoadTrace
from hwaware.cli import main
from hwaware.errors import PlanError, RecordError, UnusableInputError
from hwaware.formatting import BYTES_PER_S, text
from hwaware.placement.sensitivity import Change, Explanation
from hwaware.report import canvas, timeline_picture
from hwaware.report.cluster_picture import draw_cluster
from hwaware.report.other_pictures import draw_sensitivity
from hwaware.report.page import save_page
from hwaware.report.plan_picture import draw_plan
from hwaware.report.plots import Context, drawings, plot
from hwaware.report.timeline_picture import draw_timeline
from hwaware.timeline import Timeline

pytest.importorskip("matplotlib")
from matplotlib.text import Text

DEMO = Path(__file__).parents[2] / "benchmarks" / "results" / "demo"
PROFILE = hwaware.ClusterProfile.load(DEMO / "cluster.json")
WORKLOAD = hwaware.Workload.load(DEMO / "workload.json")
PLAN = hwaware.Plan.load(DEMO / "plan.json")
RESULT = hwaware.BenchmarkResult.load(DEMO / "result.json")
TIMELINE = hwaware.simulate(PLAN, WORKLOAD, PROFILE)
CONTEXT = Context(PROFILE, WORKLOAD)
ALL = {
    **{name: draw for record in (PROFILE, WORKLOAD, RESULT) for name, draw in drawings(record).items()},
    **drawings(PLAN, CONTEXT),
}
# What the pictures show is worked out from the records here: a demo that is recorded anew has other figures.
STEP_S = f"{PLAN.predicted_step_s:.3f} s"
FASTEST_MB_PER_S = max(link.bandwidth_bytes_per_s for link in PROFILE.links) / 1e6
MEMORY = [
    stage.memory_bytes / PROFILE.device(stage.devices[0]).memory_bytes
    for stage in hwaware.evaluate(PLAN, WORKLOAD, PROFILE).stages
]
FIRST_PAIR = tuple(PROFILE.device(stage.devices[0]).host for stage in PLAN.stages[:2])
SENT_BYTES_PER_S = next(x.bandwidth_bytes_per_s for x in PROFILE.links if (x.source, x.target) == FIRST_PAIR)
LAYERS = "-".join(str(layer) for layer in sorted(set(PLAN.stages[0].layers)))
# Words that each picture must show, units among them.
WORDS = {
    "cluster": ("Link bandwidth [MB/s]", "Link latency [µs]", "GFLOP/s", "h3:0", f"{FASTEST_MB_PER_S:.1f}"),
    "workload": ("[GFLOP]", "[MB]", "activations kept"),
    "plan": (
        *("stage 0", f"on {FIRST_PAIR[0]}", LAYERS, "Memory and capacity", "[GB]"),
        *(f"({100 * part:.0f}%)" for part in MEMORY),
        f"predicted step {STEP_S}",
    ),
    "map": (text(SENT_BYTES_PER_S, BYTES_PER_S), f"layers {LAYERS}" if "-" in LAYERS else f"layer {LAYERS}"),
    "timeline": (
        f"Simulated step: {TIMELINE.step_s:.3f} s",
        *(f"busy {100 * TIMELINE.busy_s(k) / TIMELINE.step_s:.0f}%" for k in range(len(PLAN.stages))),
        *("[s]", "gradients sent"),
    ),
    "sensitivity": (f"the step takes {STEP_S}", " limits it", "[ms]", "twice as fast"),
    "result": ("Step time [s]", "predicted", *(f"{mapping.median_step_s:.2f}" for mapping in RESULT.mappings)),
}


@pytest.mark.parametrize("name", ALL)
def test_a_picture_shows_what_the_file_says(name):
    svg = canvas.svg_text(ALL[name](), name)
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    missing = [word for word in WORDS[name] if word not in svg]
    assert missing == []


def test_ids_do_not_depend_on_the_last_bits_of_coordinates():
    one, other = (
        f'<g clip-path="url(#{i})"/><clipPath id="{i}"/><g id="{j}"/>'
        for i, j in (("pe7e939d335", "m7eb3498445"), ("p6d1cec12b3", "m00000000aa"))
    )
    assert (
        canvas._numbered_ids(one)
        == canvas._numbered_ids(other)
        == one.replace("pe7e939d335", "n0").replace("m7eb3498445", "n1")
    )


def test_pictures_are_the_same_every_time():
    assert canvas.svg_text(ALL["plan"](), "p") == canvas.svg_text(ALL["plan"](), "p")


def test_a_plan_alone_is_drawn_from_its_file():
    svg = canvas.svg_text(drawings(PLAN)["plan"](), "plan")
    assert "forward + backward" in svg
    assert f"{PLAN.stages[0].memory_bytes / 1e6:.1f}" in svg  # MB of the first stage
    bare = msgspec.structs.replace(
        PLAN, stages=tuple(hwaware.plans.Stage(layers=s.layers, replicas=s.replicas) for s in PLAN.stages)
    )
    assert "give cluster and workload" in canvas.svg_text(drawings(bare)["plan"](), "bare")


def test_devices_that_save_more_than_a_stage_waits_are_drawn_the_right_way_round():
    (stage,) = hwaware.Plan.from_json(PLAN.to_json()).stages[:1]
    saving = hwaware.plans.Stage(layers=stage.layers, replicas=stage.replicas, compute_s=1.0, receive_s=-3.0)
    figure = draw_plan(msgspec.structs.replace(PLAN, stages=(saving,)))
    low, high = figure.axes[1].get_xlim()
    assert low == 0 < high
    assert "-2.000" in [one.get_text() for one in figure.axes[1].texts]


def test_matrices_of_many_devices_have_some_of_them():
    figure = draw_cluster(hwaware.ClusterProfile.uniform(hosts=1201))
    shown = [axis.images[0].get_array().shape for axis in figure.axes if axis.images]
    assert shown == [(401, 401), (401, 401)]
    assert figure.axes[1].get_title() == "Link bandwidth of 401 devices [GB/s]"


def test_memory_over_capacity_is_red():
    small = with_devices(PROFILE, memory_bytes=100_000_000)
    svg = canvas.svg_text(drawings(PLAN, Context(small, WORKLOAD))["plan"](), "plan")
    fullest = max(hwaware.evaluate(PLAN, WORKLOAD, small).stages, key=lambda stage: stage.memory_bytes)
    assert fullest.memory_bytes > 100_000_000
    assert f"({fullest.memory_bytes / 1e6:.0f}%)" in svg
    assert "#e45756" in svg


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("flops", [0.0, 1e9])
def test_layers_without_bytes_or_work_are_drawn_from_zero(flops):
    profile = hwaware.ClusterProfile.uniform(hosts=2, flops_per_s=1e10)
    workload = hwaware.Workload.uniform(layers=2, forward_flops=flops, backward_flops=flops)
    plan = hwaware.plan(workload, profile, num_microbatches=2)
    assert [stage.memory_bytes for stage in plan.stages] == [0.0] * len(plan.stages)
    drawn = [draw_plan(plan), draw_timeline(hwaware.simulate(plan, workload, profile))]
    assert all(axis.get_xlim()[0] >= -0.5 for figure in drawn for axis in figure.axes)  # layers are half a unit wide


def test_the_edges_of_many_short_bars_do_not_hide_them():
    plan = hwaware.plan(WORKLOAD, PROFILE, num_microbatches=512)
    figure = draw_timeline(hwaware.simulate(plan, WORKLOAD, PROFILE))
    canvas.pyplot().switch_backend("agg")
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3].astype(int)
    colour = np.array([int(timeline_picture._COLOURS["forward"][place : place + 2], 16) for place in (1, 3, 5)])
    bars = pixels[:, : int(0.8 * pixels.shape[1])]  # without the legend
    assert (np.abs(bars - colour).max(axis=2) < 40).sum() > 3000


@pytest.mark.filterwarnings("error")
def test_changes_of_a_step_that_takes_no_time_are_drawn():
    change = Change(what="stage 0", step_s=0.0, saves_s=0.0)
    figure = draw_sensitivity(Explanation(step_s=0.0, binds="stage 0", stages=(change,), links=(), full=()))
    assert any("(0.0%)" in one.get_text() for one in figure.axes[0].texts)


def test_a_picture_that_needs_more_says_what():
    with pytest.raises(UnusableInputError, match=r"There is no picture 'timeline' .* only plan\. To fix: .*--workload"):
        plot(PLAN, "never.png", "timeline")
    with pytest.raises(UnusableInputError, match=r"There is no picture of this hwaware.load\. To fix"):
        plot(LoadTrace(steps=1, changes=(), noise=0.0), "never.png")
    with pytest.raises(UnusableInputError, match="it has no stages"):
        plot(hwaware.Plan(num_microbatches=1, stages=(), status="infeasible"), "never.png")


def test_colour_bars_over_a_wide_range_have_plain_numbers():
    first, *others = PROFILE.links
    slow = msgspec.structs.replace(first, bandwidth_bytes_per_s=first.bandwidth_bytes_per_s / 1000)
    wide = msgspec.structs.replace(PROFILE, links=(slow, *others))
    assert "mathdefault" not in canvas.svg_text(drawings(wide)["cluster"](), "wide")


def test_long_names_of_hosts_are_whole_and_apart():
    renamed = re.sub(r'"(h\d)(:0)?"', r'"ip-10-0-0-\1.ec2.internal\2"', PROFILE.to_json().decode())
    profile = hwaware.ClusterProfile.from_json(renamed)
    plan = hwaware.plan(WORKLOAD, profile, num_microbatches=8)
    for name, draw in {**drawings(profile), **drawings(plan, Context(profile, WORKLOAD))}.items():
        figure = draw()
        figure.draw_without_rendering()
        # Figures also hold numbers beyond the ends of an axis, which nobody sees.
        texts = [one for one in figure.findobj(Text) if one.get_visible() and re.search("[a-z]{2}", one.get_text())]
        extents = [one.get_window_extent() for one in texts]
        for one, extent in zip(texts, extents):
            assert figure.bbox.x0 <= extent.x0 < extent.x1 <= figure.bbox.x1, (name, one)
            if name == "map" and one.get_color() == "white":  # it is in a circle
                assert extent.width < 73 / 72 * figure.dpi
        hosts = [extent for one, extent in zip(texts, extents) if one.get_text().endswith("ec2.internal:0")]
        assert not any(one.overlaps(other) for one, other in itertools.combinations(hosts, 2)), name
        canvas.pyplot().close(figure)


def rows_of(figure):
    """The names beside the rows of each panel that has some."""
    figure.draw_without_rendering()
    panels = [axis for axis in figure.axes if axis.get_visible() and axis.yaxis.get_visible()]
    names = [[one for one in axis.get_yticklabels() if re.search("[a-z]{2}", one.get_text())] for axis in panels]
    return [(axis, found) for axis, found in zip(panels, names) if found]


@pytest.mark.parametrize("length", [100, 1000])
def test_very_long_names_leave_room_for_what_is_drawn(length):
    longer = {host: f"{host}-{'long' * (length // 4 - 2)}" for host in ("h0", "h1", "h2", "h3")}
    text = re.sub(r'"(h\d)(:0)?"', lambda found: f'"{longer[found[1]]}{found[2] or ""}"', PROFILE.to_json().decode())
    profile = hwaware.ClusterProfile.from_json(text)
    layers = tuple(msgspec.structs.replace(one, name=f"{one.name}{'layer' * 20}") for one in WORKLOAD.layers)
    workload = msgspec.structs.replace(WORKLOAD, layers=layers)
    plan = hwaware.plan(workload, profile, num_microbatches=8)
    pictures = {**drawings(profile), **drawings(workload), **drawings(plan, Context(profile, workload))}
    for name in ("cluster", "workload", "plan", "timeline", "sensitivity"):
        figure = pictures[name]()
        for axis, names in rows_of(figure):
            assert axis.get_window_extent().width > 1.5 * figure.dpi, name
            assert all(one.get_window_extent().x0 >= figure.bbox.x0 for one in names), (name, names)
        canvas.pyplot().close(figure)


def test_the_names_of_many_devices_and_layers_are_apart():
    many = cluster({f"host{number}": 4 for number in range(30)})
    layers = tuple(msgspec.structs.replace(WORKLOAD.layers[0], name=f"layer {number}") for number in range(900))
    deep = msgspec.structs.replace(WORKLOAD, layers=layers, shared=())
    for record in (many, deep):
        (figure,) = (draw() for draw in drawings(record).values())
        for _, names in rows_of(figure)[:1]:
            extents = [one.get_window_extent() for one in names]
            assert len(extents) > 10
            assert not any(one.overlaps(other) for one, other in zip(extents, extents[1:]))
        assert figure.get_figheight() <= canvas.TALLEST
        canvas.pyplot().close(figure)


@pytest.mark.parametrize("devices", [8, 12, 40, 100])
def test_the_circles_of_a_map_are_apart(devices):
    names = [f"h{number}" for number in range(devices)]
    profile = cluster(dict.fromkeys(names, 1))
    plan = chain([f"{names[0]}:0"], [f"{names[1]}:0"])
    figure = drawings(plan, Context(profile))["map"]()
    figure.draw_without_rendering()
    (axis,) = figure.axes
    middles = [axis.transData.transform(one.get_offsets()[0]) for one in axis.collections]
    radius = math.sqrt(axis.collections[0].get_sizes()[0]) / 2 * figure.dpi / 72
    gaps = [math.dist(one, other) for one, other in zip(middles, [*middles[1:], middles[0]])]
    assert len(middles) == devices
    assert min(gaps) > 2 * radius
    canvas.pyplot().close(figure)


@pytest.mark.parametrize("name", ["noending", "none.tar"])
def test_a_picture_goes_only_where_its_name_says(name, tmp_path):
    with pytest.raises(UnusableInputError, match=r"cannot be written as a picture: .* end the name in \.png or \.svg"):
        plot(PROFILE, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_one_device_has_no_links():
    alone = PROFILE.without(("h1", "h2", "h3"))
    assert "Link" not in canvas.svg_text(drawings(alone)["cluster"](), "alone")


def test_a_trace_becomes_its_timeline_again():
    recorded = msgspec.structs.replace(TIMELINE, recorded=True)
    again = Timeline.from_trace(json.loads(json.dumps(recorded.trace())))
    assert again.devices == TIMELINE.devices
    assert (again.title, TIMELINE.title) == ("Recorded step", "Simulated step")
    assert [(e.kind, e.stage, e.microbatch) for e in again.events] == [
        (e.kind, e.stage, e.microbatch) for e in TIMELINE.events
    ]
    assert again.step_s == TIMELINE.step_s
    assert again.busy_s(0) == pytest.approx(TIMELINE.busy_s(0))


@pytest.mark.parametrize("document", [{"traceEvents": []}, {"traceEvents": [{"ph": "X"}], "otherData": {}}])
def test_a_foreign_trace_is_refused(document):
    with pytest.raises(RecordError, match="is not a trace that hwaware wrote"):
        Timeline.from_trace(document, "trace.json")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "plan.html"
    save_page(PLAN, path, "plan <1>.json", CONTEXT)
    return path


def test_the_page_holds_all_tables_and_pictures(page):
    text = page.read_text()
    for name in ("plan", "map", "timeline", "sensitivity", "cluster", "workload"):
        assert text.count(f'<figure id="{name}">') == 1
    assert text.count("<table>") == 6  # stages, hosts, devices, two link matrices, layers
    assert "<h1>plan &lt;1&gt;.json: hwaware.plan</h1>" in text
    identifiers = re.findall(r'\bid="([^"]+)"', text)
    assert len(identifiers) == len(set(identifiers))


def test_the_page_says_why_a_picture_is_missing(tmp_path):
    many = msgspec.structs.replace(PLAN, num_microbatches=10**6)
    save_page(many, tmp_path / "page.html", "plan.json", CONTEXT)
    text = (tmp_path / "page.html").read_text()
    assert re.search(r'<figure id="timeline"><pre>.*the simulator runs at most 300000\..*</pre>', text)
    assert '<figure id="sensitivity"><svg' in text.replace("\n", "")


def test_the_page_of_a_profile_names_its_doubts(tmp_path):
    from hwaware.cluster import Flag

    doubt = Flag(kind="slow", subjects=("a", "b"), what="41 % of <others>.", only=("a+b",))
    save_page(msgspec.structs.replace(cluster("ab"), flags=(doubt,)), tmp_path / "page.html", "cluster.json")
    text = (tmp_path / "page.html").read_text()
    assert "slow: a -&gt; b: 41 % of &lt;others&gt;." in text
    assert "hwaware profile --resume cluster.json --only a+b -o cluster.json" in text


def test_the_page_needs_nothing_else(page):
    text = page.read_text()
    assert "<script" not in text
    assert "default-src 'none'" in text
    # Names of XML's languages look like addresses; nobody fetches them.
    outside = re.findall(r"""(?:src|href)=["'](?!#|data:)[^"']+|url\((?!["']?#)[^)]+|@import""", text)
    assert outside == []


def browser():
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium is installed: the page was not opened in a browser")
    return found


def headless(program, folder, page, *arguments):
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile", *arguments]
    return subprocess.run(
        [*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=True, env={"HOME": str(folder)}
    )


def test_the_page_opens_in_a_browser(page, tmp_path):
    program = browser()
    seen = headless(program, tmp_path, page, "--dump-dom").stdout
    assert seen.count("<figure") == 6
    assert "parsererror" not in seen
    picture = tmp_path / "page.png"
    headless(program, tmp_path, page, f"--screenshot={picture}", "--window-size=1300,2400")
    pixels = canvas.pyplot().imread(str(picture))
    # Something is drawn from the top to the bottom: no band of 400 rows is white.
    assert all(float(pixels[row : row + 400].min()) < 0.5 for row in range(0, 2400, 400))


def test_show_writes_pictures_and_pages(tmp_path):
    arguments = ["show", str(DEMO / "plan.json"), "--cluster", str(DEMO / "cluster.json")]
    arguments += ["--workload", str(DEMO / "workload.json"), "--picture", "sensitivity"]
    arguments += ["--plot", str(tmp_path / "what.svg"), "--html", str(tmp_path / "all.html"), "--json"]
    outcome = CliRunner().invoke(main, arguments)
    assert outcome.exit_code == 0, outcome.output
    assert json.loads(outcome.stdout)["schema"] == "hwaware.plan"
    assert " limits it" in (tmp_path / "what.svg").read_text()
    assert (tmp_path / "all.html").stat().st_size > 50_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cluster", str(DEMO / "cluster.json"), "--plot", "x.png"], "belong to a plan"),
        (["--cluster", str(DEMO / "cluster.json")], "there is neither --plot nor --html"),
        (["--picture", "cluster"], "has no file to go to"),
        (["--html", str(DEMO / "plan.json" / "x.html")], "plan.json is not a folder"),
    ],
)
def test_options_that_do_not_belong_together(arguments, words):
    outcome = CliRunner().invoke(main, ["show", str(DEMO / "workload.json"), *arguments])
    assert outcome.exit_code == 2
    assert words in outcome.stderr


def test_a_prediction_above_all_steps_is_drawn_whole():
    from matplotlib.figure import Figure

    from hwaware.report.plots import _draw_steps, predictions_s

    slow = tuple(msgspec.structs.replace(m, predicted_step_s=3 * m.predicted_step_s) for m in RESULT.mappings)
    result = msgspec.structs.replace(RESULT, mappings=slow)
    axis = Figure().add_subplot()
    _draw_steps(axis, result)
    assert axis.get_ylim()[1] > max(predictions_s(result).values()) > max(max(m.step_s) for m in slow)


def test_a_plan_for_another_cluster_is_refused():
    other = msgspec.structs.replace(
        PROFILE, devices=tuple(one for one in PROFILE.devices if one.id not in PLAN.stages[0].devices)
    )
    with pytest.raises(PlanError, match=r"which the cluster does not have.*To fix: "):
        drawings(PLAN, Context(other, WORKLOAD))
