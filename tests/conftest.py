"""Set before any test imports JAX or Ray: tests compute on the processor and start no Ray by accident."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
