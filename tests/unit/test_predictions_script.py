"""benchmarks/predictions.py runs, and its recorded results hold the bounds that they name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_script_prints_and_writes_its_table(tmp_path):
    script = [sys.executable, str(ROOT / "benchmarks" / "predictions.py"), "--output", str(tmp_path / "out")]
    parts = ["--only", "data-parallel", "--only", "pipeline"]
    done = subprocess.run([*script, *parts], capture_output=True, text=True, timeout=120, check=True)
    assert "resnet18_data_parallel" in done.stdout
    document = json.loads((tmp_path / "out.json").read_text())
    assert [row["n"] for row in document["rows"]] == [8, 8, 600]
    assert document["rows"][0]["mape"] == 0
    assert document["rows"][2]["mape"] < 0.01


def test_recorded_results_hold_their_bounds():
    document = json.loads((ROOT / "benchmarks" / "results" / "predictions.json").read_text())
    bounded = [row for row in document["rows"] if row["bound"]]
    assert len(bounded) >= 8
    for row in bounded:
        assert row["mape"] <= float(row["bound"].rstrip(" %")) / 100, row["data_set"]
