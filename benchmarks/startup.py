"""How long the command line takes to answer --help, beside a bare Python: python benchmarks/startup.py.

Each command runs several times in turn; the fastest counts, because noise only adds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

LIMIT_S = 0.3
REPEATS = 10


def wall_s(*arguments: str) -> float:
    """Wall time of one run of a command."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, timeout=60)
    return time.perf_counter() - start


def main() -> int:
    """Print the times as JSON; returns 1 if a --help takes longer than the limit."""
    from hwaware.cli import COMMANDS

    commands = {"python": ["-c", "pass"], "hwaware --help": ["-m", "hwaware", "--help"]}
    commands.update({f"hwaware {name} --help": ["-m", "hwaware", name, "--help"] for name in COMMANDS})
    times = {name: min(wall_s(*arguments) for _ in range(REPEATS)) for name, arguments in commands.items()}
    print(json.dumps({"limit_s": LIMIT_S, "fastest_of": REPEATS, "wall_s": times}, indent=2))
    return int(max(times.values()) > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
