"""For those who prefer an Alpa of their own: the source change that does what `enable` does to stage construction.

    python patches/write_diff.py path/to/alpa > hwaware.diff; cd path/to/alpa && git apply hwaware.diff

The changed Alpa asks hwaware wherever HWAWARE_PROFILE is set, and is Alpa as ever where it is not. It is for Alpa with
its own jaxlib: what stock JAX needs besides stays with `hwaware.enable` (patches/README.md).
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import os
from pathlib import Path
from typing import Any, Callable, List, Optional

from hwaware.autoload import VARIABLE
from hwaware.cluster import ClusterProfile
from hwaware.errors import AlpaError
from hwaware.patching import stage_option

FILE = "alpa/pipeline_parallel/stage_construction.py"
_FUNCTION = stage_option.PATCH.target.name
ADDED = f"""

# Stages and their devices by measurement, where {VARIABLE} names a profile.
# pylint: disable=wrong-import-position
from hwaware.patching.fork import hardware_aware

{_FUNCTION} = hardware_aware({_FUNCTION})
"""


def hardware_aware(original: Callable[..., Any]) -> Callable[..., Any]:
    """Alpa's stage construction, by the profile that HWAWARE_PROFILE names when a function is compiled."""
    placed = stage_option.hardware_aware(original)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        path = os.environ.get(VARIABLE)
        if not path or stage_option.has_default():
            return placed(*args, **kwargs)
        stage_option.set_default(stage_option.PlacementSettings(ClusterProfile.load(path)))
        try:
            return placed(*args, **kwargs)
        finally:
            stage_option.set_default(None)

    return chosen


def diff(checkout: Path) -> str:
    """Return the change of an Alpa checkout as a unified diff for `git apply` or `patch -p1`.

    Args:
        checkout: The folder that holds the package `alpa`.

    Raises:
        AlpaError: There is no Alpa, it is changed already, or its stage construction is not the one hwaware knows.
    """
    path = checkout / FILE
    try:
        before = path.read_text(encoding="utf-8")
    except OSError as error:
        raise AlpaError(f"{path} cannot be read: {error.strerror}.", "give the folder that holds alpa/.") from error
    if "hwaware" in before:
        raise AlpaError(f"{path} is changed already.", "git checkout that file, to make the change anew.")
    _require_known(path, before)
    lines = (before.splitlines(keepends=True), (before + ADDED).splitlines(keepends=True))
    return "".join(difflib.unified_diff(*lines, f"a/{FILE}", f"b/{FILE}"))


def _require_known(path: Path, source: str) -> None:
    expected = stage_option.PATCH.target.digests
    found = _digest(source)
    if found not in expected:
        raise AlpaError(
            f"{path}: {_FUNCTION} has source digest {found}, expected one of {list(expected)}.",
            "use the sources of Alpa 0.2.3.",
            found=found,
            expected=expected,
        )


def _digest(source: str) -> Optional[str]:
    """As `hwaware.patching.mechanism.source_digest`, without importing the module."""
    lines: List[str] = source.splitlines(keepends=True)
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == _FUNCTION:
            text = "".join(lines[node.lineno - 1 : node.end_lineno])
            return hashlib.sha256(text.encode()).hexdigest()[:16]
    return None
