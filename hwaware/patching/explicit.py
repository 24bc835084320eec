"""The stage option that a program gives to Alpa by itself, where it does not call `hwaware.enable`."""

from __future__ import annotations

from dataclasses import dataclass

from hwaware.patching.activation import install_once
from hwaware.patching.stage_option import PlacementSettings


# Compared by identity: Alpa's cache of compiled functions hashes the method that holds the option.
@dataclass(frozen=True, repr=False, eq=False)
class HardwareAwareStageOption(PlacementSettings):
    """Alpa stage option: hwaware chooses layers, hosts and devices of every stage.

    Takes the fields of PlacementSettings. Making one puts the override in place, which leaves every other stage option
    alone.

    Example (on a running Ray cluster):
        alpa.PipeshardParallel(num_micro_batches=16, stage_option=hwaware.HardwareAwareStageOption(profile))
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        install_once()
