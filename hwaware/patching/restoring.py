"""Go on from the newest checkpoint that is whole."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from typing import Any, Tuple, TypeVar, Union

from hwaware.errors import AlpaError, DamagedCheckpointError, UnusableInputError
from hwaware.patching import checkpoints, leaves
from hwaware.runtime import checkpoint_folder

S = TypeVar("S")


def restore_newest(folder: Union[str, os.PathLike[str]], train_step: Any, state: S, batch: Any) -> Tuple[S, int]:
    """Restore the newest whole checkpoint of a folder to the devices that this program trains on.

    A program that calls this before its first step may be killed at any time and started again. It goes on from the
    newest step that `alpa.save_checkpoint` completed. The numbers are the same on other hosts or in other stages.

    If the newest checkpoint is damaged, one line on standard error says so, and the next older one is restored. A
    checkpoint is damaged if a file is missing, was cut, or has other bytes than were written. Files in the format of
    Alpa itself hold no digests, so changed bytes in these files stay unseen.

    Args:
        folder: The folder that the program gives to `alpa.save_checkpoint`. Every host reaches it under this path.
        train_step: The training step, made by `alpa.parallelize` with several stages. This function compiles it
            for `state` and `batch`, so the first step does not. Its first two arguments are the state and the batch.
        state: A fresh state, as for a first start. Its structure, shapes and types have to be those of the saved one.
        batch: A batch, or anything with its shapes and types. It trains nothing.

    Returns:
        The restored state and the number of its step. Without a whole checkpoint, or without the folder, these
        are `state` itself and 0.

    Raises:
        RecordError: The folder cannot be read. Or the checkpoint is of another model, or a newer hwaware wrote it, or a
            worker cannot see its files. Older checkpoints are not tried then.
        AlpaError: hwaware is not enabled, or Alpa runs on the JAX that it brings.
        UnusableInputError: `train_step` was not made by `alpa.parallelize`, or takes other arguments than a state and
            a batch.
        WorkerFailedError: A worker failed.

    Example:
        Train 1000 steps, however often the program is started. `examples/restart.py` is a whole program of this kind,
        and restarts itself::

            hwaware.enable("cluster.json")

            import alpa

            train_step = alpa.parallelize(plain_train_step, method=alpa.PipeshardParallel(stage_option="auto"))
            state, first = hwaware.restore_newest("checkpoints", train_step, fresh_state(), batch_of(0))

            for step in range(first, 1000):
                state, loss = train_step(state, batch_of(step))
                if (step + 1) % 100 == 0:
                    alpa.save_checkpoint("checkpoints", state, step + 1)

        Refuse checkpoints of another model with one message::

            try:
                state, first = hwaware.restore_newest("checkpoints", train_step, fresh_state(), batch_of(0))
            except hwaware.HwawareError as error:
                sys.exit(f"No checkpoint can be restored: {error}")
    """
    place = os.path.abspath(folder)
    _require_step(train_step, state, batch)
    if not leaves.PATCHES.applied:
        raise AlpaError(
            "hwaware's runtime is not under Alpa, expected it there: restore_newest restores to its workers.",
            "call hwaware.enable before `import alpa`, on stock JAX.",
        )
    steps = checkpoint_folder.steps_to_restore(place)
    specs = train_step.get_executable(state, batch).get_input_placement_specs()[0] if steps else None
    for step in steps:
        try:
            return checkpoints.restored(place, step, specs, keep_unread=True), step
        except DamagedCheckpointError as error:
            print(f"hwaware: step {step} is not restored, an older one is looked for: {error.what}", file=sys.stderr)
    return state, 0


def _require_step(train_step: Any, state: Any, batch: Any) -> None:
    """Refuse a step that Alpa did not make, or that takes other arguments."""
    if not hasattr(train_step, "get_executable"):
        raise UnusableInputError(
            f"train_step is a {type(train_step).__name__}, expected a function made by alpa.parallelize.",
            "give the parallelized training step itself.",
        )
    with contextlib.suppress(ValueError):  # a callable without a signature
        parameters = inspect.signature(getattr(train_step, "fun", train_step))
        try:
            parameters.bind(state, batch)
        except TypeError as error:
            raise UnusableInputError(
                f"train_step takes {parameters}, expected a state and a batch: {error}.",
                "put all other arguments into the state or the batch.",
            ) from error
