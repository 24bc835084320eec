"""Run compiled stages on the worker that holds their arrays, and time them alone."""

from __future__ import annotations

import functools
import time
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, Union

import jax
import jax.numpy as jnp
import numpy

from hwaware.compat.client import execute_sharded, load
from hwaware.compiler.layouts import Layout, alpa_spec, copied_spec
from hwaware.compiler.programs import Part, Reduction, SplitProgram, StageProgram, lower_function
from hwaware.runtime.memory import program_memory

_PROFILE_S = 0.5
_PROFILE_ROUNDS = 5


class StageExecutable:
    """A compiled stage.

    Args:
        worker: The worker whose buffers the stage reads and writes.
        uuid: Number of the executable.
        program: The program to compile, for all devices of the stage; the worker has some of these.
    """

    def __init__(self, worker: Any, uuid: int, program: StageProgram) -> None:
        self._worker = worker
        self._uuid = uuid
        self._program = program
        self.donated = program.donated
        self._compiled = load(program.stablehlo, worker.all_devices[: program.num_devices])
        self.memory = program_memory(self._compiled)

    def execute_on_worker(
        self, input_uuids: Sequence[Any], output_uuids: Sequence[Any], *_: Any, **kwargs: Any
    ) -> None:
        """Start the stage, and put its results under `output_uuids`, maybe before they are computed."""
        buffers = self._worker.buffers
        arrays = self._worker.held(input_uuids)  # samples take memory
        self._worker.account.check(self._program.name, self.memory, self._worker.stores())
        for index in self.donated:
            buffers.pop(input_uuids[index], None)  # one array may be donated under two names
        buffers.update(zip(output_uuids, self.run(arrays, time.monotonic(), **kwargs)))

    def run(
        self, arrays: Sequence[List[Any]], start_s: Optional[float] = None, microbatch: int = 0, **_: Any
    ) -> List[List[Any]]:
        """Start the stage, and return its results, maybe before they are computed.

        Args:
            arrays: The inputs, each as one array for each device.
            start_s: Time [s] at which the run began, for a recording; None to leave the run out.
            microbatch: Number of the microbatch.
        """
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
        results = execute_sharded(self._compiled, arrays, self._worker.all_devices, start_s is not None)
        if start_s is not None:
            self._worker.recorder.started(self._uuid, start_s, results.consume_token())
        shards: List[List[Any]] = results.disassemble_into_single_device_arrays()
        return shards

    def profile_with_dummy_inputs(self, *_: Any, **__: Any) -> List[float]:
        """Return wall times [s] of this stage alone on its devices, back to back, with made-up inputs."""
        arrays = [self.made_up(index) for index in range(len(self._program.arguments))]
        self._timed(arrays)  # the first run is slower
        return [self._timed(arrays) for _ in self.rounds()]

    def rounds(self) -> Iterable[Any]:
        """Return rounds for timing: until half a second has passed, or equally many on hosts that run together."""
        spans_hosts = self._program.num_devices > self._worker.num_devices
        return range(_PROFILE_ROUNDS) if spans_hosts else _until_enough()

    def _timed(self, arrays: List[List[Any]]) -> float:
        for index in self.donated:
            arrays[index] = self.made_up(index)
        start_s = time.perf_counter()
        for part in [part for result in self.run(arrays) for part in result]:
            part.block_until_ready()
        return time.perf_counter() - start_s

    def made_up(self, index: int) -> List[Any]:
        """Return a made-up argument of the right shape, as one array for each device of the worker."""
        shape, dtype = self._program.arguments[index]
        # A copy: an array put from NumPy may share its memory, which could not be donated.
        part, devices = numpy.full(shape, 0.5).astype(dtype), range(self._worker.num_devices)
        return [self._worker.put(part, device).copy().block_until_ready() for device in devices]

    def get_total_allocation_size(self) -> int:
        """Return the bytes of results and scratch memory, by XLA's own analysis."""
        return self.memory.output_bytes + self.memory.temporary_bytes

    def get_hlo_text(self) -> str:
        """Return the program before compilation."""
        return self._program.stablehlo


def warm_up(devices: Sequence[Any], local: Sequence[Any]) -> None:
    """Exchange values between the devices of several hosts, in every group that a mesh of these devices can have.

    Gloo gives hosts 30 s to form a group, counted from the first host. During a step, another host may compile for
    longer.

    Args:
        devices: The devices of all hosts; every host has to call this.
        local: The devices of this host.
    """
    count = len(devices)
    for rows in (rows for rows in range(1, count + 1) if count % rows == 0):
        columns = count // rows
        cut, copies = alpa_spec((0, 1), (rows, columns)), [copied_spec(rank, count) for rank in (1, 1, 0)]
        layout = Layout(count, (cut,), tuple(copies))
        aval = jax.ShapeDtypeStruct((rows, columns), "float32")
        program = lower_function(lambda x: [x.sum(0), x.sum(1), x.sum()], [aval], "warm up", layout)
        ones = [jax.device_put(numpy.ones((1, 1), "float32"), device) for device in local]
        results = execute_sharded(load(program.stablehlo, devices), [ones], devices, with_tokens=False)
        for result in results.disassemble_into_single_device_arrays():
            result[0].block_until_ready()


def _until_enough() -> Iterator[None]:
    """Yield until half a second and five rounds have passed: several periods of any CPU quota."""
    end_s = time.perf_counter() + _PROFILE_S
    count = 0
    while count < _PROFILE_ROUNDS or time.perf_counter() < end_s:
        yield
        count += 1


class ZeroBuffers:
    """Allocates gradient accumulators, on the devices.

    Args:
        worker: The worker whose buffers get the accumulators.
        shapes, dtypes: Shape and type of each accumulator on each device.
    """

    def __init__(self, worker: Any, shapes: Sequence[Sequence[int]], dtypes: Sequence[Any]) -> None:
        kinds = [(tuple(map(int, shape)), dtype) for shape, dtype in zip(shapes, dtypes)]
        count = len(worker.all_devices)
        # Every device has as much of an accumulator as any other, so XLA may take the parts for copies of each other.
        specs = tuple(copied_spec(len(shape), count) for shape, _ in kinds)
        layout = None if count == 1 else Layout(count, (), specs)
        program = lower_function(lambda: [jnp.zeros(shape, dtype) for shape, dtype in kinds], (), "zeros", layout)
        self._zeros = StageExecutable(worker, -1, program)

    def execute_on_worker(self, _: Sequence[Any], output_uuids: Sequence[Any], *__: Any, **___: Any) -> None:
        """Put new zeros under `output_uuids`."""
        self._zeros.execute_on_worker((), output_uuids)


class SplitExecutable:
    """A compiled stage in several parts; equal parts are compiled once.

    Args:
        worker: The worker whose buffers and `reducer` the stage uses.
        uuid: Number of the executable.
        program: The program to compile.
    """

    def __init__(self, worker: Any, uuid: int, program: SplitProgram) -> None:
        self._worker = worker
        self._program = program
        self.donated = program.donated
        compiled: Dict[str, StageExecutable] = {}
        self._executables: List[Optional[StageExecutable]] = []
        for step in program.steps:
            executable = None
            if isinstance(step, Part):
                executable = compiled.get(step.program.stablehlo) or StageExecutable(worker, uuid, step.program)
                compiled[step.program.stablehlo] = executable
            self._executables.append(executable)
        self._last_use = _last_uses(program)

    def execute_on_worker(
        self, input_uuids: Sequence[Any], output_uuids: Sequence[Any], *_: Any, **kwargs: Any
    ) -> None:
        """Run the parts, exchange values between these, and put the results under `output_uuids`."""
        buffers = self._worker.buffers
        slots = dict(enumerate(self._worker.held(input_uuids)))
        for index in self.donated:
            buffers.pop(input_uuids[index], None)  # one array may be donated under two names
        self._run(slots, **kwargs)
        for uuid, slot in zip(output_uuids, self._program.outputs):
            buffers[uuid] = slots[slot]

    def _run(self, slots: Dict[int, List[Any]], alone: bool = False, **kwargs: Any) -> None:
        """Run the parts on the values in the slots; with `alone`, exchange and record nothing."""
        start_s: Optional[float] = None
        for index, (step, executable) in enumerate(zip(self._program.steps, self._executables)):
            if isinstance(step, Reduction):
                slots[step.target] = slots[step.source] if alone else self._reduced(step, slots[step.source])
                start_s = None
            else:
                assert executable is not None  # made for every part
                stores = (*self._worker.stores(), slots)
                self._worker.account.check(self._program.name, executable.memory, stores)
                start_s = time.monotonic() if start_s is None else start_s
                recorded = start_s if self._ends(index) and not alone else None
                results = executable.run([slots[slot] for slot in step.inputs], start_s=recorded, **kwargs)
                slots.update(zip(step.outputs, results))
            for slot in self._last_use.get(index, ()):
                del slots[slot]

    def _ends(self, index: int) -> bool:
        """Return True for the last part before an exchange or the end; a recording joins the parts up to it."""
        return index + 1 == len(self._executables) or self._executables[index + 1] is None

    def _reduced(self, step: Reduction, arrays: List[Any]) -> List[Any]:
        value = numpy.asarray(arrays[0])  # waits until it is computed
        result = self._worker.reducer.reduce(step.group, step.operation, value)
        return [self._worker.put(numpy.asarray(result, value.dtype), index) for index in range(len(arrays))]

    def profile_with_dummy_inputs(self, **_: Any) -> List[float]:
        """Return wall times [s] of all parts alone on their devices, back to back, without the exchanges."""
        first = next((executable for executable in self._executables if executable is not None), None)
        if first is None:  # nothing but exchanges
            return [0.0]
        makers = self._makers()
        arrays = {slot: make() for slot, make in makers.items()}
        times = []
        for _turn in first.rounds():
            arrays.update((slot, makers[slot]()) for slot in self._program.donated if slot in makers)
            times.append(self._timed(dict(arrays)))
        return times[1:]  # the first run is slower

    def _makers(self) -> Dict[int, Callable[[], List[Any]]]:
        """Return a function that makes up an input, for each input that a part reads."""
        makers: Dict[int, Callable[[], List[Any]]] = {}
        written = {slot for step in self._program.steps for slot in _writes(step)}
        for step, executable in zip(self._program.steps, self._executables):
            if isinstance(step, Part) and executable is not None:
                for position, slot in enumerate(step.inputs):
                    if slot not in written:
                        makers.setdefault(slot, functools.partial(executable.made_up, position))
        return makers

    def _timed(self, slots: Dict[int, List[Any]]) -> float:
        start_s = time.perf_counter()
        self._run(slots, alone=True)
        for array in (part for arrays in slots.values() for part in arrays):
            array.block_until_ready()
        return time.perf_counter() - start_s

    def get_total_allocation_size(self) -> int:
        """Return the bytes of results and scratch memory of the largest part, by XLA's own analysis."""
        parts = (executable for executable in self._executables if executable is not None)
        return max((executable.get_total_allocation_size() for executable in parts), default=0)

    def get_hlo_text(self) -> str:
        """Return the programs before compilation."""
        return self._program.stablehlo


def _writes(step: Union[Part, Reduction]) -> Tuple[int, ...]:
    return (step.target,) if isinstance(step, Reduction) else step.outputs


def _last_uses(program: SplitProgram) -> Dict[int, List[int]]:
    """Return the slots that nothing reads after a step, by the step's index."""
    last: Dict[int, int] = {}
    for index, step in enumerate(program.steps):
        read = (step.source,) if isinstance(step, Reduction) else step.inputs
        last.update(dict.fromkeys([*read, *_writes(step)], index))
    by_step: Dict[int, List[int]] = {}
    for slot, index in last.items():
        if slot not in program.outputs:
            by_step.setdefault(index, []).append(slot)
    return by_step
