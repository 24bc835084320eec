"""Keep compiled programs on the disk of a host, for the next process that runs them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from pathlib import Path
from typing import Optional

from hwaware import cache_folder
from hwaware.output_files import replace_file

# A folder that has more loses the programs that were used longest ago.
_MOST_BYTES = 1 << 29
_DIGEST_BYTES = 32


class ProgramFiles:
    """Hold compiled programs of this host in a folder, each under a key.

    A file that is damaged, or that cannot be read or written, counts as none. Its program is compiled again.

    Args:
        folder: The folder; it is made when it is needed.
        most_bytes: Size of all files together.
    """

    def __init__(self, folder: Path, most_bytes: int = _MOST_BYTES) -> None:
        self._folder, self._most_bytes = folder, most_bytes

    def get(self, key: str) -> Optional[bytes]:
        """Return the program of a key; None if the folder has none."""
        path = self._folder / _name(key)
        try:
            self._require_own()
            data = path.read_bytes()
            os.utime(path)  # it was used now
        except OSError:
            return None
        digest, program = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        return program if hashlib.sha256(program).digest() == digest else None

    def put(self, key: str, program: bytes) -> None:
        """Keep a program; other processes see all of it or nothing."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._require_own()
            replace_file(self._folder / _name(key), hashlib.sha256(program).digest() + program)
            self._shrink()

    def _require_own(self) -> None:
        """Refuse a folder in which another user may write: programs run as they are."""
        stat = self._folder.stat()
        if stat.st_uid != os.geteuid() or stat.st_mode & 0o022:
            raise PermissionError(self._folder)

    def _shrink(self) -> None:
        """Remove the files that were used longest ago, beyond the limit."""
        left = self._most_bytes
        files = [(path.stat(), path) for path in self._folder.iterdir()]
        for stat, path in sorted(files, key=lambda each: each[0].st_mtime, reverse=True):
            left -= stat.st_size
            if left < 0:
                path.unlink()


def _name(key: str) -> str:
    """Return the name of a file: a program also depends on the processor and on settings of XLA."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        key += next((line for line in file if line.startswith(("flags", "Features"))), "")
    settings = (platform.machine(), os.cpu_count(), os.environ.get("XLA_FLAGS"), os.environ.get("NPROC"))
    return hashlib.sha256(f"{settings}{key}".encode()).hexdigest()


def of_host(setting: Optional[str] = None) -> Optional[ProgramFiles]:
    """Return the compiled programs of this host; None if the cache is switched off.

    Args:
        setting: The driver's HWAWARE_CACHE; None if the driver has none.
    """
    folder = cache_folder.folder(setting)
    return None if folder is None else ProgramFiles(folder / "programs")
