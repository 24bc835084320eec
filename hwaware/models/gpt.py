"""Define a decoder-only transformer: pre-norm blocks, learned positions, causal attention, an untied head.

With tied weights, the first and the last stage would have to exchange these weights in every step.
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
    """Causal self-attention. One matrix product computes queries, keys and values."""

    config: GptConfig

    @nn.compact
    def __call__(self, stream: Any) -> Any:
        """Return the sum that attention adds to the residual stream."""
        config, (samples, length, width) = self.config, stream.shape
        joined = nn.Dense(3 * width)(stream).reshape(samples, length, 3, config.heads, width // config.heads)
        query, key, value = (joined[:, :, part] for part in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(width // config.heads).astype(np.float32)
        # The mask is a numpy constant, not an operation, so no stage has to send it. If the code added the mask instead
        # of selecting by it, XLA for CPUs would fuse product and sum into a loop that is 50 times slower (JAX 0.4.30).
        scores = jnp.where(np.tril(np.ones((length, length), bool)), scores, MASKED)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), value)
        return nn.Dense(width)(mixed.reshape(samples, length, width))


class Dense(nn.Module):
    """Position-wise part of a block: a hidden layer of four times the width, with GELU."""

    config: GptConfig

    @nn.compact
    def __call__(self, stream: Any) -> Any:
        """Return the sum that the dense part adds to the residual stream."""
        return nn.Dense(self.config.hidden)(nn.gelu(nn.Dense(4 * self.config.hidden)(stream)))


class Gpt(nn.Module):
    """Map tokens to logits. Subclasses override `wide` to replace the position-wise part of some blocks."""

    config: GptConfig

    def wide(self, index: int) -> Type[nn.Module]:
        """Return the class of block `index`'s position-wise part."""
        return Dense

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        """Return the logits of the next token at each position."""
        config = self.config
        positions = self.param("positions", nn.initializers.normal(0.02), (config.sequence, config.hidden))
        # A plain lookup: Alpa replaces the lookup of nn.Embed by a product with one-hot vectors, a different model.
        embedding = self.param("embedding", nn.initializers.normal(1.0), (config.vocabulary, config.hidden))
        stream = jnp.take(embedding, tokens, axis=0) + positions
        for index in range(config.blocks):
            stream = stream + Attention(config)(nn.LayerNorm()(stream))
            stream = stream + self.wide(index)(config)(nn.LayerNorm()(stream))
        return nn.Dense(config.vocabulary, use_bias=False)(nn.LayerNorm()(stream))


def make(config: GptConfig) -> Model:
    """Build the model. Its task is to predict the next token."""
    return Model(config, Gpt(config), mean_cross_entropy, next_token_batches(config))


def next_token_batches(config: GptConfig) -> Any:
    """Return a function that makes batches of sequences that a model can predict after two tokens.

    Each sequence counts up from a random start by a random step of 1 to 4, modulo the vocabulary.
    """

    def make_batch(generator: np.random.Generator, size: int) -> Batch:
        start = generator.integers(config.vocabulary, size=(size, 1))
        step = generator.integers(1, 5, size=(size, 1))
        tokens = (start + step * np.arange(config.sequence + 1)) % config.vocabulary
        return {"inputs": tokens[:, :-1].astype(np.int32), "targets": tokens[:, 1:].astype(np.int32)}

    return make_batch
