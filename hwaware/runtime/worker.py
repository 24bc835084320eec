"""Run a stage in a process with devices, buffers and executables, in place of Alpa's MeshHostWorker.

Methods have the names and signatures that Alpa's driver, patched or not, and its interpreter on the worker call. Only
hwaware's replacements call the methods that load a checkpoint, and those of Alpa's own profiling.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterable
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

import numpy

from hwaware import host_devices, ucx
from hwaware.compat.packages import ALPAS_JAXLIB
from hwaware.encryption import Encryption, Identity
from hwaware.errors import HwawareError, MeasurementError
from hwaware.greeting import Credentials
from hwaware.runtime import backend, mesh, programs
from hwaware.runtime.checkpoints import Fault, Load, Written, attempt, read_boxes, write_arrays
from hwaware.runtime.feeding import Expected, Promised
from hwaware.runtime.instructions import eager_sends, only_run, without_unread_zeros
from hwaware.runtime.memory import MemoryAccount
from hwaware.runtime.recorder import Recorder, Recording
from hwaware.runtime.settings import RuntimeSettings
from hwaware.runtime.transfers import CHANNEL, FROM_DRIVER, MAILBOX_BOUND, Transfers, assembled, part_bytes
from hwaware.transport import Address, Mailbox, PeerFailedError

# The Ray concurrency group of calls that are answered while a step runs.
CONTROL = "control"
_RELAYED = "see the first error of the step; then launch the program again."


class Failure(NamedTuple):
    """A failure that ended the work of a worker.

    Attributes:
        sentence: A sentence about the failure.
        is_own: True if this worker failed; False if it only noticed a peer's failure.
        fix: The remedy, if the failure has one of its own.
    """

    sentence: str
    is_own: bool
    fix: Optional[str] = None


class HostWorker:
    """A Ray actor that runs one pipeline stage on the devices that one host gives it.

    Args:
        place: The worker's stage, host and devices.
        prepare: Imports Alpa, after it has made stock JAX look like the JAX that Alpa was written for. It returns the
            module with Alpa's timers.
        settings: Settings of the program's workers.
        secret: Secret of the program, which callers of this worker's mailbox must know.
        identity: Identity of the program, to encrypt connections; None if these are plain.
    """

    def __init__(
        self, place: mesh.Place, prepare: Callable[[], Any], settings: RuntimeSettings, secret: bytes,
        identity: Optional[Identity],
    ) -> None:  # fmt: skip
        mesh.prepare_environment(place)
        # Importing, compiling and loading the model run at full speed; the device's share begins with the first step.
        self._outside_share = contextlib.ExitStack()
        self.rest()
        self._timer_module = prepare()
        self._share_programs(settings.cache)
        self.num_devices = len(place.devices)
        self.local_devices: Sequence[Any] = ()
        self.all_devices: Sequence[Any] = ()
        self.client: Any = None
        self.buffers: Dict[Any, List[Any]] = {}
        self.executables: Dict[Any, Any] = {}
        self.newest: Sequence[Any] = ()
        self._send_tasks: Dict[int, Any] = {}
        self._receive_tasks: Dict[int, Any] = {}
        self._settings = settings
        self._failure: Optional[Failure] = None
        self._resident = self.buffers  # Alpa's interpreter swaps `buffers` while it runs
        self._runs: Dict[int, int] = {}
        self.recorder = Recorder()
        host_devices.join(*place.devices)  # before others look at devices that the host may not declare
        self._open(place, secret, identity)
        if settings.enforce_memory:
            host_devices.limit_memory(*place.devices)
        if place.workers == 1:
            self._find_devices()

    def _open(self, place: mesh.Place, secret: bytes, identity: Optional[Identity]) -> None:
        """Take a place in a program, with a new mailbox, no connections, and an empty memory account."""
        from hwaware.runtime.reductions import Reducer

        self._place = place
        self.mesh_id = place.mesh_id
        self._where = str(place)
        settings = self._settings
        limits = _memory_limits(place.devices) if settings.enforce_memory else None
        self.account = MemoryAccount(limits)
        encryption = None if identity is None else Encryption(identity)
        credentials = Credentials(secret, CHANNEL, settings.message_digests, encryption)
        mailbox = Mailbox(
            place.address,
            credentials,
            bound=MAILBOX_BOUND,
            peers_stay=True,
            ports=host_devices.ports(place.devices[0]),
            most_bytes=sum(limits) if limits else None,
            strict=FROM_DRIVER,  # of two steps: they would fill the memory while a late stage waits for an early one
        )
        self._address = (place.address, mailbox.port)
        failed = functools.partial(self._fail, is_own=False)  # the peer that cannot be reached is what went wrong
        self._transfers = Transfers(mailbox, credentials, failed, self._where, settings, self.recorder)
        self.reducer = Reducer(self._transfers)
        if self.local_devices:  # found for an earlier program
            self._open_wire()

    def _share_programs(self, setting: Optional[str]) -> None:
        from hwaware.compat.client import share_programs

        share_programs(programs.of_host(setting))

    def _find_devices(self) -> None:
        self.local_devices = mesh.local_devices(self._place)
        self.all_devices = mesh.all_devices(self._place)
        self.client = self.local_devices[0].client
        self._open_wire()

    def _open_wire(self) -> None:
        try:
            self._transfers.open_wire(self.local_devices, self._place.address)
        except HwawareError as error:  # nobody looks at why a worker did not start
            self._keep_failure(error)

    # Control

    def work(self) -> None:
        """Join the devices' CPU quota, as every step does that finds the worker at rest."""
        self._outside_share.close()

    def rest(self) -> None:
        """Leave the devices' CPU quota until the next step: waiting threads would take 0.011 of a core from others."""
        self._outside_share.close()
        self._outside_share.enter_context(host_devices.unthrottled())

    def mailbox_address(self) -> Address:
        """Return where peers send to; an answer also shows that this worker is up."""
        return self._address

    def free_coordinator(self) -> str:
        """Return an address at which the hosts of this worker's stage may meet."""
        return mesh.free_coordinator(self._place.address)

    def meet(self, coordinator: str) -> bool:
        """Connect with the other hosts of the stage; every host has to call this.

        Raises:
            HwawareError: The hosts did not meet, or this JAX cannot connect them.
        """
        from hwaware.runtime.executables import warm_up

        mesh.meet(self._place, coordinator)
        self._find_devices()
        warm_up(self.all_devices, self.local_devices)
        return True

    def join_group(self, name: str, rank: int, addresses: List[Address]) -> None:
        """Learn the members of a group of two meshes that exchange arrays."""
        self._transfers.join_group(name, rank, addresses)

    def failure(self) -> Optional[Failure]:
        """Return what went wrong here, if anything; calls in the group `CONTROL` are answered while a step runs."""
        return self._failure

    def clock_s(self) -> float:
        """Return the time [s] on this worker's clock, in which it records."""
        return time.monotonic()

    def start_recording(self) -> None:
        """Record instructions from now on."""
        self.recorder.start()

    def stop_recording(self) -> Recording:
        """Stop recording, and return what was recorded."""
        return self.recorder.stop()

    def take_recording(self) -> Recording:
        """Return the recording since the last call. Recording goes on."""
        return self.recorder.take()

    def stores(self) -> Tuple[Dict[Any, List[Any]], ...]:
        """Return all arrays of this worker: those of the running step, and those between steps."""
        return (self.buffers, self._resident)

    def peak_bytes(self) -> int:
        """Return the most bytes of memory that the accounted steps needed on one device."""
        return self.account.peak_bytes

    def set_memory_limit(self, limit_bytes: int) -> None:
        """Give each device that much memory from the next step on, whatever its host declares."""
        self.account = MemoryAccount([limit_bytes])
        self._runs.clear()

    def process_id(self) -> int:
        """Return the id of the worker's process on its host."""
        return os.getpid()

    def join_reduction(self, group: str, rank: int, meshes: List[List[int]], addresses: List[Address]) -> None:
        """Learn the members of a group of meshes that combine values; see Reducer.join."""
        self.reducer.join(group, rank, meshes, addresses)

    def check_alive(self) -> bool:
        """Return True, or raise an error if an earlier step failed here."""
        self._raise_failure()
        return True

    def sync(self, *_: Any) -> None:
        """Wait until everything that was started here has been computed.

        Raises:
            MeasurementError: An instruction failed since the worker started.
        """
        self._raise_failure()
        self._finish_programs()

    def _finish_programs(self) -> None:
        for array in self.newest:
            array.block_until_ready()

    def end(self) -> None:
        """End this process at once; the driver calls this where Ray cannot end workers any more."""
        os._exit(1)

    def shutdown(self) -> None:
        """Flush what is being sent and forget everything."""
        self._transfers.close()
        self.executables.clear()
        self.buffers.clear()

    def get_timer(self, name: str) -> Any:
        """Return Alpa's timer of that name on this worker."""
        return self._timer_module.timers(name)

    def get_memory_allocated(self) -> int:
        """Return the bytes in use on the device that has most in use."""
        return max(backend.live_bytes(device) for device in self.local_devices)

    def get_max_memory_allocated(self) -> int:
        """Return the most bytes that a device had in use, by its allocator or by the account of the steps."""
        most = [backend.live_bytes(device, "peak_bytes_in_use") for device in self.local_devices]
        return max(self.account.peak_bytes, *most)

    def get_exec_hlo_text(self, uuid: int) -> str:
        """Return an executable's program as text."""
        return str(self.executables[uuid].get_hlo_text())

    def reset_timer(self, name: str) -> None:
        """Reset Alpa's timer of that name on this worker."""
        self.get_timer(name).reset()

    def get_tracer(self) -> Any:
        """Return what Alpa's own interpreter has noted on this worker, where its `collect_trace` is set."""
        return self._timer_module.tracer

    def sync_move_worker(self) -> None:
        """Do nothing: checkpoints are whole when their writing has returned."""

    def destroy_collective_group(self, group_name: str = "default") -> None:
        """Do nothing when Alpa's own shutdown, without hwaware's patches, calls this: groups end with their workers."""

    def reset_memory_stats(self) -> None:
        """Do nothing: stock JAX keeps no statistics that a worker could reset."""

    def set_runtime_random_seed(self, seed: int) -> None:
        """Do nothing: stock JAX draws random numbers from keys in the program, and has no state to seed."""

    # Buffers

    def put(self, array: Any, index: int = 0) -> Any:
        """Put a NumPy array on one of this worker's devices. A CPU may share its memory, so do not change it later."""
        import jax

        return jax.device_put(array, self.local_devices[index])

    def put_buffers(self, uuids: Any, datas: Sequence[Any], num_batch: int = 1, batch_dim: int = 0) -> None:
        """Store an array, cut into `num_batch` parts along `batch_dim`, one part under each uuid.

        Args:
            uuids: The uuid of each part.
            datas: The block of the array on each of this worker's devices.
            num_batch: Number of parts.
            batch_dim: Dimension along which to cut.
        """
        try:
            cut = [numpy.split(data, num_batch, batch_dim) if num_batch > 1 else [data] for data in datas]
            for uuid, parts in zip(_as_list(uuids), zip(*cut)):
                self.buffers[uuid] = [self.put(part, index) for index, part in enumerate(parts)]
        except Exception as error:  # nobody looks at this call's outcome, but the next step needs the array
            self._keep_failure(error)
            raise

    def shard_and_put_non_zero_buffer(
        self, uuids: Any, shape: Sequence[int], dtype: Any, indices: Sequence[Any], num_batch: int
    ) -> None:
        """Store an array of equal small numbers, for Alpa's option `use_dummy_value_for_benchmarking`.

        Args:
            uuids: The uuid of each of the `num_batch` parts.
            shape: Shape of the whole array.
            dtype: Its data type.
            indices: Place of each part in the array, in slices, device by device.
            num_batch: Number of parts.
        """
        for part, uuid in enumerate(_as_list(uuids)):
            sizes = [
                [len(range(*one.indices(edge))) for one, edge in zip(place, shape)]
                for place in indices[part::num_batch]
            ]
            self.buffers[uuid] = [self.put(numpy.full(size, 1e-8, dtype), at) for at, size in enumerate(sizes)]

    def expect(self, parts: Sequence[Expected]) -> None:
        """Expect parts of a batch from the driver: each arrives before, or while, an instruction waits for it."""
        self.buffers.update({part.uuid: Promised(part) for part in parts})

    def held(self, uuids: Iterable[Any]) -> List[List[Any]]:
        """Return arrays, each as one part for each device; wait for samples that have not arrived.

        Raises:
            MeasurementError: The samples did not arrive in time, or a peer failed.
        """
        arrays = [self.buffers[uuid] for uuid in uuids]
        if [] in arrays:  # a step asks for hundreds of arrays, and this looks at all within microseconds
            for promised in (one for one in arrays if isinstance(one, Promised) and not one):
                self._fill(promised)
        return arrays

    def _fill(self, promised: Promised) -> None:
        from hwaware.compat.client import put

        part = promised.expected
        whole = tuple(slice(0, edge) for edge in part.shape)
        nbytes = part_bytes(whole, part.shape, part.dtype)
        taken = [self._transfers.take(key, nbytes) for key in part.keys]
        arrays = [assembled([(whole, data)], part.shape, part.dtype) for data in taken]
        promised.extend(put(array, device) for array, device in zip(arrays, self.local_devices))

    def settle(self) -> None:
        """Wait for all samples that this worker expects.

        Raises:
            MeasurementError: An instruction failed earlier, or the samples do not arrive.
        """
        self._raise_failure()
        try:
            self.held(list(self.buffers))
        except HwawareError as error:
            self._keep_failure(error)
            raise

    def get_buffers(self, uuids: Any, device_indices: Any = None) -> Any:
        """Return NumPy copies of arrays, for the driver."""
        self._raise_failure()
        if not isinstance(uuids, Iterable):
            return self._get_one(uuids, device_indices)
        indices = device_indices if device_indices is not None else [None] * len(list(uuids))
        return [self._get_one(uuid, index) for uuid, index in zip(uuids, indices)]

    def _get_one(self, uuid: Any, indices: Any) -> Any:
        arrays = self.buffers[uuid]
        if indices is not None and not isinstance(indices, Iterable):
            return numpy.asarray(arrays[indices])
        chosen = arrays if indices is None else [arrays[index] for index in indices]
        return [numpy.asarray(array) for array in chosen]

    def delete_buffers(self, uuids: Any) -> None:
        """Forget arrays; their memory is freed when nothing uses them any more."""
        for uuid in _as_list(uuids):
            # After a failed step an output may never have been made; the driver deletes it all the same.
            self.buffers.pop(uuid, None) if self._failure else self.buffers.pop(uuid)

    def block_until_ready_buffers(self, uuids: Any) -> None:
        """Wait until arrays have been computed."""
        self._raise_failure()
        for uuid in _as_list(uuids):
            for array in self.buffers[uuid]:
                array.block_until_ready()

    # Checkpoints

    def save_arrays(self, path: str, arrays: Sequence[Tuple[Any, int]]) -> Union[List[Written], Fault]:
        """Write arrays, each from one device, into a new file; return a Fault where the system stops this."""
        self._raise_failure()
        parts = (self._get_one(uuid, device) for uuid, device in arrays)
        return attempt(lambda: write_arrays(path, parts), self._where)

    def load_arrays(self, folder: str, loads: Sequence[Load]) -> Optional[Fault]:
        """Read this worker's blocks of arrays, one for each device; return a Fault where that is impossible."""
        self._raise_failure()
        self.buffers.update({load.uuid: [] for load in loads})  # the driver deletes these also after a fault

        def read(load: Load) -> None:
            blocks = read_boxes(folder, load.array, load.boxes)
            self.put_buffers(load.uuid, [block.astype(load.dtype, copy=False) for block in blocks])

        for load in loads:
            fault = attempt(functools.partial(read, load), self._where)
            if isinstance(fault, Fault):
                return fault
        return None

    # Executables

    def put_executable(self, uuid: int, kind: Any, *args: Any) -> bool:
        """Make an executable that Alpa's driver names by its own class; keep a failure, and return False then."""
        try:
            with host_devices.unthrottled():
                self.executables[uuid] = self._make_executable(uuid, kind, args)
        # Nobody looks at the outcome of this call; every later one raises.
        except Exception as error:  # noqa: BLE001
            self._fail(f"Compiling failed: {type(error).__name__}: {error}")
            return False
        return True

    def _make_executable(self, uuid: int, kind: Any, args: Sequence[Any]) -> Any:
        from hwaware.compiler.programs import SplitProgram
        from hwaware.runtime.executables import SplitExecutable, StageExecutable, ZeroBuffers

        name = kind.__name__
        if name == "PipeshardMeshWorkerExecutable":  # Alpa's own interpreter
            instructions, configs = self._ordered(args[0]), args[3]
            return kind(self, uuid, instructions, *args[1:3], only_run(configs, instructions), *args[4:])
        if name in ("PartialGradAccMeshWorkerExecutable", "UtilMeshWorkerExecutable"):
            split = isinstance(args[0], SplitProgram)
            return SplitExecutable(self, uuid, args[0]) if split else StageExecutable(self, uuid, args[0])
        if name == "AllocZeroBufferWorkerExecutable":
            return ZeroBuffers(self, *args)
        raise MeasurementError(
            f"Alpa asked a worker on stock JAX for a {name}, which it does not have.",
            f"use pipeline parallelism (PipeshardParallel); other methods need {ALPAS_JAXLIB}.",
        )

    def _ordered(self, instructions: Sequence[Any]) -> Sequence[Any]:
        needed = without_unread_zeros(instructions)
        if self._settings.sends == "blocking":
            return needed
        return eager_sends(needed, {task: self._targets(task) for task in self._send_tasks})

    def profile_executable_with_dummy_inputs(self, uuid: int, **kwargs: Any) -> Any:
        """Return times [s] of an executable alone, as Alpa's own profiling asks for."""
        self._raise_failure()
        return self.executables[uuid].profile_with_dummy_inputs(**kwargs)

    def get_exec_total_allocation_size(self, uuid: int) -> int:
        """Return the bytes of an executable's results and scratch memory."""
        return int(self.executables[uuid].get_total_allocation_size())

    def delete_executable(self, uuid: int) -> None:
        """Forget an executable."""
        self.executables.pop(uuid, None)

    def run_executable(self, uuid: int, *args: Any, **kwargs: Any) -> None:
        """Run an executable; keep a failure, so that the driver's next call meets the failure, whatever it asks for."""
        self._raise_failure()
        self.work()
        is_step = self.buffers is self._resident  # otherwise a step's interpreter asks for one of its programs
        try:
            self._account_for(uuid, is_step)
            self.executables[uuid].execute_on_worker(*args, **kwargs)
        except Exception as error:
            self._keep_failure(error)
            if not is_step:
                raise
            self.buffers = self._resident  # nobody looks at the outcome of a step's call; every later call raises

    def _keep_failure(self, error: Exception) -> None:
        if isinstance(error, PeerFailedError):
            self._fail(error.what, is_own=False)
        elif isinstance(error, HwawareError):
            self._fail(error.what, fix=error.fix)
        else:
            self._fail(f"{type(error).__name__}: {error}")

    def _account_for(self, uuid: int, is_step: bool) -> None:
        """Account for memory in the first two steps of an instruction list; later steps are like the second."""
        if is_step:
            self._runs[uuid] = self._runs.get(uuid, 0) + 1
            self.account.is_on = self._runs[uuid] <= 2

    # Arrays between meshes

    def put_resharding_send_task(self, uuid: int, tasks: Any, group: str) -> None:
        """Remember what a SEND instruction of that number sends, and to whom."""
        self._send_tasks[uuid] = (tasks, group)

    def put_resharding_recv_task(self, uuid: int, tasks: Any, group: str) -> None:
        """Remember what a RECV instruction of that number receives, and from whom."""
        self._receive_tasks[uuid] = (tasks, group)

    def _targets(self, uuid: int) -> Set[Tuple[str, int, int]]:
        tasks, group = self._send_tasks[uuid]
        return {(group, task.tile_spec.rank, task.tile_spec.gpu_idx) for task in tasks}

    def run_resharding_send_task(self, uuid: int, array_uuid: Any) -> None:
        """Hand the array's tiles to the background senders; with blocking sends, return once the tiles have arrived."""
        self._finish_programs_if_blocking()
        tasks, group = self._send_tasks[uuid]
        for task in tasks:
            tile = task.tile_spec
            array = self.held([array_uuid])[0][task.device_id]
            key = self._transfers.send(group, (tile.rank, tile.gpu_idx), task.device_id, array, tuple(tile.offset))
            self.recorder.task(key, uuid)

    def run_resharding_recv_task(self, uuid: int, array_uuid: Any, _set_empty_buffer: bool = True) -> None:
        """Put an array together from its tiles; wait for those that have not arrived."""
        from hwaware.compat.client import put

        self._finish_programs_if_blocking()
        tasks, group = self._receive_tasks[uuid]
        arrays = self.buffers.setdefault(array_uuid, [None] * self.num_devices)
        for task in tasks:
            parts = []
            for tile in task.tile_specs:
                index = tuple(tile.offset)
                nbytes = part_bytes(index, task.shape, task.dtype)
                key, data = self._transfers.receive(group, (tile.rank, tile.gpu_idx), task.device_id, nbytes)
                self.recorder.task(key, uuid)
                parts.append((index, data))
            whole = assembled(parts, task.shape, task.dtype)
            # The type is the device's already. `device_put` would check that for 0.1 ms (0.4 ms on 0.3 of a core).
            is_there = ucx.is_on_device(whole)
            arrays[task.device_id] = whole if is_there else put(whole, self.local_devices[task.device_id])

    def _finish_programs_if_blocking(self) -> None:
        """Wait for programs if sends block, as Alpa's NCCL calls on the default stream do (device_mesh.py:1061)."""
        if self._settings.sends == "blocking":
            self._finish_programs()

    # Failures

    def _fail(self, sentence: str, is_own: bool = True, fix: Optional[str] = None) -> None:
        if self._failure is None:
            self._failure = Failure(sentence, is_own, fix)
            self._transfers.tell_failure(f"In {self._where}: {sentence}" if is_own else sentence)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise MeasurementError(f"In {self._where}: {self._failure.sentence}", _RELAYED)


def _memory_limits(devices: Sequence[int]) -> Optional[List[int]]:
    """Return the memory [byte] that the host declares for its devices; None if it declares none, as GPUs need not."""
    declared = host_devices.declared()
    return [declared[device].memory_bytes for device in devices] if declared else None


def _as_list(uuids: Any) -> List[Any]:
    return list(uuids) if isinstance(uuids, Iterable) else [uuids]
