"""Set before any test imports JAX or Ray: tests compute on the processor and start no Ray by accident."""

import os
import signal

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"


def pytest_configure():
    """A shell that runs the tests in the background makes them, and all they start, ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
