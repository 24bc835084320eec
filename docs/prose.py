"""Check sentences against the rule in CONTRIBUTING.md: `python docs/prose.py README.md docs hwaware/cli`.

Read Markdown files and the docstrings of Python files, without their code. proselint finds common faults of English.
The checks below find what the project's own rule forbids. Exit with 1 where a sentence has a fault.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path
from typing import Iterator, List, NamedTuple, Tuple

from markdown_it import MarkdownIt
from markdown_it.token import Token
from proselint.checks import __register__ as ALL_CHECKS
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

MOST_WORDS = 20
OPENERS = re.compile(r"^(What|Whether|Who|Whoever|Whose|Of)\b(?!.*\?$)")
PHRASES = re.compile(
    r"\b(of which|of them|in turn|anew|there (?:is|are|was|were)|whoever|in the mean)\b", re.IGNORECASE
)
# Stands for code, a formula or a link's target: one word.
CODE = "Code"
# Typewriter quotes, three dots and plain letters are right in text about code; "resume" is an option here.
LEFT_OUT = ("typography", "lexical_illusions", "restricted", "misc.preferred_forms", "misc.capitalization")
ENDS = re.compile(r"(?<=[.!?])[\"')\]*]*\s+(?=\S)|(?<=[:;])[\"')\]*]*\s+(?=[\"'(\[*]*[A-Z0-9`])")
ABBREVIATIONS = re.compile(r"\b(e\.g|i\.e|et al|vs|etc|Fig|cf|No)\.")
SECTIONS = re.compile(
    r"^(Args|Returns|Raises|Yields|Attributes|Example|Examples|Note|Notes|Source|Sources|References):$"
)


class Block(NamedTuple):
    """A run of prose that starts on a line of a file."""

    line: int
    text: str


class Finding(NamedTuple):
    """A fault of a sentence."""

    path: Path
    line: int
    fault: str
    sentence: str


def markdown_blocks(text: str) -> Iterator[Block]:
    """Yield the paragraphs, list items, headings and table cells of a Markdown text."""
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type == "inline" and token.map is not None:
            yield Block(token.map[0] + 1, plain(token.children or []))


def plain(tokens: List[Token]) -> str:
    """Return inline tokens as text, with each piece of code as one word."""
    words = {"text": lambda token: token.content, "code_inline": lambda token: CODE, "softbreak": lambda token: " "}
    return "".join(words[token.type](token) for token in tokens if token.type in words)


def docstring_blocks(text: str) -> Iterator[Block]:
    """Yield the paragraphs and section items of a module's docstrings."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                yield from paragraphs(docstring, node.body[0].lineno)


def paragraphs(docstring: str, line: int) -> Iterator[Block]:
    """Yield a docstring's paragraphs; an indented one that belongs to no section is a formula or code."""
    in_section = False
    for match in re.finditer(r"(?:^[^\n]*\S[^\n]*(?:\n|\Z))+", docstring, re.MULTILINE):
        lines = match.group().rstrip("\n").split("\n")
        first = line + docstring.count("\n", 0, match.start())
        if SECTIONS.match(lines[0]):
            in_section = True
            lines, first = lines[1:], first + 1
        elif not lines[0].startswith(" "):
            in_section = False
        if (
            not lines
            or lines[0].lstrip().startswith((">>>", "|", "```", "\b"))
            or (lines[0].startswith("  ") and not in_section)
        ):
            continue
        for offset, item in items(lines):
            yield Block(first + offset, re.sub(r"``?[^`]+``?", CODE, item))


def items(lines: List[str]) -> Iterator[Tuple[int, str]]:
    """Yield the list or section items among lines, each with the number of its first line."""
    start, held = 0, ""
    for number, line in enumerate(lines):
        if line.lstrip().startswith(">>>"):
            break
        if (
            held
            and re.match(r"^\s*(- |\* |\d+\. |[\w*, ]{1,40}: )", line)
            and (line.startswith(" ") or "- " in line[:4])
        ):
            yield start, held
            start, held = number, ""
        held = f"{held} {line.strip()}".strip()
    if held:
        yield start, held


def sentences(text: str) -> List[str]:
    """Split text where a sentence ends.

    >>> sentences("Measure it, e.g. now. Then plan.")
    ['Measure it, e.g. now.', 'Then plan.']
    """
    guarded = ABBREVIATIONS.sub(lambda match: match.group(1) + "\0", text)
    return [part.replace("\0", ".").strip() for part in ENDS.split(guarded) if part.strip()]


def faults(sentence: str) -> Iterator[str]:
    """Yield what the project's rule forbids in a sentence.

    >>> list(faults("Whether it fits."))
    ['opens with Whether']
    """
    words = [word for word in sentence.split() if re.search(r"\w", word)]
    if len(words) > MOST_WORDS:
        yield f"{len(words)} words, at most {MOST_WORDS}"
    opener = OPENERS.match(sentence)
    if opener:
        yield f"opens with {opener.group(1)}"
    for match in PHRASES.finditer(sentence):
        yield f"says {match.group().lower()!r}"


def english(path: Path, blocks: List[Block]) -> Iterator[Finding]:
    """Yield what proselint finds in blocks, each on a line of its own."""
    lines = "\n".join(block.text.replace("\n", " ") for block in blocks)
    for found in LintFile(source=str(path), content=lines).lint(DEFAULT) if lines else []:
        block = blocks[max(0, min(found.pos[0] - 2, len(blocks) - 1))]
        if not found.check_result.check_path.startswith(LEFT_OUT):
            yield Finding(path, block.line, found.check_result.message, block.text)


def findings(path: Path) -> Iterator[Finding]:
    """Yield every fault of a file's prose."""
    text = path.read_text()
    blocks = list(docstring_blocks(text) if path.suffix == ".py" else markdown_blocks(text))
    for block in blocks:
        for sentence in sentences(block.text):
            for fault in faults(sentence):
                yield Finding(path, block.line, fault, sentence)
    yield from english(path, blocks)


def main() -> int:
    """Print the findings of all files named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, help="Markdown or Python files, or folders of them")
    CheckRegistry().register_many(ALL_CHECKS)
    named: List[Path] = parser.parse_args().paths
    files = [file for path in named for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    found = [finding for file in files if file.suffix in (".md", ".py") for finding in findings(file)]
    for finding in found:
        print(f"{finding.path}:{finding.line}: {finding.fault}: {finding.sentence[:160]}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
