"""Let a step appear in a folder of checkpoints as a whole, or not at all.

A save writes into a new folder `step_N.TOKEN`. When all bytes are on the disk, it renames the manifest to
`checkpoint_N`. Until this rename an earlier checkpoint of the step counts, and from then on the new one. A killed save
leaves a folder that no manifest names; the next save removes this folder. Only one program at a time may save in a
folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from typing import Dict, Iterator, List, NamedTuple, Optional

from hwaware.errors import RecordError
from hwaware.runtime.checkpoints import check_size, open_inside, sync_folder
from hwaware.runtime.manifests import Manifest

_DATA = re.compile(r"step_(\d+)\.[0-9a-f]{16}")
_MANIFEST = re.compile(r"checkpoint_(0|[1-9]\d*)")


class Unfinished(NamedTuple):
    """A step that is being written.

    Attributes:
        folder: The folder of the checkpoints.
        step: Number of the step.
        name: Name of the folder for its data, in `folder`.
    """

    folder: str
    step: int
    name: str

    @property
    def path(self) -> str:
        """Return the path of the folder for its data."""
        return os.path.join(self.folder, self.name)


def manifest_path(folder: str, step: int) -> str:
    """Return the path of a step's manifest."""
    return os.path.join(folder, f"checkpoint_{step}")


def steps(folder: str) -> List[int]:
    """Return the numbers of the complete steps in a folder, the newest first; none without such a folder.

    Raises:
        OSError: The folder cannot be read, or is a file.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted((int(match.group(1)) for match in map(_MANIFEST.fullmatch, names) if match), reverse=True)


def steps_to_restore(folder: str) -> List[int]:
    """Return the same as `steps`, or raise RecordError."""
    with readable(folder):
        return steps(folder)


@contextlib.contextmanager
def readable(folder: str) -> Iterator[None]:
    """Turn the system's refusal to read a folder, or a file inside, into a RecordError."""
    try:
        yield
    except OSError as error:
        raise RecordError(
            f"{error.filename or folder} cannot be read: {error.strerror}.", "check the path and its permissions."
        ) from error


def begin(folder: str, step: int) -> Unfinished:
    """Make the folder for a step's data, and remove what killed saves left."""
    os.makedirs(folder, exist_ok=True)
    for path in _left_over(folder):
        shutil.rmtree(path, ignore_errors=True)  # the next save tries again
    unfinished = Unfinished(folder, step, f"step_{step}.{secrets.token_hex(8)}")
    os.mkdir(unfinished.path)
    sync_folder(folder)
    return unfinished


def commit(unfinished: Unfinished, manifest: Manifest) -> None:
    """Turn a step whose data are on the disk into a checkpoint; replace an earlier one of that step.

    Raises:
        DamagedCheckpointError: This process does not see a file of the manifest, or sees another size.
    """
    for file in manifest.files:
        check_size(unfinished.path, file.name, file.bytes)
    path = os.path.join(unfinished.path, "manifest.json")
    with open(path, "xb") as stream:
        stream.write(manifest.to_json())
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(path, manifest_path(unfinished.folder, unfinished.step))
    sync_folder(unfinished.folder)
    for name in _data_folders(unfinished.folder).get(unfinished.step, []):
        if name != unfinished.name:
            shutil.rmtree(os.path.join(unfinished.folder, name), ignore_errors=True)  # the next save tries again


def abandon(unfinished: Unfinished) -> None:
    """Remove what was written of a step, unless the step has become a checkpoint after all."""
    with contextlib.suppress(OSError):  # the save's own error matters; the next save tries again
        if _named(unfinished.folder, unfinished.step) not in (unfinished.name, None):
            shutil.rmtree(unfinished.path, ignore_errors=True)


def read_manifest(folder: str, step: int) -> bytes:
    """Return the bytes of a step's manifest, hwaware's or Alpa's.

    Raises:
        RecordError: The folder cannot be read, or has no complete step of that number.
    """
    known = steps_to_restore(folder)
    if step not in known:
        whole = ", ".join(f"checkpoint_{one}" for one in reversed(known))
        raise RecordError(
            f"{folder} holds no whole checkpoint of step {step}; whole ones: {whole or 'none'}.",
            "name one of these; a save that was interrupted is not one.",
        )
    with readable(folder), open_inside(folder, f"checkpoint_{step}") as file:
        return file.read()


def _data_folders(folder: str) -> Dict[int, List[str]]:
    """Return the names of the folders with data, by step, without links."""
    found: Dict[int, List[str]] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _DATA.fullmatch(entry.name)
            if match and entry.is_dir(follow_symlinks=False):
                found.setdefault(int(match.group(1)), []).append(entry.name)
    return found


def _left_over(folder: str) -> List[str]:
    """Return the paths of folders with data that no manifest names, unless a manifest of their step is unreadable."""
    complete = set(steps(folder))
    left: List[str] = []
    for step, names in _data_folders(folder).items():
        if step in complete and len(names) == 1:  # most; their manifests need not be read
            continue
        named = _named(folder, step)
        left += [os.path.join(folder, name) for name in names if named is not None and name != named]
    return left


def _named(folder: str, step: int) -> Optional[str]:
    """Return the folder that a step's manifest names: "" without a manifest, None if the manifest is unreadable."""
    if step not in steps(folder):
        return ""
    try:
        return Manifest.from_file(read_manifest(folder, step), manifest_path(folder, step)).folder
    except RecordError:
        return None
