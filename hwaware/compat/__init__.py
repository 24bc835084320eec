"""Give everything that hwaware takes from inside JAX and jaxlib one name for all versions.

This room looks for each facility in the place where each version has it, and reads no version number. Only this room
imports `jax._src`, `jax.core`, `jax.interpreters` and `jaxlib`. Modules:

- jaxprs: read the programs that JAX traced.
- programs: trace, build and run such programs; define hwaware's own primitives.
- lowering: write StableHLO.
- client: compile and run programs, and hold arrays, with XLA's client.
- specs: describe shardings in Alpa's words, which JAX had until 0.9.
- facades: show Alpa alone the JAX that Alpa 0.2.3 knows.
- scan: tell which names Alpa and hwaware miss in the installed JAX.
"""
