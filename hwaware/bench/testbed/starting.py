"""Start Ray on the hosts of a testbed, and wait until they have joined."""

from __future__ import annotations

import subprocess
import time
from typing import Dict, List

from hwaware.bench.testbed import launcher, ray_nodes
from hwaware.bench.testbed.layout import HEAD
from hwaware.bench.testbed.state import State
from hwaware.errors import TestbedError

NODE_LIMIT_S = ray_nodes.JOIN_LIMIT_S + 30.0
_LOG_TAIL_CHARACTERS = 1500


def start_nodes(state: State) -> None:
    """Start Ray on the head, and on all hosts that are not late; wait until each has joined.

    Raises:
        TestbedError: A host did not join in time.
    """
    groups = state.cpu_groups()
    ports = ray_nodes.port_options(state)
    head = launcher.command(
        ray_nodes.command(ray_nodes.head_options(state, ports[HEAD])),
        cgroup=groups.head() if groups is not None else None,
    )
    _wait_for(state, {HEAD: _start(state, HEAD, head, ray_nodes.node_environment(state))})
    _wait_for(state, {host: _start_host(state, host, ports[host]) for host in state.hosts if host not in state.late})


def start_host(state: State, host: str) -> None:
    """Start Ray on a host of a running testbed, and wait until it has joined.

    Raises:
        TestbedError: It did not join in time.
    """
    _wait_for(state, {host: _start_host(state, host, ray_nodes.port_options(state)[host])})


def _start_host(state: State, host: str, ports: List[str]) -> subprocess.Popen[bytes]:
    groups = state.cpu_groups()
    line = launcher.command(
        ray_nodes.command(ray_nodes.host_options(state, host, ports)),
        pid=state.holders.get(host),
        cgroup=groups.daemons(host) if groups is not None else None,
    )
    return _start(state, host, line, ray_nodes.host_environment(state, host))


def _start(state: State, node: str, line: List[str], environment: Dict[str, str]) -> subprocess.Popen[bytes]:
    with open(_log_path(state, node), "wb") as log:
        return subprocess.Popen(
            line, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=state.temp_dir
        )


def _log_path(state: State, node: str) -> str:
    return f"{state.temp_dir}/start-{node}.log"


def _wait_for(state: State, running: Dict[str, subprocess.Popen[bytes]]) -> None:
    """Wait until each `ray start` returns: its node is then in the cluster's table."""
    deadline = time.monotonic() + NODE_LIMIT_S
    for node, process in running.items():
        try:
            code = process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise _node_error(state, node, f"did not join within {NODE_LIMIT_S:g} s") from error
        if code != 0:
            raise _node_error(state, node, f"did not start (exit code {code})")


def _node_error(state: State, node: str, what: str) -> TestbedError:
    with open(_log_path(state, node), errors="replace") as log:
        tail = log.read()[-_LOG_TAIL_CHARACTERS:].strip()
    return TestbedError(
        f"The Ray node of {node} {what}. Its output ends:\n{tail}\n",
        "check that `ray start` works on this machine (pip install 'hwaware[ray]').",
    )
