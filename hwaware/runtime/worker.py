"""HostWorker: a process with a stage's device, buffers and executables; the counterpart of Alpa's MeshHostWorker.

Method names and signatures are those that Alpa's driver and its interpreter on the worker call.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Any, Callable, Dict, List, Optional, Sequence

from hwaware import host_devices
from hwaware.errors import MeasurementError
from hwaware.runtime.instructions import eager_sends
from hwaware.transport import Address, Mailbox

# A stage waits this long for a message: longer than any step that one would wait for, and it ends by itself.
RECEIVE_LIMIT_S = 600.0


class HostWorker:
    """A Ray actor that runs one pipeline stage on one device.

    Args:
        address: The address under which other hosts reach this one.
        mesh_id: Number of the stage's mesh in the pipeline.
        device: Index of the device on its host.
        prepare: Called before Alpa is imported; makes stock JAX look like the JAX that Alpa was written for.
    """

    def __init__(self, address: str, mesh_id: int, device: int, prepare: Callable[[], None]) -> None:
        # Ray hides devices from an actor that asked it for none; the plan says which one is ours.
        os.environ["CUDA_VISIBLE_DEVICES"] = str(device)
        # Importing, compiling and loading the model run at full speed; the device's share begins with the first step.
        self._setting_up = contextlib.ExitStack()
        self._setting_up.enter_context(host_devices.unthrottled())
        prepare()
        import jax

        from hwaware.runtime.transfers import Transfers

        self.mesh_id = mesh_id
        self.local_devices = jax.local_devices()[:1]
        self.num_devices = 1
        self.client = self.local_devices[0].client
        self.buffers: Dict[Any, List[Any]] = {}
        self.executables: Dict[Any, Any] = {}
        self.newest: Sequence[Any] = ()
        self._send_tasks: Dict[int, Any] = {}
        self._receive_tasks: Dict[int, Any] = {}
        self._where = f"stage {mesh_id} on {address}, device {device}"
        self._failure: Optional[str] = None
        mailbox = Mailbox()
        self._address = (address, mailbox.port)
        self._transfers = Transfers(mailbox, self._fail)
        host_devices.join(device)

    # Control

    def mailbox_address(self) -> Address:
        """Where peers send to; also the sign that this worker is up."""
        return self._address

    def join_group(self, name: str, rank: int, addresses: List[Address]) -> None:
        """Learn the members of a group of two meshes that exchange arrays."""
        self._transfers.join_group(name, rank, addresses)

    def check_alive(self) -> bool:
        """True, or an error if an earlier step failed here."""
        self._raise_failure()
        return True

    def sync(self, *_: Any) -> None:
        """Wait until everything that was started here has been computed.

        Raises:
            MeasurementError: An instruction failed since the worker started.
        """
        self._raise_failure()
        for array in self.newest:
            array.block_until_ready()

    def shutdown(self) -> None:
        """Flush what is being sent and forget everything."""
        self._transfers.close()
        self.executables.clear()
        self.buffers.clear()

    def get_timer(self, name: str) -> Any:
        """Alpa's timer of that name on this worker."""
        from alpa.timer import timers

        return timers(name)

    def reset_memory_stats(self) -> None:
        """Stock JAX keeps no statistics that could be reset."""

    def set_runtime_random_seed(self, seed: int) -> None:
        """Stock JAX draws random numbers from keys in the program; there is no state to seed."""

    # Buffers

    def put(self, array: Any) -> Any:
        """A copy of a NumPy array on this worker's device."""
        import jax

        return jax.device_put(array, self.local_devices[0])

    def put_buffers(self, uuids: Any, datas: Sequence[Any], num_batch: int = 1, batch_dim: int = 0) -> None:
        """Store an array, cut into `num_batch` parts along `batch_dim`, one part under each uuid."""
        import numpy

        parts = numpy.split(datas[0], num_batch, batch_dim) if num_batch > 1 else [datas[0]]
        for uuid, part in zip(_as_list(uuids), parts):
            self.buffers[uuid] = [self.put(part)]

    def get_buffers(self, uuids: Any, device_indices: Any = None) -> Any:
        """NumPy copies of arrays, for the driver."""
        self._raise_failure()
        if not isinstance(uuids, Iterable):
            return self._get_one(uuids, device_indices)
        indices = device_indices if device_indices is not None else [None] * len(list(uuids))
        return [self._get_one(uuid, index) for uuid, index in zip(uuids, indices)]

    def _get_one(self, uuid: Any, indices: Any) -> Any:
        import numpy

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

    # Executables

    def put_executable(self, uuid: int, kind: Any, *args: Any) -> bool:
        """Make one of the executables that Alpa's driver asks for by its own class.

        Raises:
            MeasurementError: It could not be made.
        """
        try:
            with host_devices.unthrottled():
                self.executables[uuid] = self._make_executable(uuid, kind, args)
        except Exception as error:
            self._fail(f"Compiling failed: {type(error).__name__}: {error}")
            raise
        return True

    def _make_executable(self, uuid: int, kind: Any, args: Sequence[Any]) -> Any:
        from hwaware.runtime.programs import StageExecutable, ZeroBuffers

        name = kind.__name__
        if name == "PipeshardMeshWorkerExecutable":  # Alpa's own interpreter
            ordered = eager_sends(args[0], {task: self._channel(task) for task in self._send_tasks})
            return kind(self, uuid, ordered, *args[1:])
        if name in ("PartialGradAccMeshWorkerExecutable", "UtilMeshWorkerExecutable"):
            return StageExecutable(self, args[0])
        if name == "AllocZeroBufferWorkerExecutable":
            return ZeroBuffers(self, *args)
        raise MeasurementError(
            f"Alpa asked a worker on stock JAX for a {name}, which it does not have.",
            "use pipeline parallelism (PipeshardParallel); other methods need Alpa's own jaxlib.",
        )

    def delete_executable(self, uuid: int) -> None:
        """Forget an executable."""
        self.executables.pop(uuid, None)

    def run_executable(self, uuid: int, *args: Any, **kwargs: Any) -> None:
        """Run an executable; a failure is kept, so that the driver meets it whatever it asks for next."""
        self._raise_failure()
        self._setting_up.close()
        try:
            self.executables[uuid].execute_on_worker(*args, **kwargs)
        except Exception as error:
            self._fail(f"A step failed: {type(error).__name__}: {error}")
            raise

    # Arrays between meshes

    def put_resharding_send_task(self, uuid: int, tasks: Any, group: str) -> None:
        """Remember what a SEND instruction of that number sends, and to whom."""
        self._send_tasks[uuid] = (tasks, group)

    def put_resharding_recv_task(self, uuid: int, tasks: Any, group: str) -> None:
        """Remember what a RECV instruction of that number receives, and from whom."""
        self._receive_tasks[uuid] = (tasks, group)

    def _channel(self, uuid: int) -> Any:
        tasks, group = self._send_tasks[uuid]
        return (group, *sorted({(task.tile_spec.rank, task.tile_spec.gpu_idx) for task in tasks}))

    def run_resharding_send_task(self, uuid: int, array_uuid: Any) -> None:
        """Hand the array's tiles to the background senders; returns at once."""
        tasks, group = self._send_tasks[uuid]
        for task in tasks:
            tile = task.tile_spec
            array = self.buffers[array_uuid][task.device_id]
            self._transfers.send(group, (tile.rank, tile.gpu_idx), task.device_id, array, tuple(tile.offset))

    def run_resharding_recv_task(self, uuid: int, array_uuid: Any, _set_empty_buffer: bool = True) -> None:
        """Put an array together from the tiles that have arrived; waits for those that have not."""
        import numpy

        tasks, group = self._receive_tasks[uuid]
        arrays = self.buffers.setdefault(array_uuid, [None] * self.num_devices)
        for task in tasks:
            whole = numpy.empty(task.shape, task.dtype)
            for tile in task.tile_specs:
                data = self._transfers.receive(group, (tile.rank, tile.gpu_idx), task.device_id, RECEIVE_LIMIT_S)
                part = whole[tuple(tile.offset)]
                whole[tuple(tile.offset)] = numpy.frombuffer(data, whole.dtype).reshape(part.shape)
            arrays[task.device_id] = self.put(whole)

    # Failures

    def _fail(self, sentence: str) -> None:
        if self._failure is None:
            self._failure = sentence
            self._transfers.tell_failure(f"In {self._where}: {sentence}")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise MeasurementError(
                f"In {self._where}: {self._failure}", "see the first error of the step; then launch the program again."
            )


def _as_list(uuids: Any) -> List[Any]:
    return list(uuids) if isinstance(uuids, Iterable) else [uuids]
