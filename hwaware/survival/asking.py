"""Ask the trainings of a cluster to leave a host, through their vaults."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Dict, List, Set

from hwaware.errors import MeasurementError
from hwaware.survival.vault import Drained
from hwaware.survival.vaults import NAMESPACE, PREFIX

_ANSWER_LIMIT_S, _ASK_AGAIN_S = 5.0, 0.2


def drain(what: str, limit_s: float) -> Dict[str, Drained]:
    """Ask every training that survives to leave a host or a device, and wait until all have answered.

    Each training answers at the end of its step. Ray has to be connected to the trainings' cluster.

    Args:
        what: Name or address of a host, or id of a device.
        limit_s: Limit on the wait.

    Returns:
        How each training has left it, by the training's token; empty if no training survives there.

    Raises:
        MeasurementError: A training did not answer in time; it may still leave later.
    """
    import ray

    end_s = time.monotonic() + limit_s
    outcomes: Dict[str, Drained] = {}
    asked: Set[str] = set()
    is_first = True
    while True:
        vaults = _vaults()
        asked |= set(vaults)
        for token in asked - set(vaults) - set(outcomes):
            outcomes[token] = Drained(True, True, f"The training has ended, so it does not use {what}.")
        calls = {actor.drain.remote(what, is_first): token for token, actors in vaults.items() for actor in actors}
        arrived, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_ANSWER_LIMIT_S) if calls else ([], [])
        for call in arrived:
            with contextlib.suppress(ray.exceptions.RayError):  # a vault that has ended meanwhile
                outcome = ray.get(call)
                if outcome is not None:
                    # Known at once: the training was asked before, and may have moved again since then.
                    outcomes[calls[call]] = outcome._replace(moved="") if is_first else outcome
        late = set(vaults) - set(outcomes)
        if not late:
            return outcomes
        if time.monotonic() > end_s:
            raise MeasurementError(
                f"{len(late)} of {len(vaults)} trainings did not leave {what} within {limit_s:g} s.",
                "wait longer (--timeout): a training leaves a host at the end of its step.",
            )
        is_first = False
        time.sleep(_ASK_AGAIN_S)


def _vaults() -> Dict[str, List[Any]]:
    """Return the vaults of each training, by its token."""
    import ray

    found: Dict[str, List[Any]] = {}
    for named in ray.util.list_named_actors(all_namespaces=True):
        prefix, _, rest = named["name"].partition(" ")
        if named["namespace"] == NAMESPACE and prefix == PREFIX:
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                actor = ray.get_actor(named["name"], namespace=NAMESPACE)
                found.setdefault(rest.partition(" ")[0], []).append(actor)
    return found
