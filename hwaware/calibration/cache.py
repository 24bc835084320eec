"""Keep the times of layers on disk, so that the next start of a program times nothing.

Each file holds the layers of one device at its measured speed, with one version of JAX and of hwaware. A layer's key is
the digest of its program.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from pathlib import Path
from typing import ClassVar, Dict, Mapping, Optional

import msgspec

from hwaware import cache_folder
from hwaware._version import __version__
from hwaware.cluster import Device
from hwaware.costs.own_times import NOISE
from hwaware.errors import RecordError
from hwaware.records import MOST_SECONDS, FileRecord, Record, require, require_amount
from hwaware.workload import MeasuredTime

LOG = logging.getLogger("hwaware")
LIMIT_VARIABLE = "HWAWARE_CALIBRATION_S"
# How a user times layers again.
AGAIN = (
    f'start again while the cluster is idle. With costs="auto", also set {LIMIT_VARIABLE} to more seconds than before: '
    "hwaware then times these layers again."
)
# The oldest layers leave a file that has more.
_MOST_LAYERS = 4096
# The relative error of any mean of n positive figures is at most 1 (all but one of them are almost 0).
_MOST_ERROR = 1.0
_Times = Dict[str, MeasuredTime]


class KeptLayer(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Hold the times of one layer on one device.

    Attributes:
        times: "DP,TP" -> times, as in `Layer.measured`; empty if time ran out before this layer.
        limit_s: Time limit of that calibration; a longer one times the layer again if it has no times or `busy`. 0 if
            the device was not asked for this layer, because another one of its kind was.
        busy: True if hosts did other work meanwhile.
        error: Relative standard error of the time of one of the device's programs.
        level_error: Relative standard error that all the device's programs have in common.
    """

    times: _Times
    limit_s: float
    busy: bool = False
    error: float = NOISE
    level_error: float = NOISE

    def __post_init__(self) -> None:
        require_amount("limit_s", self.limit_s, MOST_SECONDS)
        require_amount("error", self.error, _MOST_ERROR)
        require_amount("level_error", self.level_error, _MOST_ERROR)
        require(not self.times or "1,1" in self.times, f'times are of {sorted(self.times)}, expected "1,1" among them')


class KeptTimes(FileRecord, frozen=True, kw_only=True, omit_defaults=True):
    """Hold a file of the cache: digest of a layer's program -> its times.

    Example:
        >>> KeptTimes(layers={"3f2a": KeptLayer(times={}, limit_s=30.0)}).layers["3f2a"].times
        {}
    """

    SCHEMA: ClassVar[str] = "hwaware.layer-times"

    layers: Dict[str, KeptLayer]


class LayerCache:
    """Look up and keep the times of layers, device by device.

    A file that is damaged, or cannot be read or written, costs one warning; the layers are then timed.
    """

    def __init__(self, jax_version: str) -> None:
        self._folder = cache_folder.folder()
        self._jax_version = jax_version

    def path(self, device: Device) -> Optional[Path]:
        """Return the file of a device; None if the cache is switched off."""
        if self._folder is None:
            return None
        speed = (device.throughput, device.memory_bandwidth_bytes_per_s)
        text = msgspec.json.encode([device.id, device.kind, *speed, self._jax_version, __version__])
        return self._folder / f"layers-{hashlib.sha256(text).hexdigest()[:32]}.json"

    def known(self, device: Device) -> Dict[str, KeptLayer]:
        """Return the layers that were timed on this device."""
        path = self.path(device)
        if path is None or not os.path.lexists(path):
            return {}
        try:
            return KeptTimes.load(path).layers
        except RecordError as error:
            LOG.warning("Layer times are measured again. %s", error)
            return {}

    def keep(self, device: Device, fresh: Dict[str, KeptLayer]) -> bool:
        """Add fresh times to a device's file, the newest last; return True unless it cannot be written."""
        path, known = self.path(device), {}
        if path is None:
            return True
        with contextlib.suppress(RecordError):  # the file is read again: another program may have written it meanwhile
            known = KeptTimes.load(path).layers
        try:
            KeptTimes(layers=dict(list(renewed(known, fresh).items())[-_MOST_LAYERS:])).save(path)
        except RecordError as error:
            LOG.warning("The next start times the layers again. %s", error)
            return False
        return True


def renewed(known: Mapping[str, KeptLayer], fresh: Mapping[str, KeptLayer]) -> Dict[str, KeptLayer]:
    """Return the layers with fresh times; a layer that has times keeps these if a second timing found none."""
    return {
        **known,
        **{key: one for key, one in fresh.items() if one.times or key not in known or not known[key].times},
    }
