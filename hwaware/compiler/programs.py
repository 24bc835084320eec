"""Describe a stage's program, which the driver lowers and a worker compiles: one program, or parts that run in order.

Values between parts live in slots. The stage's inputs have the slots 0, 1, ..., and every value that outlives its part
gets the next number.
"""

from __future__ import annotations

import types
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import jax

from hwaware.compat.lowering import annotate
from hwaware.compat.programs import jaxpr_as_fun
from hwaware.compiler import randomness
from hwaware.compiler.layouts import Layout, copied_spec
from hwaware.errors import AlpaError

# Parts of the names by which StableHLO calls Python, in all versions of JAX.
_CALLS_OF_PYTHON = ("python_cpu_callback", "python_gpu_callback")


class StageProgram(NamedTuple):
    """Hold one stage as StableHLO text, which every process can pickle and every back end compiles.

    Alpa carries it where its own compiler would have put a partitioned HLO module.

    Attributes:
        name: The name of the stage.
        stablehlo: The program, for whole arrays; with several devices, it says how arguments and results are split.
        arguments: (shape, dtype) of one device's part of each of the stage's inputs.
        donated: The places of inputs that are gone after a run, because results take over their memory.
        num_devices: The number of the stage's devices.
        takes_microbatch: True if it has one more argument, the number of the microbatch, for random numbers.
    """

    name: str
    stablehlo: str
    arguments: Tuple[Tuple[Tuple[int, ...], str], ...] = ()
    donated: Tuple[int, ...] = ()
    num_devices: int = 1
    takes_microbatch: bool = False


class Reduction(NamedTuple):
    """Describe a value that all meshes of a group combine.

    Attributes:
        source, target: The slots of this mesh's value and of the result.
        operation: "add", "and", "or", "max" or "min".
        group: The name of the group of meshes; see `group_name`.
    """

    source: int
    target: int
    operation: str
    group: str


def group_name(meshes: Sequence[int]) -> str:
    """Return the name of a group of meshes, whatever their order; Alpa spells it the same way.

    Example:
        >>> group_name([2, 0])
        'reduce 0$2$'
    """
    return "reduce " + "".join(f"{mesh}$" for mesh in sorted(meshes))


class Part(NamedTuple):
    """Hold equations that a mesh runs as one program.

    Attributes:
        program: The program to run.
        inputs, outputs: The slots that it reads and writes, in the order of its arguments and results.
    """

    program: StageProgram
    inputs: Tuple[int, ...]
    outputs: Tuple[int, ...]


class SplitProgram(NamedTuple):
    """Hold a stage in parts, where Alpa's own compiler would have put one partitioned HLO module.

    Attributes:
        name: The name of the stage.
        steps: Parts and reductions in the order in which they run.
        outputs: The slots of the stage's results.
        donated: The places of inputs that are gone after a run, because results take over their memory.
    """

    name: str
    steps: Tuple[Union[Part, Reduction], ...]
    outputs: Tuple[int, ...]
    donated: Tuple[int, ...] = ()

    @property
    def stablehlo(self) -> str:
        """Return the text of all parts, for people."""
        return "\n".join(step.program.stablehlo for step in self.steps if isinstance(step, Part))


def lower(
    closed_jaxpr: Any,
    name: str,
    donated: Mapping[int, int] = types.MappingProxyType({}),
    layout: Optional[Layout] = None,
    microbatched: bool = False,
) -> StageProgram:
    """Lower a stage's jaxpr. Keep every argument, also unused ones, because Alpa passes them all.

    Args:
        closed_jaxpr: The stage's jaxpr.
        name: The name of the stage.
        donated: Input -> the output that takes over its memory. Alpa pairs by shape alone. If types or shardings
            differ, the input's memory is freed instead.
        layout: The sharding of arguments and results over several devices.
        microbatched: True if the stage runs once a microbatch, not once a step.
    """
    takes_microbatch = False
    if randomness.draws(closed_jaxpr):
        closed_jaxpr, takes_microbatch = randomness.resolved(closed_jaxpr, microbatched), microbatched
        if layout is not None and takes_microbatch:  # every device has the number
            layout = layout._replace(inputs=(*layout.inputs, copied_spec(0, layout.num_devices)))
    inputs, outputs = closed_jaxpr.in_avals, closed_jaxpr.out_avals
    pairs = {
        source: target
        for source, target in donated.items()
        if (inputs[source].shape, inputs[source].dtype) == (outputs[target].shape, outputs[target].dtype)
        and (layout is None or layout.inputs[source] == layout.outputs[target])
    }
    program = lower_function(jaxpr_as_fun(closed_jaxpr), inputs, name, layout, pairs)
    kinds = program.arguments[: len(inputs) - takes_microbatch]
    return program._replace(arguments=kinds, donated=tuple(donated), takes_microbatch=takes_microbatch)


def lower_function(
    function: Callable[..., Any],
    avals: Sequence[Any],
    name: str,
    layout: Optional[Layout],
    pairs: Mapping[int, int] = types.MappingProxyType({}),
) -> StageProgram:
    """Lower a function of arrays like `avals`; results take over the memory of arguments by `pairs`.

    Raises:
        AlpaError: The function calls Python: its address is one of this process, and another process would crash.
    """
    arguments = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    module = jax.jit(function, keep_unused=True).lower(*arguments).compiler_ir("stablehlo")
    shapes: Sequence[Tuple[int, ...]] = [tuple(aval.shape) for aval in avals]
    annotate(module, pairs, *(layout or ()))
    text = str(module)
    if any(call in text for call in _CALLS_OF_PYTHON):
        raise AlpaError(
            "The step calls a Python function of this process (jax.pure_callback, jax.experimental.io_callback, or "
            "jax.debug.print inside a loop or branch), but other processes run the stages.",
            "compute the value by operations of JAX, or outside the step, and give it to the step as an argument. "
            "Return values to print from the step.",
        )
    if layout is not None:
        shapes = [spec.part(shape) for spec, shape in zip(layout.inputs, shapes)]
    kinds = tuple((shape, str(aval.dtype)) for shape, aval in zip(shapes, avals))
    return StageProgram(name, text, kinds, num_devices=1 if layout is None else layout.num_devices)
