"""Keep old calls working, with a DeprecationWarning that says what to write now."""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from typing import Any, Callable, Mapping, Tuple, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def keyword_only(function: F) -> F:
    """Accept positional values for keyword-only parameters, and warn.

    Keep the parameters in the order in which callers passed them, and add new ones at the end.

    Args:
        function: The function, with keyword-only parameters behind a `*`.

    Returns:
        The function with the same signature, which warns and names the keywords to write.

    Example:
        >>> @keyword_only
        ... def search(workload, *, solver="exact"):
        ...     return solver
        >>> search("mlp", solver="even")
        'even'
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     search("mlp", "even")
        'even'
        >>> print(caught[0].message)
        search() takes its options as keywords: write solver='even'.
    """
    parameters = inspect.signature(function).parameters.values()
    positional = [one for one in parameters if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    names = [one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]

    @functools.wraps(function)
    def tolerant(*args: Any, **kwargs: Any) -> Any:
        extra = dict(zip(names, args[len(positional) :]))
        if not extra or len(args) > len(positional) + len(names) or set(extra) & set(kwargs):
            return function(*args, **kwargs)  # Python's own error, if it is one
        written = ", ".join(f"{name}={_short(value)}" for name, value in extra.items())
        warn(f"{function.__name__}() takes its options as keywords: write {written}.")
        return function(*args[: len(positional)], **extra, **kwargs)

    return cast(F, tolerant)


def moved(module: str, names: Mapping[str, Tuple[str, str]]) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that finds names where they live now, and warns.

    Args:
        module: The old module.
        names: Old name to its new module and name there.

    Example:
        >>> find = moved("hwaware.old", {"root": ("math", "sqrt")})
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     find("root")(4.0)
        2.0
        >>> print(caught[0].message)
        hwaware.old.root has moved: write math.sqrt.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, new_name = names[name]
        warn(f"{module}.{name} has moved: write {home}.{new_name}.")
        return getattr(importlib.import_module(home), new_name)

    return find


def warn(message: str) -> None:
    """Warn that the caller of the calling function uses an old form."""
    warnings.warn(message, DeprecationWarning, stacklevel=3)


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else "..."
