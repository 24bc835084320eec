"""Offer the stage option that a program gives to Alpa itself, without `hwaware.enable`."""

from __future__ import annotations

from dataclasses import dataclass

from hwaware.patching.activation import install_once
from hwaware.patching.stage_option import PlacementSettings


# Compared by identity: Alpa's cache of compiled functions hashes the method that holds the option.
@dataclass(frozen=True, repr=False, eq=False)
class HardwareAwareStageOption(PlacementSettings):
    """Let hwaware choose layers, hosts and devices of every stage of one program, as Alpa's stage option.

    To make one puts the override in place for good. It leaves every other stage option alone.

    Attributes:
        profile: A profile, or the path of its file.
        plan: Use this plan, or the one in the file at this path, instead of a search.
        solver: The search, as for `hwaware.plan`.
        exclude: Hosts or devices that stay idle.
        place_fixed_stages: Without effect here: the program fixes no stages.
        costs: "auto", "model" or "measured", as for `hwaware.enable`.
        reserve_bytes: Memory that each device keeps free.
        calibration_s: Time limit of "auto", as for `hwaware.enable`.

    Raises:
        AlpaError: Alpa is missing, or is of a version that hwaware does not override, or `costs` is unknown.
        RecordError: The profile cannot be read.

    Example:
        On a running Ray cluster::

            option = hwaware.HardwareAwareStageOption("cluster.json")
            alpa.PipeshardParallel(num_micro_batches=16, stage_option=option)
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        install_once()
