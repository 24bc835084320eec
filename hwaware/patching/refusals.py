"""Refuse steps that Alpa cannot cut, and results that it can neither average nor join."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Sequence

from hwaware.compat.jaxprs import is_literal, variables
from hwaware.errors import AlpaError
from hwaware.patching.parts import Parts, mark_of, parts_of


class Names(NamedTuple):
    """Name the arguments and results of a step in messages.

    Attributes:
        arguments, results: One name for each, in the order of the traced program; numbers stand in for missing names.
    """

    arguments: Sequence[str] = ()
    results: Sequence[str] = ()

    def argument(self, index: int) -> str:
        """Return the name of an argument."""
        return self.arguments[index] if index < len(self.arguments) else f"argument {index}"

    def result(self, index: int) -> str:
        """Return the name of a result."""
        return self.results[index] if index < len(self.results) else f"Result {index}"


def require_plain_types(micro: Any, names: Names) -> None:
    """Refuse arguments that hold typed random keys."""
    for index, variable in enumerate(micro.jaxpr.invars):
        if not hasattr(variable.aval.dtype, "kind"):
            raise AlpaError(
                f"{names.argument(index)} of the function holds typed random keys ({variable.aval.dtype}), which "
                "Alpa cannot place.",
                "keep jax.random.PRNGKey(seed), or jax.random.key_data(key), in its place; the function can make the "
                "typed key from it by jax.random.wrap_key_data(...).",
                found=str(variable.aval.dtype),
                expected="uint32",
            )


def require_one_gradient(micro: Any, schedule: str) -> None:
    """Refuse a step without a gradient of Alpa's, or with several."""
    count = sum(mark_of(equation) == "grad" for equation in micro.jaxpr.eqns)
    if count == 0:
        raise AlpaError(
            f"The function takes no gradient by alpa.grad or alpa.value_and_grad, but its schedule {schedule!r} is "
            "for training.",
            "take the gradient by alpa.value_and_grad instead of jax.value_and_grad; for a function without a "
            'gradient, give alpa.PipeshardParallel pipeline_schedule="inference".',
            found=0,
            expected=1,
        )
    if count > 1:
        raise AlpaError(
            f"The step takes {count} gradients, but Alpa takes one alpa.grad or alpa.value_and_grad a step.",
            "write one parallelized function for each gradient, e.g. one for the discriminator and one for the "
            "generator; or add up the losses, with jax.lax.stop_gradient where one loss shall not change a part.",
            found=count,
            expected=1,
        )


def require_same_results(micro: Sequence[Any], full: Sequence[Any], microbatches: int, whose: str) -> None:
    """Refuse averages of bools, and values whose shape depends on the batch otherwise than by one row a sample.

    Args:
        micro: The results of the program with one microbatch.
        full: The results with the whole batch.
        microbatches: The number of microbatches.
        whose: The start of messages: who returns it.

    Raises:
        AlpaError: Alpa can neither average nor join a value.
    """
    shapes = [[tuple(v.aval.shape) for v in values] for values in (micro, full)]
    types = [str(v.aval.dtype) for v in micro]
    if any(kind == "bool" and shape == whole for kind, shape, whole in zip(types, *shapes)):
        raise AlpaError(
            f"{whose} returns a bool without a row for each sample, but Alpa averages such values over the "
            "microbatches.",
            'return it as a number: value.astype("float32") is then the part of the microbatches in which it holds.',
        )
    if len(shapes[0]) != len(shapes[1]):
        raise AlpaError(
            f"{whose} returns {len(shapes[0])} values with one microbatch, and {len(shapes[1])} with the whole batch.",
            "return as many values whatever the size of the batch.",
        )
    for part, whole in zip(*shapes):
        if part != whole and (part[1:] != whole[1:] or part[0] * microbatches != whole[0]):
            raise AlpaError(
                f"{whose} returns a value of the shape {part} with one microbatch, and of {whole} with the whole "
                "batch.",
                "return values with one row a sample, or of a shape that does not depend on the batch.",
                found=part,
                expected=(whole[0] // microbatches, *whole[1:]) if whole else whole,
            )


def require_no_samples_in_update(micro: Any, full: Any, batch: Sequence[bool], names: Names) -> None:
    """Refuse an update that reads samples or rows of results: the update runs once a step, not once a microbatch."""
    parts, whole = parts_of(micro), parts_of(full)
    made = [zip(one.outvars, w.outvars) for one, w in zip([parts.marker, *parts.before], [whole.marker, *whole.before])]
    rows = {v for values in made for v, w in values if v.aval.shape != w.aval.shape}
    samples = {v: index for index, (v, flag) in enumerate(zip(micro.jaxpr.invars, batch)) if flag}
    tainted: Dict[Any, str] = dict.fromkeys(rows, "a value with one row for each sample")
    tainted.update({v: f"{names.argument(index)}, which is cut into microbatches" for v, index in samples.items()})
    for equation in parts.after:
        found = [tainted[v] for v in variables(equation.invars) if v in tainted]
        tainted.update(dict.fromkeys(equation.outvars, found[0]) if found else {})
    for index, result in enumerate(micro.jaxpr.outvars):
        if not is_literal(result) and result in tainted and result not in rows:
            raise AlpaError(
                f"{names.result(index)} of the step is computed after the gradient from {tainted[result]}.",
                "compute it inside the loss function, and return it beside the loss: alpa.value_and_grad(..., "
                "has_aux=True). Alpa averages such values over the microbatches.",
            )


def require_mean(variable: Any, closed_jaxpr: Any, parts: Parts, names: Names) -> None:
    """Refuse integers and bools that a step computes from samples: their mean over microbatches has no use."""
    from jax import dtypes, numpy

    if dtypes.issubdtype(variable.aval.dtype, numpy.inexact):
        return
    index = next((i for i, v in enumerate(closed_jaxpr.jaxpr.outvars) if v is variable), None)
    what = "A value that the update reads" if index is None else f"{names.result(index)} of the step"
    raise AlpaError(
        f"{what} is computed from samples, before the loss, as {variable.aval.dtype}. Alpa averages it over the "
        "microbatches, so it cannot be a whole number.",
        "convert it to float32, or compute it from values that are not cut into microbatches.",
        found=str(variable.aval.dtype),
    )
