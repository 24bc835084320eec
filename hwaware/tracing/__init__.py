"""JAX functions and Alpa's layers as Workloads: FLOPs, bytes kept and bytes sent, layer by layer."""

from __future__ import annotations

from hwaware.tracing.from_alpa import workload_from_alpa_layers as workload_from_alpa_layers
from hwaware.tracing.function import trace as trace

__all__ = ["trace", "workload_from_alpa_layers"]
