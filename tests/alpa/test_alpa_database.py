"""Alpa itself loads the exported database and finds in it what hwaware put there."""

from pathlib import Path

import pytest

from hwaware.cluster import ClusterProfile
from hwaware.interop import export_profile, read_database

pytestmark = pytest.mark.alpa

V100 = Path(__file__).parents[2] / "profiling" / "recorded" / "v100-two-hosts.json"


def test_alpa_loads_the_exported_database(tmp_path):
    from hwaware.patching import stock_jax

    stock_jax.install()
    from alpa.mesh_profiling import MeshProfilingResult, ProfilingResultDatabase

    path = tmp_path / "prof_database.pkl"
    export_profile(ClusterProfile.load(V100), path)
    database = ProfilingResultDatabase()
    database.load(str(path))
    result = database.query("default", (2, 8))
    assert isinstance(result, MeshProfilingResult)
    everyone = (tuple(range(16)),)
    # A ring of 16: 2 x 15 hops of a sixteenth over 4.6 GB/s.
    seconds = result.estimate_all_reduce(everyone, 1 << 26, "f32")
    assert seconds == pytest.approx(2 * 15 / 16 * (1 << 26) / 4.6e9, rel=0.05)
    assert result.estimate_all_gather(everyone, 1 << 20, "f16") > 0
    assert "all_reduce_cost_dict" in str(result)
    database.save(str(tmp_path / "again.pkl"))
    assert set(read_database(tmp_path / "again.pkl")) == {(1, 1), (1, 2), (1, 4), (1, 8), (2, 8)}
