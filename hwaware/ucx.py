"""Carry long payloads through UCX (https://openucx.org), between the memories of devices where it can.

The package `libucx` brings the library alone, which this module calls by ctypes. Connections of `hwaware.transport`
keep all control: they prove who is who, announce each message, and tell of failures. UCX only moves the payload. The
sender draws a random tag for each message, and the receiver waits for that tag alone.

UCX itself lets everybody in who reaches its ports. By default it opens none: GPUs of one host exchange arrays by CUDA
IPC and shared memory. Over a network it runs only where somebody asks for that.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import logging
import os
import queue
import select
import socket
import struct
import threading
import time
from typing import Any, Callable, Dict, List, Literal, Optional, Sequence, Set, Tuple

import numpy

from hwaware.errors import UnusableInputError
from hwaware.greeting import Credentials

LOG = logging.getLogger("hwaware")
Way = Literal["auto", "tcp", "ucx"]
VARIABLE = "HWAWARE_TRANSFERS"
# Shorter payloads follow their announcement: a message of UCX takes one more round trip.
LEAST_BYTES = 1 << 16
# Between GPUs, and between CPUs. The first open no port, and do not leave the host.
_TRANSPORTS = {True: "sm,cuda", False: "tcp"}
# A message has the time of a wait, and its own at this rate.
_SLOWEST_BYTES_PER_S = 1e5
# A wait looks this often for the end of its connection, after which a message that is nearly through may still end.
_LOOK_S, _GRACE_S = 0.05, 0.2
_CLOSE_LIMIT_S = 2.0
# How long UCX's thread sleeps without an event, with work under way and without.
_NAP_MS, _SLEEP_MS = 20, 1000
# Of UCX's work, between two looks for orders and for what has ended.
_ROUNDS = 32
# Numbers of ucp.h and ucs/type/status.h, which hold for all versions 1.x.
_FEATURES, _TAG_AND_WAKEUP, _MODE, _SERIALIZED = 1, 1 | 1 << 4, 1, 1
_ADDRESS_AND_ERRORS, _PEER_ERRORS = 1 | 1 << 1, 1
_HAS_FLAGS, _NOT_AT_ONCE, _FORCE = 1 << 4, 1 << 16, 1
_OK, _IN_PROGRESS, _UNREACHABLE, _LAST_ERROR = 0, 1, -6, -100
_ALL_BITS = (1 << 64) - 1
# Linux's SIOCGIFADDR, and the CUDA driver's CU_POINTER_ATTRIBUTE_CONTEXT.
_ADDRESS_OF_INTERFACE, _CONTEXT_OF_POINTER = 0x8915, 1
# Without these, ctypes passes numbers as 32 bits.
_Pointer, _Size, _Tag = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
# UCX may still write to memory whose owner has given up.
_kept: List[Any] = []


def _structure(*fields: Any) -> Any:
    """Return a structure of UCX, which reads those of its later fields alone that a bit of the mask announces."""
    return type("Structure", (ctypes.Structure,), {"_fields_": [*fields, ("unused", ctypes.c_char * 512)]})


_Context = _structure(("mask", ctypes.c_uint64), ("features", ctypes.c_uint64))
_Worker = _structure(("mask", ctypes.c_uint64), ("mode", ctypes.c_int))
_Endpoint = _structure(("mask", ctypes.c_uint64), ("address", ctypes.c_void_p), ("errors", ctypes.c_int))
_Request = _structure(("mask", ctypes.c_uint32), ("flags", ctypes.c_uint32))
_Received = _structure(("tag", ctypes.c_uint64), ("length", ctypes.c_size_t))


def version() -> Optional[str]:
    """Return the version of the installed UCX; None if its package is absent.

    Raises:
        OSError: The library cannot be loaded.
    """
    try:
        return str(_library().ucp_get_version_string().decode())
    except ImportError:
        return None


def chosen() -> Way:
    """Return the way that the environment variable HWAWARE_TRANSFERS asks for; by default "auto".

    Raises:
        UnusableInputError: The value is unknown.
    """
    return require_way(os.environ.get(VARIABLE, "auto"), VARIABLE)


def require_way(value: Any, name: str = "transfers") -> Way:
    """Return the value if it is a way of transfers.

    Raises:
        UnusableInputError: It is not.
    """
    if value not in ("auto", "tcp", "ucx"):
        raise UnusableInputError(f"{name} is {value!r}, expected 'auto', 'tcp' or 'ucx'.", "give one of the three.")
    return value  # type: ignore[no-any-return]


def wire_for(way: Way, credentials: Credentials, devices: Sequence[Any], address: str) -> Optional[Wire]:
    """Return a worker's end of UCX, or None if its payloads stay on their connections.

    Args:
        way: "auto" takes UCX on GPUs where it is installed, "ucx" everywhere, and "tcp" nowhere.
        credentials: The program's. Payloads that it encrypts or digests stay on their connections.
        devices: JAX's devices of the worker, as messages number them.
        address: See `Wire`.

    Raises:
        UnusableInputError: `way` is "ucx", and UCX does not run here.
    """
    on_gpu = devices[0].platform == "gpu"
    if way == "tcp" or (way == "auto" and not on_gpu) or credentials.digests or credentials.encryption is not None:
        return None
    try:
        return Wire(on_gpu, address, functools.partial(_empty_for, devices) if on_gpu else None)
    except (ImportError, OSError) as error:
        if way == "ucx":
            raise UnusableInputError(
                f"transfers is 'ucx', but UCX does not run here: {error}.",
                "pip install libucx-cu13 on every host (libucx-cu12 for CUDA 12), or set transfers to 'auto'.",
            ) from error
        if isinstance(error, OSError):
            LOG.warning("Arrays of GPUs pass through the memory of hosts, because UCX does not run: %s.", error)
        return None


def is_on_device(array: Any) -> bool:
    """Return True for one of JAX's arrays, which may be in the memory of a device."""
    return hasattr(array, "unsafe_buffer_pointer")


def empty_on(device: Any, nbytes: int) -> Any:
    """Return an array of bytes on a device, which UCX fills before anything reads it."""
    import jax

    with jax.default_device(device):
        return jax.numpy.zeros(nbytes, numpy.uint8).block_until_ready()


def _empty_for(devices: Sequence[Any], key: str, nbytes: int) -> Any:
    """Return memory for a message of training, whose key ends with DEVICE#NUMBER, or of a worker with one device."""
    index = 0 if len(devices) == 1 else int(key.rpartition("#")[0].rpartition(".")[2])
    return empty_on(devices[index], nbytes)


def assembled(parts: Sequence[Tuple[Any, Any]], shape: Sequence[int], dtype: Any) -> Any:
    """Return one of JAX's arrays from its parts; nothing passes through the memory of the host.

    Args:
        parts: Where each is in the array, and its bytes on the device (or on the host, if few).
        shape: The array's shape.
        dtype: The array's type.
    """
    nbytes = numpy.dtype(dtype).itemsize * int(numpy.prod(shape))
    if len(parts) == 1 and len(parts[0][1]) == nbytes:
        return parts[0][1].view(dtype).reshape(shape)
    device = next(iter(next(data for _, data in parts if is_on_device(data)).devices()))
    whole = empty_on(device, nbytes).view(dtype).reshape(shape)
    for index, data in parts:
        part = data if is_on_device(data) else numpy.asarray(data)
        whole = whole.at[index].set(part.view(dtype).reshape(whole[index].shape))
    return whole


class _Work:
    """A message under way; it holds its memory until UCX has finished with it."""

    def __init__(self, memory: Any, receives: bool = False) -> None:
        self.memory = memory
        self.receives = receives
        self.request = _Pointer()
        self.status = _IN_PROGRESS
        self.received = _Received()
        self.ended = threading.Event()


class Wire:
    """A worker's end of UCX. A thread of its own makes every call of UCX after the first ones.

    Args:
        on_gpu: True if payloads may be in the memory of GPUs.
        address: This host's; UCX listens there alone, if it listens.
        allocate: Return memory for a message, from its key and length: a buffer, or one of JAX's arrays. By default a
            buffer.

    Attributes:
        offer: The bytes by which others reach this end; only for proven callers.
        least_bytes: The shortest payload for this wire.

    Raises:
        ImportError: UCX is not installed.
        OSError: UCX does not run.
    """

    least_bytes = LEAST_BYTES

    def __init__(self, on_gpu: bool, address: str, allocate: Optional[Callable[[str, int], Any]] = None) -> None:
        self._ucx = _library()
        self.on_gpu = on_gpu
        self._cuda = ctypes.CDLL("libcuda.so.1") if on_gpu else None
        self._allocate = allocate or (lambda _key, nbytes: numpy.empty(nbytes, numpy.uint8).data)
        self._jobs: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._working: List[_Work] = []
        self._endpoints: Set[int] = set()
        self._closing = False
        self._context, self._worker, file = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
        self.offer = self._opened(address)
        self._require(self._ucx.ucp_worker_get_efd(self._worker, ctypes.byref(file)))
        self._asleep, self._alarm = socket.socketpair()
        self._asleep.setblocking(False)
        self._poller = select.poll()
        for each in (file.value, self._asleep):
            self._poller.register(each, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="hwaware-ucx", daemon=True)
        self._thread.start()

    def connected(self, offer: bytes) -> Optional[int]:
        """Return an endpoint that leads to the wire with this offer; None if no common transport does.

        Raises:
            OSError: UCX refuses the offer.
        """
        endpoint, text = ctypes.c_void_p(), ctypes.create_string_buffer(offer, len(offer))
        asked = _Endpoint(_ADDRESS_AND_ERRORS, ctypes.cast(text, ctypes.c_void_p), _PEER_ERRORS)
        work = _Work(text)

        def connect() -> None:
            status = self._ucx.ucp_ep_create(self._worker, ctypes.byref(asked), ctypes.byref(endpoint))
            if status == _OK and endpoint.value:
                self._endpoints.add(endpoint.value)
            self._note(work, status)

        self._order(connect)
        self._wait(work, lambda: None, _CLOSE_LIMIT_S, lambda: None, also=_UNREACHABLE)
        return endpoint.value if work.status == _OK else None

    def send(
        self, endpoint: int, tag: int, payload: Any, cause_of_end: Callable[[], Optional[str]], limit_s: float
    ) -> None:
        """Send a payload; return once its memory is free again.

        Args:
            endpoint: From `connected`.
            tag: The tag that the receiver waits for.
            payload: A buffer, or one of JAX's arrays.
            cause_of_end: Return why nobody waits for the message any more; None while somebody does.
            limit_s: Limit, beside the time that the payload itself takes.

        Raises:
            OSError: The message did not arrive.
        """
        pointer, nbytes = _memory(payload)
        work = _Work(payload)

        def start(options: Any) -> Any:
            return self._ucx.ucp_tag_send_nbx(_Pointer(endpoint), _Pointer(pointer), _Size(nbytes), _Tag(tag), options)

        self._order(lambda: self._begin(work, start, pointer))
        limit_s += nbytes / _SLOWEST_BYTES_PER_S
        self._wait(work, cause_of_end, limit_s, lambda: self._end(endpoint, _FORCE))

    def receive(self, key: str, nbytes: int, tag: int, cause_of_end: Callable[[], Optional[str]]) -> Any:
        """Return the payload with this tag, in memory from `allocate`.

        Raises:
            OSError: It did not arrive, or has another length.
        """
        try:
            memory = self._allocate(key, nbytes)
        except RuntimeError as error:  # JAX's, of a device without so much memory
            raise OSError(str(error)) from error
        pointer, _ = _memory(memory)
        work = _Work(memory, receives=True)

        def start(options: Any) -> Any:
            return self._ucx.ucp_tag_recv_nbx(
                self._worker, _Pointer(pointer), _Size(nbytes), _Tag(tag), _Tag(_ALL_BITS), options
            )

        self._order(lambda: self._begin(work, start, pointer))
        self._wait(work, cause_of_end, float("inf"), lambda: self._cancel(work))
        if work.received.length != nbytes:
            raise OSError(f"{key!r} has {work.received.length} bytes, expected {nbytes}")
        return memory

    def disconnect(self, endpoint: int) -> None:
        """Close an endpoint; what is under way still arrives."""
        self._order(lambda: self._end(endpoint, 0))

    def close(self) -> None:
        """Close all endpoints and UCX; what was sent before still arrives."""
        self._closing = True
        self._order(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _CLOSE_LIMIT_S)

    def _opened(self, address: str) -> bytes:
        ucx, config = self._ucx, ctypes.c_void_p()
        self._require(ucx.ucp_config_read(None, None, ctypes.byref(config)))
        for name, value in _settings(self.on_gpu, address).items():
            if f"UCX_{name}" not in os.environ:  # a person's own choice
                self._require(ucx.ucp_config_modify(config, name.encode(), value.encode()))
        asked = _Context(_FEATURES, _TAG_AND_WAKEUP)
        try:
            self._require(ucx.ucp_init_version(1, 0, ctypes.byref(asked), config, ctypes.byref(self._context)))
        finally:
            ucx.ucp_config_release(config)
        mode, offer, length = _Worker(_MODE, _SERIALIZED), ctypes.c_void_p(), ctypes.c_size_t()
        self._require(ucx.ucp_worker_create(self._context, ctypes.byref(mode), ctypes.byref(self._worker)))
        self._require(ucx.ucp_worker_get_address(self._worker, ctypes.byref(offer), ctypes.byref(length)))
        try:
            return ctypes.string_at(offer, length.value)
        finally:
            ucx.ucp_worker_release_address(self._worker, offer)

    def _require(self, status: int) -> None:
        if status != _OK:
            raise OSError(f"UCX says: {self._ucx.ucs_status_string(status).decode()}")

    def _wait(
        self, work: _Work, cause_of_end: Callable[[], Optional[str]], limit_s: float, give_up: Callable[[], None],
        also: int = _OK,
    ) -> None:  # fmt: skip
        end_s = time.monotonic() + limit_s
        while not work.ended.wait(_LOOK_S):
            cause = "the program ends its transfers" if self._closing else cause_of_end()
            if cause is None and time.monotonic() > end_s:
                cause = f"it took longer than {limit_s:g} s"
            if cause is not None and not work.ended.wait(_GRACE_S):
                self._order(give_up)
                raise OSError(cause)
        if work.status != also:
            self._require(work.status)

    # UCX's thread

    def _order(self, job: Callable[[], Any]) -> None:
        self._jobs.put(job)
        with contextlib.suppress(OSError):  # closed already
            self._alarm.send(b"\0")

    def _run(self) -> None:
        while not self._closing:
            if not self._advance() and self._ucx.ucp_worker_arm(self._worker) == _OK:
                self._poller.poll(_NAP_MS if self._working else _SLEEP_MS)
                with contextlib.suppress(BlockingIOError):
                    self._asleep.recv(4096)
        self._advance()
        force = _FORCE if self._working else 0  # nobody waits for what is still under way
        for work in self._working:
            if work.receives:
                self._ucx.ucp_request_cancel(self._worker, work.request)
        for endpoint in list(self._endpoints):
            self._end(endpoint, force)
        end_s = time.monotonic() + _CLOSE_LIMIT_S
        while self._working and time.monotonic() < end_s:
            if not self._advance():
                time.sleep(0.001)
        for each in (self._alarm, self._asleep):
            each.close()
        if self._working:  # UCX still uses what its end would free
            _kept.append(self)
        else:
            self._ucx.ucp_worker_destroy(self._worker)
            self._ucx.ucp_cleanup(self._context)

    def _advance(self) -> bool:
        """Do what was ordered, and let UCX work; return False if nothing happened."""
        happened = False
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()()
                happened = True
        for _ in range(_ROUNDS):
            if not self._ucx.ucp_worker_progress(self._worker):
                break
            happened = True
        for work in self._working[:]:
            status = self._ucx.ucp_request_check_status(work.request)
            if status != _IN_PROGRESS:
                if work.receives:
                    self._ucx.ucp_tag_recv_request_test(work.request, ctypes.byref(work.received))
                self._ucx.ucp_request_free(work.request)
                self._working.remove(work)
                self._note(work, status)
                happened = True
        return happened

    def _begin(self, work: _Work, start: Callable[[Any], Any], pointer: int) -> None:
        if self._cuda is not None:  # the CUDA context of the memory becomes this thread's
            context = ctypes.c_void_p()
            if not self._cuda.cuPointerGetAttribute(
                ctypes.byref(context), _CONTEXT_OF_POINTER, ctypes.c_uint64(pointer)
            ):
                self._cuda.cuCtxSetCurrent(context)
        self._follow(work, start(ctypes.byref(_Request(_NOT_AT_ONCE))))

    def _follow(self, work: _Work, answer: Optional[int]) -> None:
        """Note the pointer that UCX answers: none, an error in its highest numbers, or a request."""
        if answer and answer < (1 << 64) + _LAST_ERROR:
            work.request = _Pointer(answer)
            self._working.append(work)
        else:
            self._note(work, answer - (1 << 64) if answer else _OK)

    def _note(self, work: _Work, status: int) -> None:
        work.status = status
        work.ended.set()

    def _cancel(self, work: _Work) -> None:
        if work in self._working:
            self._ucx.ucp_request_cancel(self._worker, work.request)

    def _end(self, endpoint: int, flags: int) -> None:
        if endpoint in self._endpoints:
            self._endpoints.remove(endpoint)
            options = _Request(_HAS_FLAGS, flags)
            self._follow(_Work(None), self._ucx.ucp_ep_close_nbx(_Pointer(endpoint), ctypes.byref(options)))


@functools.lru_cache(maxsize=None)
def _library() -> Any:
    """Load UCX once, with its own messages and its handlers of signals off.

    Raises:
        ImportError: The package is absent.
        OSError: The library cannot be loaded.
    """
    package = importlib.import_module("libucx")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("UCX_ERROR_SIGNALS", "")
    package.load_library()
    ucx = ctypes.CDLL("libucp.so.0")
    for kind, names in {
        ctypes.c_int8: "config_read config_modify init_version worker_create worker_get_address worker_get_efd "
        "worker_arm ep_create request_check_status tag_recv_request_test",  # UCX packs its statuses into one byte
        ctypes.c_void_p: "tag_send_nbx tag_recv_nbx ep_close_nbx",
    }.items():
        for name in names.split():
            getattr(ucx, f"ucp_{name}").restype = kind
    ucx.ucp_get_version_string.restype = ucx.ucs_status_string.restype = ctypes.c_char_p
    return ucx


def _settings(on_gpu: bool, address: str) -> Dict[str, str]:
    """Return UCX's settings: no payload comes before its receiver asks for it, and no port opens but on `address`."""
    import fcntl  # not on Windows, where UCX is not either

    found = {"RNDV_THRESH": "0", "TLS": _TRANSPORTS[on_gpu]}
    if "UCX_TLS" in os.environ:  # maybe cards, which have names of their own
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # without an address
                answer = fcntl.ioctl(probe, _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    found["NET_DEVICES"] = name
    if not (on_gpu or "NET_DEVICES" in found or "UCX_NET_DEVICES" in os.environ):
        raise OSError(f"no network interface has {address} as its IPv4 address")  # UCX would listen on all of these
    return found


def _memory(payload: Any) -> Tuple[int, int]:
    """Return where a payload lies, and its length."""
    if is_on_device(payload):
        return payload.unsafe_buffer_pointer(), payload.nbytes
    array = numpy.frombuffer(payload, numpy.uint8)
    return array.ctypes.data, array.nbytes
