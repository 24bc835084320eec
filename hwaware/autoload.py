"""Enable hwaware when a program first imports Alpa: `HWAWARE_PROFILE=cluster.json python train.py`.

    python -m hwaware.autoload on       # once in an environment; `off` undoes it, `status` shows it
    python -m hwaware.autoload on --folder DIR && PYTHONPATH=DIR python train.py   # if the environment is read-only

`on` writes one line that Python runs at each start. Without the variable, the line only reads the environment. With it,
a hook waits for `import alpa`, and imports neither JAX, Ray nor Alpa before the program does. With a variable of a
similar name instead, the hook only prints one line.

In Ray's workers the hook only makes `import alpa` work on stock JAX. It enables nothing there, because the program that
compiles places the stages. A program that compiles inside a Ray actor calls `hwaware.enable` there.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import stat
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, Iterator, List, NoReturn, Optional

VARIABLE = "HWAWARE_PROFILE"
PTH_NAME = "hwaware-autoload.pth"
_BEGINNING = VARIABLE[:-3]  # of misspelt names, too
_IS_SET = f"any(name.startswith({_BEGINNING!r}) for name in os.environ)"
PTH = f"import os; {_IS_SET} and __import__('hwaware.autoload').autoload.install()\n"
# Python runs only the first sitecustomize that it finds, so this one runs the one that it hides.
SITECUSTOMIZE = f"""\
# Written by `python -m hwaware.autoload on --folder`.
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

if {_IS_SET}:
    import hwaware.autoload

    hwaware.autoload.install()
_paths = [os.path.abspath(path) for path in sys.path]
_here = os.path.dirname(os.path.abspath(__file__))
# Of the later folders alone: another sitecustomize may run the one that it hides too, and that is not this one again.
_later = [path for path in _paths[_paths.index(_here) + 1 :] if path != _here] if _here in _paths else _paths
_hidden = PathFinder.find_spec("sitecustomize", _later)
if _hidden is not None and _hidden.loader is not None:
    _hidden.loader.exec_module(module_from_spec(_hidden))
"""
# SHA-256 of the texts that earlier versions wrote.
_EARLIER = (
    "394bafb6e8ed04b2fb9954a56d30793db5d697cdd54109155a7b1873256fd49f",
    "ecf10e8988e3677f089eb7896afd7bb4f096c2c4a85cba153073144be858f38e",
    "f0bb16890a4823fb79275a89e5aba0b6a56b6735bb3ac97ce18eafc9ed1dbc0a",
)
_ALPA = "alpa"


def install() -> None:
    """Install a hook on the first `import alpa`, if HWAWARE_PROFILE is set; a second call does nothing.

    If only variables of similar names are set, the hook prints them, and enables nothing.
    """
    profile = os.environ.get(VARIABLE)
    if (profile or _misspelt()) and not (
        _ALPA in sys.modules or any(isinstance(finder, _Hook) for finder in sys.meta_path)
    ):
        if profile:  # the program may change its folder before it imports Alpa, and before it starts others
            os.environ[VARIABLE] = profile = os.path.abspath(profile)
        sys.meta_path.insert(0, _Hook(profile or None))


def _misspelt() -> List[str]:
    return sorted(name for name in os.environ if name.startswith(_BEGINNING) and name != VARIABLE)


def cancel() -> None:
    """Remove the hook, as for a program that calls `hwaware.enable` itself, and for the command line."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Hook)]


def act() -> None:
    """Enable hwaware if the hook still waits for Alpa, which hwaware is about to import itself.

    Without a profile, tell which variables have a similar name.
    """
    for hook in [finder for finder in sys.meta_path if isinstance(finder, _Hook)]:
        cancel()
        if hook.profile is None:
            if not in_ray_worker():
                what = f"{VARIABLE} is not set, but {', '.join(_misspelt())} is"
                print(f"hwaware stays off: {what}. To fix: correct the name, or unset it.", file=sys.stderr)
        elif in_ray_worker():
            # Workers compile nothing, and the profile may exist on the driver's host alone.
            importlib.import_module("hwaware.patching.stock_jax").install()
        else:
            try:
                _enable(hook.profile)
            except BaseException:  # a notebook goes on, and imports Alpa again once the user has mended the cause
                sys.meta_path.insert(0, hook)
                raise


class _Hook(MetaPathFinder):
    """A finder that finds Alpa by the other finders, and lets `_EnablingLoader` load it."""

    def __init__(self, profile: Optional[str]) -> None:
        self.profile = profile

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        if fullname != _ALPA:
            return None
        for finder in sys.meta_path:
            spec = None if isinstance(finder, _Hook) else finder.find_spec(fullname, path, target)
            if spec is not None:
                spec.loader = _EnablingLoader()
                return spec
        return None


class _EnablingLoader(Loader):
    """A loader that lets the hook act, which imports Alpa itself, and returns that module."""

    def create_module(self, spec: ModuleSpec) -> Any:
        act()
        module = importlib.import_module(_ALPA)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: Any) -> None:
        module.__spec__ = self._own_spec  # Python has just set ours


def in_ray_worker() -> bool:
    """Return True in a process that Ray started to run tasks and actors."""
    arguments: List[str] = getattr(sys, "argv", [])
    return bool(arguments) and os.path.basename(arguments[0]) == "default_worker.py"


def _enable(profile: str) -> None:
    import hwaware
    from hwaware.errors import HwawareError

    _show_log()
    try:
        hwaware.enable(profile)
    except HwawareError as error:
        _stop(error)


def _show_log() -> None:
    """Log hwaware's decisions to standard error, unless the program has set up logging."""
    import logging

    logger = logging.getLogger("hwaware")
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False  # the program's own logging, if set up later, would repeat each line
        logger.setLevel(logging.INFO)


def _stop(error: Any) -> NoReturn:
    print(f"Error: {error}", file=sys.stderr)
    with contextlib.suppress(ImportError):  # Alpa needs JAX, and runs alone only on its own build of XLA
        if not importlib.import_module("hwaware.patching.stock_jax").is_needed():
            print(f"To run without hwaware: unset {VARIABLE}.", file=sys.stderr)
    sys.exit(error.exit_code)


def _file(folder: Optional[str]) -> str:
    import sysconfig

    if folder is not None:
        return os.path.join(folder, "sitecustomize.py")
    return os.path.join(sysconfig.get_paths()["purelib"], PTH_NAME)


def switch_on(folder: Optional[str] = None) -> str:
    """Write the line that Python runs at start-up, and return its file.

    Args:
        folder: A folder for PYTHONPATH, if the environment is read-only; None writes into the environment.

    Raises:
        UnusableInputError: The file cannot be written, or something that hwaware did not write is in its place.
    """
    path = _file(folder)
    if _is_ours(path) is False:
        from hwaware.errors import UnusableInputError

        what = f"{path} is not hwaware's: another program wrote it, or somebody changed it or put a link there."
        raise UnusableInputError(what, "choose an empty folder (--folder), or remove that file.")
    with _explained(path, "written", "python -m hwaware.autoload on --folder DIR, and put DIR on PYTHONPATH."):
        from pathlib import Path

        from hwaware.output_files import replace_file

        if folder is not None:
            os.makedirs(folder, exist_ok=True)
        replace_file(Path(path), _text(folder))
    return path


def switch_off(folder: Optional[str] = None) -> Optional[str]:
    """Remove the file of `switch_on` and return its path; None if hwaware had written none.

    Raises:
        UnusableInputError: The file cannot be read or removed.
    """
    path = _file(folder)
    if not _is_ours(path):
        return None
    with _explained(path, "removed", "remove it as the user who owns its folder."):
        os.remove(path)
    return path


def _text(folder: Optional[str]) -> bytes:
    return (PTH if folder is None else SITECUSTOMIZE).encode()


def _is_ours(path: str) -> Optional[bool]:
    """Return True for a file that `switch_on` wrote, False for anything else there, None for nothing.

    A file that only mentions hwaware is not ours. Nor is a file that somebody added to: to replace it would lose work.

    Raises:
        UnusableInputError: The file cannot be read.
    """
    with _explained(path, "read", "see the permissions of the file and its folder."):
        try:
            mode = os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(mode):  # a link, whose target is somebody's, or a pipe, which would never end
            return False
        with open(path, "rb") as file:
            found = file.read(len(SITECUSTOMIZE) + 1)
    return found in (PTH.encode(), SITECUSTOMIZE.encode()) or hashlib.sha256(found).hexdigest() in _EARLIER


@contextlib.contextmanager
def _explained(path: str, what: str, fix: str) -> Iterator[None]:
    """Turn an error of the file system into a message: the file cannot be read, written or removed."""
    try:
        yield
    except (OSError, ValueError) as error:  # a ValueError is a path with a null byte
        from hwaware.errors import UnusableInputError

        reason = getattr(error, "strerror", None) or error
        raise UnusableInputError(f"{path} cannot be {what}: {reason}.", fix) from error


def main(arguments: Optional[List[str]] = None) -> int:
    """Run the command `python -m hwaware.autoload`, and return its exit code."""
    import argparse

    from hwaware.errors import HwawareError

    parser = argparse.ArgumentParser(
        prog="python -m hwaware.autoload", description=f"Switch hwaware on for programs that set {VARIABLE}."
    )
    parser.add_argument("what", choices=("on", "off", "status"), help="install the hook, remove it, or say which holds")
    parser.add_argument("--folder", help="a folder for PYTHONPATH, if the environment is read-only")
    chosen = parser.parse_args(arguments)
    try:
        print(_do(chosen.what, chosen.folder))
    except HwawareError as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _do(what: str, folder: Optional[str]) -> str:
    if what == "on":
        path = switch_on(folder)
        prefix = "" if folder is None else f"PYTHONPATH={folder} "
        return f"on: {path}\nStart programs with: {prefix}{VARIABLE}=cluster.json python train.py"
    if what == "off":
        return f"off: {switch_off(folder) or 'nothing was installed'}"
    path = _file(folder)
    found = _is_ours(path)
    return f"on: {path}" if found else f"off: no {path}" if found is None else f"off: {path} is not hwaware's"


if __name__ == "__main__":
    sys.exit(main())
