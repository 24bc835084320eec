"""Keep the old name of `hwaware.StepRecorder`."""

from hwaware.deprecation import moved

__getattr__ = moved(__name__, {"StepRecorder": ("hwaware", "StepRecorder")})
