"""Measure how `hwaware plan` bears large inputs: seconds, peak memory, step and gap, one row for each input.

    python benchmarks/load.py -o benchmarks/results/load.json
    python benchmarks/load.py "2,000 devices, 24 layers" --time-limit 20

Every input is made here from a seed. Each row runs the command in a process of its own, so the seconds hold its start,
the reading of the files, the search and the writing of the plan. A small plan comes first: it compiles the kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Tuple

import msgspec
import search_clusters

from hwaware.cluster import ClusterProfile, Link
from hwaware.records import write_bytes
from hwaware.workload import Workload

Inputs = Tuple[Workload, ClusterProfile]
COMMAND = "import sys; from hwaware.cli import main; sys.exit(main())"


def large(devices: int, layers: int, **more: Any) -> Inputs:
    """Return GPT-like layers on hosts of up to 8 devices of 4 kinds."""
    return search_clusters.large_cluster(1, devices, layers, 32, **more)


def every_pair(devices: int) -> Inputs:
    """Return a cluster with a link from each device to each other one, in place of links between hosts."""
    workload, profile = large(devices, 24)
    names = [device.id for device in profile.devices]
    links = tuple(
        Link(source=one, target=other, latency_s=2e-5, bandwidth_bytes_per_s=1.25e10 + 1e6 * ((i * j) % 97))
        for i, one in enumerate(names)
        for j, other in enumerate(names)
        if i != j
    )
    return workload, msgspec.structs.replace(profile, links=links)


def heavy(inputs: Inputs, factor: float) -> Inputs:
    """Return the same with parameters that take so many times the memory."""
    workload, profile = inputs
    layers = tuple(
        msgspec.structs.replace(layer, parameter_bytes=factor * layer.parameter_bytes) for layer in workload.layers
    )
    return msgspec.structs.replace(workload, layers=layers), profile


def roomy(inputs: Inputs, memory_bytes: int) -> Inputs:
    """Return the same on devices with so much memory."""
    workload, profile = inputs
    devices = tuple(msgspec.structs.replace(device, memory_bytes=memory_bytes) for device in profile.devices)
    return workload, msgspec.structs.replace(profile, devices=devices)


def measured(inputs: Inputs) -> Inputs:
    """Return the same with devices that differ by up to two per cent, as measured ones do."""
    workload, profile = inputs
    devices = tuple(
        msgspec.structs.replace(
            device,
            throughput={
                dtype: tuple(
                    msgspec.structs.replace(p, seconds=p.seconds * (1 + 1e-5 * (k * 7919 % 2000))) for p in points
                )
                for dtype, points in device.throughput.items()
            },
        )
        for k, device in enumerate(profile.devices)
    )
    return workload, msgspec.structs.replace(profile, devices=devices)


ROWS: Dict[str, Callable[[], Inputs]] = {
    "160 devices, 24 layers": lambda: large(160, 24),
    "160 devices, 1,000 layers": lambda: roomy(large(160, 1000), 1 << 41),
    "2,000 devices, 24 layers": lambda: large(2000, 24),
    "2,000 devices, 1,000 layers": lambda: roomy(large(2000, 1000), 1 << 41),
    "700 hosts of one device, 24 layers": lambda: large(700, 24, per_host=1),
    "2,000 measured devices, 24 layers": lambda: measured(large(2000, 24)),
    "2,000 devices, random links, 24 layers": lambda: large(2000, 24, directed=True),
    "4 million links": lambda: every_pair(2000),
    "300,000 links": lambda: every_pair(548),
    "5,000 layers, 4 devices": lambda: roomy(large(4, 5000, per_host=1), 1 << 46),
    "5,000 layers that cannot fit": lambda: large(4, 5000, per_host=1),
    "2,000 devices that cannot fit": lambda: heavy(large(2000, 24), 1e4),
}


def run(name: str, folder: Path, time_limit_s: float, microbatches: int) -> Dict[str, Any]:
    """Plan one input in a child process, and return what it took."""
    workload, profile = ROWS[name]()
    cluster_file, workload_file = folder / "cluster.json", folder / "workload.json"
    workload.save(workload_file)
    # One line: an indented file of four million links is 1.5 times as large.
    body = {"schema": profile.SCHEMA, "schema_version": profile.VERSION, **msgspec.to_builtins(profile)}
    write_bytes(cluster_file, msgspec.json.encode(body))
    del workload, profile, body
    command = [
        sys.executable, "-c", COMMAND, "plan", str(cluster_file), str(workload_file), "--json", "--microbatches",
        str(microbatches), "--time-limit", str(time_limit_s),
    ]  # fmt: skip
    with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
        started = time.monotonic()
        child = subprocess.Popen(command, stdout=out, stderr=err)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.monotonic() - started
    row: Dict[str, Any] = {
        "input": name, "seconds": seconds, "processor_s": usage.ru_utime + usage.ru_stime,
        "peak_memory_bytes": usage.ru_maxrss * 1024, "exit": os.waitstatus_to_exitcode(status),
    }  # fmt: skip
    text = (folder / "out").read_bytes()
    if row["exit"] == 0 and text:
        plan = json.loads(text)
        row.update({key: plan.get(key) for key in ("status", "objective_s", "bound_s", "search_s", "reason")})
        row["gap"] = _gap(row["objective_s"], row["bound_s"])
        row["stages"] = len(plan["stages"])
    else:
        row["message"] = (folder / "err").read_text()[-1000:]
    return row


def _gap(objective_s: Optional[float], bound_s: Optional[float]) -> Optional[float]:
    return objective_s / bound_s - 1 if objective_s and bound_s else None


def main() -> None:
    """Run the rows that were named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"inputs to plan: {'; '.join(ROWS)}")
    parser.add_argument("--time-limit", type=float, default=20.0, help="of each search, in seconds")
    parser.add_argument("--microbatches", type=int, default=128)
    parser.add_argument("-o", "--output", help="file to write the rows to")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.rows if name not in ROWS]
    if unknown:
        parser.error(f"there is no input {unknown[0]!r}; choose among: {'; '.join(ROWS)}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        run("160 devices, 24 layers", Path(folder), 0.1, arguments.microbatches)  # compiles the kernels
        for name in arguments.rows or ROWS:
            row = run(name, Path(folder), arguments.time_limit, arguments.microbatches)
            rows.append(row)
            print(json.dumps(row), flush=True)
    if arguments.output:
        write_bytes(arguments.output, json.dumps({"rows": rows}, indent=2).encode() + b"\n")


if __name__ == "__main__":
    main()
