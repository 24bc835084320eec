"""What hwaware takes from inside JAX, on every version."""

import re

import jax
import numpy
import pytest

from hwaware.compat.specs import Chunked, NoSharding, Replicated, ShardedAxis, ShardingSpec, spec_to_indices

pytestmark = pytest.mark.alpa


def test_each_device_has_its_slices_of_an_array():
    rows = ShardingSpec([Chunked([2]), NoSharding()], [Replicated(2), ShardedAxis(0)])
    upper, lower = (slice(0, 3), slice(None)), (slice(3, 6), slice(None))
    assert spec_to_indices((6, 4), rows) == (upper, lower, upper, lower)
    assert spec_to_indices((), ShardingSpec((), [Replicated(2)])) == ((), ())
    assert hash(rows) == hash(ShardingSpec((Chunked((2,)), NoSharding()), (Replicated(2), ShardedAxis(0))))
    assert rows != ShardingSpec(rows.sharding, (ShardedAxis(2), ShardedAxis(0)))


def test_specs_pass_between_processes():
    import pickle

    spec = ShardingSpec([Chunked([2, 2]), NoSharding()], [ShardedAxis(1), ShardedAxis(0)])
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_a_call_of_a_part_is_one_equation_and_computes_what_the_part_does():
    from hwaware.compat.programs import named_call_primitive

    part = jax.make_jaxpr(lambda x: (x + 1, 2 * x))(1.0).jaxpr
    whole = jax.make_jaxpr(lambda x: named_call_primitive().bind(x, name="part", call_jaxpr=part))(1.0)
    assert [equation.primitive.name for equation in whole.eqns] == ["named_call"]
    run = jax.jit(lambda x: named_call_primitive().bind(x, name="part", call_jaxpr=part))
    assert [float(result) for result in run(3.0)] == [4.0, 6.0]


def test_numbers_and_arrays_become_what_jax_computes_with():
    from hwaware.compat.programs import canonicalized

    found = [canonicalized(value) for value in (numpy.zeros(2), numpy.float64(1), 1, True, 1.5)]
    assert [str(value.dtype) for value in found] == ["float32", "float32", "int32", "bool", "float32"]
    other = object()
    assert canonicalized(other) is other


def test_donated_arguments_are_told_leaf_by_leaf():
    from hwaware.compat import facades

    donation_vector = facades.module("jax.api_util").donation_vector
    assert donation_vector((1,), (1, {"a": 2, "b": 3}), {"c": 4}) == (False, True, True, False)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("donate_argnums", 0),
        ("donate_argnums", (0.0,)),
        ("batch_argnums", None),
        ("batch_argnums", "auto"),
        ("batch_argnums", ("batch",)),
    ],
)
def test_argnums_of_the_wrong_type_are_named(name, wrong):
    from hwaware.patching import stock_jax

    stock_jax.install()
    import alpa

    step = alpa.parallelize(lambda state, batch: state, method=alpa.PipeshardParallel(), **{name: wrong})
    with pytest.raises(TypeError, match=re.escape(f"{wrong!r}, expected places of arguments in a tuple. To fix: ")):
        step.get_executable(numpy.ones(2), numpy.ones(2))


def test_static_dictionaries_with_the_same_values_have_one_hash():
    from hwaware.compat import facades

    frozen = facades.module("jax.experimental.maps").FrozenDict
    assert hash(frozen({"a": 1, 2: "b"})) == hash(frozen({2: "b", "a": 1}))


def test_a_name_that_alpa_misses_once_hwaware_is_disabled_says_so():
    from hwaware.compat import facades

    with pytest.raises(AttributeError, match="only while hwaware is enabled"):
        assert facades.module("jax._src.dispatch").nothing_of_this_name


def test_a_copy_on_a_device_keeps_its_values_when_the_array_changes():
    from hwaware.compat.client import put

    array = numpy.zeros(1 << 16, "float32")
    copy = put(array, jax.devices()[0], copy=True)
    array += 1
    assert float(copy.sum()) == 0


def test_another_process_loads_a_compiled_program_from_a_store(monkeypatch):
    from types import SimpleNamespace

    from hwaware.compat import client

    stored = {}
    monkeypatch.setattr(client, "_kept", None)
    monkeypatch.setattr(client, "_store", None)
    client.share_programs(SimpleNamespace(get=stored.get, put=stored.__setitem__))
    array, devices = jax.numpy.arange(3.0), jax.devices()[:1]
    text = str(jax.jit(lambda x: 2 * x + 1).lower(array).compiler_ir("stablehlo"))
    results = [client.load(text, devices).execute([array])]
    if not stored:
        pytest.skip(f"JAX {jax.__version__} stores no programs of CPUs")
    with monkeypatch.context() as patched:
        patched.setattr(client, "_kept", {})
        patched.setattr(client, "_compiled", None)
        results.append(client.load(text, devices).execute([array]))
    (key,) = stored
    stored[key] = b"no program"
    monkeypatch.setattr(client, "_kept", {})
    results.append(client.load(text, devices).execute([array]))
    assert [numpy.asarray(found).tolist() for (found,) in results] == [[1.0, 3.0, 5.0]] * 3
    assert stored[key] != b"no program"


def test_another_process_runs_a_program_that_calls_lapack(tmp_path):
    import subprocess
    import sys

    matrix = jax.numpy.diag(jax.numpy.array([9.0, 4.0, 1.0]))
    lowered = jax.jit(lambda x: jax.numpy.linalg.eigh(x)[0]).lower(matrix)
    (tmp_path / "program").write_text(str(lowered.compiler_ir("stablehlo")))
    program = """
import sys, jax, numpy
from hwaware.compat import client
(found,) = client.load(open(sys.argv[1]).read(), jax.devices()[:1]).execute([jax.numpy.diag(numpy.float32([9, 4, 1]))])
print(numpy.round(numpy.asarray(found), 4).tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "program")], capture_output=True, text=True, timeout=300
    )
    assert (done.stdout.strip(), done.returncode) == ("[1.0, 4.0, 9.0]", 0), done.stderr
