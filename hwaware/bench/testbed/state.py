"""What a testbed wrote down about itself before it made anything, so that all of it can be found and removed later."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import tempfile
from pathlib import Path
from typing import ClassVar, Dict, Iterator, List, Optional, Tuple

from hwaware.bench.testbed.cgroups import CpuGroups, MemoryGroups
from hwaware.bench.testbed.processes import is_alive
from hwaware.bench.testbed.scenarios import Scenario
from hwaware.errors import TestbedError
from hwaware.records import FileRecord

# Once: in a user namespace (Testbed.enter) this process takes itself for root, and must still find its testbeds.
_USER = os.geteuid()


class State(FileRecord, frozen=True, kw_only=True):
    """Everything that one testbed makes, by name.

    Attributes:
        name: The testbed's name, unique for the user.
        kind: "root", "user" (an unprivileged user namespace), "loopback" or "gpu".
        token: Four letters or digits in the names of links and of the temporary directory.
        owner_pid, owner_started: The process that is starting it.
        address: HOST:PORT of the head.
        hosts: Address by host.
        cgroup_mount, cgroup_version: Where the control groups are; None if CPU shares are not shaped.
        memory_mount: Where those of the memory controller are; None if the kernel limits no memory.
        keeper_pid, keeper_started: The testbed's own process; 0 before it runs.
        holders: By host, a process inside its namespaces.
        networks: The numbers of the hosts' network namespaces.
        ready: Whether every node has joined.
        notes: What is not shaped, for people.
    """

    SCHEMA: ClassVar[str] = "hwaware.testbed"

    name: str
    scenario: Scenario
    kind: str
    token: str
    owner_pid: int
    owner_started: int
    subnet: str
    address: str
    hosts: Dict[str, str]
    temp_dir: str
    cgroup_mount: Optional[str] = None
    cgroup_version: int = 1
    memory_mount: Optional[str] = None
    keeper_pid: int = 0
    keeper_started: int = 0
    holders: Dict[str, int] = {}
    networks: Tuple[int, ...] = ()
    ready: bool = False
    notes: Tuple[str, ...] = ()

    def bridge(self) -> str:
        """The name of the bridge (at most 15 characters, the kernel's limit)."""
        return f"hwb{self.token}"

    def veth(self, host: str) -> str:
        """The name of the outer end of the host's link."""
        return f"hw{self.token}-{list(self.hosts).index(host)}"

    def head_address(self) -> str:
        """The address of the head without its port."""
        return self.address.rpartition(":")[0]

    def port(self) -> int:
        """The port of the head."""
        return int(self.address.rpartition(":")[2])

    def ray_dir(self) -> str:
        """Ray's own temporary directory; every host but loopback ones sees another directory under this path."""
        return f"{self.temp_dir}/r"

    def token_path(self) -> str:
        """The file with the token of Ray from 2.60 on."""
        return f"{self.temp_dir}/token"

    def cpu_groups(self) -> Optional[CpuGroups]:
        """The control groups, if CPU shares are shaped."""
        if self.cgroup_mount is None:
            return None
        return CpuGroups(self.cgroup_mount, self.name, self.cgroup_version)

    def memory_groups(self) -> Optional[MemoryGroups]:
        """The control groups of memory, if the kernel limits it."""
        return None if self.memory_mount is None else MemoryGroups(self.memory_mount, self.name)

    def has_links(self) -> bool:
        """Whether the hosts have links of their own."""
        return self.kind != "loopback"

    def is_starting(self) -> bool:
        """Whether the process that starts it is still at it."""
        return not self.ready and is_alive(self.owner_pid, self.owner_started)

    def is_running(self) -> bool:
        """Whether it came up and its keeper lives."""
        return self.ready and is_alive(self.keeper_pid, self.keeper_started)


def directory() -> Path:
    """Where this user's testbeds are written down: `hwaware-testbeds-UID` in the system's temporary directory.

    Raises:
        TestbedError: Another user has made a directory of that name.
    """
    path = Path(tempfile.gettempdir(), f"hwaware-testbeds-{_USER}")
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.geteuid():
        raise TestbedError(f"{path} belongs to another user.", "set TMPDIR to a directory of your own.")
    return path


def state_path(name: str) -> Path:
    """The file of the testbed called `name`."""
    return directory() / f"{name}.json"


def all_states() -> List[State]:
    """Every testbed of this user that was started and not taken down."""
    states = []
    for path in sorted(directory().glob("*.json")):
        with contextlib.suppress(FileNotFoundError):  # taken down between the listing and the reading
            path.stat()
            states.append(State.load(path))
    return states


def remove_state(name: str) -> None:
    """Forget the testbed, and the directory with the last one."""
    with contextlib.suppress(FileNotFoundError):
        state_path(name).unlink()


@contextlib.contextmanager
def choosing() -> Iterator[None]:
    """Hold the lock under which names and addresses are chosen."""
    with open(directory() / "lock", "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def subnets_in_use(states: List[State]) -> List[ipaddress.IPv4Network]:
    """The networks of those testbeds, some of which may not have made theirs yet."""
    return [ipaddress.IPv4Network(state.subnet) for state in states]
