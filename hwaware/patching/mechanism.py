"""Replace functions of a host library: reversibly, counted, and guarded by digests.

This module checks the host before it touches it, and patches every module that imported a function by name. If
somebody put a foreign patch on top, it refuses to revert. `apply` nests, and `revert` undoes exactly what `apply` did.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
import threading
from typing import Any, Callable, List, NamedTuple, Sequence, Tuple

from hwaware.errors import AlpaError

Replacement = Callable[[Any], Any]


class Target(NamedTuple):
    """Name one function, method or property to replace.

    Attributes:
        module: The module that defines it, e.g. "alpa.pipeline_parallel.compile_executable".
        name: Its name there; "Class.method" for a method or a property.
        digests: Digests of the source that the replacement was written against; none for what the host's class lacks.
    """

    module: str
    name: str
    digests: Tuple[str, ...]


def source_digest(function: Any) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a function's source, or of a property's getter."""
    source = inspect.getsource(getattr(function, "fget", function))
    return hashlib.sha256(source.encode()).hexdigest()[:16]


class Patch:
    """Replace one target by what `make` makes of the original. A target without digests is added.

    Args:
        target: The function, method or property to replace or to add.
        make: A function that takes the original, or None, and returns the replacement.
    """

    def __init__(self, target: Target, make: Replacement) -> None:
        self.target = target
        self._make = make
        self._lock = threading.RLock()
        self._depth = 0
        self._original: Any = None
        self._replacement: Any = None
        self._sites: List[Tuple[Any, str]] = []

    @property
    def applied(self) -> bool:
        """Return True if the replacement is in place."""
        return self._depth > 0

    def check(self) -> None:
        """Raise AlpaError unless the host's function is one that the replacement was written against."""
        if self.applied:
            return
        original, expected = self._find(), self.target.digests or (None,)
        found = None if original is None else source_digest(original)
        if found not in expected:
            raise AlpaError(
                f"{self.target.module}.{self.target.name} has source digest {found}, "
                f"expected one of {list(expected)}: this Alpa is not the one that hwaware overrides.",
                "install Alpa 0.2.3 unchanged (pip install --no-deps alpa==0.2.3), and undo other patches first.",
                found=found,
                expected=expected,
            )

    def apply(self) -> None:
        """Put the replacement wherever the host refers to the original. A second call only counts."""
        with self._lock:
            if self._depth == 0:
                self.check()
                self._original = self._find()
                self._replacement = self._make(self._original)
                self._sites = self._find_sites()
                for owner, name in self._sites:
                    setattr(owner, name, self._replacement)
            self._depth += 1

    def revert(self) -> None:
        """Undo one `apply`; the last `revert` restores the original. Without an `apply`, do nothing.

        Raises:
            AlpaError: Somebody replaced hwaware's replacement; then nothing changes.
        """
        with self._lock:
            if self._depth == 1:
                self.refuse_foreign()
                for owner, name in self._sites:
                    if self._original is None:
                        delattr(owner, name)
                    else:
                        setattr(owner, name, self._original)
                self._sites = []
            self._depth = max(0, self._depth - 1)

    def _find(self) -> Any:
        owner, name = self._owner()
        found = vars(owner).get(name)
        if found is None and self.target.digests:
            raise AlpaError(
                f"{self.target.module}.{self.target.name} does not exist in this Alpa.",
                "install Alpa 0.2.3 (pip install --no-deps alpa==0.2.3).",
            )
        return found

    def _owner(self) -> Tuple[Any, str]:
        module = importlib.import_module(self.target.module)
        class_name, _, name = self.target.name.rpartition(".")
        return (vars(module).get(class_name, module) if class_name else module), name

    def _find_sites(self) -> List[Tuple[Any, str]]:
        if "." in self.target.name:
            return [self._owner()]
        package = self.target.module.split(".", 1)[0]
        return [
            (module, name)
            for module_name, module in list(sys.modules.items())
            if module is not None and module_name.split(".", 1)[0] == package
            for name, value in list(vars(module).items())
            if value is self._original
        ]

    def refuse_foreign(self) -> None:
        """Raise AlpaError if somebody replaced hwaware's replacement."""
        for owner, name in self._sites:
            if vars(owner).get(name) is not self._replacement:
                raise AlpaError(
                    f"{owner.__name__}.{name} was replaced by somebody else after hwaware did.",
                    "undo the other patch first, then call hwaware.disable() again.",
                )


class PatchSet:
    """Apply and revert patches together: all or none.

    Args:
        patches: The patches in the order to apply them. `revert` takes the opposite order.

    Attributes:
        patches: Those that replace what the host has.
    """

    def __init__(self, patches: Sequence[Patch]) -> None:
        self._all = tuple(patches)
        self.patches = tuple(patch for patch in patches if patch.target.digests)

    @property
    def applied(self) -> bool:
        """Return True if the patches are in place."""
        return any(patch.applied for patch in self.patches)

    def apply(self) -> None:
        """Check every target, then apply every patch."""
        for patch in self._all:
            patch.check()
        done: List[Patch] = []
        try:
            for patch in self._all:
                patch.apply()
                done.append(patch)
        except BaseException:
            for patch in reversed(done):
                patch.revert()
            raise

    def revert(self) -> None:
        """Undo one `apply` of every patch; if somebody replaced one of hwaware's replacements, change nothing.

        Raises:
            AlpaError: Somebody replaced one of hwaware's replacements.
        """
        self.refuse_foreign()
        for patch in reversed(self._all):
            patch.revert()

    def refuse_foreign(self) -> None:
        """Raise AlpaError if somebody replaced one of hwaware's replacements."""
        for patch in self._all:
            patch.refuse_foreign()
