"""A program that survives: workers and vaults are killed, and every loss and the state stay the same."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
from aliasing_worker import AliasingWorker
from builders import chosen, seeds
from click.testing import CliRunner

import hwaware
from hwaware.bench.mortal import IN_RECOVERY, IN_STEP, MortalWorker, rescuer_of
from hwaware.cli import main

pytestmark = pytest.mark.alpa
LIMIT_S = 120.0
STEPS = 6
# Four microbatches of seven samples: no stage can have replicas, so every placement is a chain.
BATCH = 28


@pytest.fixture(autouse=True)
def _runtime(worker_pool, monkeypatch):
    from hwaware.activation import install_runtime
    from hwaware.patching import batches

    install_runtime()
    monkeypatch.setattr(batches, "LEAST_BYTES", 1)  # samples come microbatch by microbatch, beside the kills


class Training:
    """A small program; `run` is what survives of it, if anything."""

    def __init__(self, model, profile, survive=True, kind=MortalWorker, stage_option="auto", **method):
        import alpa

        from hwaware.patching import meshes, rescue

        self.model = model
        self.losses = []
        self.mesh = meshes.cluster_mesh(meshes.device_counts(profile))
        parallel = alpa.PipeshardParallel(
            devices=self.mesh,
            num_micro_batches=4,
            layer_option=alpa.AutoLayerOption(layer_num=4),
            stage_option=stage_option,
            **method,
        )

        def train_step(state, batch):
            return model.train_step(state, batch, value_and_grad=alpa.value_and_grad)

        self._enabled = hwaware.enabled(profile, costs="model", survive=survive)
        self._enabled.__enter__()
        try:
            self.step = alpa.parallelize(train_step, method=parallel)
            self.state = model.initial_state(0)
            with rescue.in_charge(rescuer_of(kind)) if survive else contextlib.nullcontext():
                self.executable = self.step.get_executable(self.state, model.batch(0, BATCH))
            self.executable.sync()
        except BaseException:
            self.close()
            raise
        self.run = rescue.run_of(self.executable.mesh_group)
        if self.run is not None:
            self.run.copies.every = 1

    def train(self, number):
        """Start a step; its loss may be asked for later."""
        batch = self.model.batch(number, BATCH)
        self.state, loss = self.step(self.state, batch)
        self.losses.append(loss)
        for leaf in batch.values():  # a program may use its memory again
            leaf.fill(0)

    def result(self):
        """Return the losses and a digest of the state."""
        import jax

        digest = hashlib.sha256()
        for leaf in jax.tree_util.tree_leaves(self.state):
            digest.update(numpy.asarray(leaf._value).tobytes())
        return [float(loss._value) for loss in self.losses], digest.hexdigest()

    @property
    def workers(self):
        return [worker for mesh in self.executable.mesh_group.meshes for worker in mesh.workers]

    def kill(self, number):
        """Kill a worker's process."""
        import ray

        os.kill(ray.get(self.workers[number].process_id.remote(), timeout=LIMIT_S), signal.SIGKILL)

    def kill_vault(self):
        (vault,) = self.run.vaults.up.values()
        os.kill(vault.pid, signal.SIGKILL)

    def close(self):
        group = self.mesh.launched_physical_mesh_group
        if group is not None:
            group.shutdown()
        self._enabled.__exit__(None, None, None)


@pytest.fixture
def start(profile, model):
    started = []

    def make(**options):
        started.append(Training(model, profile, **options))
        return started[-1]

    yield make
    for each in started:
        each.close()


@pytest.fixture(scope="module")
def undisturbed(worker_pool, profile, model):
    from hwaware.activation import install_runtime

    install_runtime()
    training = Training(model, profile, survive=False)
    assert training.run is None
    for number in range(STEPS):
        training.train(number)
    result = training.result()
    training.close()
    return result


def train_all(training, numbers):
    for number in numbers:
        training.train(number)
        training.executable.sync()


def recoveries(training):
    return [event for event in training.run.history().events if event.kind == "recovered"]


def test_a_worker_and_a_vault_are_killed_between_steps(start, undisturbed, caplog):
    training = start()
    for number in range(STEPS):
        if number == 2:
            training.kill(1)
        if number == 4:
            training.kill_vault()
        training.train(number)
        float(training.losses[-1]._value)
    assert training.result() == undisturbed
    wait_until(lambda: len(training.run.history().events) == 2, training.run._look)  # a busy Ray tells late
    events = training.run.history().events
    assert [event.kind for event in events] == ["recovered", "vault"]
    assert "the program goes on with layers" in caplog.text
    assert set(events[0].phases) == {"agree", "place", "start", "instruct", "compile", "move", "replay"}


CASES = [(seed, kind) for seed in seeds(20) for kind in IN_STEP + IN_RECOVERY]


@pytest.mark.parametrize(("seed", "kind"), chosen(CASES, 10))
def test_workers_that_end_at_a_moment(start, undisturbed, worker_pool, monkeypatch, seed, kind):
    """Recovery's own moments come with the second loss."""
    draw = random.Random(f"{seed} {kind}")
    in_recovery = kind in IN_RECOVERY
    if in_recovery:  # a pool keeps the processes that the failed attempt ends, and the next attempt would find them
        monkeypatch.setattr(worker_pool, "is_on", False)
    training = start()
    first, second = draw.sample(range(len(training.workers)), 2)
    if in_recovery:
        training.workers[second].die_at.remote(kind, 1)
    else:
        # Workers copy after two of the six calls or more: after others, older copies may still be on their way.
        most = {"run": 30, "copy": 3, "copy arrays": 3, "send copies": 3}.get(kind, 5)
        training.workers[first].die_at.remote(kind, draw.randrange(1, most))
    for number in range(STEPS):
        if in_recovery and number == 3:
            training.kill(first)
        training.train(number)
        if draw.random() < 0.5:
            float(training.losses[-1]._value)
    assert training.result() == undisturbed
    assert recoveries(training)


def test_devices_that_are_left_out(start, undisturbed):
    """The program goes on with fewer stages; arrays that it holds are those of its new workers."""
    training = start()
    assert len(training.workers) == 3
    for number in range(STEPS):
        if number == 3:
            training.run.recovery.left_out.update(_places(training, 0))
            training.kill(0)
        training.train(number)
    assert training.result() == undisturbed
    assert len(training.workers) == 2


def test_a_device_whose_workers_cannot_start_is_left_out(start, undisturbed, own_workers, tmp_path, caplog):
    """The other workers live through each attempt, and what the program logs asks nobody to start it again."""
    import ray

    broken = tmp_path / "broken"

    class Stillborn(MortalWorker):
        def __init__(self, place, *arguments):
            if place.devices == (2,) and os.path.exists(broken):
                os._exit(1)
            super().__init__(place, *arguments)

    training = start(kind=Stillborn)
    lost = _index_of(training, 2)
    healthy = {ray.get(worker.process_id.remote()) for place, worker in enumerate(training.workers) if place != lost}
    for number in range(STEPS):
        if number == 3:
            broken.touch()
            training.kill(lost)
        training.train(number)
    assert training.result() == undisturbed
    assert {ray.get(worker.process_id.remote()) for worker in training.workers} == healthy
    assert [event.tries for event in recoveries(training)] == [3]
    assert not [record for record in caplog.records if record.name == "hwaware" and "To fix" in record.getMessage()]


def _index_of(training, device):
    """Return the number of the worker that has a device."""
    return [mesh.devices for mesh in training.executable.mesh_group.meshes].index([[device]])


def plan(**layers):
    from hwaware.plans import Plan, Replica, Stage

    stages = tuple(
        Stage(layers=cut, replicas=(Replica(devices=(f"here:{name[1:]}",)),)) for name, cut in layers.items()
    )
    return Plan(num_microbatches=4, stages=stages)


def test_a_training_moves_to_other_plans(start, undisturbed):
    """The second plan has another device for one stage alone; the third is the second."""
    from jax.tree_util import tree_leaves

    from hwaware.errors import PlanError
    from hwaware.survival.moving import move_to, recipe_of

    training = start()
    plans = [plan(d0=(0, 1), d1=(2, 3)), plan(d0=(0, 1), d2=(2, 3)), plan(d0=(0, 1), d2=(2, 3))]
    train_all(training, range(2))
    with pytest.raises(PlanError, match="The plan is for 3 layers"):
        move_to(plan(d0=(0, 2)), "none")
    for number, wanted in enumerate(plans, 2):
        event = move_to(wanted, f"plan {number}")
        assert (event.kind, event.made_again, event.tries) == ("moved", 0, 1)
        found = recipe_of(training.run).plan
        assert [stage.devices for stage in found.stages] == [stage.devices for stage in wanted.stages]
        training.train(number)
    train_all(training, range(5, STEPS))
    assert training.result() == undisturbed
    moved = [event.moved_bytes for event in training.run.history().events]
    state_bytes = sum(numpy.asarray(leaf).nbytes for leaf in tree_leaves(training.model.initial_state(0)))
    assert 0 < moved[1] < 0.8 * state_bytes
    assert moved[2] == 0
    assert list(event.phases) == ["copy", "agree", "place", "start", "instruct", "compile", "move", "replay"]


def test_a_training_goes_back_from_a_plan_that_it_cannot_take_up(start, undisturbed, own_workers, monkeypatch, caplog):
    """Nothing is lost: hwaware itself has ended the worker that the other plan leaves idle."""
    from hwaware.errors import MeasurementError
    from hwaware.survival.moving import move_to
    from hwaware.survival.recovering import Recovery

    restored, calls = Recovery._restored, []

    def fail_once(self, *given):
        calls.append(given)
        if len(calls) == 1:
            raise MeasurementError("The state did not arrive.", "x")
        return restored(self, *given)

    training = start()
    train_all(training, range(2))
    monkeypatch.setattr(Recovery, "_restored", fail_once)
    before = training.run.calls.recipe().plan
    move_to(plan(d0=(0, 1), d1=(2, 3)), "none")
    assert training.run.calls.recipe().plan.stages == before.stages
    assert training.run.recovery.restarts == {}
    assert "The program goes back to its old plan: The state did not arrive." in caplog.text
    train_all(training, range(2, STEPS))
    assert training.result() == undisturbed


def test_a_training_leaves_devices(start, undisturbed, tmp_path, monkeypatch):
    """A person asks for one device; a notice of preemption takes the only host, which the program cannot leave."""
    notice = tmp_path / "notice"
    monkeypatch.setenv("HWAWARE_PREEMPTION_FILE", str(notice))
    training = start()
    train_all(training, range(2))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(CliRunner().invoke, main, ["drain", "here:1", "--json"])
        wait_until(lambda: training.run.vaults.asked, training.run._look)
        training.train(2)
        done = asked.result(LIMIT_S)
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["trainings"][0]["what"].startswith("The training no longer uses here:1.")
        assert not [stage for stage in hwaware.last_plan().stages if "here:1" in stage.devices]
        asked = pool.submit(CliRunner().invoke, main, ["drain", "elsewhere"])
        wait_until(lambda: "elsewhere" in training.run.vaults.asked, training.run._look)
        notice.touch()
        wait_until(lambda: len(training.run.vaults.asked) == 2, training.run._look)
        training.train(3)
        refused = asked.result(LIMIT_S)
    assert (refused.exit_code, "No training knows a host or device 'elsewhere'" in refused.output) == (2, True)
    found = {what: (one.done, one.is_known) for what, one in training.run.drained.items()}
    assert found.pop("here:1") == (True, True)
    assert found.pop("elsewhere") == (False, False)
    assert list(found.values()) == [(False, True)]  # the notice
    train_all(training, range(4, STEPS))
    assert training.result() == undisturbed
    assert [event.kind for event in training.run.history().events] == ["moved"]


@pytest.mark.parametrize(
    "trained", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["before any step", "after a step"]
)
def test_a_restored_state_survives_at_once(start, undisturbed, tmp_path, trained):
    """The vaults hold a restored state before a step has read it, so a worker may be lost right after."""
    import alpa

    saving = start(survive=False)
    train_all(saving, range(2))
    alpa.save_checkpoint(str(tmp_path), saving.state, 2)
    training = start()
    if trained:
        train_all(training, range(4))
        training.losses.clear()
    batch = training.model.batch(0, BATCH)
    training.state, step = hwaware.restore_newest(tmp_path, training.step, training.state, batch)
    assert step == 2
    training.kill(0)
    wait_until(lambda: any(one.lifeline.is_lost() for one in training.run.recovery.watch.members))
    train_all(training, range(2, STEPS))
    losses, digest = training.result()
    assert (losses, digest) == (undisturbed[0][2:], undisturbed[1])
    assert len(recoveries(training)) == 1
    assert not [event for event in training.run.history().events if event.kind == "disk"]


def test_a_program_that_looks_after_each_step_survives(start, undisturbed, monkeypatch):
    """At the loss, Alpa has marked the donated state as deleted, which no call has made since the newest point."""
    import ray
    from alpa.global_env import global_config

    monkeypatch.setattr(global_config, "pipeline_check_alive", True)
    training = start()
    train_all(training, range(3))
    wait_for_point(training, 3)
    ray.get(training.workers[1].die_at.remote("run", 6), timeout=LIMIT_S)
    train_all(training, range(3, STEPS))
    assert training.result() == undisturbed
    assert [event.made_again for event in recoveries(training)] == [0]


def wait_until(check, look=lambda: None):
    """Wait until a check holds."""
    end_s = time.monotonic() + LIMIT_S
    while not check():
        assert time.monotonic() < end_s
        look()
        time.sleep(0.02)


def _places(training, stage):
    mesh = training.executable.mesh_group.meshes[stage]
    return [(mesh.host_info[0]["NodeManagerAddress"], device) for device in mesh.devices[0]]


@pytest.mark.thorough
@pytest.mark.parametrize("fault", ["aliasing copy", "lost key", "lost batch"])
def test_the_check_finds_what_is_broken(start, undisturbed, monkeypatch, fault):
    from hwaware.errors import WorkerFailedError
    from hwaware.survival import calls, recovering

    if fault == "lost key":
        own_piece = recovering.own_piece
        monkeypatch.setattr(recovering, "own_piece", lambda name, value: own_piece(name, numpy.zeros_like(value)))
    if fault == "lost batch":
        kept = calls.Calls.kept
        monkeypatch.setattr(
            calls.Calls, "kept", lambda self, arg: arg if isinstance(arg, numpy.ndarray) else kept(self, arg)
        )
    training = start(kind=AliasingWorker if fault == "aliasing copy" else MortalWorker)
    train_all(training, range(2))
    wait_for_point(training, 1)
    for number in range(2, STEPS):
        if number == 4:
            wait_for_point(training, 3)
            training.kill(1)
        training.train(number)
    try:
        result = training.result()
    except WorkerFailedError as error:
        result = str(error)
    assert result != undisturbed
    if isinstance(result, str):  # a digest finds an array that changed between its copy and its reading
        assert fault == "aliasing copy"
        assert "is damaged: its digest" in result
    else:
        assert recoveries(training)[0].made_again > 0


def wait_for_point(training, number):
    """Wait until a call's point is committed."""
    copies = training.run.copies
    wait_until(lambda: copies.committed is not None and copies.committed.number >= number, training.run._look)


@pytest.mark.thorough
def test_without_survive_nothing_of_it_is_in_place(own_workers, profile, model):
    """Not a patch of Alpa, not a process, not a class, not a module in workers; also not after a program with it."""
    import sys

    import ray

    from hwaware.patching import rescue
    from hwaware.runtime.watch import Watch
    from hwaware.survival import rescuer, vaults

    with hwaware.enabled(profile, survive=True):
        assert all(patch.applied for patch in rescuer.PATCHES.patches)
    training = Training(model, profile, survive=False)
    try:
        training.train(0)
        group = training.executable.mesh_group
        assert (rescue.current(), rescue.run_of(group)) == (None, None)
        for patch in rescuer.PATCHES.patches:
            assert not patch.applied
            patch.check()  # Alpa's own source is in its place
        assert type(vars(group)["hwaware_watch"]) is Watch
        look = [
            worker.__ray_call__.remote(
                lambda self: (
                    type(self).__name__,
                    [name for name in sys.modules if name.startswith("hwaware.survival")],
                )
            )
            for worker in training.workers
        ]
        assert ray.get(look, timeout=LIMIT_S) == [("HostWorker", [])] * 3
        named = [one for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == vaults.NAMESPACE]
        assert not named
    finally:
        training.close()


def test_what_cannot_survive_is_refused(start):
    import alpa

    from hwaware.errors import AlpaError

    with pytest.raises(AlpaError, match="needs stages that hwaware chooses, found UniformStageOption"):
        start(stage_option=alpa.UniformStageOption(num_stages=2))


def test_a_program_fault_is_no_loss(start):
    """A worker that runs out of memory would do so again."""
    import ray

    from hwaware.errors import WorkerFailedError

    training = start()
    ray.get(training.workers[1].set_memory_limit.remote(1000), timeout=LIMIT_S)
    with pytest.raises(WorkerFailedError, match="Out of memory"):
        train_all(training, range(STEPS))


def test_all_copies_are_lost(start, tmp_path, caplog):
    """With a checkpoint, the program goes on with an older state, and says so; once that is gone, it ends."""
    import alpa

    from hwaware.errors import WorkerFailedError

    training = start()
    for number in range(4):
        training.train(number)
        training.losses[-1] = float(training.losses[-1]._value)
        wait_for_point(training, number + 1)
        if number == 1:
            alpa.save_checkpoint(str(tmp_path), training.state, 2)
    training.kill_vault()
    training.kill(0)
    # The state after two steps again, and the fifth batch: as if the third and the fourth had never been.
    training.train(4)
    training.losses[-1] = float(training.losses[-1]._value)
    assert [event.kind for event in training.run.history().events] == ["disk", "recovered"]
    assert f"it is step 2 of {tmp_path} again; the work of 2 calls is lost" in caplog.text
    calm = start()
    for number in (0, 1, 4):
        calm.train(number)
    assert float(calm.losses[-1]._value) == training.losses[-1]
    shutil.rmtree(tmp_path)
    wait_for_point(training, 5)  # until then, the driver can make all calls again
    training.kill_vault()
    training.kill(0)
    specs = training.executable.get_input_placement_specs()[0]
    with pytest.raises(WorkerFailedError, match=r"arrays were lost, and no host has a copy.*restore_newest"):
        train_all(training, range(5, 7))
    with pytest.raises(WorkerFailedError, match="could not be placed again"):
        alpa.save_checkpoint(str(tmp_path), training.state, 5)
    alpa.save_checkpoint(str(tmp_path), training.model.initial_state(0), 0)
    with pytest.raises(WorkerFailedError, match="could not be placed again"):
        alpa.restore_checkpoint(str(tmp_path), 0, specs)
