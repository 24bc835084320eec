"""A decoder-only transformer: pre-norm blocks, learned positions, causal attention, a head of its own.

The head is not tied to the embedding: tied weights on the first and the last stage would have to be sent every step.
"""

from __future__ import annotations

from typing import Any, Type

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from hwaware.models.configs import GptConfig
from hwaware.models.model import Batch, Model, mean_cross_entropy

# Large and finite: -inf gives NaN gradients where a whole row is masked.
MASKED = np.float32(-1e9)


class Attention(nn.Module):
    """Causal self-attention; one product makes queries, keys and values."""

    config: GptConfig

    @nn.compact
    def __call__(self, stream: Any) -> Any:
        """Return the sum that attention adds to the residual stream."""
        config, (samples, length, width) = self.config, stream.shape
        joined = nn.Dense(3 * width)(stream).reshape(samples, length, 3, config.heads, width // config.heads)
        query, key, value = (joined[:, :, part] for part in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(width // config.heads).astype(np.float32)
        # The mask is a numpy constant, not an operation: no stage has to send it. It selects; were it added, XLA for
        # CPUs would fuse product and sum into a loop of its own, 50 times slower (seen with JAX 0.4.30).
        scores = jnp.where(np.tril(np.ones((length, length), bool)), scores, MASKED)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), value)
        return nn.Dense(width)(mixed.reshape(samples, length, width))


class Dense(nn.Module):
    """Apply the position-wise part: four times the width, GELU."""

    config: GptConfig

    @nn.compact
    def __call__(self, stream: Any) -> Any:
        """Return the sum that the dense part adds to the residual stream."""
        return nn.Dense(self.config.hidden)(nn.gelu(nn.Dense(4 * self.config.hidden)(stream)))


class Gpt(nn.Module):
    """Tokens to logits. `wide(index)` names the module of block `index`'s position-wise part."""

    config: GptConfig

    def wide(self, index: int) -> Type[nn.Module]:
        """Return the position-wise module of a block."""
        return Dense

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        """Logits of the next token at each position."""
        config = self.config
        positions = self.param("positions", nn.initializers.normal(0.02), (config.sequence, config.hidden))
        # A plain lookup: Alpa replaces nn.Embed's by a product with one-hot vectors, a different model to trace.
        embedding = self.param("embedding", nn.initializers.normal(1.0), (config.vocabulary, config.hidden))
        stream = jnp.take(embedding, tokens, axis=0) + positions
        for index in range(config.blocks):
            stream = stream + Attention(config)(nn.LayerNorm()(stream))
            stream = stream + self.wide(index)(config)(nn.LayerNorm()(stream))
        return nn.Dense(config.vocabulary, use_bias=False)(nn.LayerNorm()(stream))


def make(config: GptConfig) -> Model:
    """Build the model; its task is the next token."""
    return Model(config, Gpt(config), mean_cross_entropy, next_token_batches(config))


def next_token_batches(config: GptConfig) -> Any:
    """Sequences that count up by a step of 1 to 4 from a random start: the step shows after two tokens."""

    def make_batch(generator: np.random.Generator, size: int) -> Batch:
        start = generator.integers(config.vocabulary, size=(size, 1))
        step = generator.integers(1, 5, size=(size, 1))
        tokens = (start + step * np.arange(config.sequence + 1)) % config.vocabulary
        return {"inputs": tokens[:, :-1].astype(np.int32), "targets": tokens[:, 1:].astype(np.int32)}

    return make_batch
