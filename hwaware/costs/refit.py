"""Online refit: measured steps correct the few factors by which a cluster differs from its profile."""

from __future__ import annotations

from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import msgspec
import numpy as np

from hwaware.cluster import ClusterProfile
from hwaware.costs.curves import FloatArray
from hwaware.costs.evaluate import evaluate, prepared_for
from hwaware.costs.fitting import fit_positive
from hwaware.costs.pipeline import pipeline_s, tail_s
from hwaware.costs.prepared import PreparedCosts
from hwaware.costs.stages import boundary_s, check_plan
from hwaware.errors import UnusableInputError
from hwaware.plans import Plan
from hwaware.records import Record
from hwaware.workload import Layer, MeasuredTime, Workload

# How hard a factor is held at 1: one step that is 20 % off moves it nearly all the way.
REFIT_PRIOR = 0.3


class Correction(Record, frozen=True, kw_only=True):
    """By what a cluster differs from its profile; made by `refit`.

    Attributes:
        compute: For each device kind, measured over predicted time of computation.
        communication: The same of messages and gradient synchronisation.
    """

    compute: Dict[str, float]
    communication: float

    def profile(self, profile: ClusterProfile) -> ClusterProfile:
        """The profile with every time multiplied by its factor."""
        factor = self.communication
        devices = tuple(
            msgspec.structs.replace(
                device,
                throughput={
                    dtype: tuple(
                        msgspec.structs.replace(point, seconds=point.seconds * self.compute.get(device.kind, 1.0))
                        for point in points
                    )
                    for dtype, points in device.throughput.items()
                },
                pass_s=None if device.pass_s is None else device.pass_s * self.compute.get(device.kind, 1.0),
                sum_bytes_per_s=_over(device.sum_bytes_per_s, factor),
                memory_bandwidth_bytes_per_s=_over(
                    device.memory_bandwidth_bytes_per_s, self.compute.get(device.kind, 1.0)
                ),
            )
            for device in profile.devices
        )
        links = tuple(
            msgspec.structs.replace(
                link,
                latency_s=link.latency_s * factor,
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / factor,
                samples=tuple(msgspec.structs.replace(s, seconds=s.seconds * factor) for s in link.samples),
            )
            for link in profile.links
        )
        cards = tuple(
            msgspec.structs.replace(
                card,
                send_bytes_per_s=card.send_bytes_per_s / factor,
                receive_bytes_per_s=card.receive_bytes_per_s / factor,
                concurrent=tuple(
                    msgspec.structs.replace(rate, bytes_per_s=rate.bytes_per_s / factor) for rate in card.concurrent
                ),
            )
            for card in profile.shared_cards
        )
        return msgspec.structs.replace(profile, devices=devices, links=links, shared_cards=cards)

    def workload(self, workload: Workload) -> Workload:
        """The workload with measured layer times multiplied by their kind's factor."""
        return msgspec.structs.replace(workload, layers=tuple(self._layer(layer) for layer in workload.layers))

    def _layer(self, layer: Layer) -> Layer:
        if not layer.measured:
            return layer
        scaled = {
            kind: {sharding: _scaled(times, self.compute.get(kind, 1.0)) for sharding, times in shardings.items()}
            for kind, shardings in layer.measured.items()
        }
        return msgspec.structs.replace(layer, measured=scaled)


def refit(
    observed: Sequence[Tuple[Plan, float]], workload: Workload, profile: ClusterProfile, prior: float = REFIT_PRIOR
) -> Correction:
    """Factors for computation (one a device kind) and communication under which measured steps come out right.

    minimise  (100 / m) sum_i (step_i(c, w) / measured_i - 1)^2 + prior^2 (sum_k log^2 c_k + log^2 w)

    step_i is the judge's closed form of plan i with stage times times c of the stage's slowest kind and messages times
    w. Few measurements move few factors: what they leave open stays 1.

    Args:
        observed: Plans and the step times measured for them, at least one; medians of several steps are best.
        workload: What ran.
        profile: What the predictions were made with.
        prior: How hard the factors are held at 1.

    Returns:
        The correction; `correction.profile(profile)` and `correction.workload(workload)` price all further plans.

    Raises:
        UnusableInputError: Nothing was measured.
        PlanError: A plan does not fit the workload or the cluster.

    Source: Qiao et al., "Pollux", 2021: a throughput model whose few parameters are refitted as training runs.
    """
    if not observed or not all(seconds > 0 for _, seconds in observed):
        raise UnusableInputError(
            f"{len(observed)} measured steps, expected at least one, and times above 0.", "measure some steps."
        )
    kinds = sorted({device.kind for device in profile.devices})
    steps = [scalable_step(plan, workload, profile, kinds) for plan, _ in observed]

    def predicted(factors: FloatArray) -> FloatArray:
        return np.array([step(factors) for step in steps])

    measured = np.array([seconds for _, seconds in observed], dtype=np.float64)
    found = fit_positive(predicted, measured, np.ones(len(kinds) + 1), prior)
    return Correction(
        compute={kind: float(factor) for kind, factor in zip(kinds, found)}, communication=float(found[-1])
    )


class _Stage(NamedTuple):
    kind: int
    forward_s: float
    backward_s: float
    update_s: float
    sync_s: float


def scalable_step(
    plan: Plan, workload: Workload, profile: ClusterProfile, kinds: Sequence[str]
) -> Callable[[FloatArray], float]:
    """The price of a plan as a function of the factors of each kind and, last, of communication.

    Raises:
        PlanError: The plan does not fit the workload or the cluster.
    """
    costs = prepared_for(plan, workload, profile)
    cost = evaluate(plan, workload, profile, costs)
    replicas = check_plan(plan, costs)
    stages: List[_Stage] = []
    for stage, priced in zip(plan.stages, cost.stages):
        slowest = _slowest_kind(stage.layers, replicas[len(stages)], costs)
        stages.append(
            _Stage(kinds.index(slowest), priced.forward_s, priced.backward_s, priced.update_s, priced.gradient_sync_s)
        )
    # Messages are scaled, what their receivers gain by waiting stays: (on the way, gained), there and back.
    messages = []
    for i, stage in enumerate(plan.stages[:-1]):
        layer, ahead, behind = stage.layers[1], replicas[i], replicas[i + 1]
        there_s, back_s = boundary_s(layer, ahead, behind, costs.without_head_starts)
        net_there_s, net_back_s = boundary_s(layer, ahead, behind, costs)
        messages.append(((there_s, there_s - net_there_s), (back_s, back_s - net_back_s)))
    trains = plan.schedule != "inference"

    def step_s(factors: FloatArray) -> float:
        link = float(factors[-1])
        forward = [s.forward_s * float(factors[s.kind]) for s in stages]
        backward = [s.backward_s * float(factors[s.kind]) for s in stages]
        there = [way * link - gained for (way, gained), _ in messages]
        back = [way * link - gained if trains else 0.0 for _, (way, gained) in messages]
        once = [s.sync_s * link + s.update_s * float(factors[s.kind]) for s in stages]
        step = pipeline_s(plan.schedule, forward, backward, there, back, plan.num_microbatches)
        return step + tail_s(backward, back, once)

    return step_s


def _slowest_kind(
    layers: Tuple[int, int], replicas: Sequence[Tuple[Tuple[str, ...], float]], costs: PreparedCosts
) -> str:
    """The kind of the replica that takes longest; a group of unlike devices counts by its first."""
    first, end = layers[0], layers[1] + 1

    def seconds(replica: Tuple[Tuple[str, ...], float]) -> float:
        sums = costs.sums(replica[0], replica[1], len(replicas))
        return sums.forward_s[end] - sums.forward_s[first] + sums.backward_s[end] - sums.backward_s[first]

    return costs.devices[max(replicas, key=seconds)[0][0]].kind


def _scaled(times: MeasuredTime, factor: float) -> MeasuredTime:
    return msgspec.structs.replace(
        times,
        forward_s=times.forward_s * factor,
        backward_s=times.backward_s * factor,
        update_s=_times(times.update_s, factor),
        deviation_s=_times(times.deviation_s, factor),
    )


def _times(value: Optional[float], factor: float) -> Optional[float]:
    return None if value is None else value * factor


def _over(value: Optional[float], factor: float) -> Optional[float]:
    return None if value is None else value / factor
