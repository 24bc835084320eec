"""Alpa's leaf functions on stock JAX: sharding, launching and groups, replaced by hwaware's runtime.

Alpa's driver, layer construction, apply-gradient, schedules, emitter and interpreter stay as they are.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, List, Tuple

from hwaware.errors import AlpaError
from hwaware.patching.mechanism import Patch, PatchSet, Target

_LAUNCH_LIMIT_S = 180.0
_GROUP_LIMIT_S = 60.0
_STAGE_CONSTRUCTION_SEED = 42  # Alpa's global_config.compile_random_seed; stock JAX does not use it
_launch_errors: List[BaseException] = []
_lock = threading.Lock()


def shard_each_stage(_original: Any) -> Callable[..., Any]:
    """Instead of auto-sharding with Alpa's jaxlib: lower each stage to StableHLO for its one device."""

    def replacement(
        jax_all_stages: Any,
        virtual_meshes: Any,
        schedule: Any,
        num_meshes: int,
        accumulator_mapping: Any,
        global_invars: Any,
        acc_grad_outvars: Any,
        donate_invars_dict: Any,
        num_microbatch: int,
        logical_mesh_shapes: Any,
        *_: Any,
    ) -> Tuple[List[Any], int]:
        stages = []
        for index, stage in enumerate(jax_all_stages):
            mesh = next(iter(schedule.stage_placement(index)))
            _require_single_device(tuple(logical_mesh_shapes[mesh]), mesh)
            stages.append(_lowered_stage(stage, donate_invars_dict[index]))
        return stages, 0

    return replacement


def _require_single_device(shape: Tuple[int, ...], mesh: int) -> None:
    if shape != (1, 1):
        raise AlpaError(
            f"Stage {mesh} has the logical shape {shape}; on stock JAX a stage has one device so far, (1, 1).",
            "use one device per stage: AutoStageOption(manually_specified_submeshes=[(1, 1)]) or hwaware's option.",
        )


def _lowered_stage(stage: Any, donated: Any) -> Any:
    from alpa.parallel_plan import StagePlan
    from alpa.pipeline_parallel.computation import XlaShardedPipelineComputation
    from alpa.shard_parallel.auto_sharding import AutoShardingOption, make_replicated_spec
    from alpa.util import OrderedSet

    from hwaware.runtime.programs import lower

    class LoweredStage(XlaShardedPipelineComputation):  # type: ignore[misc]  # Alpa carries no types
        """A stage whose program is StableHLO; the emitter asks for it where it would ask for partitioned HLO."""

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
        stage_plan=StagePlan(_STAGE_CONSTRUCTION_SEED, (1, 1), 1, 1, AutoShardingOption(), None, 0),
        input_sharding_specs=[make_replicated_spec(v.aval, (1, 1)) for v in stage.invars],
        output_sharding_specs=[make_replicated_spec(v.aval, (1, 1)) for v in stage.outvars],
        output_acc_grad_indices=[],
        donatables=OrderedSet(),
    )
    result.program = lower(stage.closed_jaxpr(), stage.name)
    return result


def launch_xla_servers(_original: Any) -> Callable[..., Any]:
    """Instead of workers on Alpa's jaxlib: a HostWorker pinned to the mesh's host and told which device is its own."""

    def replacement(self: Any) -> Tuple[None, List[Any]]:
        try:
            return None, [_launch(self, index) for index in range(self.num_hosts)]
        except BaseException as error:
            # Alpa launches in threads that drop exceptions: get_physical_mesh_group below raises this one.
            with _lock:
                _launch_errors.append(error)
            raise

    return replacement


def _launch(mesh: Any, index: int) -> Any:
    import ray

    from hwaware.patching.stock_jax import install
    from hwaware.runtime.worker import HostWorker

    address = mesh.host_info[index]["NodeManagerAddress"]
    device = mesh.devices[index][0]
    actor = ray.remote(HostWorker).options(num_cpus=0, resources={f"node:{address}": 0.001})
    worker = actor.remote(address, mesh.mesh_id, device, install)
    try:
        ray.get(worker.mailbox_address.remote(), timeout=_LAUNCH_LIMIT_S)
    except BaseException as error:
        ray.kill(worker)
        if not isinstance(error, ray.exceptions.GetTimeoutError):
            raise
        raise AlpaError(
            f"No worker came up on host {address} within {_LAUNCH_LIMIT_S:g} s.",
            "look at `ray status` and that host's Ray logs; hwaware and Alpa must be importable there.",
        ) from error
    return worker


def get_physical_mesh_group(original: Any) -> Callable[..., Any]:
    """Alpa's own, but an exception of a launching thread is raised instead of dropped, and no worker is left behind."""

    def replacement(self: Any, sliced_virtual_meshes: Any) -> Any:
        with _lock:
            _launch_errors.clear()
        group = original(self, sliced_virtual_meshes)
        with _lock:
            errors = list(_launch_errors)
        if errors:
            self.launched_physical_mesh_group = None
            for mesh in (mesh for mesh in group.meshes if mesh is not None):
                mesh.shutdown(forced=True)
            raise errors[0]
        return group

    return replacement


def instantiate_now(_original: Any) -> Callable[..., Any]:
    """Instead of NCCL: every worker of the group learns the mailboxes of the others."""

    def replacement(self: Any) -> None:
        import ray

        if self.instantiated:
            return
        workers = self.mesh_workers
        addresses = ray.get([worker.mailbox_address.remote() for worker in workers], timeout=_GROUP_LIMIT_S)
        joins = [worker.join_group.remote(self.group_name, rank, addresses) for rank, worker in enumerate(workers)]
        ray.get(joins, timeout=_GROUP_LIMIT_S)
        self.instantiated = True

    return replacement


def destroy(_original: Any) -> Callable[..., Any]:
    """Instead of destroying NCCL groups: the connections end with their workers."""

    def replacement(self: Any) -> None:
        self.instantiated = False

    return replacement


def create_resharding_communicators(_original: Any) -> Callable[..., Any]:
    """Instead of NCCL communicators: nothing, connections open with the first message."""

    def replacement(self: Any) -> None:
        del self

    return replacement


def get_stage_send_vars(original: Any) -> Callable[..., Any]:
    """Alpa's own, with its sort repaired: 0.2.3 gives `sorted` a key of three arguments for tuples of three."""

    def replacement(self: Any, outvar_def_order: Any) -> Any:
        from alpa.pipeline_parallel import runtime_emitter

        def spread(items: Any, key: Any) -> List[Any]:
            return sorted(items, key=lambda item: key(*item))

        runtime_emitter.sorted, runtime_emitter.print = spread, lambda *_: None  # it also prints what it debugs
        try:
            return original(self, outvar_def_order)
        finally:
            del runtime_emitter.sorted, runtime_emitter.print

    return replacement


def outvars_def_order(_original: Any) -> Callable[..., Any]:
    """Outputs of a stage by when they are defined; Alpa's own stops where one value is two outputs."""

    def replacement(self: Any) -> List[Any]:
        defined = list(self.invars) + [variable for equation in self.eqns[:-1] for variable in equation.outvars]
        place = {id(variable): index for index, variable in enumerate(defined)}
        sources = self.eqns[-1].invars  # the last equation is the marker that the stage's outputs pass through
        order = sorted(range(len(sources)), key=lambda index: (place.get(id(sources[index]), -1), index))
        return [self.outvars[index] for index in order]

    return replacement


_PIPELINE = "alpa.pipeline_parallel"
# The digests are of Alpa 0.2.3's own sources, printed by `hwaware.patching.mechanism.source_digest`.
PATCHES = PatchSet(
    [
        Patch(Target(f"{_PIPELINE}.compile_executable", "shard_each_stage", ("4901be7598c6e454",)), shard_each_stage),
        Patch(
            Target("alpa.device_mesh", "DistributedPhysicalDeviceMesh.launch_xla_servers", ("833c3cff52cfa2f7",)),
            launch_xla_servers,
        ),
        Patch(
            Target("alpa.device_mesh", "VirtualPhysicalMesh.get_physical_mesh_group", ("be96caba042b9fb1",)),
            get_physical_mesh_group,
        ),
        Patch(
            Target(f"{_PIPELINE}.cross_mesh_resharding", "CollectiveGroup.instantiate_now", ("fec7738346beb384",)),
            instantiate_now,
        ),
        Patch(
            Target(
                f"{_PIPELINE}.runtime_emitter",
                "OverlapFriendlyPipelineInstEmitter._get_stage_send_vars",
                ("5fea584c86da1dbc",),
            ),
            get_stage_send_vars,
        ),
        Patch(
            Target(f"{_PIPELINE}.computation", "JaxPipelineComputation.outvars_def_order", ("0e90adbc08d2c92e",)),
            outvars_def_order,
        ),
        Patch(Target(f"{_PIPELINE}.cross_mesh_resharding", "CollectiveGroup.destroy", ("97bd744adaf08f58",)), destroy),
        Patch(
            Target(
                f"{_PIPELINE}.cross_mesh_resharding",
                "SymbolicReshardingTask.create_resharding_communicators",
                ("5424ed1ab92dca27",),
            ),
            create_resharding_communicators,
        ),
    ]
)
