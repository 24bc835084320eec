"""Alpa's own layers as a Workload: the same figures as tracing the plain train step gives."""

import jax
import pytest
from builders import applied, chosen

from hwaware import models, trace
from hwaware.errors import UnusableInputError
from hwaware.tracing import workload_from_alpa_layers

pytestmark = [
    pytest.mark.alpa,
    # Alpa uses JAX names that newer JAX warns about; none of them is ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

MICROBATCH, MICROBATCHES = 4, 2

GPT = models.GptConfig(blocks=4, hidden=64, heads=4, sequence=32, vocabulary=128)


class Seen(Exception):  # not an error: it ends Alpa's compilation when its layers are there
    """Carries what Alpa hands to its stage construction."""


@pytest.fixture(scope="module")
def known():
    """What Alpa made of a model before: its layers take seconds."""
    return {}


@pytest.fixture
def layers_of(monkeypatch, known):
    """A function: model, number of layers, rematerialization, schedule -> Alpa's layers, accumulators, updates."""
    from hwaware.patching import leaves, stock_jax

    stock_jax.install()
    import alpa
    from alpa.device_mesh import VirtualPhysicalMesh
    from alpa.pipeline_parallel import compile_executable

    def stop(layers, mesh, accumulator_mapping, acc_grad_invars, acc_grad_outvars, count, size, updates, *rest):
        raise Seen(layers, accumulator_mapping, updates)

    monkeypatch.setattr(compile_executable, "cluster_layers_and_slice_mesh", stop)

    def layers_of(model, *how, **named):
        key = (model.config, how, tuple(named.items()))
        if key not in known:
            known[key] = made(model, *how, **named)
        return known[key]

    def made(model, count, remat="none", microbatches=MICROBATCHES):
        method = alpa.PipeshardParallel(
            devices=VirtualPhysicalMesh([0], [{"NodeManagerAddress": "127.0.0.1"}], 1),
            num_micro_batches=microbatches,
            layer_option=alpa.AutoLayerOption(layer_num=count, remat_mode=remat),
        )
        step = lambda state, batch: model.train_step(state, batch, alpa.value_and_grad)  # noqa: E731
        parallel = alpa.parallelize(step, method=method, donate_argnums=())
        with pytest.raises(Seen) as seen:
            parallel.get_executable(model.abstract_state(), model.batch(0, MICROBATCH * microbatches))
        return seen.value.args

    with applied(leaves.PATCHES):
        yield layers_of


def both(layers_of, config, count):
    model = models.make(config)
    layers, mapping, updates = layers_of(model, count)
    found = workload_from_alpa_layers(layers, mapping, MICROBATCH, "model", updates=updates)
    return found, trace(model.train_step, model.abstract_state(), model.batch(0, 1), count, MICROBATCH, "model")


CONFIGS = [GPT, models.MlpConfig(blocks=4, hidden=32)]


@pytest.mark.parametrize("config", chosen(CONFIGS, 1), ids=lambda config: config.NAME)
def test_alpas_layers_are_the_traced_ones(layers_of, config):
    found, traced = both(layers_of, config, 4)
    assert (found.name, found.microbatch_size, found.dtype) == ("model", MICROBATCH, "float32")
    for name in ("forward_flops", "backward_flops", "parameter_bytes", "optimizer_bytes"):
        ours, theirs = (sum(getattr(layer, name) for layer in workload.layers) for workload in (traced, found))
        assert theirs == ours, name
    for name in ("output_bytes", "batch_bytes"):
        assert [getattr(x, name) for x in found.layers] == [getattr(x, name) for x in traced.layers], name
    samples = sum(leaf.nbytes for leaf in jax.tree_util.tree_leaves(models.make(config).batch(0, MICROBATCH)))
    assert sum(layer.batch_bytes for layer in found.layers) == samples
    for ours, theirs in zip(traced.layers, found.layers):
        # Alpa also keeps the broadcast mask, which tracing sees as a constant.
        assert ours.activation_bytes <= theirs.activation_bytes <= 1.02 * ours.activation_bytes


@pytest.mark.thorough
def test_alpas_rematerialization_keeps_less_and_computes_more(layers_of):
    model = models.make(GPT)
    plain = workload_from_alpa_layers(*layers_of(model, 4)[:2], MICROBATCH, "model")
    remat = workload_from_alpa_layers(*layers_of(model, 4, "coarse_grained_remat")[:2], MICROBATCH, "model")
    for before, after in zip(plain.layers, remat.layers):
        assert after.forward_flops == before.forward_flops
        assert after.activation_bytes < 0.1 * before.activation_bytes
        assert before.backward_flops < after.backward_flops <= before.backward_flops + before.forward_flops


SMALL = [
    models.GptConfig(blocks=2, hidden=32, heads=2, sequence=8, vocabulary=32),
    models.MlpConfig(blocks=2, hidden=32),
]


@pytest.mark.parametrize("config", chosen(SMALL, 1), ids=lambda config: config.NAME)
def test_one_microbatch_has_no_accumulators(layers_of, config):
    model = models.make(config)
    several = workload_from_alpa_layers(*layers_of(model, 2)[:2], MICROBATCH, "model")
    layers, mapping, _ = layers_of(model, 2, microbatches=1)
    assert not mapping
    single = workload_from_alpa_layers(layers, mapping, MICROBATCH, "model")
    assert [x.parameter_bytes for x in single.layers] == [x.parameter_bytes for x in several.layers]


@pytest.mark.parametrize("config", chosen(CONFIGS, 1), ids=lambda config: config.NAME)
def test_inference_has_forward_layers_alone(layers_of, config):
    layers, mapping, _ = layers_of(models.make(config), 4)
    training = workload_from_alpa_layers(layers, mapping, MICROBATCH, "model")
    inference = workload_from_alpa_layers(layers[:4], {}, MICROBATCH, "model", inference=True)
    for before, after in zip(training.layers, inference.layers):
        assert after.forward_flops == before.forward_flops
        assert (after.backward_flops, after.activation_bytes) == (0, 0)
        assert (after.gradient_size_bytes, after.optimizer_size_bytes) == (0, 0)
        # Training's last forward layer also reads what the losses so far add up to: one number.
        assert before.parameter_bytes <= after.parameter_bytes <= before.parameter_bytes + 4


@pytest.mark.parametrize("count", [0, 3])
def test_layers_that_do_not_pair_are_refused(count):
    with pytest.raises(UnusableInputError, match=f"gave {count} layers"):
        workload_from_alpa_layers([object()] * count, {}, MICROBATCH, "model")


def test_accumulators_as_long_as_a_microbatch_are_no_samples(layers_of):
    from hwaware.tracing.from_alpa import samples_of

    layers, accumulators, updates = layers_of(models.make(models.MlpConfig(blocks=2, hidden=MICROBATCH)), 2)
    forward, backward = layers[:2], layers[2:]
    samples = samples_of(forward, backward, updates, MICROBATCH)
    assert any(variable.aval.shape[:1] == (MICROBATCH,) for variable in accumulators)
    assert len(samples) == 2  # inputs and targets
    assert not samples.intersection(accumulators)
