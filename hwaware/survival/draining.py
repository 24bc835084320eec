"""Leave a host or a device that a person, or a notice of preemption, takes away from a running training."""

from __future__ import annotations

import contextlib
import logging
from typing import Collection, Set

from hwaware.device_places import DevicePlace, device_places
from hwaware.errors import HwawareError, WorkerFailedError
from hwaware.patching import meshes, rescue, unequal
from hwaware.survival import moving
from hwaware.survival.beforehand import plan_without
from hwaware.survival.recipes import Recipe
from hwaware.survival.run import Run
from hwaware.survival.vault import Drained
from hwaware.survival.vaults import START_LIMIT_S

LOG = logging.getLogger("hwaware")


def at_boundary(run: Run) -> None:
    """Leave what this program's functions were asked to leave since the last call, and tell those that asked.

    Others with workers of their own, such as an evaluation, may not be called for long.
    """
    _leave(run, run.vaults.asked)
    for other in [one for one in rescue.seen if run.drained and one is not run and not one.is_closed]:
        if other.calls.recipe() is not None:
            with contextlib.suppress(WorkerFailedError):  # its own next call raises it
                other.copies.collect()
                _leave(other, other.vaults.asked & set(run.drained))


def _leave(run: Run, asked: Set[str]) -> None:
    for what in sorted(asked):
        outcome = drain(run, what)
        run.drained[what] = outcome
        LOG.warning("%s", " ".join(outcome[2:]).rstrip())
        run.vaults.tell(what, outcome)


def drain(run: Run, what: str) -> Drained:
    """Let a training leave a host or a device; it goes on with the others.

    Args:
        run: The training, between two calls.
        what: Name or address of a host, or id of a device.

    Raises:
        WorkerFailedError: The training cannot go on.
    """
    recipe = moving.recipe_of(run)
    named = _places(recipe, what)
    if not named:
        return Drained(False, False, f"The training's cluster has no host or device {what!r}.")
    virtual_mesh = run.calls.group.parent
    present = meshes.mesh_places(virtual_mesh)
    gone = named & set(present)
    emptied = {address for address, _ in named} - {address for address, _ in set(present) - gone}
    if gone and gone == set(present):
        return Drained(False, True, f"The training cannot leave {what}: it has no other devices.")
    moved = ""
    if _uses(recipe, named):  # another function with the same devices may have taken them out already
        try:
            plan = plan_without(recipe, virtual_mesh, gone, logging.INFO)
            event = moving.move(run, plan, f"drained: {what}")
        except WorkerFailedError:
            raise
        except HwawareError as error:
            return Drained(False, True, f"The training cannot leave {what}: {error.what}")
        if _uses(moving.recipe_of(run), named):
            return Drained(False, True, f"The training could not take up a plan without {what}, and keeps its plan.")
        moved = f"It goes on with {event.mapping}, after {event.took_s:.1f} s."
    if emptied & set(run.vaults.up):  # only now: before the move, the only vault may be on this host
        run.vaults.avoided |= emptied
        run.vaults.start(run.copies.hosts())
        run.vaults.use_started(START_LIMIT_S)
        try:
            rescue.retried(lambda: moving.commit(run, again=True))
        except WorkerFailedError:
            raise
        except HwawareError as error:
            run.vaults.avoided -= emptied
            return Drained(False, True, f"The training's copies cannot leave {what}: {error.what}", moved)
    run.recovery.left_out |= named
    if gone and len(gone) < len(present):
        unequal.shrink(virtual_mesh, gone)
    run.vaults.end(emptied)
    return Drained(True, True, f"The training {'no longer uses' if moved else 'does not use'} {what}.", moved)


def _places(recipe: Recipe, what: str) -> Set[DevicePlace]:
    """Return the places of a host's devices, or of one device."""
    places, hosts = device_places(recipe.profile), {device.id: device.host for device in recipe.profile.devices}
    return {place for device, place in places.items() if what in (device, hosts[device], place[0])}


def _uses(recipe: Recipe, gone: Collection[DevicePlace]) -> bool:
    """Tell if a program's plan uses one of these devices."""
    places = device_places(recipe.profile)
    return any(places[device] in gone for stage in recipe.plan.stages for device in stage.devices)
