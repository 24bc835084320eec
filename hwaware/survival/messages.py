"""Say what a person reads about a program that survives."""

from __future__ import annotations

from typing import Any, Collection, Sequence, Tuple

from hwaware.errors import HwawareError, WorkerFailedError
from hwaware.formatting import counted
from hwaware.history import HistoryEvent

START_AGAIN = "start the program again from its newest checkpoint (hwaware.restore_newest)."
# Words for numbers of an event. The sentence of a decision states its cost.
_WORDS = {
    "kept_s": "step now", "best_s": "step with the other placement", "cost_s": "",
    "profile_s": "measuring it took", "layers_s": "timing the layers took",
}  # fmt: skip


def recovered(event: HistoryEvent) -> str:
    """Return the line about a recovery.

    Example:
        >>> recovered(HistoryEvent(kind="recovered", call=7, what="lost b", mapping="layers 0-3 on a:0", took_s=2.0))
        'Lost b. After 2.0 s the program goes on with layers 0-3 on a:0.'
    """
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in event.phases.items())
    first, were = event.call - event.made_again + 1, "was" if event.made_again == 1 else "were"
    calls = f"call {event.call}" if event.made_again == 1 else f"calls {first} to {event.call}"
    again = f"; {calls}, counted from 1, {were} made again" if event.made_again else ""
    after = f"After {event.took_s:.1f} s {f'({phases}) ' if phases else ''}the program goes on with {event.mapping}"
    return f"{_sentence(event.what)}. {after}{again}."


def noted(event: HistoryEvent) -> str:
    """Return the line about any other event.

    Example:
        >>> noted(HistoryEvent(kind="joined", call=7, what="host c has joined", numbers={"profile_s": 9.0}))
        'Step 7: host c has joined (measuring it took 9 s).'
        >>> noted(HistoryEvent(kind="decided", call=9, what="stays", numbers={"kept_s": 0.6, "cost_s": 7.0}))
        'Step 9: stays (step now 0.6 s).'
    """
    seconds = ", ".join(
        f"{_WORDS.get(name, name[:-2])} {value:.3g} s"
        for name, value in event.numbers.items()
        if name.endswith("_s") and _WORDS.get(name, name)
    )
    mapping = f"; the other placement is {event.mapping}" if event.mapping else ""
    return f"Step {event.call}: {event.what}{f' ({seconds})' if seconds else ''}{mapping}."


def lost(members: Sequence[Any], failure: WorkerFailedError) -> str:
    """Return words that say which workers are lost, and why.

    Args:
        members: The workers, as the watch knows them.
        failure: The first loss that the watch has noticed, with its cause.
    """
    known = {failure.where: failure.cause.rstrip(".")}
    causes = [known.get(one.where) or one.lifeline.is_lost() or "it does not answer" for one in members]
    return "lost " + "; ".join(f"{one.where} ({cause})" for one, cause in zip(members, causes))


def silent(addresses: Collection[str]) -> str:
    """Return words to add about hosts that are lost as a whole.

    Example:
        >>> silent(["10.0.0.2"]), silent([])
        ('; Ray does not answer on host 10.0.0.2', '')
    """
    return f"; Ray does not answer on host {' and host '.join(sorted(addresses))}" if addresses else ""


def lost_for_good(error: WorkerFailedError, failure: Any) -> WorkerFailedError:
    """Return the error that ends the program: what was lost first, and why it cannot go on."""
    return WorkerFailedError(error.where, f"{error.cause} {failure.what}", failure.fix)


def ended(error: BaseException) -> WorkerFailedError:
    """Return the error of a later call to a program that could not be placed again.

    Example:
        >>> print(ended(KeyboardInterrupt()).what)
        The program failed: it was interrupted while it was placed again (KeyboardInterrupt); its workers are ended.
    """
    if isinstance(error, HwawareError):
        return WorkerFailedError("the program", f"it could not be placed again: {error.what}", error.fix)
    return WorkerFailedError(
        "the program",
        f"it was interrupted while it was placed again ({type(error).__name__}); its workers are ended.",
        START_AGAIN,
    )


def arrays_lost(names: Sequence[Tuple[int, int]]) -> str:
    """Return the sentence that arrays are lost, with names of the first ones.

    Example:
        >>> arrays_lost([(3, 1)])
        'The program cannot go on: 1 array was lost, and no host has a copy (output 1 of call 3).'
        >>> arrays_lost([(0, 1), (0, 2)])
        'The program cannot go on: 2 arrays were lost, and no host has a copy (restored or given to the program).'
    """
    first = dict.fromkeys(
        f"output {place} of call {number}" if number else "restored or given to the program"
        for number, place in names[:3]
    )
    verb = "was" if len(names) == 1 else "were"
    return (
        f"The program cannot go on: {counted(len(names), 'array')} {verb} lost, and no host has a copy "
        f"({', '.join(first)})."
    )


def _sentence(what: str) -> str:
    return what[:1].upper() + what[1:]


def vault_lost(what: str) -> str:
    """Return the line about a vault.

    Example:
        >>> vault_lost("the vault has ended")
        'The vault has ended.'
    """
    return f"{_sentence(what)}."
