"""Encrypted connections: arrays arrive as sent, who watches the wire sees none, and others are refused."""

import contextlib
import os
import socket
import ssl
import sys
import threading

import numpy as np
import pytest

from hwaware import encryption, transport
from hwaware.encryption import Encryption, new_identity
from hwaware.errors import MeasurementError, UnusableInputError
from hwaware.greeting import MAGIC, Credentials, new_secret
from hwaware.transport import Connection, Mailbox

pytest.importorskip("cryptography")
HOST, LIMIT_S = "127.0.0.1", 10.0
SECRET = new_secret()
PLAIN = Credentials(SECRET, "test")
ENCRYPTED = Credentials(SECRET, "test", encryption=Encryption(new_identity()))
OTHERS = Credentials(SECRET, "test", encryption=Encryption(new_identity()))
CONNECT = socket.create_connection
ARRAY = np.arange(1 << 20, dtype=np.float32)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(transport, "_AGAIN_S", (0.01,))


def box_of(credentials, **options):
    return contextlib.closing(Mailbox(HOST, credentials, peers_stay=True, **options))


class Relay:
    """Forward one connection to a mailbox, and keep all bytes that pass."""

    def __init__(self, port):
        self.seen = {True: b"", False: b""}
        self._server = socket.create_server((HOST, 0))
        self.port = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._run, args=(port,), daemon=True)
        self._thread.start()

    def _run(self, port):
        with self._server, self._server.accept()[0] as caller, CONNECT((HOST, port)) as box:
            back = threading.Thread(target=self._pass, args=(box, caller, False), daemon=True)
            back.start()
            self._pass(caller, box, True)
            back.join(LIMIT_S)

    def _pass(self, source, target, forward):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen[forward] += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def join(self):
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


def sent_through_relay(credentials, monkeypatch):
    """Send an array through a relay that the sender takes for the mailbox; return the bytes that passed."""
    with box_of(credentials) as box:
        relay = Relay(box.port)
        monkeypatch.setattr(
            transport.socket, "create_connection", lambda _, **options: CONNECT((HOST, relay.port), **options)
        )
        connection = Connection((HOST, box.port), credentials, LIMIT_S, "stage 7")
        monkeypatch.setattr(transport.socket, "create_connection", CONNECT)
        connection.send("weights", ARRAY)
        np.testing.assert_array_equal(np.frombuffer(box.take("weights", LIMIT_S), ARRAY.dtype), ARRAY)
        connection.close()
        relay.join()
        assert box.failure is None
    return relay.seen


def test_who_relays_the_bytes_sees_no_plain_text(monkeypatch):
    plain = sent_through_relay(PLAIN, monkeypatch)
    encrypted = sent_through_relay(ENCRYPTED, monkeypatch)
    for part in (b"weights", b"stage 7", MAGIC, ARRAY[1000:1010].tobytes()):
        assert part in plain[True]
        assert part not in encrypted[True] + encrypted[False]
    assert len(encrypted[True]) > ARRAY.nbytes
    assert b"hwaware" not in encrypted[True] + encrypted[False]  # the certificates pass encrypted, too


@pytest.mark.parametrize("digests", [False, True])
def test_messages_of_every_size_arrive(digests):
    credentials = Credentials(SECRET, "test", digests, ENCRYPTED.encryption)
    with box_of(credentials) as box:
        with contextlib.closing(Connection((HOST, box.port), credentials, LIMIT_S)) as connection:
            for size in (0, 1, 16384, (1 << 18) + 1, 5 << 20):
                payload = os.urandom(size)
                connection.send(f"k{size}", payload)
                assert bytes(box.take(f"k{size}", LIMIT_S)) == payload
            assert connection.is_lost() is None
            assert box.failure is None


def test_a_message_may_be_longer_than_ssl_reads_at_once():
    """Send the start of a message of 2 GiB: its memory is only reserved, never used."""
    with box_of(ENCRYPTED) as box:
        connection = Connection((HOST, box.port), ENCRYPTED, LIMIT_S, "stage 2")
        connection._socket.sendall(transport._head(b"long", 1 << 31).tobytes() + b"start")
        connection.break_off()
        with pytest.raises(MeasurementError, match="the peer closed the connection within a message"):
            box.take("long", LIMIT_S)
        connection.close()


def test_the_end_of_an_encrypted_mailbox_is_seen_and_a_lost_peer_is_named():
    with box_of(ENCRYPTED) as box:
        connection = Connection((HOST, box.port), ENCRYPTED, LIMIT_S, "stage 3")
        assert connection.is_lost() is None
        socket.socket.shutdown(connection._socket, socket.SHUT_RDWR)
        with pytest.raises(MeasurementError, match="Lost stage 3: its process ended"):
            box.take("never", LIMIT_S)
        connection.close()
        other = Connection((HOST, box.port), ENCRYPTED, LIMIT_S)
        assert other.is_lost() is None
        box.close()
        end = threading.Event()
        while other.is_lost() is None and not end.wait(0.01):
            pass
        other.close()


@pytest.mark.parametrize(
    ("callers", "boxes", "reason"),
    [
        (OTHERS, ENCRYPTED, "certificate verify failed|self.signed|alert|reset|closed"),
        (ENCRYPTED, PLAIN, "wrong version number|WRONG_VERSION_NUMBER"),
        (PLAIN, ENCRYPTED, "closed the connection within the greeting|reset|timed out|too long"),
    ],
    ids=["another certificate", "a plain mailbox", "a plain caller"],
)
def test_others_are_refused(callers, boxes, reason, monkeypatch):
    monkeypatch.setattr(transport, "_GREETING_LIMIT_S", 0.3)
    with box_of(boxes) as box:
        with pytest.raises(MeasurementError, match=rf"did not greet as a worker of this program: .*({reason})"):
            Connection((HOST, box.port), callers, 2.0)
        assert (box.failure, box.pending()) == (None, 0)
        with contextlib.closing(Connection((HOST, box.port), boxes, LIMIT_S)) as connection:
            connection.send("real", b"1")
            assert bytes(box.take("real", LIMIT_S)) == b"1"


def test_a_caller_without_a_certificate_is_refused():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with box_of(ENCRYPTED) as box:
        with socket.create_connection((HOST, box.port), timeout=LIMIT_S) as plain:
            with context.wrap_socket(plain) as caller, pytest.raises(OSError, match=r"(?i)certificate|reset|eof"):
                assert caller.recv(100)
        assert box.failure is None


def test_who_holds_the_certificate_still_has_to_know_the_secret():
    stranger = Credentials(new_secret(), "test", encryption=ENCRYPTED.encryption)
    with box_of(ENCRYPTED) as box:
        with pytest.raises(MeasurementError, match="did not greet"):
            Connection((HOST, box.port), stranger, LIMIT_S)
        assert box.failure is None


def test_callers_who_never_shake_hands_are_dropped(monkeypatch):
    monkeypatch.setattr(transport, "_MOST_STRANGERS", 4)
    with box_of(ENCRYPTED) as box, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection((HOST, box.port), timeout=LIMIT_S)) for _ in range(12)]
        for connection in idle[:8]:
            assert connection.recv(1) == b""
        with contextlib.closing(Connection((HOST, box.port), ENCRYPTED, LIMIT_S)) as connection:
            connection.send("real", b"1")
            assert bytes(box.take("real", LIMIT_S)) == b"1"


def test_no_key_stays_on_a_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(encryption.tempfile, "tempdir", str(tmp_path))
    Encryption(new_identity())
    monkeypatch.delattr(encryption.os, "memfd_create", raising=False)
    Encryption(new_identity())  # as on macOS
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_named(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cryptography", None)
        with pytest.raises(UnusableInputError, match=r"cannot make a certificate: .*To fix: install the package"):
            new_identity()
    monkeypatch.setattr(encryption.ssl, "HAS_TLSv1_3", False)
    with pytest.raises(UnusableInputError, match=r"has no TLS 1\.3.*To fix: use a Python"):
        new_identity()
