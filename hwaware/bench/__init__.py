"""Measuring on real clusters: the testbed, its scenarios, and the harness that compares mappings."""
