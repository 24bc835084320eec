"""Turn JAX functions and Alpa's layers into Workloads: FLOPs, stored bytes and sent bytes, layer by layer."""

from hwaware.tracing.from_alpa import workload_from_alpa_layers as workload_from_alpa_layers
from hwaware.tracing.function import trace as trace
