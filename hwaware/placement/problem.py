"""A search problem as arrays: contiguous layers on single devices, devices that cannot be told apart in one class."""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Tuple

import numpy as np
import numpy.typing as npt

from hwaware.cluster import ClusterProfile
from hwaware.costs import PreparedCosts
from hwaware.costs.curves import FloatArray
from hwaware.plans import Objective, Plan, Replica, Schedule, Stage
from hwaware.workload import Workload


class Problem(NamedTuple):
    """What a search over single-device stages needs to know; K classes of devices, L layers.

    Attributes:
        members: The device ids of each class, in the profile's order.
        forward_s, backward_s, update_s, resident_bytes: [K, L + 1] running sums over the layers.
        activation_bytes: [L + 1] running sums, per microbatch in flight.
        limit_bytes: [K] memory of one device.
        sends_s: [L, K, K] time to send the output of a layer from class to class; infinite without a link, and on the
            diagonal of a class with one member.
        num_microbatches: B.
        schedule, objective: What is minimised.
    """

    members: Tuple[Tuple[str, ...], ...]
    forward_s: FloatArray
    backward_s: FloatArray
    update_s: FloatArray
    resident_bytes: FloatArray
    activation_bytes: FloatArray
    limit_bytes: FloatArray
    sends_s: FloatArray
    num_microbatches: int
    schedule: Schedule
    objective: Objective

    @property
    def num_layers(self) -> int:
        """L."""
        return self.activation_bytes.shape[0] - 1

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Devices in each class."""
        return np.array([len(members) for members in self.members], dtype=np.int64)

    def restricted(self, sizes: List[int]) -> Problem:
        """The problem with only the first so many devices of each class."""
        kept = [k for k, size in enumerate(sizes) if size > 0]
        sends = self.sends_s[:, kept][:, :, kept].copy()
        for position, k in enumerate(kept):
            if sizes[k] == 1:
                sends[:, position, position] = np.inf
        return self._replace(
            members=tuple(self.members[k][: sizes[k]] for k in kept),
            forward_s=self.forward_s[kept],
            backward_s=self.backward_s[kept],
            update_s=self.update_s[kept],
            resident_bytes=self.resident_bytes[kept],
            limit_bytes=self.limit_bytes[kept],
            sends_s=sends,
        )

    def plan(self, stages: List[Tuple[int, int, int]]) -> Plan:
        """The plan with these (first layer, last layer, class) in pipeline order; members are taken in order."""
        used = [0] * len(self.members)
        made = []
        for first, last, k in stages:
            device = self.members[k][used[k]]
            used[k] += 1
            made.append(Stage(layers=(first, last), replicas=(Replica(devices=(device,)),)))
        return Plan(num_microbatches=self.num_microbatches, schedule=self.schedule, stages=tuple(made))


def prepare(
    workload: Workload,
    profile: ClusterProfile,
    num_microbatches: int,
    objective: Objective = "step",
    schedule: Schedule = "1f1b",
    costs: Optional[PreparedCosts] = None,
) -> Problem:
    """The search problem of placing `workload` on `profile`, in the very numbers that `evaluate` uses.

    Raises:
        UnusableInputError: A device was not measured with the workload's data type.
    """
    if costs is None:
        costs = PreparedCosts(workload, profile, schedule)
    devices = [device.id for device in profile.devices]
    sums = [costs.sums((device,)) for device in devices]
    layers = len(workload.layers)
    trains = 0.0 if schedule == "inference" else 1.0
    table = {
        "forward_s": np.array([s.forward_s for s in sums]),
        "backward_s": np.array([s.backward_s for s in sums]) * trains,
        "update_s": np.array([s.update_s for s in sums]) * trains,
        "resident_bytes": np.array([s.resident_bytes[0] for s in sums]),
        "limit_bytes": np.array([float(d.memory_bytes) for d in profile.devices]),
    }
    sends = np.full((layers, len(devices), len(devices)), np.inf)
    for i, source in enumerate(devices):
        for j, target in enumerate(devices):
            times = costs.sends_s(source, target) if i != j else None
            if times is not None:
                sends[:, i, j] = times
    classes = _classes(np.column_stack([values.reshape(len(devices), -1) for values in table.values()]), sends)
    heads = [members[0] for members in classes]
    merged = sends[:, heads][:, :, heads]
    for k, members in enumerate(classes):
        if len(members) > 1:
            merged[:, k, k] = sends[:, members[0], members[1]]
    return Problem(
        members=tuple(tuple(devices[d] for d in members) for members in classes),
        activation_bytes=np.array(sums[0].activation_bytes),
        sends_s=merged,
        num_microbatches=num_microbatches,
        schedule=schedule,
        objective=objective,
        **{name: values[heads] for name, values in table.items()},
    )


def _classes(rows: FloatArray, sends: FloatArray) -> List[List[int]]:
    """Devices that can be swapped without changing any number, grouped. Swaps compose, so one member stands for all."""
    classes: List[List[int]] = []
    for device in range(rows.shape[0]):
        for members in classes:
            if np.array_equal(rows[device], rows[members[0]]) and _swappable(device, members[0], sends):
                members.append(device)
                break
        else:
            classes.append([device])
    return classes


def _swappable(i: int, j: int, sends: FloatArray) -> bool:
    others = [k for k in range(sends.shape[1]) if k not in (i, j)]
    return (
        np.array_equal(sends[:, i, others], sends[:, j, others])
        and np.array_equal(sends[:, others, i], sends[:, others, j])
        and np.array_equal(sends[:, i, j], sends[:, j, i])
    )
