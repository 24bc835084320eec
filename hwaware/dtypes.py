"""Name the data types of arrays as JAX does, with the short names of other programs."""

SHORT_NAMES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}
# The profiler measures throughput curves in these types. A type of more than 4 bytes needs a larger
# `_LARGEST_NUMBER_BYTES` of hwaware/profiler/products.py. JAX shortens such a type silently outside `jax.enable_x64`,
# in older JAX `jax.experimental.enable_x64`. Inside this block, let the profiler copy operands, compile, and run each
# timed call.
MEASURED = ("float32", "bfloat16", "float16")
