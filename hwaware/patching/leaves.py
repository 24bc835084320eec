"""Replace Alpa's leaf functions on stock JAX by hwaware's runtime: sharding, launching and groups of workers.

Alpa's driver, layers, division of the update, schedules, emitter and interpreter stay as they are.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from hwaware import greeting
from hwaware.compiler.layouts import Layout
from hwaware.encryption import Encryption, Identity, new_identity
from hwaware.patching import (
    batches,
    checkpoints,
    compiling,
    creating,
    donation,
    even_layers,
    failures,
    meshes,
    names,
    observing,
    passing,
    randomness,
    reading,
    refusals,
    rescue,
    reservation,
    resharding,
    scaling,
    steps,
    update_sums,
)
from hwaware.patching.mechanism import Patch, PatchSet, Replacement, Target
from hwaware.ray_cluster import end_actors, fetched
from hwaware.runtime.mesh import Place

_LAUNCH_LIMIT_S = 180.0
_GROUP_LIMIT_S = 60.0
LOG = logging.getLogger("hwaware")
# By the id of the process.
_secrets: Dict[int, bytes] = {}
_identities: Dict[int, Identity] = {}
_lock = threading.Lock()


class _Batch:
    """Mark the arguments that Alpa cuts into microbatches, while Alpa compiles a program; empty otherwise."""

    flags: Tuple[bool, ...] = ()


def compile_pipeshard_executable_internal(original: Any) -> Callable[..., Any]:
    """Wrap Alpa's function: give it the step in a form that Alpa can cut.

    Remember which arguments are batches, because Alpa does not tell `shard_each_stage`.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        rescuer = rescue.current()
        if rescuer is not None:
            rescuer.require(arguments)
        trains = arguments["pipeline_schedule"] != "inference"
        # A batch that Alpa cuts has no memory of its own to give away. Later microbatches of a program that serves need
        # its arguments again.
        gives = trains or arguments["num_microbatch"] == 1
        flags = zip(arguments["donated_invars"], arguments["batch_invars"])
        donated = [gives and given and not is_batch for given, is_batch in flags]
        _tidy(arguments)
        if trains and any(donated):
            for name in ("closed_jaxpr", "full_batch_closed_jaxpr"):
                if arguments[name] is not None:
                    arguments[name] = steps.with_results_apart(arguments[name])
        # Alpa hands this to two functions alone, which hwaware overrides.
        places = donation.places_of_results if trains else donation.places_in_inference
        arguments["donated_invars"] = places(arguments["closed_jaxpr"], donated)
        begin_s = time.monotonic()
        config = observing.compiled(arguments, compiled)
        if rescuer is not None:
            rescuer.compiled(compiled, arguments, config, time.monotonic() - begin_s)
        return config

    def compiled(arguments: Dict[str, Any]) -> Any:
        _Batch.flags = tuple(arguments["batch_invars"])
        try:
            return original(**arguments)
        finally:
            _Batch.flags = ()

    return replacement


def _tidy(arguments: Dict[str, Any]) -> None:
    """Put a step into a form that Alpa can cut, and log warnings about Alpa's averages over microbatches."""
    from hwaware.compiler.randomness import with_keys_of_samples

    for name in ("closed_jaxpr", "full_batch_closed_jaxpr"):
        if arguments[name] is not None:
            arguments[name] = with_keys_of_samples(arguments[name], arguments["batch_invars"])
    programs = arguments["closed_jaxpr"], arguments["full_batch_closed_jaxpr"]
    if programs[0].jaxpr.effects:
        LOG.warning(
            "The step calls jax.debug.print, jax.debug.callback or jax.experimental.io_callback. Alpa leaves out calls "
            "without a result. To fix: return the values from the step, and print them outside."
        )
    count, names, schedule = arguments["num_microbatch"], compiling.names_of_step(), arguments["pipeline_schedule"]
    refusals.require_plain_types(programs[0], names)
    if schedule != "inference":
        programs = steps.tidied(*programs, arguments["batch_invars"], count, schedule, names)
        arguments["closed_jaxpr"], arguments["full_batch_closed_jaxpr"] = programs
    elif programs[1] is not None:
        micro, full = (program.jaxpr.outvars for program in programs)
        refusals.require_same_results(micro, full, count, "The function")
    if programs[1] is not None:
        for warning in scaling.warnings_of(*programs, count, names, schedule == "inference"):
            LOG.warning(warning)


def shard_each_stage(_original: Any) -> Callable[..., Any]:
    """Replace Alpa's auto-sharding: choose shardings, and lower each stage to StableHLO."""

    def replacement(
        jax_all_stages: Any, virtual_meshes: Any, schedule: Any, num_meshes: int, accumulator_mapping: Any,
        global_invars: Any, acc_grad_outvars: Any, donate_invars_dict: Any, num_microbatch: int,
        logical_mesh_shapes: Any, _autosharding_options: Any, _default_option: Any,
        input_shardings: Sequence[Dict[Any, Any]] = (), output_shardings: Sequence[Dict[Any, Any]] = (), *_: Any,
    ) -> Tuple[List[Any], int]:  # fmt: skip
        from hwaware.compiler.stages import plan_meshes
        from hwaware.patching.stages import lowered_stage

        batch = [variable for variable, flag in zip(global_invars, _Batch.flags) if flag]
        # Shardings that CreateStateParallel and FollowParallel take over from another program.
        given = [{**inputs, **outputs} for inputs, outputs in zip(input_shardings, output_shardings)]
        plans = plan_meshes(
            jax_all_stages, schedule, logical_mesh_shapes, batch, accumulator_mapping, num_microbatch, given
        )
        stages = []
        for index, stage in enumerate(jax_all_stages):
            mesh = next(iter(schedule.stage_placement(index)))
            stages.append(lowered_stage(stage, donate_invars_dict[index], plans[mesh]))
        return stages, 0

    return replacement


def compile_allgather(_original: Any) -> Callable[..., Any]:
    """Replace Alpa's XLA: return the program by which a stage's devices all-gather an array from their parts."""

    def replacement(shape: Any, dtype: Any, src_spec: Any, dst_spec: Any, num_devices: int) -> Any:
        import jax

        from hwaware.compiler.programs import lower_function

        kind = jax.ShapeDtypeStruct(shape, dtype)
        split = Layout(int(num_devices), (src_spec,), (dst_spec,))
        return lower_function(lambda array: [array], [kind], "allgather", split)

    return replacement


def compile_concatenate(_original: Any) -> Callable[..., Any]:
    """Replace Alpa's XLA: return the program that joins the microbatches of a result."""

    def replacement(mesh_shape: Any, sharding_spec: Any, batch_size: int, batch_dim: int, aval: Any) -> Any:
        import jax.numpy as jnp

        from hwaware.compiler.programs import lower_function

        def join(*parts: Any) -> Any:
            return [jnp.concatenate(parts, batch_dim)]

        devices, avals = int(mesh_shape[0]) * int(mesh_shape[1]), [aval] * batch_size
        split = Layout(devices, (sharding_spec,) * batch_size, (sharding_spec,)) if devices > 1 else None
        return lower_function(join, avals, "join", split)

    return replacement


def launch_xla_servers(_original: Any) -> Callable[..., Any]:
    """Replace workers on Alpa's XLA by HostWorkers. Pin these to the mesh's hosts, and tell them their devices."""

    def replacement(self: Any) -> Tuple[None, List[Any]]:
        workers: List[Any] = []
        try:
            for rank in range(self.num_hosts):
                workers.append(_started(self, rank))
            _wait_until_up(self, workers)
            return None, workers
        except BaseException:
            end_actors(_to_end(workers))
            raise

    return replacement


def _to_end(workers: Sequence[Any]) -> Sequence[Any]:
    """Return the workers that end with a failed launch: a recovery keeps its own, and tries again."""
    rescuer = rescue.current()
    return workers if rescuer is None else [worker for worker in workers if not rescuer.keeps(worker)]


def _started(mesh: Any, rank: int) -> Any:
    from hwaware.runtime.worker import HostWorker

    place, rescuer = place_of(mesh, rank), rescue.current()
    if rescuer is not None and rescuer.takes(place, program_secret(), program_identity()):
        return rescuer.worker(place)
    return start_worker(place, HostWorker if rescuer is None else rescuer.worker_class)


def start_worker(place: Place, kind: Any) -> Any:
    """Start the process of a worker, and return its Ray actor at once.

    Args:
        place: The worker's place.
        kind: HostWorker, or a class made from it.
    """
    import ray

    from hwaware.runtime import settings
    from hwaware.runtime.worker import CONTROL

    node = {f"node:{place.address}": 0.001}
    actor = ray.remote(num_cpus=0, resources=node, concurrency_groups={CONTROL: 1})(kind)
    return actor.remote(place, preparation(), settings.current(), program_secret(), program_identity())


def preparation() -> Callable[[], Any]:
    """Return what prepares a worker for the programs of this driver."""
    import jax

    from hwaware.patching.stock_jax import prepare_worker

    return functools.partial(prepare_worker, jax.config.jax_enable_x64)


def program_secret() -> bytes:
    """Return the secret that this driver shares with its workers; Ray hands it to them when they start.

    Threads launch the meshes, and all threads get the same secret. A fork of a driver is another program.
    """
    return _secrets.setdefault(os.getpid(), greeting.new_secret())


def renew_secret() -> None:
    """Draw another secret. Workers that start from here on take no messages from earlier workers."""
    _secrets[os.getpid()] = greeting.new_secret()


def program_identity() -> Optional[Identity]:
    """Return the certificate that driver and workers share; None if the settings do not ask for encryption."""
    from hwaware.runtime import settings

    if not settings.current().encrypt:
        return None
    with _lock:
        if os.getpid() not in _identities:
            _identities[os.getpid()] = new_identity()
        return _identities[os.getpid()]


def place_of(mesh: Any, rank: int) -> Place:
    """Return the Place of a worker of a launched mesh."""
    address = mesh.host_info[rank]["NodeManagerAddress"]
    uuids = meshes.uuids_of(mesh, rank)
    return Place(mesh.mesh_id, address, tuple(mesh.devices[rank]), rank, mesh.num_hosts, uuids)


def _wait_until_up(mesh: Any, workers: Sequence[Any]) -> None:
    from hwaware.runtime import settings
    from hwaware.runtime.transfers import CHANNEL
    from hwaware.runtime.watch import member

    identity, limit_s = program_identity(), settings.current().step_limit_s
    encryption = None if identity is None else Encryption(identity)
    credentials = greeting.Credentials(program_secret(), CHANNEL, settings.current().message_digests, encryption)
    places = [str(place_of(mesh, rank)) for rank in range(len(workers))]
    starting = f"Starting the worker{'s' * (len(places) > 1)} of {' and of '.join(places)}"
    mailboxes = fetched([worker.mailbox_address.remote() for worker in workers], _LAUNCH_LIMIT_S, starting)
    processes = fetched([worker.process_id.remote() for worker in workers], _GROUP_LIMIT_S, starting)
    if len(workers) > 1:
        (coordinator,) = fetched([workers[0].free_coordinator.remote()], _GROUP_LIMIT_S, starting)
        fetched([worker.meet.remote(coordinator) for worker in workers], _LAUNCH_LIMIT_S, starting)
    members = [
        member(worker, place, mailbox, credentials, process, limit_s)
        for worker, place, mailbox, process in zip(workers, places, mailboxes, processes)
    ]
    failures.put_under_watch(mesh, members)
    batches.feed(mesh, [one.feed for one in members])


def get_physical_mesh(original: Any) -> Callable[..., Any]:
    """Wrap Alpa's function: start a worker for each device if a stage has several devices on each of several hosts."""

    def replacement(self: Any, mesh_id: int = 0) -> Any:
        self.launched_physical_mesh = original(meshes.one_device_a_worker(self), mesh_id)
        return self.launched_physical_mesh

    return replacement


def get_physical_mesh_group(_original: Any) -> Callable[..., Any]:
    """Replace Alpa's function: launch all meshes at once. If one fails, raise its error and leave no worker behind.

    Alpa's own threads print their errors and go on. They also keep an interrupted program from ending.
    """

    def replacement(self: Any, sliced_virtual_meshes: Any) -> Any:
        from alpa.device_mesh import PhysicalDeviceMeshGroup

        assert self.launched_physical_mesh_group is None, "Physical mesh group can only be launched once."
        reservation.require_hosts(
            [info["NodeManagerAddress"] for one in sliced_virtual_meshes for info in one.host_info]
        )
        begin_s = time.monotonic()
        group = PhysicalDeviceMeshGroup(_launched(sliced_virtual_meshes), self)
        group.start_s = time.monotonic() - begin_s
        self.launched_physical_mesh_group = group
        failures.watch_over(group)
        return group

    return replacement


def _launched(virtual_meshes: Sequence[Any]) -> List[Any]:
    """Launch each mesh in its own thread. If one fails or the driver is interrupted, end all meshes."""
    launched: Dict[int, Any] = {}
    errors: List[BaseException] = []
    given_up = threading.Event()

    def launch(number: int) -> None:
        try:
            launched[number] = virtual_meshes[number].get_physical_mesh(number)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)  # raised below
        if given_up.is_set():
            end()

    def end() -> None:
        for number in list(launched):
            mesh = launched.pop(number, None)
            if mesh is not None:
                mesh.workers = _to_end(mesh.workers)
                mesh.shutdown(forced=True)

    threads = [threading.Thread(target=launch, args=(each,), daemon=True) for each in range(len(virtual_meshes))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
    except BaseException:
        given_up.set()
        end()
        raise
    return [launched[number] for number in range(len(virtual_meshes))]


def get_stage_send_vars(original: Any) -> Callable[..., Any]:
    """Wrap Alpa's function and repair its sort: 0.2.3 gives `sorted` a key of three arguments for tuples of three."""

    def replacement(self: Any, outvar_def_order: Any) -> Any:
        from alpa.pipeline_parallel import runtime_emitter

        def spread(items: Any, key: Any) -> List[Any]:
            return sorted(items, key=lambda item: key(*item))

        runtime_emitter.sorted, runtime_emitter.print = spread, lambda *_: None  # it also prints debug output
        try:
            return original(self, outvar_def_order)
        finally:
            del runtime_emitter.sorted, runtime_emitter.print

    return replacement


def outvars_def_order(_original: Any) -> Callable[..., Any]:
    """Sort the outputs of a stage by the places of their definitions. Alpa's own stops if one value is two outputs."""

    def replacement(self: Any) -> List[Any]:
        defined = list(self.invars) + [variable for equation in self.eqns[:-1] for variable in equation.outvars]
        place = {id(variable): index for index, variable in enumerate(defined)}
        sources = self.eqns[-1].invars  # the last equation is the marker that the stage's outputs pass through
        order = sorted(range(len(sources)), key=lambda index: (place.get(id(sources[index]), -1), index))
        return [self.outvars[index] for index in order]

    return replacement


# Module of Alpa -> function -> (digest of its source in Alpa 0.2.3, by `mechanism.source_digest`; replacement).
_REPLACED: Dict[str, Dict[str, Tuple[str, Replacement]]] = {
    "pipeline_parallel.pipeshard_executable": {
        "PipeshardDriverExecutable.launch_on_driver": ("8473608d47114388", passing.launch_on_driver),
        "PipeshardDriverExecutable._check_alive": ("362016d4a5878b75", failures.check_alive),
    },
    "util": {
        "trace_jaxpr_with_micro_batch": ("dc4d76cab4d7bd70", passing.trace_jaxpr_with_micro_batch),
        "compile_allgather": ("ed44e370becb1c17", compile_allgather),
        "compile_concatenate": ("6b0507bc6856bc7a", compile_concatenate),
        "jaxpr_to_hlo": ("0b7b98e513c6db7e", names.jaxpr_to_hlo),
        "new_jaxpr_eqn": ("c31218382e63eb43", names.new_jaxpr_eqn),
        "abstractify_with_aval": ("6f2c1e71bb6a1db3", names.abstractify_with_aval),
    },
    "pipeline_parallel.compile_executable": {
        "compile_pipeshard_executable": ("7ed368eb5a0fb253", compiling.compile_pipeshard_executable),
        "_get_full_batch_apply_grad": ("61aa3369d92d1978", passing.get_full_batch_apply_grad),
        "apply_grad_get_mean": ("d6537dabf5e14749", passing.apply_grad_get_mean),
        "_rewrite_global_outvars_post_concate": ("cd6ffc558c18c1c5", passing.rewrite_global_outvars_post_concate),
        "shard_each_stage": ("4901be7598c6e454", shard_each_stage),
        "compile_pipeshard_executable_internal": ("f83f3e1d807f4548", compile_pipeshard_executable_internal),
    },
    "parallel_method": {"FollowParallel.__init__": ("6c0537606cb20bfe", compiling.follow_parallel)},
    "follow_parallel": {
        "compile_follow_parallel_executable": ("68dbaf6e45facccb", compiling.on_workers_of("src_func")),
    },
    "create_state_parallel": {
        "compile_create_state_executable": ("84934b5f009159c6", creating.compile_create_state_executable),
    },
    "pipeline_parallel.layer_construction": {
        "cluster_jaxpr_by_cost": ("20b988c485762b90", even_layers.cluster_jaxpr_by_cost),
        "add_pipeline_marks_for_sliced_eqns": ("5c514450fc9beed9", passing.add_pipeline_marks_for_sliced_eqns),
    },
    "pipeline_parallel.resharding_tensor": {"VirtualDistributedArray.tiles": ("b6bcf6c454c6b928", resharding.tiles)},
    "device_mesh": {
        "DistributedPhysicalDeviceMesh.launch_xla_servers": ("833c3cff52cfa2f7", launch_xla_servers),
        "DistributedPhysicalDeviceMesh.shard_args_to_bufs": ("d4d635000e7ccd9a", batches.shard_args_to_bufs),
        "DeviceCluster.get_physical_mesh": ("c7578b4f1636118c", names.get_physical_mesh),
        "VirtualPhysicalMesh.get_physical_mesh": ("9ebab54ba988b896", get_physical_mesh),
        "VirtualPhysicalMesh.get_physical_mesh_group": ("be96caba042b9fb1", get_physical_mesh_group),
        "create_and_record_cross_mesh_collective_communicators": (
            "c5f909c2ad4052af",
            resharding.create_cross_mesh_communicators,
        ),
    },
    "pipeline_parallel.cross_mesh_resharding": {
        "CollectiveGroup.instantiate_now": ("fec7738346beb384", resharding.instantiate_now),
        "CollectiveGroup.destroy": ("97bd744adaf08f58", resharding.destroy),
        "SymbolicReshardingTask._compile_send_recv_tasks": ("76094f37533f2ec7", resharding.compile_send_recv_tasks),
        "SymbolicReshardingTask.create_resharding_communicators": (
            "5424ed1ab92dca27",
            resharding.create_resharding_communicators,
        ),
    },
    "pipeline_parallel.runtime_emitter": {
        "OverlapFriendlyPipelineInstEmitter._get_stage_send_vars": ("5fea584c86da1dbc", get_stage_send_vars),
        "PipelineInstEmitter._compile_input_placement_spec": (
            "2cd4b019f7b2c10b",
            checkpoints.compile_input_placement_spec,
        ),
        "PipelineInstEmitter._compile_exec_one_mesh": ("a8e3e8b6ecf3bc83", randomness.compile_exec_one_mesh),
    },
    "pipeline_parallel.computation": {
        "JaxPipelineComputation.outvars_def_order": ("0e90adbc08d2c92e", outvars_def_order),
        "create_donation_mapping": ("e50f3c69ecea1a0c", donation.create_donation_mapping),
        "mark_missing_vars_in_backward_computation_pipeline_marks": ("98d07132f5299f21", names.mark_missing_vars),
    },
    "monkey_patch": {
        "monkey_patch_random": ("631503f82c21c77e", randomness.monkey_patch_random),
        "restore_random": ("c15f277852b1d7a0", randomness.restore_random),
    },
    "serialization": {
        "save_checkpoint": ("f7d568a1d6d6a5d5", checkpoints.save_checkpoint),
        "restore_checkpoint": ("b71389f7f81cf048", checkpoints.restore_checkpoint),
    },
    "pipeline_parallel.apply_grad": {
        "process_apply_gradient": ("2d05a5ce04dca9ff", donation.process_apply_gradient),
        "slice_apply_gradient": ("55c3a7bb9fa41f88", update_sums.slice_apply_gradient),
        "ApplyGradRewriter.split_replicated_eqns": ("12f2512230a4618d", update_sums.split_replicated_eqns),
    },
    "pipeline_parallel.layer_stats": {
        "eqn_flops": ("870255b02a28996d", names.eqn_flops),
        "heavy_count": ("9f8a21771f8b357c", names.heavy_count),
    },
}
PATCHES = PatchSet(
    [
        *(
            Patch(Target(f"alpa.{module}", name, (digest,)), replacement)
            for module, functions in _REPLACED.items()
            for name, (digest, replacement) in functions.items()
        ),
        *failures.PATCHES,
        *reading.PATCHES,
        *reservation.PATCHES,
    ]
)
