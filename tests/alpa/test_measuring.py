"""Layer times measured before placement: the programs that run, on all devices of the cluster at once."""

import contextlib
import functools
import math
import os
import subprocess
import sys
import time

import builders
import msgspec
import pytest

pytestmark = pytest.mark.alpa


@pytest.fixture(autouse=True)
def _runtime():
    from hwaware.activation import install_runtime

    install_runtime()


def test_layers_are_timed_before_they_are_placed(short_readings, profile, model):
    from hwaware.bench.training import TrainingRun, single_device_losses
    from hwaware.calibration.timers import timers_kept
    from hwaware.costs.own_times import with_own_kinds

    kinds = [msgspec.structs.replace(d, kind=kind) for d, kind in zip(profile.devices, ("fast", "slow", "slow"))]
    unlike = msgspec.structs.replace(profile, devices=tuple(kinds), environment=None)
    with timers_kept():
        run = TrainingRun("hwaware", model, unlike, num_layers=2, num_microbatches=4, microbatch_size=8, measure=True)
        try:
            run.step()
            workload, kinds = with_own_kinds(run.workload, unlike)
            with run.reference(workload, kinds) as reference:
                reading = reference.now()
        finally:
            run.close()
    # How near the reading comes is for the machine's pace to say; the test below has the formula.
    whole = [[layer.measured[d.kind]["1,1"] for layer in workload.layers] for d in kinds.devices]
    sums = [sum(times.forward_s + times.backward_s + times.update_s for times in layers) for layers in whole]
    assert reference.usual_s == pytest.approx(sum(sums) / len(sums))
    assert 0 < reading.seconds < 60
    assert {"fast", "slow"} <= set(reading.of_kinds) == {device.kind for device in kinds.devices}
    for layer in workload.layers:
        assert {"fast", "slow"} <= set(layer.measured)
        for of_kind in layer.measured.values():
            assert sorted(of_kind) == ["1,1", "2,1", "4,1"]  # all samples, those of one of two replicas, of four
            for times in of_kind.values():
                assert 0 < times.forward_s < 10
                assert 0 < times.backward_s < 10
                assert 0 < times.update_s < 10
                assert 0 < times.deviation_s < 1
                assert times.spread is None  # measured, not carried over
    assert run.losses == pytest.approx(single_device_losses(model, 32, 1), rel=1e-4)


def test_layers_as_a_reference_count_as_often_as_they_run_and_each_device_alike(profile, monkeypatch):
    import jax.numpy as jnp

    from hwaware.calibration import timers as measuring
    from hwaware.calibration.programs import LayerPrograms
    from hwaware.calibration.timing import Repeated
    from hwaware.compiler.programs import lower_function

    times = {**builders.timed(1.0, 2.0, "fast", update_s=1.0), **builders.timed(4.0, 8.0, "slow")}
    workload = builders.workload(2, 4, measured=times)
    unlike = [msgspec.structs.replace(d, kind=kind) for d, kind in zip(profile.devices, ("fast", "slow", "slow"))]
    forward, backward = (
        Repeated(lower_function(lambda x, add=add: [x + add], [jnp.zeros(4)], "add", None)) for add in (1, 2)
    )
    # Of both programs on three devices: as usual, twice as long in the mean of three, as usual.
    now = [[[2.0], [2.0]], [[8.0], [16.0]], [[4.0], [7.0, 9.0]]]
    on_the_second = iter([now[1], now[1], [[7.0], [15.0]], None, [[8.0, 10.0], [17.0]], now[1]])
    asked = []

    @contextlib.contextmanager
    def timers(profile, devices):
        def ask(method, *arguments, resting=None):
            asked.append((method, *arguments))
            return [now[0], next(on_the_second), now[2]]

        yield ask

    monkeypatch.setattr(measuring, "timers", timers)
    programs = [LayerPrograms(forward, backward, None)] * 2
    with measuring.layers_reference(workload, programs, msgspec.structs.replace(profile, devices=tuple(unlike))) as one:
        assert one.usual_s == pytest.approx((8 + 24 + 24) / 3)
        reading = one.now()
    assert reading.seconds == pytest.approx(one.usual_s * 4 / 3)
    assert reading.of_kinds == pytest.approx({"fast": 1.0, "slow": 1.5})  # of both slow ones
    # Both programs once, with the working set of both layers; a reading lasts as long as a turn of the slowest.
    assert asked == [("compile", [forward, backward], 64), ("turns", 0.0), *[("turns", 24.0, math.inf)] * 4]


def test_devices_of_a_host_are_timed_together_while_every_fourth_host_rests():
    from hwaware.calibration.timers import _working

    hosts = {"a:0": "a", "b:0": "b", "a:1": "a", "c:0": "c", "d:0": "d", "e:0": "e"}
    assert _working(hosts, 0) == ["b:0", "c:0", "d:0"]
    assert _working(hosts, 1) == ["a:0", "a:1", "c:0", "d:0", "e:0"]
    assert _working(hosts, None) == list(hosts)
    assert [_working({"a:0": "a", "a:1": "a"}, k) for k in range(4)] == [[], *[["a:0", "a:1"]] * 3]


def test_what_is_excluded_is_not_timed(short_readings, profile, monkeypatch):
    import jax.numpy as jnp

    from hwaware.calibration import layers
    from hwaware.calibration.programs import LayerPrograms, LayerSource
    from hwaware.calibration.timing import Repeated
    from hwaware.compiler.programs import lower_function
    from hwaware.costs.own_times import with_own_kinds
    from hwaware.errors import UnusableInputError

    unlike = msgspec.structs.replace(
        profile, devices=tuple(msgspec.structs.replace(d, kind=d.id.upper()) for d in profile.devices)
    )
    program = Repeated(lower_function(lambda x: [x + 1], [jnp.zeros((64, 64))], "add", None))
    source = LayerSource("add", lambda _: LayerPrograms(program, program, None))
    found = layers.measured(builders.workload(1, 4), [source], unlike, exclude=("here:0",))
    assert set(with_own_kinds(found, unlike)[0].layers[0].measured) == {"HERE:1", "HERE:2"}
    with pytest.raises(UnusableInputError, match="cannot exclude 'there'"):
        layers.measured(builders.workload(1, 4), [source], unlike, exclude=("there",))


def test_a_device_whose_process_ends_is_named(local_ray):
    import ray

    from hwaware.calibration import timers as measuring
    from hwaware.errors import MeasurementError

    @ray.remote(num_cpus=0)
    class Dying:
        """A timer whose process ends when it is asked for a time."""

        def compile(self, programs, working_set_bytes):
            return None

        def turns(self, duration_s):
            os._exit(1)

    ask = functools.partial(measuring._ask, {"h3:0": Dying.remote()}, {"h3:0": "h3"}, float("inf"))
    assert ask("compile", [], 0) == [None]
    with pytest.raises(MeasurementError, match=r"not timed on device 'h3:0' within 600 s: .* To fix:"):
        ask("turns", 0.0)


def test_devices_that_do_not_answer_share_one_limit(local_ray, monkeypatch):
    import ray

    from hwaware.calibration import timers as measuring

    class Timer:
        """A timer that may take longer than anybody waits."""

        def turns(self, duration_s):
            time.sleep(duration_s)
            return []

    monkeypatch.setattr(measuring, "_GRACE_S", 1.0)
    started = {f"h{k}:0": ray.remote(num_cpus=0)(Timer).remote() for k in range(5)}
    ask = functools.partial(measuring._ask, started, dict(zip(started, started)))
    assert ask(math.inf, "turns", 0.0) == [[]] * 5
    begin_s = time.monotonic()
    assert ask(begin_s, "turns", measuring.Each([0.0, *[60.0] * 4])) == [[], *[None] * 4]
    assert time.monotonic() - begin_s < 3.0
    for timer in started.values():
        ray.kill(timer)


def test_layers_that_are_alike_are_timed_once(model):
    import jax

    from hwaware.calibration.layers import times_of
    from hwaware.calibration.timing import Timed, Timing
    from hwaware.patching.layer_programs import function_programs
    from hwaware.tracing.function import trace_programs

    _, functions = trace_programs(
        lambda state, batch: model.train_step(state, batch, value_and_grad=jax.value_and_grad),
        model.abstract_state(), model.batch(0, 1), num_layers=4, microbatch_size=8,
    )  # fmt: skip
    timed, working_sets = [], []

    def time(programs, working_set_bytes):
        timed.extend(programs)
        working_sets.append(working_set_bytes)
        fast = [Timing((0.05 + index, 9.0, 0.01), 0.3 if index else 0.4) for index in range(len(programs))]
        return Timed([fast, [Timing((1.5,), 0.0)] * len(programs)], [])

    programs = function_programs(functions, 8)
    cpu, slower = times_of(programs, time)
    times = [layer["1,1"] for layer in cpu]
    assert len(timed) == len(set(timed)) < 16
    # Of all layers, not of the unlike; of whole ones, not of their parts.
    assert working_sets == [sum(program.argument_bytes() for layer in programs for program in layer.whole())]
    assert times[1] == times[2]  # the inner layers
    assert times[0].forward_s == pytest.approx(0.05)  # the median of three rounds
    assert times[0].deviation_s == pytest.approx(((0.3**2 + 0.4**2) / 2) ** 0.5)  # of both passes
    assert [layer["1,1"].forward_s for layer in slower] == pytest.approx([1.5] * 4)
    halves = [layer["2,1"] for layer in cpu]
    assert halves[1] == halves[2] != times[1]
    assert halves[1].deviation_s == pytest.approx(0.3)
    assert all(half.forward_s > whole.forward_s for half, whole in zip(halves, times))  # they were asked for later


def test_what_a_step_overwrites_is_overwritten_when_it_is_timed_too(model, monkeypatch):
    import jax.numpy as jnp

    from hwaware.calibration import timing as times
    from hwaware.calibration.timing import ProgramTimer, Repeated, asking, timed
    from hwaware.compiler.programs import lower_function
    from hwaware.runtime.mesh import Place

    aval = jnp.zeros((64, 64))
    program = lower_function(lambda total, more: [total + more, more.sum()], [aval, aval], "add", None, {0: 0})
    assert "tf.aliasing_output" in program.stablehlo
    monkeypatch.setattr(times, "_READING_S", 0.1)
    (((found,),), _) = timed(asking(ProgramTimer(Place(0, "127.0.0.1", (0,)))), [Repeated(program, ((0, 0),))])
    assert len(found.readings_s) == 3 * 3
    assert all(0 < seconds < 1 for seconds in found.readings_s)


# How long a run takes, for how long devices compute (the slow one: 4 + 1 + 4 + 0.5 of those), and how many times.
@pytest.mark.parametrize(("second", "duration_s", "rounds"), [(1.0, 9.5, 1), (0.2, 1.9, 2), (0.1, 1.0, 3)])
def test_devices_compute_until_the_slowest_has_run_everything(second, duration_s, rounds, caplog):
    from hwaware.calibration.timing import timed

    asked = []

    def ask(method, *arguments, resting=None):
        if method == "start":
            return [None, None]
        asked.append((method, arguments, resting))
        one_run = [None if resting == host else [[second * (x + len(asked))] for x in (host, 0.5)] for host in range(2)]
        before = len(asked) < 5
        busy = [("here", 0.01), ("there", 0.51 if len(asked) == 2 or not before else 0.01)]
        return {"compile": [None, None], "busy": busy, "turns": one_run}[method]

    with caplog.at_level("WARNING", "hwaware"):
        found = timed(ask, ["forward", "backward"], 100)
    fast, slow = found.timings
    assert found.busy == ["there"]
    assert asked == [
        ("compile", (["forward", "backward"], 100, math.inf), None),
        ("busy", (), None),
        ("busy", (), None),  # what has just compiled may still be ending
        ("turns", (0.0, math.inf), None),  # the fourth
        *[("turns", (pytest.approx(duration_s), math.inf), host) for host in (0, 1, 2, 3)] * rounds,
        *[("busy", (), None)] * 3,
    ]
    # Whoever rests is left out: the fast one of the first in each round, the slow one of the second.
    for timings, firsts in ((fast, [(6, 7, 8), (6.5, 7.5, 8.5)]), (slow, [(6, 8, 9), (5.5, 7.5, 8.5)])):
        for timing, first in zip(timings, firsts):
            later = [second * (one + 4 * turn) for turn in range(rounds) for one in first]
            assert timing.readings_s == pytest.approx(later)
    # From one run to the next: 1, 1 and in each more round 2, 1, 1; 2, 1 and 1, 2, 1.
    more = rounds - 1
    deviations = [((2 + 6 * more) / (2 + 3 * more) / 2) ** 0.5, ((5 + 6 * more) / (2 + 3 * more) / 2) ** 0.5]
    assert [timing.deviation_s for timing in (fast[0], slow[1])] == pytest.approx([second * one for one in deviations])
    (warning,) = caplog.messages
    assert "processors: there (51% busy). Their" in warning


def test_a_host_says_what_others_take_of_it():
    import socket

    from hwaware.calibration.timing import ProgramTimer

    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        host, busy = ProgramTimer.busy(None)
    finally:
        other.kill()
        other.wait()
    assert host == socket.gethostname()
    assert 0.2 / os.cpu_count() < busy < 1.5


def test_programs_run_in_turn_for_the_time_given():
    import jax.numpy as jnp

    from hwaware.calibration.timing import ProgramTimer, Repeated
    from hwaware.compiler.programs import lower_function
    from hwaware.runtime.mesh import Place

    timer = ProgramTimer(Place(0, "127.0.0.1", (0,)))
    aval = jnp.zeros((64, 64))
    both = [Repeated(lower_function(f, [aval], "one", None)) for f in (lambda x: [x + 1], lambda x: [x @ x])]
    timer.compile(both, 0)
    ran = []
    for index, run in enumerate(timer._runs):
        run.once = functools.partial(lambda index, once: (ran.append(index), once()), index, run.once)
    assert all(0 < seconds < 1 for (seconds,) in timer.turns(0.0))
    assert ran == [1, 0, 1]  # the first is not timed
    ran.clear()
    first, second = timer.turns(0.05)
    assert ran[1:] == [index % 2 for index in range(len(ran) - 1)]
    assert len(ran) > 3
    assert len(first) + len(second) == len(ran) - 1
    assert sum(first) + sum(second) > 0.04


def test_programs_go_round_as_many_inputs_as_together_fill_the_working_set():
    import jax
    import jax.numpy as jnp

    from hwaware.calibration.timing import ProgramTimer, Repeated, _Run
    from hwaware.compiler.programs import lower_function
    from hwaware.runtime.mesh import Place

    aval = jnp.zeros((64, 64))
    program = Repeated(lower_function(lambda total, more: [total + more], [aval, aval], "add", None, {0: 0}), ((0, 0),))
    assert program.argument_bytes() == 2 * 64 * 64 * 4
    timer = ProgramTimer(Place(0, "127.0.0.1", (0,)))
    run = _Run(jax.local_devices()[0], timer._compiled(program), program, 3 * program.argument_bytes())
    run.every()
    run.once()
    assert [float(one[0][0, 0]) for one in run._sets] == [1.5, 1.0, 1.0]
    small = Repeated(lower_function(lambda x: [x + 1], [aval], "one", None))
    timer.compile([program, small], 4 * program.argument_bytes())
    assert [len(run._sets) for run in timer._runs] == [2, 4]
    once = dict(timer._executables)
    timer.compile([small], small.argument_bytes())
    assert [len(run._sets) for run in timer._runs] == [1]
    assert list(once) == [program.program.stablehlo, small.program.stablehlo]
    assert timer._executables == once  # what is known is not compiled again


def test_timers_that_are_kept_start_once_and_end_with_the_block(profile, monkeypatch):
    from hwaware.calibration import timers as measuring

    running = []

    @contextlib.contextmanager
    def started(profile, devices, end_s):
        running.append([device.id for device in devices])
        yield lambda method, found=running[-1]: [method, *found]
        running.remove([device.id for device in devices])

    monkeypatch.setattr(measuring, "_started", started)
    names = [device.id for device in profile.devices]
    with measuring.timers(profile, profile.devices) as ask:
        assert ask("turns") == ["turns", *names]
    assert running == []  # nobody keeps them
    with measuring.timers_kept():
        for devices in (profile.devices, profile.devices[:1], profile.devices):
            with measuring.timers(profile, devices) as ask:
                assert ask("turns") == ["turns", *names[: len(devices)]]
        assert running == [names, names[:1]]
    assert running == []
    with pytest.raises(ZeroDivisionError), measuring.timers_kept(), measuring.timers(profile, profile.devices):
        1 / 0  # noqa: B018
    with measuring.timers(profile, profile.devices):
        assert running[-1:] == [names]


def test_a_process_keeps_the_memory_that_it_frees(tmp_path):
    script = tmp_path / "allocate.py"
    script.write_text(
        """
import resource, sys
from hwaware.runtime.backend import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
faults = []
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytearray(64 << 20)
    block[::4096] = bytes(len(block) // 4096)
    del block
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(faults[-1])
"""
    )
    again = {
        how: int(subprocess.run([sys.executable, script, how], check=True, capture_output=True).stdout)
        for how in ("keep", "not")
    }
    assert again["keep"] < again["not"] / 4


def test_an_update_that_waits_for_other_meshes_is_not_timed():
    import jax

    from hwaware.patching.layer_programs import _update

    class Layer:
        """A layer of Alpa's."""

        invars = outvars = ()

        def closed_jaxpr(self):
            closed = jax.make_jaxpr(lambda x: x + 1)(1.0)
            equation = closed.jaxpr.eqns[0]
            primitive = type(equation.primitive)("__builtin$CrossMeshAllReduce")
            return closed.replace(jaxpr=closed.jaxpr.replace(eqns=[equation.replace(primitive=primitive)]))

    assert _update(Layer(), {}) is None
    assert _update(None, {}) is None


def test_a_layer_is_timed_on_the_gpu_that_the_profile_means():
    from hwaware.calibration.timers import _place

    known, unknown = builders.device("a:1", kind="H100", uuid="GPU-1"), builders.device("a:1")
    assert (_place(known, "10.0.0.1", 1).devices, _place(known, "10.0.0.1", 1).uuids) == ((1,), ("GPU-1",))
    assert _place(unknown, "10.0.0.1", 1).uuids == ()
