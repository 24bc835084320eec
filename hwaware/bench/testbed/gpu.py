"""Divide this machine's GPU among a testbed's hosts, by NVIDIA's Multi-Process Service (MPS) where it is installed.

Each host's programs get multiprocessors in proportion to the host's share (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE). They
also get the memory that the scenario sets (CUDA_MPS_PINNED_DEVICE_MEM_LIMIT). The parts add up to at most the whole
GPU. All hosts share the bandwidth of its memory and its caches. NVIDIA's documentation of MPS describes both variables.

Without MPS, the hosts' programs take turns on the whole GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Dict

from hwaware.bench.testbed.scenarios import Scenario
from hwaware.bench.testbed.state import State
from hwaware.errors import UnusableInputError

CONTROL = "nvidia-cuda-mps-control"
# Variables for testbeds on CPUs (ray_nodes.py) that GPU testbeds drop: a GPU's compilers may use every core.
_FOR_CPUS = ("NPROC", "MALLOC_ARENA_MAX")


def is_possible() -> bool:
    """Return True if NVIDIA's driver is installed."""
    return shutil.which("nvidia-smi") is not None


def has_service() -> bool:
    """Return True if MPS is installed."""
    return shutil.which(CONTROL) is not None


def check(scenario: Scenario) -> None:
    """Refuse a scenario that one GPU cannot run.

    Raises:
        UnusableInputError: A host has several devices, which Ray would number as several GPUs.
    """
    for host in scenario.hosts():
        if scenario.devices_of(host) > 1:
            raise UnusableInputError(
                f"Host {host} of {scenario.name} has {scenario.devices_of(host)} devices, expected one for kind gpu.",
                "choose a scenario with one device on each host.",
            )


def percentage(scenario: Scenario, host: str) -> float:
    """Return the percentage of the GPU's multiprocessors that `host` may use.

    Example:
        >>> scenario = Scenario(name="x", shares={"a": 0.8, "b": 0.4, "c": 0.4}, default_mbit=100)
        >>> percentage(scenario, "a"), percentage(scenario, "b")
        (50.0, 25.0)
    """
    return 100 * scenario.shares[host] / max(1.0, sum(scenario.shares.values()))


def service_environment(state: State) -> Dict[str, str]:
    """Return the variables that tell MPS and its clients where to meet."""
    return {"CUDA_MPS_PIPE_DIRECTORY": f"{state.temp_dir}/mps", "CUDA_MPS_LOG_DIRECTORY": f"{state.temp_dir}/mps-log"}


def host_environment(state: State, host: str, of_cpus: Dict[str, str]) -> Dict[str, str]:
    """Return the environment of a host's Ray.

    Args:
        state: The testbed.
        host: The host's name.
        of_cpus: The environment that a testbed on CPUs would have.
    """
    kept = {name: value for name, value in of_cpus.items() if name not in _FOR_CPUS}
    part = {
        **service_environment(state),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{percentage(state.scenario, host):.3g}",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={state.scenario.memory_bytes(host) >> 20}M",
    }
    return {
        **kept,
        **(part if has_service() else {}),
        "JAX_PLATFORMS": "cuda",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


def start_service(state: State) -> None:
    """Start MPS as a child of this process, with the testbed's mark, so that it ends with the testbed."""
    directories = service_environment(state)
    for directory in directories.values():
        os.mkdir(directory)
    nothing = subprocess.DEVNULL  # it has logs of its own; standard output is for the keeper's answer
    subprocess.Popen([CONTROL, "-f"], env={**os.environ, **directories}, stdin=nothing, stdout=nothing, stderr=nothing)
