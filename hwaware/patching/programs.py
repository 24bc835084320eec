"""Alpa's HLO modules on stock JAX: what is asked of them there, and a clear end where Alpa's jaxlib is needed."""

from __future__ import annotations

from typing import Any, Callable

from hwaware.errors import AlpaError


class UnloweredProgram:
    """Stands for an HLO module: its FLOPs can be counted; nothing else can be done with it.

    Args:
        name: Of the program.
        jaxpr: What it computes (not closed).
    """

    def __init__(self, name: str, jaxpr: Any) -> None:
        self._name, self._jaxpr = name, jaxpr

    def get_module(self) -> UnloweredProgram:
        """Itself: Alpa asks for the module inside its wrapper."""
        return self

    def flops(self) -> float:
        """Return the FLOPs of its matrix products and convolutions."""
        from hwaware.tracing.flops import equation_flops

        return float(sum(equation_flops(equation) for equation in self._jaxpr.eqns))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AlpaError(
            f"{self._name} is to be compiled by Alpa's own jaxlib ({name}), which this environment has not: stock JAX "
            "runs PipeshardParallel, and CreateStateParallel and FollowParallel of such a function.",
            "use alpa.PipeshardParallel, or an environment with Alpa's jaxlib.",
        )


def jaxpr_to_hlo(_original: Any) -> Callable[..., UnloweredProgram]:
    """Instead of lowering for Alpa's jaxlib: a program whose FLOPs can be counted, which is all that pipelines need."""

    def replacement(name: str, closed_jaxpr: Any, donated_invars: Any, platform: str = "cuda") -> UnloweredProgram:
        del donated_invars, platform
        return UnloweredProgram(name, closed_jaxpr.jaxpr)

    return replacement
