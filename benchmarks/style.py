"""Figures of style, for a reader to judge; nothing is enforced: python benchmarks/style.py.

Lines of a function include its signature and docstring, those of a body do not. Public names begin without an
underscore, and so does everything that they are in.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path
from statistics import median
from typing import Iterator, List, NamedTuple, Sequence, Union

ROOT = Path(__file__).resolve().parent.parent
Function = Union[ast.FunctionDef, ast.AsyncFunctionDef]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Named(NamedTuple):
    """A function or class, and whether a user may use it."""

    node: Union[Function, ast.ClassDef]
    public: bool


def named(tree: ast.AST, public: bool = True) -> Iterator[Named]:
    """Functions, methods and classes of a module; what is inside of functions is private."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            shown = public and not node.name.startswith("_")
            yield Named(node, shown)
            yield from named(node, shown and isinstance(node, ast.ClassDef))
        else:
            yield from named(node, public)


def lines(node: Function) -> int:
    """From the first line of the signature to the last of the body."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def body_lines(node: Function) -> int:
    """Without signature and docstring."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def annotated(node: Function) -> bool:
    """Whether every parameter but self or cls, and what is returned, has a type."""
    given = node.args
    parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    typed = all(p.annotation is not None for p in parameters if p is not None and p.arg not in ("self", "cls"))
    return typed and node.returns is not None


def comments(text: str) -> int:
    """Lines that end in a comment."""
    return sum(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(text).readline))


def code_lines(text: str) -> int:
    """Lines that are neither empty nor only a comment; docstrings count."""
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.splitlines())


def spread(values: Sequence[int]) -> str:
    """Median, 90th percentile and largest."""
    ordered = sorted(values)
    return f"{median(ordered):g} / {ordered[int(0.9 * (len(ordered) - 1))]} / {ordered[-1]}"


def share(flags: Sequence[bool]) -> str:
    """How many are true, in percent."""
    return f"{100 * sum(flags) / len(flags):.0f} %"


def figures(paths: List[Path]) -> List[str]:
    """One line for each figure."""
    texts = [path.read_text() for path in paths]
    trees = [ast.parse(text) for text in texts]
    nodes = [one for tree in trees for one in named(tree)]
    functions = [one.node for one in nodes if isinstance(one.node, FUNCTIONS)]
    public = [ast.get_docstring(one.node) is not None for one in nodes if one.public]
    code = sum(map(code_lines, texts))
    tests = sum(code_lines(path.read_text()) for path in (ROOT / "tests").rglob("*.py"))
    return [
        f"files: {len(paths)}, lines of code: {code}",
        f"lines of a file, median / p90 / largest: {spread([len(text.splitlines()) for text in texts])}",
        f"lines of a function: {spread([lines(one) for one in functions])}",
        f"lines of a body: {spread([body_lines(one) for one in functions])}",
        f"public names with a docstring: {share(public)}",
        f"modules with a docstring: {share([ast.get_docstring(tree) is not None for tree in trees])}",
        f"functions with every type: {share([annotated(one) for one in functions])}",
        f"comments per 100 lines of code: {100 * sum(map(comments, texts)) / code:.1f}",
        f"lines of tests per line of code: {tests / code:.2f}",
    ]


def main() -> int:
    """Print the figures of hwaware/, with docstrings as lines of code."""
    print("Figures of style, for a reader to judge; nothing is enforced:")
    print("\n".join(figures(sorted((ROOT / "hwaware").rglob("*.py")))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
