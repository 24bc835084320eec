"""Stage programs: what the driver lowers and a worker compiles."""

from __future__ import annotations

import time
import types
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from hwaware.runtime import randomness
from hwaware.runtime.layouts import COPIES, Layout
from hwaware.runtime.memory import program_memory

_PROFILE_S = 0.5
_PROFILE_ROUNDS = 5


class StageProgram(NamedTuple):
    """One stage as StableHLO text: it can be pickled, and every back end compiles it.

    Alpa carries it where its own compiler would have put a partitioned HLO module.

    Attributes:
        name: The stage's.
        stablehlo: The program, for whole arrays; with several devices, it says how arguments and results are split.
        arguments: (shape, dtype) of what one device has of each of the stage's inputs.
        donated: Inputs that are gone after a run, because results take over their memory.
        num_devices: The stage's.
        takes_microbatch: Whether it has one more argument, the number of the microbatch, for random numbers.
    """

    name: str
    stablehlo: str
    arguments: Tuple[Tuple[Tuple[int, ...], str], ...] = ()
    donated: Tuple[int, ...] = ()
    num_devices: int = 1
    takes_microbatch: bool = False

    def to_string(self) -> str:
        """The text of the program, under the name that Alpa's driver asks for."""
        return self.stablehlo


def lower(
    closed_jaxpr: Any,
    name: str,
    donated: Mapping[int, int] = types.MappingProxyType({}),
    layout: Optional[Layout] = None,
    microbatched: bool = False,
) -> StageProgram:
    """Lower a stage's jaxpr; every argument is kept, also unused ones, because Alpa passes them all.

    Args:
        closed_jaxpr: The stage.
        name: The stage's.
        donated: Input -> the output that takes over its memory. Alpa pairs by shape alone; where the types differ, the
            input's memory is freed instead.
        layout: How arguments and results are split over several devices.
        microbatched: Whether it runs once a microbatch, not once a step.
    """
    from hwaware.compat.programs import jaxpr_as_fun

    takes_microbatch = False
    if randomness.draws(closed_jaxpr):
        closed_jaxpr, takes_microbatch = randomness.resolved(closed_jaxpr, microbatched), microbatched
        layout = layout.with_number() if layout is not None and takes_microbatch else layout
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
    """The same for a function of arrays of the shapes and types of `avals`, of which results take over `pairs`."""
    import jax

    arguments = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    module = jax.jit(function, keep_unused=True).lower(*arguments).compiler_ir("stablehlo")
    _alias(module, pairs)
    shapes: Sequence[Tuple[int, ...]] = [tuple(aval.shape) for aval in avals]
    if layout is not None:
        _annotate(module, layout)
        shapes = layout.shapes
    kinds = tuple((shape, str(aval.dtype)) for shape, aval in zip(shapes, avals))
    return StageProgram(name, str(module), kinds, num_devices=1 if layout is None else layout.num_devices)


def _annotate(module: Any, layout: Layout) -> None:
    """Write the shardings where jit writes them; jit itself would want the devices to be here."""
    from hwaware.compat.lowering import ir

    main = next(operation for operation in module.body.operations if operation.name.value == "main")
    with module.context:
        for name, shardings in (("arg_attrs", layout.inputs), ("res_attrs", layout.outputs)):
            found = [_named(entry) for entry in ir.ArrayAttr(main.attributes[name])] if name in main.attributes else []
            entries = found or [{} for _ in shardings]
            texts = [{"mhlo.sharding": ir.StringAttr.get(text)} for text in shardings]
            attributes = [ir.DictAttr.get({**entry, **text}) for entry, text in zip(entries, texts)]
            main.attributes[name] = ir.ArrayAttr.get(attributes)
        count = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), layout.num_devices)
        module.operation.attributes["mhlo.num_partitions"] = count


def _alias(module: Any, pairs: Mapping[int, int]) -> None:
    """Mark in the program which result takes over the memory of which input."""
    from hwaware.compat.lowering import ir

    main = next(operation for operation in module.body.operations if operation.name.value == "main")
    with module.context:
        attributes = [
            {
                **_named(attribute),
                "tf.aliasing_output": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), pairs[index]),
            }
            if index in pairs
            else _named(attribute)
            for index, attribute in enumerate(main.arg_attrs)
        ]
        main.arg_attrs = ir.ArrayAttr.get([ir.DictAttr.get(each) for each in attributes])


def _named(attribute: Any) -> Dict[str, Any]:
    from hwaware.compat.lowering import ir

    return {entry.name: entry.attr for entry in ir.DictAttr(attribute)}


class StageExecutable:
    """A compiled stage.

    Args:
        worker: Whose buffers it reads and writes.
        uuid: Its number.
        program: What to compile; it is for all devices of the stage, of which the worker has some.
    """

    def __init__(self, worker: Any, uuid: int, program: StageProgram) -> None:
        from hwaware.compat.client import load

        self._worker = worker
        self._uuid = uuid
        self._program = program
        self._compiled = load(program.stablehlo, worker.all_devices[: program.num_devices])
        self.memory = program_memory(self._compiled)

    def execute_on_worker(
        self, input_uuids: Sequence[Any], output_uuids: Sequence[Any], *_: Any, **kwargs: Any
    ) -> None:
        """Start the stage; its results are put under `output_uuids` and may still be computing."""
        self._worker.account.check(self._program.name, self.memory, self._worker.stores())
        buffers = self._worker.buffers
        arrays = [buffers[uuid] for uuid in input_uuids]
        for index in self._program.donated:
            buffers.pop(input_uuids[index], None)  # one array may be donated under two names
        buffers.update(zip(output_uuids, self.run(arrays, time.monotonic(), **kwargs)))

    def run(
        self, arrays: Sequence[List[Any]], start_s: Optional[float] = None, microbatch: int = 0, **_: Any
    ) -> List[List[Any]]:
        """Start the stage on arrays (one per device each); returns its results, which may still be computing.

        Args:
            arrays: Its inputs.
            start_s: Where a recording shall say that it began; None to leave it out.
            microbatch: The microbatch's number.
        """
        import numpy

        operands = list(arrays)
        if self._program.takes_microbatch:
            number = numpy.int32(microbatch)
            operands.append([self._worker.put(number, device) for device in range(self._worker.num_devices)])
        start = self._started if self._program.num_devices == 1 else self._started_on_all
        results = start(operands, start_s if self._worker.recorder.is_on else None)
        self._worker.newest = [part for result in results for part in result]
        return results

    def _started(self, arrays: Sequence[List[Any]], start_s: Optional[float]) -> List[List[Any]]:
        arguments = [array[0] for array in arrays]
        if start_s is None:
            return [[result] for result in self._compiled.execute(arguments)]
        results, token = self._compiled.execute_with_token(arguments)
        self._worker.recorder.started(self._uuid, start_s, token)
        return [[result] for result in results]

    def _started_on_all(self, arrays: Sequence[List[Any]], start_s: Optional[float]) -> List[List[Any]]:
        from hwaware.compat.client import execute_sharded

        results = execute_sharded(self._compiled, arrays, self._worker.all_devices, start_s is not None)
        if start_s is not None:
            self._worker.recorder.started(self._uuid, start_s, results.consume_token())
        shards: List[List[Any]] = results.disassemble_into_single_device_arrays()
        return shards

    def profile_with_dummy_inputs(self, *_: Any, **__: Any) -> List[float]:
        """Wall times [s] of this stage alone on its device, back to back, with made-up inputs."""
        arrays = [self.made_up(index) for index in range(len(self._program.arguments))]
        self._timed(arrays)  # the first run is slower
        return [self._timed(arrays) for _ in self.rounds()]

    def rounds(self) -> Iterable[Any]:
        """How often it is timed alone: for half a second, or where hosts run it together, all of them equally often."""
        spans_hosts = self._program.num_devices > self._worker.num_devices
        return range(_PROFILE_ROUNDS) if spans_hosts else _until_enough()

    def _timed(self, arrays: List[List[Any]]) -> float:
        for index in self._program.donated:
            arrays[index] = self.made_up(index)
        start_s = time.perf_counter()
        for part in [part for result in self.run(arrays) for part in result]:
            part.block_until_ready()
        return time.perf_counter() - start_s

    def made_up(self, index: int) -> List[Any]:
        """An argument of the right shape, one array for each device of the worker."""
        import numpy

        shape, dtype = self._program.arguments[index]
        # A copy: an array put from NumPy may share its memory, which could not be donated.
        part, devices = numpy.full(shape, 0.5).astype(dtype), range(self._worker.num_devices)
        return [self._worker.put(part, device).copy().block_until_ready() for device in devices]

    def get_total_allocation_size(self) -> int:
        """Bytes of results and scratch memory, by XLA's own analysis."""
        return self.memory.output_bytes + self.memory.temporary_bytes

    def get_hlo_text(self) -> str:
        """The program before compilation."""
        return self._program.stablehlo


def warm_up(devices: Sequence[Any], local: Sequence[Any]) -> None:
    """Let the devices of several hosts exchange something in every group that a mesh of theirs can have.

    Gloo gives the hosts 30 s to form a group, counted from the first of them: later, one may still be compiling.

    Args:
        devices: Of all hosts; every host has to call this.
        local: Those of this host.
    """
    import jax
    import numpy

    from hwaware.compat.client import execute_sharded, load

    count = len(devices)
    for rows in (rows for rows in range(1, count + 1) if count % rows == 0):
        columns = count // rows
        order = ",".join(map(str, range(count)))
        layout = Layout(count, (f"{{devices=[{rows},{columns}]{order}}}",), ("{replicated}",) * 3, ((1, 1),))
        aval = jax.ShapeDtypeStruct((rows, columns), "float32")
        program = lower_function(lambda x: [x.sum(0), x.sum(1), x.sum()], [aval], "warm up", layout)
        ones = [jax.device_put(numpy.ones((1, 1), "float32"), device) for device in local]
        results = execute_sharded(load(program.stablehlo, devices), [ones], devices, with_tokens=False)
        for result in results.disassemble_into_single_device_arrays():
            result[0].block_until_ready()


def _until_enough() -> Iterator[None]:
    """Goes on until half a second and five rounds have passed: several periods of any CPU quota."""
    end_s = time.perf_counter() + _PROFILE_S
    count = 0
    while count < _PROFILE_ROUNDS or time.perf_counter() < end_s:
        yield
        count += 1


class ZeroBuffers:
    """Allocates gradient accumulators, on the device.

    Args:
        worker: Whose buffers it writes.
        shapes, dtypes: Of each accumulator on each device.
    """

    def __init__(self, worker: Any, shapes: Sequence[Sequence[int]], dtypes: Sequence[Any]) -> None:
        import jax.numpy as jnp

        kinds = [(tuple(map(int, shape)), dtype) for shape, dtype in zip(shapes, dtypes)]
        count = len(worker.all_devices)
        # Every device has as much of an accumulator as any other, so to XLA they may be copies of each other.
        layout = None if count == 1 else Layout(count, (), (COPIES,) * len(kinds), ())
        program = lower_function(lambda: [jnp.zeros(shape, dtype) for shape, dtype in kinds], (), "zeros", layout)
        self._zeros = StageExecutable(worker, -1, program)

    def execute_on_worker(self, _: Sequence[Any], output_uuids: Sequence[Any], *__: Any, **___: Any) -> None:
        """Put new zeros under `output_uuids`."""
        self._zeros.execute_on_worker((), output_uuids)
