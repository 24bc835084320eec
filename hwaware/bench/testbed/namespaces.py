"""Enter and make Linux namespaces through the C library: Python has os.setns and os.unshare only from 3.12 on."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Iterator, Sequence

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
MS_BIND = 0x1000
MS_REC = 0x4000
MS_SLAVE = 0x80000
# The user namespace comes first, as it gives the right to enter the others. The mount namespace comes last, to keep
# /proc readable until then.
ENTER_ORDER = (("user", CLONE_NEWUSER), ("net", CLONE_NEWNET), ("uts", CLONE_NEWUTS), ("mnt", CLONE_NEWNS))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def has_one_thread() -> bool:
    """Return True if this process has one thread: Linux lets no other enter a user namespace."""
    return len(os.listdir("/proc/self/task")) == 1


def unshare(flags: int) -> None:
    """Give this process new namespaces of the kinds in `flags` (CLONE_NEW...)."""
    _check(_libc().unshare(ctypes.c_int(flags)), f"unshare({flags:#x})")


def mount(source: str, target: str, flags: int) -> None:
    """Mount `source` on `target`; MS_BIND shows the same file or directory at both."""
    result = _libc().mount(source.encode(), target.encode(), b"none", ctypes.c_ulong(flags), None)
    _check(result, f"mount({source}, {target})")


def enter(pid: int, kinds: Sequence[str]) -> None:
    """Move this process into namespaces of process `pid`.

    It skips namespaces that both share already: entering one's own user namespace is an error. The working directory
    stays the same.

    Args:
        pid: The process.
        kinds: Some of "user", "net", "uts" and "mnt".
    """
    working_directory = os.getcwd()
    wanted = [(kind, flag) for kind, flag in ENTER_ORDER if kind in kinds and not shares(pid, kind)]
    with (
        contextlib.ExitStack()
    ) as stack:  # open all first: after entering the user namespace, /proc/PID may be out of reach
        files = [(stack.enter_context(_opened(f"/proc/{pid}/ns/{kind}")), flag, kind) for kind, flag in wanted]
        for descriptor, flag, kind in files:
            _check(_libc().setns(ctypes.c_int(descriptor), ctypes.c_int(flag)), f"setns({kind} of {pid})")
    os.chdir(working_directory)  # entering a mount namespace changes to its root


def shares(pid: int, kind: str) -> bool:
    """Return True if this process is in the same namespace as process `pid`; `kind` is as in `enter`."""
    return os.stat(f"/proc/{pid}/ns/{kind}").st_ino == os.stat(f"/proc/self/ns/{kind}").st_ino


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def net_inode(pid: int) -> int:
    """Return the inode number of process `pid`'s network namespace."""
    return os.stat(f"/proc/{pid}/ns/net").st_ino


def become_user_root() -> None:
    """Make this process root of a new user namespace, with new network, mount and host-name namespaces.

    Raises:
        OSError: The system does not allow this user to.
    """
    uid, gid = os.getuid(), os.getgid()
    unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWUTS)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as stream:
            stream.write(text)
    mount("none", "/", MS_REC | MS_SLAVE)
