"""Replace functions of Alpa to which no facade can show another JAX, and HLO modules, which stock JAX lacks."""

from __future__ import annotations

from typing import Any, Callable

from hwaware.compat.packages import ALPAS_JAXLIB
from hwaware.errors import AlpaError
from hwaware.tracing.flops import equation_flops, jaxpr_flops, product_flops


def new_jaxpr_eqn(original: Any) -> Callable[..., Any]:
    """Wrap Alpa's function: make parameters hashable, as JAX asks since 0.7. Alpa's all-reduce has a list."""

    def replacement(invars: Any, outvars: Any, primitive: Any, params: Any, *rest: Any, **more: Any) -> Any:
        fixed = {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}
        return original(list(invars), list(outvars), primitive, fixed, *rest, **more)

    return replacement


def abstractify_with_aval(_original: Any) -> Callable[[Any], Any]:
    """Replace Alpa's function by JAX's own for all values. `ShapeDtypeStruct` has no names of dimensions any more."""
    from jax.api_util import shaped_abstractify

    from hwaware.compat.programs import ShapedArray, Tracer

    def replacement(value: Any) -> Any:
        if isinstance(value, Tracer):
            raise AlpaError(
                "A parallelized function is called inside jax.jit or another transformation of JAX, which Alpa cannot "
                "follow.",
                "call it outside.",
            )
        return value if isinstance(value, ShapedArray) else shaped_abstractify(value)

    return replacement


def mark_missing_vars(original: Any) -> Callable[..., Any]:
    """Wrap Alpa's function: while it runs, equations have `_replace`. Since JAX 0.4.31, they are no named tuples."""

    def replacement(*args: Any) -> Any:
        from hwaware.compat.programs import JaxprEqn

        if hasattr(JaxprEqn, "_replace"):
            return original(*args)
        JaxprEqn._replace = lambda self, **fields: self.replace(**fields)
        try:
            return original(*args)
        finally:
            del JaxprEqn._replace

    return replacement


def eqn_flops(_original: Any) -> Callable[[Any], float]:
    """Replace the question to Alpa's XLA: count the FLOPs of one equation as hwaware's tracing does."""
    return lambda equation: float(equation_flops(equation))


def heavy_count(_original: Any) -> Callable[[Any], int]:
    """Count matrix products and convolutions inside all kinds of calls: Alpa cuts layers between these."""
    return lambda equation: sum(1 for _ in product_flops(equation))


class UnloweredProgram:
    """Stand for an HLO module. hwaware can count its FLOPs; every other use raises AlpaError.

    Args:
        name: The name of the program.
        jaxpr: The program's jaxpr (not closed).
    """

    def __init__(self, name: str, jaxpr: Any) -> None:
        self._name, self._jaxpr = name, jaxpr

    def get_module(self) -> UnloweredProgram:
        """Return this object: Alpa asks for the module inside its wrapper."""
        return self

    def flops(self) -> float:
        """Return the FLOPs of the program's matrix products and convolutions."""
        return jaxpr_flops(self._jaxpr)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise needs_alpas_jaxlib(f"{self._name} is to be compiled by {ALPAS_JAXLIB} ({name})")


def needs_alpas_jaxlib(what: str) -> AlpaError:
    """Return the error about a sentence's beginning that names what stock JAX does not run."""
    return AlpaError(
        f"{what}, which this environment has not: stock JAX runs PipeshardParallel, and CreateStateParallel and "
        "FollowParallel of such a function.",
        f"use alpa.PipeshardParallel, or an environment with {ALPAS_JAXLIB}.",
    )


def get_physical_mesh(_original: Any) -> Callable[..., Any]:
    """Replace the cluster's own mesh: refuse it before workers start. Only functions without a pipeline have one."""

    def replacement(_self: Any, *_: Any, **__: Any) -> Any:
        raise needs_alpas_jaxlib(
            f"A function without a pipeline (ShardParallel, or alpa.parallelize without method) needs {ALPAS_JAXLIB}"
        )

    return replacement


def jaxpr_to_hlo(_original: Any) -> Callable[..., UnloweredProgram]:
    """Replace lowering for Alpa's XLA: return a program whose FLOPs hwaware can count. Pipelines need no more."""

    def replacement(name: str, closed_jaxpr: Any, donated_invars: Any, platform: str = "cuda") -> UnloweredProgram:
        del donated_invars, platform
        return UnloweredProgram(name, closed_jaxpr.jaxpr)

    return replacement
