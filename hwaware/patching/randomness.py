"""Keep `jax.random` a function of its keys while Alpa traces (see hwaware.compiler.randomness)."""

from __future__ import annotations

from typing import Any, Callable, Dict


def monkey_patch_random(_original: Any) -> Callable[..., None]:
    """Replace Alpa's generators, which have a state, by draws that know their key; `fold_in` stays JAX's own."""
    from hwaware.compiler import randomness

    def replacement() -> None:
        randomness.draw_primitive()  # remembers JAX's own samplers
        randomness.trace_in_this_thread()
        _set({name: getattr(randomness, name) for name in randomness.SAMPLERS})

    return replacement


def restore_random(_original: Any) -> Callable[..., None]:
    """Replace Alpa's function: put JAX's own samplers into every module that `monkey_patch_random` changed."""
    from hwaware.compiler import randomness

    return lambda: _set(randomness.stock_samplers())


def _set(samplers: Dict[str, Any]) -> None:
    from hwaware.compat.programs import random_modules

    for module in random_modules():
        for name, sampler in samplers.items():
            setattr(module, name, sampler)


def compile_exec_one_mesh(original: Any) -> Callable[..., None]:
    """Wrap Alpa's function: every RUN instruction of a stage also names its microbatch."""

    def replacement(
        self: Any, mesh: int, task: Any, executables: Any, donation_mapping: Any, worker_tmp_instructions: Any
    ) -> None:
        original(self, mesh, task, executables, donation_mapping, worker_tmp_instructions)
        for worker in self.mesh_group[mesh].workers:
            worker_tmp_instructions[worker][-1].opaques["kwargs"]["microbatch"] = task[0]

    return replacement
