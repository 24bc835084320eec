"""Prepare the function of CreateStateParallel: it makes all its values, and each place gets a value of its own."""

from __future__ import annotations

import collections
import functools
from typing import Any, Callable

from hwaware.compat.jaxprs import is_literal, variables
from hwaware.errors import AlpaError
from hwaware.patching import compiling
from hwaware.patching.parts import Copier, Slices


class _Next:
    """Tell if the function that Alpa traces next is one of CreateStateParallel."""

    creates: bool = False


def compile_create_state_executable(original: Any) -> Callable[..., Any]:
    """Wrap Alpa's function: prepare the function once Alpa has traced it, and compile it for the right workers."""
    compile_now = compiling.on_workers_of("train_step")(original)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        _Next.creates = True
        try:
            return compile_now(*args, **kwargs)
        finally:
            _Next.creates = False

    return replacement


def prepared(closed_jaxpr: Any) -> Any:
    """Return a program that Alpa has traced; that of CreateStateParallel with copies of results that others need.

    Two places with one value would be one array of a worker, which no step can take over twice. Alpa also makes a value
    on the stage that needs it first alone.

    Raises:
        AlpaError: A result needs a value from outside of the function of CreateStateParallel.
    """
    if not _Next.creates:
        return closed_jaxpr
    _Next.creates = False  # Alpa traces the training step next
    from alpa.util import clone_jaxpr

    jaxpr = closed_jaxpr.jaxpr
    _require_made_inside(jaxpr)
    needed = collections.Counter(variables(jaxpr.outvars))
    needed.update(v for equation in jaxpr.eqns for v in variables(equation.invars))
    copier, equations, results = Copier(closed_jaxpr), list(jaxpr.eqns), list(jaxpr.outvars)
    for place, value in enumerate(results):
        if not is_literal(value) and needed[value] > 1:
            equation, results[place] = copier.passed(value)
            equations.append(equation)
    return clone_jaxpr(closed_jaxpr, outvars=results, eqns=equations)


def _require_made_inside(jaxpr: Any) -> None:
    _, needed = Slices(jaxpr.eqns).behind(variables(jaxpr.outvars))
    given = [v for v in (*jaxpr.invars, *jaxpr.constvars) if v in needed]
    if given:
        whence = "an argument" if given[0] in jaxpr.invars else "an array from outside"
        raise AlpaError(
            f"The function of alpa.CreateStateParallel reads {whence} ({given[0].aval.str_short()}), expected that it "
            "makes all values itself: Alpa cannot place others.",
            "make keys and arrays inside the function; or call the training step with the state that you have, "
            "without alpa.CreateStateParallel.",
            found=given[0].aval.str_short(),
        )
