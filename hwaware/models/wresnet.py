"""Define a wide residual network.

The network uses group normalisation: with batch normalisation, the loss would depend on the split into microbatches.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import numpy as np

from hwaware.models.configs import WresnetConfig
from hwaware.models.model import Batch, Model, mean_cross_entropy

STAGES = 3


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut. With `stride` 2, the block halves the resolution."""

    channels: int
    stride: int

    @nn.compact
    def __call__(self, images: Any) -> Any:
        """Return the block's output, `channels` deep."""
        strides = (self.stride, self.stride)
        inner = nn.relu(nn.GroupNorm(num_groups=8)(images))
        shortcut = images
        if images.shape[-1] != self.channels or self.stride != 1:
            shortcut = nn.Conv(self.channels, (1, 1), strides, use_bias=False)(inner)
        inner = nn.Conv(self.channels, (3, 3), strides, use_bias=False)(inner)
        inner = nn.relu(nn.GroupNorm(num_groups=8)(inner))
        return shortcut + nn.Conv(self.channels, (3, 3), use_bias=False)(inner)


class Wresnet(nn.Module):
    """Map images to logits."""

    config: WresnetConfig

    @nn.compact
    def __call__(self, images: Any) -> Any:
        """Return the logits of the labels."""
        config = self.config
        stream = nn.Conv(config.width, (3, 3), use_bias=False)(images)
        stage_before = 0
        for index in range(config.blocks):
            stage = STAGES * index // config.blocks
            stream = Block(config.width << stage, 2 if stage > stage_before else 1)(stream)
            stage_before = stage
        pooled = nn.relu(nn.GroupNorm(num_groups=8)(stream)).mean(axis=(1, 2))
        return nn.Dense(config.classes)(pooled)


def make(config: WresnetConfig) -> Model:
    """Build the model. Its task is to recognise the pattern under the noise."""
    patterns = np.random.default_rng(2023).standard_normal((config.classes, config.image, config.image, 3))

    def make_batch(generator: np.random.Generator, size: int) -> Batch:
        labels = generator.integers(config.classes, size=size)
        noise = generator.standard_normal((size, config.image, config.image, 3))
        return {"inputs": (patterns[labels] + noise).astype(np.float32), "targets": labels.astype(np.int32)}

    return Model(config, Wresnet(config), mean_cross_entropy, make_batch)
