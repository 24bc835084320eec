"""`HWAWARE_PROFILE=cluster.json python train.py`: hwaware switches itself on when the program first imports Alpa.

    python -m hwaware.autoload on       # once in an environment; `off` takes it back, `status` says what is there
    python -m hwaware.autoload on --folder DIR && PYTHONPATH=DIR python train.py   # where one cannot write to it

`on` writes one line that Python runs at each start. Without the variable the line looks at the environment and nothing
else. With it, a hook waits for `import alpa`; JAX, Ray and Alpa are not imported before the program does that. In Ray's
workers `import alpa` works on stock JAX and nothing is enabled: stages are placed by the program that compiles. A
program that compiles inside a Ray actor calls `hwaware.enable` there.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, List, NoReturn, Optional

VARIABLE = "HWAWARE_PROFILE"
PTH_NAME = "hwaware-autoload.pth"
PTH = f"import os; os.environ.get({VARIABLE!r}) and __import__('hwaware.autoload').autoload.install()\n"
# Python runs the first sitecustomize that it finds; the one that this file hides runs as well.
SITECUSTOMIZE = f"""\
# Written by `python -m hwaware.autoload on --folder`.
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

if os.environ.get({VARIABLE!r}):
    import hwaware.autoload

    hwaware.autoload.install()
_here = os.path.dirname(os.path.abspath(__file__))
_hidden = PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.abspath(p) != _here])
if _hidden is not None and _hidden.loader is not None:
    _hidden.loader.exec_module(module_from_spec(_hidden))
"""
_ALPA = "alpa"


def install() -> None:
    """Wait for the first `import alpa`, if HWAWARE_PROFILE is set; a second call does nothing."""
    profile = os.environ.get(VARIABLE)
    if profile and _ALPA not in sys.modules and not any(isinstance(finder, _Hook) for finder in sys.meta_path):
        # The program may change its folder before it imports Alpa.
        sys.meta_path.insert(0, _Hook(os.path.abspath(profile)))


def cancel() -> None:
    """Stop waiting: a program that calls `hwaware.enable` decides by itself, and so does hwaware's command line."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Hook)]


class _Hook(MetaPathFinder):
    """Finds Alpa as everybody does, and has it loaded by enabling hwaware."""

    def __init__(self, profile: str) -> None:
        self._profile = profile

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        if fullname != _ALPA:
            return None
        for finder in sys.meta_path:
            spec = None if isinstance(finder, _Hook) else finder.find_spec(fullname, path, target)
            if spec is not None:
                spec.loader = _EnablingLoader(self._profile)
                return spec
        return None


class _EnablingLoader(Loader):
    """Imports Alpa while hwaware is enabled, and hands out the module that is there afterwards."""

    def __init__(self, profile: str) -> None:
        self._profile = profile

    def create_module(self, spec: ModuleSpec) -> Any:
        cancel()
        if in_ray_worker():
            # Nothing is compiled there, and the profile may lie on the driver's host alone.
            importlib.import_module("hwaware.patching.stock_jax").install()
        else:
            _enable(self._profile)
        module = importlib.import_module(_ALPA)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: Any) -> None:
        module.__spec__ = self._own_spec  # Python has just put ours there


def in_ray_worker() -> bool:
    """Whether this process is one that Ray started to run tasks and actors."""
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
    """What hwaware decides goes to standard error, unless the program has set up logging of it."""
    import logging

    logger = logging.getLogger("hwaware")
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False  # or it would be said twice once the program sets up logging
        logger.setLevel(logging.INFO)


def _stop(error: Any) -> NoReturn:
    print(f"Error: {error}\nTo run without hwaware: unset {VARIABLE}.", file=sys.stderr)
    sys.exit(error.exit_code)


def _file(folder: Optional[str]) -> str:
    import sysconfig

    if folder is not None:
        return os.path.join(folder, "sitecustomize.py")
    return os.path.join(sysconfig.get_paths()["purelib"], PTH_NAME)


def switch_on(folder: Optional[str] = None) -> str:
    """Write the line that Python runs at start-up; returns its file.

    Args:
        folder: Where one cannot write to the environment: a folder to put on PYTHONPATH; this environment if left out.

    Raises:
        UnusableInputError: The file cannot be written, or the folder has a sitecustomize.py of somebody else.
    """
    from hwaware.errors import UnusableInputError

    path = _file(folder)
    text = PTH if folder is None else SITECUSTOMIZE
    if os.path.exists(path) and not _is_ours(path):
        raise UnusableInputError(f"{path} is not hwaware's.", "choose an empty folder.")
    try:
        if folder is not None:
            os.makedirs(folder, exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        fix = "python -m hwaware.autoload on --folder DIR, and put DIR on PYTHONPATH."
        raise UnusableInputError(f"{path} cannot be written: {error.strerror}.", fix) from error
    return path


def switch_off(folder: Optional[str] = None) -> Optional[str]:
    """Remove what `switch_on` wrote; returns the file that is gone, None if there was none of hwaware's."""
    path = _file(folder)
    if not os.path.exists(path) or not _is_ours(path):
        return None
    os.remove(path)
    return path


def _is_ours(path: str) -> bool:
    with open(path, encoding="utf-8") as file:
        return "hwaware.autoload" in file.read()


def main(arguments: Optional[List[str]] = None) -> int:
    """The command `python -m hwaware.autoload`; returns its exit code."""
    import argparse

    from hwaware.errors import HwawareError

    parser = argparse.ArgumentParser(prog="python -m hwaware.autoload", description=f"Obey {VARIABLE} at start-up.")
    parser.add_argument("what", choices=("on", "off", "status"))
    parser.add_argument("--folder", help="a folder to put on PYTHONPATH, where the environment cannot be written to")
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
        return f"on: {path}\n{prefix}{VARIABLE}=cluster.json python train.py"
    if what == "off":
        return f"off: {switch_off(folder) or 'there was nothing'}"
    path = _file(folder)
    return f"on: {path}" if os.path.exists(path) and _is_ours(path) else f"off: no {path}"


if __name__ == "__main__":
    sys.exit(main())
