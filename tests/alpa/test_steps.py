"""Steps that Alpa cannot cut end with one message; steps whose losses Alpa averages otherwise get a warning.

Nothing here starts Ray: a step is traced as Alpa traces it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import chosen

pytestmark = pytest.mark.alpa
PARTS = 2
WEIGHTS = [np.eye(4, dtype=np.float32) * 0.5] * 2
BATCH = {"x": np.ones((8, 4), np.float32), "mask": np.ones(8, np.float32), "y": np.zeros(8, np.int32)}


@pytest.fixture(autouse=True)
def _runtime():
    from hwaware.activation import install_runtime

    install_runtime()


def traced(step, parts, layer_option=None, state=WEIGHTS):
    """Return the program that Alpa traces, and which arguments are cut into microbatches."""
    import alpa
    from alpa.util import GradFuncTransformContext, abstractify_with_aval, trace_jaxpr_with_micro_batch
    from jax.api_util import flatten_fun_nokwargs

    from hwaware.compat import programs

    flat, tree = jax.tree_util.tree_flatten((state, BATCH))
    cut = [index >= len(flat) - len(BATCH) for index in range(len(flat))]
    function, _ = flatten_fun_nokwargs(programs.wrap_init(step), tree)
    with GradFuncTransformContext((layer_option or alpa.ManualLayerOption()).transform):
        return trace_jaxpr_with_micro_batch(function, cut, parts, list(map(abstractify_with_aval, flat)))[0], cut


def tidied(step, state=WEIGHTS):
    from hwaware.patching import steps

    (micro, cut), (full, _) = traced(step, PARTS, state=state), traced(step, 1, state=state)
    return steps.tidied(micro, full, cut, PARTS, "1f1b", steps.Names())


def network(params, batch):
    import alpa

    x = jnp.tanh(batch["x"] @ params[0])
    alpa.mark_pipeline_boundary()
    return jax.nn.relu(x @ params[1])


def errors(params, batch):
    import optax

    return optax.softmax_cross_entropy_with_integer_labels(network(params, batch), batch["y"])


def gradient(loss, params, **options):
    import alpa

    return alpa.value_and_grad(loss, **options)(params)


def updated(params, gradients):
    return [p - 0.1 * g for p, g in zip(params, gradients)]


def of_two(params, batch):
    first, gradients = gradient(lambda p: errors(p, batch).mean(), params)
    _, others = gradient(lambda p: -errors(p, batch).mean(), params)
    return updated(updated(params, gradients), others), first


def of_jax(params, batch):
    value, gradients = jax.value_and_grad(lambda p: errors(p, batch).mean())(params)
    return updated(params, gradients), value


def without(params, batch):
    return jnp.mean(batch["x"] @ params[0])


def accuracy_afterwards(params, batch):
    def loss(p):
        logits = network(p, batch)
        return jnp.mean(logits**2), logits

    (value, logits), gradients = gradient(loss, params, has_aux=True)
    return updated(params, gradients), value, jnp.mean(jnp.argmax(logits, -1) == 0)


def samples_afterwards(params, batch):
    value, gradients = gradient(lambda p: errors(p, batch).mean(), params)
    return updated(params, gradients), value, jnp.mean(batch["x"])


def rows_of_the_whole_batch(params, batch):
    def loss(p):
        logits = network(p, batch)
        return jnp.mean(logits**2), logits @ logits.T

    (value, products), gradients = gradient(loss, params, has_aux=True)
    return updated(params, gradients), value, products


def whole_number_before(params, batch):
    count = jnp.sum(batch["y"] == 0)
    value, gradients = gradient(lambda p: errors(p, batch).sum() / count, params)
    return updated(params, gradients), value, count


def rows_before_summed_after(params, batch):
    mask = (batch["x"][:, 0] > 0).astype(jnp.float32)
    total, gradients = gradient(lambda p: jnp.sum(errors(p, batch) * mask), params)
    return updated(params, [g / mask.sum() for g in gradients]), total


def bool_beside(params, batch):
    def loss(p):
        return jnp.mean(errors(p, batch)), jnp.all(jnp.isfinite(errors(p, batch)))

    (value, finite), gradients = gradient(loss, params, has_aux=True)
    return updated(params, gradients), value, finite


def of_each_sample(params, batch):
    import alpa

    each = jax.vmap(lambda x: alpa.grad(lambda p: jnp.sum((x @ p[0] @ p[1]) ** 2))(params))(batch["x"])
    return updated(params, [jnp.mean(g, axis=0) for g in each])


REFUSED = {
    of_each_sample: r"inside jax\.vmap, and Alpa computes no gradient for each sample",
    of_two: "takes 2 gradients, but Alpa takes one",
    of_jax: r"no gradient by alpa\.grad .* schedule '1f1b'",
    without: r"no gradient by alpa\.grad .* pipeline_schedule=\"inference\"",
    accuracy_afterwards: r"Result 3 of the step is computed after the gradient .* for each sample.*has_aux=True",
    samples_afterwards: r"Result 3 of the step .* from argument 3, which is cut",
    rows_of_the_whole_batch: r"of the shape \(4, 4\) with one microbatch, and of \(8, 8\)",
    whole_number_before: r"Result 3 of the step is computed from samples, before the loss, as int32",
    rows_before_summed_after: r"Result 0 of the step is computed after the gradient from a value with one row for each",
    bool_beside: r"The loss returns a bool without a row.*as a number",
}


@pytest.mark.parametrize("step", REFUSED, ids=lambda step: step.__name__)
def test_a_step_that_alpa_cannot_cut_is_refused(step):
    from hwaware.errors import AlpaError

    with pytest.raises(AlpaError, match=rf"(?s){REFUSED[step]}") as caught:
        tidied(step)
    assert str(caught.value).count("To fix:") == 1


def test_a_call_inside_a_transformation_of_jax_is_refused():
    import alpa

    from hwaware.errors import AlpaError

    step = alpa.parallelize(of_two, method=alpa.PipeshardParallel(num_micro_batches=PARTS))
    with pytest.raises(AlpaError, match=r"is called inside jax\.jit .* To fix: call it outside"):
        jax.jit(step)(WEIGHTS, BATCH)


def test_a_failure_with_a_part_of_the_batch_names_batch_argnums(caplog):
    whole = jnp.ones((8, 4))  # such as targets that batch_argnums leaves out

    def step(params, batch):
        value, gradients = gradient(lambda p: jnp.mean((network(p, batch) - whole) ** 2), params)
        return updated(params, gradients), value

    traced(step, 1)
    assert not caplog.messages
    with pytest.raises(TypeError, match="shapes"):
        traced(step, PARTS)
    (line,) = caplog.messages
    assert "let batch_argnums name all arguments with samples" in line


@pytest.mark.parametrize("schedule", ["1f1b", "inference"])
def test_typed_keys_in_the_state_are_refused(pipeline, schedule):
    from hwaware.errors import AlpaError

    def step(state, batch):
        return batch + jax.random.normal(state["key"], batch.shape)

    state = {"key": jax.ShapeDtypeStruct((), jax.random.key(0).dtype)}
    with pytest.raises(AlpaError, match=r"argument \[0\]\['key'\] of the function .* \(key<fry>\).*To fix: keep"):
        pipeline(step, state, np.ones((8, 4), np.float32), 2, pipeline_schedule=schedule)


def same(x):
    return jax.pure_callback(lambda array: array, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def printed(x):
    jax.debug.print("{x}", x=x)
    return x


def stages_with(called):
    """Return the stages of a step that calls a function on its loss."""
    import alpa
    import recorded_programs

    def step(params, batch):
        def loss(params):
            return jnp.mean((jnp.tanh(batch["x"] @ params[0]) @ params[1] @ params[0] @ params[1]) ** 2)

        value, gradients = alpa.value_and_grad(loss)(params)
        return [weight - one for weight, one in zip(params, gradients)], called(value)

    return recorded_programs.stages_of(recorded_programs.Case(lambda: (step, WEIGHTS, BATCH), (1, 1)))


@pytest.mark.parametrize("called", [same, lambda x: jax.lax.while_loop(lambda y: y < 9, lambda y: printed(y + 1), x)])
def test_a_call_of_python_that_would_crash_a_worker_is_refused(called):
    from hwaware.errors import AlpaError

    with pytest.raises(AlpaError, match=r"calls a Python function of this process.*To fix:"):
        stages_with(called)


def test_prints_that_alpa_leaves_out_are_warned_of(caplog):
    stages = stages_with(printed)
    assert not any("callback" in stage.program.stablehlo for stage in stages)
    assert any("Alpa leaves out calls without a result. To fix:" in line for line in caplog.messages)
    caplog.clear()
    stages_with(jnp.sqrt)
    assert not caplog.messages


def last_layer_passes_on(scale):
    """Add a term of an earlier layer to the loss: its gradient is `scale`."""

    def loss(params, batch):
        import alpa

        x = jnp.tanh(batch["x"] @ params[0])
        balance = jnp.mean(x**2)
        alpa.mark_pipeline_boundary()
        return (
            jnp.mean((x @ params[1]) ** 2) + scale * balance if scale != 1 else jnp.mean((x @ params[1]) ** 2) + balance
        )

    return simple(loss)


@pytest.mark.parametrize("scale", [1, 0.1])
def test_no_layer_returns_a_bare_number(scale):
    from hwaware.compat.jaxprs import is_literal
    from hwaware.patching import steps

    micro, _ = tidied(last_layer_passes_on(scale))
    numbers, ends = set(), 0
    for equation in micro.jaxpr.eqns:
        if steps.mark_of(equation) == "start":
            numbers = {inner for value, inner in zip(equation.invars, equation.outvars) if is_literal(value)}
        if steps.mark_of(equation) == "end":
            ends += 1
            assert not any(is_literal(value) or value in numbers for value in equation.invars)
    assert ends == 4  # forward and backward pass of two layers


def test_no_layer_returns_one_of_its_inputs():
    """Alpa drops an input that no operation reads, even if the layer returns it."""
    from hwaware.patching import steps

    def loss(params, batch):  # the first layer adds, so the other weight's gradient passes its backward pass unchanged
        return jnp.mean(errors([weight + 0.1 for weight in params], batch))

    micro, _ = tidied(simple(loss))
    inside, returned = set(), 0
    for equation in micro.jaxpr.eqns:
        if steps.mark_of(equation) == "start":
            inside = set(equation.outvars)
        if steps.mark_of(equation) == "end":
            returned += len(equation.invars)
            assert not inside.intersection(equation.invars)
    assert returned >= 2 + len(WEIGHTS)  # what crosses, the loss, and the gradients


def normed_before(params, batch):
    """Compute before the loss from a weight that the loss reads too, as spectral normalization does."""
    scales = [jnp.max(weight @ weight) for weight in params]
    value, gradients = gradient(lambda p: jnp.mean(errors([w / s for w, s in zip(p, scales)], batch)), params)
    return updated(params, gradients), value


def test_a_layer_reads_each_of_its_inputs_by_the_name_that_its_marker_gives():
    from hwaware.patching import steps

    micro, _ = tidied(normed_before)
    given, products = set(), 0
    for equation in micro.jaxpr.eqns:
        if steps.mark_of(equation) == "start":
            given = {value for value in equation.invars if not hasattr(value, "val")}
        elif steps.mark_of(equation) == "end":
            given = set()
        else:
            products += equation.primitive.name == "dot_general" and bool(given)
            assert not given.intersection(value for value in equation.invars if not hasattr(value, "val"))
    assert products >= 2 + 2  # before the loss, and forward


def simple(loss):
    """Return a step of a loss of weights and a batch."""

    def step(params, batch):
        value, gradients = gradient(lambda p: loss(p, batch), params)
        return updated(params, gradients), value

    return step


def divided_afterwards(params, batch):
    def loss(p):
        return jnp.sum(errors(p, batch) * batch["mask"]), jnp.sum(batch["mask"])

    (total, count), gradients = gradient(loss, params, has_aux=True)
    return updated(params, [g / count for g in gradients]), total / count


def counted(dtype):
    def step(params, batch):
        def loss(p):
            wrong = errors(p, batch)
            return wrong.mean(), jnp.sum(wrong > 1).astype(dtype)

        (value, count), gradients = gradient(loss, params, has_aux=True)
        return updated(params, gradients), value, count

    return step


def sums_beside(params, batch):
    def loss(p):
        return errors(p, batch).mean(), network(p, batch).sum(0)

    (value, sums), gradients = gradient(loss, params, has_aux=True)
    return updated(params, gradients), value, sums


def gradient_of_samples(reduced):
    def step(params, batch):
        value, gradients = gradient(lambda x: reduced(errors(params, {**batch, "x": x})), batch["x"])
        return [weight + 0 for weight in params], value, gradients

    return step


SUM, RATIO = "The loss is a sum over the samples", "The loss divides one sum over the samples by another"
EXTREME = "of the step is a largest or smallest value"
LOSSES = {
    "mean": (simple(lambda p, b: errors(p, b).mean()), None),
    "sum divided by a number": (simple(lambda p, b: errors(p, b).sum() / b["x"].shape[0]), None),
    "root of a mean": (simple(lambda p, b: jnp.sqrt((network(p, b) ** 2).mean())), None),
    "mean and decay": (simple(lambda p, b: errors(p, b).mean() + (p[0] ** 2).sum()), None),
    "normalised": (simple(lambda p, b: ((network(p, b) - network(p, b).mean(0)) ** 2).mean()), None),
    "sum divided by a sum of ones": (simple(lambda p, b: errors(p, b).sum() / jnp.ones_like(b["mask"]).sum()), None),
    "divided by a deviation": (simple(lambda p, b: (network(p, b) / (network(p, b).std() + 1)).mean()), None),
    "divided afterwards": (divided_afterwards, None),
    "sum": (simple(lambda p, b: errors(p, b).sum()), SUM),
    "sum and decay": (simple(lambda p, b: errors(p, b).sum() + (p[0] ** 2).sum()), SUM),
    "sum over vmap": (simple(lambda p, b: jax.vmap(lambda x: (x @ p[0] @ p[1]).sum())(b["x"]).sum()), SUM),
    "mask": (simple(lambda p, b: (errors(p, b) * b["mask"]).sum() / b["mask"].sum()), RATIO),
    "mean of a mask": (simple(lambda p, b: (errors(p, b) * b["mask"]).mean() / b["mask"].mean()), RATIO),
    "product with a mask": (
        simple(lambda p, b: errors(p, b) @ b["mask"] / jnp.maximum(b["mask"].sum(), 1.0)),
        RATIO,
    ),
    "normalised mask": (simple(lambda p, b: (errors(p, b) * (b["mask"] / b["mask"].sum())).sum()), RATIO),
    "reciprocal of a mask": (simple(lambda p, b: (errors(p, b) * b["mask"]).sum() * (1 / b["mask"].sum())), RATIO),
    "power of a mask": (simple(lambda p, b: (errors(p, b) * b["mask"]).sum() * b["mask"].sum() ** -1), RATIO),
    "whole number": (counted(jnp.int32), "Result 3 of the step is int32"),
    "maximum": (simple(lambda p, b: errors(p, b).max()), f"Result 2 {EXTREME}"),
    "gradient of samples": (
        gradient_of_samples(jnp.mean),
        "Result 3 of the step is a gradient with respect to the samples",
    ),
    "gradient of samples of a sum": (gradient_of_samples(jnp.sum), SUM),
    "gradients of a sum": (lambda params, batch: gradient(lambda p: errors(p, batch).sum(), params), SUM),
    "gradients of a mean": (lambda params, batch: gradient(lambda p: errors(p, batch).mean(), params), None),
    "sums beside the loss": (sums_beside, "Result 3 of the step is a sum over the samples"),
    "sum beside the loss": (counted(jnp.float32), "Result 3 of the step is a sum over the samples"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_averages_over_microbatches_that_are_not_the_batchs_own_are_warned_of(name):
    from hwaware.patching import scaling, steps

    step, expected = LOSSES[name]
    programs = tidied(step)
    found = scaling.warnings_of(*programs, PARTS, steps.Names())
    assert len(found) == (expected is not None)
    assert all(one.startswith(expected) and one.count("To fix:") == 1 for one in found)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (lambda x: x, None),
        (lambda x: x.mean(), None),
        (lambda x: jnp.arange(x.shape[1]) + 1, None),
        (lambda x: x.sum(), "Result 0 of the step is a sum over the samples"),
        (lambda x: x.sum(0), "Result 0 of the step is a sum over the samples"),
        (lambda x: x.T @ x, "Result 0 of the step is a sum over the samples"),
        (lambda x: x.sum(1), None),
        (lambda x: (x > 0).sum(), "Result 0 of the step is int32"),
        (lambda x: jnp.abs(x).max(), f"Result 0 {EXTREME} of the samples"),
        (lambda x: x.min(0), f"Result 0 {EXTREME} of the samples"),
        (lambda x: (x > 0).astype(jnp.int32).max(), f"Result 0 {EXTREME} of the samples"),
        (lambda x: x.max(1), None),
        (lambda x: jax.nn.softmax(x).mean(), None),
    ],
)
def test_averages_of_inference_are_warned_of(result, expected):
    from hwaware.patching import scaling, steps

    def function(params, batch):
        return (result(network(params, batch)),)

    micro, full = (traced(function, parts)[0] for parts in (PARTS, 1))
    found = scaling.warnings_of(micro, full, PARTS, steps.Names(), inference=True)
    assert [one.partition(". Alpa")[0] for one in found] == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda x: x.T, "shape .* with one microbatch"),
        (lambda x: (x > 0).all(), "a bool without a row"),
        (lambda x: (x, True), "a bool without a row"),
    ],
)
def test_results_of_inference_that_alpa_cannot_join_are_refused(result, message):
    from hwaware.errors import AlpaError

    with pytest.raises(AlpaError, match=rf"The function returns .*{message}.*To fix:"):
        compiled(lambda params, batch: result(network(params, batch)), pipeline_schedule="inference")


def split_before(state, batch):
    params, key, seen = state
    key, used = jax.random.split(key)
    kept = jax.random.bernoulli(used, 0.5, (4,))
    value, gradients = gradient(lambda p: jnp.mean(errors(p, batch)) + jnp.sum(p[0] * kept), params)
    return (updated(params, gradients), key, seen + batch["x"].shape[0]), value


def test_what_no_sample_influences_is_computed_from_the_whole_batchs_program():
    state = (WEIGHTS, np.array([0, 7], np.uint32), np.int32(5))
    micro, _ = tidied(split_before, state)
    equations = list(micro.jaxpr.eqns)
    place = next(i for i, e in enumerate(equations) if e.params.get("mark_type") == "grad")
    first = next(i for i, e in enumerate(equations) if e.params.get("mark_type") == "start")
    assert first == 0  # nothing is left before the first layer
    _, _, key, seen, _ = micro.jaxpr.outvars
    after = {v for e in equations[place + 1 :] for v in e.outvars}
    assert {key, seen} <= after
    numbers = [v.val for e in equations[place + 1 :] for v in e.invars if hasattr(v, "val")]
    assert 8 in numbers  # samples of the batch, of which a microbatch has 4


def test_counts_by_the_shape_of_an_array_are_those_of_the_whole_batch():
    from hwaware.compat.jaxprs import without_markers
    from hwaware.patching.parts import Slices

    def step(params, batch):
        value, gradients = gradient(lambda p: jnp.mean(errors(p, batch)), params)
        samples = batch["x"].shape[0]
        return updated(params, gradients), value, jnp.ones_like(batch["y"]).sum(), jnp.arange(samples).sum()

    micro, _ = tidied(step)
    *_, ones, numbers = micro.jaxpr.outvars
    for result in (ones, numbers):
        made, _ = Slices(without_markers(micro.jaxpr.eqns)[0]).behind([result])
        shapes = {v.aval.shape for equation in made for v in equation.outvars}
        assert (8,) in shapes  # samples of the batch
        assert (4,) not in shapes  # samples of a microbatch


def blocks(count, products=2):
    def step(params, batch):
        def loss(p):
            x = batch["x"]
            for _ in range(count):
                inner = jnp.tanh(x @ p[0])
                x = x + (inner @ p[1] if products == 2 else inner)
            return jnp.mean(x**2)

        return simple(lambda p, b: loss(p))(params, batch)

    return step


@pytest.mark.parametrize(
    ("count", "per_block", "layers"),
    chosen([(4, 1, 3), (5, 1, 4), (8, 1, 6), (4, 2, 3), (8, 2, 6), (4, 2, 4), (1, 2, 2)], 1, 3, 6),
)
def test_layers_are_as_even_as_can_be(count, per_block, layers):
    import alpa

    program, _ = traced(blocks(count, per_block), 1, alpa.AutoLayerOption(layer_num=layers))
    products, sizes = None, []
    for equation in program.jaxpr.eqns:
        mark = (equation.params.get("mark_type"), equation.params.get("name", ""))
        if mark[0] == "start":
            products = 0
        elif mark[0] == "end" and not mark[1].endswith("_backward"):
            sizes.append(products)
        products = products + (equation.primitive.name == "dot_general") if products is not None else None
    assert len(sizes) == layers
    assert sum(sizes) == per_block * count
    assert max(sizes) == -(-per_block * count // layers)


def test_more_layers_than_operations_are_refused():
    import alpa

    from hwaware.errors import AlpaError

    with pytest.raises(AlpaError, match=r"AutoLayerOption\(layer_num=99\) cannot cut the loss.*from 1 to 2"):
        traced(blocks(1), 1, alpa.AutoLayerOption(layer_num=99))


def compiled(function, parts=PARTS, **options):
    import alpa

    from hwaware.patching import meshes

    method = alpa.PipeshardParallel(
        devices=meshes.cluster_mesh([("203.0.113.1", 2)]),
        num_micro_batches=parts,
        layer_option=alpa.ManualLayerOption(),
        stage_option=alpa.UniformStageOption(),
        **options,
    )
    return alpa.parallelize(function, method=method, donate_argnums=()).get_executable(WEIGHTS, BATCH)


def test_a_batch_that_microbatches_do_not_divide_is_named_and_keeps_its_trace():
    from hwaware.errors import AlpaError

    whole = (
        r"batch of step cannot be cut into microbatches: The batch size .* batch_size = 8, .*To fix: give .* a multiple"
    )
    with pytest.raises(AlpaError, match=whole) as caught:
        compiled(simple(lambda p, b: errors(p, b).mean()), parts=3)
    cause = caught.value.__cause__
    assert isinstance(cause, AssertionError)
    assert cause.__traceback__ is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": 0}, "num_micro_batches is 0"),
        ({"pipeline_schedule": "f1b1"}, "pipeline_schedule is 'f1b1', .* gpipe"),
    ],
)
def test_a_method_that_alpa_cannot_run_is_refused(options, message):
    from hwaware.errors import AlpaError

    with pytest.raises(AlpaError, match=rf"{message}.*To fix:"):
        compiled(simple(lambda p, b: errors(p, b).mean()), **options)


def test_a_batch_of_unlike_numbers_of_samples_is_named(monkeypatch):
    from hwaware.errors import AlpaError

    monkeypatch.setitem(BATCH, "z", np.ones(2, np.float32))
    with pytest.raises(AlpaError, match=r"cannot be cut .*To fix: give arrays .* in an argument that batch_argnums"):
        compiled(simple(lambda p, b: errors(p, b).mean()))


def test_errors_of_the_programs_own_code_pass():
    def broken(params, batch):
        return params[0] @ batch["nothing"]

    with pytest.raises(KeyError, match="nothing"):
        compiled(simple(broken))
    with pytest.raises(TypeError, match="Gradient only defined for scalar-output functions"):
        compiled(simple(errors))


@pytest.mark.parametrize("error", [KeyError("nobody"), AssertionError(), TypeError("unhashable")])
def test_who_raised_an_error(error):
    import alpa
    import jax._src.core
    import numpy

    from hwaware.patching import compiling, leaves

    alpas, hwawares, jaxs, numpys = ((module.__file__, "function") for module in (alpa, leaves, jax._src.core, numpy))
    own = ("/home/somebody/train.py", "loss")
    assert compiling.is_alpas(error, [own, alpas])
    assert compiling.is_alpas(error, [own, alpas, jaxs])
    assert compiling.is_alpas(error, [own, alpas, hwawares, numpys, ("<string>", "f")])
    assert not compiling.is_alpas(error, [alpas, jaxs, own])
    assert not compiling.is_alpas(error, [alpas, own, jaxs])
    assert not compiling.is_alpas(error, [own])
