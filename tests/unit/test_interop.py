"""Other programs' files: what they say arrives, and nothing in them runs."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import pickle
import resource
import sys
import tempfile
import types
from pathlib import Path

import numpy
import pytest
from builders import cluster, device, examples, with_devices
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from hwaware.cli import main
from hwaware.cluster import ClusterProfile
from hwaware.errors import RecordError, UnusableInputError
from hwaware.interop import alpa_database, export_profile, import_profile, read_database
from hwaware.interop.restricted_pickle import loads

RECORDED = Path(__file__).parents[2] / "profiling" / "recorded" / "v100_collectives.json"


class MeshProfilingResult:
    """As Alpa's: named tables, made without their defaults by unpickling."""


@pytest.fixture
def alpa_module(monkeypatch):
    """A module of Alpa's name, so that pickle writes the name that Alpa's files have."""
    module = types.ModuleType("alpa.mesh_profiling")
    module.MeshProfilingResult = MeshProfilingResult
    monkeypatch.setattr(MeshProfilingResult, "__module__", "alpa.mesh_profiling")
    monkeypatch.setitem(sys.modules, "alpa", types.ModuleType("alpa"))
    monkeypatch.setitem(sys.modules, "alpa.mesh_profiling", module)
    return module


def table(count, groups):
    """Tables as Alpa's profiler makes them: elements, NumPy's numbers, defaultdicts, what failed as infinite."""
    made = MeshProfilingResult()
    for op in ("all_gather", "all_reduce", "all_to_all", "reduce_scatter"):
        curves = collections.defaultdict(list)
        for members in groups:
            for dtype, item in (("f16", 2), ("f32", 4)):
                points = [(0, numpy.float64(1e-5))]
                points += [(1 << bit, 1e-5 + (item << bit) * len(members[0]) * 1e-10) for bit in range(8, 24)]
                curves[members, dtype] = [*points, (1 << 30, numpy.inf)]
        setattr(made, f"{op}_cost_dict", curves)
    made.dot_cost_dict = collections.defaultdict(list)
    for dtype in ("f16", "f32"):
        made.dot_cost_dict[(), dtype] = [(2 * n**3, numpy.float64(2 * n**3 / 1e13)) for n in range(0, 1024, 128)]
    made.conv_cost_dict, made.op_cost_dict = [], []
    made.available_memory_per_device = 14957700710
    return made


@pytest.fixture
def database(alpa_module, tmp_path):
    everyone = tuple(range(4))
    entries = {
        ("default", (1, 1)): table(1, []),
        ("default", (1, 2)): table(2, [((0, 1),)]),
        ("default", (2, 2)): table(4, [(everyone,), ((0, 1), (2, 3)), ((0, 2), (1, 3))]),
        ("other", (1, 1)): table(1, []),
    }
    path = tmp_path / "prof_database.pkl"
    path.write_bytes(pickle.dumps(entries))
    return path


def test_alpas_database_becomes_a_cluster(database, monkeypatch):
    monkeypatch.delitem(sys.modules, "alpa.mesh_profiling")
    meshes = read_database(database)
    assert set(meshes) == {(1, 1), (1, 2), (2, 2)}
    profile = import_profile(meshes, kind="V100")
    assert [host.name for host in profile.hosts] == ["h0", "h1"]
    assert [device.id for device in profile.devices] == ["h0:0", "h0:1", "h1:0", "h1:1"]
    device = profile.devices[0]
    assert (device.kind, device.memory_bytes) == ("V100", 14957700710)
    assert set(device.throughput) == {"float16", "float32"}
    assert device.throughput["float32"][0].flops / device.throughput["float32"][0].seconds == pytest.approx(1e13)
    everyone = tuple(d.id for d in profile.devices)
    [reduce] = [c for c in profile.collectives if (c.op, c.devices, c.dtype) == ("all-reduce", everyone, "float32")]
    assert reduce.points[1].bytes == 4 * 256, "elements became bytes"
    assert len(reduce.points) == 17, "the point that failed is left out, the empty one stays"
    assert ClusterProfile.from_json(profile.to_json()) == profile


def clusters(hosts=2, per_host=2, dtypes=("float32", "float16")):
    counts = {f"h{k}": per_host for k in range(hosts)}
    curve = device(seconds={2.0 * n**3: 2.0 * n**3 / 1e12 for n in (64, 256, 1024)}).throughput["float32"]
    profile = cluster(counts, between=(1e8, 1e-5), inside=(1e9, 1e-5), kind="x", memory_bytes=1 << 30)
    return with_devices(profile, throughput=dict.fromkeys(dtypes, curve))


def test_what_is_exported_is_what_alpa_looks_up(alpa_module, tmp_path):
    path = tmp_path / "prof_database.pkl"
    assert export_profile(clusters(), path) == [(1, 1), (1, 2), (2, 2)]
    document = pickle.loads(path.read_bytes())
    assert set(document) == {("default", shape) for shape in ((1, 1), (1, 2), (2, 2))}
    result = document["default", (2, 2)]
    assert type(result) is MeshProfilingResult
    assert result.available_memory_per_device == 1 << 30
    everyone = (tuple(range(4)),)
    points = dict(result.all_reduce_cost_dict[everyone, "f32"])
    assert 0 < points[0] < 1e-9
    assert all(isinstance(x, int) for x in points)
    # Two laps of a ring of 4 over the slow links: 6 (latency + a quarter / rate).
    assert points[1 << 20] == pytest.approx(6 * (1e-5 + (1 << 18) / 1e8))
    gathers = dict(result.all_gather_cost_dict[everyone, "f32"])
    assert gathers[1 << 18] == pytest.approx(3 * (1e-5 + (1 << 18) / 1e8)), "keyed by one device's operand"
    inside = dict(result.all_reduce_cost_dict[((0, 1), (2, 3)), "f16"])
    assert inside[1 << 20] == pytest.approx(2 * (1e-5 + (1 << 19) / 1e9))
    crossing = dict(result.all_reduce_cost_dict[((0, 2), (1, 3)), "f16"])
    assert crossing[1 << 20] == pytest.approx(2 * (1e-5 + (1 << 19) / 0.5e8)), "two groups share the card"
    assert result.dot_cost_dict[(), "f32"][-1] == (2 * 1024**3, pytest.approx(2 * 1024**3 / 1e12))
    for op in ("all_gather", "all_reduce", "all_to_all", "reduce_scatter"):
        for curve in getattr(result, f"{op}_cost_dict").values():
            assert len(curve) >= 2
            assert curve == sorted(curve)


def test_out_and_in_again(tmp_path):
    path = tmp_path / "prof_database.pkl"
    export_profile(clusters(), path)
    found = import_profile(read_database(path))
    assert len(found.devices) == 4
    assert found.devices[0].throughput == clusters().devices[0].throughput
    between = next(link for link in found.links if (link.source, link.target) == ("h0", "h1"))
    assert between.bandwidth_bytes_per_s == pytest.approx(1e8, rel=0.01)
    inside = next(link for link in found.links if (link.source, link.target) == ("h0", "h0"))
    assert inside.bandwidth_bytes_per_s == pytest.approx(1e9, rel=0.01)
    assert (between.latency_s, inside.latency_s) == (pytest.approx(1e-5, rel=0.3), pytest.approx(1e-5, rel=0.3))
    assert min(point.bytes for one in found.collectives for point in one.points) >= 1024


def test_the_slowest_device_prices_products_measured_elsewhere(alpa_module, tmp_path):
    fast = clusters(hosts=1, dtypes=("float32",))
    slow = device(seconds={2.0 * n**3: 2.0 * n**3 / 1e10 for n in (64, 256)}).throughput
    unlike = with_devices(fast, throughput=lambda one: slow if one == fast.devices[1] else one.throughput)
    export_profile(unlike, tmp_path / "x.pkl")
    result = pickle.loads((tmp_path / "x.pkl").read_bytes())["default", (1, 2)]
    curve = result.dot_cost_dict[(), "f32"][1:]
    assert [x for x, _ in curve] == [2 * n**3 for n in (64, 256, 1024)]
    assert [x / seconds for x, seconds in curve] == pytest.approx([1e10] * 3)


def test_what_cannot_be_exported(tmp_path):
    unequal = clusters().without(("h1:1",))
    with pytest.raises(UnusableInputError, match="equal numbers of devices"):
        export_profile(unequal, tmp_path / "x.pkl")
    with pytest.raises(UnusableInputError, match="float32 or float16"):
        export_profile(clusters(dtypes=("bfloat16",)), tmp_path / "x.pkl")


def test_the_recorded_v100_curves_survive_the_database(alpa_module, tmp_path):
    """Real measurements, as Alpa's own file had them."""
    recorded = json.loads(RECORDED.read_text())
    entries = {}
    for curve in recorded["curves"]:
        shape = tuple(curve["mesh_shape"])
        made = entries.setdefault(("default", shape), MeshProfilingResult())
        made.available_memory_per_device = 14957700710
        attribute = f"{curve['op'].replace('-', '_')}_cost_dict"
        groups = tuple(tuple(group) for group in curve["replica_groups"] or ())
        points = [(x, numpy.inf if t is None else t) for x, t in zip(curve["size"], curve["seconds"])]
        made.__dict__.setdefault(attribute, {})[groups, curve["dtype"]] = points
    path = tmp_path / "prof_database.pkl"
    path.write_bytes(pickle.dumps(entries))
    profile = import_profile(read_database(path), kind="V100")
    assert len(profile.hosts) == 2
    assert len(profile.devices) == 16
    best = max(p.flops / p.seconds for p in profile.devices[0].throughput["float16"])
    assert 80e12 < best < 125e12
    rates = {(link.source, link.target): link.bandwidth_bytes_per_s for link in profile.links}
    assert 4e9 < rates["h0", "h1"] < 5e9, "what the 16-way ring had: 4.6 GB/s"
    assert 100e9 < rates["h0", "h0"] < 150e9


class Runs:
    """A pickle that would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def hostile_pickles(path):
    ran = str(path)
    inside = {("default", (1, 1)): Runs(ran)}
    return {
        "os.system": pickle.dumps(Runs(ran)),
        "inside": pickle.dumps(inside),
        "protocol 0": b"cos\nsystem\n(S'touch " + ran.encode() + b"'\ntR.",
        "builtins.eval": b"cbuiltins\neval\n(S'open(" + repr(ran).encode() + b', "w")\'\ntR.',
        "getattr": b"cbuiltins\ngetattr\n(cos\npath\nS'join'\ntR.",
        "alpa's module": b"calpa.mesh_profiling\npickle\n.",
        "numpy's loader": b"cnumpy\nload\n(S'/etc/passwd'\ntR.",
        "dotted": b"\x80\x04\x8c\x08builtins\x8c\x0flist.__class__\x93.",
        "persistent": b"Pelsewhere\n.",
        "huge length": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f" + b"x.",
        "deep": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
        "empty": b"",
        "text": b"not a pickle",
        "json": b'{"schema": "hwaware.cluster"}',
        "list": pickle.dumps([1, 2, 3]),
        "wrong keys": pickle.dumps({"default": 1}),
        "wrong value": pickle.dumps({("default", (1, 1)): {"dot_cost_dict": {}}}),
        "huge mesh": pickle.dumps({("default", (10**9, 10**9)): 1}),
        "scalar of objects": b"\x80\x02cnumpy.core.multiarray\nscalar\ncnumpy\ndtype\nU\x01O\x85RU\x00\x86R.",
    }


@pytest.mark.parametrize("name", hostile_pickles(Path("x")))
def test_a_hostile_database_is_one_message_and_runs_nothing(name, tmp_path):
    ran = tmp_path / "ran"
    path = tmp_path / "prof_database.pkl"
    path.write_bytes(hostile_pickles(ran)[name])
    result = CliRunner().invoke(main, ["import", "alpa-db", str(path), "-o", str(tmp_path / "cluster.json")])
    assert result.exit_code == 2, result.output
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("Error: ")
    assert "To fix:" in result.stderr
    assert len(result.stderr) < 1000
    assert not ran.exists()
    assert not (tmp_path / "cluster.json").exists()


@pytest.mark.parametrize("data", [
    b"\x80\x04]r\xff\xff\xff\x7f.",  # remembered as value number 2**31 - 1
    b"\x80\x05\x96" + (1 << 33).to_bytes(8, "little") + b".",  # a bytearray of 8 GiB
])  # fmt: skip
def test_a_few_bytes_reserve_no_gigabytes(data):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(RecordError):
        assert loads(data, "file.pkl") == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 200_000  # KiB


@examples(300)
@given(st.data())
def test_no_change_of_bytes_lets_anything_out(data):
    original = _exported()
    place = data.draw(st.integers(0, len(original) - 1))
    length = data.draw(st.integers(0, 20))
    changed = original[:place] + data.draw(st.binary(max_size=20)) + original[place + length :]
    try:
        document = loads(changed, "file.pkl")
    except RecordError:
        return
    assert type(document).__module__ in ("builtins", "hwaware.interop.restricted_pickle")


@functools.lru_cache(maxsize=None)
def _exported():
    with tempfile.TemporaryDirectory() as folder:
        export_profile(clusters(1, 1), Path(folder) / "x.pkl")
        return (Path(folder) / "x.pkl").read_bytes()


def nested(depth):
    """A dictionary whose key is a tuple of 2^depth values, in a few bytes for each level."""
    return b"\x80\x02}K\x01\x85" + b"q\x00h\x00\x86" * depth + b"Ns."


def bombs():
    """Few bytes that would take much time or memory, or reach something outside."""
    big = (1 << 62).to_bytes(8, "little")
    return {
        "a deep tuple as a key": nested(40),
        "a long number": b"\x80\x02\x8b" + (1 << 20).to_bytes(4, "little") + b"\x01" * (1 << 20) + b".",
        "a long decimal": b"I" + b"9" * 300_000 + b"\n.",
        "a long decimal with L": b"L" + b"9" * 300_000 + b"L\n.",
        "a long place": b"Np" + b"9" * 300_000 + b"\n.",
        "a place too far": b"Nr\xff\xff\xff\x7f.",
        "a frame": b"\x80\x04\x95" + big + b"N.",
        "frames inside frames": b"\x80\x04" + (b"\x95" + big) * 1000 + b"N.",
        "bytes": b"\x80\x04\x8e" + big + b".",
        "a string": b"\x80\x04\x8d" + big + b".",
        "a byte array": b"\x80\x05\x96" + big + b".",
        "an extension": b"\x80\x02\x82\x01.",
        "a far extension": b"\x80\x02\x84\xff\xff\xff\x7f.",
        "a persistent id": b"\x80\x02NQ.",
        "an instance": b"(ios\nsystem\n.",
        "an object": b"(cos\nsystem\no.",
        "keyword arguments": b"\x80\x04calpa.mesh_profiling\nMeshProfilingResult\n)}\x92.",
        "a buffer": b"\x80\x05\x97.",
        "sets": b"\x80\x04\x8f(K\x01\x90.",
        "a frozen set": b"\x80\x04(K\x01\x91.",
        "numpy's arrays": b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I1000000000\ntS'O'\ntR.",
        "a number of a long type": b"cnumpy\ndtype\n(S'" + b"f" * 900 + b"'\ntR.",
        "a type named by a bomb": b"\x80\x02cnumpy\ndtype\nK\x01\x85" + b"q\x00h\x00\x86" * 40 + b"\x85R.",
        "a class changed": b"calpa.mesh_profiling\nMeshProfilingResult\n}S'x'\nNsb.",
        "a class changed by slots": b"calpa.mesh_profiling\nMeshProfilingResult\n(N}S'__eq__'\nNstb.",
        "a dictionary changed": b"ccollections\ndefaultdict\n)R}S'x'\nNsb.",
        "attributes without names": b"calpa.mesh_profiling\nMeshProfilingResult\n)\x81}NNsb.",
        "many hosts": pickle.dumps({("default", (4096, 1)): 1}),
        "negative hosts": pickle.dumps({("default", (-2, -2)): 1}),
        "a wide name": pickle.dumps({("default", tuple(range(10_000))): 1}),
        "an open line": b"c" + b"x" * 5000,
    }


@pytest.mark.parametrize("name", bombs())
def test_a_bomb_is_one_short_message_at_once(name, tmp_path):
    before = resource.getrusage(resource.RUSAGE_SELF)
    path = tmp_path / "prof_database.pkl"
    path.write_bytes(bombs()[name])
    result = CliRunner().invoke(main, ["import", "alpa-db", str(path), "-o", str(tmp_path / "cluster.json")])
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith(f"Error: {path} ")
    assert "To fix:" in result.stderr
    assert len(result.stderr) < 1000
    assert after.ru_utime - before.ru_utime < 2.0
    assert after.ru_maxrss < before.ru_maxrss + 200_000  # KiB


def database_of(tmp_path, **changes):
    """A small valid database with some of its tables changed."""
    made = table(2, [((0, 1),)])
    vars(made).update(changes)
    path = tmp_path / "prof_database.pkl"
    path.write_bytes(pickle.dumps({("default", (1, 2)): made}))
    return str(path)


@pytest.mark.parametrize(("changes", "message"), [
    ({"dot_cost_dict": {((), "f32"): [(1e9, 1e-20)]}}, "matrix product of the database is not valid: seconds is 1e-20"),
    ({"dot_cost_dict": {((), "f32"): [(1e9, 1.0)] * 600}}, "600 matrix products for each of 2 devices"),
    ({"all_reduce_cost_dict": {(((0, 0),), "f32"): [(0, 1.0)]}}, "groups of a mesh of 2 name a device twice"),
    ({"all_reduce_cost_dict": {(((),), "f32"): [(0, 1.0)]}}, "a group of a mesh of 2 is empty"),
    ({"all_reduce_cost_dict": {(((0, 1),), ("f32",) * 9): []}}, "is neither f16 nor f32"),
    ({"all_reduce_cost_dict": {(((0, 1),), "f32"): [(1e300, 1.0)]}}, "a size is 1e+300, expected at most 1e+30"),
    ({"all_reduce_cost_dict": {(((0, 1),), "f32"): [(10**300, 1.0)]}}, "a size is about 1e300"),
    ({"all_reduce_cost_dict": {(((0, 1),), "f32"): [(1e9, 1e9)]}}, "a time is 1000000000.0, expected at most 1e+08"),
    ({"available_memory_per_device": 1e300}, "makes no valid cluster"),
    ({"available_memory_per_device": "much"}, "not a valid profiling database"),
])  # fmt: skip
def test_a_table_beyond_sense_is_one_message(changes, message, alpa_module, tmp_path, monkeypatch):
    monkeypatch.setattr(alpa_database, "_MOST_PRODUCTS", 1000)
    path = database_of(tmp_path, **changes)
    result = CliRunner().invoke(main, ["import", "alpa-db", path, "-o", str(tmp_path / "cluster.json")])
    assert result.exit_code == 2, (result.output, result.exception)
    assert message in result.stderr
    assert "To fix:" in result.stderr


def test_a_curve_that_is_named_many_times_is_refused(alpa_module, tmp_path, monkeypatch):
    """Twenty bytes for each key would become a thousand points."""
    monkeypatch.setattr(alpa_database, "_MOST_NUMBERS", 100_000)
    points = [(float(x), 1.0) for x in range(1000)]
    path = database_of(tmp_path, all_reduce_cost_dict={(((0, 1),) * k, "f32"): points for k in range(60)})
    with pytest.raises(RecordError, match=r"it holds 12\d{4} numbers, expected at most 100000"):
        read_database(path)


def test_times_of_zero_make_no_links(alpa_module, tmp_path):
    flat = {f"{op}_cost_dict": {(((0, 1),), "f32"): [(0, 0.0), (1024, 5e-324)]} for op in ("all_gather", "all_reduce")}
    path = database_of(tmp_path, **flat, reduce_scatter_cost_dict={})
    with pytest.raises(RecordError, match="no collective to derive a link from"):
        import_profile(read_database(path))


def test_import_and_export_on_the_command_line(database, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "alpa.mesh_profiling")
    cluster, written = str(tmp_path / "cluster.json"), str(tmp_path / "out.pkl")
    result = CliRunner().invoke(main, ["import", "alpa-db", str(database), "-o", cluster, "--kind", "V100"])
    assert result.exit_code == 0, result.output
    assert len(ClusterProfile.load(cluster).devices) == 4
    result = CliRunner().invoke(main, ["export", "alpa-db", cluster, "-o", written, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["mesh_shapes"] == [[1, 1], [1, 2], [2, 2]]
    assert set(read_database(written)) == {(1, 1), (1, 2), (2, 2)}
