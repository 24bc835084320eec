"""No public name without words: every module, class, function and method of hwaware has a docstring."""

import ast
import re
from pathlib import Path

import hwaware

PACKAGE = Path(hwaware.__file__).parent
MAKEFILE = Path(__file__).parents[2] / "Makefile"
KINDS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def undocumented(tree, where):
    """Public names of a module or class without a docstring; what is inside functions is nobody's business."""
    missing = [] if ast.get_docstring(tree) else [where]
    for node in tree.body:
        if isinstance(node, KINDS) and not node.name.startswith("_"):
            if isinstance(node, ast.ClassDef):
                missing += undocumented(node, f"{where}.{node.name}")
            elif not ast.get_docstring(node) and not _is_overload_or_setter(node):
                missing.append(f"{where}.{node.name}")
    return missing


def _is_overload_or_setter(node):
    names = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    return bool(names & {"overload", "setter"})


def _public_modules():
    return [path for path in PACKAGE.rglob("*.py") if path.name != "sitecustomize.py"]


def test_every_public_name_has_a_docstring():
    missing = []
    for path in _public_modules():
        where = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        missing += undocumented(ast.parse(path.read_text()), where)
    assert missing == []


def test_the_test_can_fail():
    source = '"""m"""\ndef told():\n    """t"""\ndef silent(): ...\nclass C:\n    """c"""\n    def method(self): ...\n'
    assert undocumented(ast.parse(source), "m") == ["m.silent", "m.C.method"]


def test_the_public_names_are_there():
    for name in hwaware.__all__:
        found = getattr(hwaware, name)
        assert isinstance(found, str) or found.__doc__, name


def test_types_are_shipped():
    assert (PACKAGE / "py.typed").exists()


def test_every_example_in_a_docstring_is_run():
    """By `make unit` or `make alpa`; sitecustomize, which acts when it is imported, is left out."""
    lists = re.findall(r"addprefix hwaware/,(.*)\)", MAKEFILE.read_text())
    named = [Path(one) for line in lists for one in line.split()]
    assert [one for one in named if not (PACKAGE / one).exists()] == []
    modules = [path.relative_to(PACKAGE) for path in _public_modules() if "    >>> " in path.read_text()]
    assert len(modules) > 50
    assert [str(path) for path in modules if not {path, *path.parents} & set(named)] == []


def test_no_example_is_left_out():
    assert [path for path in _public_modules() if "doctest: +SKIP" in path.read_text()] == []
