"""Tables fit any width without losing a number: headers fold, then names, and at last the table becomes a list."""

import html
import io

import pytest
from builders import seeds
from rich.console import Console

from hwaware.report.console import make_console
from hwaware.report.fitting import build_table
from hwaware.report.page import table_html

NAMES = [("device", ["alpha beta", "gamma"]), ("kind [x]", ["[a]", "b"])]
NUMBERS = [("throughput [GFLOP/s]", ["12345.6", "7.8"]), ("a very long header", ["1.000", "2.000"])]


def printed(width):
    stream = io.StringIO()
    Console(file=stream, width=width).print(build_table("Title", NAMES, NUMBERS, "Caption"))
    return stream.getvalue()


@pytest.mark.parametrize("width", seeds(24, 90))
def test_nothing_is_lost_or_too_wide(width):
    text = printed(width)
    assert max(map(len, text.splitlines())) <= width
    for number in ("12345.6", "7.8", "1.000", "2.000"):
        assert number in text
    assert "…" not in text
    assert "[a]" in text


@pytest.mark.parametrize("width", [20, 80])
@pytest.mark.parametrize("name", [r"\[b]", "[/]", "a:key:b", "主机一"])
def test_names_stay_as_they_are(name, width):
    stream = io.StringIO()
    table = build_table(name, [(name, [name])], [(f"{name} 1", ["12345"])], name)
    Console(file=stream, width=width).print(table)
    assert stream.getvalue().count(name) == 5
    assert table_html(table).count(html.escape(name)) == 5


def test_lines_beside_tables_stay_as_they_are(capsys):
    make_console().print("[b] :key: 12")
    assert capsys.readouterr().out == "[b] :key: 12\n"


def test_narrow_tables_are_lists_and_wide_ones_are_not():
    assert "device: alpha beta\n  kind [x]: [a]\n" in printed(26)
    assert "throughput [GFLOP/s]  a very long header" in printed(80)


def test_headers_fold_before_numbers_do():
    assert "12345.6" in printed(40)
    assert "device: alpha beta" not in printed(40)
