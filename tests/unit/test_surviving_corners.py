"""Trainings that survive, in programs and moments that are seldom: each case once ended the training or its state."""

import os
import weakref
from types import SimpleNamespace

import numpy
import pytest

from hwaware import adapter
from hwaware.errors import (
    ClusterUnreachableError,
    HwawareError,
    MeasurementError,
    PlanError,
    UnusableInputError,
    WorkerFailedError,
)
from hwaware.patching import checkpoints, failures, rescue
from hwaware.runtime.checkpoint_folder import Unfinished
from hwaware.runtime.watch import Watch
from hwaware.survival import calls as calls_module
from hwaware.survival import handing, joining, moving, recipes, recovering, rescuer, reserving, returning, vaults
from hwaware.survival.calls import Calls
from hwaware.survival.points import Point
from hwaware.survival.watching import Interrupted, SurvivingWatch

LOST = WorkerFailedError("stage 0", "its process ended.", "launch it again.")
SPEC = SimpleNamespace(aval=SimpleNamespace(shape=()))


class Array:
    """Alpa's array on workers, as far as calls look at it."""

    def __init__(self, mesh):
        self.device_mesh = mesh
        self.aval = SimpleNamespace(shape=(), dtype=numpy.dtype("float32"), size=1)
        self.remote_ref = SimpleNamespace(is_deleted_on_workers=False)


class Function:
    """A compiled function: where each argument and result is, None for an argument that it never reads."""

    def __init__(self, inputs, outputs, trains=True):
        self.input_placement_specs, self.output_placement_specs = inputs, outputs
        schedule = "1f1b" if trains else "inference"
        recipe = SimpleNamespace(trains=trains, arguments={"pipeline_schedule": schedule})
        self.outs_handler = SimpleNamespace(hwaware_recipe=recipe)


@pytest.fixture
def program(monkeypatch):
    """Calls of a program with one mesh, and what makes arrays there."""
    pytest.importorskip("jax")
    monkeypatch.setattr(calls_module, "is_distributed", lambda value: isinstance(value, Array))
    monkeypatch.setattr(calls_module, "one", lambda array: array)
    monkeypatch.setattr(calls_module, "is_deleted", lambda array: array.remote_ref.is_deleted_on_workers)
    found, mesh = Calls(), SimpleNamespace(num_devices=1)
    found.group = SimpleNamespace(meshes=[mesh])
    return found, lambda: Array(mesh)


def called(calls, function, arguments, results):
    call, _ = calls.begin(function, arguments, None)
    calls.note(call, results)
    return results


def test_a_result_that_no_call_reads_belongs_where_it_was_made(program):
    calls, array = program
    step = Function(inputs=[None, SPEC], outputs=["of the loss", "of the weights"])
    state = called(calls, step, [array(), array()], [array(), array()])
    called(calls, step, state, [array(), array()])
    assert calls.spec((1, 0)) == "of the loss"
    assert calls.spec((1, 1)) is SPEC  # where the call that reads it has it


def test_restored_arrays_are_kept_before_a_call_takes_them(program):
    calls, array = program
    restored = array()
    calls.bring([restored])
    assert list(calls.live().values()) == [restored]
    step = Function(inputs=[SPEC], outputs=[SPEC])
    _, has_new = calls.begin(step, [restored], None)
    assert not has_new
    (name,) = calls.live()
    assert calls.spec(name) is SPEC


def test_calls_that_read_an_array_of_another_program_share_one_copy_of_it(program):
    calls, array = program
    weights = array()
    weights.device_mesh, weights._value = SimpleNamespace(), numpy.arange(3)
    evaluate = Function([SPEC], [SPEC], trains=False)
    for _ in range(2):
        called(calls, evaluate, [weights], [array()])
    assert all(call.arguments[0] is weights._value for call in calls.log)


@pytest.mark.parametrize("holds", [True, False])
def test_calls_made_again_leave_only_the_results_that_somebody_needs(holds, program):
    """The state is not donated; the first results are read by the last call, too."""
    calls, array = program
    on_workers, most = weakref.WeakSet(), []

    def launch(function, *given):
        most.append(len(on_workers))
        outs = [array(), array()]
        on_workers.update(outs)
        return outs

    step, state = Function([SPEC] * 3, [SPEC] * 2), [array()]
    step.mesh_group = calls.group
    calls.bring(state)
    first = last = called(calls, step, state, launch(step))
    for _ in range(6):
        last = called(calls, step, [*last, first[1]] if _ == 5 else last, launch(step))
    held = last if holds else []
    calls._launch, arrays = launch, {(0, 1): state[0]}
    del first, last, most[:]
    assert calls.make_again(arrays) == 7
    assert max(most) <= 5  # results of two calls, and one of the first call
    assert set(on_workers) == set(held)
    assert set(arrays.values()) <= {*held, *state}


def test_placement_specs_of_workers_that_were_left_are_refused():
    class Group(dict):
        """A group of meshes by their numbers."""

    spec = SimpleNamespace(mesh_group=Group({0: SimpleNamespace(workers=None)}), mesh_ids=(0,), sharding_specs=(None,))
    with pytest.raises(UnusableInputError, match=r"the training has left.*To fix: ask get_input_placement_specs"):
        checkpoints._placed(None, spec, {})


def test_a_checkpoint_takes_the_place_of_the_newest_results_of_its_function_alone(program, monkeypatch):
    calls, array = program
    train, evaluate = Function([SPEC], [SPEC, SPEC]), Function([SPEC], [SPEC], trains=False)
    best = called(calls, train, [array()], [array(), array()])
    saved = called(calls, train, best[:1], [array(), array()])
    disk = returning.saved(calls, "folder", 2, {("w",): saved[0], ("v",): saved[1]})
    newest = called(calls, train, saved[:1], [array(), array()])
    rows = called(calls, evaluate, newest[:1], [array()])
    names = {"best": (1, 0), "newest": (3, 0), "other": (3, 1), "rows": (4, 0)}
    assert returning._places_on(disk, calls, set(names.values())) == {(3, 0): ("w",), (3, 1): ("v",)}
    kept = weakref.ref(rows[0])
    del rows
    calls.forget(4)
    calls.live()
    assert kept() is None
    assert set(calls.functions) == {1, 2, 3}


def test_a_checkpoint_of_two_functions_gives_the_newer_ones_results(program):
    calls, array = program
    average, train = Function([SPEC], [SPEC]), Function([SPEC], [SPEC])
    (ema,) = called(calls, average, [array()], [array()])
    (weights,) = called(calls, train, [array()], [array()])
    disk = returning.saved(calls, "folder", 1, {("ema",): ema, ("w",): weights})
    assert (disk.function, disk.call, disk.paths) == (train, 2, {0: ("w",)})
    assert isinstance(Point(2, {}), Point)


def test_a_worker_that_is_lost_during_a_save_ends_no_training(tmp_path, monkeypatch):
    run = SimpleNamespace(is_calling=False, recovered=0)

    def recover(error):
        run.recovered += 1

    run.recover = recover

    def results_of(asked, what, limit_s):
        if not run.recovered:
            raise Interrupted(LOST, run)
        return [[] for _ in asked]

    monkeypatch.setattr(failures, "results_of", results_of)
    worker = SimpleNamespace(save_arrays=SimpleNamespace(remote=lambda *_: None))
    files = [checkpoints._File("0.bin", object(), worker, [])]
    unfinished = Unfinished(str(tmp_path), 1, "step_1." + "0" * 16)
    manifest = rescue.retried(lambda: checkpoints._write(unfinished, files, "Saving step 1"))
    assert (run.recovered, manifest.step) == (1, 1)


def test_a_worker_that_is_lost_while_numbers_are_fetched_ahead_ends_no_training():
    run = SimpleNamespace(is_calling=False, recovered=0)
    fetched = []

    def recover(error):
        run.recovered += 1

    def original(arrays):
        if not run.recovered:
            raise Interrupted(LOST, run)
        fetched.append(arrays)

    run.recover = recover
    rescuer.prefetch(original)("state")
    assert (run.recovered, fetched) == (1, ["state"])


@pytest.mark.parametrize("kind", [Watch, SurvivingWatch])
def test_a_shutdown_goes_on_after_a_worker_that_is_lost(kind, monkeypatch, caplog):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    watch = kind.__new__(kind)
    watch.failure, watch.close = None, lambda: None

    def wait(references, *_):
        raise Interrupted(LOST, None) if kind is SurvivingWatch else LOST

    watch.wait = wait
    ended = []
    shutdown = failures.shutdown(lambda mesh, forced: ended.append((mesh, forced)))
    worker = SimpleNamespace(shutdown=SimpleNamespace(remote=lambda: None))
    mesh = SimpleNamespace(launched=True, workers=[worker], hwaware_watch=watch)
    shutdown(mesh)
    assert ended == [(mesh, True)]
    assert "A worker did not end by itself, and is ended: Stage 0 failed: its process ended." in caplog.text


def a_run(calls, trains, is_closed=False, begin_s=0.0):
    return SimpleNamespace(
        is_closed=is_closed, trains=lambda: trains, calls=SimpleNamespace(number=calls), begin_s=begin_s, name=calls
    )


def test_the_training_step_with_most_calls_is_the_one_that_moves(monkeypatch):
    step, last_batch, evaluation = a_run(9, True), a_run(1, True, begin_s=2.0), a_run(90, False, begin_s=3.0)
    ended = a_run(99, True, is_closed=True)
    monkeypatch.setattr(rescue, "seen", [step, last_batch, evaluation, ended])
    assert moving.running() is step
    monkeypatch.setattr(rescue, "seen", [ended])
    assert moving.running() is None


@pytest.fixture
def adapting():
    found = adapter.Adapter.__new__(adapter.Adapter)
    found.events, found.calls, found._group = [SimpleNamespace(what="h1 is slow")], 9, None
    found.run, told = object(), []
    found.follower = SimpleNamespace(placed=lambda *of: told.append("placed"), moved=lambda *of: told.append("moved"))
    found.follower.plan, found.follower.best = None, None
    found._profile, found._begin = lambda group: None, lambda executable: None
    return found, told


def test_a_training_that_adapts_moves_itself(adapting, monkeypatch):
    one, told = adapting
    plan, moved = SimpleNamespace(stages=("new",)), []

    def move(run, plan, reason):
        moved.append(run)
        return SimpleNamespace(took_s=1.0, phases={})

    monkeypatch.setattr(moving, "move", move)
    recipe = SimpleNamespace(plan=plan)
    monkeypatch.setattr(moving, "recipe_of", lambda run: recipe)
    one._move(None, plan)
    assert (moved, told) == ([one.run], ["moved"])


@pytest.mark.parametrize("error", [PlanError("It does not fit.", "x"), MeasurementError("Copying took long.", "x")])
def test_a_move_that_cannot_be_made_leaves_the_training_where_it_is(error, adapting, monkeypatch):
    one, told = adapting

    def move(*_):
        raise error

    monkeypatch.setattr(moving, "move", move)
    recipe = SimpleNamespace(plan=object())
    monkeypatch.setattr(moving, "recipe_of", lambda run: recipe)
    one._move(None, None)
    assert one.events[-1].what == f"stays: {error.what}"
    assert told == ["placed"]


def test_a_move_in_which_the_program_ends_is_no_decision(adapting, monkeypatch):
    def move(*_):
        raise LOST

    monkeypatch.setattr(moving, "move", move)
    with pytest.raises(WorkerFailedError):
        adapting[0]._move(None, None)


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_program_goes_back_to_its_old_plan_where_a_new_one_fails_after_compiling(is_lost, program, monkeypatch):
    calls, _ = program
    functions = [Function([], []), Function([], [])]
    for function in functions:
        function.outs_handler.hwaware_recipe = SimpleNamespace(plan="old")
        calls.executables.add(function)
    functions[1].outs_handler.hwaware_recipe = None  # it follows another function
    recovery, given = recovering.Recovery(calls, None, None), []

    def attempt(actors, phases, wanted):
        plan = wanted or recipes.of(functions[0]).plan
        given.append(plan)
        functions[0].outs_handler.hwaware_recipe = SimpleNamespace(plan=plan)  # as it is compiled
        if plan == "new":
            raise MeasurementError("The state did not arrive.", "x")
        return plan, 0

    monkeypatch.setattr(recovery, "_attempt", attempt)
    monkeypatch.setattr(recovery, "_keep_left", lambda actors: is_lost)
    monkeypatch.setattr(recovering.choosing, "mapping_of", lambda plan: plan)
    assert recovery._tried({}, [], "new").mapping == "old"
    assert given == ["new", "old"]
    assert recipes.of(functions[0]).plan == "old"
    assert recipes.of(functions[1]) is None


@pytest.mark.parametrize("others", [["a"], []])
def test_an_idle_host_that_is_lost_while_the_program_is_placed_lets_the_recovery_begin_again(others, monkeypatch):
    """No worker runs there yet. Without any host, the program ends at once."""
    pytest.importorskip("ray")
    up, shrunk, tries = ["a", "idle"], [], []
    infos = [{"NodeManagerAddress": address} for address in up]
    mesh = SimpleNamespace(num_hosts=2, host_info=infos, devices=[[0], [0]])
    calls = Calls()
    calls.group = SimpleNamespace(meshes=(), parent=mesh)
    recovery = recovering.Recovery(calls, vaults.Vaults(), None)
    recovery.watch = SimpleNamespace(members=())

    def attempt(actors, phases, wanted):
        tries.append(list(up))
        recovery._shrink(mesh)
        if len(tries) == 1:
            up[:] = others
            raise ClusterUnreachableError("Hosts of the plan do not answer: idle.", "x")
        return "the plan for a", 0

    monkeypatch.setattr(recovery, "_attempt", attempt)
    monkeypatch.setattr(recovering, "_answering", lambda addresses: set(up) & set(addresses))
    monkeypatch.setattr(recovering.unequal, "shrink", lambda mesh, lost: shrunk.append(lost))
    monkeypatch.setattr(recovering.choosing, "mapping_of", lambda plan: plan)
    if others:
        assert recovery._tried({}, [], None).tries == 2
        assert shrunk == [{("idle", 0)}]
    else:
        with pytest.raises(HwawareError, match="No host is left"):
            recovery._tried({}, [], None)
    assert tries == [["a", "idle"], others]


def test_a_function_that_was_compiled_while_no_rescuer_was_in_charge_has_no_recipe():
    """As one that follows a training, and is compiled after `hwaware.disable()`."""
    assert recipes.of(SimpleNamespace(outs_handler=SimpleNamespace())) is None


def test_a_host_is_given_back_if_the_training_ends_while_it_is_measured(monkeypatch):
    ray = pytest.importorskip("ray")
    run = SimpleNamespace(is_closed=False, reserved=[], calls=SimpleNamespace(group=SimpleNamespace(parent=None)))
    one = joining.Joining.__new__(joining.Joining)
    one._run, one._tried, one._seen = run, set(), set()
    recipe = SimpleNamespace(profile=object(), settings=SimpleNamespace(exclude=()))
    group, given_back = object(), []

    def measured(*_):
        run.is_closed = True
        return SimpleNamespace()

    monkeypatch.setattr(joining.moving, "recipe_of", lambda run: recipe)
    monkeypatch.setattr(joining, "_named", lambda node, profile: ("h3", profile))
    monkeypatch.setattr(joining, "_addresses", lambda mesh: [])
    monkeypatch.setattr(joining, "_timed", lambda *_: None)
    monkeypatch.setattr(joining.beside, "profile_beside", measured)
    monkeypatch.setattr(joining.reserving, "reserved_later", lambda node: group)
    monkeypatch.setattr(joining.reserving, "give_back", given_back.append)
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "x"}])
    assert one._measured(SimpleNamespace(id="x", address="10.0.0.3", num_gpus=1)) is None
    assert given_back == [group]


def test_memory_that_the_system_cannot_give_leaves_no_open_file(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(OSError, match="No space left"):
            handing.Memory(4096)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_training_that_ends_in_a_move_is_not_told_as_one_that_stays(monkeypatch):
    """Who moves it goes on after a HwawareError, but not after a WorkerFailedError."""
    run = SimpleNamespace(
        is_calling=False, ended=None, calls=None, recovery=SimpleNamespace(watch=SimpleNamespace(members=()))
    )

    def place_again(*_):
        run.ended = LOST
        raise HwawareError("No host is left.", "start again.")

    run.place_again = place_again
    monkeypatch.setattr(moving, "_require", lambda *_: None)
    monkeypatch.setattr(moving, "commit", lambda *_: None)
    with pytest.raises(WorkerFailedError) as caught:
        moving.move(run, None, "drained: h1")
    assert caught.value is LOST


@pytest.mark.parametrize("fails", ["wait", "using"])
def test_a_reservation_that_fails_is_given_back(fails, monkeypatch):
    ray = pytest.importorskip("ray")

    def wait(limit_s):
        if fails == "wait":
            raise ray.exceptions.RaySystemError("Ray has ended.")
        return False

    def using(nodes):
        raise ray.exceptions.RaySystemError("Ray has ended.")

    group, given_back = SimpleNamespace(wait=wait), []
    monkeypatch.setattr(ray.util, "placement_group", lambda *_, **__: group)
    monkeypatch.setattr(reserving.ray_jobs, "require_unused", lambda nodes: None)
    monkeypatch.setattr(reserving.ray_jobs, "using", using)
    monkeypatch.setattr(reserving, "give_back", given_back.append)
    with pytest.raises(ray.exceptions.RaySystemError):
        reserving.reserved_later(SimpleNamespace(num_gpus=1, address="10.0.0.3"))
    assert given_back == [group]


def test_a_vault_that_is_not_up_yet_is_ended_with_its_host(monkeypatch):
    ray = pytest.importorskip("ray")
    ended = []
    monkeypatch.setattr(ray, "kill", ended.append)
    found = vaults.Vaults()
    found._starting["10.0.0.1"] = ("starting", None, None)
    found.up["10.0.0.2"], found.held["10.0.0.2"] = vaults._Up("up", ("10.0.0.2", 7), 42), set()
    found.end(["10.0.0.1", "10.0.0.2", "10.0.0.3"])
    assert ended == ["starting", "up"]
    assert (found.up, found._starting) == ({}, {})
