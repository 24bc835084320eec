"""Hold each host's namespaces in a process of its own.

The keeper forks this process, the holder. Together they make the namespaces, connect the link and configure it.
"""

from __future__ import annotations

import os
import select
import socket
import time
from pathlib import Path
from typing import NamedTuple

from hwaware.bench.testbed import links, namespaces
from hwaware.bench.testbed.layout import hosts_file
from hwaware.bench.testbed.state import State
from hwaware.errors import TestbedError

_STEP_LIMIT_S = 15.0
_ALIVE_CHECK_S = 0.5


class Holder(NamedTuple):
    """The process that holds a host's namespaces, with the keeper's ends of the pipes to it."""

    host: str
    pid: int
    read: int
    write: int

    def wait_for_step(self, what: str) -> None:
        """Wait until the holder reports the end of a step.

        Args:
            what: The step, for error messages.

        Raises:
            TestbedError: The step failed, or did not end within 15 s.
        """
        if not select.select([self.read], [], [], _STEP_LIMIT_S)[0]:
            raise TestbedError(
                f"Host {self.host}: {what} took more than {_STEP_LIMIT_S:g} s.", "try again on a calmer machine."
            )
        answer = os.read(self.read, 4096).decode(errors="replace")
        if answer != "ok":
            raise TestbedError(
                f"Host {self.host}: {what} failed: {answer or 'its process ended'}.",
                "check that the kernel has network namespaces, veth, HTB and u32 (`modprobe sch_htb cls_u32`).",
            )

    def go_on(self) -> None:
        """Let the holder take its next step."""
        os.write(self.write, b"g")


def fork_holder(state: State, host: str, path: Path) -> Holder:
    """Fork the holder of `host`, which lives as long as the state file at `path`.

    Call `prepare_files` before.
    """
    from_child, to_parent = os.pipe()
    from_parent, to_child = os.pipe()
    pid = os.fork()
    if pid:
        os.close(to_parent)
        os.close(from_parent)
        return Holder(host, pid, from_child, to_child)
    os.close(from_child)
    os.close(to_child)
    _run_child(state, host, path, from_parent, to_parent)
    raise AssertionError("the child never returns")


def _run_child(state: State, host: str, path: Path, read: int, write: int) -> None:
    try:
        os.close(1)  # `up` reads it until the keeper ends, which this process may outlive
        _make_namespaces(state, host)
        os.write(write, b"ok")
        if os.read(read, 1) == b"g":
            _configure(state, host)
            os.write(write, b"ok")
            os.close(write)
            _hold(path)
    except BaseException as error:  # noqa: BLE001  # the parent raises it: this process has nobody else to tell
        os.write(write, f"{type(error).__name__}: {error}".encode()[:4000])
    finally:
        os._exit(0)


def prepare_files(state: State, host: str) -> None:
    """Write the host's /etc/hosts, and make the directory that it sees as Ray's temporary directory."""
    os.makedirs(_ray_dir(state, host), exist_ok=True)
    Path(_hosts_path(state, host)).write_text(hosts_file(state.hosts))


def _ray_dir(state: State, host: str) -> str:
    return f"{state.temp_dir}/hosts/{host}"


def _hosts_path(state: State, host: str) -> str:
    return f"{state.temp_dir}/hosts/{host}.hosts"


def _make_namespaces(state: State, host: str) -> None:
    namespaces.unshare(namespaces.CLONE_NEWNET | namespaces.CLONE_NEWUTS | namespaces.CLONE_NEWNS)
    namespaces.mount("none", "/", namespaces.MS_REC | namespaces.MS_SLAVE)  # nothing mounted here shows outside
    socket.sethostname(host)
    namespaces.mount(_hosts_path(state, host), "/etc/hosts", namespaces.MS_BIND)
    namespaces.mount(_ray_dir(state, host), state.ray_dir(), namespaces.MS_BIND)


def _configure(state: State, host: str) -> None:
    rates = {
        state.hosts[other]: state.scenario.rate_mbit(host, other) for other in state.scenario.hosts() if other != host
    }
    links.configure_host(state.hosts[host], rates, state.scenario.inside_mbit, state.scenario.devices_of(host))


def _hold(path: Path) -> None:
    while path.exists():  # ends by itself when the testbed is forgotten
        time.sleep(_ALIVE_CHECK_S)
