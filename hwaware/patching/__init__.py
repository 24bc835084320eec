"""Override Alpa: the mechanism, the stage option, the meshes, and the names that stock JAX lacks."""

from hwaware.patching.activation import disable as disable
from hwaware.patching.activation import enable as enable
from hwaware.patching.activation import enabled as enabled
from hwaware.patching.explicit import HardwareAwareStageOption as HardwareAwareStageOption
from hwaware.patching.restoring import restore_newest as restore_newest
from hwaware.patching.stage_option import last_plan as last_plan
from hwaware.patching.surviving import last_history as last_history
