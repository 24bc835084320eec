"""Start, find and take down testbeds."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Union

import msgspec

from hwaware.bench.testbed import gpu, launcher, layout, links, namespaces, processes, ray_nodes, starting
from hwaware.bench.testbed.cgroups import CONTAINER_NEEDS, find_cpu_groups, find_memory_groups
from hwaware.bench.testbed.kinds import best_kind, notes_for
from hwaware.bench.testbed.scenarios import MAX_SHARE, MIN_SHARE, Scenario, load_scenario
from hwaware.bench.testbed.state import (
    GPU_KINDS,
    State,
    all_states,
    choosing,
    remove_state,
    state_path,
)
from hwaware.errors import TestbedError, UnusableInputError
from hwaware.records import PathLike

UP_LIMIT_S = 120.0
_END_LIMIT_S = 15.0
_TOKEN_BYTES = 2


class Testbed:
    """A heterogeneous Ray cluster on this machine; `up` starts one, `find` and `list_testbeds` return them."""

    __test__ = False  # not a test class, whatever pytest thinks of its name

    def __init__(self, state: State) -> None:
        self._state = state

    @property
    def name(self) -> str:
        """Return the testbed's name, for `down`."""
        return self._state.name

    @property
    def scenario(self) -> Scenario:
        """Return the scenario that the testbed was built from."""
        return self._state.scenario

    @property
    def address(self) -> str:
        """Return HOST:PORT of the Ray head, for `ray.init(address=...)`."""
        return self._state.address

    @property
    def head_address(self) -> str:
        """Return the driver's own address in the testbed, for `ray.init(_node_ip_address=...)`."""
        return self._state.head_address()

    @property
    def hosts(self) -> Dict[str, str]:
        """Return the address of every host, by name."""
        return dict(self._state.hosts)

    @property
    def notes(self) -> Sequence[str]:
        """Return a line for each thing that the testbed does not shape."""
        return self._state.notes

    def driver_environment(self) -> Dict[str, str]:
        """Return the environment variables that a driver needs before it imports Ray."""
        return ray_nodes.driver_environment(self._state)

    def enter(self) -> None:
        """Move this process into the testbed's namespaces, where it can reach the cluster.

        Call it in a driver before `ray.init`, while the process has one thread. It does nothing unless the testbed
        has a user namespace of its own, in which this process is not yet.

        Raises:
            TestbedError: The testbed is broken.
            UnusableInputError: This process has several threads, as after importing NumPy, so Linux refuses.
        """
        if self._state.kind != "user":
            return
        if not self._state.is_running():
            raise TestbedError(
                f"Testbed {self.name} is {_status(self._state)}, expected running.",
                f"take it down and start it again: hwaware testbed down {self.name}",
            )
        if not namespaces.shares(self._state.keeper_pid, "user"):
            if not namespaces.has_one_thread():
                raise UnusableInputError(
                    f"This process has several threads, so it cannot enter testbed {self.name} of kind user.",
                    "run as root, choose kind loopback, or start it in the shell that `hwaware testbed list` names.",
                )
            namespaces.enter(self._state.keeper_pid, ("user", "net", "mnt"))

    def command(self, host: str, argv: Sequence[str], device: Optional[int] = None) -> List[str]:
        """Return the command line that runs `argv` on `host`.

        Args:
            host: The host's name.
            argv: The command.
            device: Number of the device whose quota holds for the command; None for a whole core.

        Raises:
            UnusableInputError: The testbed has no such host or device.
        """
        self._check_device(host, device)
        groups = self._state.cpu_groups()
        procs = None
        if groups is not None:
            procs = (
                groups.daemons(host) if device is None else groups.device_groups(self.scenario, host).devices[device]
            )
        return launcher.command(argv, pid=self._state.holders.get(host), cgroup=procs)

    def set_share(self, host: str, share: float) -> None:
        """Give each device of `host` this share of a core from now on.

        Raises:
            UnusableInputError: The testbed has no such host, or the share is out of range.
            TestbedError: The testbed does not shape CPU shares.
        """
        self._check_host(host)
        if not MIN_SHARE <= share <= MAX_SHARE:
            raise UnusableInputError(
                f"The share {share!r} is out of range.", f"give a share of a core from {MIN_SHARE:g} to {MAX_SHARE:g}."
            )
        groups = self._state.cpu_groups()
        if groups is None:
            raise TestbedError(
                f"Testbed {self.name} does not shape CPU shares.", f"start it as root ({CONTAINER_NEEDS})."
            )
        groups.set_share(self.scenario, host, share)

    def start_host(self, host: str) -> None:
        """Start Ray on a host that did not start with the others, or whose Ray has ended.

        Raises:
            UnusableInputError: The testbed has no such host.
            TestbedError: The host did not join the cluster.
        """
        self._check_host(host)
        starting.start_host(self._state, host)

    def describe(self) -> Dict[str, Any]:
        """Return everything about the testbed as a JSON-ready document, with the current shares."""
        state = self._state
        has_shell = state.kind == "user" and state.is_running()
        with_ray = processes.networks_of(processes.raylets())
        return {
            "name": state.name,
            "scenario": state.scenario.name,
            "status": _status(state),
            "kind": state.kind,
            "address": state.address,
            "head_address": state.head_address(),
            "token_path": state.token_path(),
            "temp_dir": state.temp_dir,
            "hosts": [
                {
                    "name": host,
                    "address": address,
                    "devices": self._devices(host),
                    # Without namespaces, nothing tells whose Ray it is.
                    "runs_ray": host not in state.holders or processes.networks_of([state.holders[host]]) <= with_ray,
                }
                for host, address in state.hosts.items()
            ],
            "shaped": {"links": state.has_links(), "cpu": state.cgroup_mount is not None},
            "notes": list(state.notes),
            "driver_environment": self.driver_environment(),
            "enter_command": launcher.command(["bash"], pid=state.keeper_pid) if has_shell else [],
        }

    def _devices(self, host: str) -> List[Dict[str, object]]:
        groups = self._state.cpu_groups()
        devices = ray_nodes.devices(self._state, host)
        if groups is not None and groups.exist():
            for device in devices:
                device["share"] = round(groups.share(host), 4)
        return devices

    def _check_device(self, host: str, device: Optional[int]) -> None:
        self._check_host(host)
        count = self.scenario.devices_of(host)
        if device is not None and not 0 <= device < count:
            raise UnusableInputError(f"Host {host} has no device {device}.", f"give a number from 0 to {count - 1}.")

    def _check_host(self, host: str) -> None:
        if host not in self._state.hosts:
            raise UnusableInputError(
                f"Testbed {self.name} has no host {host!r}.", f"give one of {', '.join(self._state.hosts)}."
            )


def _status(state: State) -> str:
    if state.is_running():
        return "running"
    return "starting" if state.is_starting() else "broken"


def up(
    scenario: Union[Scenario, PathLike],
    name: Optional[str] = None,
    kind: str = "auto",
    limit_s: float = UP_LIMIT_S,
    late: Sequence[str] = (),
) -> Testbed:
    """Start a testbed and wait until all its Ray nodes have joined.

    Args:
        scenario: A scenario, the name of a shipped one, or the path of a .toml file.
        name: The testbed's name; by default the scenario's name and a short suffix.
        kind: "root", "user" (an unprivileged user namespace), or "loopback" (nothing shaped). "gpu" gives each host a
            part of a GPU, and "gpu-loopback" does so without shaped links.
            The kind `auto` takes the first of the first three that works.
        limit_s: Time limit for the start, in seconds.
        late: Hosts whose Ray `Testbed.start_host` starts later.

    Raises:
        ScenarioError: The scenario does not exist or is not valid.
        UnusableInputError: The name is taken or invalid, or the kind is unknown or does not work here.
        TestbedError: The testbed did not come up; nothing of it remains.
    """
    chosen = scenario if isinstance(scenario, Scenario) else load_scenario(scenario)
    if kind in GPU_KINDS:
        gpu.check(chosen)
    state = _reserve(chosen, name, best_kind(kind), late)
    try:
        _prepare(state)
        return Testbed(_run_keeper(state, limit_s))
    except BaseException:
        try:
            _remove(State.load(state_path(state.name)))
        except (KeyboardInterrupt, SystemExit):  # a second Ctrl-C must not leave the testbed up
            down(state.name)
            raise
        raise


def _reserve(scenario: Scenario, name: Optional[str], kind: str, late: Sequence[str]) -> State:
    """Choose names and addresses that no other testbed uses, and write them down before making anything."""
    with choosing():
        states = all_states()
        tokens = {state.token for state in states}
        token = layout.free_token(
            lambda one: one in tokens or os.path.lexists(_temp_dir(one)),  # another user's, or one left behind
            lambda: secrets.token_hex(_TOKEN_BYTES),
        )
        name = _check_name(f"{_slug(scenario.name)}-{token}" if name is None else name, states)
        subnet = _choose_subnet(kind, states)
        port = layout.free_ports("0.0.0.0", 1)[0]
        groups = find_cpu_groups(name) if kind == "root" else None
        memory = find_memory_groups(name) if kind == "root" else None
        state = State(
            name=name,
            scenario=scenario,
            kind=kind,
            token=token,
            owner_pid=os.getpid(),
            owner_started=processes.start_ticks(os.getpid()) or 0,
            subnet=str(subnet),
            address=f"{layout.head_address(subnet)}:{port}",
            hosts={host: layout.host_address(subnet, index) for index, host in enumerate(scenario.hosts())},
            temp_dir=_temp_dir(token),
            cgroup_mount=None if groups is None else str(groups.mount),
            cgroup_version=1 if groups is None else groups.version,
            memory_mount=None if memory is None else str(memory.mount),
            notes=tuple(notes_for(kind, groups is not None, scenario.share_cores)),
            late=tuple(late),
        )
        state.save(state_path(name))
        return state


def _choose_subnet(kind: str, states: List[State]) -> ipaddress.IPv4Network:
    taken = [ipaddress.IPv4Network(state.subnet) for state in states]
    if kind.endswith("loopback"):
        return layout.free_loopback_subnet(taken)
    return layout.free_subnet(taken + layout.networks_in_use())


def _check_name(name: str, states: List[State]) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,47}", name):
        raise UnusableInputError(
            f"{name!r} is no name for a testbed.",
            "use up to 48 letters, digits, '-', '_' and '.', with a letter or digit first.",
        )
    if name in {state.name for state in states}:
        raise UnusableInputError(f"A testbed {name!r} exists already.", f"take it down: `hwaware testbed down {name}`.")
    return name


def _slug(name: str) -> str:
    """Return a scenario's name as the first part of a testbed's name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).lstrip("-_.")[: 47 - 2 * _TOKEN_BYTES] or "testbed"


def _temp_dir(token: str) -> str:
    base = tempfile.gettempdir()
    path = f"{base}/hw-{token}"
    return path if len(path) <= layout.MAX_TEMP_DIR_LENGTH else f"/tmp/hw-{token}"  # AF_UNIX paths are short


def _prepare(state: State) -> None:
    os.mkdir(state.temp_dir, mode=0o700)
    os.mkdir(state.ray_dir())
    descriptor = os.open(state.token_path(), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(secrets.token_hex(32))


def _run_keeper(state: State, limit_s: float) -> State:
    with open(f"{state.temp_dir}/keeper.log", "wb") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "hwaware.bench.testbed.keeper", state.name],
            env={**os.environ, processes.MARK: state.mark()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=state.temp_dir,
            start_new_session=True,  # Ctrl-C must reach only `up`, which takes everything down in order
        )
    try:
        _instruct_keeper(state, keeper, limit_s)
    except BaseException:
        keeper.kill()
        keeper.wait()
        raise
    # The keeper outlives this process on purpose. Without this, Popen would warn when it is collected.
    keeper.returncode = 0
    built = msgspec.structs.replace(State.load(state_path(state.name)), ready=True)
    built.save(state_path(state.name))
    return built


def _instruct_keeper(state: State, keeper: subprocess.Popen[bytes], limit_s: float) -> None:
    """Save the keeper's process id, then let it begin, then wait for its answer."""
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    with keeper.stdin, keeper.stdout:
        started = processes.start_ticks(keeper.pid) or 0
        msgspec.structs.replace(state, keeper_pid=keeper.pid, keeper_started=started).save(state_path(state.name))
        keeper.stdin.write(b"go\n")
        keeper.stdin.flush()
        _read_answer(state, keeper.stdout.fileno(), limit_s)


def _read_answer(state: State, descriptor: int, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    answer = b""
    while not answer.endswith(b"\n"):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TestbedError(
                f"Testbed {state.name} was not up within {limit_s:g} s.", "try again on a calmer machine."
            )
        chunk = os.read(descriptor, 65536)
        if not chunk:
            log = Path(state.temp_dir, "keeper.log").read_text(errors="replace")[-1500:].strip()
            raise TestbedError(
                f"The keeper of testbed {state.name} ended early. Its log ends:\n{log}\n",
                "report this with the output above.",
            )
        answer += chunk
    problem = json.loads(answer)
    if problem:
        raise TestbedError(problem["what"], problem["fix"])


def down(name: str) -> bool:
    """Take down the testbed called `name` and remove everything that it made.

    Returns:
        False if no testbed has that name.

    Raises:
        TestbedError: Another process is still starting the testbed, or a part of it could not be removed.
    """
    if not state_path(name).exists():
        return False
    state = State.load(state_path(name))
    if state.is_starting() and state.owner_pid != os.getpid():
        raise TestbedError(
            f"Testbed {name} is being started by process {state.owner_pid}.", "wait for this process, or end it."
        )
    _remove(state)
    return True


def _remove(state: State) -> None:
    trees = [tree for tree in (state.cpu_groups(), state.memory_groups()) if tree is not None]

    def known() -> Set[int]:
        found = processes.marked(state.mark())
        if processes.is_alive(state.keeper_pid, state.keeper_started):
            found.add(state.keeper_pid)
        return processes.with_descendants(found) | {pid for tree in trees for pid in tree.pids()}

    # The kernel may give the number of a network that has ended to somebody else's.
    networks = processes.networks_of(known()) & set(state.networks)

    def find() -> Set[int]:
        return processes.with_descendants(known() | processes.in_networks(networks))

    # End the keeper last: it is the parent of all others by now, and reaps them where no init does.
    groups = state.cpu_groups()
    prepare = (lambda: None) if groups is None else groups.let_end
    processes.end_all(lambda: find() - {state.keeper_pid}, _END_LIMIT_S, state.name, prepare)
    processes.end_all(find, _END_LIMIT_S, state.name, prepare)
    if state.kind in ("root", "gpu"):
        for link in [*(state.veth(host) for host in state.hosts), state.bridge()]:
            links.remove_link(link)
    for tree in trees:
        tree.remove()
    if os.path.isdir(state.temp_dir):
        shutil.rmtree(state.temp_dir)
    remove_state(state.name)


def list_testbeds() -> List[Testbed]:
    """Return all testbeds of this user, including those starting or broken (see `describe()["status"]`)."""
    return [Testbed(state) for state in all_states()]


def find(address: str) -> Optional[Testbed]:
    """Return this user's testbed whose head has that address (HOST:PORT); None if none has."""
    return next((testbed for testbed in list_testbeds() if testbed.address == address), None)


def find_by_name(name: str) -> Optional[Testbed]:
    """Return this user's testbed of that name; None if none has it."""
    return next((testbed for testbed in list_testbeds() if testbed.name == name), None)


@contextlib.contextmanager
def running(
    scenario: Union[Scenario, PathLike], name: Optional[str] = None, kind: str = "auto", late: Sequence[str] = ()
) -> Iterator[Testbed]:
    """Run a testbed inside the block, and take it down however the block ends. The arguments are those of `up`.

    Example:
        with testbed.running("fast-and-slow") as bed:
            os.environ.update(bed.driver_environment())
            bed.enter()
            ray.init(address=bed.address, _node_ip_address=bed.head_address)
    """
    testbed = up(scenario, name, best_kind(kind, to_enter=True), late=late)
    try:
        yield testbed
    finally:
        try:
            down(testbed.name)
        except (KeyboardInterrupt, SystemExit):  # a second Ctrl-C must not leave the testbed up
            down(testbed.name)
            raise
