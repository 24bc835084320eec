"""Other libraries of JAX behave beside hwaware and Alpa as they do without them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.alpa
SUPPORT = Path(__file__).parents[1] / "support"
USES = SUPPORT / "other_libraries.py"
# Tests that come with a library's wheel.
OWN_TESTS = {
    "optax": ("_src/update_test.py", "transforms/_adding_test.py", "transforms/_combining_test.py"),
    "haiku": ("_src/dot_test.py", "_src/batch_norm_test.py", "_src/initializers_test.py"),
}


def output(*command):
    """Return what a Python of its own writes, and fail where it fails."""
    import hwaware

    path = [str(SUPPORT), str(Path(hwaware.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_libraries_compute_the_same_bits():
    beside = output("-c", f"import with_alpa, runpy; runpy.run_path({str(USES)!r}, run_name='__main__')")
    assert beside == output(str(USES))
    assert "flax " in beside


@pytest.mark.skipif(not os.environ.get("HWAWARE_ALL_CASES"), reason="tests of others; `make test-all` runs them")
@pytest.mark.parametrize("library", OWN_TESTS)
def test_tests_of_a_library_pass(library, tmp_path):
    found = importlib.util.find_spec(library)
    files = [Path(found.origin).parent / name for name in OWN_TESTS[library]] if found else []
    files = [str(file) for file in files if file.exists()]
    if not files:
        pytest.skip(f"{library} is not installed, or comes without its tests")
    quiet = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "filterwarnings=", f"--rootdir={tmp_path}")
    said = output("-m", "pytest", "-p", "with_alpa", *quiet, *files)
    assert " passed" in said
