"""Profile a cluster with what its runtime takes: devices and links by the profiler, passes and sums by training."""

from __future__ import annotations

import importlib.util
import logging
from typing import Callable, Optional, Sequence, Union

import msgspec

from hwaware import profiler, ray_cluster
from hwaware.cluster import ClusterProfile, PartialProfile
from hwaware.deprecation import keyword_only
from hwaware.errors import cause_of
from hwaware.profiler.progress import Progress
from hwaware.records import PathLike

LOG = logging.getLogger("hwaware")


@keyword_only
def profile(
    address: str = "auto",
    *,
    quick: bool = False,
    dtypes: Union[str, Sequence[str]] = ("float32",),
    progress: Optional[Progress] = None,
    only: Union[str, Sequence[str]] = (),
    resume: Union[ClusterProfile, PartialProfile, PathLike, None] = None,
    symmetric: bool = False,
    runtime: bool = True,
    say: Callable[[str], None] = LOG.info,
) -> ClusterProfile:
    """Measure the devices, links and runtime of a cluster, as `hwaware profile` does.

    Args:
        address: HOST:PORT of a Ray cluster, or "auto" for the cluster that Ray finds itself. Without Ray, "local"
            measures the devices of this process.
        quick: Measure fewer sizes, shorter.
        dtypes: Data types of the throughput curves.
        progress: Object that learns how far the measurement is; by default none.
        only: Hosts or devices to measure, or HOST+HOST for the links between two; by default all.
        resume: Earlier profile, or its file. Without `only`, the profiler measures what it lacks. The result holds
            both.
        symmetric: Measure one pair of hosts for all pairs with the same kinds of devices.
        runtime: Train two tiny programs under Alpa, to measure the runtime's own time for passes and gradient sums.
            Where that is impossible, the profile lacks these figures, and one line says why.
        say: Called with that line.

    Raises:
        ClusterUnreachableError: No Ray cluster answers at `address`, or it offers no device.
        UnusableInputError: A data type is unknown, or no host or device has a name in `only`.
        RecordError: The file of `resume` cannot be read.
        ProfileMismatchError: `resume` describes another cluster.
        IncompleteError: Devices or links are missing; its `found` holds the rest.
        InterruptedMeasurement: Ctrl-C; its `found` holds the finished measurements.
        TerminatedMeasurement: A SystemExit, such as a handler of SIGTERM raises; its `found` likewise.

    Example:
        Measure the devices of this process, and keep the result::

            hwaware.profile("local", quick=True).save("cluster.json")
    """
    found = profiler.profile(
        address, quick=quick, dtypes=dtypes, progress=progress, only=only, resume=resume, symmetric=symmetric
    )
    reason = _why_not(found, address, runtime)
    if reason:
        say(f"The profile lacks pass overheads and the other times of the runtime: {reason}.")
    if reason is not None:
        return found
    (progress or profiler.Silent()).phase("Training tiny programs, to time the runtime", 1)
    try:
        return _with_runtime(found, address)
    except KeyboardInterrupt as error:
        raise profiler.InterruptedMeasurement(PartialProfile.of(found)) from error
    except SystemExit as error:
        raise profiler.TerminatedMeasurement(error.code, PartialProfile.of(found)) from error
    except Exception as error:  # noqa: BLE001  # whatever it is, the measurement before it is not lost
        say(f"The profile lacks pass overheads and the other times of the runtime. {cause_of(error)}")
        return found


def _why_not(found: ClusterProfile, address: str, asked: bool) -> Optional[str]:
    """Return why the runtime is not measured; empty if the profile has these figures, None if it is measured."""
    if all(device.pass_s is not None for device in found.devices):
        return ""
    if not asked:
        return "--no-runtime (runtime=False in Python) leaves them out"
    if address == "local":
        return "measuring these needs a Ray cluster, and this profile is of one process"
    lacking = [name for name in ("jax", "alpa") if importlib.util.find_spec(name) is None]
    if not lacking:
        return None
    return (
        f"measuring these needs {' and '.join(lacking)}, which this Python lacks. Predicted steps are then too short. "
        "To fix: see `hwaware doctor`, and complete the profile with --resume FILE"
    )


def _with_runtime(found: ClusterProfile, address: str) -> ClusterProfile:
    from hwaware.activation import install_runtime
    from hwaware.bench.training import TrainingRun
    from hwaware.calibration.runtime_part import with_runtime

    install_runtime()
    with ray_cluster.connect(address):
        return on_present(found, lambda present: with_runtime(present, TrainingRun))


def on_present(found: ClusterProfile, timed: Callable[[ClusterProfile], ClusterProfile]) -> ClusterProfile:
    """Return the profile with the runtime's times on hosts that run; a resumed profile may have other hosts, too."""
    running = {node.address for node in ray_cluster.nodes()}
    present = timed(found.without(tuple(host.name for host in found.hosts if host.address not in running)))
    names = ("pass_s", "sum_bytes_per_s")
    times = {device.id: {name: getattr(device, name) for name in names} for device in present.devices}
    devices = tuple(msgspec.structs.replace(device, **times.get(device.id, {})) for device in found.devices)
    return msgspec.structs.replace(found, devices=devices, driver_s=present.driver_s)
