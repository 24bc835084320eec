"""Move a training to another plan between two calls; nothing is lost, and only arrays whose owner changes travel."""

from __future__ import annotations

import time
from typing import List, Optional

from hwaware.errors import HwawareError, MeasurementError, PlanError, UnusableInputError
from hwaware.history import HistoryEvent
from hwaware.patching import failures, meshes, rescue
from hwaware.plans import Plan
from hwaware.survival import recipes
from hwaware.survival.run import Run

_COPY_LIMIT_S = 600.0
_LOOK_S = 0.02


def running() -> Optional[Run]:
    """Return the training that survives and has not ended; None without one.

    Functions with workers of their own, such as an evaluation, survive each for itself. If several survive, return the
    training step with most calls.

    Example:
        >>> running() is None  # nothing was compiled
        True
    """
    found: List[Run] = [run for run in rescue.seen if not run.is_closed]
    return max(found, key=lambda run: (run.trains(), run.calls.number, run.begin_s)) if found else None


def recipe_of(run: Run) -> recipes.Recipe:
    """Return layers, plan and profile of a training.

    Raises:
        UnusableInputError: It is not compiled yet.
    """
    recipe = run.calls.recipe()
    if recipe is None:
        raise UnusableInputError("The training is not compiled yet.", "move it after its first step.")
    return recipe


def move_to(plan: Plan, reason: str) -> HistoryEvent:
    """Move the training to another plan, between two calls; return what the history says of it.

    The state is copied to the vaults and committed. Then the workers of the new plan take it over: blocks that stay on
    their devices stay there. Where the new plan cannot be taken up, the training goes on with the old one.

    Args:
        plan: The plan, for as many layers and microbatches, on devices of the program's cluster.
        reason: Words for the history, for example "host b is drained".

    Raises:
        HwawareError: A call is being made.
        PlanError: The plan does not fit; nothing has changed.
        UnusableInputError: No training survives, or it is not compiled yet.
        WorkerFailedError: The program cannot go on.

    Example:
        Call it in the driver, between two steps::

            state, loss = train_step(state, batch)
            move_to(hwaware.plan(workload, profile, num_microbatches=8, exclude="b"), "host b is slow")
    """
    run = running()
    if run is None:
        raise UnusableInputError("No training survives here.", "enable hwaware with survive=True.")
    return move(run, plan, reason)


def move(run: Run, plan: Plan, reason: str) -> HistoryEvent:
    """Move a training, as `move_to` does."""
    if run.is_calling:
        raise HwawareError("A training moves between two calls only.", "move it before or after the call.")
    _require(run, plan)
    start_s = time.monotonic()
    rescue.retried(lambda: commit(run))
    copy_s = time.monotonic() - start_s
    try:
        done = run.place_again(run.recovery.watch.members, (), plan)
    except HwawareError as error:
        assert run.ended is not None
        raise run.ended from error
    done = done._replace(phases={"copy": copy_s, **done.phases})
    took_s = time.monotonic() - start_s
    event = HistoryEvent(kind="moved", call=run.calls.number, what=reason, took_s=took_s, **done._asdict())
    run.tell(event)
    return event


def _require(run: Run, plan: Plan) -> None:
    """Refuse a plan that does not fit, before anything changes."""
    recipe = recipe_of(run)
    if not recipes.fits(recipe, plan):
        raise PlanError(
            f"The plan is for {plan.stages[-1].layers[1] + 1} layers and {plan.num_microbatches} microbatches, the "
            f"training has {len(recipe.workload.layers)} layers.",
            "make the plan for this program.",
        )
    virtual_mesh = run.calls.group.parent
    meshes.require_runnable(plan, meshes.restrict(recipe.profile, virtual_mesh))
    meshes.slice_mesh(virtual_mesh, plan, recipe.profile)


def commit(run: Run, again: bool = False) -> None:
    """Wait until vaults have the whole state as it is now; with `again`, by copies that begin now."""
    copies, calls, end_s = run.copies, run.calls, time.monotonic() + _COPY_LIMIT_S
    before = copies.points if again else -1
    run.recovery.watch.raise_lost()
    failures.wait_for(calls.group, "The step before the program moves")
    if again:
        copies.copy_again(at_once=True)
    while True:
        copies.collect()
        point = copies.committed
        is_whole = point is not None and point.number == calls.number and calls.live().keys() <= point.shapes.keys()
        if is_whole and copies.points > before:
            return
        if not copies.flights:
            copies.copy_again(at_once=True)
        if time.monotonic() > end_s:
            raise MeasurementError(
                f"Copying the state took longer than {_COPY_LIMIT_S:g} s.", "see the load of the hosts and their links."
            )
        run.recovery.watch.raise_lost()
        time.sleep(_LOOK_S)
