"""Divide sums of an update over the meshes: each mesh adds its own values, and all meshes combine these.

Alpa's `ApplyGradRewriter` does so for a chain of additions whose values lie on one mesh each. It stops at chains that
begin on a later mesh, and at two chains of different meshes. It also stops at inputs, and at values on all meshes. So
it does not know the norm of clipped updates, or a norm of some stages' gradients.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, FrozenSet, Iterable, List, Mapping, NamedTuple, Set, Tuple

from hwaware.compat.jaxprs import is_literal, variables

Meshes = FrozenSet[int]
# Operations that combine scalars in any order.
_NEUTRAL: Dict[str, Callable[[Any], Any]] = {
    "add": lambda dtype: 0,
    "and": lambda dtype: True,
    "or": lambda dtype: False,
    "max": lambda dtype: _extreme(dtype, -1),
    "min": lambda dtype: _extreme(dtype, 1),
}
_ANYWHERE: Meshes = frozenset()


class _Tree(NamedTuple):
    """Hold a tree of equations of one operation, whose inner results nobody else reads.

    Attributes:
        inner: Places of the equations before the last one.
        leaves: The values that the tree combines, in order.
    """

    inner: List[int]
    leaves: List[Any]


def slice_apply_gradient(original: Any) -> Callable[..., Any]:
    """Wrap Alpa's function: divide sums over the meshes first. Here a mesh, not each device, adds one value."""

    def replacement(update: Any, grad_mesh: Any, outvar_mesh: Any, num_mesh: int, *others: Any) -> Any:
        num_stage, donation, gensym, is_profiled, mesh_num_devices = others
        placed = {var: frozenset([mesh]) for var, mesh in grad_mesh.items()}
        placed.update({var: frozenset(outvar_mesh[out]) for var, out in donation.items() if out in outvar_mesh})
        divided = with_all_reduces(update, placed, donation, num_mesh, gensym)
        ones = None if mesh_num_devices is None else [1] * len(mesh_num_devices)
        return original(divided, grad_mesh, outvar_mesh, num_mesh, num_stage, donation, gensym, is_profiled, ones)

    return replacement


def split_replicated_eqns(_original: Any) -> Callable[..., Any]:
    """Replace Alpa's own division, which `slice_apply_gradient` has done: return the update and its group of meshes."""

    def replacement(self: Any, _gensym: Any, num_mesh: int) -> Tuple[Any, Tuple[Tuple[int, ...], ...]]:
        from alpa.pipeline_parallel.apply_grad import cross_mesh_allreduce_p

        combines = any(equation.primitive is cross_mesh_allreduce_p for equation in self.eqns)
        return self.jaxpr, ((*range(num_mesh),),) * combines

    return replacement


def with_all_reduces(
    update: Any, placed: Mapping[Any, Meshes], donation: Mapping[Any, Any], num_mesh: int, gensym: Callable[[Any], Any]
) -> Any:
    """Return an update in which all meshes combine each scalar sum of values that lie on several meshes.

    A mesh without values gives a neutral one. So all meshes take part in the same all-reduces, in the same order. No
    mesh waits for one that waits elsewhere.

    Args:
        update: The program of the update.
        placed: Its inputs that lie on certain meshes.
        donation: Input -> output that takes its memory, and lies where the input does.
        num_mesh: Number of meshes.
        gensym: Makes a new variable of a type.
    """
    from alpa.pipeline_parallel import apply_grad
    from alpa.util import clone_jaxpr, new_jaxpr_eqn

    equations, trees = update.eqns, _trees(update)
    meshes = _settled(update, trees, dict(placed), donation)
    divided = {place for place, tree in trees.items() if len(_union(tree.leaves, meshes)) > 1}
    dropped = {inner for place in divided for inner in trees[place].inner}
    made: List[Any] = []
    level: Dict[Any, int] = {}  # number of all-reduces before a value
    for place, equation in enumerate(equations):
        if place in dropped:
            continue
        read = trees[place].leaves if place in divided else equation.invars
        before = max([level.get(variable, 0) for variable in variables(read)], default=0)
        level.update(dict.fromkeys(equation.outvars, before + (place in divided)))
        if place not in divided:
            made.append(equation)
            continue
        operation, aval = equation.primitive, equation.outvars[0].aval
        neutral = apply_grad._value_to_literal(_NEUTRAL[operation.name](aval.dtype), aval.dtype)
        first = min(_union(read, meshes))
        own: Dict[int, List[Any]] = {mesh: [] for mesh in range(num_mesh)}
        for leaf in read:
            own[min(_of(leaf, meshes), default=first)].append(leaf)
        operands = []
        for values in own.values():
            # The last equation is this mesh's alone: what it adds may be computed on other meshes, too.
            total, *more = [*values, neutral] if values else [neutral, neutral]
            for value in more:
                former, total = total, gensym(aval)
                made.append(new_jaxpr_eqn([former, value], [total], operation, {}))
            operands.append(total)
        parameters = {"type": operation, "group_meshes": list(range(num_mesh)), "level": before + 1}
        made.append(new_jaxpr_eqn(operands, list(equation.outvars), apply_grad.cross_mesh_allreduce_p, parameters))
    return clone_jaxpr(update, eqns=made)


def _trees(update: Any) -> Dict[int, _Tree]:
    """Return the trees of scalar operations, by the place of their last equation."""
    readers: Dict[Any, List[int]] = {}
    for place, equation in enumerate(update.eqns):
        for variable in variables(equation.invars):
            readers.setdefault(variable, []).append(place)
    results = set(variables(update.jaxpr.outvars))
    trees: Dict[int, _Tree] = {}
    made_by: Dict[Any, int] = {}
    for place, equation in enumerate(update.eqns):
        if equation.primitive.name not in _NEUTRAL or equation.outvars[0].aval.shape != ():
            continue
        inner: List[int] = []
        leaves: List[Any] = []
        for value in equation.invars:
            before = None if is_literal(value) else made_by.get(value)
            same = before is not None and update.eqns[before].primitive is equation.primitive
            if before is not None and same and readers[value] == [place] and value not in results:
                tree = trees.pop(before)
                inner += [*tree.inner, before]
                leaves += tree.leaves
            else:
                leaves.append(value)
        trees[place] = _Tree(inner, leaves)
        made_by[equation.outvars[0]] = place
    return trees


def _settled(
    update: Any, trees: Mapping[int, _Tree], placed: Dict[Any, Meshes], donation: Mapping[Any, Any]
) -> Dict[Any, Meshes]:
    """Return the meshes on whose inputs each value depends; none for a value that all meshes have, or any could.

    An input whose memory an output takes lies where the output does: so do the optimiser's slots.
    """
    while True:
        meshes = dict(placed)
        for place, equation in enumerate(update.eqns):
            found = frozenset(_union(equation.invars, meshes))
            if place in trees and len(_union(trees[place].leaves, meshes)) > 1:
                found = _ANYWHERE  # all meshes get the result
            meshes.update({variable: found for variable in equation.outvars if found})
        outputs = {invar: _of(output, meshes) for invar, output in donation.items() if invar not in placed}
        fresh = {invar: found for invar, found in outputs.items() if len(found) == 1}
        if not fresh:
            return meshes
        placed.update(fresh)


def _of(value: Any, meshes: Mapping[Any, Meshes]) -> Meshes:
    return _ANYWHERE if is_literal(value) else meshes.get(value, _ANYWHERE)


def _union(values: Iterable[Any], meshes: Mapping[Any, Meshes]) -> Set[int]:
    return {mesh for value in values for mesh in _of(value, meshes)}


def _extreme(dtype: Any, sign: int) -> Any:
    """Return the largest value of a type, or the smallest for a negative sign."""
    import jax.numpy as jnp
    import numpy

    if jnp.issubdtype(dtype, jnp.floating):
        return sign * numpy.inf
    if jnp.issubdtype(dtype, jnp.bool_):
        return sign > 0
    return jnp.iinfo(dtype).max if sign > 0 else jnp.iinfo(dtype).min
