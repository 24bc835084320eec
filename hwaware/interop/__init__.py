"""Read and write other programs' measurements: Alpa's profiling database, and the output of nccl-tests.

- `restricted_pickle` reads a pickle that can construct nothing but Alpa's tables.
- `alpa_database` turns these tables into a ClusterProfile, and back.
- `estimates` prices products and collectives for a database.
- `nccl_tests` adds the text or JSON of nccl-tests to a ClusterProfile.
"""

from __future__ import annotations

from hwaware.interop.alpa_database import export_profile, import_profile, read_database
from hwaware.interop.nccl_tests import add_collectives, read_nccl_tests

__all__ = ["add_collectives", "export_profile", "import_profile", "read_database", "read_nccl_tests"]
