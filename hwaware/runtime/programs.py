"""Stage programs: what the driver lowers and a worker compiles."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence


class StageProgram(NamedTuple):
    """One stage as StableHLO text: it can be pickled, and every back end compiles it.

    Alpa carries it where its own compiler would have put a partitioned HLO module.
    """

    name: str
    stablehlo: str

    def to_string(self) -> str:
        """The text of the program, under the name that Alpa's driver asks for."""
        return self.stablehlo


def lower(closed_jaxpr: Any, name: str) -> StageProgram:
    """Lower a stage's jaxpr; every argument is kept, also unused ones, because Alpa passes them all."""
    import jax
    from jax.core import jaxpr_as_fun

    arguments = [
        jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype) for variable in closed_jaxpr.jaxpr.invars
    ]
    lowered = jax.jit(jaxpr_as_fun(closed_jaxpr), keep_unused=True).lower(*arguments)
    return StageProgram(name, str(lowered.compiler_ir("stablehlo")))


class StageExecutable:
    """A compiled stage on one device.

    Args:
        worker: Whose buffers it reads and writes.
        program: What to compile.
    """

    def __init__(self, worker: Any, program: StageProgram) -> None:
        from jax._src.lib import xla_client

        self._worker = worker
        self._text = program.stablehlo
        self._compiled = worker.client.compile(program.stablehlo, xla_client.CompileOptions())

    def execute_on_worker(self, input_uuids: Sequence[Any], output_uuids: Sequence[Any], *_: Any, **__: Any) -> None:
        """Start the stage; its results are put under `output_uuids` and may still be computing."""
        buffers = self._worker.buffers
        results = self._compiled.execute([buffers[uuid][0] for uuid in input_uuids])
        for uuid, result in zip(output_uuids, results):
            buffers[uuid] = [result]
        self._worker.newest = results

    def get_hlo_text(self) -> str:
        """The program before compilation."""
        return self._text


class ZeroBuffers:
    """Allocates gradient accumulators.

    Args:
        worker: Whose buffers it writes.
        shapes, dtypes: Of each accumulator.
    """

    def __init__(self, worker: Any, shapes: Sequence[Sequence[int]], dtypes: Sequence[Any]) -> None:
        self._worker = worker
        self._kinds = list(zip(shapes, dtypes))

    def execute_on_worker(self, _: Sequence[Any], output_uuids: Sequence[Any], *__: Any, **___: Any) -> None:
        """Put new zeros under `output_uuids`."""
        import numpy

        for uuid, (shape, dtype) in zip(output_uuids, self._kinds):
            self._worker.buffers[uuid] = [self._worker.put(numpy.zeros(shape, dtype))]
