"""Tell programs apart by what they compute, without lowering them."""

from __future__ import annotations

import hashlib
import itertools
import re
from typing import Any, Dict, Iterator

from hwaware.compat.jaxprs import is_literal, open_jaxpr

# A function's address differs from one process to the next.
_ADDRESS = re.compile(r"(?: at)? 0x[0-9a-f]+")


def jaxpr_digest(jaxpr: Any) -> str:
    """Return a digest that jaxprs share if they compute the same on arrays of the same shapes and types.

    Names of layers and functions do not count, nor do the values of constants: times do not depend on them. JAX's own
    text of a jaxpr holds such names, and takes 1 ms an equation.

    Args:
        jaxpr: A jaxpr, not closed.

    Example:
        >>> import jax
        >>> one, same, other = (jax.make_jaxpr(f)(1.0) for f in (lambda x: x + 1, lambda y: y + 1, lambda x: x + 2))
        >>> jaxpr_digest(one.jaxpr) == jaxpr_digest(same.jaxpr), jaxpr_digest(one.jaxpr) == jaxpr_digest(other.jaxpr)
        (True, False)
    """
    found = hashlib.sha256()
    for part in _parts(jaxpr):
        found.update(part.encode())
        found.update(b"\n")
    return found.hexdigest()


def _parts(jaxpr: Any) -> Iterator[str]:
    numbers: Dict[Any, int] = {}
    count = itertools.count()

    def named(atom: Any) -> str:
        if is_literal(atom):
            return f"{atom.val!r}:{atom.aval}"
        if atom not in numbers:
            numbers[atom] = next(count)
        return str(numbers[atom])

    # The types of inputs; the types of all other values follow from these.
    yield " ".join(f"{named(one)}:{one.aval}" for one in (*jaxpr.constvars, *jaxpr.invars))
    for equation in jaxpr.eqns:
        ends = [" ".join(map(named, variables)) for variables in (equation.outvars, equation.invars)]
        yield f"{ends[0]} = {equation.primitive.name} {ends[1]}"
        for key in sorted(equation.params):
            if key != "name":
                yield key
                yield from _value(equation.params[key])
    yield " ".join(map(named, jaxpr.outvars))


def _value(value: Any) -> Iterator[str]:
    """Yield a parameter of an equation, which may hold jaxprs."""
    inner = open_jaxpr(value)
    if hasattr(inner, "eqns"):
        yield from _parts(inner)
    elif isinstance(value, (tuple, list)):
        yield "("  # one product may contract the axes that another one only batches
        for one in value:
            yield from _value(one)
        yield ")"
    else:
        yield _ADDRESS.sub("", repr(value))
