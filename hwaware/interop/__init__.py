"""Measurements in other programs' formats: Alpa's profiling database (both ways) and the output of nccl-tests.

restricted_pickle   reads a pickle that can construct nothing but Alpa's tables
alpa_database       those tables to and from a ClusterProfile
nccl_tests          text and JSON of nccl-tests to the collectives of a ClusterProfile
"""

from __future__ import annotations

from hwaware.interop.alpa_database import export_profile, import_profile, read_database
from hwaware.interop.nccl_tests import add_collectives, read_nccl_tests

__all__ = ["add_collectives", "export_profile", "import_profile", "read_database", "read_nccl_tests"]
