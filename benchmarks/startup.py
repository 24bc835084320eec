"""How long the command line takes to answer --help, and to plan on 32 devices: python benchmarks/startup.py [-o FILE].

Each command runs several times in turn; the fastest counts, because noise only adds. The 32 devices are the four hosts
of profiling/recorded/fast-and-slow.json eight times over, in eight racks; between racks links are as from h0 to h2.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LIMIT_S = 0.3
PLAN_LIMIT_S = 2.0
REPEATS = 10
PLAN_REPEATS = 5
RACKS = 8
COMPILE_LIMIT_S = 300.0
RECORDED = Path(__file__).parents[1] / "profiling" / "recorded"


def wall_s(*arguments: str, limit_s: float = 60.0) -> float:
    """Wall time of one run of a command."""
    start = time.perf_counter()
    # Bytecode is kept between runs, as it is for whoever does not forbid it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(
        [sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, timeout=limit_s, env=environment
    )
    return time.perf_counter() - start


def write_cluster(path: Path) -> None:
    """The recorded hosts, `RACKS` times over."""
    recorded = json.loads((RECORDED / "fast-and-slow.json").read_text())
    inside = {(link["source"], link["target"]): link for link in recorded["links"]}
    places = [(rack, host["name"]) for rack in range(RACKS) for host in recorded["hosts"]]
    links = [
        {
            **inside[(a, b) if rack == other and a != b else ("h0", "h2")],
            "source": f"r{rack}{a}",
            "target": f"r{other}{b}",
        }
        for rack, a in places
        for other, b in places
        if (rack, a) != (other, b)
    ]
    devices = [
        {**device, "id": f"r{rack}{device['id']}", "host": f"r{rack}{device['host']}"}
        for rack in range(RACKS)
        for device in recorded["devices"]
    ]
    hosts = [{"name": f"r{rack}{name}"} for rack, name in places]
    path.write_text(json.dumps({**recorded, "hosts": hosts, "devices": devices, "links": links}))


def plan_wall_s(folder: Path) -> float:
    """The fastest of several whole runs of `hwaware plan` on 32 devices, start of Python included."""
    write_cluster(folder / "cluster.json")
    arguments = [str(folder / "cluster.json"), str(RECORDED / "gpt-8-layers.json")]
    arguments += ["--microbatches", "16", "-o", str(folder / "plan.json")]
    wall_s("-m", "hwaware", "plan", *arguments, limit_s=COMPILE_LIMIT_S)  # the first one compiles the search
    return min(wall_s("-m", "hwaware", "plan", *arguments) for _ in range(PLAN_REPEATS))


def main() -> int:
    """Print the times as JSON, and write them to a file if one is given; 1 if a --help or the plan takes too long."""
    from hwaware.cli import COMMANDS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    output = parser.parse_args().output
    commands = {"python": ["-c", "pass"], "hwaware --help": ["-m", "hwaware", "--help"]}
    commands.update({f"hwaware {name} --help": ["-m", "hwaware", name, "--help"] for name in COMMANDS})
    times = {name: min(wall_s(*arguments) for _ in range(REPEATS)) for name, arguments in commands.items()}
    with tempfile.TemporaryDirectory() as folder:
        plan_s = plan_wall_s(Path(folder))
    plan = {"limit_s": PLAN_LIMIT_S, "fastest_of": PLAN_REPEATS, "wall_s": plan_s}
    machine = {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count()}
    found = {"command": "python benchmarks/startup.py", "environment": machine, "limit_s": LIMIT_S}
    found.update(fastest_of=REPEATS, wall_s=times, plan_on_32_devices=plan)
    text = json.dumps(found, indent=2) + "\n"
    print(text, end="")
    if output is not None:
        output.write_text(text)
    return int(max(times.values()) > LIMIT_S or plan_s > PLAN_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
