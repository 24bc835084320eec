"""Check that the advice about a lost worker fits its cause: the link, Ray's daemon, the process, a stop."""

import sys
from types import SimpleNamespace

import pytest

from hwaware import ray_cluster, ray_jobs
from hwaware.errors import WorkerFailedError
from hwaware.ray_cluster import Head
from hwaware.runtime import watch
from hwaware.runtime.heartbeat import Silence
from hwaware.runtime.watch import Member, _lost, _silent

MEMBER = Member(None, "stage 1 on host 10.0.0.2, device 0", None, "10.0.0.2", 4711)


@pytest.fixture
def host(monkeypatch):
    """Lets the host's daemon answer, or fail in that way; Ray says why the process ended."""

    def make(error=None, alive=True, ended="", errors=()):
        answers = iter([*errors, error, error])
        monkeypatch.setattr(ray_jobs, "daemon_fails", lambda address: next(answers))
        monkeypatch.setattr(ray_jobs, "at", lambda addresses: [SimpleNamespace()] if alive else [])
        monkeypatch.setattr(watch, "_how_it_ended", lambda member: ended)

    return make


def test_a_link_that_is_down(host):
    host(TimeoutError("timed out"))
    error = _lost(MEMBER, "it cannot be reached ([Errno 110] Connection timed out)")
    assert error.where == MEMBER.where
    assert "the host or its network link is down" in error.cause
    assert "network link is up (ping 10.0.0.2" in error.fix
    assert "memory" not in str(error)


@pytest.mark.parametrize("case", [
    {"error": ConnectionRefusedError("refused")},  # Ray has not noticed yet
    {"alive": False},
    {"errors": [None], "error": ConnectionRefusedError("refused")},  # it ends a moment after its workers
])  # fmt: skip
def test_ray_is_gone_on_the_host(host, case):
    host(**case)
    error = _lost(MEMBER, "its process ended")
    assert error.cause == ("its process ended, because Ray is gone on host 10.0.0.2: its daemon (raylet) has ended.")
    assert error.fix.startswith("start Ray on host 10.0.0.2 again (ray start ")
    assert "memory" not in str(error)


def test_a_process_that_was_killed(host):
    host(ended="The actor died: its worker was killed by SIGKILL")
    error = _lost(MEMBER, "its process ended")
    assert error.cause == "its process ended. Ray says: The actor died: its worker was killed by SIGKILL."
    assert "memory" in error.fix
    host()
    assert _lost(MEMBER, "its process ended").cause == "its process ended."


@pytest.mark.parametrize("stopped", [True, False])
def test_a_process_or_a_host_that_stands_still(monkeypatch, stopped):
    ended = []
    monkeypatch.setattr(watch, "on_host", lambda *call: ended.append(call))
    monkeypatch.setattr(watch, "_wait_shortly", lambda reference: None)
    error = _silent(MEMBER, Silence(0, stopped))
    assert ("SIGSTOP" in error.cause) is stopped
    assert ("frozen" in error.cause) is not stopped
    assert [call[0] for call in ended] == ["10.0.0.2"] * stopped
    assert "10.0.0.2" in error.fix


class Clock:
    now_s = 1000.0

    def monotonic(self):
        return self.now_s


def test_a_head_that_is_silent_for_long_is_lost(monkeypatch):
    clock, answers, asked = Clock(), [], []
    monkeypatch.setattr(ray_cluster, "time", clock)
    monkeypatch.setattr(ray_cluster, "fails_to_answer", lambda *address: asked.append(address) or answers[-1])
    refused = ConnectionRefusedError(111, "Connection refused")
    head = Head(("10.0.0.1", 6379))

    def after(seconds, error):
        clock.now_s += seconds
        answers.append(error)
        return head.is_lost()

    assert not after(1.0, refused)
    assert asked == []  # too early to ask
    assert [after(5.0, error) for error in (None, refused, refused, None, refused, refused, refused)] == [False] * 7
    assert after(5.0, refused)
    assert set(asked) == {("10.0.0.1", 6379)}
    error = head.failure()
    assert str(error).startswith("Ray's head at 10.0.0.1:6379 failed: it does not answer any more ([Errno 111]")
    assert "start Ray there and on all other hosts again" in error.fix


def test_who_asks_seldom_asks_again_before_the_head_is_lost(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(ray_cluster, "time", clock)
    monkeypatch.setattr(ray_cluster, "fails_to_answer", lambda *address: TimeoutError("timed out"))
    head = Head(("10.0.0.1", 6379))
    clock.now_s += 3600.0
    assert not head.is_lost()
    assert head.is_lost(at_once=True)


def test_a_head_that_is_lost_while_workers_start_is_named(monkeypatch):
    """Ray would end this process 60 s later, without an exception."""
    left = []
    exceptions = SimpleNamespace(RayError=RuntimeError)
    never = SimpleNamespace(wait=lambda references, num_returns, timeout: ([], references), exceptions=exceptions)
    monkeypatch.setitem(sys.modules, "ray", never)
    monkeypatch.setattr(ray_cluster, "head_address", lambda: ("10.0.0.1", 6379))
    monkeypatch.setattr(ray_cluster, "leave", lambda: left.append(True))
    monkeypatch.setattr(ray_cluster, "fails_to_answer", lambda *address: TimeoutError("timed out"))
    monkeypatch.setattr(ray_cluster, "_ASK_HEAD_S", 0.01)
    monkeypatch.setattr(ray_cluster, "_HEAD_LIMIT_S", 0.02)
    with pytest.raises(WorkerFailedError, match=r"Ray's head at 10\.0\.0\.1:6379 failed: it does not answer"):
        ray_cluster.fetched(["reference"], 600.0, "Starting the workers")
    assert left == [True]
