"""Run the examples on this machine: python examples/run.py [mlp gpt moe wresnet nnx haiku equinox serve_gpt restart]

Starts a Ray of its own that says it has four devices, and runs each program as it is, with HWAWARE_PROFILE naming a
profile in which the first device is four times as fast as the others. That much is made up: the point is the way, not
the speed. On a real cluster, `hwaware profile` writes the profile.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import ray

from hwaware import autoload
from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct

HERE = Path(__file__).resolve().parent
PROGRAMS = {name.stem.replace("train_", ""): name for name in [*sorted(HERE.glob("[ts]*_*.py")), HERE / "restart.py"]}
# Libraries that the other examples do without.
NEEDS = {"haiku": ("haiku", "dm-haiku"), "equinox": ("equinox", "equinox")}
LIMIT_S = 240.0


def made_up_profile(address: str) -> ClusterProfile:
    """Four devices of the machine that Ray knows under that address, the first one four times as fast."""

    def device(index: int) -> Device:
        # So slow that the small models are worth a pipeline.
        product = MatrixProduct(flops=1e9, seconds=5.0 if index == 0 else 20.0)
        name, memory = f"here:{index}", 1 << 30
        kind = "fast" if index == 0 else "slow"
        return Device(id=name, host="here", kind=f"cpu-{kind}", memory_bytes=memory, throughput={"float32": (product,)})

    return ClusterProfile(
        hosts=(Host(name="here", address=address),),
        devices=tuple(device(index) for index in range(4)),
        links=(Link(source="here", target="here", latency_s=1e-4, bandwidth_bytes_per_s=1e9),),
    )


def run(program: Path, folder: Path, address: str) -> int:
    """One program, unchanged, on the Ray at that address; returns its exit code."""
    environment = {
        **os.environ,
        "HWAWARE_PROFILE": str(folder / "cluster.json"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), str(HERE.parent), os.environ.get("PYTHONPATH")])),
        "RAY_ADDRESS": address,
        "JAX_PLATFORMS": "cpu",
        "NPROC": "1",
    }
    print(f"HWAWARE_PROFILE=cluster.json python examples/{program.name}", flush=True)
    arguments = ["--folder", str(folder / "checkpoints")] if program.stem == "restart" else []
    command = [sys.executable, "-W", "ignore", str(program), *arguments]
    return subprocess.run(command, env=environment, timeout=LIMIT_S).returncode


def missing(name: str) -> str:
    """Return what to install for an example; nothing where all is there."""
    module, package = NEEDS.get(name, ("jax", "jax"))
    return "" if importlib.util.find_spec(module) else package


def main(names: list) -> int:
    """Run the programs of these names, all that can run if there are none; return 1 if one failed."""
    unknown = [name for name in names if name not in PROGRAMS]
    if unknown:
        print(f"There is no example {unknown[0]!r}. To fix: name one of {', '.join(PROGRAMS)}.", file=sys.stderr)
        return 2
    for name in names or PROGRAMS:
        if missing(name):
            print(f"Example {name!r} is left out. To run it: pip install {missing(name)}.", file=sys.stderr)
    names = [name for name in names or PROGRAMS if not missing(name)]
    folder = Path(tempfile.mkdtemp(prefix="hwe"))  # Ray's sockets need short paths
    try:
        autoload.switch_on(str(folder))
        own = ray.init(
            num_cpus=8,
            num_gpus=4,  # Alpa asks Ray for GPUs; on CPUs they are places for workers
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=str(folder / "r"),
        )
        made_up_profile(ray.nodes()[0]["NodeManagerAddress"]).save(folder / "cluster.json")
        address = own.address_info["gcs_address"]
        codes = [run(PROGRAMS[name], folder, address) for name in names]
        return min(1, sum(map(abs, codes)))
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
