"""Read the recorded collectives of others under profiling/recorded: elements to bytes, a set for each device kind."""

from __future__ import annotations

from typing import Any, Dict, List

from hwaware.errors import RecordError
from hwaware.records import PathLike, decode_document, read_bytes

DTYPE_BYTES = {"f16": 2, "f32": 4, "float16": 2, "float32": 4}

# Sources whose all-to-all sizes are one device's operand instead of the full array.
COUNTS_OPERANDS = ("sjtu-epcc/arena",)

RecordedCurve = Dict[str, Any]


def read_collectives(path: PathLike) -> Dict[str, List[RecordedCurve]]:
    """Curves for `fit_collectives` by device kind, from a file as in profiling/recorded.

    Sizes become bytes of the full logical array. A send between two hosts whose devices the source does not name gets
    the groups [[0, devices_per_host]]. Matrix products, empty messages and points that failed are left out.

    Args:
        path: A JSON file with `meta` and `curves`; curves with `points` or with `size` and `seconds`.

    Returns:
        Kind -> curves with op, dtype, devices_per_host, hosts, replica_groups and points.

    Raises:
        RecordError: The file cannot be read, or has no curves.
    """
    document = decode_document(read_bytes(path), str(path))
    meta, curves = document.get("meta", {}), document.get("curves")
    if not isinstance(curves, list):
        raise RecordError(f"{path} has no curves.", "give a file as those in profiling/recorded.")
    operands = any(name in str(meta.get("source", "")) for name in COUNTS_OPERANDS)
    found: Dict[str, List[RecordedCurve]] = {}
    for curve in curves:
        if curve["op"] != "dot":
            found.setdefault(curve.get("kind", "V100"), []).append(_curve(curve, operands))
    return found


def _curve(curve: RecordedCurve, operands: bool) -> RecordedCurve:
    hosts, per_host = curve["mesh_shape"] if "mesh_shape" in curve else (curve["hosts"], curve["devices_per_host"])
    groups = curve["replica_groups"]
    if groups is None and hosts > 1:
        groups = [[0, per_host]]
    points = curve["points"] if "points" in curve else list(zip(curve["size"], curve["seconds"]))
    unit = DTYPE_BYTES[curve["dtype"]]
    if operands and curve["op"] == "all-to-all":
        unit *= max(len(group) for group in groups)
    return {
        "op": curve["op"],
        "dtype": curve["dtype"],
        "devices_per_host": per_host,
        "hosts": hosts,
        "replica_groups": groups,
        "points": [[size * unit, seconds] for size, seconds in points if size > 0 and seconds is not None],
    }
