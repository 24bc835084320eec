"""Start the Ray nodes of a testbed: their environment, their options, and `ray start` of any version of Ray.

    python -m hwaware.bench.testbed.ray_nodes OPTION=VALUE...

This command runs `ray start` without the options that the installed Ray lacks.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import json
import os
import sys
import time
from typing import Any, Callable, Dict, List, Tuple

from hwaware.bench.testbed import gpu
from hwaware.bench.testbed.layout import (
    CPUS_PER_HOST,
    HEAD,
    RAY_PORTS_FIRST,
    describe_devices,
    devices_variable,
    free_ports,
)
from hwaware.bench.testbed.processes import MARK
from hwaware.bench.testbed.state import State
from hwaware.device_places import DEVICE_RESOURCE, KIND_RESOURCE

OBJECT_STORE_BYTES = 200_000_000
# For a node to join. `ray start` itself gives up after 30 s, in which a busy machine may not start a raylet.
JOIN_LIMIT_S = 90.0
# These would make `ray start` join another cluster, or write elsewhere.
_NOT_INHERITED = ("RAY_ADDRESS", "RAY_TMPDIR", "RAY_NAMESPACE", "RAY_JOB_ID")
_BORN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "born")
_FIXED = {
    "NPROC": "1",  # one XLA thread; XLA_FLAGS have no such effect (measured on jax 0.4.13, 0.4.30 and 0.10)
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # A thread's own heap goes back to the system, 64 MiB at once, whenever all of it is free. mallopt does not change
    # that (runtime/backend.py). Page faults a step, for a stage of five GPT blocks: 16,000 to 32,000, with one heap at
    # most 2,000. A process reads this when it starts, so workers cannot set it themselves.
    "MALLOC_ARENA_MAX": "1",
    "JAX_PLATFORMS": "cpu",
    "RAY_worker_niceness": "0",  # Ray's 15 would let any other program take a fast host's share
    # Workers that Ray starts ahead would each import Ray at the host's share, before anything needs them.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
}
_WORKER_PORTS = (RAY_PORTS_FIRST + 64, RAY_PORTS_FIRST + 1023)
_NODE_PORTS = (
    "node-manager-port",
    "object-manager-port",
    "metrics-export-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
)
# Options that name a host's sockets -> how their files end.
_SOCKETS = {"--plasma-store-socket-name": "plasma", "--raylet-socket-name": "raylet"}
_ANY_WORKER_PORTS = ["--min-worker-port=0", "--max-worker-port=0"]


def driver_environment(state: State) -> Dict[str, str]:
    """Return the variables that a driver needs before it imports Ray."""
    return {
        "RAY_ENABLE_AUTO_CONNECT": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": state.token_path(),
    }


def node_environment(state: State) -> Dict[str, str]:
    """Return the environment of the head's Ray."""
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    return {**inherited, **driver_environment(state), **_FIXED, MARK: state.mark()}


def host_environment(state: State, host: str) -> Dict[str, str]:
    """Return the environment of a host's Ray, which its workers inherit."""
    groups = state.cpu_groups()
    device_groups = None if groups is None else groups.device_groups(state.scenario, host)
    environment = node_environment(state)
    memory = state.memory_groups()
    memory_groups = [] if memory is None else memory.device_groups(state.scenario, host)
    environment["HWAWARE_DEVICES"] = devices_variable(
        devices(state, host), device_groups, memory_groups, own_ports=state.has_links()
    )
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [_BORN, environment.get("PYTHONPATH")]))
    return gpu.host_environment(state, host, environment) if state.is_gpu() else environment


def devices(state: State, host: str) -> List[Dict[str, object]]:
    """Return the description of each device of `host` (see `layout.describe_devices`)."""
    if state.is_gpu():
        return describe_devices(state.scenario, host, True, of="gpu")
    return describe_devices(state.scenario, host, state.cpu_groups() is not None)


def port_options(state: State) -> Dict[str, List[str]]:
    """Return the port options of the head and each host, chosen together because Ray refuses duplicates."""
    nodes = [HEAD] if state.has_links() else [HEAD, *state.hosts]
    # Ray listens on every address for some ports. Ask for one more than needed: the head's own may be among these.
    free = free_ports("0.0.0.0", len(nodes) * len(_NODE_PORTS) + 1)
    ports = iter([port for port in free if port != state.port()])
    options = {node: [f"--{name}={next(ports)}" for name in _NODE_PORTS] + _ANY_WORKER_PORTS for node in nodes}
    return {**{host: _namespaced_ports() for host in state.hosts}, **options}


def head_options(state: State, ports: List[str]) -> List[str]:
    """Return the options of the head's `ray start`: no CPUs and no devices, so that work goes to the hosts."""
    return [
        "--head",
        f"--port={state.port()}",
        f"--node-ip-address={state.head_address()}",
        f"--temp-dir={state.ray_dir()}",
        "--num-cpus=0",
        "--num-gpus=0",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        "--include-dashboard=false",
        "--ray-client-server-port=0",
        *ports,
    ]


def host_options(state: State, host: str, ports: List[str]) -> List[str]:
    """Return the options of a host's `ray start`."""
    # The driver cannot read the host's HWAWARE_DEVICES, but it sees the resources of each Ray node.
    described = devices(state, host)
    named = {f"{KIND_RESOURCE}{one['kind']}": 1 for one in described}
    named.update({f"{DEVICE_RESOURCE}{one['id']}": 1 for one in described})
    return [
        f"--address={state.address}",
        f"--node-ip-address={state.hosts[host]}",
        f"--num-cpus={CPUS_PER_HOST}",
        f"--num-gpus={state.scenario.devices_of(host)}",
        f"--resources={json.dumps({host: 1, **named})}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        *(f"{name}={state.ray_dir()}/{host}.{end}" for name, end in _SOCKETS.items()),
        *ports,
    ]


def _namespaced_ports() -> List[str]:
    numbered = [f"--{name}={RAY_PORTS_FIRST + offset}" for offset, name in enumerate(_NODE_PORTS)]
    return [*numbered, f"--min-worker-port={_WORKER_PORTS[0]}", f"--max-worker-port={_WORKER_PORTS[1]}"]


def command(options: List[str]) -> List[str]:
    """Return the command line that runs `ray start` with those options that the installed Ray knows."""
    return [sys.executable, "-m", "hwaware.bench.testbed.ray_nodes", *options]


def patient(get_node: Callable[..., Any], limit_s: float) -> Callable[..., Any]:
    """Return Ray's function that looks a node up, but with more time for the node to join.

    Raises:
        RuntimeError: The node did not join in time.
    """

    @functools.wraps(get_node)
    def looked_up(*args: Any, **kwargs: Any) -> Any:
        end_s = time.monotonic() + limit_s
        while True:
            try:
                return get_node(*args, **kwargs)
            except RuntimeError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.1)

    return looked_up


def announcing(
    start_raylet: Callable[..., Any], write_port: Callable[[str, str, str, int], None], name: str
) -> Callable[..., Any]:
    """Return Ray's function that starts a raylet, but with the port of its dashboard agent written down before.

    A raylet reads this port from a file that its agent writes, and ends after 15 s without the file. On a busy machine
    the agent takes longer to start (https://github.com/ray-project/ray/issues/65983).

    Args:
        start_raylet: Ray's function.
        write_port: Ray's function that writes a port down.
        name: Ray's name of the port.
    """
    signature = inspect.signature(start_raylet)

    @functools.wraps(start_raylet)
    def started(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        write_port(given["session_dir"], given["node_id"], name, given["dashboard_agent_listen_port"])
        return start_raylet(*args, **kwargs)

    return started


def _parted(option: str) -> Tuple[str, str]:
    name, _, value = option.partition("=")
    return name, value


def main(options: List[str]) -> None:
    """Run `ray start`, which returns when the node has joined the cluster."""
    from ray import _raylet
    from ray._private import parameter, services
    from ray.scripts import scripts

    if hasattr(services, "get_node"):  # what `ray start` calls again and again for 30 s
        services.get_node = patient(services.get_node, JOIN_LIMIT_S)

    write_port, name = (getattr(_raylet, one, None) for one in ("persist_port", "DASHBOARD_AGENT_LISTEN_PORT_NAME"))
    if write_port is not None and name is not None:  # Rays that write ports to files
        services.start_raylet = announcing(services.start_raylet, write_port, name)

    known = {name for parameter in scripts.start.params for name in parameter.opts}
    if importlib.util.find_spec("grpc") is None:  # without its client, Ray refuses even the option that turns it off
        known.discard("--ray-client-server-port")
    sockets = {name: value for name, value in map(_parted, options) if name in _SOCKETS}
    for path in sockets.values():
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of a node that was killed before this host came back
    # Newer Rays lack these options. Without names, nodes that start at once may choose the same socket, and end.
    given = {name.strip("-").replace("-", "_"): path for name, path in sockets.items() if name not in known}
    if given:
        parameter.RayParams = functools.partial(parameter.RayParams, **given)
    sys.argv = ["ray", "start", *(option for option in options if _parted(option)[0] in known)]
    scripts.main()


if __name__ == "__main__":
    main(sys.argv[1:])
