"""Compile the stages of small training steps without a cluster, and digest their programs.

    JAX_PLATFORMS=cpu python tests/support/recorded_programs.py [--write]

It compares them with tests/data/programs.json, or writes that file. Write it only where programs are meant to change,
and say why in the commit.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import hwaware.models

RECORDED = Path(__file__).parents[1] / "data" / "programs.json"
SAMPLES, WIDTH = 8, 16


class Case(NamedTuple):
    """A training step, or a forward pass, and how Alpa shall cut it."""

    make: object
    mesh: tuple  # replicas, devices of each
    stages: int = 2
    schedule: str = "1f1b"
    remat: bool = False
    microbatches: int = 2


def _built_in(config):
    def make():
        import alpa

        model = hwaware.models.make(config)
        return (
            lambda state, batch: model.train_step(state, batch, alpa.value_and_grad),
            jax.eval_shape(model.initial_state),
            model.batch(0, SAMPLES),
        )

    return make


class _Mlp(nn.Module):
    dropout: float = 0.0
    dtype: type = jnp.float32

    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = nn.tanh(nn.Dense(WIDTH, dtype=self.dtype)(x))
            x = nn.Dropout(self.dropout, deterministic=not self.dropout)(x)
        return x


def _own(module, optimizer):
    def make():
        import alpa

        def step(state, batch):
            def loss(params):
                rngs = {"dropout": batch["key"]} if module.dropout else None
                predicted = state.apply_fn(params, batch["x"], rngs=rngs)
                return jnp.mean((predicted.astype(jnp.float32) - batch["x"]) ** 2)

            value, gradients = alpa.value_and_grad(loss)(state.params)
            return state.apply_gradients(grads=gradients), value

        def keyed(pair, batch):
            state, key = pair
            state, value = step(state, {**batch, "key": key})
            return (state, key), value

        def initial():
            keys = {"params": jax.random.PRNGKey(0), "dropout": jax.random.PRNGKey(1)}
            params = module.init(keys, jnp.ones((1, WIDTH)))
            return TrainState.create(apply_fn=module.apply, params=params, tx=optimizer), jax.random.PRNGKey(2)

        return keyed, jax.eval_shape(initial), {"x": jax.ShapeDtypeStruct((SAMPLES, WIDTH), "float32")}

    return make


def _forward():
    module = _Mlp()

    def predict(params, batch):
        return module.apply(params, batch["x"])

    params = jax.eval_shape(lambda: module.init(jax.random.PRNGKey(0), jnp.ones((1, WIDTH))))
    return predict, params, {"x": jax.ShapeDtypeStruct((SAMPLES, WIDTH), "float32")}


_MLP = _built_in(hwaware.models.MlpConfig(blocks=4, hidden=32))
_GPT = _built_in(hwaware.models.GptConfig(blocks=2, hidden=32, heads=2, sequence=8, vocabulary=32))
_MOE = _built_in(hwaware.models.MoeConfig(blocks=2, hidden=32, heads=2, sequence=8, vocabulary=32, experts=2))
_WRESNET = _built_in(hwaware.models.WresnetConfig(blocks=3, width=8, image=8))
_DROPOUT = _own(_Mlp(dropout=0.5), optax.adam(1e-2))
_CLIPPED = _own(_Mlp(), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)))
_MIXED = _own(_Mlp(dtype=jnp.bfloat16), optax.adam(1e-2))
CASES = {
    "mlp": Case(_MLP, (1, 1)),
    "mlp, two replicas": Case(_MLP, (2, 1)),
    "mlp, tensor parallelism": Case(_MLP, (1, 2)),
    "mlp, both, one stage": Case(_MLP, (2, 2), stages=1),
    "mlp, one microbatch": Case(_MLP, (2, 1), microbatches=1),
    "gpt, rematerialised": Case(_GPT, (1, 1), remat=True),
    "gpt, both": Case(_GPT, (2, 2)),
    "moe, tensor parallelism": Case(_MOE, (1, 2)),
    "moe, two replicas": Case(_MOE, (2, 1)),
    "wresnet, two replicas": Case(_WRESNET, (2, 1), stages=1),
    "wresnet, both": Case(_WRESNET, (2, 2), stages=1),
    "dropout": Case(_DROPOUT, (1, 1), remat=True),
    "dropout, two replicas": Case(_DROPOUT, (2, 1)),
    "clipping": Case(_CLIPPED, (1, 1)),
    "clipping, both": Case(_CLIPPED, (2, 2)),
    "bfloat16": Case(_MIXED, (2, 1)),
    "gpipe": Case(_DROPOUT, (1, 1), schedule="gpipe"),
    "overlap-friendly": Case(_CLIPPED, (1, 2), schedule="1f1b_overlap_friendly"),
    "inference": Case(lambda: _forward(), (2, 1), schedule="inference"),
}


# One of each kind; the others take a minute.
QUICK = ("mlp, both, one stage", "dropout, two replicas", "clipping, both", "inference")


class _Compiled(Exception):
    """Carries the stages out of Alpa, which would launch their workers next."""

    def __init__(self, stages):
        super().__init__("The stages are compiled.")
        self.stages = stages


def stages_of(case):
    """Return Alpa's objects for the compiled stages of a step."""
    import alpa
    from alpa.device_mesh import VirtualPhysicalMesh
    from alpa.pipeline_parallel import compile_executable
    from alpa.pipeline_parallel.stage_construction import ManualStageOption

    step, state, batch = case.make()
    width = case.mesh[0] * case.mesh[1]
    method = alpa.PipeshardParallel(
        devices=VirtualPhysicalMesh([0], [{"NodeManagerAddress": "127.0.0.1"}], case.stages * width),
        num_micro_batches=case.microbatches,
        pipeline_schedule=case.schedule,
        layer_option=alpa.AutoLayerOption(4, remat_mode="coarse_grained_remat" if case.remat else "none"),
        stage_option=ManualStageOption(
            [list(range(stage * 4 // case.stages, (stage + 1) * 4 // case.stages)) for stage in range(case.stages)],
            [(1, width)] * case.stages,
            [case.mesh] * case.stages,
            [{}] * case.stages,
        ),
    )
    own = compile_executable.shard_each_stage

    def shard_and_stop(*args):
        raise _Compiled(own(*args)[0])

    compile_executable.shard_each_stage = shard_and_stop
    donated = () if case.schedule == "inference" else "auto"
    try:
        alpa.parallelize(step, method=method, donate_argnums=donated).get_executable(state, batch)
    except _Compiled as done:
        return done.stages
    finally:
        compile_executable.shard_each_stage = own
    raise AssertionError("Alpa compiled no stages.")


def _text_of(program):
    """Return all that a worker gets of a program."""
    if not hasattr(program, "steps"):
        return repr(tuple(program))
    steps = [
        (_text_of(step.program), step.inputs, step.outputs) if hasattr(step, "program") else tuple(step)
        for step in program.steps
    ]
    return repr((program.name, steps, program.outputs, program.donated))


def _digest(*parts):
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


def stage_digests(name):
    """Return a digest of each stage of a case: its programs, and how its arguments and results are split."""
    return [
        _digest(_text_of(stage.program), stage.input_sharding_specs, stage.output_sharding_specs)
        for stage in stages_of(CASES[name])
    ]


def layer_digests():
    """Return the digests of layers' programs as they are timed: whole, and on some replicas' samples."""
    from hwaware.patching.layer_programs import function_programs
    from hwaware.tracing.function import trace_programs

    found = {}
    for name, config in (
        ("mlp", hwaware.models.MlpConfig(blocks=2, hidden=16)),
        ("gpt", hwaware.models.GptConfig(blocks=2, hidden=16, heads=2, sequence=4, vocabulary=16)),
        ("wresnet", hwaware.models.WresnetConfig(blocks=3, width=8, image=8)),
    ):
        model = hwaware.models.make(config)
        batch = model.batch(0, 4)
        workload, functions = trace_programs(model.train_step, model.abstract_state(), batch, 2, 4, name)
        found[name] = [_digest(layers) for layers in function_programs(functions, 4)] + [_digest(workload)]
    return found


def prepare():
    """Put hwaware's runtime under Alpa, and return the recorded digests."""
    from hwaware.activation import install_runtime

    install_runtime()
    return json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}


def main():
    """Record or compare all programs; return 1 where one has changed."""
    known = prepare()
    found = {
        "jax": jax.__version__,
        "stages": {name: stage_digests(name) for name in CASES},
        "layers": layer_digests(),
    }
    if "--write" in sys.argv:
        RECORDED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    changed = [
        name
        for kind in ("stages", "layers")
        for name in found[kind]
        if found[kind][name] != known.get(kind, {}).get(name)
    ]
    print(f"{len(changed)} of {len(found['stages']) + len(found['layers'])} programs have changed: {changed}")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
