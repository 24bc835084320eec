"""All meshes of a program are launched at once: none stays where another fails, or where the driver is interrupted."""

import os
import signal
import threading

import pytest

from hwaware.patching.leaves import _launched

LIMIT_S = 20.0


class Mesh:
    """A mesh that is launched once its event is set; `fails` is what it raises instead."""

    def __init__(self, event, fails=None):
        self.event, self.fails, self.workers = event, fails, []
        self.ended = threading.Event()

    def get_physical_mesh(self, _):
        assert self.event.wait(LIMIT_S)
        if self.fails is not None:
            raise self.fails
        return self

    def shutdown(self, forced):
        assert forced
        self.ended.set()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_fails_in_one_is_raised_once_all_are_done():
    done = threading.Event()
    done.set()
    meshes = [Mesh(done), Mesh(done, MemoryError("no room")), Mesh(done)]
    with pytest.raises(MemoryError, match="no room"):
        _launched(meshes)
    assert [mesh.ended.is_set() for mesh in meshes] == [True, False, True]
    assert _launched([meshes[0], meshes[2]]) == [meshes[0], meshes[2]]


def test_an_interrupted_launch_ends_what_comes_later_too():
    done, late = threading.Event(), threading.Event()
    done.set()
    meshes = [Mesh(done), Mesh(late)]
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        _launched(meshes)
    timer.join()
    assert meshes[0].ended.is_set()
    assert not meshes[1].ended.is_set()
    late.set()
    assert meshes[1].ended.wait(LIMIT_S)
