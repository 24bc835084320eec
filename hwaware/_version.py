"""The version of hwaware, in this one place."""

__version__ = "0.1.0"
