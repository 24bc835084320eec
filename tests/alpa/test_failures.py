"""A worker that dies ends the step, names itself, and takes the other workers with it."""

import os
import signal
import time

import msgspec
import pytest
from builders import chosen

pytestmark = pytest.mark.alpa
LIMIT_S = 30.0


@pytest.fixture(autouse=True)
def _runtime():
    from hwaware.activation import install_runtime

    install_runtime()


def first_devices(profile, count):
    """Return a profile without all devices but the first ones."""
    return msgspec.structs.replace(profile, devices=profile.devices[:count])


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.fixture
def run(profile, model):
    from hwaware.bench.training import TrainingRun

    made = TrainingRun("hwaware", model, first_devices(profile, 2), 4, 4, 8)
    made.step()
    yield made
    made.close()


def workers_of(run):
    return [mesh.workers[0] for mesh in run._mesh.launched_physical_mesh_group.meshes]


@pytest.mark.parametrize(("stopped", "stage"), chosen([(False, 0), (True, 1), (False, 1), (True, 0)], 1))
def test_a_worker_that_dies(own_workers, run, stage, stopped):
    """Between steps, or in the middle of one while others wait for it."""
    import ray

    from hwaware.errors import WorkerFailedError

    pids = ray.get([worker.process_id.remote() for worker in workers_of(run)], timeout=LIMIT_S)
    assert all(is_alive(pid) for pid in pids)
    start = time.monotonic()
    if stopped:
        os.kill(pids[stage], signal.SIGSTOP)
        batch = run._model.batch(1, 32)
        run._state, _ = run._step(run._state, batch)
        time.sleep(1.0)
    os.kill(pids[stage], signal.SIGKILL)
    go_on = run._executable.sync if stopped else run.step
    with pytest.raises(WorkerFailedError, match=rf"^Stage {stage} on host .*, devices? .* failed: .*To fix:") as caught:
        go_on()
    assert time.monotonic() - start < LIMIT_S
    assert caught.value.where.startswith(f"stage {stage} on host ")
    while any(is_alive(pid) for pid in pids) and time.monotonic() - start < LIMIT_S:
        time.sleep(0.1)
    assert not any(is_alive(pid) for pid in pids)
    with pytest.raises(WorkerFailedError, match=f"Stage {stage} on host"):
        run._executable.sync()


def test_a_program_that_fails_names_its_own_stage(run):
    import ray

    from hwaware.errors import WorkerFailedError

    worker = workers_of(run)[1]
    ray.get(worker.set_memory_limit.remote(1000), timeout=LIMIT_S)
    start = time.monotonic()
    with pytest.raises(
        WorkerFailedError, match=r"^Stage 1 on host .* failed: Out of memory: program .* the device has 1\.000 kB"
    ):
        run.step()
    assert time.monotonic() - start < LIMIT_S


def test_a_worker_that_is_stuck_is_ended_with_the_program(own_workers, profile, model, monkeypatch, caplog):
    import ray

    from hwaware.bench.training import TrainingRun
    from hwaware.patching import failures

    monkeypatch.setattr(failures, "_END_LIMIT_S", 2.0)
    run = TrainingRun("hwaware", model, first_devices(profile, 2), 4, 4, 8)
    run.step()
    pids = ray.get([worker.process_id.remote() for worker in workers_of(run)], timeout=LIMIT_S)
    os.kill(pids[0], signal.SIGSTOP)
    start = time.monotonic()
    try:
        with caplog.at_level("WARNING", "hwaware"):
            run.close()
        assert time.monotonic() - start < LIMIT_S
    finally:
        os.kill(pids[0], signal.SIGCONT)  # a stopped process cannot even be told to end
    assert "A worker did not end by itself, and is ended: The end of a worker took longer than 2 s." in caplog.messages
    while any(is_alive(pid) for pid in pids) and time.monotonic() - start < LIMIT_S:
        time.sleep(0.1)
    assert not any(is_alive(pid) for pid in pids)
