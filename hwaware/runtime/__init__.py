"""Alpa's workers, transfers and stage executables on stock JAX, under Alpa's own driver, schedules and interpreter.

Nothing here is imported by Alpa: `hwaware.patching` puts these in the place of Alpa's own leaf classes, which need a
jaxlib that no registry carries any more.
"""
