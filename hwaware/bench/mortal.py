"""End the process of a worker at a chosen moment, to see that its program survives."""

from __future__ import annotations

import os
import signal
from typing import Any, Optional, Tuple, Type

from hwaware.survival.rescuer import Rescuer
from hwaware.survival.worker import SurvivingWorker

# Moments of a step and of a copy, and those of a recovery.
IN_STEP = ("run", "send", "receive", "free", "update", "copy", "copy arrays", "send copies")
IN_RECOVERY = ("abandon", "start over", "compile", "take in")


class MortalWorker(SurvivingWorker):
    """A worker that kills its own process when it has come to a moment for the given time."""

    def __init__(self, *arguments: Any) -> None:
        self._moment: Optional[Tuple[str, int]] = None
        # RUN instructions of this step so far, and of the step before: the last one is the update.
        self._run, self._last_run = 0, 0
        super().__init__(*arguments)

    def die_at(self, kind: str, times: int) -> None:
        """End at the start of the work of this kind, the given number of times from now; never with 0."""
        self._moment = (kind, times) if times else None

    def _come_to(self, kind: str) -> None:
        if self._moment is None or self._moment[0] != kind:
            return
        self._moment = (kind, self._moment[1] - 1)
        if self._moment[1] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_in_step(self) -> bool:
        return self.buffers is not self._resident

    def run_executable(self, uuid: int, *args: Any, **kwargs: Any) -> None:
        """Run an executable."""
        if self._is_in_step():
            self._run += 1
            self._come_to("run")
            if self._run == self._last_run:
                self._come_to("update")
        else:
            self._last_run, self._run = self._run, 0
        super().run_executable(uuid, *args, **kwargs)

    def run_resharding_send_task(self, *args: Any) -> None:
        """Send arrays to another stage."""
        self._come_to("send")
        super().run_resharding_send_task(*args)

    def run_resharding_recv_task(self, *args: Any) -> None:
        """Receive arrays of another stage."""
        self._come_to("receive")
        super().run_resharding_recv_task(*args)

    def delete_buffers(self, uuids: Any) -> None:
        """Free arrays."""
        if self._is_in_step():
            self._come_to("free")
        super().delete_buffers(uuids)

    def copy_out(self, order: Any) -> Any:
        """Note what to copy."""
        self._come_to("copy")
        return super().copy_out(order)

    def _copy_idly(self, copying: Any) -> None:
        copying.copy_one()
        self._come_to("copy arrays")
        super()._copy_idly(copying)

    def _send_to(self, *args: Any) -> None:
        self._come_to("send copies")
        super()._send_to(*args)

    def abandon(self, sentence: str) -> None:
        """End the step that runs."""
        self._come_to("abandon")
        super().abandon(sentence)

    def start_over(self, *args: Any) -> None:
        """Take part in a new program."""
        self._come_to("start over")
        super().start_over(*args)

    def put_executable(self, *args: Any) -> Any:
        """Compile a program."""
        self._come_to("compile")
        return super().put_executable(*args)

    def take_in(self, *args: Any) -> None:
        """Hold arrays again."""
        self._come_to("take in")
        super().take_in(*args)


def rescuer_of(kind: Type[SurvivingWorker]) -> Rescuer:
    """Return a rescuer whose workers are of this class."""
    made = Rescuer()
    made.worker_class = kind
    return made
