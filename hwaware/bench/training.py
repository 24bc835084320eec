"""Train a model under Alpa by one mapping, step by step, on a running Ray cluster."""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import Any, Iterator, List, Optional, Tuple

from hwaware.bench.harness import StepTimes
from hwaware.cluster import ClusterProfile
from hwaware.plans import Plan
from hwaware.ray_cluster import fetched
from hwaware.reference_kernel import Reference
from hwaware.runtime import settings
from hwaware.runtime.step_recorder import StepRecorder
from hwaware.timeline import Timeline
from hwaware.workload import Workload

_ALONE_LIMIT_S = 120.0


class TrainingRun:
    """One compiled training program and its state.

    Attributes:
        name: Name of the mapping.
        plan: The mapping.
        workload: The model's layers, timed if `measure` was set.
        layer_sources: The sources of the programs that were timed.
        losses: The losses of all steps so far.

    Args:
        name: Name of the mapping.
        model: A built-in model (see hwaware.models).
        profile: Profile of the running cluster; the run uses only its devices.
        num_layers: Number of layers that Alpa cuts the model into.
        num_microbatches: Microbatches per step.
        microbatch_size: Samples per microbatch.
        plan: The mapping; hwaware searches for one if left out.
        schedule: Alpa's name of the pipeline schedule.
        measure: Time the layers on the cluster before hwaware places them.

    Raises:
        HwawareError: No plan fits the model, or the cluster is not the profile's.
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
        schedule: str = "1f1b",
        measure: bool = False,
    ) -> None:
        import alpa

        from hwaware.activation import HardwareAwareStageOption, unattended
        from hwaware.patching import meshes, stage_option

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
        self._state = model.initial_state(0)
        try:
            with unattended():  # copies of a state, or a move, would disturb what is timed
                self._executable = self._step.get_executable(self._state, self._model.batch(0, self._batch_size))
        except BaseException:
            self.close()
            raise
        newest, workload = stage_option.last_plan(), stage_option.last_workload()
        assert newest is not None  # compiling has just set both
        assert workload is not None
        self.plan: Plan = newest
        self.workload: Workload = workload
        self.layer_sources = stage_option.last_layer_sources()

    @contextlib.contextmanager
    def reference(self, workload: Workload, profile: ClusterProfile) -> Iterator[Reference]:
        """Yield a reference that times the run's layers on the cluster, until the block ends.

        Args:
            workload: The run's, in which no device has times of its own.
            profile: Profile of the running cluster, with the kinds of the workload.
        """
        from hwaware.calibration.timers import layers_reference

        programs = [source.make(True) for source in self.layer_sources]
        with layers_reference(workload, programs, profile) as reference:
            yield reference

    def wait_until_compiled(self) -> None:
        """Wait for the workers, which compile in the background."""
        self._executable.sync()

    def step(self, loaded: bool = True) -> float:
        """Train one step.

        Args:
            loaded: Put the batch on the devices before the step; else the driver sends it within the step.

        Returns:
            Wall time [s] from the dispatch until every worker has ended the step.
        """
        batch = self._model.batch(len(self.losses), self._batch_size)
        with self._loaded(batch) if loaded else contextlib.nullcontext(), self.at_work():
            start = time.perf_counter()
            self._state, loss = self._step(self._state, batch)
            self._executable.sync()
            elapsed = time.perf_counter() - start
        self.losses.append(float(loss._value))
        return elapsed

    @contextlib.contextmanager
    def _loaded(self, batch: Any) -> Iterator[None]:
        """Put the arguments of the block's one step on the devices before it begins, the batch included.

        The driver sends the batch when a step begins, to one stage after the other. The first stages already compute
        then. No placement can change that, so the times leave it out. Alpa's own benchmarks do the same
        (use_dummy_value_for_benchmarking in its global_env.py).
        """
        import jax

        from hwaware.patching.failures import ask_all

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
        ask_all(self._mesh.launched_physical_mesh_group, "settle", "Loading a batch")
        with contextlib.ExitStack() as stack:
            for mesh, buffers in zip(run.mesh_group, loaded):
                # Hides Alpa's method of the class until the attribute is deleted.
                mesh.shard_args_to_bufs = lambda *_, buffers=buffers: buffers
                stack.callback(delattr, mesh, "shard_args_to_bufs")
            yield

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Give the workers their devices' shares during the block.

        Runs take turns. Five waiting runs with a hundredth of a core each would take a quarter of a share of 0.2.

        Raises:
            WorkerFailedError: A worker failed or was lost.
        """
        from hwaware.patching.failures import ask_all

        group = self._mesh.launched_physical_mesh_group
        ask_all(group, "work", "Going to work")
        yield
        ask_all(group, "rest", "Going to rest")

    def timed_step(self) -> StepTimes:
        """Train one step, and record its pipeline time too."""
        timelines: List[Timeline] = []
        with self.recorded(timelines):
            wall_s = self.step()
        return StepTimes(wall_s, timelines[0].step_s)

    @contextlib.contextmanager
    def recorded(self, timelines: List[Timeline]) -> Iterator[None]:
        """Record the steps of the block, and append their timeline to `timelines` at its end."""
        recorder = StepRecorder(self._executable, [stage.devices for stage in self.plan.stages], self._sends)
        recorder.start()
        yield
        timelines.append(recorder.stop())

    def alone_s(self) -> Iterator[Tuple[float, ...]]:
        """Yield the wall times [s] of each stage's programs alone: forward, backward, update.

        The other stages are idle meanwhile. A stage on several hosts runs its programs on all; the slowest counts.
        """
        for mesh, programs in zip(self._executable.mesh_group, self._programs()):
            calls = (
                [worker.profile_executable_with_dummy_inputs.remote(program) for worker in mesh.workers]
                for program in programs
            )
            with self.at_work():
                found = [fetched(hosts, _ALONE_LIMIT_S, "Running a program alone") for hosts in calls]
            yield tuple(max(map(statistics.mean, times)) for times in found)

    def _programs(self) -> List[List[Any]]:
        """Return the programs of each stage, in Alpa's order."""
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


def single_device_losses(model: Any, batch_size: int, steps: int) -> Tuple[float, ...]:
    """Return the losses of plain JAX on one device, trained on the same whole batches."""
    import jax

    state = model.initial_state(0)
    train_step = jax.jit(model.train_step)
    losses = []
    for step in range(steps):
        state, loss = train_step(state, model.batch(step, batch_size))
        losses.append(float(loss))
    return tuple(losses)
