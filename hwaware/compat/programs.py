"""Trace programs, build jaxprs, run their equations, and define hwaware's own primitives."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any, Callable, Dict, List, Sequence, Tuple

import jax
import jax.numpy as jnp
import numpy
from jax import lax
from jax.interpreters import ad, batching

from hwaware.compat.lowering import lower_fun, register_lowering

try:
    from jax._src import core, linear_util
    from jax._src.array import ArrayImpl as ArrayImpl
    from jax._src.interpreters import partial_eval
except ImportError:  # Alpa's own JAX, 0.3.22
    from jax import core, linear_util
    from jax.interpreters import partial_eval

Primitive, ShapedArray, JaxprEqn, Tracer = core.Primitive, core.ShapedArray, core.JaxprEqn, core.Tracer
# Newer JAX warns of a jaxpr that does not say where it comes from. If it defines
# `initial_result_paths`, it takes None for unknown names.
_WARNS = hasattr(linear_util, "_missing_debug_info")
_UNKNOWN = (None, None) if hasattr(linear_util, "initial_result_paths") else ((), ())
_ORIGIN = {"debug_info": linear_util.DebugInfo("alpa", "part", *_UNKNOWN)} if _WARNS else {}
Jaxpr = functools.partial(core.Jaxpr, **_ORIGIN)
ClosedJaxpr = getattr(core, "ClosedJaxpr", core.Jaxpr)
jaxpr_as_fun = core.jaxpr_as_fun
copy_p = lax.copy_p if hasattr(lax, "copy_p") else __import__("jax._src.lax.lax", fromlist=["_"]).copy_p
primitive_batchers, primitive_jvps, Zero = batching.primitive_batchers, ad.primitive_jvps, ad.Zero


def zero_of(value: Any) -> Any:
    """Return the tangent of a value that does not depend on what is differentiated."""
    return (getattr(Zero, "from_primal_value", None) or Zero.from_value)(value)


def take_values_of(*kinds: type) -> None:
    """Let JAX's functions take objects of these types, whose attribute `_value` is their array."""
    from jax._src.interpreters import pxla

    take = pxla.shard_arg_handlers[numpy.ndarray]

    def taken(given: Any, *rest: Any) -> Any:  # newer JAX gives several objects at once
        return take([one._value for one in given] if isinstance(given, (list, tuple)) else given._value, *rest)

    pxla.shard_arg_handlers.update(dict.fromkeys(kinds, taken))


def wrap_init(function: Callable[..., Any], params: Any = None, **_: Any) -> Any:
    """Return a function in the form that JAX's transformations pass on; newer JAX also wants to know its origin."""
    if "debug_info" not in inspect.signature(linear_util.wrap_init).parameters:
        return linear_util.wrap_init(function, params)
    name = getattr(function, "__name__", "function")
    return linear_util.wrap_init(function, params, debug_info=linear_util.DebugInfo("alpa", name, None, None))


def trace(function: Any, avals: Sequence[Any], *_: Any, **__: Any) -> Tuple[Any, Any, Any]:
    """Return (jaxpr, avals of results, constants) of a function that `wrap_init` wrapped."""
    if hasattr(function, "f_transformed"):
        # Newer JAX applies the transformations ahead; for inference, Alpa puts another function under them afterwards.
        function.f_transformed = function.f
        for (transformation, given), store in zip(reversed(function.transforms), reversed(function.stores)):
            own = given if store is None else (store, *given)
            function.f_transformed = functools.partial(transformation, function.f_transformed, *own)
    return partial_eval.trace_to_jaxpr_dynamic(function, list(avals))[:3]  # type: ignore[no-any-return]


def make_jaxpr(*given: Any, **options: Any) -> Callable[..., Any]:
    """Return a function that traces as JAX does, but turns results that are numbers into arrays, as Alpa expects.

    Alpa gives the option `return_shape`. Newer JAX has numbers of its own, with a data type. Alpa makes a zero of a
    constant's type, which fails for these.
    """

    def traced(*args: Any) -> Tuple[Any, Any]:
        closed, shapes = jax.make_jaxpr(*given, **options)(*args)
        results = [_array_of(variable) for variable in closed.jaxpr.outvars]
        jaxpr = closed.jaxpr.replace(outvars=results)
        return jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, closed.consts), shapes

    return traced


def _array_of(variable: Any) -> Any:
    """Return a number with a data type as a constant array, and any other result as it is."""
    value = getattr(variable, "val", None)
    if not isinstance(value, (int, float, complex)) or not hasattr(value, "dtype"):
        return variable
    return core.Literal(numpy.asarray(value, value.dtype), variable.aval)


def gensym(jaxprs: Any = None, suffix: str = "") -> Callable[[Any], Any]:
    """Return a function that makes new variables; older JAX took the jaxprs whose names to avoid."""
    given = {"jaxprs": jaxprs, "suffix": suffix}
    known = inspect.signature(core.gensym).parameters
    return core.gensym(**{name: given[name] for name in known if name in given})  # type: ignore[no-any-return]


def bind(primitive: Any, params: Dict[str, Any], operands: Sequence[Any]) -> Any:
    """Apply an equation's primitive, with the parameters that the equation has, to operands."""
    found = primitive.get_bind_params(params)
    functions, named = found if isinstance(found, tuple) else ((), found)  # newer JAX has all among the parameters
    return primitive.bind(*functions, *operands, **named)


def results_of(primitive: Any, params: Dict[str, Any], operands: Sequence[Any]) -> Sequence[Any]:
    """Return what `bind` returns as a list, even if it is one value."""
    results = bind(primitive, params, operands)
    return results if primitive.multiple_results else [results]


@functools.lru_cache(maxsize=None)
def named_call_primitive() -> Any:
    """Return the primitive by which Alpa calls a part of a program; newer JAX has none of this kind."""

    def call(*operands: Any, call_jaxpr: Any, **_: Any) -> List[Any]:
        return core.eval_jaxpr(call_jaxpr, (), *operands)  # type: ignore[no-any-return]

    primitive = Primitive("named_call")
    primitive.multiple_results = True
    primitive.def_impl(call)
    primitive.def_abstract_eval(lambda *_, call_jaxpr, **__: [variable.aval for variable in call_jaxpr.outvars])
    register_lowering(primitive, lower_fun(call, multiple_results=True))
    return primitive


def get_aval(value: Any) -> Any:
    """Return the abstract value of a value."""
    return core.get_aval(value) if hasattr(core, "get_aval") else core.typeof(value)


def canonicalized(value: Any) -> Any:
    """Return a NumPy array or number in a type that JAX computes with, as float32 for float64; others unchanged."""
    if not isinstance(value, (numpy.ndarray, numpy.generic, bool, int, float, complex)):
        return value
    return numpy.asarray(value, jnp.result_type(value))


def random_modules() -> List[Any]:
    """Return the modules in which programs, and the samplers of `jax.random` themselves, look samplers up."""
    import jax.random  # noqa: F401

    names = ("jax.random", "jax._src.random", "jax._src.random.core")
    return [sys.modules[name] for name in names if name in sys.modules]


def key_bits(key: Any) -> Any:
    """Return a random key as an array of uint32."""
    if jax.dtypes.issubdtype(key.dtype, numpy.uint32):
        return key
    if hasattr(jax.random, "key_data"):
        return jax.random.key_data(key)
    from jax._src import prng

    return prng.random_unwrap(key)
