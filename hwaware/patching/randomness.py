"""Random numbers while Alpa traces: `jax.random` stays a function of its keys (see hwaware.runtime.randomness)."""

from __future__ import annotations

from typing import Any, Callable

from hwaware.runtime import randomness


def monkey_patch_random(_original: Any) -> Callable[..., None]:
    """Instead of generators with a state: draws that know their key; `fold_in` stays JAX's own."""

    def replacement() -> None:
        import jax._src.random
        import jax.random

        randomness.draw_primitive()  # takes note of JAX's own samplers
        for module in (jax.random, jax._src.random):
            for name in randomness.SAMPLERS:
                setattr(module, name, getattr(randomness, name))

    return replacement


def compile_exec_one_mesh(original: Any) -> Callable[..., None]:
    """Alpa's own, and every RUN of a stage says for which microbatch it is."""

    def replacement(
        self: Any, mesh: int, task: Any, executables: Any, donation_mapping: Any, worker_tmp_instructions: Any
    ) -> None:
        original(self, mesh, task, executables, donation_mapping, worker_tmp_instructions)
        for worker in self.mesh_group[mesh].workers:
            worker_tmp_instructions[worker][-1].opaques["kwargs"]["microbatch"] = task[0]

    return replacement
