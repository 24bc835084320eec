"""Messages between workers: what is sent arrives once, by its key, whole; every wait ends."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hwaware import greeting, transport
from hwaware.errors import MeasurementError
from hwaware.greeting import Credentials, new_secret
from hwaware.transport import Connection, Mailbox, PeerFailedError

LIMIT_S = 10.0
CREDENTIALS = Credentials(new_secret(), "test")


@pytest.fixture
def mailbox():
    box = Mailbox("127.0.0.1", CREDENTIALS)
    yield box
    box.close()


@pytest.fixture
def connection(mailbox):
    opened = Connection(("127.0.0.1", mailbox.port), CREDENTIALS, timeout_s=LIMIT_S)
    yield opened
    opened.close()


def test_a_mailbox_listens_on_the_first_free_port_of_its_own(mailbox):
    taken = mailbox.port
    free = Mailbox("127.0.0.1", CREDENTIALS)
    last = free.port
    free.close()
    other = Mailbox("127.0.0.1", CREDENTIALS, ports=[taken, last])
    try:
        assert other.port == last
        with pytest.raises(
            MeasurementError, match=f"cannot listen on any of the ports {taken} to {last}: Address already in use"
        ):
            Mailbox("127.0.0.1", CREDENTIALS, ports=[taken, last])
    finally:
        other.close()


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 5 << 20])
def test_a_message_arrives_whole(mailbox, connection, nbytes):
    payload = np.random.default_rng(nbytes).bytes(nbytes)
    connection.send("key", payload)
    assert bytes(mailbox.take("key", LIMIT_S)) == payload


@pytest.mark.parametrize("digests", [False, True])
@pytest.mark.parametrize("nbytes", [0, 1000, 5 << 20])
def test_a_part_of_a_file_arrives_whole(tmp_path, nbytes, digests):
    credentials = Credentials(new_secret(), "test", digests)
    content = np.random.default_rng(nbytes).bytes(nbytes + 9)
    (tmp_path / "file").write_bytes(content)
    with contextlib.closing(Mailbox("127.0.0.1", credentials)) as box, (tmp_path / "file").open("rb") as file:
        with contextlib.closing(Connection(("127.0.0.1", box.port), credentials, LIMIT_S)) as opened:
            opened.give_way()
            opened.send_file("key", file, 7, nbytes)
            opened.send("next", b"1")
            assert bytes(box.take("key", LIMIT_S)) == content[7:-2]
            assert bytes(box.take("next", LIMIT_S)) == b"1"


def test_a_file_that_is_too_short_breaks_the_message(mailbox, connection, tmp_path):
    (tmp_path / "file").write_bytes(b"12")
    with (tmp_path / "file").open("rb") as file, pytest.raises(MeasurementError, match="the file is shorter"):
        connection.send_file("key", file, 0, 3)


def test_messages_that_give_way_have_the_lowest_priority(mailbox, connection):
    connection.give_way()
    assert connection._socket.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == 0b100  # RFC 8622
    assert connection._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == 1


@pytest.mark.parametrize("array", [np.arange(12, dtype=np.float32).reshape(3, 4), np.empty((0, 3)), np.float64(2.5)])
def test_arrays_are_sent_as_their_bytes(mailbox, connection, array):
    connection.send("array", array)
    assert bytes(mailbox.take("array", LIMIT_S)) == array.tobytes()


def test_a_taken_message_keeps_its_bytes_when_others_arrive(mailbox, connection):
    """On CPUs, JAX computes with a message's own memory."""
    connection.send("first", b"1" * 4096)
    first = mailbox.take("first", LIMIT_S)
    for key in ("second", "third"):
        connection.send(key, b"2" * 4096)
        mailbox.take(key, LIMIT_S)
    assert bytes(first) == b"1" * 4096


def test_messages_are_taken_by_key_in_any_order_and_once(mailbox, connection):
    for name in ("ä", "b", "c"):
        connection.send(name, name.encode())
    assert [bytes(mailbox.take(name, LIMIT_S)).decode() for name in ("c", "ä", "b")] == ["c", "ä", "b"]
    assert mailbox.pending() == 0
    with pytest.raises(MeasurementError, match=r"Message 'c' did not arrive within 0\.05 s"):
        mailbox.take("c", 0.05)


def test_a_message_waits_until_it_is_taken_while_others_pass(mailbox, connection):
    connection.send("early", b"1")
    connection.send("late", b"2")
    assert bytes(mailbox.take("late", LIMIT_S)) == b"2"
    assert mailbox.pending() == 1


def test_take_wakes_up_when_the_message_arrives(mailbox, connection):
    timer = threading.Timer(0.1, connection.send, ("key", b"x"))
    timer.start()
    start = time.monotonic()
    assert bytes(mailbox.take("key", LIMIT_S)) == b"x"
    assert time.monotonic() - start < LIMIT_S / 2
    timer.join()


def test_many_senders_at_once(mailbox):
    def send(sender):
        with contextlib.closing(Connection(("127.0.0.1", mailbox.port), CREDENTIALS)) as connection:
            for number in range(20):
                connection.send(f"{sender}/{number}", struct.pack("<II", sender, number) * 1000)

    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(4)]
    for thread in threads:
        thread.start()
    for sender in range(4):
        for number in range(20):
            assert bytes(mailbox.take(f"{sender}/{number}", LIMIT_S)) == struct.pack("<II", sender, number) * 1000
    for thread in threads:
        thread.join()


def test_what_was_sent_before_closing_still_arrives(mailbox, connection):
    connection.send("last", b"z" * 100_000)
    connection.close()
    assert len(mailbox.take("last", LIMIT_S)) == 100_000


def test_the_last_bytes_of_a_long_message_need_no_more_after_them(mailbox):
    peer = Connection(("127.0.0.1", mailbox.port), CREDENTIALS)
    payload = np.random.default_rng(0).bytes(3 << 20)
    peer._socket.sendall(struct.pack("<IQ", 3, len(payload)) + b"key")
    for begin, end in ((0, 1000), (1000, 2 << 20), (2 << 20, -1), (-1, len(payload))):
        peer._socket.sendall(payload[begin:end])
        time.sleep(0.02)
    assert bytes(mailbox.take("key", LIMIT_S)) == payload
    peer.send("short", b"1")
    assert bytes(mailbox.take("short", LIMIT_S)) == b"1"
    peer._socket.sendall(struct.pack("<IQ", 3, len(payload)) + b"key" + payload[:1000])
    peer._socket.close()
    with pytest.raises(MeasurementError, match="within a message"):
        mailbox.take("key", LIMIT_S)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_few_packets_of_a_long_message_wake_its_receiver(mailbox):
    def wakes():
        tasks = [Path("/proc/self/task") / str(one.native_id) / "status" for one in threading.enumerate()]
        lines = [line for task in tasks for line in task.read_text().splitlines()]
        return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary"))

    peer = Connection(("127.0.0.1", mailbox.port), CREDENTIALS)
    peer._socket.sendall(struct.pack("<IQ", 3, 8 << 20) + b"key")
    before = wakes()
    for _ in range(1024):
        peer._socket.sendall(bytes(8 << 10))
        time.sleep(2e-4)
    assert len(mailbox.take("key", LIMIT_S)) == 8 << 20
    assert wakes() - before < 1024 + 300  # this thread's own rests, and hardly more
    peer.close()


def test_a_peer_that_dies_within_a_message_ends_the_wait(mailbox):
    peer = Connection(("127.0.0.1", mailbox.port), CREDENTIALS, name="stage 2")
    peer._socket.sendall(struct.pack("<IQ", 3, 1000) + b"key" + b"only a part")
    peer._socket.close()
    start = time.monotonic()
    with pytest.raises(MeasurementError, match=r"Lost stage 2: .*broke off.*within a message.* To fix: "):
        mailbox.take("key", LIMIT_S)
    assert time.monotonic() - start < LIMIT_S / 2


def test_nobody_at_the_address():
    with socket.create_server(("127.0.0.1", 0)) as closed_soon:
        port = closed_soon.getsockname()[1]
    with pytest.raises(MeasurementError, match=rf"No worker answers at 127\.0\.0\.1:{port}.* To fix: "):
        Connection(("127.0.0.1", port), CREDENTIALS, timeout_s=1)


def test_connecting_and_greeting_share_one_limit(mailbox, monkeypatch):
    connect, introduce, clock, left = socket.create_connection, greeting.introduce, [1000.0], []

    def slowly(*arguments, **options):
        clock[0] += 7.0
        return connect(*arguments, **options)

    def introduced(connection, credentials, address, name, limit_s):
        left.append(limit_s)
        monkeypatch.undo()
        return introduce(connection, credentials, address, name, limit_s)

    monkeypatch.setattr(socket, "create_connection", slowly)
    monkeypatch.setattr(greeting, "introduce", introduced)
    # The mailbox, which accepts meanwhile, sleeps.
    monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep))
    Connection(("127.0.0.1", mailbox.port), CREDENTIALS, timeout_s=LIMIT_S).close()
    assert left == [LIMIT_S - 7.0]


@contextlib.contextmanager
def listener():
    """A listener that greets as a mailbox, and then does what the test says."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = ("127.0.0.1", server.getsockname()[1])

        def accept():
            peer, _ = server.accept()
            peer.sendall(greeting.hear(peer, CREDENTIALS, address, LIMIT_S).answer)
            peer.settimeout(None)
            return peer

        yield address, accept


def test_a_peer_that_takes_nothing_ends_the_send():
    with listener() as (address, accept), ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept)
        connection = Connection(address, CREDENTIALS, timeout_s=LIMIT_S, room_s=0.2)
        with accepted.result(LIMIT_S):
            with pytest.raises(MeasurementError, match="could not be sent"):
                connection.send("key", bytes(64 << 20))
            connection.close()


def test_nothing_follows_the_half_of_a_message():
    """Its receiver would take what follows for the other half."""
    with contextlib.closing(Mailbox("127.0.0.1", CREDENTIALS, bound=0, peers_stay=True)) as box:
        with contextlib.closing(Connection(("127.0.0.1", box.port), CREDENTIALS, LIMIT_S, room_s=0.2)) as connection:
            with pytest.raises(MeasurementError, match="timed out"):
                connection.send("half", bytes(1 << 26))
            with box.patiently():  # now the mailbox reads on
                with pytest.raises(MeasurementError, match="could not be sent"):
                    connection.send("next", b"1" * (1 << 26))
        with pytest.raises(PeerFailedError, match="the peer closed the connection within a message"):
            box.take("half", LIMIT_S)


def test_the_limit_is_on_each_wait_not_on_the_whole_message():
    """A long message over a slow link takes longer than the limit, while some of it is taken all the time."""

    def read_slowly(accept):
        received = 0
        with accept() as peer:
            while True:
                part = peer.recv(1 << 20)
                if not part:
                    return received
                received += len(part)
                time.sleep(0.05)

    with listener() as (address, accept), ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_slowly, accept)
        connection = Connection(address, CREDENTIALS, timeout_s=LIMIT_S, room_s=2.0)
        start = time.monotonic()
        try:
            connection.send("key", bytes(64 << 20))
            elapsed = time.monotonic() - start
        finally:
            connection.close()  # else the reader would wait forever after a failure
        received = reading.result(LIMIT_S)
    assert elapsed > 2.0, "too fast to show anything"
    assert received > 64 << 20


@pytest.mark.parametrize("call", ["is_lost", "break_off"])
def test_no_other_thread_uses_a_socket_while_it_closes(mailbox, connection, call):
    """The system gives the number of a closed socket to the next one."""
    used = []

    class Closing(socket.socket):
        def close(self):
            thread = threading.Thread(target=getattr(connection, call), daemon=True)
            thread.start()
            thread.join(0.2)
            used.append(not thread.is_alive())
            super().close()

    connection._socket = Closing(fileno=connection._socket.detach())
    connection.close()
    assert used == [False]


def test_closing_twice_is_harmless():
    box = Mailbox("127.0.0.1", CREDENTIALS)
    box.close()
    box.close()
    assert box.failure is None


def eventually(condition):
    end = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def connect():
    """Opens connections that are closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda box: stack.enter_context(contextlib.closing(Connection(("127.0.0.1", box.port), CREDENTIALS)))


@pytest.fixture
def bounded():
    box = Mailbox("127.0.0.1", CREDENTIALS, bound=3, peers_stay=True)
    yield box
    box.close()


def test_a_sender_that_runs_ahead_is_held_back(bounded, connect):
    connection = connect(bounded)
    for number in range(10):
        connection.send(str(number), b"x")
    assert eventually(lambda: bounded.pending() == 3)
    time.sleep(0.1)
    assert bounded.pending() == 3
    assert [bytes(bounded.take(str(number), LIMIT_S)) for number in range(10)] == [b"x"] * 10


def test_the_bound_does_not_hold_for_who_waits(bounded, connect):
    connection = connect(bounded)
    for number in range(10):
        connection.send(str(number), str(number).encode())
    assert bytes(bounded.take("9", LIMIT_S)) == b"9"  # behind six that lie beyond the bound
    with bounded.patiently():
        assert eventually(lambda: bounded.pending() == 9)


def test_senders_do_not_hold_each_other_back(bounded, connect):
    full, other = (connect(bounded) for _ in range(2))
    for number in range(10):
        full.send(str(number), b"")
    assert eventually(lambda: bounded.pending() == 3)
    other.send("other", b"")
    assert eventually(lambda: bounded.pending() == 4)


def test_a_peer_that_ends_without_a_farewell_has_failed(bounded):
    connection = Connection(("127.0.0.1", bounded.port), CREDENTIALS, name="stage 3 on host c")
    connection.send("first", b"1")
    connection._socket.close()  # as the end of a process closes it
    assert bytes(bounded.take("first", LIMIT_S)) == b"1"  # what had arrived is still there
    with pytest.raises(PeerFailedError, match=r"Lost stage 3 on host c: its process ended\."):
        bounded.take("second", LIMIT_S)


def test_whatever_ends_the_receiving_ends_the_waiting(bounded, connect, monkeypatch):
    told = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    bounded.admit = lambda key, nbytes, sender: [][1]  # as for an array to a device that the worker lacks
    connect(bounded).send("key", b"1")
    with pytest.raises(PeerFailedError, match="list index out of range"):
        bounded.take("key", LIMIT_S)
    assert eventually(lambda: [one.exc_type for one in told] == [IndexError])  # with its place in the code


def test_a_farewell_is_no_failure(bounded):
    Connection(("127.0.0.1", bounded.port), CREDENTIALS).close()
    with pytest.raises(MeasurementError, match="did not arrive within"):
        bounded.take("never", 0.3)
    assert bounded.failure is None


def test_connections_that_peers_have_ended_are_not_kept_open(mailbox):
    for k in range(3):
        one = Connection(("127.0.0.1", mailbox.port), CREDENTIALS)
        one.send(str(k), b"x")
        one.close()
    assert [bytes(mailbox.take(str(k), LIMIT_S)) for k in range(3)] == [b"x"] * 3
    assert eventually(lambda: not mailbox._senders)


def test_a_mailbox_whose_listener_has_gone_says_so(mailbox):
    mailbox._listener.shutdown(socket.SHUT_RDWR)
    with pytest.raises(PeerFailedError, match="takes no more connections"):
        mailbox.take("never", LIMIT_S)


def test_room_may_be_waited_for_longer_than_for_a_connection(mailbox):
    with contextlib.closing(
        Connection(("127.0.0.1", mailbox.port), CREDENTIALS, timeout_s=3.0, room_s=77.0)
    ) as connection:
        assert connection._socket.gettimeout() == 77.0


def test_the_end_is_seen_also_by_who_has_a_thousand_files_open(bounded):
    resource = pytest.importorskip("resource")
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 1500:
        pytest.skip("this process may not have so many files")
    connection = Connection(("127.0.0.1", bounded.port), CREDENTIALS)
    low = connection._socket
    connection._socket = socket.socket(fileno=os.dup2(low.fileno(), 1500))
    low.close()
    assert connection.is_lost() is None
    bounded.close()
    assert eventually(lambda: connection.is_lost() is not None)
    connection.close()


def test_the_end_of_a_mailbox_is_seen_by_who_is_connected(bounded):
    connection = Connection(("127.0.0.1", bounded.port), CREDENTIALS)
    assert connection.is_lost() is None
    bounded.close()
    assert eventually(lambda: connection.is_lost() is not None)
    connection.close()


def test_a_thread_that_reads_keeps_its_socket_while_the_mailbox_closes():
    """The system gives the number of a closed socket to the next one, from which the thread would read on."""
    reads, closed, numbers, arrived, readers = threading.Event(), threading.Event(), [], [], []
    box = Mailbox("127.0.0.1", CREDENTIALS, on_arrival=lambda *arrival: arrived.append(arrival))

    def admit(key, nbytes, sender):
        readers.append(threading.current_thread())
        reads.set()
        assert closed.wait(LIMIT_S)
        numbers.append(sender.socket.fileno())

    box.admit = admit
    with contextlib.closing(Connection(("127.0.0.1", box.port), CREDENTIALS)) as connection:
        connection.send("key", b"1")
        assert reads.wait(LIMIT_S)
        box.close()
        closed.set()
        readers[0].join(LIMIT_S)
        assert not readers[0].is_alive()
    assert numbers[0] >= 0
    assert (arrived, box.pending(), box.failure) == ([], 0, None)


def test_who_connects_while_a_mailbox_closes_sees_its_end(bounded, monkeypatch):
    accepted, closed, asked = threading.Event(), threading.Event(), transport._keep_asking

    def slow_to_accept(connection):
        if threading.current_thread().name == "hwaware-mailbox":
            accepted.set()
            closed.wait(LIMIT_S)
        asked(connection)

    monkeypatch.setattr(transport, "_keep_asking", slow_to_accept)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(Connection, ("127.0.0.1", bounded.port), CREDENTIALS)
        assert accepted.wait(LIMIT_S)
        bounded.close()
        closed.set()
        with pytest.raises(MeasurementError, match="No worker answers"):
            connecting.result(LIMIT_S)


def test_arrivals_are_told(mailbox, connection):
    arrivals = []
    mailbox.on_arrival = lambda key, time_s: arrivals.append((key, time_s))
    before_s = time.monotonic()
    connection.send("k", b"v")
    mailbox.take("k", LIMIT_S)
    assert [key for key, _ in arrivals] == ["k"]
    assert before_s <= arrivals[0][1] <= time.monotonic()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the rate of a connection")
def test_a_paced_connection_is_as_slow_as_asked_until_the_limit_goes():
    mailbox = Mailbox("127.0.0.1", CREDENTIALS)
    connection = Connection(("127.0.0.1", mailbox.port), CREDENTIALS)
    try:
        for rate, expected in (
            (5e6, 5_000_000),
            (0.5, 1_000_000),
            (1e12, 2**32 - 1),
            (3e6, 3_000_000),
            (None, 2**32 - 1),
        ):
            connection.pace(rate)
            (found,) = struct.unpack("I", connection._socket.getsockopt(socket.SOL_SOCKET, 47, 4))
            assert found == expected
    finally:
        connection.close()
        mailbox.close()
