"""Define a built-in model: a Flax module, a loss that is a mean over the samples, and deterministic data."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, Tuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from hwaware.models.configs import ModelConfig

# Small enough that Adam's first steps, all of this size, keep every built-in stable.
LEARNING_RATE = 1e-3

Batch = Dict[str, Any]  # name -> numpy array with the samples in axis 0


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to train.

    Attributes:
        config: Its sizes.
        module: The Flax module; it maps `batch["inputs"]` to predictions.
        loss: (predictions, `batch["targets"]`) -> mean over the samples, so that the mean over equal microbatches is
            the loss of the batch.
        make_batch: (random generator, samples) -> batch with keys "inputs" and "targets".
    """

    config: ModelConfig
    module: nn.Module
    loss: Callable[[Any, Any], Any]
    make_batch: Callable[[np.random.Generator, int], Batch]

    def initial_state(self, seed: int = 0) -> TrainState:
        """Fresh parameters, the same for the same seed, and Adam's state."""
        inputs = self.batch(step=0, size=1)["inputs"]
        variables = self.module.init(jax.random.PRNGKey(seed), inputs)
        return TrainState.create(apply_fn=self.module.apply, params=variables["params"], tx=optax.adam(LEARNING_RATE))

    def abstract_state(self) -> TrainState:
        """Return the state's shapes and types without computing anything."""
        return jax.eval_shape(lambda: self.initial_state(0))

    def batch(self, step: int, size: int) -> Batch:
        """`size` samples for training step `step`, the same on every call and machine."""
        return self.make_batch(np.random.default_rng([step, 2023]), size)

    def train_step(
        self, state: TrainState, batch: Any, value_and_grad: Callable[..., Any] = jax.value_and_grad
    ) -> Tuple[TrainState, Any]:
        """One step of Adam; returns the new state and the loss before it.

        Args:
            state: As `initial_state` and earlier steps returned it.
            batch: As `batch` made it.
            value_and_grad: `alpa.value_and_grad` under Alpa.
        """

        def mean_loss(params: Any) -> Any:
            return self.loss(state.apply_fn({"params": params}, batch["inputs"]), batch["targets"])

        loss, gradients = value_and_grad(mean_loss)(state.params)
        return state.apply_gradients(grads=gradients), loss


def mean_cross_entropy(logits: Any, labels: Any) -> Any:
    """Mean of -log softmax(logits)[label] over all labels.

    Labels become vectors of zeros and one: picking their elements by number instead gathers numbers and gradients on
    all replicas of a stage (JAX 0.4.30).
    """
    return jnp.mean(optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)))


def mean_square(predictions: Any, targets: Any) -> Any:
    """Mean of the squared differences."""
    return jnp.mean(jnp.square(predictions - targets))
