"""Offer the built-in models: deterministic data, a plain training step, and options that set the size.

Only `make` imports JAX and Flax. This code trains one step; under Alpa, also pass `alpa.value_and_grad` to the step:

    model = hwaware.models.make(hwaware.models.GptConfig(blocks=4))
    state = model.initial_state(seed=0)
    state, loss = model.train_step(state, model.batch(step=0, size=32))
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from typing import TYPE_CHECKING, Any, Dict, Mapping, Type

from hwaware.compat.packages import INSTALL_JAX
from hwaware.errors import UnusableInputError
from hwaware.models.configs import CONFIGS as CONFIGS
from hwaware.models.configs import GptConfig as GptConfig
from hwaware.models.configs import MlpConfig as MlpConfig
from hwaware.models.configs import ModelConfig as ModelConfig
from hwaware.models.configs import MoeConfig as MoeConfig
from hwaware.models.configs import WresnetConfig as WresnetConfig

if TYPE_CHECKING:
    from hwaware.models.model import Model

__all__ = ["CONFIGS", "GptConfig", "MlpConfig", "ModelConfig", "MoeConfig", "WresnetConfig", "configure", "make"]


def configure(name: str, options: Mapping[str, Any]) -> ModelConfig:
    """Return a built-in model's configuration with these options, and defaults for all others.

    Raises:
        UnusableInputError: No built-in model has this name, the model has no such option, or a value does not fit.

    Example:
        >>> configure("gpt", {"hidden": 64, "heads": 2}).hidden
        64
    """
    config_type = CONFIGS.get(name)
    if config_type is None:
        near = difflib.get_close_matches(name, CONFIGS, n=1)
        raise UnusableInputError(
            f"There is no built-in model {name!r}; there are {', '.join(CONFIGS)}.",
            f"did you mean {near[0]!r}?" if near else "name one of these, or package.module:function.",
        )
    known = _fields(config_type)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise UnusableInputError(
            f"Model {name!r} has no option {unknown[0]!r}; it has {', '.join(known)}.", f"leave {unknown[0]!r} out."
        )
    return config_type(**options)


def make(config: ModelConfig) -> Model:
    """Build the model of a configuration.

    Raises:
        UnusableInputError: JAX, Flax or Optax is missing.
    """
    try:
        module = importlib.import_module(f"hwaware.models.{config.NAME}")
    except ImportError as error:
        raise UnusableInputError(
            f"The built-in models need JAX, Flax and Optax: {error}.",
            f"{INSTALL_JAX} flax optax",
        ) from error
    model: Model = module.make(config)
    return model


def _fields(config_type: Type[ModelConfig]) -> Dict[str, Any]:
    return {field.name: field for field in dataclasses.fields(config_type)}
