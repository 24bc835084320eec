"""Keep a record of each testbed from before its start, so that `down` finds and removes everything it made."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path
from typing import ClassVar, Dict, Iterator, List, Optional, Tuple

from hwaware.bench.testbed.cgroups import CpuGroups, MemoryGroups
from hwaware.bench.testbed.processes import MARK, is_alive
from hwaware.bench.testbed.scenarios import Scenario
from hwaware.errors import RecordError, TestbedError
from hwaware.records import FileRecord

# Kinds whose devices are parts of a GPU; the second has no links of its own.
GPU_KINDS = ("gpu", "gpu-loopback")


def user_of(uid_map: str) -> int:
    """Return this user's number, which names the directory of records.

    In the user namespace of a testbed, users are root, but keep the records that they have outside.

    Args:
        uid_map: Text of /proc/self/uid_map: the first number inside, the first one outside and their count, in rows.
    """
    numbers = uid_map.split()
    return int(numbers[1]) if len(numbers) == 3 and numbers[2] == "1" else os.geteuid()


# Read once: this process may enter a user namespace later (Testbed.enter).
_USER = user_of(Path("/proc/self/uid_map").read_text() if os.path.exists("/proc/self/uid_map") else "")


class State(FileRecord, frozen=True, kw_only=True):
    """The names of everything that a testbed makes.

    Attributes:
        name: The testbed's name, unique for the user.
        kind: "root", "user" (an unprivileged user namespace), "loopback", "gpu" or "gpu-loopback".
        token: Four hexadecimal digits in the names of links and of the temporary directory.
        owner_pid, owner_started: The process that starts the testbed.
        address: HOST:PORT of the head.
        hosts: Address by host.
        cgroup_mount: Mount point of the CPU controller; None if CPU shares are not shaped.
        cgroup_version: Version of its control groups, 1 or 2.
        memory_mount: Mount point of the memory controller; None if memory is not limited.
        keeper_pid, keeper_started: The keeper; 0 before it runs.
        holders: A process inside the namespaces of each host, by host.
        networks: Inode numbers of the hosts' network namespaces.
        ready: True once every node has joined.
        notes: A line for each thing that the testbed does not shape.
        late: Hosts whose Ray does not start with the others.
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
    late: Tuple[str, ...] = ()

    def mark(self) -> str:
        """Return what marks processes and control groups: other users may have testbeds of the same name."""
        return f"{self.name}.{self.token}"

    def bridge(self) -> str:
        """Return the bridge's name, within the kernel's limit of 15 characters."""
        return f"hwb{self.token}"

    def veth(self, host: str) -> str:
        """Return the name of the outer end of the host's link."""
        return f"hw{self.token}-{list(self.hosts).index(host)}"

    def head_address(self) -> str:
        """Return the head's address without its port."""
        return self.address.rpartition(":")[0]

    def port(self) -> int:
        """Return the head's port."""
        return int(self.address.rpartition(":")[2])

    def ray_dir(self) -> str:
        """Return the path of Ray's temporary directory; a mount namespace gives a host its own directory there."""
        return f"{self.temp_dir}/r"

    def token_path(self) -> str:
        """Return the file with Ray's token, which Ray uses from 2.60 on."""
        return f"{self.temp_dir}/token"

    def cpu_groups(self) -> Optional[CpuGroups]:
        """Return the CPU groups; None if CPU shares are not shaped."""
        if self.cgroup_mount is None:
            return None
        return CpuGroups(self.cgroup_mount, self.mark(), self.cgroup_version)

    def memory_groups(self) -> Optional[MemoryGroups]:
        """Return the memory groups; None if memory is not limited."""
        return None if self.memory_mount is None else MemoryGroups(self.memory_mount, self.mark())

    def has_links(self) -> bool:
        """Return True if hosts have links of their own."""
        return not self.kind.endswith("loopback")

    def is_gpu(self) -> bool:
        """Return True if the devices are parts of a GPU."""
        return self.kind in GPU_KINDS

    def is_starting(self) -> bool:
        """Return True while the owner is still starting the testbed."""
        return not self.ready and is_alive(self.owner_pid, self.owner_started)

    def is_running(self) -> bool:
        """Return True if the testbed came up and its keeper lives."""
        return self.ready and is_alive(self.keeper_pid, self.keeper_started)


def directory() -> Path:
    """Return the directory of this user's records, `hwaware-testbeds-UID` in the temporary directory.

    Raises:
        TestbedError: The directory belongs to another user.
    """
    path = Path(tempfile.gettempdir(), f"hwaware-testbeds-{_USER}")
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.geteuid():
        raise TestbedError(f"{path} belongs to another user.", "set TMPDIR to a directory of your own.")
    return path


def state_path(name: str) -> Path:
    """Return the path of a testbed's record."""
    return directory() / f"{name}.json"


def all_states() -> List[State]:
    """Return every testbed of this user that `up` started and `down` has not removed.

    Raises:
        RecordError: A record is damaged, or of another version of hwaware.
    """
    states = []
    for path in sorted(directory().glob("*.json")):
        try:
            states.append(State.load(path))
        except RecordError as error:
            if path.exists():  # otherwise `down` removed it between the listing and the reading
                mark = f"{MARK}={path.stem}."
                fix = f"end processes whose environment has {mark}..., if any are left, and delete this file."
                raise RecordError(error.what, fix) from error
    return states


def remove_state(name: str) -> None:
    """Remove a testbed's record."""
    with contextlib.suppress(FileNotFoundError):
        state_path(name).unlink()


@contextlib.contextmanager
def choosing() -> Iterator[None]:
    """Hold the lock that protects the choice of names and addresses."""
    with open(directory() / "lock", "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
