"""Import a package without those of its imports that a process does not need, because they take long."""

from __future__ import annotations

import contextlib
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from typing import Any, Iterator, Optional, Sequence


class _Nothing(types.ModuleType):
    """Have every attribute, and give back the argument of a call, as a decorator that changes nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Nothing(name)
        setattr(self, name, found)
        return found

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if arguments else self


class _Finder(MetaPathFinder, Loader):
    """Find the modules of some packages, without their code."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, *_: Any) -> Optional[ModuleSpec]:
        """Return where a module of these packages comes from; None for every other module."""
        return spec_from_loader(name, self, is_package=True) if self.has(name) else None

    def has(self, name: str) -> bool:
        """Return True for a module of these packages."""
        return name.split(".")[0] in self._packages

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Return a module without code."""
        return _Nothing(spec.name)

    def exec_module(self, _: types.ModuleType) -> None:
        """Run no code."""


@contextlib.contextmanager
def without(*packages: str) -> Iterator[None]:
    """Import modules in the block as if these packages held names that do nothing; loaded packages stay as they are.

    After the block, an import loads a package as ever. The modules of the block keep the names that do nothing.

    Example:
        >>> with without("unknown"):
        ...     from unknown.part import name
        >>> name(3)
        3
    """
    finder = _Finder([name for name in packages if name not in sys.modules])
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if finder.has(name)]:
            del sys.modules[name]
