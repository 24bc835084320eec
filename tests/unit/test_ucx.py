"""Long payloads through UCX: in order, bounded, told of failures and dropped like those on connections."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy
import pytest

from hwaware import ucx
from hwaware.errors import MeasurementError, UnusableInputError
from hwaware.greeting import Credentials, new_secret
from hwaware.profiler.messages import LinkEnd
from hwaware.profiler.policy import KIB, MIB, QUICK
from hwaware.runtime.settings import RuntimeSettings, current, runtime_settings
from hwaware.runtime.transfers import Transfers, assembled
from hwaware.transport import Connection, Mailbox

CREDENTIALS = Credentials(new_secret(), "test")
HERE = "127.0.0.1"
CPU = SimpleNamespace(platform="cpu")
LONG = 1 << 20
needs_ucx = pytest.mark.skipif(ucx.version() is None, reason="UCX is not installed (pip install libucx-cu13)")
pytestmark = needs_ucx


@contextlib.contextmanager
def opened(ways=("ucx", "ucx"), bound=None, expected=(), allocates=None, **more):
    """Two ends that know each other; each way is a value of the setting, or None for an end without a wire."""
    failures, mailboxes = [], [Mailbox(HERE, CREDENTIALS, bound, peers_stay=True) for _ in ways]
    ends = []
    for rank, (mailbox, way) in enumerate(zip(mailboxes, ways)):
        settings = RuntimeSettings(transfers=way or "tcp", **{"receive_limit_s": 10.0, **more})
        ends.append(Transfers(mailbox, CREDENTIALS, failures.append, f"end {rank}", settings))
        ends[-1].open_wire([CPU], HERE)
        if allocates:
            ends[-1]._wire.on_gpu, ends[-1]._wire._allocate = True, allocates
        ends[-1].join_group("g", rank, [(HERE, one.port) for one in mailboxes])
    try:
        yield ends
    finally:
        for end in ends:
            end.close()
    assert [failure for failure in failures if not any(part in failure for part in expected)] == []


def array(number=0, nbytes=LONG):
    return numpy.random.default_rng(number).integers(0, 256, nbytes, numpy.uint8)


def received(end, source=0, nbytes=None):
    return numpy.asarray(end.receive("g", (source, 0), 0, nbytes)[1])


def arrive(end, count):
    """Wait until so many messages lie there, and a moment longer for any more."""
    end_s = time.monotonic() + 20
    while end._mailbox.pending() < count and time.monotonic() < end_s:
        time.sleep(0.01)
    time.sleep(0.2)
    assert end._mailbox.pending() == count


def failing(function, *arguments):
    """A thread for a call that is bound to fail."""

    def call():
        with contextlib.suppress(OSError):
            function(*arguments)

    return threading.Thread(target=call)


def used(end):
    """The wire's endpoints: none if nothing goes through UCX."""
    return len(end._wire._endpoints)


def test_long_and_short_messages_arrive_in_the_order_in_which_they_were_sent():
    sizes = [LONG, 8, ucx.LEAST_BYTES, ucx.LEAST_BYTES - 1, 0, 3 * LONG + 1]
    with opened() as (a, b):
        for number, nbytes in enumerate(sizes):
            a.send("g", (1, 0), 0, array(number, nbytes), ...)
        for number, nbytes in enumerate(sizes):
            assert numpy.array_equal(received(b, nbytes=nbytes), array(number, nbytes))
        assert used(a) == 1
        assert used(b) == 0


@pytest.mark.parametrize("sends", ["overlapped", "blocking"])
def test_both_directions_at_once(sends):
    with opened(sends=sends) as ends:

        def exchange(rank):
            for number in range(5):
                if rank:
                    ends[1].send("g", (0, 0), 0, array(number), ...)
                assert numpy.array_equal(received(ends[rank], 1 - rank), array(number))
                if not rank:
                    ends[0].send("g", (1, 0), 0, array(number), ...)

        threads = [threading.Thread(target=exchange, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()


def test_tiles_are_sent_as_what_they_cover():
    whole = array().reshape(1024, 1024)
    with opened() as (a, b):
        a.send("g", (1, 0), 0, whole, (slice(0, 512), slice(256, 1024)))
        assert numpy.array_equal(received(b).reshape(512, 768), whole[:512, 256:])


def test_an_end_without_a_wire_gets_everything_on_the_connection():
    for ways in (("ucx", "tcp"), ("tcp", "ucx")):
        with opened(ways) as (a, b):
            a.send("g", (1, 0), 0, array(), ...)
            assert numpy.array_equal(received(b), array())


def test_ends_without_a_common_transport_use_the_connection(monkeypatch):
    with opened(("tcp", "tcp")) as ends:
        for end, transport in zip(ends, ("tcp", "posix")):
            monkeypatch.setenv("UCX_TLS", transport)
            end._wire = end._mailbox.wire = ucx.Wire(False, HERE)
        ends[0].send("g", (1, 0), 0, array(), ...)
        assert numpy.array_equal(received(ends[1]), array())
        assert used(ends[0]) == 0


def test_a_sender_that_runs_ahead_is_held_back():
    with opened(bound=2) as (a, b):
        for number in range(6):
            a.send("g", (1, 0), 0, array(number), ...)
        arrive(b, 2)
        for number in range(6):
            assert numpy.array_equal(received(b), array(number))


def test_a_full_memory_is_told():
    with opened() as (a, b):
        b._mailbox._most_bytes = LONG // 2
        a.send("g", (1, 0), 0, array(), ...)
        time.sleep(0.3)
        assert b._mailbox.pending() == 0
        b._mailbox._most_bytes = 2 * LONG
        assert numpy.array_equal(received(b), array())


def test_a_failure_ends_the_wait_for_a_long_message():
    with opened() as (a, b):
        a.tell_failure("In stage 0: out of memory")
        with pytest.raises(MeasurementError, match="In stage 0: out of memory"):
            received(b)


def test_a_program_that_starts_over_drops_long_messages():
    with opened(bound=1) as (a, b):
        for number in range(4):
            a.send("g", (1, 0), 0, array(number, 4 * LONG), ...)
        arrive(b, 1)
        for end in (a, b):
            end.abandon("the program is placed again")
            end.close_mailbox()
        (peer,) = a._peers.values()
        peer._thread.join(20)
        assert peer._ended.is_set()
        received(b)  # the one that lay there
        with pytest.raises(MeasurementError, match="the program is placed again"):
            received(b)
    assert not ucx._kept


def test_a_message_of_another_length_is_refused():
    with opened(expected=["Sending to"]) as (a, b):
        a.send("g", (1, 0), 0, array(), ...)
        with pytest.raises(MeasurementError, match=f"has {LONG} bytes, expected 5"):
            received(b, nbytes=5)
        send = a._wire.send
        a._wire.send = lambda endpoint, tag, payload, *rest: send(endpoint, tag, payload[: LONG // 2], *rest)
        a.send("g", (1, 0), 0, array(), ...)
        with pytest.raises(MeasurementError, match=f"has {LONG // 2} bytes, expected {LONG}"):
            received(b)


def test_only_who_knows_the_tag_is_heard():
    with opened() as (a, b):
        stranger = ucx.Wire(False, HERE)
        endpoint = stranger.connected(b._wire.offer)
        work = failing(stranger.send, endpoint, 7, array(9), lambda: None, -10.0)
        work.start()
        a.send("g", (1, 0), 0, array(), ...)
        assert numpy.array_equal(received(b), array())
        work.join(10)
        stranger.close()


def test_a_payload_for_a_wire_that_is_not_offered_is_refused():
    mailbox = Mailbox(HERE, CREDENTIALS, peers_stay=True)
    wire = SimpleNamespace(least_bytes=1, send=lambda *_: None, disconnect=lambda _: None)
    connection = Connection((HERE, mailbox.port), CREDENTIALS, name="end 7")
    connection._wire, connection._endpoint = wire, 1
    connection.send("k", b"abc")
    with pytest.raises(MeasurementError, match="Unexpected message of end 7: 'k' travels on a wire that this worker"):
        mailbox.take("k", 5.0)
    connection.close()
    mailbox.close()


_SENDER = """
import sys, time, numpy
from hwaware import ucx
from hwaware.greeting import Credentials
from hwaware.transport import Connection
wire = ucx.Wire(False, "127.0.0.1")
connection = Connection(
    ("127.0.0.1", int(sys.argv[1])), Credentials(bytes.fromhex(sys.argv[2]), "test"), name="end 1", wire=wire
)
wire.send = lambda *_: (print("announced", flush=True), time.sleep(60))
connection.send("k", numpy.zeros(1 << 20, numpy.uint8))
"""


def test_the_death_of_a_sender_within_a_message_is_told():
    secret = new_secret()
    mailbox = Mailbox(HERE, Credentials(secret, "test"), peers_stay=True)
    mailbox.wire = ucx.Wire(False, HERE)
    with subprocess.Popen(
        [sys.executable, "-c", _SENDER, str(mailbox.port), secret.hex()], stdout=subprocess.PIPE, text=True
    ) as sender:
        assert sender.stdout.readline() == "announced\n"
        os.kill(sender.pid, signal.SIGKILL)
        with pytest.raises(MeasurementError, match="Lost end 1: its connection broke off"):
            mailbox.take("k", 10.0)
    mailbox.close()
    mailbox.wire.close()


def test_the_loss_of_a_receiver_within_a_message_is_told():
    with opened(bound=1, expected=["Sending to"]) as (a, b):
        for number in range(3):
            a.send("g", (1, 0), 0, array(number), ...)
        arrive(b, 1)
        b._mailbox.close()
        (peer,) = a._peers.values()
        peer._thread.join(20)
        assert not peer._thread.is_alive()
        with pytest.raises(MeasurementError, match="has failed"):
            a.send("g", (1, 0), 0, array(), ...)


def test_memory_that_cannot_be_had_is_told():
    def allocate(_key, _nbytes):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    with opened(expected=["Sending to"]) as (a, b):
        b._wire._allocate = allocate
        a.send("g", (1, 0), 0, array(), ...)
        with pytest.raises(MeasurementError, match="RESOURCE_EXHAUSTED: Out of memory"):
            received(b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64"])
def test_arrays_go_from_device_to_device(dtype):
    """As on GPUs, here with the memory of JAX's CPU device in their place."""
    jax = pytest.importorskip("jax")
    sent = jax.numpy.asarray(array().reshape(1024, 1024) % 2).astype(dtype)

    def allocate(_key, nbytes):
        return jax.numpy.zeros(nbytes, numpy.uint8).block_until_ready()

    everything, corner = (slice(None), slice(None)), (slice(0, 1), slice(0, 4))
    halves = (slice(0, 512), slice(None)), (slice(512, 1024), slice(None))
    with opened(allocates=allocate) as (a, b):
        for index in (everything, *halves, corner):
            a.send("g", (1, 0), 0, sent, index)
        parts = [(index, b.receive("g", (0, 0), 0)[1]) for index in (everything, *halves, corner)]
    assert [ucx.is_on_device(data) for _, data in parts] == [True, True, True, False]
    for chosen in (parts[:1], parts[1:3], parts[1:]):
        found = assembled(chosen, sent.shape, sent.dtype)
        assert isinstance(found, jax.Array)
        assert found.dtype == sent.dtype
        assert (found == sent).all()
    assert (numpy.asarray(assembled(parts[3:], (1, 4), sent.dtype)) == sent[corner]).all()


def test_a_wire_closes_with_messages_under_way():
    a, b = ucx.Wire(False, HERE), ucx.Wire(False, HERE)
    endpoint = a.connected(b.offer)
    thread = failing(a.send, endpoint, 1, array(), lambda: None, 60.0)
    thread.start()
    time.sleep(0.2)
    a.close()
    b.close()
    a.close()
    thread.join(5)
    assert not thread.is_alive()
    assert not ucx._kept


def test_protected_payloads_stay_on_their_connections():
    for credentials in (Credentials(b"", "test", True), Credentials(b"", "test", encryption=object())):
        assert ucx.wire_for("ucx", credentials, [CPU], HERE) is None


def test_cpus_use_their_connections_unless_told_otherwise():
    assert ucx.wire_for("auto", CREDENTIALS, [CPU], HERE) is None
    assert ucx.wire_for("tcp", CREDENTIALS, [SimpleNamespace(platform="gpu")], HERE) is None


def test_an_absent_package_is_named_where_it_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "libucx", None)
    ucx._library.cache_clear()
    try:
        assert ucx.version() is None
        assert ucx.wire_for("auto", CREDENTIALS, [SimpleNamespace(platform="gpu")], HERE) is None
        with pytest.raises(UnusableInputError, match=r"transfers is 'ucx', but UCX does not run.*To fix: pip"):
            ucx.wire_for("ucx", CREDENTIALS, [CPU], HERE)
    finally:
        ucx._library.cache_clear()


@needs_ucx
def test_an_address_that_ucx_cannot_keep_to_is_refused(monkeypatch):
    """By default, it would listen on every address of this host."""
    with pytest.raises(UnusableInputError, match="no network interface has fd00::1 as its IPv4 address"):
        ucx.wire_for("ucx", CREDENTIALS, [CPU], "fd00::1")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    ucx.wire_for("ucx", CREDENTIALS, [CPU], "fd00::1").close()


def test_the_environment_chooses_and_a_block_overrides_it(monkeypatch):
    assert current().transfers == "auto"
    monkeypatch.setenv("HWAWARE_TRANSFERS", "ucx")
    assert current().transfers == "ucx"
    with runtime_settings(transfers="tcp"):
        assert current().transfers == "tcp"
    monkeypatch.setenv("HWAWARE_TRANSFERS", "nccl")
    with pytest.raises(UnusableInputError, match="HWAWARE_TRANSFERS is 'nccl', expected 'auto', 'tcp' or 'ucx'"):
        current()


def test_the_profiler_times_links_as_training_will_use_them():
    """Both ends use UCX, and every byte of each message is checked."""
    jax = pytest.importorskip("jax")
    policy = QUICK._replace(message_bytes=(KIB, MIB, 4 * MIB), repeats=2)
    secret = new_secret()
    ends = [LinkEnd(HERE, secret) for _ in range(2)]
    try:
        for end in ends:
            end.use("ucx", jax.local_devices()[0])
        answers = []
        answering = threading.Thread(target=lambda: answers.append(ends[1].answer("a>b", (HERE, ends[0].port), 10.0)))
        answering.start()
        result = ends[0].time_messages("a>b", (HERE, ends[1].port), policy, 10.0)
        answering.join(10)
        assert [nbytes for nbytes, _ in result["messages"]] == [KIB, MIB, 4 * MIB]
        assert (result["corrupt"], len(answers)) == ([], 1)
        ends[0].reopen()
        assert ends[0]._mailbox.wire is ends[0].wire is not None
    finally:
        for end in ends:
            end.close()
