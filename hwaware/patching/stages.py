"""Give Alpa the programs of a pipeline's stages as objects of its own."""

from __future__ import annotations

from typing import Any

from hwaware.compiler.layouts import alpa_spec
from hwaware.compiler.stages import MeshPlan, lowered

_STAGE_CONSTRUCTION_SEED = 42  # Alpa's global_config.compile_random_seed; stock JAX does not use it


def lowered_stage(stage: Any, donated: Any, plan: MeshPlan) -> Any:
    """Return Alpa's object for a stage, with the program that hwaware.compiler makes."""
    from alpa.parallel_plan import StagePlan
    from alpa.pipeline_parallel.apply_grad import APPLY_GRAD_MARKER_SUFFIX
    from alpa.pipeline_parallel.computation import XlaShardedPipelineComputation
    from alpa.shard_parallel.auto_sharding import AutoShardingOption
    from alpa.util import OrderedSet

    class LoweredStage(XlaShardedPipelineComputation):  # type: ignore[misc]  # Alpa carries no types
        """A stage whose program is StableHLO. Alpa's emitter takes it in the place of partitioned HLO."""

        program: Any = None

        def get_spmd_partitioned(self) -> Any:
            return self.program

        def get_hlo_text(self) -> Any:
            return self.program.stablehlo

    result = LoweredStage(
        name=stage.name,
        invars=stage.invars,
        outvars=stage.outvars,
        hlo=None,
        donated_invars=donated,
        stage_plan=StagePlan(_STAGE_CONSTRUCTION_SEED, plan.shape, 1, 1, AutoShardingOption(), None, 0),
        input_sharding_specs=[alpa_spec(plan.spec(variable), plan.shape) for variable in stage.invars],
        output_sharding_specs=[alpa_spec(plan.spec(variable), plan.shape) for variable in stage.outvars],
        output_acc_grad_indices=[],
        donatables=OrderedSet(),
    )
    microbatched = not stage.name.endswith(APPLY_GRAD_MARKER_SUFFIX)
    result.program = lowered(stage, donated, plan, microbatched)
    return result
