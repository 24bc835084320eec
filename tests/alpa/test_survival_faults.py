"""Faults of a whole program that survives, on a Ray of its own: it does not hang, says why, and leaves nothing."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.alpa, pytest.mark.thorough]
LIMIT_S = 180.0
# A program that is interrupted ends within this time; a hang of a launching thread would be longer.
END_LIMIT_S = 60.0
MARK = "HWAWARE_TEST_MARK"
CALM_STEPS = 12
# Makes a step, or saves, for each line that it reads, and prints a line of JSON about it and each phase of a recovery.
DRIVER = """
import json, sys, warnings
warnings.simplefilter("ignore")
import ray
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _temp_dir=sys.argv[1])
from hwaware.activation import install_runtime
install_runtime()
import alpa
from hwaware.bench.kills import Training, profile_of_three
from hwaware.errors import HwawareError
from hwaware.survival import recovering, vaults

def say(**facts):
    print(json.dumps(facts) + "\\n", end="", flush=True)  # also from other threads

def told(self, phase):
    ends(self, phase)
    say(phase=phase)

ends, recovering.Clock.ends = recovering.Clock.ends, told
vaults.SILENCE_LIMIT_S = 2.0
profile = profile_of_three(ray.nodes()[0]["NodeManagerAddress"])
calm = Training(profile, survives=False)
for _ in range(int(sys.argv[2])):
    calm.train()
calm.close()
say(losses=calm.losses, digests=calm.digests)
training = Training(profile, survives=True)
for line in sys.stdin:
    command, _, folder = line.strip().partition(" ")
    try:
        if command == "save":
            alpa.save_checkpoint(folder, training._state, len(training.losses))
        else:
            training.train()
        say(
            losses=training.losses, digests=training.digests,
            workers=ray.get([worker.process_id.remote() for worker in training.workers]),
            vaults=[vault.pid for vault in training.run.vaults.up.values()],
            events=[[event.kind, event.what] for event in training.run.history().events],
        )
    except HwawareError as error:
        say(error=type(error).__name__, what=str(error))
    except KeyboardInterrupt as error:
        if command != "try":
            raise
        say(error=type(error).__name__)
"""


class Program:
    """The program, and what it says; all processes that it starts carry a mark."""

    def __init__(self, folder, calm_steps):
        self.temporary = os.path.join(folder, "t")
        os.mkdir(self.temporary)
        environment = {**os.environ, "TMPDIR": self.temporary, MARK: folder}
        line = [sys.executable, "-c", DRIVER, os.path.join(folder, "r"), str(calm_steps)]
        self._mark, pipe = folder, subprocess.PIPE
        self.process = subprocess.Popen(
            line, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        self.calm = self.says("losses")

    def says(self, key):
        """Return the next line that has this key."""
        for line in self.process.stdout:
            found = json.loads(line) if line.startswith("{") else {}
            if key in found:
                return found
        raise AssertionError(self.process.stderr.read())

    def do(self, command="train", key="losses"):
        self.ask(command)
        return self.says(key)

    def ask(self, command):
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def interrupt(self):
        """Do as Ctrl-C does: it reaches the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def marked(self):
        """Return the processes that carry the mark, with their command lines."""
        mark, found = f"{MARK}={self._mark}".encode(), {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has just ended
                if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found[int(pid)] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def wait_for_end(self, *pids):
        end_s = time.monotonic() + END_LIMIT_S
        while set(pids) & set(self.marked()):
            assert time.monotonic() < end_s
            time.sleep(0.2)

    def ends(self):
        """Wait for the end; return the exit status and the standard error, once nothing is left."""
        _, error = self.process.communicate(timeout=END_LIMIT_S)
        self.wait_for_end(*self.marked())
        assert os.listdir(self.temporary) == []
        return self.process.returncode, error

    def close(self):
        self.process.kill()
        self.process.communicate()
        for pid in self.marked():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def start():
    folders, started = [], []

    def make(calm_steps=CALM_STEPS):
        folders.append(tempfile.mkdtemp(prefix="hwf"))  # Ray's sockets need short paths
        started.append(Program(folders[-1], calm_steps))
        return started[-1]

    yield make
    for each in started:
        each.close()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def full_disk(folder):
    """Mount a disk of 64 KiB."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], check=True)
    try:
        yield str(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def assert_calm(program, said):
    """All losses and all states are those of the calm training."""
    done = len(said["losses"])
    assert said["losses"] == program.calm["losses"][:done]
    assert said["digests"] == program.calm["digests"][:done]


def test_stopped_processes_a_full_disk_and_ctrl_c_in_a_recovery(start, tmp_path):
    program = start()
    program.do()
    said = program.do()
    # A worker is stopped for good: its process is ended, and another one takes its place.
    os.kill(said["workers"][1], signal.SIGSTOP)
    stopped = said["workers"][1]
    said = program.do()
    ((kind, what),) = said["events"]
    assert kind == "recovered"
    assert f"(its process {stopped} was stopped (SIGSTOP) and did nothing any more; hwaware has ended it)" in what
    program.wait_for_end(stopped)
    # A vault is stopped for good: the program trains on, and another one takes its place.
    (silent,) = said["vaults"]
    os.kill(silent, signal.SIGSTOP)
    while said["vaults"] == [silent] or not said["vaults"]:
        assert len(said["losses"]) < CALM_STEPS - 4
        time.sleep(1.0)
        said = program.do()
    assert said["events"][-1][0] == "vault"
    assert "does not answer; another one takes its place" in said["events"][-1][1]
    program.wait_for_end(silent)
    # A disk becomes full while the program saves; it trains on.
    if os.geteuid() == 0:
        with full_disk(tmp_path / "full") as folder:
            failed = program.do(f"save {folder}", "error")
            assert failed["error"] == "CheckpointError"
            assert "disk full (No space left on device). Checkpoints that were saved before" in failed["what"]
            assert os.listdir(folder) == []
    said = program.do()
    assert_calm(program, said)
    # Ctrl-C while a lost worker is replaced.
    os.kill(said["workers"][0], signal.SIGKILL)
    program.ask("train")
    program.says("phase")
    program.interrupt()
    status, error = program.ends()
    assert status in (1, -signal.SIGINT)  # 1 where Ray handles the signal
    assert error.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("phase", ["place", "start", "instruct", "compile", "move"])
def test_ctrl_c_in_a_recovery_that_the_program_catches(start, phase):
    """The program cannot go on, and says so at every step; it ends as others do."""
    program = start(0)
    said = program.do()
    os.kill(said["workers"][0], signal.SIGKILL)
    program.ask("try")
    while program.says("phase")["phase"] != phase:
        pass
    program.interrupt()
    assert program.says("error")["error"] == "KeyboardInterrupt"
    for _ in range(2):
        failed = program.do(key="error")
        assert failed["error"] == "WorkerFailedError"
        assert "interrupted while it was placed again (KeyboardInterrupt)" in failed["what"]
        assert "restore_newest" in failed["what"]
    program.wait_for_end(*said["workers"], *said["vaults"])
    assert program.ends()[0] == 0


def test_ctrl_c_in_a_step(start):
    program = start(0)
    program.do()
    program.ask("train")
    program.interrupt()
    status, error = program.ends()
    assert status in (1, -signal.SIGINT)  # 1 where Ray handles the signal
    assert error.rstrip().endswith("KeyboardInterrupt")
