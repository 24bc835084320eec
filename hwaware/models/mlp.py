"""Define the smallest built-in model: dense layers with tanh. A person can compute its costs by hand."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import numpy as np

from hwaware.models.configs import MlpConfig
from hwaware.models.model import Batch, Model, mean_square


class Mlp(nn.Module):
    """Apply tanh(x W + b) `blocks` times."""

    config: MlpConfig

    @nn.compact
    def __call__(self, inputs: Any) -> Any:
        """Return predictions of the inputs' shape."""
        for _ in range(self.config.blocks):
            inputs = nn.tanh(nn.Dense(self.config.hidden)(inputs))
        return inputs


def make(config: MlpConfig) -> Model:
    """Build the model. Its task is to learn the sine of its inputs."""

    def make_batch(generator: np.random.Generator, size: int) -> Batch:
        inputs = generator.standard_normal((size, config.hidden), dtype=np.float32)
        return {"inputs": inputs, "targets": np.sin(inputs)}

    return Model(config, Mlp(config), mean_square, make_batch)
