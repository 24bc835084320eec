"""Make random numbers in a pipelined program the same for the same key and microbatch, wherever a stage computes them.

Alpa replaces the samplers of `jax.random` by generators with a state on the device, and drops the key. Such numbers
depend on the placement, and a rematerialised backward pass would draw others than its forward pass. Here a draw stays
a function of its key, into which hwaware folds the number of the microbatch. So each microbatch has its own numbers,
and the first one those of plain JAX. Forward and backward pass agree, and so does a restored checkpoint. hwaware does
not fold in the step. Keep a key in the state, and split it after the gradients, as in plain JAX.

Where the samples themselves bring keys, and `vmap` draws for each sample, hwaware folds nothing in. All samples get
the numbers of plain JAX.

This holds for `uniform`, `normal`, `truncated_normal`, `gumbel` and `randint`, given keys of `jax.random.PRNGKey`. It
also holds for all of `jax.random` that build on these, such as `bernoulli` (dropout). Others, such as `bits` and
`permutation`, draw the same numbers in each microbatch. hwaware refuses a draw inside `lax.while_loop`, `scan` or
`cond` if JAX keeps the loop. Alpa traces with jit off, which unrolls most loops.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, Dict, List, Optional, Sequence, Tuple

import jax
import jax.numpy as jnp
import numpy

from hwaware.compat.jaxprs import (
    LOOPS,
    MARKER,
    Operation,
    called_programs,
    fits,
    flatten,
    is_literal,
    open_jaxpr,
    with_inner,
)
from hwaware.compat.programs import (
    Primitive,
    ShapedArray,
    Zero,
    key_bits,
    primitive_batchers,
    primitive_jvps,
    results_of,
    zero_of,
)
from hwaware.compiler.dataflow import evaluate
from hwaware.errors import AlpaError

DRAW = "hwaware_draw"
# Other samplers call these; in newer JAX, `gumbel` draws bits itself.
SAMPLERS = ("uniform", "normal", "truncated_normal", "gumbel", "randint")
# A program that itself folds in this number plus that of a microbatch would get the microbatch's key.
_FIRST_MICROBATCH = 0x68770000
# The thread in which Alpa traces.
_tracing: List[int] = []


@functools.lru_cache(maxsize=None)
def stock_samplers() -> Dict[str, Any]:
    """Return JAX's own samplers by name. The first call must come before anything replaces them."""
    return {name: getattr(jax.random, name) for name in SAMPLERS}


@functools.lru_cache(maxsize=None)
def draw_primitive() -> Any:
    """Return the operation that stands for a draw in a traced program."""
    stock_samplers()
    primitive = Primitive(DRAW)
    primitive.def_impl(lambda *operands, **how: _draw(operands, None, **how))
    primitive.def_abstract_eval(
        lambda *operands, shape, dtype, batched, **_: ShapedArray(_batch_sizes(operands, batched) + shape, dtype)
    )
    primitive_batchers[primitive] = lambda operands, axes, batched, **how: (
        primitive.bind(*operands, batched=(*batched, tuple(axes)), **how), 0
    )  # fmt: skip
    primitive_jvps[primitive] = _differentiate
    return primitive


def trace_in_this_thread() -> None:
    """Let only draws of this thread know their key: other threads draw numbers at once, while Alpa traces here."""
    _tracing[:] = [threading.get_ident()]


def uniform(
    key: Any, shape: Any = (), dtype: Any = float, minval: Any = 0.0, maxval: Any = 1.0, *, out_sharding: Any = None
) -> Any:
    """Draw as `jax.random.uniform` does, while Alpa traces."""
    return _bind("uniform", key, shape, dtype, minval, maxval, out_sharding=out_sharding)


def normal(key: Any, shape: Any = (), dtype: Any = float, *, out_sharding: Any = None) -> Any:
    """Draw as `jax.random.normal` does, while Alpa traces."""
    return _bind("normal", key, shape, dtype, out_sharding=out_sharding)


def truncated_normal(
    key: Any, lower: Any, upper: Any, shape: Any = None, dtype: Any = float, *, out_sharding: Any = None
) -> Any:
    """Draw as `jax.random.truncated_normal` does, while Alpa traces."""
    shape = numpy.broadcast_shapes(numpy.shape(lower), numpy.shape(upper)) if shape is None else shape
    return _bind("truncated_normal", key, shape, dtype, lower, upper, out_sharding=out_sharding)


def gumbel(key: Any, shape: Any = (), dtype: Any = float, mode: Any = None, *, out_sharding: Any = None) -> Any:
    """Draw as `jax.random.gumbel` does, while Alpa traces; older JAX knows no `mode`."""
    return _bind("gumbel", key, shape, dtype, mode=mode, out_sharding=out_sharding)


def randint(key: Any, shape: Any, minval: Any, maxval: Any, dtype: Any = int, *, out_sharding: Any = None) -> Any:
    """Draw as `jax.random.randint` does, while Alpa traces."""
    return _bind("randint", key, shape, dtype, minval, maxval, out_sharding=out_sharding)


def draws(jaxpr: Any) -> bool:
    """Return True if a program, or one that it calls, draws random numbers."""
    return any(each.primitive.name == DRAW for equation in open_jaxpr(jaxpr).eqns for each in with_inner(equation))


def with_keys_of_samples(closed_jaxpr: Any, batch: Sequence[bool]) -> Any:
    """Return the program with a mark at each draw that `vmap` makes with keys from the samples.

    Args:
        closed_jaxpr: The program.
        batch: True for each argument with samples.
    """
    if not draws(closed_jaxpr):
        return closed_jaxpr
    equations, _ = _marked(closed_jaxpr.jaxpr, batch)
    return closed_jaxpr.replace(jaxpr=closed_jaxpr.jaxpr.replace(eqns=equations))


def _marked(jaxpr: Any, flags: Sequence[bool]) -> Tuple[List[Any], List[bool]]:
    """Return a jaxpr's operations with marks, and True for each result that depends on the flagged arguments."""
    known = {variable for variable, flag in zip(jaxpr.invars, flags) if flag}
    equations = []
    for equation in jaxpr.eqns:
        params = dict(equation.params)
        given = [not is_literal(atom) and atom in known for atom in equation.invars]
        made = given if equation.primitive.name == MARKER else [any(given)] * len(equation.outvars)
        if equation.primitive.name == DRAW and given[0]:
            params["of_samples"] = any(axes[0] is not None for axes in params["batched"])
        for name, program in equation.params.items():
            if any(program is one and fits(one, equation) for one in called_programs(equation)):
                inner, made = _marked(open_jaxpr(program), given)
                if draws(program):
                    marked = open_jaxpr(program).replace(eqns=inner)
                    params[name] = program.replace(jaxpr=marked) if hasattr(program, "jaxpr") else marked
        known.update(variable for variable, flag in zip(equation.outvars, made) if flag)
        equations.append(equation.replace(params=params))
    return equations, [not is_literal(atom) and atom in known for atom in jaxpr.outvars]


def resolved(closed_jaxpr: Any, microbatched: bool) -> Any:
    """Return the program with its draws written out in JAX's own operations.

    Args:
        closed_jaxpr: A stage's jaxpr.
        microbatched: True if it runs once a microbatch. It then has one more argument, the microbatch's number.

    Raises:
        AlpaError: A draw is inside a loop.
    """
    flat = flatten(closed_jaxpr.jaxpr, draws)

    def program(*arguments: Any) -> Sequence[Any]:
        number = arguments[-1] if microbatched else None
        values = evaluate(flat, closed_jaxpr.consts, arguments, functools.partial(_results, number))
        return [values[value] for value in flat.outputs]

    extra = [jax.ShapeDtypeStruct((), "int32")] if microbatched else []
    arguments = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in closed_jaxpr.in_avals]
    return jax.make_jaxpr(program)(*arguments, *extra)


def _bind(
    sampler: str, key: Any, shape: Any, dtype: Any, *bounds: Any, out_sharding: Any = None, mode: Any = None
) -> Any:
    if any(getattr(out_sharding, "spec", out_sharding) or ()):
        raise AlpaError(
            f"jax.random.{sampler} is given out_sharding={out_sharding}, but shardings inside a pipeline are chosen "
            "for each stage.",
            "leave out_sharding out.",
        )
    dtype = jax.dtypes.canonicalize_dtype(float if dtype is None else dtype)
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if _tracing != [threading.get_ident()]:
        return _draw((key, *bounds), None, sampler, sizes, dtype, mode, (), False)
    # An upper bound of integers may lie one beyond their type.
    bounds = tuple(jnp.asarray(bound, None if sampler == "randint" else dtype) for bound in bounds)
    how = {"sampler": sampler, "shape": sizes, "dtype": dtype, "mode": mode, "batched": (), "of_samples": False}
    return draw_primitive().bind(key_bits(key), *bounds, **how)


def _draw(
    operands: Sequence[Any], microbatch: Any, sampler: str, shape: Any, dtype: Any, mode: Any,
    batched: Sequence[Tuple[Any, ...]], of_samples: bool,
) -> Any:  # fmt: skip
    named = {} if mode is None else {"mode": mode}

    def one(key: Any, *bounds: Any) -> Any:
        if microbatch is not None and not of_samples:
            key = jnp.where(microbatch == 0, key, jax.random.fold_in(key, microbatch + _FIRST_MICROBATCH))
        stock = functools.partial(stock_samplers()[sampler], **named)
        if sampler == "randint":
            return stock(key, shape, *bounds, dtype)
        return stock(key, *bounds, shape, dtype) if sampler == "truncated_normal" else stock(key, shape, dtype, *bounds)

    for axes in batched:
        one = jax.vmap(one, in_axes=axes)
    return one(*operands)


def _batch_sizes(operands: Sequence[Any], batched: Sequence[Tuple[Optional[int], ...]]) -> Tuple[int, ...]:
    """Return the sizes of the axes that `vmap` put in front, outermost first."""
    shapes = [list(operand.shape) for operand in operands]
    sizes: List[int] = []
    for axes in reversed(batched):
        mapped = [shape.pop(axis) for shape, axis in zip(shapes, axes) if axis is not None]
        sizes.append(mapped[0])
    return tuple(sizes)


def _differentiate(operands: Sequence[Any], tangents: Sequence[Any], **how: Any) -> Tuple[Any, Any]:
    if not all(isinstance(tangent, Zero) for tangent in tangents):
        raise AlpaError(
            f"The bounds of jax.random.{how['sampler']} depend on what is differentiated.",
            "draw from fixed bounds, and scale and shift the result.",
        )
    result = draw_primitive().bind(*operands, **how)
    return result, zero_of(result)


def _results(microbatch: Any, operation: Operation, operands: Sequence[Any]) -> Sequence[Any]:
    if operation.name == DRAW:
        return [_draw(operands, microbatch, **operation.params)]
    if operation.name in LOOPS and any(each.primitive.name == DRAW for each in with_inner(operation.equation)):
        raise AlpaError(
            f"Random numbers are drawn inside a {operation.name}.",
            "draw them before the loop, for all its turns at once.",
        )
    return results_of(operation.equation.primitive, operation.params, operands)
