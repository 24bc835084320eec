"""Read and write other programs' measurements: Alpa's profiling database, and the output of measuring programs.

- `restricted_pickle` reads a pickle that can construct nothing but Alpa's tables.
- `alpa_database` turns these tables into a ClusterProfile, and back.
- `estimates` prices products and collectives for a database.
- `formats` recognises a measurement file, and reads it by `nccl_tests`, `p2p_test`, `nvbandwidth`, `iperf3`, `perftest`
  or `topo`. `nccl_tables` reads the tables of `nccl_tests`.
- `readings` has what these importers share, and the record that they return, a `Reading`.
- `merging` joins readings into a ClusterProfile. `places` finds the hosts and devices that they name, and `assumptions`
  marks the values that no file gives.
"""

from __future__ import annotations

from hwaware.interop.alpa_database import export_profile, import_profile, read_database
from hwaware.interop.formats import read
from hwaware.interop.merging import merged
from hwaware.interop.places import Speed
from hwaware.interop.readings import names_of, unnamed, with_names

__all__ = [
    "Speed",
    "export_profile",
    "import_profile",
    "merged",
    "names_of",
    "read",
    "read_database",
    "unnamed",
    "with_names",
]
