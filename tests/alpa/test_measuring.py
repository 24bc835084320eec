"""Layer times measured before placement: the programs that run, on a device of the cluster, for every kind of it."""

import subprocess
import sys

import msgspec
import pytest

pytestmark = pytest.mark.alpa


@pytest.fixture(autouse=True)
def _runtime():
    from hwaware.patching.activation import install_runtime

    install_runtime()


def test_layers_are_timed_before_they_are_placed(profile, model):
    from hwaware.bench.training import TrainingRun, single_device_losses

    kinds = [msgspec.structs.replace(d, kind=kind) for d, kind in zip(profile.devices, ("fast", "slow", "slow"))]
    unlike = msgspec.structs.replace(profile, devices=tuple(kinds), environment=None)
    run = TrainingRun("hwaware", model, unlike, num_layers=2, num_microbatches=4, microbatch_size=8, measure=True)
    try:
        run.step()
    finally:
        run.close()
    for layer in run.workload.layers:
        fast, slow = layer.measured["fast"]["1,1"], layer.measured["slow"]["1,1"]
        assert 0 < fast.forward_s < 10
        assert 0 < fast.backward_s < 10
        assert 0 < fast.update_s < 10
        assert fast.spread is None
        assert (slow.forward_s, slow.backward_s) == pytest.approx((2 * fast.forward_s, 2 * fast.backward_s))
        assert slow.spread == pytest.approx(0, abs=1e-9)
    assert run.losses == pytest.approx(single_device_losses(model, 32, 1), rel=1e-4)


def test_traced_layers_are_timed_on_the_cluster(profile, model):
    import jax

    from hwaware.patching.measuring import measured_functions
    from hwaware.tracing.function import trace_programs

    workload, functions = trace_programs(
        lambda state, batch: model.train_step(state, batch, value_and_grad=jax.value_and_grad),
        model.abstract_state(), model.batch(0, 1), num_layers=2, microbatch_size=8,
    )  # fmt: skip
    made = measured_functions(workload, functions, profile)
    assert [sorted(layer.measured) for layer in made.layers] == [["cpu"], ["cpu"]]
    for layer in made.layers:
        times = layer.measured["cpu"]["1,1"]
        assert 0 < times.forward_s < 10
        assert 0 < times.backward_s < 10


def test_layers_that_are_alike_are_timed_once(profile, model):
    import jax

    from hwaware.patching.measuring import function_programs, times_of
    from hwaware.reference_kernel import NAME
    from hwaware.runtime.timing import Timing
    from hwaware.tracing.function import trace_programs

    _, functions = trace_programs(
        lambda state, batch: model.train_step(state, batch, value_and_grad=jax.value_and_grad),
        model.abstract_state(), model.batch(0, 1), num_layers=4, microbatch_size=8,
    )  # fmt: skip
    given = msgspec.structs.replace(profile, environment={"reference_s": 0.03, "reference_kernel": NAME})
    timed, working_sets = [], []

    def time(programs, working_set_bytes):
        timed.extend(programs)
        working_sets.append(working_set_bytes)
        return [(Timing(0.1 + index, 0.06),) for index in range(len(programs))]

    times = times_of(function_programs(functions), given, time)
    assert len(timed) == len(set(timed)) < 8
    assert working_sets[0] > sum(program.argument_bytes() for program in timed)  # of all layers, not of the unlike
    assert times[1] == times[2]  # the inner layers
    assert times[0].forward_s == pytest.approx(0.05)  # the machine was half as fast as beside the profile


def test_what_a_step_overwrites_is_overwritten_when_it_is_timed_too(model):
    import jax.numpy as jnp

    from hwaware.runtime.mesh import Place
    from hwaware.runtime.programs import lower_function
    from hwaware.runtime.timing import ProgramTimer, Repeated

    aval = jnp.zeros((64, 64))
    program = lower_function(lambda total, more: [total + more, more.sum()], [aval, aval], "add", None, {0: 0})
    assert "tf.aliasing_output" in program.stablehlo
    (timings,) = ProgramTimer(Place(0, "127.0.0.1", (0,))).time([Repeated(program, ((0, 0),))], rounds=2)
    assert len(timings) == 2
    assert all(0 < timing.seconds < 1 and 0 < timing.reference_s < 10 for timing in timings)


def test_programs_go_round_as_many_inputs_as_fill_the_working_set():
    import jax
    import jax.numpy as jnp

    from hwaware.runtime.programs import lower_function
    from hwaware.runtime.timing import Repeated, _Run

    aval = jnp.zeros((64, 64))
    program = Repeated(lower_function(lambda total, more: [total + more], [aval, aval], "add", None, {0: 0}), ((0, 0),))
    assert program.argument_bytes() == 2 * 64 * 64 * 4
    run = _Run(jax.local_devices()[0], program, 3 * program.argument_bytes())
    run.every()
    run.once()
    assert [float(one[0][0, 0]) for one in run._sets] == [1.5, 1.0, 1.0]


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

    from hwaware.patching.measuring import _update

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
