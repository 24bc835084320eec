"""Tell how a loss grows with the batch, from two traces with batches of different sizes.

Alpa averages losses and gradients over microbatches. Plain JAX computes the same if the loss is a mean over the
samples. It does not if the loss is a sum, or divides one sum over the samples by another. Then hwaware warns.

Each value gets a degree: 0 if it stays the same when every sample comes twice, 1 if it doubles. A rule gives the
degree of an operation's results, and no degree if the rule does not know it.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from hwaware.compat.jaxprs import MARKER, called_programs, is_literal, open_jaxpr, variables
from hwaware.patching.parts import mark_of, parts_of
from hwaware.patching.refusals import Names

SUM = (
    "The loss is a sum over the samples. Alpa averages losses and gradients over the {parts} microbatches, so both are "
    "1/{parts} of those of the whole batch. To fix: divide the sum by the number of samples inside the loss, or see "
    "docs/limits.md#averages-over-microbatches."
)
RATIO = (
    "The loss divides one sum over the samples by another, such as a masked sum by the sum of the mask. Alpa averages "
    "the quotients of the {parts} microbatches with equal weights. To fix: return both sums from the loss, and divide "
    "after the gradient: docs/limits.md#averages-over-microbatches."
)
GRADIENT = (
    "{name} of the step is a gradient with respect to the samples. Each microbatch computes its rows from its own mean "
    "loss, so they are {parts} times those of the whole batch. To fix: divide them by {parts} outside the step."
)
_EXTREMES = ("reduce_max", "reduce_min")
# Operations whose result has the degree of their first operand.
_PASSED = (
    *("neg", "convert_element_type", "copy", "copy_p", "reshape", "broadcast_in_dim", "squeeze", "transpose", "slice"),
    *("rev", "reduce_precision", "dynamic_slice", "gather", "real", "imag", "abs", *_EXTREMES),
    *("stop_gradient", "optimization_barrier"),
)
_ADDED = ("add", "sub", "add_any", "max", "min", "select_n", "concatenate")


class _Trait(NamedTuple):
    """Describe how a value depends on the batch.

    Attributes:
        degree: 0 if it is independent of the number of samples, 1 if it is in proportion; None if unknown.
        is_sum: True if it is reduced over the samples.
        is_share: True if it is divided by a sum over the samples, as normalised weights are.
        is_ratio: True if a quotient of two values that are reduced over the samples went into it.
        is_extreme: True if it is a maximum or minimum over the samples.
        is_number: True if no argument of the program went into it, as into a sum of ones.
    """

    degree: Optional[float] = 0.0
    is_sum: bool = False
    is_share: bool = False
    is_ratio: bool = False
    is_extreme: bool = False
    is_number: bool = False


def warnings_of(micro: Any, full: Any, microbatches: int, names: Names, inference: bool = False) -> List[str]:
    """Return the warnings about averages over microbatches that a program's user needs.

    Args:
        micro: The step, traced with one microbatch.
        full: The same step, traced with the whole batch.
        microbatches: The number of microbatches.
        names: The names of results in messages.
        inference: True if the program takes no gradient.
    """
    traits = _Traits(microbatches)
    if not traits.follow(*(program.jaxpr.eqns for program in (micro, full))):
        return []
    found: List[str] = []
    marked, first, is_divided, is_total = variables(micro.jaxpr.outvars), None, False, False
    if not inference:
        marked = list(parts_of(micro).marker.outvars)
        loss, is_divided = traits.loss(full), traits.divides_afterwards(micro, full)
        first = next(
            (place for place, result in enumerate(micro.jaxpr.outvars) if marked and result is marked[0]), None
        )
        is_total = loss is not None and loss.degree == 1 and not is_divided
        if is_total:
            found.append(SUM.format(parts=microbatches))
        elif loss is not None and loss.is_ratio:
            found.append(RATIO.format(parts=microbatches))
        if not is_total:
            found += [GRADIENT.format(name=names.result(place), parts=microbatches) for place in _rows(micro, full)]
    for index, (result, whole) in enumerate(zip(micro.jaxpr.outvars, full.jaxpr.outvars)):
        if is_literal(result) or result not in marked:
            continue
        is_same = result.aval.shape == whole.aval.shape
        if is_same and traits.is_extreme(whole):
            found.append(
                f"{names.result(index)} of the step is a largest or smallest value of the samples. Alpa averages it "
                f"over the {microbatches} microbatches. To fix: return one value for each sample, and compare these "
                "outside the step."
            )
        elif is_same and getattr(result.aval.dtype, "kind", "") in tuple("iu") and traits.varies(whole):
            found.append(
                f"{names.result(index)} of the step is {result.aval.dtype}. Alpa averages it over the {microbatches} "
                "microbatches and cuts off the fraction. To fix: return it as float32."
            )
        elif is_same and _is_float(result) and traits.grows(whole) and not is_divided and index != first:
            if is_total and result.aval.shape:
                continue  # perhaps a gradient: the warning of the loss covers it
            found.append(
                f"{names.result(index)} of the step is a sum over the samples. Alpa averages it over the microbatches, "
                f"so it is 1/{microbatches} of that of the whole batch. To fix: return a mean."
            )
    return found


def _rows(micro: Any, full: Any) -> List[int]:
    """Return the places of the step's results that are gradients with respect to samples."""
    parts = parts_of(micro)
    ends = [e for e in parts.before if mark_of(e) == "end" and e.params["name"].endswith("_backward")]
    made = {v for equation in ends for v in equation.outvars}
    pairs = zip(parts.marker.invars, parts.marker.outvars)
    gradients = {result for value, result in pairs if not is_literal(value) and value in made}
    results = zip(micro.jaxpr.outvars, full.jaxpr.outvars)
    return [
        place
        for place, (one, whole) in enumerate(results)
        if not is_literal(one) and one in gradients and one.aval.shape != whole.aval.shape
    ]


def _is_float(value: Any) -> bool:
    return not is_literal(value) and getattr(value.aval.dtype, "kind", "") in tuple("fV")


class _Traits:
    """Follow the values of two traces of one program, the second one with the larger batch."""

    def __init__(self, microbatches: int) -> None:
        self._ratio = float(microbatches)
        self._known: Dict[Any, _Trait] = {}

    def follow(self, small: Sequence[Any], large: Sequence[Any]) -> bool:
        """Learn the traits of all results; return False if the traces are different programs."""
        if [one.primitive.name for one in small] != [one.primitive.name for one in large]:
            return False
        return all(self._one(*pair) for pair in zip(small, large))

    def varies(self, value: Any) -> bool:
        """Return False for a constant, or a value that the program makes of its arguments without the samples."""
        return self._known.get(value, _Trait())._replace(is_number=False) != _Trait()

    def grows(self, value: Any) -> bool:
        """Return True if a value is in proportion to the number of samples."""
        return self._known.get(value, _Trait()).degree == 1

    def is_extreme(self, value: Any) -> bool:
        """Return True if a value is a maximum or minimum over the samples."""
        return self._known.get(value, _Trait()).is_extreme

    def loss(self, full: Any) -> Optional[_Trait]:
        """Return the loss's trait; None if it is not clear which value is the loss."""
        first = next(iter(parts_of(full).marker.invars), None)
        if first is None or first.aval.shape or not _is_float(first):
            ends = [e for e in full.jaxpr.eqns if mark_of(e) == "end" and not e.params["name"].endswith("_backward")]
            scalars = [v for v in ends[-1].invars if not is_literal(v) and v.aval.shape == ()] if ends else []
            first = scalars[0] if len(scalars) == 1 else None
        return None if first is None else self._known.get(first)

    def divides_afterwards(self, micro: Any, full: Any) -> bool:
        """Return True if the update divides by a value that grows with the batch, such as the number of samples."""
        for small, large in zip(parts_of(micro).after, parts_of(full).after):
            if large.primitive.name == "div" and self._of(small.invars[1], large.invars[1]).degree == 1:
                return True
        return False

    def _of(self, small: Any, large: Any) -> _Trait:
        if not is_literal(large):
            return self._known.get(large, _Trait())
        try:
            pair = float(small.val), float(large.val)
        except (TypeError, ValueError, AttributeError):
            return _Trait(None, is_number=True)
        for degree in (0, 1, -1):
            if pair[1] == pair[0] * self._ratio**degree:
                return _Trait(float(degree), is_number=True)
        return _Trait(None, is_number=True)

    def _one(self, small: Any, large: Any) -> bool:
        operands = [self._of(*pair) for pair in zip(small.invars, large.invars)]
        if large.primitive.name == MARKER:
            self._known.update(zip(large.outvars, operands))
            return True
        if called_programs(large):
            return self._call(small, large, operands)
        trait = self._rule(small, large, operands)
        self._known.update(dict.fromkeys(large.outvars, trait))
        return True

    def _call(self, small: Any, large: Any, operands: List[_Trait]) -> bool:
        programs = [called_programs(equation)[:1] for equation in (small, large)]
        inner = [open_jaxpr(program) for each in programs for program in each]
        if len(inner) < 2 or len(inner[1].invars) != len(operands):
            self._known.update(dict.fromkeys(large.outvars, _Trait(None)))
            return True
        self._known.update(zip(inner[1].invars, operands))
        if not self.follow(inner[0].eqns, inner[1].eqns):
            return False
        results = [self._of(*pair) for pair in zip(inner[0].outvars, inner[1].outvars)]
        self._known.update(zip(large.outvars, results))
        return True

    def _rule(self, small: Any, large: Any, operands: List[_Trait]) -> _Trait:
        name = large.primitive.name
        degrees = [operand.degree for operand in operands]
        reduces = _reduces(small, large)
        is_number = all(operand.is_number for operand in operands)
        is_sum = (reduces and not is_number) or any(operand.is_sum for operand in operands)
        is_share = any(operand.is_share for operand in operands)
        if name == "div" or (name == "integer_pow" and large.params["y"] < 0):
            is_share = is_share or (operands[-1].is_sum and operands[-1].degree == 1)
        is_ratio = any(operand.is_ratio for operand in operands) or (is_share and reduces)
        if name in ("div", "mul") and large.outvars[0].aval.shape == ():
            is_ratio = is_ratio or (all(operand.is_sum for operand in operands) and (name == "div" or is_share))
        is_extreme = name in _PASSED and (operands[0].is_extreme or (reduces and name in _EXTREMES))
        degree = None
        if None not in degrees:
            degree = self._degree(name, large, [float(each or 0) for each in degrees], reduces)
        return _Trait(degree, is_sum, is_share, is_ratio, is_extreme, is_number)

    def _degree(self, name: str, equation: Any, degrees: List[float], reduces: bool) -> Optional[float]:
        if name == "reduce_sum":
            return degrees[0] + reduces
        if name == "dot_general":
            return sum(degrees) + reduces
        if name == "mul":
            return sum(degrees)
        if name == "div":
            return degrees[0] - degrees[1]
        if name == "integer_pow":
            return degrees[0] * float(equation.params["y"])
        if name == "sqrt":
            return degrees[0] / 2
        if name in _PASSED:
            return degrees[0]
        if name in _ADDED:
            return max((d for value, d in zip(equation.invars, degrees) if not _is_zero(value)), default=0.0)
        return None if reduces or any(degrees) else 0.0


def _is_zero(value: Any) -> bool:
    return is_literal(value) and not value.val


def _reduces(small: Any, large: Any) -> bool:
    """Return True if an operation takes the dimension of the samples away."""
    if large.primitive.name == "reduce_sum":
        axes = large.params["axes"]
        return any(small.invars[0].aval.shape[axis] != large.invars[0].aval.shape[axis] for axis in axes)
    if large.primitive.name == "dot_general":
        (left, _), _ = large.params["dimension_numbers"]
        return any(small.invars[0].aval.shape[dim] != large.invars[0].aval.shape[dim] for dim in left)
    grows = [_grows(*pair) for pair in zip(small.invars, large.invars)]
    return any(grows) and not any(_grows(*pair) for pair in zip(small.outvars, large.outvars))


def _grows(small: Any, large: Any) -> bool:
    return bool(small.aval.shape != large.aval.shape)
