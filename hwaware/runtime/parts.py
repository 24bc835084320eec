"""Stage programs in parts, which run one after the other: a stage's layers, or what lies between all-reduces.

Values live in slots: the stage's inputs are slots 0, 1, ..., and every value that outlives its part has the next
number.
"""

from __future__ import annotations

import functools
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from hwaware.runtime.programs import StageExecutable, StageProgram
from hwaware.runtime.reductions import Reduction


class Part(NamedTuple):
    """Equations that a mesh runs as one program.

    Attributes:
        program: What to run.
        inputs, outputs: The slots that it reads and writes, in the order of its arguments and results.
    """

    program: StageProgram
    inputs: Tuple[int, ...]
    outputs: Tuple[int, ...]


class SplitProgram(NamedTuple):
    """A stage in parts, where Alpa's own compiler would have put one partitioned HLO module.

    Attributes:
        name: The stage's.
        steps: Parts and reductions in the order in which they run.
        outputs: The slots of the stage's results.
        donated: Inputs that are gone after a run, because results take over their memory.
    """

    name: str
    steps: Tuple[Union[Part, Reduction], ...]
    outputs: Tuple[int, ...]
    donated: Tuple[int, ...] = ()

    @property
    def stablehlo(self) -> str:
        """The text of all parts, for people."""
        return "\n".join(step.program.stablehlo for step in self.steps if isinstance(step, Part))

    def to_string(self) -> str:
        """The text of the program, under the name that Alpa's driver asks for."""
        return self.stablehlo


class SplitExecutable:
    """A stage in parts, compiled; parts that are alike are compiled once.

    Args:
        worker: Whose buffers it reads and writes, and whose `reducer` it uses.
        uuid: Its number.
        program: What to compile.
    """

    def __init__(self, worker: Any, uuid: int, program: SplitProgram) -> None:
        self._worker = worker
        self._program = program
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
        """Run the parts, exchange values between them; the results are put under `output_uuids`."""
        buffers = self._worker.buffers
        slots = {slot: buffers[uuid] for slot, uuid in enumerate(input_uuids)}
        for index in self._program.donated:
            buffers.pop(input_uuids[index], None)  # one array may be donated under two names
        self._run(slots, **kwargs)
        for uuid, slot in zip(output_uuids, self._program.outputs):
            buffers[uuid] = slots[slot]

    def _run(self, slots: Dict[int, List[Any]], alone: bool = False, **kwargs: Any) -> None:
        """Run the parts on the values in the slots; alone, nothing is exchanged and nothing recorded."""
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
        """Whether nothing follows this part without a wait; all parts before it are one program in a recording."""
        return index + 1 == len(self._executables) or self._executables[index + 1] is None

    def _reduced(self, step: Reduction, arrays: List[Any]) -> List[Any]:
        import numpy

        value = numpy.asarray(arrays[0])  # waits until it is computed
        result = self._worker.reducer.reduce(step.group, step.operation, value)
        return [self._worker.put(numpy.asarray(result, value.dtype), index) for index in range(len(arrays))]

    def profile_with_dummy_inputs(self, **_: Any) -> List[float]:
        """Wall times [s] of all parts alone on their device, back to back, without the exchanges."""
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
        """For each input that a part reads, what makes one up."""
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
        """Bytes of results and scratch memory of the largest part, by XLA's own analysis."""
        parts = (executable for executable in self._executables if executable is not None)
        return max((executable.get_total_allocation_size() for executable in parts), default=0)

    def get_hlo_text(self) -> str:
        """The programs before compilation."""
        return self._program.stablehlo


def _writes(step: Union[Part, Reduction]) -> Tuple[int, ...]:
    return (step.target,) if isinstance(step, Reduction) else step.outputs


def _last_uses(program: SplitProgram) -> Dict[int, List[int]]:
    """The slots that nothing reads after a step, by the step's index."""
    last: Dict[int, int] = {}
    for index, step in enumerate(program.steps):
        read = (step.source,) if isinstance(step, Reduction) else step.inputs
        last.update(dict.fromkeys([*read, *_writes(step)], index))
    by_step: Dict[int, List[int]] = {}
    for slot, index in last.items():
        if slot not in program.outputs:
            by_step.setdefault(index, []).append(slot)
    return by_step
