"""Connect to a Ray cluster, with a limit on every wait and one message if no cluster answers.

Works with Ray 2.1 and later. `connect` imports Ray; importing this module does not.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import warnings
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple, Type

from hwaware.errors import ClusterUnreachableError, HwawareError, MeasurementError, WorkerFailedError

# Within a cluster, every reachable address answers a TCP connect faster than these.
_CONNECT_LIMIT_S, _ANSWER_LIMIT_S = 5.0, 3.0
_ASK_AGAIN_S = 0.5
_END_LIMIT_S = 10.0
_POLL_S = 0.5
# Ray gives its head 60 s to come back, and then ends the driver without an exception.
_HEAD_LIMIT_S, _ASK_HEAD_S = 15.0, 4.0
_LOG = logging.getLogger("hwaware")
TOKEN_FIX = "set RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH as `hwaware testbed list` or your cluster says."
_START_FIX = "start Ray there (ray start --head), or give the HOST:PORT that `ray start` printed on the head node."


class Node(NamedTuple):
    """A living node of the cluster, as Ray knows it.

    Attributes:
        id: Ray's node id, in hexadecimal.
        address: The address at which other nodes reach it.
        hostname: The node's own name, which nodes in containers may share.
        resources: Ray's resources and their amounts.
        port: The TCP port of Ray's daemon there.
    """

    id: str
    address: str
    hostname: str
    resources: Dict[str, float]
    port: int = 0

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def num_gpus(self) -> int:
        """Return the number of the node's GPU resources; a node without any trains nothing."""
        return int(self.resources.get("GPU", 0))


@contextlib.contextmanager
def connect(address: str = "auto", timeout_s: float = 30.0) -> Iterator[None]:
    """Connect to the Ray cluster at `address` while the context is open.

    A process that is already connected keeps its connection, also afterwards. If it is to another cluster, a warning
    names both.

    Args:
        address: HOST:PORT of the cluster's head. With "auto", Ray looks itself: at RAY_ADDRESS, else for a cluster on
            this machine. Among several clusters, a warning names Ray's choice.
        timeout_s: Limit on each step of connecting.

    Raises:
        ClusterUnreachableError: No program answers there, or it is no Ray cluster that this process can join.
    """
    ray = _import_ray()
    if ray.is_initialized():
        _warn_of_another(address)
        yield
        return
    host_port = _address(ray, address)
    require(host_port, timeout_s)
    _join(ray, host_port)
    try:
        yield
    finally:
        leave()


def _warn_of_another(address: str) -> None:
    """Warn if this process is connected to another cluster than the one at `address`."""
    if address == "auto":
        return
    (host, port), (own_host, own_port) = split_address(address), head_address()
    if port != own_port or _numbers_of(host).isdisjoint(_numbers_of(own_host)):
        _LOG.warning(
            f"This process is connected to the Ray cluster at {own_host}:{own_port}, so hwaware uses this one, not "
            f"{address}. To use the other one: call ray.shutdown() before."
        )


def _numbers_of(host: str) -> Set[str]:
    """Return the addresses of a name or address; those of this machine are alike."""
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}
    except OSError:
        found = {host}
    return {"" if own_address(one) else one for one in found}


def leave() -> None:
    """Disconnect this process from its cluster."""
    import ray

    with _own_sigterm():
        ray.shutdown()


def nodes(*, alive: bool = True) -> Tuple[Node, ...]:
    """Return the living nodes of the connected cluster, or those that Ray has given up, sorted by address."""
    import ray

    wanted = [node for node in ray.nodes() if node["Alive"] == alive]
    found = [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["NodeManagerHostname"],
            dict(node["Resources"]),
            int(node["NodeManagerPort"]),
        )
        for node in wanted
    ]
    return tuple(sorted(found, key=lambda node: (_address_order(node.address), node.id)))


def device_hosts(address: str = "") -> Tuple[Node, ...]:
    """Return the living nodes that offer devices, sorted by address.

    Args:
        address: The cluster's address, for the error.

    Raises:
        ClusterUnreachableError: No node offers a device.
    """
    found = tuple(node for node in nodes() if node.num_gpus)
    if not found:
        raise ClusterUnreachableError(
            f"No host of the Ray cluster{f' at {address}' * bool(address)} offers a device: none has the resource GPU.",
            "start the training hosts with `ray start --address=... --num-gpus=N` (on hosts without GPUs, N shares "
            "of the processor stand for devices).",
        )
    return found


def require(address: str = "auto", timeout_s: float = 30.0) -> None:
    """Refuse an address at which no Ray cluster answers that this process can join; connect to nothing.

    Raises:
        ClusterUnreachableError: As `connect`.
    """
    host_port = _address(_import_ray(), address)
    # Ray itself would retry for a minute where no program listens.
    error = fails_to_answer(*split_address(host_port), min(timeout_s, _CONNECT_LIMIT_S))
    if error is not None:
        raise ClusterUnreachableError(f"No Ray cluster answers at {host_port}: {error}.", _START_FIX) from error
    _require_ray(host_port, timeout_s)


def head_address() -> Tuple[str, int]:
    """Return the address at which the head of the connected cluster listens."""
    import ray

    return split_address(ray.get_runtime_context().gcs_address)


def fails_to_answer(address: str, port: int, limit_s: float = _ANSWER_LIMIT_S) -> Optional[Exception]:
    """Return why the program that listens there does not answer; None if it does."""
    try:
        socket.create_connection((address, port), timeout=limit_s).close()
    except OSError as error:
        return error
    return None


class Head:
    """Ask Ray's head for a sign of life, now and then.

    Args:
        address: Where it listens.

    Attributes:
        error: Why it does not answer; None while it does.
    """

    def __init__(self, address: Tuple[str, int]) -> None:
        self._address = address
        self._asked_s = self._answered_s = time.monotonic()
        self.error: Optional[Exception] = None

    def is_lost(self, at_once: bool = False) -> bool:
        """Return True if it has not answered for long; with `at_once`, if it does not answer now."""
        now_s = time.monotonic()
        if at_once or now_s - self._asked_s > _ASK_HEAD_S:
            if now_s - self._asked_s > 2 * _ASK_HEAD_S:  # nobody has asked for long
                self._answered_s = now_s
            self.error = fails_to_answer(*self._address)
            self._asked_s = time.monotonic()
            if self.error is None:
                self._answered_s = self._asked_s
        return self.error is not None and (at_once or self._asked_s - self._answered_s > _HEAD_LIMIT_S)

    def failure(self) -> WorkerFailedError:
        """Return the error that names the lost head."""
        host, port = self._address
        return WorkerFailedError(
            f"Ray's head at {host}:{port}",
            f"it does not answer any more ({self.error}); hwaware has ended this program's workers.",
            f"see that host {host} runs; start Ray there and on all other hosts again (ray stop, then ray start), then "
            "launch the program again.",
        )


def fetched(references: Sequence[Any], limit_s: float, what: str) -> List[Any]:
    """Return the values of Ray references, as `ray.get`, or raise one message.

    Args:
        references: The references.
        limit_s: Longest wait for all values.
        what: The awaited work, as the subject of a sentence.

    Raises:
        MeasurementError: The limit passed, a worker ended, or its work failed.
        WorkerFailedError: Ray's head is lost. This process has left the cluster.
    """
    import ray

    head, end_s, waiting = Head(head_address()), time.monotonic() + limit_s, list(references)
    while waiting and time.monotonic() < end_s:
        left_s = max(0.0, end_s - time.monotonic())
        _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=min(_POLL_S, left_s))
        if waiting and head.is_lost():
            leave()  # before Ray ends the driver
            raise head.failure()
    if waiting:
        raise MeasurementError(
            f"{what} took longer than {limit_s:g} s.",
            "see that the hosts run and are not overloaded (`ray status`), then start the program again.",
        )
    try:
        values: List[Any] = ray.get(list(references))
        return values
    except ray.exceptions.RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, HwawareError):
            raise MeasurementError(f"{what} failed: {cause.what}", cause.fix) from error
        raise MeasurementError(
            f"{what} failed: {last_line(error)}.", "see the worker's log (worker-*.err in Ray's logs) for all of it."
        ) from error
    except ray.exceptions.RayError as error:  # the worker or its host has ended
        reason, _, fix = died(error).partition(" To fix: ")
        raise MeasurementError(
            f"{what} failed: {reason.rstrip('.')}.",
            f"{fix}."
            if fix
            else "see that host's memory and its Ray logs (worker-*.err, raylet.err), then start the program again.",
        ) from error


def died(error: BaseException) -> str:
    """Return what Ray knows of a worker's end, on one line and without a full stop.

    For an error of hwaware's that kept the worker from starting, return its message and remedy.
    """
    if getattr(error, "actor_init_failed", False):
        return re.sub(r"^hwaware\.errors\.\w+: ", "", last_line(error))
    lines = [line.strip() for line in str(error).splitlines()]
    reasons = [line for line in lines if "died" in line or "killed" in line]
    return (reasons[-1] if reasons else _first_line(error)).rstrip(".")


# JAX puts these lines below the tracebacks that it shortens.
_OF_JAX = ("-----", "For simplicity, JAX has removed")


def last_line(error: BaseException) -> str:
    """Return the last line of Ray's report, where the worker's own exception stands, without JAX's footer."""
    lines = [line for line in str(error).strip().splitlines() if not line.startswith(_OF_JAX)]
    return (lines[-1] if lines else type(error).__name__).rstrip(".")


def asks_for_token(error: Optional[BaseException]) -> bool:
    """Return True if Ray refused this process for its token, by an error or by what led to it.

    Example:
        >>> asks_for_token(ConnectionError("InvalidAuthToken: ...")), asks_for_token(ConnectionError("nobody answers"))
        (True, False)
    """
    while error is not None:
        if "authtoken" in f"{type(error).__name__} {error}".lower().replace("_", "").replace(" ", ""):
            return True
        error = error.__cause__ or error.__context__
    return False


def errors() -> Tuple[Type[BaseException], ...]:
    """Return the classes of Ray's errors for an `except`; none if this process never imported Ray."""
    exceptions = sys.modules.get("ray.exceptions")
    return () if exceptions is None else (exceptions.RayError,)


def end_actors(actors: Sequence[Any]) -> None:
    """End actors, those that have died too, and wait at most `_END_LIMIT_S`; the rest end with this process.

    Ray itself waits without end for an actor that it never registered, as where the head cannot reach this process.
    """
    thread = threading.Thread(target=_end_each, args=(list(actors),), daemon=True)
    thread.start()
    thread.join(_END_LIMIT_S)


def _end_each(actors: Sequence[Any]) -> None:
    import ray

    for actor in actors:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):  # it may have died before
            ray.kill(actor, no_restart=True)


def own_address(host: str) -> str:
    """Return the numeric address of a name or address of this machine, to which a socket can bind; else ""."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return str(address[0])
    return ""


def split_address(address: str) -> Tuple[str, int]:
    """Split HOST:PORT into host and port.

    Raises:
        ClusterUnreachableError: The address does not have this form.
    """
    host, _, port = address.rpartition(":")
    with contextlib.suppress(ValueError):  # as sockets raise for a host with an empty or a too long part
        host.encode("idna")
        if host and port.isdecimal() and 0 < int(port) < 1 << 16:
            return host.strip("[]"), int(port)
    raise ClusterUnreachableError(
        f"{address!r} is not the address of a Ray cluster, expected HOST:PORT or auto.",
        "give the HOST:PORT that `ray start` printed on the head node, or `hwaware testbed list` for a testbed.",
    )


def _import_ray() -> Any:
    # Without this, any call into an unconnected Ray starts a whole local cluster.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    try:
        with _quiet():
            import ray
    except ImportError as error:
        raise ClusterUnreachableError(
            f"Ray cannot be imported: {error}.", "install it (pip install 'hwaware[ray]') in the cluster's version."
        ) from error
    if not ray.is_initialized():
        _read_token_again()
    return ray


def _read_token_again() -> None:
    """Let Ray take its token from the environment that it has now: newer versions keep what they found at first."""
    inside = importlib.import_module("ray._raylet")
    if hasattr(inside, "AuthenticationTokenLoader"):
        inside.Config.initialize("")
        inside.AuthenticationTokenLoader.instance().reset_cache()


def _address(ray: Any, address: str) -> str:
    """Return HOST:PORT of the cluster; Ray finds it for "auto"."""
    if address != "auto":
        split_address(address)
        return address
    from_environment = os.environ.get("RAY_ADDRESS") or "auto"
    if from_environment != "auto":
        split_address(from_environment)
        return from_environment
    with _quiet():
        try:
            found = ray._private.services.canonicalize_bootstrap_address("auto")
            running = ray._private.services.find_gcs_addresses()
        except (ConnectionError, ValueError, AttributeError):
            found, running = None, ()
    if not found:
        raise ClusterUnreachableError("No Ray cluster runs on this machine and RAY_ADDRESS is not set.", _START_FIX)
    others = sorted({*running} - {str(found)})
    if others:
        _LOG.warning(
            f"Several Ray clusters run on this machine. hwaware uses the one at {found}, which Ray chose, not "
            f"{' or '.join(others)}. To use another one: give its HOST:PORT as the address, or set RAY_ADDRESS."
        )
    return str(found)


def _require_ray(host_port: str, timeout_s: float) -> None:
    """Refuse a port where another program answers, or another version of Ray."""
    check = _health_check()
    if check is None:
        return
    try:
        with _quiet(), contextlib.redirect_stderr(io.StringIO()):  # Ray prints a traceback there when it says no
            healthy = _is_healthy(check, host_port, min(timeout_s, _CONNECT_LIMIT_S))
    except RuntimeError as error:  # another version of Ray; Ray's message names both
        raise ClusterUnreachableError(
            f"This process cannot join the Ray cluster at {host_port}: {_first_line(error)}.",
            "install the cluster's version of Ray and of Python here.",
        ) from error
    if not healthy:
        raise ClusterUnreachableError(
            f"The program that answers at {host_port} is not a healthy Ray cluster.", _START_FIX
        )


def _is_healthy(check: Callable[[str, float], bool], host_port: str, limit_s: float) -> bool:
    """Ask until the limit: on a busy machine, a cluster that has just started may say no at first."""
    end_s = time.monotonic() + limit_s
    while not check(host_port, limit_s):
        if time.monotonic() > end_s:
            return False
        time.sleep(_ASK_AGAIN_S)
    return True


def _health_check() -> Optional[Callable[[str, float], bool]]:
    """Return the function by which Ray checks a cluster before joining it; None if this version has none."""
    for name in ("ray._raylet", "ray._private.gcs_utils"):  # the oldest versions keep it in the second
        check = getattr(importlib.import_module(name), "check_health", None)
        if check is not None:
            return lambda address, limit_s: bool(check(address, timeout=limit_s))
    client = getattr(importlib.import_module("ray._raylet"), "GcsClient", None)
    return None if client is None else lambda address, limit_s: _has_answer(client, address, limit_s)


def _has_answer(client: Callable[..., Any], address: str, limit_s: float) -> bool:
    """Return True if a cluster's head answers in time, also if it says no: joining repeats its reason.

    The newest versions of Ray have no other check, and this one takes no limit: it tries for 40 s.

    Raises:
        ClusterUnreachableError: The head asks for a token. Joining would repeat this for 20 s, and not name the token.
    """
    import ray

    refusals: List[BaseException] = []

    def ask() -> None:
        try:
            client(address=address)
        except ray.exceptions.RayError as error:
            refusals.append(error)

    asking = threading.Thread(target=ask, name="hwaware-head", daemon=True)
    asking.start()
    asking.join(limit_s)
    if any(map(asks_for_token, refusals)):
        raise ClusterUnreachableError(
            f"The Ray cluster at {address} asks for a token, which this process lacks.", TOKEN_FIX
        ) from refusals[0]
    return not asking.is_alive()


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Restore this process's handler of SIGTERM, so that termination still cleans up.

    On connecting, Ray replaces the handler by one that aborts. On shutdown, it sets the system's own without telling
    Python.
    """
    own = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(own) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, own)


def _join(ray: Any, host_port: str) -> None:
    own = own_address(split_address(host_port)[0])
    options: Dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if own and not own.startswith("127.") and own != "::1":
        # On a machine with several addresses, the driver finds its raylet only by the one that Ray started with.
        options["_node_ip_address"] = own
    with _quiet(), _own_sigterm():
        start = time.monotonic()
        try:
            ray.init(address=host_port, **options)
        except Exception as error:  # Ray raises a bare Exception if it finds no node to join through
            ray.shutdown()
            raise ClusterUnreachableError(
                f"The Ray cluster at {host_port} answers, but this process could not join it in "
                f"{time.monotonic() - start:.0f} s: {' '.join(str(error).split()).rstrip('.')}.",
                "run hwaware on a node of the cluster (a machine where `ray start` ran), with the same versions of "
                "Python and Ray.",
            ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Ray's warnings and its log below errors: hwaware reports a failure in one message."""
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


def _address_order(address: str) -> Tuple[Any, ...]:
    """Return a key that sorts 10.0.0.10 after 10.0.0.9."""
    parts = address.split(".")
    return (0, *map(int, parts)) if all(part.isdigit() for part in parts) else (1, address)
