"""A model trained under Alpa by one mapping, step by step, on a running Ray cluster."""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import Any, Iterator, List, Optional, Tuple

from hwaware.bench.harness import StepTimes
from hwaware.cluster import ClusterProfile
from hwaware.plans import Plan
from hwaware.reference_kernel import Reference
from hwaware.runtime import settings
from hwaware.runtime.timelines import StepRecorder
from hwaware.timeline import Timeline
from hwaware.workload import Workload

_ALONE_LIMIT_S = 120.0


class TrainingRun:
    """One compiled training program and its state.

    Attributes:
        name, plan: The mapping.
        workload: What its layers need, timed if that was asked for.
        layer_programs: What was timed.
        losses: Of the steps so far.

    Args:
        name: Name of the mapping.
        model: A built-in model (see hwaware.models).
        profile: Of the running cluster; its devices are the ones that may be used.
        num_layers: How many layers Alpa cuts the model into.
        num_microbatches: Per step.
        microbatch_size: Samples per microbatch.
        plan: The mapping; hwaware searches for one if left out.
        seed: Of the initial state.
        schedule: Alpa's name of the pipeline schedule.
        measure: Whether layers are timed on the cluster before they are placed.

    Raises:
        HwawareError: The model cannot be placed, or the cluster is not the profile's.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        profile: ClusterProfile,
        num_layers: int,
        num_microbatches: int,
        microbatch_size: int,
        plan: Optional[Plan] = None,
        seed: int = 0,
        schedule: str = "1f1b",
        measure: bool = False,
    ) -> None:
        import alpa

        from hwaware.patching import HardwareAwareStageOption, meshes, stage_option

        self.name = name
        self.losses: List[float] = []
        self._sends = settings.current().sends
        self._model = model
        self._batch_size = num_microbatches * microbatch_size
        self._mesh = meshes.cluster_mesh(meshes.device_counts(profile))
        method = alpa.PipeshardParallel(
            devices=self._mesh,
            num_micro_batches=num_microbatches,
            layer_option=alpa.AutoLayerOption(layer_num=num_layers),
            pipeline_schedule=schedule,
            stage_option=HardwareAwareStageOption(profile, plan, costs="measured" if measure else "model"),
        )

        def train_step(state: Any, batch: Any) -> Tuple[Any, Any]:
            result: Tuple[Any, Any] = model.train_step(state, batch, value_and_grad=alpa.value_and_grad)
            return result

        self._step = alpa.parallelize(train_step, method=method)
        self._state = model.initial_state(seed)
        try:
            self._executable = self._step.get_executable(self._state, self._model.batch(0, self._batch_size))
        except BaseException:
            self.close()
            raise
        newest, workload = stage_option.last_plan(), stage_option.last_workload()
        assert newest is not None  # compiling has just set both
        assert workload is not None
        self.plan: Plan = newest
        self.workload: Workload = workload
        self.layer_programs = stage_option.last_layer_programs()

    @contextlib.contextmanager
    def reference(self, profile: ClusterProfile) -> Iterator[Reference]:
        """Its layers as a reference for steps on the cluster, which lets them be timed again until the block ends."""
        from hwaware.patching.measuring import layers_reference

        with layers_reference(self.workload, self.layer_programs, profile) as reference:
            yield reference

    def wait_until_compiled(self) -> None:
        """Wait for the workers, which compile while the driver goes on."""
        self._executable.sync()

    def step(self) -> float:
        """Train one step on a batch that lies on the devices.

        Returns:
            The wall time [s] from its dispatch until every worker has ended it.
        """
        batch = self._model.batch(len(self.losses), self._batch_size)
        with self._loaded(batch), self.at_work():
            start = time.perf_counter()
            self._state, loss = self._step(self._state, batch)
            self._executable.sync()
            elapsed = time.perf_counter() - start
        self.losses.append(float(loss._value))
        return elapsed

    @contextlib.contextmanager
    def _loaded(self, batch: Any) -> Iterator[None]:
        """The arguments of the block's one step lie on the devices, the batch too, and the workers are at rest.

        Alpa sends the batch while the step begins, to one stage after the other: programs of the first stages run at
        the same time, and replicas begin up to 90 ms apart with batches of 64 MiB. Nothing that places stages can
        change that, so it is kept out of the times, as in Alpa's own benchmarks (use_dummy_value_for_benchmarking in
        its global_env.py).
        """
        import jax

        run = self._executable
        arguments = jax.tree_util.tree_leaves((self._state, batch))
        loaded = [
            mesh.shard_args_to_bufs(
                run.input_shard_indices[index],
                run.delete_after_shard[index],
                run.batch_invars[index],
                run.num_batch,
                [arguments[argument] for argument in run.mesh_arg_indices[index]],
            )
            for index, mesh in enumerate(run.mesh_group)
        ]
        run.sync()
        with contextlib.ExitStack() as stack:
            for mesh, buffers in zip(run.mesh_group, loaded):
                # Alpa's own stays behind it, in the class.
                mesh.shard_args_to_bufs = lambda *_, buffers=buffers: buffers
                stack.callback(delattr, mesh, "shard_args_to_bufs")
            yield

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """The workers have their devices' shares during the block.

        Runs are compared in turns. Five that wait, with a hundredth of a core each, would take a quarter of a share of
        0.2 from the one that does not.

        Raises:
            WorkerFailedError: A worker failed or was lost.
        """
        from hwaware.patching.failures import ask_all

        group = self._mesh.launched_physical_mesh_group
        ask_all(group, "work", "Going to work")
        yield
        ask_all(group, "rest", "Going to rest")

    def timed_step(self) -> StepTimes:
        """Train one step, recorded."""
        timelines: List[Timeline] = []
        with self.recorded(timelines):
            wall_s = self.step()
        return StepTimes(wall_s, timelines[0].step_s)

    @contextlib.contextmanager
    def recorded(self, timelines: List[Timeline]) -> Iterator[None]:
        """Record the steps of the block; their timeline is added to `timelines` at its end."""
        recorder = StepRecorder(self._executable, [stage.devices for stage in self.plan.stages], self._sends)
        recorder.start()
        yield
        timelines.append(recorder.stop())

    def alone_s(self) -> Iterator[Tuple[float, ...]]:
        """Stage after stage, the wall times [s] of its programs alone on its devices: forward, backward, update.

        The other stages are idle meanwhile. Of a stage on several hosts, which run its programs together, the slowest
        counts.
        """
        import ray

        for mesh, programs in zip(self._executable.mesh_group, self._programs()):
            calls = (
                [worker.profile_executable_with_dummy_inputs.remote(program) for worker in mesh.workers]
                for program in programs
            )
            with self.at_work():
                found = [ray.get(hosts, timeout=_ALONE_LIMIT_S) for hosts in calls]
            yield tuple(max(map(statistics.mean, times)) for times in found)

    def _programs(self) -> List[List[Any]]:
        """The programs of each stage, in the order in which Alpa numbers them."""
        programs: List[List[Any]] = [[] for _ in self.plan.stages]
        for index, program in enumerate(self._executable.executable_uuids):
            for mesh in self._executable.schedule.stage_placement(index):
                programs[mesh].append(program)
        return programs

    def close(self) -> None:
        """End the run's workers."""
        group = self._mesh.launched_physical_mesh_group
        if group is not None:
            group.shutdown()
            self._mesh.launched_physical_mesh_group = None


def single_device_losses(model: Any, batch_size: int, steps: int, seed: int = 0) -> Tuple[float, ...]:
    """The losses of the same training by plain JAX on one device, whole batches at once."""
    import jax

    state = model.initial_state(seed)
    train_step = jax.jit(model.train_step)
    losses = []
    for step in range(steps):
        state, loss = train_step(state, model.batch(step, batch_size))
        losses.append(float(loss))
    return tuple(losses)
