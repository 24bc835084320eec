"""Profile files that somebody broke, by accident or on purpose: each ends in one clear message, and quickly."""

from __future__ import annotations

import copy
import json
import os
import pickle
import time

import pytest
from builders import ALL_CASES, examples
from click.testing import CliRunner
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from hwaware.cli import main
from hwaware.cluster import ClusterProfile, LinkTable, PartialProfile
from hwaware.errors import RecordError
from hwaware.profiler.fingerprint import fingerprint
from hwaware.profiler.partial import merge
from hwaware.report.flags import flag_lines


def document(hosts=3):
    names = [f"h{i}" for i in range(hosts)]
    curve = {"float32": [{"flops": 1e6, "seconds": 1e-4}, {"flops": 1e9, "seconds": 1e-2}]}
    evidence = {"bytes_per_s": {"cv": 0.01}, "tiny_s": [1e-4]}
    return {
        "schema": "hwaware.cluster",
        "schema_version": 1,
        "hosts": [{"name": name, "address": "10.0.0.1"} for name in names],
        "devices": [
            {
                "id": f"{name}:0", "host": name, "kind": "cpu", "memory_bytes": 1 << 30, "throughput": curve,
                "memory_bandwidth_bytes_per_s": 1e10, "samples": {"products": {"float32": []}},
            }
            for name in names
        ],
        "links": [
            {
                "source": a, "target": b, "latency_s": 1e-4, "bandwidth_bytes_per_s": 1e8, "evidence": evidence,
                "samples": [{"bytes": 1024, "seconds": 1e-4}],
            }
            for a in names for b in names if a != b
        ],
        "shared_cards": [
            {"host": "h0", "devices": ["h0:0"], "send_bytes_per_s": 1e8, "receive_bytes_per_s": 1e8,
             "concurrent": [{"k": 1, "bytes_per_s": 1e8}]}
        ],
        "collectives": [
            {"op": "all-reduce", "devices": ["h0:0", "h1:0"], "dtype": "float32",
             "points": [{"bytes": 1024, "seconds": 1e-3}]}
        ],
        "flags": [{"kind": "slow", "subjects": ["h0", "h1"], "what": "slow", "only": ["h0+h1"]}],
        "environment": {"time": "2026-11-20T00:00:00Z"},
    }  # fmt: skip


def places(value, path=()):
    """Every place in the document, the top left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def replaced(value, path, new):
    changed = copy.deepcopy(value)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return changed


PLACES = list(places(document()))
NASTY = [
    1e308, -1e308, 1e-308, 5e-324, -1, -1e-9, 0, 10**400, -(10**30), 2**63, 2**64, "", "h0", "h0:0", "\x00", "\ud800",
    None, True, [], {}, [[]], [None], {"h0": "h0"}, "1e9", [1e308], {"float32": []}, "a" * 100_000,
]  # fmt: skip


def read(text, name="cluster.json"):
    """The profile, used as its readers use it; or the one message that refuses it."""
    try:
        profile = ClusterProfile.from_json(text, name=name)
    except RecordError as error:
        message = str(error)
        assert "To fix:" in message
        assert name in message
        assert len(message) < 120_000
        return message
    table = LinkTable(profile)
    for device in profile.devices:
        for points in device.throughput.values():
            assert all(0 < point.flops / point.seconds < float("inf") for point in points)
        for other in profile.devices:
            link = table.between(device.id, other.id) if device.id != other.id else None
            assert link is None or 0 <= link.latency_s + 1e9 / link.bandwidth_bytes_per_s < float("inf")
    assert ClusterProfile.from_json(profile.to_json()) == profile
    return profile


@pytest.mark.parametrize(("number", "value"), list(enumerate(NASTY)), ids=lambda value: repr(value)[:20])
def test_a_nasty_value_at_any_place(number, value):
    for path in PLACES if ALL_CASES else PLACES[number % 3 :: 3]:
        read(json.dumps(replaced(document(), path, value)))


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e", "0x1", "'a'", "1_000"])
def test_numbers_that_json_does_not_have(text):
    for path in [("devices", 0, "memory_bytes"), ("links", 0, "latency_s"), ("links", 0, "samples", 0, "seconds")]:
        broken = json.dumps(replaced(document(), path, "HERE")).replace('"HERE"', text)
        assert isinstance(read(broken), str)


@pytest.mark.parametrize(("path", "value"), [
    (("devices", 0, "throughput", "float32", 0, "flops"), 1e308),
    (("devices", 0, "throughput", "float32", 0, "seconds"), 1e308),
    (("devices", 0, "throughput", "float32", 0, "seconds"), 1e-308),
    (("devices", 0, "memory_bytes"), 10**400),
    (("devices", 0, "memory_bytes"), -1),
    (("devices", 0, "memory_bandwidth_bytes_per_s"), 1e308),
    (("links", 0, "bandwidth_bytes_per_s"), 1e308),
    (("links", 0, "latency_s"), 1e308),
    (("links", 0, "samples", 0, "bytes"), 1e308),
    (("links", 0, "samples", 0, "seconds"), -1.0),
    (("shared_cards", 0, "send_bytes_per_s"), 1e308),
    (("shared_cards", 0, "concurrent", 0, "k"), -1),
    (("collectives", 0, "points", 0, "seconds"), 1e308),
    (("hosts", 1, "name"), "h0"),
    (("hosts", 1, "name"), "h0:0"),
    (("devices", 0, "host"), "h0:0"),
    (("devices", 0, "host"), "h1:0"),
    (("devices", 0, "id"), "h1"),
    (("links", 0, "target"), "h0:0"),
])  # fmt: skip
def test_what_no_cluster_has_is_refused(path, value):
    assert isinstance(read(json.dumps(replaced(document(), path, value))), str)


def test_names_that_run_in_a_circle():
    """Hosts that are named like devices of each other."""
    cyclic = document(2)
    cyclic["hosts"] = [{"name": "a"}, {"name": "b"}]
    cyclic["devices"][0].update(id="b", host="a")
    cyclic["devices"][1].update(id="a", host="b")
    assert "occurs more than once" in read(json.dumps(cyclic))


@examples(300, every=10, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_json_at_any_place(data):
    nested = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )
    changed = document()
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(places(changed)) or [("schema",)]))
        changed = replaced(changed, path, data.draw(nested))
    read(json.dumps(changed))


@examples(300)
@given(st.data())
def test_any_change_of_bytes(data):
    original = json.dumps(document(2)).encode()
    place = data.draw(st.integers(0, len(original)))
    changed = original[:place] + data.draw(st.binary(max_size=10)) + original[place + data.draw(st.integers(0, 10)) :]
    read(changed)


@examples(100)
@given(st.binary(max_size=200))
def test_any_bytes(data):
    read(data)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[" * 1000 + "]" * 1000, "", "null", "[]", '"x"'])
def test_deep_and_empty_documents(text):
    assert isinstance(read(text), str)


def big(links):
    names = [f"h{i}" for i in range(320)]
    whole = document(1)
    whole["hosts"] = [{"name": name} for name in names]
    whole["devices"] = [{**whole["devices"][0], "id": f"{name}:0", "host": name} for name in names]
    whole["collectives"] = []
    pairs = ((a, b) for a in names for b in names if a != b)
    whole["links"] = [{"source": a, "target": b, "latency_s": 1e-4, "bandwidth_bytes_per_s": 1e8} for a, b in pairs][
        :links
    ]
    return whole


def test_a_hundred_thousand_links_are_read_in_seconds(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(big(100_000)))
    start_s = time.process_time()
    profile = ClusterProfile.load(path)
    assert time.process_time() - start_s < 10
    assert len(profile.links) == 100_000
    assert LinkTable(profile).between("h0:0", "h5:0") is not None


def test_a_hundred_thousand_copies_of_one_link_are_one_message():
    whole = big(1)
    whole["links"] *= 100_000
    message = read(json.dumps(whole))
    assert "occurs more than once" in message
    assert len(message) < 1000


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("command", [
    ["show", "{}"], ["plan", "{}", "{}", "-o", "plan.json", "--microbatches", "4"],
    ["export", "alpa-db", "{}", "-o", "x"],
    ["profile", "--resume", "{}", "-o", "cluster.json", "--address", "local"],
])  # fmt: skip
def test_a_pickle_in_place_of_a_profile_does_not_run(command, tmp_path):
    ran, path = tmp_path / "ran", tmp_path / "cluster.json"
    path.write_bytes(pickle.dumps(Runs(str(ran))))
    result = CliRunner().invoke(main, [word.format(path) for word in command])
    assert result.exit_code == 2
    assert "To fix:" in result.stderr
    assert "Traceback" not in result.stderr
    assert not ran.exists()


def test_what_was_measured_is_not_lost_to_a_broken_resume(tmp_path):
    """The output keeps what it holds where the file to resume is broken."""
    kept, broken = tmp_path / "cluster.json", tmp_path / "broken.json"
    kept.write_text(json.dumps(document()))
    broken.write_text(json.dumps(document())[:-100])
    before = kept.read_bytes()
    line = ["profile", "--resume", str(broken), "-o", str(kept), "--address", "local"]
    result = CliRunner().invoke(main, line)
    assert result.exit_code == 2
    assert kept.read_bytes() == before


def test_a_partial_profile_may_lack_links_but_not_lie():
    partial = {**document(), "schema": "hwaware.partial_cluster", "links": []}
    assert len(PartialProfile.from_json(json.dumps(partial)).devices) == 3
    partial["devices"][0]["memory_bytes"] = -5
    with pytest.raises(RecordError, match="memory_bytes"):
        PartialProfile.from_json(json.dumps(partial))


@examples(200, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_evidence_may_be_anything(data):
    """Files may hold anything where the profiler keeps its evidence: resuming and showing them still works."""
    nested = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["", "float32", "h0"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["products", "float32", "edge", "calls", "seconds", "reference_s", "bytes_per_s", "cv"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
    whole = document()
    whole["devices"][0]["samples"] = data.draw(nested)
    whole["links"][0]["evidence"] = data.draw(
        st.none() | st.dictionaries(st.sampled_from(["bytes_per_s", "x"]), nested)
    )
    whole["environment"] = {"hosts": data.draw(nested), "command": data.draw(nested), "earlier": data.draw(nested)}
    try:
        profile = ClusterProfile.from_json(json.dumps(whole, allow_nan=False))
    except (RecordError, ValueError):
        return
    assert merge(PartialProfile.of(profile), PartialProfile.of(profile)).devices == profile.devices
    assert set(fingerprint(profile)["devices"]) == {device.id for device in profile.devices}
    assert all(isinstance(line, str) for line in flag_lines(profile, "cluster.json"))
