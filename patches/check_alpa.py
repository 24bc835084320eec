"""Which of hwaware's overrides fit an Alpa that need not be installed: python patches/check_alpa.py path/to/alpa

The path is a checkout, or an unpacked wheel: the folder that holds the package `alpa`. Its source is read, not run.
Exit code 0 if every override fits, 1 if not.
"""

import ast
import hashlib
import sys
from pathlib import Path
from typing import Optional

from hwaware import activation


def source_of(folder: Path, module: str, function: str) -> Optional[str]:
    """The source of a module's function as `inspect.getsource` gives it; None if the Alpa has no such function."""
    path = folder / (module.replace(".", "/") + ".py")
    if not path.exists():
        return None
    text = path.read_text()
    node: ast.AST = ast.parse(text)
    for name in function.split("."):
        found = [one for one in ast.iter_child_nodes(node) if getattr(one, "name", None) == name]
        if not found:
            imports = (one for one in ast.walk(node) if isinstance(one, ast.ImportFrom))
            origin = next((one.module for one in imports if name in [alias.name for alias in one.names]), None)
            return source_of(folder, origin, function) if origin else None
        node = found[-1]
    assert isinstance(node, (ast.FunctionDef, ast.ClassDef))
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    return "".join(text.splitlines(keepends=True)[first - 1 : node.end_lineno])


def main() -> int:
    """Print one line for each override."""
    folder = Path(sys.argv[1] if len(sys.argv) == 2 else ".")
    if not (folder / "alpa" / "__init__.py").exists():
        print(f"{folder} holds no package alpa. To fix: name the folder of a checkout.", file=sys.stderr)
        return 2
    unfit = 0
    for patch in activation.patches():
        source = source_of(folder, patch.target.module, patch.target.name)
        digest = None if source is None else hashlib.sha256(source.encode()).hexdigest()[:16]
        fits = digest in patch.target.digests
        unfit += not fits
        state = "fits" if fits else "is missing" if digest is None else f"differs ({digest})"
        print(f"{patch.target.module}.{patch.target.name} {state}")
    total = len(activation.patches())
    print(f"{total - unfit} of {total} overrides fit.")
    return 1 if unfit else 0


if __name__ == "__main__":
    sys.exit(main())
