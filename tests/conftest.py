"""Set before any test imports JAX or Ray: tests compute on the processor and start no Ray by accident."""

import functools
import inspect
import os
import signal

from builders import ALL_CASES
from click.testing import CliRunner

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
# Programs choose by the profile alone unless a test says otherwise: to time their layers takes seconds.
os.environ["HWAWARE_COSTS"] = "model"
os.environ["HWAWARE_CACHE"] = ""


def pytest_configure():
    """A shell that runs the tests in the background makes them, and all they start, ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # click before 8.2 puts both streams into one unless it is told not to
    if "mix_stderr" in inspect.signature(CliRunner).parameters:
        CliRunner.__init__ = functools.partialmethod(CliRunner.__init__, mix_stderr=False)


def pytest_collection_modifyitems(config, items):
    """Leave the tests marked `thorough` to `make test-all`, but run what the command line names."""
    if not ALL_CASES and not any("::" in str(each) for each in config.args):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("thorough")])
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
