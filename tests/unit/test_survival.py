"""Vaults, pieces and the history of programs that survive, without Ray."""

import contextlib
import os
import queue
import socket
import threading
import time
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy
import pytest
from click.testing import CliRunner

from hwaware import ray_cluster
from hwaware.cli import main
from hwaware.errors import HwawareError, MeasurementError, RecordError, WorkerFailedError
from hwaware.greeting import Credentials, new_secret
from hwaware.history import History, HistoryEvent
from hwaware.patching import meshes
from hwaware.runtime.checkpoints import Box
from hwaware.runtime.heartbeat import end_process
from hwaware.runtime.programs import ProgramFiles
from hwaware.survival import asking, copier, copying, draining, moving, recipes, recovering, vaults
from hwaware.survival import run as run_module
from hwaware.survival.copying import Copies, _Flight
from hwaware.survival.handing import Handed, Memory, Part, laid_out, opened
from hwaware.survival.pieces import Piece, Wanted, assembled, bytes_of, covers, digest_of
from hwaware.survival.points import Point
from hwaware.survival.run import Run
from hwaware.survival.sending import (
    PURPOSE,
    Forward,
    Mark,
    Sender,
    encoded,
    forwarder,
    mark_key,
    messages_of,
    unreadable,
)
from hwaware.survival.vault import Drained, Vault
from hwaware.survival.worker import SurvivingWorker
from hwaware.transport import Connection, Mailbox

LIMIT_S = 20.0


def piece(name, start, block):
    data = bytes_of(block)
    return Piece(name, start, block.shape, block.dtype.name, digest_of(data)), data


def test_an_array_is_put_together_from_other_cuts():
    whole = numpy.arange(24, dtype=numpy.float32).reshape(6, 4)
    given = [piece((3, 1), (0, 0), whole[:2]), piece((3, 1), (2, 0), whole[2:]), piece((3, 2), (0, 0), -whole)]
    boxes = (Box((0, 0), (3, 4)), Box((3, 0), (3, 4)), Box((0, 2), (6, 2)))
    found = assembled(Wanted((3, 1), 7, whole.dtype, boxes), given)
    for block, expected in zip(found, (whole[:3], whole[3:], whole[:, 2:])):
        numpy.testing.assert_array_equal(block, expected)


def test_damaged_and_missing_pieces_are_refused():
    whole = numpy.arange(4, dtype=numpy.int32)
    wanted = Wanted((1, 0), 7, whole.dtype, (Box((0,), (4,)),))
    good, data = piece((1, 0), (0,), whole)
    with pytest.raises(MeasurementError, match="output 0 of call 1 is damaged"):
        assembled(wanted, [(good, bytes_of(whole + 1))])
    with pytest.raises(MeasurementError, match="gave 2 of 4 numbers"):
        assembled(wanted, [piece((1, 0), (0,), whole[:2])])
    numpy.testing.assert_array_equal(assembled(wanted, [(good, data)])[0], whole)


def test_pieces_of_two_cuts_that_leave_a_hole_are_not_the_whole():
    """After a move, a vault has all pieces of the old cut, and perhaps only some of the new one."""
    whole = numpy.arange(1, 17, dtype=numpy.float32).reshape(4, 4)
    rows, columns = ([piece((1, 0), start, whole[at]) for start, at in cut] for cut in (
        (((0, 0), numpy.s_[:2]), ((2, 0), numpy.s_[2:])),
        (((0, 0), numpy.s_[:, :2]), ((0, 2), numpy.s_[:, 2:])),
    ))  # fmt: skip
    holey = [rows[0], columns[0]]  # as many numbers as the whole, but four of them twice
    wanted = Wanted((1, 0), 7, whole.dtype, (Box((0, 0), (4, 4)),))
    assert not covers([one for one, _ in holey], whole.shape)
    with pytest.raises(MeasurementError, match="gave 12 of 16 numbers"):
        assembled(wanted, holey)
    for given in (rows, columns, [*holey, rows[1]]):
        assert covers([one for one, _ in given], whole.shape)
        numpy.testing.assert_array_equal(assembled(wanted, given)[0], whole)
    assert covers([piece((1, 0), (), numpy.ones(()))[0]], ())
    assert covers([piece((1, 0), (0,), numpy.ones(0))[0]], (0,))
    assert not covers([], (0,))


def test_a_copy_does_not_change_with_its_array():
    array = numpy.zeros(4)
    data = bytes_of(array)
    array += 1
    assert not data.any()


SECRET = new_secret()


@pytest.fixture
def vault():
    made = Vault("127.0.0.1", SECRET, False)
    connection = Connection(made.mailbox_address(), Credentials(SECRET, PURPOSE, False))
    yield made, connection
    connection.close()


def send(vault, epoch, serial, *pieces, forwards=()):
    """Send pieces, and the mark that says that they were all."""
    parts = [(one, Part(bytes(data), 0, len(data), serial)) for one, data in pieces]
    told = messages_of(epoch, serial, "0.0", parts, forwards)
    for key, part in told:
        vault[1].send(key, part.view if isinstance(part, Part) else part)


def wait_for(check):
    end_s = time.monotonic() + LIMIT_S
    while not check():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_vault_keeps_what_is_committed_and_drops_older_epochs(vault):
    made, _ = vault
    first, second = (piece((call, 0), (0,), numpy.full(3, call)) for call in (1, 2))
    made.begin(0, ())
    send(vault, 0, 1, first)
    send(vault, 0, 2, second)
    wait_for(lambda: made.marks() == {(1, "0.0"), (2, "0.0")})
    made.keep([(2, 0)])
    assert made.listing() == [second[0]]
    made.begin(1, [(2, 0)])
    late = piece((2, 0), (0,), numpy.full(3, 9))
    send(vault, 0, 3, late)
    third = piece((3, 0), (0,), numpy.full(3, 3))
    send(vault, 1, 4, third)
    wait_for(lambda: made.marks() == {(4, "0.0")})
    assert made.listing() == [second[0], third[0]]
    ((given, data),) = made.give([second[0]])
    assert (given, bytes(data)) == (second[0], bytes(second[1]))


def test_a_vault_keeps_what_arrives_before_its_epoch_begins(vault):
    made, _ = vault
    first = piece((1, 0), (0,), numpy.full(3, 1.0))
    send(vault, 1, 1, first)
    time.sleep(0.2)  # let the messages come first
    made.begin(1, ())
    wait_for(made.marks)
    assert made.listing() == [first[0]]


def test_a_vault_that_cannot_go_on_ends(vault, monkeypatch, capfd):
    made, _ = vault
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(made, "_sort", lambda key, data: 1 // 0)
    send(vault, 0, 1)
    wait_for(lambda: ended)
    assert ended == [1]
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_worker_that_cannot_send_copies_fails_aloud_and_goes_on(monkeypatch):
    worker, failures = SurvivingWorker.__new__(SurvivingWorker), []
    worker._orders, worker._where = queue.SimpleQueue(), "the worker"
    monkeypatch.setattr(worker, "_copy_idly", lambda copying: None)
    monkeypatch.setattr(worker, "_keep_failure", failures.append)
    monkeypatch.setattr(worker, "_send_to", lambda *given: {}["forwards"])
    for _ in range(2):
        worker._orders.put(SimpleNamespace(held_up_s=0.0, order=None, batches={0: None}))
    threading.Thread(target=worker._send_copies, daemon=True).start()
    wait_for(lambda: len(failures) == 2)
    assert [type(failure) for failure in failures] == [KeyError, KeyError]


def test_copies_made_again_of_a_committed_point_keep_their_marks(vault):
    made, _ = vault
    one = piece((5, 0), (0,), numpy.full(3, 1.0))
    send(vault, 0, 7, one)
    send(vault, 0, 8, one)  # both copy what call 5 made
    wait_for(lambda: len(made.marks()) == 2)
    made.keep([(5, 0)], 5, 7)
    assert made.marks() == {(8, "0.0")}


def test_a_vault_sends_pieces_on_to_another(vault):
    made, _ = vault
    other = Vault("127.0.0.1", SECRET, False)
    kept, sent = (piece((1, index), (0,), numpy.full(3, index)) for index in range(2))
    send(vault, 0, 1, kept, sent, forwards=(Forward(other.mailbox_address(), (1,)),))
    wait_for(lambda: other.marks() == {(1, forwarder("0.0"))})
    ((given, data),) = other.give(other.listing())
    assert (given, bytes(data)) == (sent[0], bytes(sent[1]))
    assert made.listing() == [kept[0], sent[0]]


def test_a_vault_waits_for_no_lost_vault_once_an_epoch_has_begun(vault):
    made, _ = vault
    silent = Mailbox("127.0.0.1", Credentials(SECRET, PURPOSE, False), bound=0)  # takes nothing, and stays open
    other = Vault("127.0.0.1", SECRET, False)
    large, small = piece((1, 0), (0,), numpy.zeros(1 << 23)), piece((2, 0), (0,), numpy.zeros(3))
    send(vault, 0, 1, large, forwards=(Forward(("127.0.0.1", silent.port), (0,)),))
    wait_for(made.marks)
    for one in (made, other):
        one.begin(1, ())
    send(vault, 1, 2, small, forwards=(Forward(other.mailbox_address(), (0,)),))
    wait_for(lambda: other.marks() == {(2, forwarder("0.0"))})
    silent.close()


@pytest.fixture
def started_over(monkeypatch):
    """A worker that can start over."""
    worker = SurvivingWorker.__new__(SurvivingWorker)
    worker._sending, worker._resident, worker._transfers = Sender("a worker"), {}, MagicMock()
    worker._orders, worker._copying = queue.SimpleQueue(), None
    worker.executables, worker._send_tasks, worker._receive_tasks, worker._runs = {}, {}, {}, {}
    monkeypatch.setattr(worker, "_open", lambda *arguments: None)
    return worker


def test_a_worker_that_starts_over_sends_nothing_that_was_ordered_before(started_over, monkeypatch):
    worker, arrays, sent = started_over, [numpy.ones(4) for _ in range(2)], []
    item = copier.Item((1, 0), 0, 0, Box((0,), (4,)), (0,))
    older, newer = (copier.Copying(order_of(item), [(item, array)], None) for array in arrays)
    older.finish()
    worker._copying = newer
    for one in (older, newer):
        worker._orders.put(one)
    worker.start_over(None, SECRET, None)
    assert worker._copying is None
    assert newer.is_done
    assert (newer.batches, newer.reads(arrays)) == ({}, False)
    monkeypatch.setattr(worker, "_copy_idly", lambda copying: None)
    monkeypatch.setattr(worker, "_send_to", lambda order, vault, batch: sent.append(vault))
    worker._orders.put(SimpleNamespace(held_up_s=0.0, order=None, batches={7: None}))
    threading.Thread(target=worker._send_copies, daemon=True).start()
    wait_for(lambda: 7 in sent)
    assert sent == [7]


def test_a_worker_that_starts_over_waits_for_no_lost_vault(started_over):
    silent = Mailbox("127.0.0.1", Credentials(SECRET, PURPOSE, False), bound=0)  # takes nothing, and stays open
    worker, failed = started_over, threading.Event()

    def send():
        address, credentials = ("127.0.0.1", silent.port), Credentials(SECRET, PURPOSE, False)
        with pytest.raises(MeasurementError, match="could not be sent"):
            worker._sending.send(address, credentials, [("0|0|0|a", numpy.zeros(1 << 23))])
        failed.set()

    threading.Thread(target=send, daemon=True).start()
    wait_for(lambda: silent._senders)
    worker.start_over(None, SECRET, None)
    assert failed.wait(10)
    silent.close()


def test_a_vault_sends_on_after_its_connection_has_broken(vault):
    made, _ = vault
    other = Vault("127.0.0.1", SECRET, False)
    for serial in (1, 2):
        one = piece((serial, 0), (0,), numpy.zeros(3))
        send(vault, 0, serial, one, forwards=(Forward(other.mailbox_address(), (0,)),))
        wait_for(lambda serial=serial: (serial, forwarder("0.0")) in other.marks())
        for sender in other._mailbox._senders:
            sender.socket.shutdown(socket.SHUT_RDWR)
    assert made.marks() == {(1, "0.0"), (2, "0.0")}


def test_a_piece_that_outlives_its_point_outlives_its_message(vault):
    """Arrays that no call makes again stay for many points; what came with them does not."""
    made, connection = vault
    blocks = [numpy.full(size, 7, numpy.int8) for size in (3, 100)]
    whole = numpy.concatenate([blocks[0], numpy.zeros(61, numpy.int8), blocks[1]]).view(numpy.uint8)
    pieces = [piece((0, index), (0,), block)[0] for index, block in enumerate(blocks)]
    parts = [(one, Part(whole, start, len(block), 1)) for one, start, block in zip(pieces, (0, 64), blocks)]
    (key, both), (end, mark) = messages_of(0, 1, "0.0", parts)
    connection.send(key, both.view)
    connection.send(end, mark)
    wait_for(made.marks)
    made.keep([(0, 1)], 2, 5)
    ((given, data),) = made.give(made.listing())
    assert (given, bytes(data)) == (pieces[1], bytes(blocks[1]))
    assert (made._pieces[pieces[1]].start, len(made._pieces[pieces[1]])) == (0, 100)  # alone in its memory


def test_compiled_programs_are_kept_as_long_as_there_is_room(tmp_path):
    folder = tmp_path / "programs"
    files = ProgramFiles(folder, most_bytes=150)
    assert files.get("a") is None
    for age_s, key in enumerate("cba"):
        files.put(key, key.encode() * 10)
        (newest,) = (path for path in folder.iterdir() if path.stat().st_mtime > 2000)
        os.utime(newest, (1000 - age_s, 1000 - age_s))
    assert files.get("a") == b"a" * 10  # and so it is the newest
    files.put("d", b"d" * 10)
    files.put("e", b"e" * 10)
    assert [key for key in "abcde" if files.get(key)] == ["a", "d", "e"]
    for path in folder.iterdir():
        path.write_bytes(b"damaged")
    assert files.get("a") is None


def test_programs_in_a_folder_of_anybody_are_none(tmp_path):
    files = ProgramFiles(tmp_path)
    files.put("a", b"a")
    assert files.get("a") == b"a"
    tmp_path.chmod(0o777)
    assert files.get("a") is None


def test_programs_that_cannot_be_kept_are_none(tmp_path):
    (tmp_path / "programs").write_text("no folder")
    files = ProgramFiles(tmp_path / "programs")
    files.put("a", b"a")
    assert files.get("a") is None


def handed_over(*blocks, forwards=()):
    """Return memory with blocks, and the mark by which a worker tells of it."""
    *starts, nbytes = laid_out([block.nbytes for block in blocks])
    memory = Memory(nbytes)
    memory.begin("0|1|0")
    for start, block in zip(starts, blocks):
        memory.data[start : start + block.nbytes] = block.reshape(-1).view(numpy.uint8)
    pieces = [piece((1, index), (0,), block)[0] for index, block in enumerate(blocks)]
    told = tuple((one, 0, start) for one, start in zip(pieces, starts))
    return memory, encoded(Mark(told, forwards, Handed(memory.path, "0|1|0")))


def test_a_vault_takes_pieces_out_of_a_workers_memory_and_sends_them_on(vault):
    made, connection = vault
    other = Vault("127.0.0.1", SECRET, False)
    blocks = [numpy.full(3, 7, numpy.int8), numpy.full(2, 0.5, numpy.float32), numpy.zeros(0)]
    memory, mark = handed_over(*blocks, forwards=(Forward(other.mailbox_address(), (1, 2)),))
    connection.send(mark_key(0, 1, "0.0"), mark)
    wait_for(lambda: other.marks() == {(1, forwarder("0.0"))})
    memory.close()  # as where the worker ends; the memory stays
    for kept in (-1, 2):
        assert made.news() == (made.marks(), set(), kept)
        assert [bytes(data) for _, data in made.give(made.listing())] == [bytes(bytes_of(block)) for block in blocks]
        made.keep([(1, 0), (1, 1), (1, 2)], 1, 2)
        memory.data[64:67] = 0  # the vault needs it no more
    assert all(given.digest == digest_of(data) for given, data in made.give(made.listing()))
    found = {given.name: bytes(data) for given, data in other.give(other.listing())}
    assert found == {(1, 1): blocks[1].tobytes(), (1, 2): b""}


@pytest.mark.parametrize("is_closed", [True, False])
def test_memory_that_is_gone_or_holds_something_else_is_told_and_gives_nothing(vault, is_closed):
    made, connection = vault
    memory, mark = handed_over(numpy.zeros(3))
    if is_closed:
        memory.close()
    else:
        memory.begin("0|2|1")
    connection.send(mark_key(0, 1, "0.0"), mark)
    wait_for(made.marks)
    ((number, sender),) = made.marks()
    assert number == 1
    assert sender == unreadable("0.0")
    assert made.listing() == []


@pytest.mark.parametrize(("serial", "hands_over"), [(7, False), (6, True)])
def test_workers_send_copies_whose_memory_no_vault_can_read(serial, hands_over):
    """A vault that could not read what an earlier flight of the same point copied changes nothing."""
    marks = {"a": {(serial, unreadable("0.0"))}}
    copies = Copies(SimpleNamespace(number=4), SimpleNamespace(marks=lambda: (marks, [])))
    copies.flights = [_Flight(Point(3, {}), [], {"a": {(7, "0.0")}}, {}, time.monotonic(), 7)]
    copies.collect()
    assert copies._hands_over is hands_over
    assert bool(copies.flights) is hands_over


def mesh(*addresses):
    """Return Alpa's mesh of hosts with these addresses, with one device each."""
    info = [{"NodeManagerAddress": address} for address in addresses]
    return SimpleNamespace(host_info=info, num_hosts=len(info), devices=[[0]] * len(info))


def test_an_idle_host_has_copies_if_one_host_has_all_stages(caplog):
    calls = SimpleNamespace(
        group=SimpleNamespace(meshes=[mesh("a")], parent=mesh("a", "b", "c", "d")), recipe=lambda: None
    )
    copies = Copies(calls, SimpleNamespace(up={"d": None}, avoided={"b"}, late=set))
    assert copies.hosts() == {"a", "d"}
    copies.lost.add("d")
    assert copies.hosts() == {"a", "c"}
    calls.group.meshes.append(mesh("b"))
    assert copies.hosts() == {"a", "b"}
    calls.group = SimpleNamespace(meshes=[mesh("a")], parent=mesh("a"))
    assert copies.hosts() == {"a"}
    for hosts in ({"a", "b"}, {"a"}, {"a"}, {"a", "c"}, {"b"}):
        copies._warn_if_alone(hosts)
    assert [message.partition(" has ")[0] for message in caplog.messages] == ["Only host a", "Only host b"]


def test_an_idle_host_has_copies_if_it_is_much_faster_to_reach(monkeypatch):
    rates = {("a", "b"): 1e8, ("b", "a"): 1e8, ("a", "c"): 1.4e8, ("b", "c"): 8e8, ("b", "d"): 7e8}
    monkeypatch.setattr(Copies, "_rates", lambda self: rates)
    calls = SimpleNamespace(group=SimpleNamespace(meshes=[mesh("a"), mesh("b")], parent=mesh(*"abcd")))
    copies = Copies(calls, SimpleNamespace(up={}, avoided=set(), late=set))
    assert copies.hosts() == {"a", "b", "c"}
    copies._vaults.up["d"] = None
    assert copies.hosts() == {"a", "b", "d"}
    copies.lost.add("d")
    copies._vaults.avoided.add("c")
    assert copies.hosts() == {"a", "b"}


@pytest.mark.parametrize("is_there", [True, False])
def test_a_vault_that_ends_on_the_only_idle_host_is_replaced_if_ray_answers_there(is_there, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = SimpleNamespace(address="127.0.0.1", port=server.getsockname()[1])
        if not is_there:
            server.close()
        monkeypatch.setattr(ray_cluster, "nodes", lambda alive=True: [node])
        group = SimpleNamespace(meshes=[mesh("a")], parent=mesh("a", "127.0.0.1"))
        calls = SimpleNamespace(group=group, recipe=lambda: None, number=1)
        lost = SimpleNamespace(
            up={"a": None, "127.0.0.1": None}, avoided=set(), late=set,
            marks=lambda: ({}, ["127.0.0.1"]), drop=lambda hosts: None,
        )  # fmt: skip
        copies = Copies(calls, lost)
        assert copies.hosts() == {"a", "127.0.0.1"}
        copies.collect()
        assert copies.hosts() == ({"a", "127.0.0.1"} if is_there else {"a"})
        if is_there:  # a host with too little memory would end each of its vaults
            copies.collect()
            copies.collect()
            assert copies.hosts() == {"a"}
        copies.takes_back("127.0.0.1")
        assert copies.hosts() == {"a", "127.0.0.1"}
        copies.collect()
    assert copies.hosts() == ({"a", "127.0.0.1"} if is_there else {"a"})


def test_an_idle_host_whose_vault_does_not_start_is_not_counted_on(monkeypatch):
    """As where the host ends a moment after its first vault: Ray waits for it without a limit."""
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "remote", lambda **_: lambda kind: MagicMock())
    found = vaults.Vaults()
    copies = Copies(
        SimpleNamespace(group=SimpleNamespace(meshes=[mesh("a")], parent=mesh("a", "b", "c")), recipe=lambda: None),
        found,
    )
    assert copies.hosts() == {"a", "b"}
    found.start(["b"])
    assert copies.hosts() == {"a", "b"}
    monkeypatch.setattr(vaults, "START_LIMIT_S", -1.0)
    assert copies.hosts() == {"a", "c"}
    found.start(["a", "c"])
    assert copies.hosts() == {"a"}
    found.up["b"] = found._starting.pop("b")
    assert copies.hosts() == {"a", "b"}


def copying_to(*up, stages=("a", "b", "c")):
    """Return copies of a program with one array a stage, its vaults, and the orders that its workers get."""
    orders, started = [], []
    meshes, live = [], {}
    for place, address in enumerate(stages):
        worker = SimpleNamespace(
            copy_out=SimpleNamespace(remote=lambda order: orders.append(copier.ORDERS.decode(order)))
        )
        meshes.append(SimpleNamespace(host_info=[{"NodeManagerAddress": address}], workers=[worker]))
        live[1, place] = SimpleNamespace(
            device_mesh=meshes[-1], one_replica_host_local_ids=[(0, 0)], one_replica_buffer_ids=[0],
            indices=[(slice(0, 2),)], aval=SimpleNamespace(shape=(2,)), remote_ref=SimpleNamespace(uuid=place),
        )  # fmt: skip

    def use_started(limit_s):
        for host in started:
            vaults.up[host], vaults.held[host] = SimpleNamespace(mailbox=(host, 1)), set()
        started.clear()

    vaults = SimpleNamespace(
        up={}, held={}, avoided=set(), late=set, epoch=0, secret=b"s", digests=False, kept={}, started=started,
        start=lambda hosts: None, use_started=use_started,
    )  # fmt: skip
    started.extend(up)
    use_started(0)
    group = SimpleNamespace(meshes=meshes, parent=SimpleNamespace(host_info=[], num_hosts=0, devices=[]))
    calls = SimpleNamespace(group=group, number=1, live=lambda: live, recipe=lambda: None)
    return Copies(calls, vaults), vaults, orders


@pytest.fixture
def plain_arrays(monkeypatch):
    monkeypatch.setattr(copying, "one", lambda array: array)
    monkeypatch.setattr(copying, "shape_of", lambda array: array.aval.shape)


@pytest.mark.usefixtures("plain_arrays")
@pytest.mark.parametrize("up", ["abc", "ab", "bc", "b", "d", "cd"])
def test_every_array_is_on_two_hosts_if_two_vaults_are_up(up):
    """A host whose vault is not up yet has its arrays on two others."""
    copies, _, orders = copying_to(*up)
    copies.copy()
    for order, own in zip(orders, "abc"):
        (item,) = order.items
        hosts = [order.vaults[place][0] for place in item.vaults]
        assert len(set(hosts)) == len(hosts) == min(2, len(up))
        assert hosts[0] == own or own not in up


@pytest.mark.usefixtures("plain_arrays")
def test_a_vault_that_comes_up_gets_copies_at_the_next_call():
    """Until then, the state may be on one host only, and points may be many calls apart."""
    copies, vaults, orders = copying_to("a", stages="a")
    copies.every = 64
    copies.copy()
    copies._calls.number = 2
    copies.copy_if_due()
    assert len(orders) == 1
    vaults.started.append("b")
    copies.copy_if_due()
    assert [at for at, _ in orders[-1].vaults] == ["a", "b"]
    copies.copy_if_due()
    assert len(orders) == 2


@pytest.mark.usefixtures("plain_arrays")
def test_what_could_not_be_copied_without_a_vault_is_copied_at_the_next_call():
    copies, vaults, orders = copying_to(stages="a")
    copies.every = 64
    copies.copy()
    assert (orders, copies.flights) == ([], [])
    vaults.started.append("a")
    copies.copy_if_due()
    assert len(orders) == 1


def test_copies_are_spread_over_most_of_the_shortest_step():
    told = []

    class Worker:
        copy_out = SimpleNamespace(remote=lambda order: told.append(copier.ORDERS.decode(order)))

    mesh = SimpleNamespace(host_info=[{"NodeManagerAddress": host} for host in "aab"], workers=[Worker] * 3)
    up = {"a": SimpleNamespace(mailbox=("a", 1)), "b": SimpleNamespace(mailbox=("b", 2))}
    vaults = SimpleNamespace(up=up, epoch=0, secret=b"s", digests=False, kept={})
    copies = Copies(SimpleNamespace(group=SimpleNamespace(meshes=[mesh])), vaults)
    item = copier.Item((1, 0), 7, 0, Box((0,), (2,)), (0, 1))
    for costs in ([], [(0.0, 0.5), (0.0, 0.4)]):
        copies._costs.extend(costs)
        copies._ordered(Point(1, {}), {(0, rank): [item] for rank in range(3)}, {"a": set(), "b": set()})
    # A vault sends on what it got from one worker after the other.
    assert [order.send_s for order in told] == [*[0.0] * 3, *map(pytest.approx, (0.12, 0.12, 0.24))]


@pytest.mark.usefixtures("plain_arrays")
def test_a_pause_in_which_two_points_arrive_leaves_the_pace_of_copies(monkeypatch):
    pytest.importorskip("ray")
    copies, vaults, orders = copying_to("a", "b", stages="a")
    now_s = [copies._begin_s]
    monkeypatch.setattr(copying, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr("ray.wait", lambda calls, num_returns, timeout: (calls, []))
    monkeypatch.setattr("ray.get", lambda calls: [copier.Copied(0.0, 8, 0.0)])
    copies._calls.forget, vaults.keep = lambda number: None, lambda *_: None
    vaults.marks = lambda: ({at: set().union(*(one.waiting.get(at, ()) for one in copies.flights)) for at in "ab"}, [])
    for number in (1, 2):
        now_s[0] += 10.0
        copies._calls.number = number
        copies.copy_if_due()
    now_s[0] += 100.0
    copies.collect()
    assert copies.committed.number == 2
    copies._calls.number = 3
    copies.copy_if_due()
    assert orders[-1].send_s == pytest.approx(6.0)
    now_s[0] += 9.0  # at the end of the step, a vault that takes part from here on gets copies at once
    copies.copy_again(at_once=True)
    assert orders[-1].send_s == 0.0
    copies.collect()
    now_s[0] += 1.0
    copies._calls.number = 4
    copies.copy_if_due()
    assert orders[-1].send_s == pytest.approx(6.0)


def test_memory_is_used_again_only_once_no_vault_reads_it():
    memories = copier.Memories()

    def memory(serial, spares, nbytes=64):
        return memories.of(SimpleNamespace(serial=serial, spares=spares), nbytes)

    first, second = memory(0, ()), memory(1, ())
    assert first is not second
    assert memory(2, (0,)) is first
    third = memory(3, (0,))  # the vault has not told of newer points
    assert third not in (first, second)
    assert memory(4, (1, 2)) is second
    assert memory(5, (1, 2)) is first  # it was spare before, too
    assert memory(6, (3, 4), nbytes=128) not in (first, second, third)  # they are too small
    assert set(memories.by_serial) == {5, 6}
    for serial in range(7, 12):  # nothing is spare any more
        memory(serial, ())
    assert set(memories.by_serial) == {7, 8, 9, 10, 11}


def test_memory_of_copies_that_were_given_up_is_closed():
    memories = copier.Memories()
    for serial in range(3):
        memories.of(SimpleNamespace(serial=serial, spares=()), 64)
    memories.of(SimpleNamespace(serial=3, spares=(0, 2)), 64)  # 1 was never committed
    assert set(memories.by_serial) == {2, 3}


def test_memory_is_spare_once_the_vault_has_dropped_its_point():
    kept = {}
    copies = Copies(SimpleNamespace(number=0), SimpleNamespace(kept=kept))
    copies._commits = [3, 5, 6]
    assert copies._spares("a") == ()
    kept["a"] = 6
    assert (copies._spares("a"), copies._spares("b")) == ((3, 5), ())


def test_all_memory_is_used_again_after_a_pause_in_copies():
    kept, memories, used = {"a": -1}, copier.Memories(), []
    vaults = SimpleNamespace(kept=kept, keep=lambda *_: None)
    copies = Copies(SimpleNamespace(number=0, forget=lambda _: None), vaults)
    copies.points = 1  # the first one logs a line

    def commit(serial):
        copies.flights.append(_Flight(Point(serial, {}), [], {}, {}, 0.0, serial))
        copies._commit(copies.flights[-1], ())

    done = iter(range(30))
    for serial in range(30):
        # In a pause, all copies arrive, and the driver learns what vaults have dropped.
        is_paused = serial in (10, 20)
        while serial + 1 - copies.points > (0 if is_paused else 1):
            commit(next(done))
        kept["a"] = serial - 1 if is_paused else serial - 4
        used.append(memories.of(SimpleNamespace(serial=serial, spares=copies._spares("a")), 64))
    assert len(set(map(id, used))) == copier.MOST_MEMORIES


def order_of(*items, beside=None):
    return copier.Order(0, tuple(items), (), b"", False, "0.0", beside, 1, (), 0.0)


def test_copies_are_of_the_moment_before_an_array_is_overwritten():
    """One array is copied beside the step, the other one at the last moment."""
    arrays = [numpy.full(shape, 7, numpy.float32) for shape in ((2, 3), (4,), (5,))]
    boxes = [Box((0,) * array.ndim, array.shape) for array in arrays]
    items = [
        copier.Item((1, index), index, 0, box, (vault,)) for index, (box, vault) in enumerate(zip(boxes, (0, 1, 0)))
    ]
    made = []

    def memory(order, nbytes):
        made.append(Memory(nbytes))
        return made[-1]

    copying = copier.Copying(order_of(*items, beside=0), list(zip(items, arrays)), memory)
    copying.copy_one()
    assert [copying.reads([array]) for array in arrays] == [False, True, True]
    arrays[0][:] = 8
    copying.finish()
    assert copying.is_done
    assert not copying.reads(arrays)
    assert copying.held_up_s > 0
    for array in arrays:
        array[:] = 9
    ((_, copied, start, nbytes),) = copying.batches[1].copies
    assert copying.batches[1].handed is None
    expected, data = piece((1, 1), (0,), numpy.full(4, 7, numpy.float32))
    assert (copied, bytes(copying.batches[1].data[start : start + nbytes])) == (expected, bytes(data))
    source = opened(copying.batches[0].handed)
    for (item, its_piece, start, nbytes), whole in zip(copying.batches[0].copies, (items[0], items[2])):
        copied = Part(source, start, nbytes, 1).read()
        assert (item, its_piece.name) == (whole, whole.name)
        assert (copied.view(numpy.float32) == 7).all()
        assert its_piece.digest == digest_of(copied)


def test_copies_are_sent_where_the_system_has_no_memory_to_share():
    def memory(*_):
        raise OSError

    item = copier.Item((1, 0), 0, 0, Box((0,), (4,)), (0, 1))
    copying = copier.Copying(order_of(item, beside=0), [(item, numpy.ones(4))], memory)
    copying.finish()
    assert copying.batches[0].handed is None
    assert [(each, one.dtype) for each, one, _, _ in copying.batches[0].copies] == [(item, "float64")]


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 65535, 65536, 65537, 200000])
def test_a_digest_tells_every_changed_byte_and_every_two_that_changed_places(length):
    rng = numpy.random.RandomState(length)
    data = rng.randint(0, 256, length).astype(numpy.uint8)
    digests = {digest_of(data)}
    assert digests == {digest_of(bytes(data))}
    assert digest_of(numpy.append(data, numpy.uint8(0))) not in digests
    for place in rng.randint(0, max(length, 1), 20)[:length]:
        changed = data.copy()
        changed[place] ^= 1 << rng.randint(8)
        assert digest_of(changed) not in digests
    for first, second in zip(*rng.randint(0, max(length, 1), (2, 20 if length else 0))):
        changed = data.copy()
        changed[[first, second]] = data[[second, first]]
        assert (digest_of(changed) in digests) == bool((changed == data).all())


def test_a_commit_keeps_pieces_of_the_next_point(vault):
    made, _ = vault
    old, committed, following = (piece((call, 0), (0,), numpy.full(3, call)) for call in (1, 2, 3))
    send(vault, 0, 3, old, committed, following)
    wait_for(made.marks)
    made.keep([(2, 0)], 2)
    assert made.listing() == [committed[0], following[0]]


@pytest.mark.parametrize(("calls", "age_s", "stays"), [(64, 601.0, False), (64, 5.0, True), (1, 601.0, True)])
def test_copies_that_do_not_arrive_are_given_up(calls, age_s, stays, caplog):
    vaults = SimpleNamespace(marks=lambda: ({}, []))
    copies = Copies(SimpleNamespace(number=3 + calls), vaults)
    flight = _Flight(Point(3, {}), [], {"a": {(3, "0.0")}}, {}, time.monotonic() - age_s)
    copies.flights = [flight]
    copies.collect()
    assert copies.flights == ([flight] if stays else [])
    assert ("The copies of call 3 did not arrive" in caplog.text) is not stays


def test_a_point_is_committed_though_copies_of_an_older_one_are_lost(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr("ray.get", lambda calls: calls)
    kept = []
    vaults = SimpleNamespace(
        marks=lambda: ({"a": {(8, "0.0")}}, []), keep=lambda *told: kept.append(told[:2]), up={"a": None}
    )
    copies = Copies(SimpleNamespace(number=5, forget=lambda number: None), vaults)
    copies.flights = [
        _Flight(Point(call, {}), [], {"a": {(serial, "0.0")}}, {}, time.monotonic(), serial)
        for call, serial in ((3, 7), (4, 8))
    ]
    copies.collect()
    assert (copies.committed, copies.flights, kept) == (Point(4, {}), [], [(4, 8)])


@pytest.mark.parametrize("has_copies", [False, True])
def test_a_restored_state_without_copies_is_told(has_copies, monkeypatch, caplog):
    program = Run(SimpleNamespace(worker_class=None))
    program.recovery.watch = SimpleNamespace(raise_lost=lambda: None)
    monkeypatch.setattr(program.copies, "copy", lambda at_once: None)
    monkeypatch.setattr(program.copies, "collect", lambda: None)
    program.vaults.up = {"a": None} if has_copies else {}
    program.brought([])
    assert ("The restored state has no copies yet" in caplog.text) is not has_copies


@pytest.mark.parametrize("is_in_time", [True, False])
def test_a_restored_state_whose_first_copies_were_given_up_is_copied_again(is_in_time, monkeypatch, caplog):
    """As where a vault cannot read a worker's memory, or has ended."""
    program, restored = Run(SimpleNamespace(worker_class=None)), MagicMock()
    program.recovery.watch = SimpleNamespace(raise_lost=lambda: None)
    program.vaults.up = {"a": None}
    looks = iter(range(100))

    def collect():
        program.copies.flights = []
        if next(looks) == 1:
            program.copies.committed = Point(0, {(0, 1): ()})

    monkeypatch.setattr(program.copies, "copy", lambda at_once: program.copies.flights.append("flight"))
    monkeypatch.setattr(program.copies, "collect", collect)
    if not is_in_time:
        monkeypatch.setattr(run_module, "_RESTORED_LIMIT_S", -1.0)
    program.brought([restored])
    assert (program.copies.committed is not None) is is_in_time
    assert ("The restored state has no copies yet" in caplog.text) is not is_in_time


def test_copies_that_find_no_memory_are_the_workers_failure(monkeypatch):
    worker, failures = SurvivingWorker.__new__(SurvivingWorker), []
    worker._failure = None
    monkeypatch.setattr(worker, "_keep_failure", failures.append)
    monkeypatch.setattr(worker, "_finish_copies", lambda: {}["memory"])
    assert worker.copy_out(b"") is None
    assert [type(failure) for failure in failures] == [KeyError]


def test_a_vault_that_stays_silent_is_ended(monkeypatch):
    pytest.importorskip("ray")
    ended = []
    monkeypatch.setattr("ray.wait", lambda references, timeout: ([], references))
    monkeypatch.setattr(vaults, "on_host", lambda *arguments: ended.append(arguments))
    found = vaults.Vaults()
    actor = SimpleNamespace(news=SimpleNamespace(remote=lambda: "question"))
    found.up["10.0.0.1"] = vaults._Up(actor, ("10.0.0.1", 7), 42)
    assert [found.marks(), found.marks(), ended] == [({}, []), ({}, []), []]
    monkeypatch.setattr(vaults, "SILENCE_LIMIT_S", -1.0)
    assert found.marks() == ({}, ["10.0.0.1"])
    assert ended == [("10.0.0.1", end_process, 42)]


class Followed:
    """A function of Alpa that follows another one, as far as it is compiled: where, and how often."""

    def __init__(self, group, number):
        self.mesh_group, self.number = group, number


def test_a_function_that_follows_another_is_compiled_again_on_other_meshes():
    first, second = SimpleNamespace(), SimpleNamespace()
    now, compiled = [first], []

    training = SimpleNamespace(last_executable="of whole batches")
    training.get_last_executable = lambda: training.last_executable

    def compile_executable(method, fun):
        assert recipes._following  # so it is not refused for its stage option
        assert training.last_executable == "of whole batches"  # also after a smaller batch
        assert fun.stores[0].resets == len(compiled) + 1
        compiled.append(Followed(now[0], len(compiled) + 1))
        return compiled[-1]

    class Store:
        resets = 0

        def reset(self):
            self.resets += 1

    replacement = recipes.compile_executable(compile_executable)
    function = replacement(SimpleNamespace(src_func=training), SimpleNamespace(stores=[Store(), None]))
    training.last_executable = "of a smaller batch"
    recipes.follow(function, first)
    assert (function.number, recipes.follows(function), recipes._following) == (1, True, [])
    now[0] = second
    recipes.follow(function, second)
    assert function is compiled[0]
    assert (function.mesh_group, function.number, recipes.follows(function)) == (second, 2, True)
    assert (compiled[1].mesh_group, compiled[1].number) == (first, 1)  # it ends with the old meshes
    assert training.last_executable == "of a smaller batch"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), HwawareError("No host is left.", "add one.")])
def test_a_program_that_cannot_be_placed_again_says_so_from_then_on(error, monkeypatch):
    ended, watches = [], [SimpleNamespace(failure=None, members=()) for _ in range(2)]
    monkeypatch.setattr("hwaware.ray_cluster.end_actors", ended.append)
    run = Run(SimpleNamespace(worker_class=None, recovering=None))
    run.recovery.watch = watches[0]

    def tried(actors, empty, plan):
        run.recovery.watch = watches[1]
        actors["here"] = "worker"
        raise error

    monkeypatch.setattr(run.recovery, "_tried", tried)
    with pytest.raises(type(error)):
        run.place_again((), ())
    assert ended == [["worker"], []]  # the workers, then the vaults
    assert run.is_closed
    words = "it was interrupted" if isinstance(error, KeyboardInterrupt) else "No host is left"
    with pytest.raises(WorkerFailedError, match=words) as caught:
        run.call(None, (), None)
    assert [watch.failure for watch in watches] == [caught.value] * 2


@pytest.mark.parametrize(("epoch", "told"), [(0, []), (3, [(3, ())])])
def test_a_vault_that_answers_late_is_used_later(epoch, told, monkeypatch):
    """It begins in the first epoch by itself, with all that has arrived."""
    ray = pytest.importorskip("ray")
    answers = {"mailbox": ("10.0.0.1", 7)}

    def get(calls, timeout):
        if not answers.keys() >= set(calls):
            raise ray.exceptions.GetTimeoutError("It is late.")
        return [answers[call] for call in calls]

    monkeypatch.setattr(ray, "wait", lambda calls, num_returns, timeout: ([one for one in calls if one in answers], ()))
    monkeypatch.setattr(ray, "get", get)
    found, begun = vaults.Vaults(), []
    actor = SimpleNamespace(begin=SimpleNamespace(remote=lambda *arguments: begun.append(arguments)))
    found._starting["10.0.0.1"], found.epoch = (actor, "mailbox", "process"), epoch
    found.use_started(0)
    assert found.up == {}
    answers["process"] = 42
    found.use_started(0)
    assert (found.up, begun) == ({"10.0.0.1": vaults._Up(actor, ("10.0.0.1", 7), 42)}, told)


def test_a_vault_beside_no_device_stays_while_it_answers(monkeypatch):
    ray = pytest.importorskip("ray")
    hosts = [{"NodeManagerAddress": address} for address in "abe"]
    up = vaults.Vaults()
    up.up, up.held = {host: SimpleNamespace(actor=host) for host in "abcd"}, {host: set() for host in "abcd"}
    up._starting["e"] = ("e", None, None)
    shrunk, ended = [], []
    monkeypatch.setattr(ray, "kill", ended.append)
    monkeypatch.setattr(recovering, "_answering", lambda addresses: set(addresses) - {"b", "d", "e"})
    monkeypatch.setattr(meshes, "mesh_places", lambda mesh: [("a", 0), ("b", 0)])
    monkeypatch.setattr(recovering.unequal, "shrink", lambda mesh, lost: shrunk.append(lost))
    recovery = recovering.Recovery(None, up, None)
    recovery._shrink(SimpleNamespace(host_info=hosts))
    assert (set(up.up), shrunk, recovery.silent) == ({"a", "c"}, [{("b", 0)}], {"b", "d", "e"})
    assert (sorted(ended), up._starting) == (["b", "d", "e"], {})


@pytest.mark.parametrize("is_new", [True, False])
def test_a_process_that_still_starts_is_not_lost(is_new, monkeypatch):
    ray = pytest.importorskip("ray")
    ended, late = [], MagicMock(_actor_id="late")
    monkeypatch.setattr(ray, "wait", lambda calls, num_returns, timeout: ([], calls))
    monkeypatch.setattr(ray, "kill", ended.append)
    recovery = recovering.Recovery(None, SimpleNamespace(up={}, listings=dict), None)
    recovery.watch, place = SimpleNamespace(members=()), ("a", (0,))
    recovery._fresh = {"late"} if is_new else set()
    actors = {place: late}
    assert recovery._keep_left(actors)  # so that it tries again
    expected = ({place: late}, {}, []) if is_new else ({}, {place: 1}, [late])
    assert (actors, recovery.restarts, ended) == expected


def test_a_worker_of_a_stage_across_hosts_is_not_used_for_another_stage(monkeypatch):
    """Its JAX keeps the devices of the whole stage, also those of a lost host, as long as its process lives."""
    ray = pytest.importorskip("ray")
    ended, workers = [], {name: MagicMock(_actor_id=name) for name in "abc"}
    monkeypatch.setattr(ray, "kill", ended.append)
    monkeypatch.setattr(recovering.leaves, "place_of", lambda mesh, rank: mesh.places[rank])
    meshes = [
        SimpleNamespace(
            workers=[workers[name] for name in names],
            places=[SimpleNamespace(address=name, devices=(0,), workers=len(names)) for name in names],
        )
        for names in ("ab", "c")
    ]  # fmt: skip
    recovery = recovering.Recovery(SimpleNamespace(group=SimpleNamespace(meshes=meshes)), None, None)
    recovery.watch = SimpleNamespace(
        members=[SimpleNamespace(actor=one) for one in workers.values()], close=lambda: None
    )
    actors = {("b", (0,)): workers["b"], ("c", (0,)): workers["c"]}  # host a is lost
    recovery._stop(actors)
    assert (actors, ended) == ({("c", (0,)): workers["c"]}, [workers["b"]])


@pytest.mark.parametrize("is_fresh", [True, False])
def test_a_worker_that_a_move_has_started_takes_all_its_arrays_in(is_fresh, monkeypatch):
    given, place, name = [], ("a", (0,)), (1, 0)
    wants = Wanted(name, 7, numpy.dtype("float32"), (Box((0,), (2,)),))
    monkeypatch.setattr(recovering, "holders", lambda array: {place: ("old", wants.boxes)})
    monkeypatch.setattr(recovering, "placed", lambda meshes, spec, name, wanted: wanted[0, 0].append(wants))
    worker = SimpleNamespace(take_in=SimpleNamespace(remote=lambda asked, *_: given.extend(asked)), _actor_id="new")
    info = [{"NodeManagerAddress": "a"}]
    mesh = SimpleNamespace(num_hosts=1, host_info=info, devices=[[0]], workers=[worker])
    calls = SimpleNamespace(
        group=SimpleNamespace(meshes=[mesh]), needed=lambda point: [name], live=lambda: {name: "array"},
        spec=lambda name: None, become=lambda name, array: array,
    )  # fmt: skip
    recovery = recovering.Recovery(calls, None, SimpleNamespace(values={}))
    recovery.watch, recovery.is_moving = SimpleNamespace(wait=lambda *_: None), True
    recovery.used, recovery._fresh = {place: worker}, {"new"} if is_fresh else set()
    recovery._restored(Point(1, {name: (2,)}), {})
    assert [one.former for one in given] == [None if is_fresh else "old"]


@pytest.mark.parametrize(("number", "count"), [(3, 2), (4, 1)])
def test_only_a_newer_point_makes_up_for_lost_processes(number, count, monkeypatch):
    def fails(*_):
        raise HwawareError("No device is left.", "start again.")

    calls = SimpleNamespace(group=SimpleNamespace(parent=None))
    held = SimpleNamespace(listings=dict, begin=lambda *_: None)
    recovery = recovering.Recovery(calls, held, SimpleNamespace(committed=Point(3, {})))
    recovery.restarts = {("a", (0,)): 2}
    for name in ("_stop", "_shrink", "_started_early"):
        monkeypatch.setattr(recovery, name, lambda *_: {})
    monkeypatch.setattr(recovery, "_compile", fails)
    monkeypatch.setattr(recovering.returning, "newest", lambda *_: Point(number, {}))
    with pytest.raises(HwawareError, match="No device is left"):
        recovery._attempt({}, {}, None)
    assert recovery.restarts == {("a", (0,)): count}


def test_a_history_is_saved_loaded_and_shown(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    from hwaware.report.tables import show

    event = HistoryEvent(
        kind="recovered", call=7, what="lost stage 1", mapping="layers 0-3 on a:0", took_s=4.5,
        phases={"agree": 0.5, "replay": 4.0}, made_again=2,
    )  # fmt: skip
    stays = HistoryEvent(kind="decided", call=8, what="stays for now", mapping="layers 0-3 on b:0")
    moves = HistoryEvent(kind="moved", call=9, what="drained: b", took_s=7.0)
    history = History(calls=9, points=4, copied_bytes=4000, copy_s=0.25, every=2, events=(event, stays, moves))
    history.save(tmp_path / "history.json")
    assert History.load(tmp_path / "history.json") == history
    show(history)
    shown = " ".join(capsys.readouterr().out.split())
    parts = ("9 calls, state committed 4 times", "at present it tries a copy every 2 calls", "lost stage 1", "agree")
    for words in (*parts, "compared with: layers 0-3 on b:0", "4.500 s in recoveries, 7.000 s in planned moves"):
        assert words in shown
    assert shown.count("compared with") == 1
    show(History(calls=1))
    assert "tries a copy every call." in " ".join(capsys.readouterr().out.split())
    (tmp_path / "bad.json").write_bytes(history.to_json().replace(b'"took_s": 4.5', b'"took_s": -1'))
    with pytest.raises(RecordError, match="took_s"):
        History.load(tmp_path / "bad.json")


def asked_to_drain(monkeypatch, *seen):
    """Ask trainings to leave a host, where the vaults of each look are those given; none answers."""
    pytest.importorskip("ray")
    looks, vault = list(seen), SimpleNamespace(drain=SimpleNamespace(remote=lambda *_: object()))
    monkeypatch.setattr(asking, "_vaults", lambda: {token: [vault] for token in looks.pop(0)})
    monkeypatch.setattr(asking, "_ASK_AGAIN_S", 0.0)
    monkeypatch.setattr("ray.wait", lambda calls, num_returns, timeout: ([], calls))
    return asking.drain("h1", LIMIT_S)


def test_a_training_that_ends_before_it_answers_has_left_the_host(monkeypatch):
    found = asked_to_drain(monkeypatch, ["t1"], [])
    assert [(token, outcome.done, outcome.is_known) for token, outcome in found.items()] == [("t1", True, True)]


def test_only_who_waits_for_a_move_reads_about_it(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr(asking, "_ASK_AGAIN_S", 0.0)
    answers = [None, *[Drained(True, True, "The training no longer uses h1.", "It goes on.")] * 2]
    vault = SimpleNamespace(drain=SimpleNamespace(remote=lambda *_: answers.pop(0)))
    monkeypatch.setattr(asking, "_vaults", lambda: {"t1": [vault]})
    monkeypatch.setattr("ray.wait", lambda calls, num_returns, timeout: (calls, []))
    monkeypatch.setattr("ray.get", lambda answer: answer)
    monkeypatch.setattr(ray_cluster, "connect", contextlib.nullcontext)
    line = ["drain", "h1", "--address", "10.0.0.1:6379"]
    first, second = (CliRunner().invoke(main, line).stdout for _ in range(2))
    assert first.startswith("The training no longer uses h1. It goes on.\n")
    assert second.startswith("The training no longer uses h1.\n")


@pytest.mark.parametrize("notice", [False, True])
def test_a_training_that_could_not_leave_a_host_tries_again_when_asked_again(notice, vault, monkeypatch, tmp_path):
    pytest.importorskip("ray")
    monkeypatch.setattr("ray.wait", lambda calls, timeout, **_: (calls, []))
    monkeypatch.setattr("ray.get", lambda answer: answer)
    made, run, ends = vault[0], Run(SimpleNamespace(worker_class=None, recovering=None)), [False, False, True]

    class Actor:
        def __getattr__(self, name):
            return SimpleNamespace(remote=getattr(made, name))

    def boundary(_=None):
        for _ in range(2):  # the question of one call is answered by the next
            run.vaults.marks()
        draining.at_boundary(run)

    run.vaults.up = {"127.0.0.1": vaults._Up(Actor(), None, 0)}
    monkeypatch.setattr(draining, "drain", lambda run, what: Drained(ends.pop(0), True, "so it ended"))
    monkeypatch.setattr(asking, "_vaults", lambda: {"t1": [Actor()]})
    monkeypatch.setattr(asking, "time", SimpleNamespace(monotonic=time.monotonic, sleep=boundary))
    if notice:  # a file that stays does not ask again
        made._notice = str(tmp_path)
    for done in (False, False, True):
        assert asking.drain("127.0.0.1", LIMIT_S)["t1"].done is done
        boundary()
    assert (ends, run.vaults.asked) == ([], set())
    assert run.drained["127.0.0.1"].done


def test_the_last_host_is_kept_until_another_one_comes(monkeypatch):
    run = Run(SimpleNamespace(worker_class=None, recovering=None))
    run.calls.group = SimpleNamespace(parent=None)
    monkeypatch.setattr(moving, "recipe_of", lambda run: SimpleNamespace(profile=""))
    monkeypatch.setattr(meshes, "mesh_places", lambda mesh: [("10.0.0.1", 0)])
    monkeypatch.setattr(draining, "_places", lambda recipe, what: {("10.0.0.1", 0)})
    run.drained["h1"] = draining.drain(run, "h1")
    assert run.drained["h1"] == Drained(False, True, "The training cannot leave h1: it has no other devices.")
    run.takes_back("10.0.0.2", ["h2", "h2:0"])
    assert not run.drained


def test_a_host_that_copies_cannot_leave_takes_copies_again(monkeypatch):
    run = Run(SimpleNamespace(worker_class=None, recovering=None))
    run.calls.group = SimpleNamespace(parent=None)
    run.vaults.up = {"10.0.0.1": None}
    run.vaults.start = run.vaults.use_started = lambda *_: None
    run.copies.hosts = set
    places = [("10.0.0.1", 0), ("10.0.0.2", 0)]
    monkeypatch.setattr(moving, "recipe_of", lambda run: SimpleNamespace(profile=""))
    monkeypatch.setattr(meshes, "mesh_places", lambda mesh: places)
    monkeypatch.setattr(draining, "_places", lambda recipe, what: {places[0]})
    monkeypatch.setattr(draining, "_uses", lambda recipe, gone: False)

    def commit(run, again):
        assert run.vaults.avoided == {"10.0.0.1"}
        raise MeasurementError("The copies are late.", "look.")

    monkeypatch.setattr(moving, "commit", commit)
    assert draining.drain(run, "h1").what == "The training's copies cannot leave h1: The copies are late."
    assert not run.vaults.avoided


def test_a_host_is_free_where_no_training_survives(monkeypatch):
    assert asked_to_drain(monkeypatch, []) == {}
    monkeypatch.setattr(asking, "_vaults", dict)
    monkeypatch.setattr(ray_cluster, "connect", contextlib.nullcontext)
    done = CliRunner().invoke(main, ["drain", "h1", "--address", "10.0.0.1:6379"])
    assert (done.exit_code, "No training with survive=True runs" in done.stdout) == (0, True)


def test_a_mark_whose_message_was_dropped_tells_of_no_pieces(vault):
    """Messages that come long before their epoch are dropped; their mark may come just in time."""
    made, connection = vault
    one = piece((1, 0), (0,), numpy.full(3, 1.0))[0]
    connection.send(mark_key(0, 1, "0.0"), encoded(Mark(((one, 0, 64),))))
    connection.send(mark_key(0, 2, "0.0"), encoded(Mark()))
    wait_for(lambda: (2, "0.0") in made.marks())
    assert made.marks() == {(2, "0.0")}
    assert made.listing() == []


def test_messages_without_a_mark_are_dropped_with_their_point(vault):
    made, connection = vault
    for serial in (1, 3):
        connection.send(f"0|{serial}|0|0.0", b"block")
    wait_for(lambda: len(made._blocks) == 2)
    made.keep((), 1, 2)
    assert list(made._blocks) == [(3, 0, "0.0")]
