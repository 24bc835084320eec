"""Stage programs that combine a value with other stages: parts that one mesh runs, and all-reduces between meshes.

Values live in slots: the stage's inputs are slots 0, 1, ..., and every value that outlives its part has the next
number. A reduction is a message from every mesh to every worker of the others. All add up in the order of the meshes,
so that every stage gets the same result, bit for bit.
"""

from __future__ import annotations

import functools
import statistics
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple, Union

from hwaware.errors import MeasurementError
from hwaware.runtime.programs import StageExecutable, StageProgram


class Part(NamedTuple):
    """Equations that a mesh runs as one program.

    Attributes:
        program: What to run.
        inputs, outputs: The slots that it reads and writes, in the order of its arguments and results.
    """

    program: StageProgram
    inputs: Tuple[int, ...]
    outputs: Tuple[int, ...]


class Reduction(NamedTuple):
    """A value that all meshes of a group combine.

    Attributes:
        source, target: Slots of this mesh's value and of the result.
        operation: "add", "and" or "or".
        group: Name of the group of meshes; see `group_name`.
    """

    source: int
    target: int
    operation: str
    group: str


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


def group_name(meshes: Sequence[int]) -> str:
    """The name of a group of meshes, whatever their order; Alpa spells it the same way.

    Example:
        >>> group_name([2, 0])
        'reduce 0$2$'
    """
    return "reduce " + "".join(f"{mesh}$" for mesh in sorted(meshes))


class Reducer:
    """One worker's side of the reductions.

    Args:
        transfers: What it sends and receives through.
    """

    def __init__(self, transfers: Any) -> None:
        self._transfers = transfers
        self._groups: Dict[str, Tuple[int, List[List[int]]]] = {}

    def join(self, group: str, rank: int, meshes: List[List[int]], addresses: List[Any]) -> None:
        """Learn who takes part.

        Args:
            group: See `group_name`.
            rank: This worker's among all workers of the group.
            meshes: The ranks of each mesh's workers; the first speaks for its mesh, whose workers have equal values.
            addresses: Of every worker's mailbox, by rank.
        """
        self._groups[group] = (rank, meshes)
        self._transfers.join_group(group, rank, addresses)

    def reduce(self, group: str, operation: str, value: Any) -> Any:
        """What the meshes' values come to, as a NumPy array; waits for them.

        Raises:
            MeasurementError: This worker is not in the group, or a value did not arrive in time.
        """
        if group not in self._groups:
            raise MeasurementError(
                f"The group {group!r} of meshes that combine values was never formed.",
                "compile the program again with hwaware.enable() in place.",
            )
        rank, meshes = self._groups[group]
        self._send(group, rank, meshes, value)
        values = [value if rank in ranks else self._received(group, ranks[0], value) for ranks in meshes]
        return functools.reduce(_operation(operation), values)

    def _send(self, group: str, rank: int, meshes: List[List[int]], value: Any) -> None:
        own = next(ranks for ranks in meshes if rank in ranks)
        if rank != own[0]:
            return
        for target in (target for ranks in meshes if ranks is not own for target in ranks):
            self._transfers.send(group, (target, 0), 0, value, ..., rendezvous=False)

    def _received(self, group: str, source: int, like: Any) -> Any:
        import numpy

        _, data = self._transfers.receive(group, (source, 0), 0, rendezvous=False)
        return numpy.frombuffer(data, like.dtype).reshape(like.shape)


def _operation(name: str) -> Any:
    import numpy

    return {"add": numpy.add, "and": numpy.bitwise_and, "or": numpy.bitwise_or}[name]


class SplitExecutable:
    """A stage in parts, compiled.

    Args:
        worker: Whose buffers it reads and writes, and whose `reducer` it uses.
        uuid: Its number.
        program: What to compile.
    """

    def __init__(self, worker: Any, uuid: int, program: SplitProgram) -> None:
        self._worker = worker
        self._program = program
        self._executables = [
            StageExecutable(worker, uuid, step.program) if isinstance(step, Part) else None for step in program.steps
        ]
        self._last_use = _last_uses(program)

    def execute_on_worker(
        self, input_uuids: Sequence[Any], output_uuids: Sequence[Any], *_: Any, **kwargs: Any
    ) -> None:
        """Run the parts, exchange values between them; the results are put under `output_uuids`."""
        for part in filter(None, self._executables):
            self._worker.account.check(self._program.name, part.memory, self._worker.stores())
        buffers = self._worker.buffers
        slots = {slot: buffers[uuid] for slot, uuid in enumerate(input_uuids)}
        for index in self._program.donated:
            buffers.pop(input_uuids[index], None)  # one array may be donated under two names
        for index, (step, executable) in enumerate(zip(self._program.steps, self._executables)):
            if isinstance(step, Reduction):
                slots[step.target] = self._reduced(step, slots[step.source])
            else:
                assert executable is not None  # made for every part
                results = executable.run([slots[slot] for slot in step.inputs], **kwargs)
                slots.update(zip(step.outputs, results))
            for slot in self._last_use.get(index, ()):
                del slots[slot]
        for uuid, slot in zip(output_uuids, self._program.outputs):
            buffers[uuid] = slots[slot]

    def _reduced(self, step: Reduction, arrays: List[Any]) -> List[Any]:
        import numpy

        value = numpy.asarray(arrays[0])  # waits until it is computed
        result = self._worker.reducer.reduce(step.group, step.operation, value)
        return [self._worker.put(numpy.asarray(result, value.dtype), index) for index in range(len(arrays))]

    def profile_with_dummy_inputs(self, **_: Any) -> List[float]:
        """Wall time [s] of all parts alone on their device, without the exchanges."""
        parts = (executable for executable in self._executables if executable is not None)
        return [sum(statistics.mean(executable.profile_with_dummy_inputs()) for executable in parts)]

    def get_total_allocation_size(self) -> int:
        """Bytes of results and scratch memory of the largest part, by XLA's own analysis."""
        parts = (executable for executable in self._executables if executable is not None)
        return max((executable.get_total_allocation_size() for executable in parts), default=0)

    def get_hlo_text(self) -> str:
        """The programs before compilation."""
        return self._program.stablehlo


def _last_uses(program: SplitProgram) -> Dict[int, List[int]]:
    """The slots that nothing reads after a step, by the step's index."""
    last: Dict[int, int] = {}
    for index, step in enumerate(program.steps):
        used = [step.source, step.target] if isinstance(step, Reduction) else [*step.inputs, *step.outputs]
        last.update(dict.fromkeys(used, index))
    by_step: Dict[int, List[int]] = {}
    for slot, index in last.items():
        if slot not in program.outputs:
            by_step.setdefault(index, []).append(slot)
    return by_step
