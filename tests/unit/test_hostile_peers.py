"""Strangers and confused peers at a mailbox: nothing counts before the greeting, and little does after it."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from hwaware import greeting, transport
from hwaware.errors import MeasurementError
from hwaware.greeting import MAGIC, NONCE_BYTES, PROOF_BYTES, Credentials, new_secret
from hwaware.patching import leaves
from hwaware.profiler.policy import QUICK
from hwaware.runtime.channels import Incoming
from hwaware.transport import Connection, Mailbox, PeerFailedError, UnexpectedMessageError

LIMIT_S = 10.0
HOST = "127.0.0.1"
CREDENTIALS = Credentials(new_secret(), "test")
OTHERS = Credentials(new_secret(), "test")


def message(key, payload=b""):
    return struct.pack("<IQ", len(key), len(payload)) + key + payload


def eventually(condition):
    end = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(transport, "_STRANGER_PAUSE_S", 0.0)
    monkeypatch.setattr(transport, "_AGAIN_S", (0.01,))


@pytest.fixture(params=[True, False], ids=["training", "profiling"])
def mailbox(request):
    box = Mailbox(HOST, CREDENTIALS, peers_stay=request.param)
    yield box
    box.close()


@pytest.fixture
def quiet():
    box = Mailbox(HOST, CREDENTIALS, bound=8, peers_stay=True)
    yield box
    box.close()


@contextlib.contextmanager
def stranger(box):
    with socket.create_connection((HOST, box.port), timeout=LIMIT_S) as connection:
        yield connection


def read(connection, count):
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        assert part, "closed"
        data += part
    return data


def is_closed(connection):
    """Read what is left; return True once the mailbox has closed the connection."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


def require_untouched(box):
    """A real peer is served, and nothing of the strangers has stayed."""
    assert eventually(lambda: not box._strangers)
    assert box.failure is None
    assert box.pending() == 0
    connection = Connection((HOST, box.port), CREDENTIALS, timeout_s=LIMIT_S, name="stage 1")
    connection.send("real", b"1")
    assert bytes(box.take("real", LIMIT_S)) == b"1"
    connection.close()
    assert eventually(lambda: not box._senders)
    assert (box.failure, box._lying_bytes) == (None, 0)


ZEROS = bytes(NONCE_BYTES)
SAID = {
    "nothing": b"",
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + bytes(100),
    "a failure": message(b"!failure", b"give up, all of you, for ever and ever") * 4,
    "a name": message(b"!hello", b"stage 0 on host 10.0.0.1, device 0 and much more of that"),
    "a tensor": message(b"g|0.0>1.0#1", bytes(4096)),
    "a huge header": struct.pack("<IQ", 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF) * 10,
    "a huge name": MAGIC + ZEROS + struct.pack("<H", 0xFFFF) + bytes(70000),
    "half a greeting": MAGIC + ZEROS + struct.pack("<H", 3) + b"a",
    "no proof": MAGIC + ZEROS + struct.pack("<H", 1) + b"a" + bytes(PROOF_BYTES - 1),
    "a wrong proof": MAGIC + ZEROS + struct.pack("<H", 1) + b"a" + bytes(PROOF_BYTES) + message(b"!failure", b"end"),
    "a proof of nothing": MAGIC + ZEROS + struct.pack("<H", 0) + message(b"!failure", b"x" * PROOF_BYTES),
    "much": bytes(8 << 20),
}


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_nothing_that_a_stranger_says_counts(mailbox, said):
    with ThreadPoolExecutor(1) as pool, stranger(mailbox) as connection:
        waiting = pool.submit(mailbox.take, "awaited", 0.3)
        with contextlib.suppress(OSError):  # the mailbox may have heard enough and hung up
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
        assert is_closed(connection)
        with pytest.raises(MeasurementError, match=r"'awaited' did not arrive within 0\.3 s"):  # no end of its wait
            waiting.result(LIMIT_S)
    require_untouched(mailbox)


def test_who_has_another_secret_is_told_so_and_changes_nothing(mailbox):
    with pytest.raises(MeasurementError, match=r"did not greet as a worker of this program: .* To fix: "):
        Connection((HOST, mailbox.port), OTHERS, timeout_s=LIMIT_S)
    require_untouched(mailbox)


@pytest.mark.parametrize("other", [("links", False), ("test", True)])
def test_the_purpose_and_the_digests_are_part_of_the_proof(other):
    secret = new_secret()
    with contextlib.closing(Mailbox(HOST, Credentials(secret, "test"))) as box:
        with pytest.raises(MeasurementError, match="did not greet"):
            Connection((HOST, box.port), Credentials(secret, *other), timeout_s=LIMIT_S)
        assert box.failure is None


def test_a_greeting_cannot_be_passed_on_to_another_mailbox(quiet):
    """A stranger takes the port of one worker, and passes what a caller says on to another worker."""
    with socket.create_server((HOST, 0)) as server, ThreadPoolExecutor(1) as pool:
        calling = pool.submit(Connection, (HOST, server.getsockname()[1]), CREDENTIALS, LIMIT_S, "stage 0")
        caller, _ = server.accept()
        server.close()
        with caller, stranger(quiet) as connection:
            caller.sendall(read(connection, len(MAGIC) + NONCE_BYTES))
            connection.sendall(read(caller, len(MAGIC) + NONCE_BYTES + 2 + len("stage 0") + PROOF_BYTES))
            assert is_closed(connection)
        with pytest.raises(MeasurementError):
            calling.result(LIMIT_S)
    require_untouched(quiet)


def test_a_recorded_greeting_proves_nothing_on_another_connection(quiet):
    recorded = bytearray()
    with stranger(quiet) as connection:  # a real greeting, and a message
        real = connection.sendall
        tapped = lambda data: (recorded.extend(data), real(data))  # noqa: E731
        tap = type("Tap", (), {"sendall": staticmethod(tapped), "recv": connection.recv, "settimeout": lambda *_: None})
        greeting.introduce(tap, CREDENTIALS, (HOST, quiet.port), "stage 0", LIMIT_S)
        tapped(message(b"first", b"1") + message(b"!bye"))
        assert bytes(quiet.take("first", LIMIT_S)) == b"1"
    with stranger(quiet) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(recorded)
        assert is_closed(connection)
    require_untouched(quiet)


def test_a_caller_refuses_who_only_reflects_its_own_words():
    with socket.create_server((HOST, 0)) as server, ThreadPoolExecutor(1) as pool:
        calling = pool.submit(Connection, (HOST, server.getsockname()[1]), CREDENTIALS, LIMIT_S)
        caller, _ = server.accept()
        with caller:
            caller.sendall(MAGIC + ZEROS)
            heard = read(caller, len(MAGIC) + NONCE_BYTES + 2 + PROOF_BYTES)
            caller.sendall(heard[-PROOF_BYTES:])
            with pytest.raises(MeasurementError, match="does not know this program's secret"):
                calling.result(LIMIT_S)
            assert caller.recv(1) == b"", "it sent a message to a stranger"


def test_a_slow_greeting_ends_in_time(quiet, monkeypatch):
    monkeypatch.setattr(transport, "_GREETING_LIMIT_S", 0.3)
    with stranger(quiet) as connection, contextlib.suppress(ConnectionError):
        start = time.monotonic()
        while time.monotonic() - start < LIMIT_S:
            connection.sendall(MAGIC[:1])
            time.sleep(0.02)
        pytest.fail("the mailbox listened to it all the time")
    require_untouched(quiet)


def test_idle_connections_take_the_place_of_no_peer(quiet, monkeypatch):
    monkeypatch.setattr(transport, "_MOST_STRANGERS", 5)
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(stranger(quiet))
        connection = stack.enter_context(contextlib.closing(Connection((HOST, quiet.port), CREDENTIALS, LIMIT_S)))
        connection.send("real", b"1")
        assert bytes(quiet.take("real", LIMIT_S)) == b"1"
        assert len(quiet._strangers) <= 5
    require_untouched(quiet)


FEW_FILES = """
import resource, sys
from hwaware import transport
from hwaware.greeting import Credentials
transport._ACCEPT_PAUSE_S = transport._STRANGER_PAUSE_S = 0.001
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
box = transport.Mailbox("127.0.0.1", Credentials(b"s" * 32, "test"), peers_stay=True)
print(box.port, flush=True)
print(bytes(box.take("real", 20.0)).decode(), box.failure, flush=True)
sys.stdin.readline()
"""


def test_accepting_goes_on_after_too_many_files():
    pytest.importorskip("resource")
    line = [sys.executable, "-c", FEW_FILES]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        with contextlib.ExitStack() as stack:
            port = int(process.stdout.readline())
            for _ in range(80):
                stack.enter_context(socket.create_connection((HOST, port), timeout=LIMIT_S))
            opened = Connection((HOST, port), Credentials(b"s" * 32, "test"), 2 * LIMIT_S)
            connection = stack.enter_context(contextlib.closing(opened))
            connection.send("real", b"arrived")
            assert process.stdout.readline() == "arrived None\n"
        process.kill()


@pytest.mark.parametrize("code", [errno.ECONNABORTED, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EPROTO])
def test_accepting_goes_on_after_errors_that_pass(quiet, monkeypatch, code):
    monkeypatch.setattr(transport, "_ACCEPT_PAUSE_S", 0.001)
    real, errors = quiet._listener, [OSError(code, "passes")] * 3

    def accept():
        if errors:
            raise errors.pop()
        return real.accept()

    monkeypatch.setattr(quiet, "_listener", SimpleNamespace(accept=accept, shutdown=real.shutdown, close=real.close))
    with stranger(SimpleNamespace(port=real.getsockname()[1])):  # the listener's thread waits in the real accept
        pass
    with contextlib.closing(Connection((HOST, real.getsockname()[1]), CREDENTIALS, LIMIT_S)) as connection:
        connection.send("real", b"1")
        assert bytes(quiet.take("real", LIMIT_S)) == b"1"
    assert (errors, quiet.failure) == ([], None)


def test_only_the_address_of_the_plan_is_listened_on(quiet):
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", quiet.port), timeout=LIMIT_S)


def test_an_address_of_another_host_is_named():
    with pytest.raises(MeasurementError, match=r"does not have the address 192\.0\.2\.1, .* To fix: start Ray"):
        Mailbox("192.0.2.1", CREDENTIALS)


# Peers of the same program that are confused


@pytest.fixture
def peer(quiet):
    connection = Connection((HOST, quiet.port), CREDENTIALS, LIMIT_S, "stage 0")
    yield connection
    connection.close()


@pytest.fixture
def joined(quiet):
    incoming = Incoming(blocking=False)
    incoming.join("g", 1, 3)
    quiet.admit = incoming.admit
    return quiet


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["h|0.0>1.0#1"], "no channel that this worker has joined"),
        (["anything"], "no channel that this worker has joined"),
        (["g|0.0>1.0#2"], "came where number 1 was expected"),
        (["g|0.0>1.0#1", "g|0.0>1.0#1"], "came twice"),
        (["g|0.0>1.0#1", "g|0.0>1.0#3"], "came where number 2 was expected"),
        (["g|0.0>2.0#1"], "does not lead to this worker"),
        (["g|7.0>1.0#1"], "does not lead to this worker"),
        (["g|1.0>1.0#1"], "does not lead to this worker"),
        (["g|0.0>1.0#\u0661"], "came where number 1 was expected"),
        (["ready|g|1.0>0.0#1"], "does not lead to this worker"),  # nobody waits for it with overlapped sends
    ],
)
def test_a_message_that_no_channel_expects_ends_the_training_and_leaves_nothing(joined, peer, keys, reason):
    for key in keys:
        peer.send(key, b"1234")
    with pytest.raises(PeerFailedError, match=f"Unexpected message of stage 0: .*{reason}"):
        joined.take("g|0.0>1.0#9", LIMIT_S)
    assert eventually(lambda: not joined._senders)
    assert (joined.pending(), joined._lying_bytes) == (0, 0)


def test_a_channel_belongs_to_one_connection(joined, peer):
    peer.send("g|0.0>1.0#1", b"1")
    assert bytes(joined.take("g|0.0>1.0#1", LIMIT_S)) == b"1"
    with contextlib.closing(Connection((HOST, joined.port), CREDENTIALS, LIMIT_S, "stage 2")) as other:
        other.send("g|0.0>1.0#2", b"2")
        with pytest.raises(PeerFailedError, match=r"Unexpected message of stage 2: .* a channel of stage 0"):
            joined.take("g|0.0>1.0#2", LIMIT_S)


def test_a_taken_message_does_not_come_again(joined, peer):
    peer.send("g|0.0>1.0#1", b"1")
    assert bytes(joined.take("g|0.0>1.0#1", LIMIT_S)) == b"1"
    peer.send("g|0.0>1.0#1", b"1")
    with pytest.raises(PeerFailedError, match="number 2 was expected"):
        joined.take("g|0.0>1.0#2", LIMIT_S)


def test_another_length_is_refused(quiet, peer):
    peer.send("key", b"12345")
    with pytest.raises(PeerFailedError, match=r"'key' of stage 0 has 5 bytes, expected 4\."):
        quiet.take("key", LIMIT_S, 4)
    assert (quiet.pending(), quiet._lying_bytes) == (0, 0)


def test_answers_have_no_bytes():
    incoming = Incoming(blocking=True)
    incoming.join("g", 0, 2)
    sender = object()
    incoming.admit("ready|g|0.0>1.0#1", 0, sender)
    incoming.admit("done|g|0.0>1.0#1", 0, sender)
    with pytest.raises(UnexpectedMessageError, match="expected none"):
        incoming.admit("ready|g|0.0>1.0#2", 1, sender)


def test_a_peer_cannot_fill_the_memory(monkeypatch):
    monkeypatch.setattr(transport, "_FULL_LIMIT_S", 0.2)
    with contextlib.closing(Mailbox(HOST, CREDENTIALS, peers_stay=True, most_bytes=1 << 20)) as box:
        peer = Connection((HOST, box.port), CREDENTIALS, LIMIT_S, "stage 0")
        peer.send("a", bytes(600 << 10))
        peer.send("b", bytes(600 << 10))
        assert eventually(lambda: box.pending() == 1)
        assert bytes(box.take("a", LIMIT_S)) == bytes(600 << 10)  # which makes room for the next
        assert eventually(lambda: box.pending() == 1)
        peer.send("c", bytes(600 << 10))
        with pytest.raises(PeerFailedError, match=r"'c' has 614400 bytes, and 615424 of the 1048576 bytes"):
            box.take("c", LIMIT_S)
        assert eventually(lambda: not box._senders)
        assert (box.pending(), box._lying_bytes) == (0, 0)
        peer.close()


def test_a_message_that_breaks_off_keeps_no_memory(quiet, peer):
    peer._socket.sendall(message(b"key", bytes(10))[:-5])
    assert eventually(lambda: quiet._lying_bytes > 0)
    peer._socket.shutdown(socket.SHUT_RDWR)
    assert eventually(lambda: quiet._lying_bytes == 0)


# Digests


@pytest.fixture
def sealed():
    credentials = Credentials(new_secret(), "test", digests=True)
    box = Mailbox(HOST, credentials, peers_stay=True)
    yield box, Connection((HOST, box.port), credentials, LIMIT_S, "stage 0")
    box.close()


def test_messages_with_digests_arrive(sealed):
    box, peer = sealed
    for number in range(3):
        peer.send(str(number), bytes(number * 1000))
    assert [len(box.take(str(number), LIMIT_S)) for number in range(3)] == [0, 1000, 2000]
    peer.close()
    assert eventually(lambda: not box._senders)
    assert box.failure is None


def changed(data):
    return data[:-40] + bytes([data[-40] ^ 1]) + data[-39:]


@pytest.mark.parametrize(
    "tamper",
    [
        lambda first, second: first + changed(second),  # in its payload
        lambda first, second: first + second[:12] + b"B" + second[13:],  # in its key
        lambda first, second: first + first,  # repeated
        lambda first, second: second + first,  # in another order
        lambda first, second: first + second[:-32] + bytes(32),
    ],
    ids=["payload", "key", "repeated", "order", "digest"],
)
def test_digests_show_what_somebody_changed_on_the_way(sealed, tamper):
    box, peer = sealed
    sent = []
    for key, payload in ((b"a", bytes(100)), (b"b", bytes(100))):
        head = struct.pack("<IQ", len(key), len(payload)) + key
        sent.append(head + payload + peer._seal.digest(memoryview(head), memoryview(payload)))
    peer._socket.sendall(tamper(*sent))
    with pytest.raises(PeerFailedError, match="Unexpected message of stage 0: "):
        box.take("never", LIMIT_S)
    peer.close()


# Who knows the secret


def test_all_meshes_of_a_program_get_the_same_secret(monkeypatch):
    """Alpa launches them in threads."""

    def drawn_slowly():
        time.sleep(0.05)
        return new_secret()

    monkeypatch.setattr(leaves, "_secrets", {})
    monkeypatch.setattr(greeting, "new_secret", drawn_slowly)
    with ThreadPoolExecutor(4) as pool:
        found = {each.result() for each in [pool.submit(leaves.program_secret) for _ in range(4)]}
    assert len(found) == 1
    assert leaves.program_secret() in found


def test_another_process_is_another_program(monkeypatch):
    monkeypatch.setattr(leaves, "_secrets", {})
    own = leaves.program_secret()
    monkeypatch.setattr(leaves.os, "getpid", lambda: -1)
    assert leaves.program_secret() != own


# Where the profiler listens


def test_strangers_lose_no_link_while_profiling(ends):
    source, target = ends
    stop = threading.Event()

    def disturb():
        while not stop.is_set():
            for end in ends:
                for said in ("HTTP", "a failure", "a tensor", "a wrong proof"):
                    with socket.create_connection((HOST, end.port), timeout=LIMIT_S) as connection:
                        connection.sendall(SAID[said])

    policy = QUICK._replace(message_bytes=(1024, 65536), repeats=3, large_repeats=2, tiny_repeats=4)
    with ThreadPoolExecutor(2) as pool:
        disturbing = pool.submit(disturb)
        answered = pool.submit(target.answer, "a>b", (HOST, source.port), LIMIT_S)
        timing = source.time_messages("a>b", (HOST, target.port), policy, LIMIT_S)
        stop.set()
        disturbing.result(LIMIT_S)
        assert answered.result(LIMIT_S) > 4
    assert [nbytes for nbytes, _ in timing["messages"]] == [1024, 65536]
    assert timing["corrupt"] == []
