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

# Small enough that Adam's first steps, all of this size, keep every built-in model stable.
LEARNING_RATE = 1e-3

Batch = Dict[str, Any]  # name -> numpy array with the samples in axis 0


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to train.

    Attributes:
        config: The model's sizes.
        module: The Flax module, which maps `batch["inputs"]` to predictions.
        loss: Maps predictions and `batch["targets"]` to a mean over the samples. So the mean over equal microbatches is
            the loss of the batch.
        make_batch: Maps a random generator and a number of samples to a batch with the keys "inputs" and "targets".
    """

    config: ModelConfig
    module: nn.Module
    loss: Callable[[Any, Any], Any]
    make_batch: Callable[[np.random.Generator, int], Batch]

    def initial_state(self, seed: int = 0) -> TrainState:
        """Return initial parameters and Adam's state. Equal seeds give equal parameters."""
        inputs = self.batch(step=0, size=1)["inputs"]
        variables = self.module.init(jax.random.PRNGKey(seed), inputs)
        return TrainState.create(apply_fn=self.module.apply, params=variables["params"], tx=optax.adam(LEARNING_RATE))

    def abstract_state(self) -> TrainState:
        """Return the state's shapes and types without computing anything."""
        return jax.eval_shape(lambda: self.initial_state(0))

    def batch(self, step: int, size: int) -> Batch:
        """Return `size` samples for training step `step`, the same on every call and machine."""
        return self.make_batch(np.random.default_rng([step, 2023]), size)

    def train_step(
        self, state: TrainState, batch: Any, value_and_grad: Callable[..., Any] = jax.value_and_grad
    ) -> Tuple[TrainState, Any]:
        """Take one step of Adam. Return the new state, and the loss before the step.

        Args:
            state: State from `initial_state` or from an earlier step.
            batch: Samples from `batch`.
            value_and_grad: JAX's function, or `alpa.value_and_grad` under Alpa.
        """

        def mean_loss(params: Any) -> Any:
            return self.loss(state.apply_fn({"params": params}, batch["inputs"]), batch["targets"])

        loss, gradients = value_and_grad(mean_loss)(state.params)
        return state.apply_gradients(grads=gradients), loss


def mean_cross_entropy(logits: Any, labels: Any) -> Any:
    """Return the mean of -log softmax(logits)[label] over all labels.

    The function turns labels into one-hot vectors. Indexing by label would instead gather logits and gradients on all
    replicas of a stage (JAX 0.4.30).
    """
    return jnp.mean(optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)))


def mean_square(predictions: Any, targets: Any) -> Any:
    """Return the mean of the squared differences."""
    return jnp.mean(jnp.square(predictions - targets))
