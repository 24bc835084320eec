"""Scenarios: the shipped files, and what is said of bad ones."""

from pathlib import Path

import pytest

from hwaware.bench.testbed import load_scenario, shipped_names
from hwaware.bench.testbed.scenarios import parse_link, scenario_from_toml
from hwaware.errors import ScenarioError

GOOD = "shares = { a = 0.5, b = 0.25 }\ndefault_mbit = 100\n"


def scenario(text):
    return scenario_from_toml(text.encode(), "test", "test.toml")


def test_all_are_shipped_and_valid():
    assert shipped_names() == [
        "directed", "eight-small", "fast-and-slow", "five-unlike", "four-equal", "inverted",
        "one-bad-link", "slows-midway", "small-memory", "three-hosts", "two-racks", "unequal-devices",
    ]  # fmt: skip
    for name in shipped_names():
        assert load_scenario(name).name == name


def test_the_directory_for_people_is_the_same():
    checkout = Path(__file__).parents[2]
    assert sorted(path.stem for path in (checkout / "benchmarks" / "scenarios").glob("*.toml")) == shipped_names()


def test_fast_and_slow():
    found = load_scenario("fast-and-slow")
    assert found.hosts() == ("h0", "h1", "h2", "h3")
    assert [found.shares[host] for host in found.hosts()] == [0.8, 0.4, 0.4, 0.2]
    assert found.rate_mbit("h1", "h0") == found.rate_mbit("h0", "h1") == 800
    assert found.rate_mbit("h0", "h2") == 200


def test_directed_rates_hold_in_one_direction():
    found = load_scenario("directed")
    assert found.rate_mbit("h0", "h1") == 200
    assert found.rate_mbit("h1", "h0") == 800


def test_direction_wins_over_both_directions():
    found = scenario(GOOD + 'mbit = { "a->b" = 10, "b-a" = 50 }')
    assert (found.rate_mbit("a", "b"), found.rate_mbit("b", "a")) == (10, 50)


def test_devices_memory_and_later():
    assert [load_scenario("unequal-devices").devices_of(host) for host in ("h0", "h1", "h2")] == [2, 1, 1]
    assert load_scenario("small-memory").memory_bytes("h0") == 256 << 20
    assert load_scenario("inverted").memory_bytes("h0") == 2048 << 20
    later = load_scenario("slows-midway").later
    assert later.after_steps == 10
    assert later.shares == {"h1": 0.2}


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    assert load_scenario(path).name == "mine"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("shares = {}\ndefault_mbit = 1", "shares names 0 hosts"),
        ("default_mbit = 1", "shares"),
        ("shares = { a = 0 }\ndefault_mbit = 1", "shares.a is 0.0"),
        ("shares = { a = 1.5 }\ndefault_mbit = 1", "shares.a is 1.5"),
        ("shares = { a = nan }\ndefault_mbit = 1", "shares.a is nan"),
        ("shares = { a-b = 0.5 }\ndefault_mbit = 1", "host name 'a-b'"),
        ("shares = { H0 = 0.5 }\ndefault_mbit = 1", "host name 'H0' is not a lower-case letter"),
        ("shares = { a = 0.5 }\ndefault_mbit = -1", "default_mbit is -1"),
        ("shares = { a = 0.5 }\ndefault_mbit = 0.001", "default_mbit is 0.001, expected a rate from 0.01 to 1e+06"),
        ("shares = { a = 0.5 }\ndefault_mbit = inf", "default_mbit is inf"),
        (GOOD + "inside_mbit = 0", "inside_mbit is 0"),
        (GOOD + 'mbit = { "a-c" = 1 }', "names host 'c'"),
        (GOOD + 'mbit = { "a-a" = 1 }', "joins a to itself"),
        (GOOD + 'mbit = { "a-b" = -5 }', "is -5"),
        (GOOD + 'mbit = { "ab" = 5 }', "is not a link"),
        (GOOD + 'mbit = { "a-b" = 5, "b-a" = 6 }', "names one link twice"),
        (GOOD + "devices = { a = 0 }", "devices.a is 0"),
        (GOOD + "devices = { c = 1 }", "names host 'c'"),
        (GOOD + "memory_mib = { a = 0 }", "memory_mib.a is 0"),
        (GOOD + "later = { after_steps = 1, shares = { c = 0.1 } }", "names host 'c'"),
        (GOOD + "later = { after_steps = -1, shares = { a = 0.1 } }", "after_steps is -1"),
        (GOOD + "latency_ms = 3", "latency_ms"),
        ("shares = ", "not valid TOML"),
        ("shares = " + 3000 * "[", "not valid TOML"),
        (GOOD + 'name = ""', "name is empty"),
    ],
)
def test_bad_scenarios_say_what_is_wrong(text, words):
    with pytest.raises(ScenarioError) as caught:
        scenario(text)
    assert words in str(caught.value)
    assert "To fix:" in str(caught.value)
    assert caught.value.exit_code == 2


def test_unknown_scenario_lists_the_known_ones():
    with pytest.raises(ScenarioError, match=r"no scenario 'quick'.*fast-and-slow"):
        load_scenario("quick")


def test_links_are_parsed_with_blanks():
    assert parse_link("h0 -> h1") == ("h0", "->", "h1")
    assert parse_link("h0-h1") == ("h0", "-", "h1")
