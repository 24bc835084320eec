"""The parts of tests/alpa that benchmarks run are there: a test that was renamed would stop them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("name", "count"), [("versions.py", 19), ("packages.py", 2)])
def test_the_chosen_tests_exist(name, count):
    script = (ROOT / "benchmarks" / name).read_text()
    chosen = re.findall(r'"(test_\w+\.py)(?:::(\w+))?', script)
    assert len(chosen) == count
    for file, name in chosen:
        text = (ROOT / "tests" / "alpa" / file).read_text()
        assert not name or f"def {name}(" in text
