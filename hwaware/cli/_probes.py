"""Probe JAX, Alpa and Ray for `hwaware doctor`, each in its own process: their import may fail, hang or abort.

`python -m hwaware.cli._probes alpa` prints one JSON object as its last line; so do `... jax` and `... ray ADDRESS`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Callable, Dict, List

# An import of Alpa took 3 to 6 s on the machine where this was written; a GPU driver may need longer to wake up.
LIMIT_S = 120.0


def ask(*probe: str) -> Dict[str, Any]:
    """Return the answer of the probe of that name and arguments, or {"problem": ...} if it failed or was too slow."""
    command = [sys.executable, "-m", "hwaware.cli._probes", *probe]
    # By default JAX takes most of a GPU's memory, and a training run may be using that GPU.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "RAY_ENABLE_AUTO_CONNECT": "0"}
    errors = None if probe[0] == "ray" else subprocess.PIPE  # it warns if several clusters run here
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=LIMIT_S, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"the probe did not end within {LIMIT_S:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        said = (done.stderr or "").strip().splitlines() or [f"exit code {done.returncode}"]
        return {"problem": said[-1]}
    answer: Dict[str, Any] = json.loads(lines[-1])
    return answer


def jax() -> Dict[str, Any]:
    """Return the devices that JAX sees, counted by platform and kind."""
    import jax

    kinds: Dict[Any, int] = {}
    for device in jax.devices():
        key = (device.platform, device.device_kind)
        kinds[key] = kinds.get(key, 0) + 1
    return {"devices": [{"platform": p, "kind": k, "count": count} for (p, k), count in kinds.items()]}


def alpa() -> Dict[str, Any]:
    """Return which of hwaware's overrides fit the installed Alpa, without applying any."""
    from hwaware.activation import patches
    from hwaware.errors import AlpaError
    from hwaware.patching import leaves, stock_jax

    try:
        stock_jax.install()
    except AlpaError as error:
        return {"problem": error.what, "fix": error.fix}
    on_stock_jax = stock_jax.is_needed()
    overrides: List[Dict[str, Any]] = []
    for patch in patches():
        problem = None
        try:
            patch.check()
        except AlpaError as error:
            problem = str(error)
        overrides.append(
            {
                "function": f"{patch.target.module}.{patch.target.name}",
                "needed": on_stock_jax or patch not in leaves.PATCHES.patches,
                "fits": problem is None,
                "problem": problem,
            }
        )
    return {"on_stock_jax": on_stock_jax, "overrides": overrides}


def ray(address: str) -> Dict[str, Any]:
    """Return the hosts of a Ray cluster with their GPU resources, or the reason why none answers.

    In the network of a testbed, this process may be root of another user namespace.
    """
    from hwaware.cli._run import enter_testbed
    from hwaware.errors import HwawareError

    try:
        enter_testbed(address)
        from hwaware import ray_cluster

        with ray_cluster.connect(address):
            hosts = [{"name": n.hostname, "address": n.address, "gpus": n.num_gpus} for n in ray_cluster.nodes()]
    except HwawareError as error:
        return {"problem": error.what, "fix": error.fix}
    return {"hosts": hosts}


PROBES: Dict[str, Callable[..., Dict[str, Any]]] = {"alpa": alpa, "jax": jax, "ray": ray}

if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]](*sys.argv[2:])))
