"""Look beforehand for the plan that a program gets if one of its hosts is gone."""

from __future__ import annotations

import copy
import logging
import threading
import time
from typing import Any, Collection, Dict, Optional

from hwaware.device_places import DevicePlace, device_places
from hwaware.errors import HwawareError
from hwaware.patching import meshes, stage_option
from hwaware.placement.choices import remaining
from hwaware.plans import Plan
from hwaware.survival import recipes

LOG = logging.getLogger("hwaware")
# All searches of a program together: they take the driver's processor.
_LIMIT_S = 60.0


def plan_without(recipe: recipes.Recipe, virtual_mesh: Any, gone: Collection[DevicePlace], level: int) -> Plan:
    """Return the best plan for a program on what is left without some devices.

    Args:
        recipe: How the program was compiled.
        virtual_mesh: Alpa's mesh of all devices that the program has now.
        gone: (address of the host, index) of each device that is gone.
        level: Level of the lines that the search logs.

    Raises:
        InfeasibleError: The program fits on no placement there.
        UnusableInputError: Nothing is left.
    """
    names = tuple(device for device, place in device_places(recipe.profile).items() if place in gone)
    profile = meshes.restrict(recipe.profile, virtual_mesh)
    present = {device.id for device in profile.devices}
    left = remaining(profile, tuple(name for name in names if name in present))
    arguments = recipes.search_arguments(recipe, virtual_mesh)
    return stage_option.searched(recipe.settings, left, recipe.workload, arguments, level)


class Beforehand:
    """The plans of one program for the loss of each of its hosts."""

    def __init__(self) -> None:
        self._plans: Dict[str, Plan] = {}
        self._lock = threading.Lock()
        self._number = 0

    def get(self, address: str) -> Optional[Plan]:
        """Return the plan without a host; None where none is known."""
        with self._lock:
            return self._plans.get(address)

    def look(self, recipe: recipes.Recipe, virtual_mesh: Any) -> None:
        """Begin to look for plans in the background, and forget earlier ones."""
        with self._lock:
            self._plans = {}
            self._number += 1
            number = self._number
        virtual_mesh = copy.copy(virtual_mesh)  # a recovery shrinks it
        places = meshes.mesh_places(virtual_mesh)
        addresses = list(dict.fromkeys(address for address, _ in places))
        if len(addresses) < 2:
            return

        def search() -> None:
            end_s = time.monotonic() + _LIMIT_S
            for address in addresses:
                if number != self._number or time.monotonic() > end_s:
                    return
                gone = [place for place in places if place[0] == address]
                try:
                    plan = plan_without(recipe, virtual_mesh, gone, logging.DEBUG)
                except HwawareError as error:
                    LOG.debug("No plan without host %s: %s", address, error)
                    continue
                with self._lock:
                    if number == self._number:
                        self._plans[address] = plan

        threading.Thread(target=search, name="hwaware-beforehand", daemon=True).start()
