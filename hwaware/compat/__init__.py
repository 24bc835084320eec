"""Everything that hwaware takes from inside JAX and jaxlib, each facility under one name for all versions.

A facility is looked for where each version has it, and no version number is read. Only this room imports `jax._src`,
`jax.core`, `jax.interpreters` and `jaxlib`. Modules:

- jaxprs: read the programs that JAX traced.
- programs: trace, build and run such programs; primitives of hwaware's own.
- lowering: StableHLO.
- client: XLA's client compiles, holds arrays and runs.
- specs: Alpa's words for shardings, which JAX had until 0.9.
- facades: JAX as Alpa 0.2.3 knows it, seen by Alpa alone.
- scan: tells which names Alpa and hwaware miss in the installed JAX.
"""
