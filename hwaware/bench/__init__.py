"""Measuring on real clusters: the testbed, its scenarios, and the harness that compares mappings.

From the outside in: benchmark (scenarios times models, a file each), comparison (one model on one cluster; enumeration:
by every mapping, midway: while it slows down), task (what is compared), mappings (which), groups (a few trained at a
time, started again), pace (within a time), harness (one step each in turn), training (one of them). Beside them: passes
(what the runtime takes), statistics, summary and differences (of results), demo.
"""
