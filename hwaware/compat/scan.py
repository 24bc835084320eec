"""Tell which names Alpa 0.2.3 and hwaware look for in JAX and the installed JAX does not have.

    python -m hwaware.compat.scan

This module reads source files, and resolves each name as the file would at run time. It starts neither Ray nor XLA,
and exits with 1 if a name is missing. A name may mean something else in another JAX: only training shows that.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import types
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

from hwaware.compat import facades

# Folders and files of Alpa that no pipeline uses.
_OTHER = ("collective", "model", "serve", "testing.py", "test_install.py", "torch")
# Module -> names that `hwaware.compat` takes only if they exist, and names in code of Alpa that hwaware replaces.
_EITHER = {
    "jax._src": "prng prng.random_unwrap",
    "jax._src.core": "get_aval typeof",
    "jax._src.lib.xla_client._xla": "make_gloo_tcp_collectives",
    "jax._src.linear_util": "DebugInfo",
}
_REPLACED = {
    "jax._src.dispatch": "_execute_compiled _result_handler aval_to_num_buffers jaxpr_literals prefetch",
    "jax._src.lib.xla_bridge": "get_compile_options",
    "jax._src.util": "new_name_stack",
    "jax.core": "as_named_shape ordered_effects",
    "jax.interpreters.mlir": "ReplicaAxisContext ir_constants",
    "jax.interpreters.partial_eval": "remat_call_p",
    "jax.interpreters.pxla": "_get_pmap_sharding _shard_arg local_avals_to_results_handler new_mesh_sharding_specs "
    "sharding_spec_sharding_proto",
    "jax.interpreters.xla": "wrap_name",
}
UNUSED = {
    f"{module}.{name}" for each in (_EITHER, _REPLACED) for module, names in each.items() for name in names.split()
}


def missing() -> List[str]:
    """Return the names that are missing, each with the files that use it."""
    alpa = importlib.util.find_spec("alpa")
    roots: List[Tuple[Path, Callable[[str], Any]]] = [(Path(__file__).parents[1], importlib.import_module)]
    if alpa is not None and alpa.submodule_search_locations:
        roots.append((Path(alpa.submodule_search_locations[0]), facades.module))
    found: Dict[str, List[str]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for root, module in roots:
            for path in sorted(root.rglob("*.py")):
                inside = path.relative_to(root)
                if root.name == "hwaware" or inside.parts[0] not in _OTHER:
                    names = set(map(".".join, _used(ast.parse(path.read_text(encoding="utf-8")))))
                    for name in sorted(one for one in names if not _is_there(one, module)):
                        found.setdefault(name, []).append(str(path.relative_to(root.parent)))
    return [f"{name} ({', '.join(files)})" for name, files in sorted(found.items()) if name not in UNUSED]


def _used(tree: ast.AST) -> Iterator[Tuple[str, ...]]:
    """Yield each name of JAX that a file imports, or reads from what it imports."""
    known: Dict[str, str] = {}
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    optional = {id(node) for handler in handlers for node in ast.walk(handler)}
    for node in ast.walk(tree):
        if id(node) in optional:
            continue
        if isinstance(node, ast.ImportFrom) and not node.level and _is_jax(node.module or ""):
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield (f"{node.module}.{alias.name}",)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_jax(alias.name):
                    known[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else "jax"
                    yield (alias.name,)
    for node in ast.walk(tree):
        names: List[str] = []
        value: Any = node
        while isinstance(value, ast.Attribute):
            names.insert(0, value.attr)
            value = value.value
        if names and isinstance(value, ast.Name) and value.id in known:
            yield (known[value.id], *names)


def _is_jax(module: str) -> bool:
    return module.split(".", 1)[0] in ("jax", "jaxlib")


def _is_there(name: str, module: Callable[[str], Any]) -> bool:
    """Return True if a name exists. Look into modules only, not into other objects."""
    parts = name.split(".")
    found: Any = module(parts[0])
    for place, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = module(".".join(parts[:place]))
            except ImportError:
                return False
        if not isinstance(found, types.ModuleType):
            break
    return True


def main() -> int:
    """Print the names that the installed JAX lacks; return 1 if it lacks any."""
    lines = missing()
    has = f"lacks {len(lines)} of the" if lines else "has all"
    version = importlib.import_module("jax").__version__
    print("\n".join([*lines, f"JAX {version} {has} names that Alpa and hwaware need."]))
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
