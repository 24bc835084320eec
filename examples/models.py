"""The models of the examples, in Flax; nothing of Alpa or hwaware."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


class Mlp(nn.Module):
    """Dense layers with ReLU."""

    layers: int = 8
    width: int = 128

    @nn.compact
    def __call__(self, inputs: Any) -> Any:
        """Predictions of the inputs' shape."""
        for _ in range(self.layers - 1):
            inputs = nn.relu(nn.Dense(self.width)(inputs))
        return nn.Dense(self.width)(inputs)


class Experts(nn.Module):
    """A mixture of dense parts: each token goes to the one that its router prefers."""

    count: int
    width: int

    @nn.compact
    def __call__(self, stream: Any) -> Any:
        """What the mixture adds to the residual stream."""
        initial = nn.initializers.lecun_normal()
        up = self.param("up", initial, (self.count, self.width, 4 * self.width))
        down = self.param("down", initial, (self.count, 4 * self.width, self.width))
        chances = nn.softmax(nn.Dense(self.count)(stream))
        gate = chances * jax.nn.one_hot(jnp.argmax(chances, -1), self.count)
        inner = nn.gelu(jnp.einsum("bth,ehw->btew", stream, up)) * gate[..., None]
        return jnp.einsum("btew,ewh->bth", inner, down)


class Gpt(nn.Module):
    """A small decoder-only transformer; with `experts`, every second block is a mixture."""

    blocks: int = 4
    width: int = 64
    heads: int = 4
    length: int = 32
    vocabulary: int = 128
    experts: int = 0

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        """Logits of the next token at each position."""
        normal = nn.initializers.normal(0.02)
        stream = jnp.take(self.param("tokens", normal, (self.vocabulary, self.width)), tokens, axis=0)
        stream = stream + self.param("positions", normal, (self.length, self.width))
        for block in range(self.blocks):
            stream = stream + self.attention(nn.LayerNorm()(stream))
            normed = nn.LayerNorm()(stream)
            if self.experts and block % 2:
                stream = stream + Experts(self.experts, self.width)(normed)
            else:
                stream = stream + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(normed)))
        return nn.Dense(self.vocabulary)(nn.LayerNorm()(stream))

    def attention(self, stream: Any) -> Any:
        """What causal self-attention adds to the residual stream."""
        samples, each = stream.shape[0], self.width // self.heads
        joined = nn.Dense(3 * self.width)(stream).reshape(samples, self.length, 3, self.heads, each)
        query, key, value = (joined[:, :, part] for part in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.float32(each**0.5)
        scores = jnp.where(np.tril(np.ones((self.length, self.length), bool)), scores, np.float32(-1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), value)
        return nn.Dense(self.width)(mixed.reshape(samples, self.length, self.width))


class WideResNet(nn.Module):
    """Residual blocks of convolutions; the resolution halves after each group, the width doubles."""

    groups: int = 3
    blocks: int = 1
    width: int = 16
    classes: int = 10

    @nn.compact
    def __call__(self, images: Any) -> Any:
        """Logits of the labels."""
        stream = nn.Conv(self.width, (3, 3))(images)
        for group in range(self.groups):
            for block in range(self.blocks):
                strides, channels = (2, 2) if group and not block else (1, 1), self.width << group
                inner = nn.Conv(channels, (3, 3), strides)(nn.relu(nn.GroupNorm(8)(stream)))
                inner = nn.Conv(channels, (3, 3))(nn.relu(nn.GroupNorm(8)(inner)))
                shortcut = nn.Conv(channels, (1, 1), strides)(stream) if channels != stream.shape[-1] else stream
                stream = shortcut + inner
        return nn.Dense(self.classes)(nn.relu(stream).mean(axis=(1, 2)))
