"""Define a GPT with a mixture of experts in every second block: a model whose blocks differ in cost.

The router chooses one expert for each token. All experts compute all tokens, and a gate multiplies the results of the
other experts by zero. So shapes do not depend on data, and a mixture of n experts costs as much as n dense parts.
"""

from __future__ import annotations

from typing import Any, Type

import flax.linen as nn
import jax
import jax.numpy as jnp

from hwaware.models.configs import MoeConfig
from hwaware.models.gpt import Dense, Gpt, next_token_batches
from hwaware.models.model import Model, mean_cross_entropy


class Mixture(nn.Module):
    """Top-1 mixture of `experts` dense parts, weighted by the router's probability."""

    config: MoeConfig

    @nn.compact
    def __call__(self, stream: Any) -> Any:
        """Return the sum that the mixture adds to the residual stream."""
        config = self.config
        shape = (config.experts, config.hidden, 4 * config.hidden)
        initial = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=-2, out_axis=-1)
        up, down = self.param("up", initial, shape), self.param("down", initial, (shape[0], shape[2], shape[1]))
        chances = nn.softmax(nn.Dense(config.experts, name="router")(stream))
        gate = chances * jax.nn.one_hot(jnp.argmax(chances, -1), config.experts, dtype=chances.dtype)
        inner = nn.gelu(jnp.einsum("bsh,ehw->bsew", stream, up)) * gate[..., None]
        return jnp.einsum("bsew,ewh->bsh", inner, down)


class MixtureGpt(Gpt):
    """A GPT whose blocks 1, 3, 5, ... have mixtures."""

    def wide(self, index: int) -> Type[nn.Module]:
        """Return the class of block `index`'s position-wise part."""
        return Mixture if index % 2 else Dense


def make(config: MoeConfig) -> Model:
    """Build the model. Its task is to predict the next token."""
    return Model(config, MixtureGpt(config), mean_cross_entropy, next_token_batches(config))
