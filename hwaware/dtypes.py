"""Name the data types of arrays as JAX does, with their sizes and the short names of other programs."""

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
SHORT_NAMES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}
# Throughput curves have one of these types. Another one needs a tolerance in hwaware/profiler/products.py. A type of
# more than 4 bytes also needs a larger bound of memory there, and `jax.experimental.enable_x64`: JAX shortens it
# silently.
MEASURED = ("float32", "bfloat16", "float16")
