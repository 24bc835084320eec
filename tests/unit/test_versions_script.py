"""The part of tests/alpa that `make versions` runs is there: a test that was renamed would stop it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_chosen_tests_exist():
    script = (ROOT / "benchmarks" / "versions.py").read_text()
    chosen = re.findall(r'"(test_\w+\.py)(?:::(\w+))?', script)
    assert len(chosen) > 10
    for file, name in chosen:
        text = (ROOT / "tests" / "alpa" / file).read_text()
        assert not name or f"def {name}(" in text
