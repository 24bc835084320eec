"""What the README says can be run runs, and what it links to is there."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


def test_the_example_on_a_recorded_profile_prints_what_the_readme_says():
    blocks = re.findall(r"```python\n((?:(?!```).)*)```\n+prints\n+```\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 1
    code, expected = blocks[0]
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True, timeout=120
    ).stdout
    assert found == expected


def test_every_local_link_resolves():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", TEXT) if "://" not in link]
    assert len(links) >= 4
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_commands_are_those_of_the_makefile():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"^make (\w+)", TEXT, re.MULTILINE)
    assert named == ["demo", "test"]
    assert set(named) <= set(targets)
