"""Name JAX's packages for messages, version lists and old files, without importing any."""

XLA_PACKAGE = "jaxlib"
JAX_PACKAGES = ("jax", XLA_PACKAGE)
INSTALL_JAX = "pip install jax jaxlib"
ALPAS_JAXLIB = "Alpa's own jaxlib"
# Modules from which pickles took the types of numbers over the years.
MODULES_OF_DTYPES = ("ml_dtypes", "jaxlib.xla_extension", "jax._src.dtypes", "builtins")


def install_jax(oldest: str, newest: str = "") -> str:
    """Return the remedy for a JAX that is not between two versions."""
    versions = f">={oldest}" + (f",<={newest}" if newest else "")
    return "pip install " + " ".join(f"'{name}{versions}'" for name in JAX_PACKAGES)
