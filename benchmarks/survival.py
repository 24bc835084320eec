"""Measure survival on a testbed, or kill workers at many moments and compare all losses.

python benchmarks/survival.py             (root; writes benchmarks/results/survival.json when it ends)
python benchmarks/survival.py --rounds 8 --losses 5     (took seven minutes)
python benchmarks/survival.py --kills 100      (any user; took eleven minutes; exits with 1 if a loss differs)
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from hwaware.cli._run import cleaning_up_when_terminated

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "survival.json"


@cleaning_up_when_terminated()
def main() -> int:
    """Measure, or kill; print the figures, and keep the measured ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default="fast-and-slow")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--losses", type=int, default=20)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    parser.add_argument("--kills", type=int)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.kills is not None:
        return killed(chosen.kills, chosen.seed)
    from hwaware.bench import faults

    found = faults.on_testbed(chosen.scenario, chosen.rounds, chosen.losses)
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    chosen.output.write_text(json.dumps(found, indent=1) + "\n")
    print(faults.summary(found))
    return 0


def killed(count: int, seed: int) -> int:
    """Kill workers on a Ray of this machine; return 1 if a loss or a state differs."""
    from hwaware.activation import install_runtime

    install_runtime()
    import ray

    from hwaware.bench import kills

    with tempfile.TemporaryDirectory(prefix="hwk") as folder:
        ray.init(
            address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
            _temp_dir=folder,
        )  # fmt: skip
        try:
            found = kills.kills(ray.nodes()[0]["NodeManagerAddress"], count, seed, lambda line: print(line, flush=True))
        finally:
            ray.shutdown()
    print(kills.summary(found))
    return 0 if all(kill.is_equal for kill in found) else 1


if __name__ == "__main__":
    sys.exit(main())
