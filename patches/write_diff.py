#!/usr/bin/env python
"""Write the source change for one's own Alpa checkout: python patches/write_diff.py path/to/alpa > hwaware.diff.

Then, in the checkout: git apply hwaware.diff. The changed Alpa does what `enable` does to stage construction.
"""

import argparse
import ast
import difflib
import hashlib
import sys
from pathlib import Path
from typing import List, Optional

from hwaware.autoload import VARIABLE
from hwaware.errors import AlpaError, HwawareError
from hwaware.patching import stage_option

FILE = "alpa/pipeline_parallel/stage_construction.py"
_FUNCTION = stage_option.PATCH.target.name
ADDED = f"""

# Stages and their devices by measurement, where {VARIABLE} names a profile.
# pylint: disable=wrong-import-position
from hwaware.patching.fork import hardware_aware

{_FUNCTION} = hardware_aware({_FUNCTION})
"""


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
        raise AlpaError(f"{path} is changed already.", "run `git checkout` on that file, then write the change again.")
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


def main() -> int:
    parser = argparse.ArgumentParser(description="Print the source change for an Alpa checkout.")
    parser.add_argument("checkout", type=Path, help="the folder that holds the package alpa")
    try:
        sys.stdout.write(diff(parser.parse_args().checkout))
    except HwawareError as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
