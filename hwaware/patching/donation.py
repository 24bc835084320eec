"""Pair the arguments that a program donates with the results that take over their memory.

Alpa pairs them by their places, and stops if an argument has no result at its place. If a step returns its state in
another order, Alpa then also moves or copies weights between stages.
"""

from __future__ import annotations

import collections
from typing import Any, Callable, Dict, List, Optional, Sequence, Set

from hwaware.compat.jaxprs import is_literal, variables
from hwaware.patching.parts import Layer, layers_of, parts_of


def places_of_results(closed_jaxpr: Any, donated: Sequence[bool]) -> List[Optional[int]]:
    """Return the place of the result that takes over each argument's memory; None for an argument that stays.

    Only results of a step's update take over memory: microbatches need the arguments before it. Each result takes an
    argument of its shape and type. If possible, the update reads it for this result: both are on the same stages.
    """
    if not any(donated):
        return [None] * len(donated)
    jaxpr = closed_jaxpr.jaxpr
    given = {value: place for place, (value, flag) in enumerate(zip(jaxpr.invars, donated)) if flag}
    behind: Dict[Any, Set[Any]] = {value: {value} for value in given}  # the donated arguments that a value needs
    for equation in parts_of(closed_jaxpr).after:
        read = [behind[value] for value in variables(equation.invars) if value in behind]
        behind.update(dict.fromkeys(equation.outvars, set().union(*read)))
    results = {one: place for place, one in enumerate(jaxpr.outvars) if not is_literal(one) and one in behind}
    # An average of weights also needs the weights: it comes after them.
    order = sorted(results, key=lambda one: (len(behind[one]), results[one]))
    found: Dict[Any, int] = {}
    for reads in (True, False):  # what no result that needs it takes, another result takes
        for result in list(order):
            candidates = behind[result] if reads else given
            like = [one for one in candidates if one not in found and _kind(one) == _kind(result)]
            if like:
                found[min(like, key=given.__getitem__)] = results[result]
                order.remove(result)
    return [found.get(value) for value in jaxpr.invars]


def places_in_inference(closed_jaxpr: Any, donated: Sequence[bool]) -> List[Optional[int]]:
    """Return `places_of_results` of a program that serves one microbatch, such as one that extends a cache.

    One layer, which is on one stage, must be all that reads the argument, and must make the result. No layer may read
    the result: a stage may still be sending it when the next call takes its memory. No argument gives its memory away
    unless all donated ones have like results. A program that serves needs its weights again, and Alpa donates a flax
    TrainState by itself. So what a program returns unchanged takes no memory over either.
    """
    jaxpr = closed_jaxpr.jaxpr
    found: List[Optional[int]] = [None] * len(donated)
    given = {value: place for place, (value, flag) in enumerate(zip(jaxpr.invars, donated)) if flag}
    returned = variables(jaxpr.outvars)
    places = {one: place for place, one in enumerate(jaxpr.outvars) if not is_literal(one)}
    if collections.Counter(map(_kind, given)) - collections.Counter(map(_kind, returned)):
        return found
    items = layers_of(jaxpr.eqns)
    reads = [set(variables(one.start.invars if isinstance(one, Layer) else one.invars)) for one in items]
    readers = collections.Counter(value for read in reads for value in read)
    layers = [(one, read) for one, read in zip(items, reads) if isinstance(one, Layer)]
    passed = {value for layer, _ in layers for value in _passed(layer)}
    free = {one for one, count in collections.Counter(returned).items() if count == 1} - passed - set(readers)
    for layer, read in layers:
        made = [one for one in layer.end.outvars if one in free]
        for value in given:
            like = [one for one in made if _kind(one) == _kind(value)]
            if value in read and readers[value] == 1 and like:
                made.remove(like[0])
                found[given[value]] = places[like[0]]
    return found


def _passed(layer: Layer) -> List[Any]:
    """Return the results of a layer that are copies of what it gets."""
    copies = {
        equation.outvars[0]
        for equation in layer.body
        if equation.primitive.name == "copy" and equation.invars[0] in layer.start.outvars
    }
    pairs = zip(layer.end.invars, layer.end.outvars)
    return [outer for inner, outer in pairs if not is_literal(inner) and inner in copies]


def _kind(value: Any) -> Any:
    return tuple(value.aval.shape), value.aval.dtype


def process_apply_gradient(original: Any) -> Callable[..., Any]:
    """Wrap Alpa's function: give it the donated arguments at the places of their results."""

    def replacement(
        update: Any, bound: Any, stages: Any, stage_to_mesh: Any, gensym_func: Any, num_meshes: int,
        global_invars: Any, global_outvars: Any, places: Sequence[Optional[int]], *rest: Any,
    ) -> Any:  # fmt: skip
        donors = dict(zip(places, global_invars))
        invars = [donors.get(place) for place in range(len(global_outvars))]
        flags = [value is not None for value in invars]
        return original(
            update, bound, stages, stage_to_mesh, gensym_func, num_meshes, invars, global_outvars, flags, *rest
        )

    return replacement


def create_donation_mapping(_original: Any) -> Callable[..., Dict[Any, Any]]:
    """Replace Alpa's function, which pairs values of different types, and logs an argument that stays."""

    def replacement(
        known: Dict[Any, Any], places: Sequence[Optional[int]], arguments: Any, results: Any
    ) -> Dict[Any, Any]:
        return {**known, **{value: results[place] for value, place in zip(arguments, places) if place is not None}}

    return replacement
