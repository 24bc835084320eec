"""Place stages for a copy of Alpa whose source patches/write_diff.py has changed.

If HWAWARE_PROFILE is set, this Alpa asks hwaware for its placement. Otherwise, it works as before. The copy needs
Alpa's own XLA. On stock JAX, use `hwaware.enable` instead (patches/README.md).
"""

from __future__ import annotations

import os
from typing import Any, Callable

from hwaware.autoload import VARIABLE
from hwaware.cluster import ClusterProfile
from hwaware.patching import stage_option


def hardware_aware(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Alpa's stage construction: use the profile that HWAWARE_PROFILE names when Alpa compiles a function."""
    placed = stage_option.hardware_aware(original)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        path = os.environ.get(VARIABLE)
        if not path or stage_option.has_default():
            return placed(*args, **kwargs)
        stage_option.set_default(stage_option.PlacementSettings(ClusterProfile.load(path)))
        try:
            return placed(*args, **kwargs)
        finally:
            stage_option.set_default(None)

    return chosen
