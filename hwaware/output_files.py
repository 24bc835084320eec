"""Write a file atomically: a reader never sees half a file."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import Union

# File systems allow 255 bytes in a name, and the temporary name is longer than the file's own.
_MOST_OF_NAME = 60


def replace_file(target: Path, data: bytes) -> None:
    """Write `data` into a temporary file beside `target`, which then takes the place of `target`.

    An existing file keeps its mode. A new file gets the mode that the umask leaves. A link at `target` is replaced.

    Raises:
        OSError: The folder cannot be written, or the disk is full; `target` is as before.
    """
    temporary = target.with_name(f".{target.name[:_MOST_OF_NAME]}.{secrets.token_hex(8)}")
    # Python's open would apply the umask too, but it follows links.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        mode = _mode(target)
        if mode is not None:
            os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _mode(path: Union[str, Path]) -> Union[int, None]:
    """Return the permissions of an existing file, without set-user-id and its like; None without such a file."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return stat.S_IMODE(found.st_mode) & 0o777 if stat.S_ISREG(found.st_mode) else None
