"""Define the sizes of the built-in models without JAX, so that the command line can offer them as options."""

from __future__ import annotations

import dataclasses
import numbers
from typing import ClassVar, Dict, Type

from hwaware.errors import UnusableInputError


def _size(default: int, meaning: str) -> int:
    value: int = dataclasses.field(default=default, metadata={"help": meaning})
    return value


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Base class of the configurations. Every field is a whole number, at least 1.

    Raises:
        UnusableInputError: A value does not fit.
    """

    NAME: ClassVar[str] = ""

    blocks: int = _size(8, "Repeated blocks: the model's depth.")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
                raise UnusableInputError(
                    f"{field.name} is {value!r}, expected a whole number, at least 1.",
                    f"set {field.name} to such a number.",
                )
            object.__setattr__(self, field.name, int(value))  # NumPy's integers would overflow


@dataclasses.dataclass(frozen=True)
class MlpConfig(ModelConfig):
    """Dense layers with tanh, all of one width, on a regression task."""

    NAME: ClassVar[str] = "mlp"

    hidden: int = _size(512, "Width of the layers.")


@dataclasses.dataclass(frozen=True)
class GptConfig(ModelConfig):
    """A decoder-only transformer.

    With the defaults, the forward and backward passes of two blocks take 8.1 GFLOP for a microbatch of 4 samples.
    A device of 65 GFLOP/s computes them in about 1/8 s.
    """

    NAME: ClassVar[str] = "gpt"

    hidden: int = _size(320, "Width of the layers.")
    heads: int = _size(5, "Attention heads.")
    sequence: int = _size(128, "Tokens per sample.")
    vocabulary: int = _size(512, "Different tokens.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden % self.heads:
            raise UnusableInputError(
                f"hidden is {self.hidden}, expected a multiple of heads = {self.heads}.",
                f"set hidden to {self.heads * max(1, round(self.hidden / self.heads))}.",
            )


@dataclasses.dataclass(frozen=True)
class MoeConfig(GptConfig):
    """A GPT whose every second block has a top-1 mixture of experts in place of its dense part."""

    NAME: ClassVar[str] = "moe"

    experts: int = _size(4, "Experts of each mixture.")


@dataclasses.dataclass(frozen=True)
class WresnetConfig(ModelConfig):
    """A wide residual network on small images. Between its three stages, resolution halves and width doubles."""

    NAME: ClassVar[str] = "wresnet"

    blocks: int = _size(6, "Residual blocks, spread over the three stages: the model's depth.")
    width: int = _size(64, "Channels of the first stage, a multiple of 8.")
    image: int = _size(32, "Height and width of the images, a multiple of 4.")
    classes: int = _size(10, "Different labels.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, factor in (("width", self.width, 8), ("image", self.image, 4)):
            if value % factor:
                raise UnusableInputError(
                    f"{name} is {value}, expected a multiple of {factor}.", f"set {name} to a multiple of {factor}."
                )


CONFIGS: Dict[str, Type[ModelConfig]] = {
    config.NAME: config for config in (MlpConfig, GptConfig, MoeConfig, WresnetConfig)
}
