"""Override Alpa: the mechanism, the stage option, the meshes, and the names that stock JAX lacks."""

from hwaware.patching.restoring import restore_newest as restore_newest
from hwaware.patching.stage_option import last_plan as last_plan
from hwaware.patching.stage_option import last_workload as last_workload
