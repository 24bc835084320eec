"""Train a small model under Alpa as a user's program does, and print its steps as JSON.

benchmarks/programs.py starts it as `program.py MODEL STEPS PLAN WORKLOAD` with HWAWARE_PROFILE. It uses hwaware only to
write the mapping and the workload to the files PLAN and WORKLOAD. MODEL is language (a decoder with RMSNorm and gated
layers), vision (residual convolutions) or mixer (an MLP-mixer).
"""

import json
import sys
import time
from typing import Any, Dict

import alpa
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

MICROBATCHES, BATCH, WARMUP = 8, 32, 4


class Language(nn.Module):
    """Predict the next token."""

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        """Return the logits."""
        normal = nn.initializers.normal(0.02)
        stream = nn.Embed(400, 160)(tokens) + self.param("positions", normal, (48, 160))
        for _ in range(7):
            attention = nn.SelfAttention(5, deterministic=True)
            stream += attention(nn.RMSNorm()(stream), nn.make_causal_mask(tokens))
            normed = nn.RMSNorm()(stream)
            stream += nn.Dense(160)(nn.silu(nn.Dense(480)(normed)) * nn.Dense(480)(normed))
        return nn.Dense(400)(nn.RMSNorm()(stream))

    @staticmethod
    def batch(random: Any, size: int = BATCH) -> Dict[str, Any]:
        """Return random tokens."""
        tokens = random.integers(0, 400, (size, 48)).astype(np.int32)
        return {"inputs": tokens, "targets": tokens}

    @staticmethod
    def loss(logits: Any, tokens: Any) -> Any:
        """Return the mean cross-entropy."""
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


class Vision(nn.Module):
    """Tell ten kinds of pictures apart."""

    @nn.compact
    def __call__(self, pictures: Any) -> Any:
        """Return the logits."""
        for width in (24, 32, 48, 48, 64, 64):
            inner = nn.relu(nn.GroupNorm(8)(nn.Conv(width, (3, 3))(pictures)))
            pictures = inner + nn.Conv(width, (1, 1))(pictures)
        return nn.Dense(10)(pictures.mean((1, 2)))

    @staticmethod
    def batch(random: Any, size: int = BATCH) -> Dict[str, Any]:
        """Return noise with random labels."""
        pictures = random.normal(size=(size, 24, 24, 3)).astype(np.float32)
        return {"inputs": pictures, "targets": random.integers(0, 10, size).astype(np.int32)}

    @staticmethod
    def loss(logits: Any, labels: Any) -> Any:
        """Return the mean cross-entropy."""
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class Mixer(nn.Module):
    """Fit the mean of each patch."""

    @nn.compact
    def __call__(self, patches: Any) -> Any:
        """Return one number a patch."""
        for _ in range(8):
            across = jnp.swapaxes(nn.LayerNorm()(patches), 1, 2)
            patches += jnp.swapaxes(nn.Dense(64)(nn.gelu(nn.Dense(128)(across))), 1, 2)
            patches += nn.Dense(128)(nn.gelu(nn.Dense(384)(nn.LayerNorm()(patches))))
        return nn.Dense(1)(patches)

    @staticmethod
    def batch(random: Any, size: int = BATCH) -> Dict[str, Any]:
        """Return noise."""
        patches = random.normal(size=(size, 64, 128)).astype(np.float32)
        return {"inputs": patches, "targets": patches}

    @staticmethod
    def loss(found: Any, patches: Any) -> Any:
        """Return the mean square error."""
        return ((found - patches.mean(-1, keepdims=True)) ** 2).mean()


MODELS: Dict[str, Any] = {"language": Language, "vision": Vision, "mixer": Mixer}
LAYERS = 8


def main() -> None:
    """Train, and print the seconds to the end of the first step, and of each of STEPS steps after the warm-up."""
    start = time.perf_counter()
    model, steps = MODELS[sys.argv[1]](), int(sys.argv[2])
    random = np.random.default_rng(0)
    parameters = model.init(jax.random.PRNGKey(0), model.batch(random)["inputs"])
    state = TrainState.create(apply_fn=model.apply, params=parameters, tx=optax.adamw(1e-3))
    alpa.init(cluster="ray")
    method = alpa.PipeshardParallel(
        num_micro_batches=MICROBATCHES, layer_option=alpa.AutoLayerOption(layer_num=LAYERS), stage_option="auto"
    )

    @alpa.parallelize(method=method)
    def train_step(state: Any, batch: Any) -> Any:
        loss, gradients = alpa.value_and_grad(
            lambda parameters: model.loss(state.apply_fn(parameters, batch["inputs"]), batch["targets"])
        )(state.params)
        return state.apply_gradients(grads=gradients), loss

    ends, took, losses = [], [], []
    for _ in range(WARMUP + steps if steps else 1):
        batch = model.batch(random)  # no part of a step
        begin = time.perf_counter()
        state, loss = train_step(state, batch)
        losses.append(float(loss._value))
        train_step.get_last_executable().sync()
        ends.append(time.perf_counter())
        took.append(ends[-1] - begin)
    hwaware = sys.modules["hwaware"]
    hwaware.last_plan().save(sys.argv[3])
    hwaware.last_workload().save(sys.argv[4])
    print(json.dumps({"first_s": ends[0] - start, "step_s": took[WARMUP:], "losses": losses}))


if __name__ == "__main__":
    main()
