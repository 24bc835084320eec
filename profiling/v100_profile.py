"""Makes recorded/v100-two-hosts.json from recorded/v100_collectives.json: python profiling/v100_profile.py

The recorded curves are those of Alpa's own profiling database; they go the way that `hwaware import alpa-db` goes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, Tuple

from hwaware.interop import import_profile
from hwaware.interop.alpa_database import ITEM_BYTES, OPERATIONS, Mesh

RECORDED = Path(__file__).parent / "recorded"


def meshes(document: Dict[str, Any]) -> Dict[Tuple[int, int], Mesh]:
    """The recorded curves by mesh shape; elements become bytes."""
    memory = document["meta"]["available_memory_per_device_bytes"]
    found: Dict[Tuple[int, int], Mesh] = {}
    for curve in document["curves"]:
        hosts, devices = curve["mesh_shape"]
        empty = Mesh(memory[f"{hosts}x{devices}"], {}, {op: {} for op in OPERATIONS})
        mesh = found.setdefault((hosts, devices), empty)
        points = [(x, t) for x, t in zip(curve["size"], curve["seconds"]) if t is not None]
        if curve["op"] == "dot":
            mesh.products[curve["dtype"]] = tuple(points)
        else:
            groups = tuple(tuple(group) for group in curve["replica_groups"])
            unit = ITEM_BYTES[curve["dtype"]]
            mesh.collectives[curve["op"]][groups, curve["dtype"]] = tuple((x * unit, t) for x, t in points)
    return found


def main() -> None:
    """Write the profile."""
    document = json.loads((RECORDED / "v100_collectives.json").read_text())
    source = "Alpa's OSDI'22 artifact as republished in explcre/pipeDejavu (see README.md); hardware as inferred there"
    import_profile(meshes(document), "V100-16GB", source).save(RECORDED / "v100-two-hosts.json")


if __name__ == "__main__":
    main()
