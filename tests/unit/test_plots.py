"""Pictures: drawn from records alone, refused with a message where there is none."""

import struct

import msgspec
import pytest
from builders import chain, cluster, links, plan

from hwaware.bench.summary import summary
from hwaware.errors import UnusableInputError
from hwaware.report import canvas
from hwaware.report.bench_tables import describe_stages, mappings_table
from hwaware.report.plots import draw_map, drawings, plot, plot_comparison
from hwaware.result import BenchmarkResult, Mapping

pytest.importorskip("matplotlib")
PROFILE = cluster("abc", [*links(("ab",), 1e8, 1e-4), *links(("bc",), 2e8, 1e-4)], seconds=0.01)
PLAN = plan((0, 2, "b:0"), (3, 3, "a:0"))


def mapping(name, step_s):
    return Mapping(name=name, plan=PLAN, predicted_step_s=1.0, step_s=step_s, reference_s=(0.1, 0.1), loss=(2.0, 1.0))


RESULT = BenchmarkResult(
    environment={"profile_reference_s": 0.05},
    scenario="s",
    model="m",
    num_microbatches=4,
    repeats=2,
    mappings=(mapping("hwaware", (1.0, 1.2)), mapping("alpa-given", (2.0, 2.2))),
    single_device_loss=(2.0, 1.0),
)


def size_of_png(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_a_comparison_is_drawn(tmp_path):
    plot_comparison(RESULT, PROFILE, RESULT.mappings, tmp_path / "result.png")
    width, height = size_of_png(tmp_path / "result.png")
    assert width > height > 300


def test_steps_of_milliseconds_are_shown_in_milliseconds():
    fast = [msgspec.structs.replace(one, step_s=(0.0012, 0.0014), predicted_step_s=0.001) for one in RESULT.mappings]
    result = msgspec.structs.replace(RESULT, mappings=tuple(fast))
    axis = drawings(result)["result"]().axes[0]
    assert axis.get_ylabel() == "Step time [ms]"
    assert axis.get_title() == "m on s (median of medians 1.300 ms)"
    assert "1.30" in [one.get_text() for one in axis.texts]
    table = mappings_table(result, summary(result))
    shown = {str(column.header): [*map(str, column.cells)] for column in table.columns}
    assert shown["measured [ms]"] == ["1.300", "1.300"]
    assert shown["95 % interval"] == ["1.200-1.400"] * 2


def test_a_map_has_the_links_over_which_replicas_exchange():
    """Not those between devices that are neighbours in the plan's text: the way inside a host is not used here."""
    profile = cluster({"a": 2, "b": 2}, [*links(("aa", "bb"), 25e6), *links(("ab", "ba"), 2e8)])
    figure, axis = canvas.pyplot().subplots()
    draw_map(axis, profile, chain(["a:0", "b:0"], ["b:1", "a:1"]))
    labels = [text.get_text() for text in axis.texts if "MB/s" in text.get_text()]
    canvas.pyplot().close(figure)
    assert labels == ["200.0 MB/s", "200.0 MB/s"]


def test_labels_of_crossing_links_keep_clear_of_the_crossing():
    """In the ring a, b, c, d the links a-c and b-d cross in the middle."""
    profile = cluster(dict.fromkeys("abcd", 1), links([f"{x}{y}" for x in "abcd" for y in "abcd" if x != y], 1e8))
    figure, axis = canvas.pyplot().subplots()
    draw_map(axis, profile, chain(["a:0"], ["c:0"], ["b:0"], ["d:0"]))
    middles = [text.xy for text in axis.texts if "MB/s" in text.get_text()]
    canvas.pyplot().close(figure)
    assert len(middles) == 3
    assert all(abs(x) + abs(y) > 0.15 for x, y in middles)


@pytest.mark.parametrize("record", [PROFILE, RESULT], ids=["cluster", "result"])
def test_a_record_is_drawn_as_svg_with_its_units(record, tmp_path):
    plot(record, tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text()
    assert text.startswith("<?xml")
    assert ("[MB/s]" if record is PROFILE else "Step time [s]") in text


def test_what_has_no_picture_says_so(tmp_path):
    with pytest.raises(UnusableInputError, match=r"no picture 'timeline' of this hwaware\.plan"):
        plot(PLAN, tmp_path / "plan.png", "timeline")
    with pytest.raises(UnusableInputError, match="cannot be written as a picture"):
        plot(RESULT, tmp_path / "picture.nonsense")


def test_the_summary_and_its_table_say_the_same():
    figures = summary(RESULT)
    assert figures["median_alpa"] == "alpa-given"
    assert figures["step_ratio"]["median"] == pytest.approx(1.1 / 2.1)
    assert figures["losses_agree"] is True
    row = figures["mappings"]["hwaware"]
    assert row["corrected_prediction_s"] == pytest.approx(2.0)  # the machine ran at half the profile's speed
    assert row["prediction_error"] == pytest.approx(2.0 / 1.1 - 1)
    table = mappings_table(RESULT, figures)
    assert [*map(str, table.columns[0].cells)] == ["hwaware", "alpa-given"]
    assert describe_stages(PLAN) == "b:0 0-2, a:0 3"
