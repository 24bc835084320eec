"""Random numbers in a pipelined program: the same for the same key and microbatch, wherever and how often computed.

Alpa replaces the samplers of `jax.random` by generators with a state on the device and drops the key. On stock XLA
such numbers depend on the placement, and a rematerialised backward pass would draw other ones than its forward pass.
Here a draw stays what it is in plain JAX, a function of its key, and the number of the microbatch is folded into the
key:

- every microbatch gets its own numbers from one key; the first gets those of plain JAX, and so does a program of one
  microbatch or a draw in the update;
- forward and backward pass agree, also rematerialised ones, also if Alpa computes an operation on several stages;
- numbers depend neither on the placement nor on what ran before, so a restored checkpoint goes on with the same ones.
  The step is not folded in: keep a key in the state and split it, or fold the step's number in, as in plain JAX. Alpa
  wants the next step's key computed after the gradients, like everything else that the loss does not use.

The samplers meant are `uniform`, `normal`, `truncated_normal`, `gumbel` and all of `jax.random` that build on them, as
`bernoulli` (dropout), given keys of `jax.random.PRNGKey`. A draw inside `lax.while_loop`, `scan` or `cond` is refused
where JAX keeps the loop (Alpa traces with jit off, which unrolls most).
"""

from __future__ import annotations

import functools
from typing import Any, Dict, List, Optional, Sequence, Tuple

from hwaware.compat.jaxprs import LOOPS, inner_programs, is_literal, open_jaxpr
from hwaware.errors import AlpaError

DRAW = "hwaware_draw"
# Other samplers call these; newer JAX has `gumbel` draw bits itself.
SAMPLERS = ("uniform", "normal", "truncated_normal", "gumbel")
# Beside this number folded in by a program itself, a microbatch's would be the same key.
_FIRST_MICROBATCH = 0x68770000


@functools.lru_cache(maxsize=None)
def stock_samplers() -> Dict[str, Any]:
    """JAX's own samplers by name; call it before they are replaced."""
    import jax

    return {name: getattr(jax.random, name) for name in SAMPLERS}


@functools.lru_cache(maxsize=None)
def draw_primitive() -> Any:
    """Return the operation that stands for a draw in a traced program."""
    from hwaware.compat.programs import Primitive, ShapedArray, primitive_batchers, primitive_jvps

    stock_samplers()
    primitive = Primitive(DRAW)
    primitive.def_impl(lambda *operands, **how: _draw(operands, None, **how))
    primitive.def_abstract_eval(
        lambda *operands, shape, dtype, batched, **_: ShapedArray(_batch_sizes(operands, batched) + shape, dtype)
    )
    primitive_batchers[primitive] = _batch
    primitive_jvps[primitive] = _differentiate
    return primitive


def uniform(
    key: Any, shape: Any = (), dtype: Any = float, minval: Any = 0.0, maxval: Any = 1.0, *, out_sharding: Any = None
) -> Any:
    """As `jax.random.uniform`, while Alpa traces."""
    return _bind("uniform", key, shape, dtype, minval, maxval, out_sharding=out_sharding)


def normal(key: Any, shape: Any = (), dtype: Any = float, *, out_sharding: Any = None) -> Any:
    """As `jax.random.normal`, while Alpa traces."""
    return _bind("normal", key, shape, dtype, out_sharding=out_sharding)


def truncated_normal(
    key: Any, lower: Any, upper: Any, shape: Any = None, dtype: Any = float, *, out_sharding: Any = None
) -> Any:
    """As `jax.random.truncated_normal`, while Alpa traces."""
    import numpy

    shape = numpy.broadcast_shapes(numpy.shape(lower), numpy.shape(upper)) if shape is None else shape
    return _bind("truncated_normal", key, shape, dtype, lower, upper, out_sharding=out_sharding)


def gumbel(key: Any, shape: Any = (), dtype: Any = float, mode: Any = None, *, out_sharding: Any = None) -> Any:
    """As `jax.random.gumbel`, while Alpa traces; older JAX knows no `mode`."""
    return _bind("gumbel", key, shape, dtype, mode=mode, out_sharding=out_sharding)


def draws(jaxpr: Any) -> bool:
    """Whether a program, or one that it calls, draws random numbers."""
    return any(
        equation.primitive.name == DRAW or any(map(draws, inner_programs(equation)))
        for equation in open_jaxpr(jaxpr).eqns
    )


def resolved(closed_jaxpr: Any, microbatched: bool) -> Any:
    """Return the program with its draws written out in JAX's own operations.

    Args:
        closed_jaxpr: A stage.
        microbatched: Whether it runs once a microbatch; it then has one more argument, the microbatch's number.

    Raises:
        AlpaError: A draw is inside a loop.
    """
    import jax

    def program(*arguments: Any) -> Sequence[Any]:
        number = arguments[-1] if microbatched else None
        values = arguments[:-1] if microbatched else arguments
        return _evaluate(closed_jaxpr.jaxpr, closed_jaxpr.consts, values, number)

    extra = [jax.ShapeDtypeStruct((), "int32")] if microbatched else []
    arguments = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in closed_jaxpr.in_avals]
    return jax.make_jaxpr(program)(*arguments, *extra)


def _bind(
    sampler: str, key: Any, shape: Any, dtype: Any, *bounds: Any, out_sharding: Any = None, mode: Any = None
) -> Any:
    import jax
    import jax.numpy as jnp

    from hwaware.compat.programs import key_bits

    if out_sharding is not None:
        raise AlpaError(
            f"jax.random.{sampler} is given out_sharding={out_sharding}, but shardings inside a pipeline are chosen "
            "for each stage.",
            "leave out_sharding out.",
        )
    dtype = jax.dtypes.canonicalize_dtype(float if dtype is None else dtype)
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    bounds = tuple(jnp.asarray(bound, dtype) for bound in bounds)
    how = {"sampler": sampler, "shape": sizes, "dtype": dtype, "mode": mode, "batched": ()}
    return draw_primitive().bind(key_bits(key), *bounds, **how)


def _draw(
    operands: Sequence[Any],
    microbatch: Any,
    sampler: str,
    shape: Any,
    dtype: Any,
    mode: Any,
    batched: Sequence[Tuple[Any, ...]],
) -> Any:
    import jax

    named = {} if mode is None else {"mode": mode}

    def one(key: Any, *bounds: Any) -> Any:
        key = key if microbatch is None else _folded(key, microbatch)
        stock = functools.partial(stock_samplers()[sampler], **named)
        return stock(key, *bounds, shape, dtype) if sampler == "truncated_normal" else stock(key, shape, dtype, *bounds)

    for axes in batched:
        one = jax.vmap(one, in_axes=axes)
    return one(*operands)


def _folded(key: Any, microbatch: Any) -> Any:
    import jax
    import jax.numpy as jnp

    return jnp.where(microbatch == 0, key, jax.random.fold_in(key, microbatch + _FIRST_MICROBATCH))


def _batch(operands: Sequence[Any], axes: Tuple[Optional[int], ...], batched: Any, **how: Any) -> Tuple[Any, int]:
    return draw_primitive().bind(*operands, batched=(*batched, tuple(axes)), **how), 0


def _batch_sizes(operands: Sequence[Any], batched: Sequence[Tuple[Optional[int], ...]]) -> Tuple[int, ...]:
    """Sizes of the axes that `vmap` put in front, outermost first."""
    shapes = [list(operand.shape) for operand in operands]
    sizes: List[int] = []
    for axes in reversed(batched):
        mapped = [shape.pop(axis) for shape, axis in zip(shapes, axes) if axis is not None]
        sizes.append(mapped[0])
    return tuple(sizes)


def _differentiate(operands: Sequence[Any], tangents: Sequence[Any], **how: Any) -> Tuple[Any, Any]:
    from hwaware.compat.programs import Zero, zero_of

    if not all(isinstance(tangent, Zero) for tangent in tangents):
        raise AlpaError(
            f"The bounds of jax.random.{how['sampler']} depend on what is differentiated.",
            "draw from fixed bounds, and scale and shift the result.",
        )
    result = draw_primitive().bind(*operands, **how)
    return result, zero_of(result)


def _evaluate(jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any], microbatch: Any) -> List[Any]:
    values: Dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments]))

    def read(variable: Any) -> Any:
        return variable.val if is_literal(variable) else values[variable]

    for equation in jaxpr.eqns:
        results = _evaluate_equation(equation, [read(variable) for variable in equation.invars], microbatch)
        values.update(zip(equation.outvars, results))
    return [read(variable) for variable in jaxpr.outvars]


def _evaluate_equation(equation: Any, operands: List[Any], microbatch: Any) -> Sequence[Any]:
    from hwaware.compat.programs import results_of

    if equation.primitive.name == DRAW:
        return [_draw(operands, microbatch, **equation.params)]
    for program in inner_programs(equation):
        if draws(program):
            _require_called_once(equation)
            return _evaluate(open_jaxpr(program), getattr(program, "consts", ()), operands, microbatch)
    return results_of(equation.primitive, equation.params, operands)


def _require_called_once(equation: Any) -> None:
    if equation.primitive.name in LOOPS:
        raise AlpaError(
            f"Random numbers are drawn inside a {equation.primitive.name}.",
            "draw them before the loop, for all its turns at once.",
        )
