"""Name the data types of arrays as JAX does, with the short names of other programs."""

SHORT_NAMES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}
# Throughput curves have one of these types. A new type gets the default tolerance of hwaware/profiler/products.py,
# unless `_TOLERANCES` there holds another. A type of more than 4 bytes needs a larger `_LARGEST_NUMBER_BYTES` there.
# JAX shortens such a type silently outside `jax.enable_x64`, in older JAX `jax.experimental.enable_x64`. Copies of
# operands to the device, compilation and each timed call need it.
MEASURED = ("float32", "bfloat16", "float16")
