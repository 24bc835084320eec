"""Correct a profile by measured steps: few factors by which a cluster differs from its profile."""

from __future__ import annotations

from typing import Dict, Optional, Sequence, Tuple

import msgspec
import numpy as np

from hwaware.cluster import ClusterProfile, Collective, Link, LinkSample, SharedCard
from hwaware.costs.curves import FloatArray
from hwaware.costs.evaluate import evaluate
from hwaware.costs.fitting import fit_positive
from hwaware.costs.speed import at_speed
from hwaware.errors import UnusableInputError
from hwaware.plans import Plan
from hwaware.records import Record
from hwaware.workload import Workload

# How hard a factor is held at 1: one step that is 20 % off moves it nearly all the way.
REFIT_PRIOR = 0.3


class Correction(Record, frozen=True, kw_only=True):
    """Factors by which a cluster differs from its profile; made by `refit`.

    Attributes:
        compute: For each device kind, measured over predicted time of computation.
        communication: The same of messages and gradient sums.
    """

    compute: Dict[str, float]
    communication: float

    def applied(self, workload: Workload, profile: ClusterProfile) -> Tuple[Workload, ClusterProfile]:
        """Return the workload and the profile with every time multiplied by its factor.

        Raises:
            RecordError: A time is then beyond its bound.
        """
        slower, corrected = at_speed(workload, profile, 1.0, self.compute)
        devices = tuple(
            msgspec.structs.replace(device, sum_bytes_per_s=_over(before.sum_bytes_per_s, self.communication))
            for device, before in zip(corrected.devices, profile.devices)
        )
        return slower, msgspec.structs.replace(
            corrected,
            devices=devices,
            links=tuple(map(self._link, profile.links)),
            shared_cards=tuple(map(self._card, profile.shared_cards)),
            collectives=tuple(map(self._collective, profile.collectives)),
        )

    def _link(self, link: Link) -> Link:
        return msgspec.structs.replace(
            link,
            latency_s=link.latency_s * self.communication,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / self.communication,
            samples=self._samples(link.samples),
        )

    def _card(self, card: SharedCard) -> SharedCard:
        factor = self.communication
        return msgspec.structs.replace(
            card,
            send_bytes_per_s=card.send_bytes_per_s / factor,
            receive_bytes_per_s=card.receive_bytes_per_s / factor,
            concurrent=tuple(msgspec.structs.replace(r, bytes_per_s=r.bytes_per_s / factor) for r in card.concurrent),
        )

    def _collective(self, collective: Collective) -> Collective:
        return msgspec.structs.replace(collective, points=self._samples(collective.points))

    def _samples(self, samples: Tuple[LinkSample, ...]) -> Tuple[LinkSample, ...]:
        return tuple(msgspec.structs.replace(s, seconds=s.seconds * self.communication) for s in samples)


def refit(
    observed: Sequence[Tuple[Plan, float]], workload: Workload, profile: ClusterProfile, prior: float = REFIT_PRIOR
) -> Correction:
    """Find factors for computation (one a device kind) and communication under which measured steps come out right.

    minimise  (100 / m) sum_i (step_i(c, w) / measured_i - 1)^2 + prior^2 (sum_k log^2 c_k + log^2 w)

    step_i is the price of plan i with the corrected workload and profile. Few measurements move few factors: factors
    that they leave open stay 1.

    Args:
        observed: Plans and the step times measured for them, at least one; medians of several steps are best.
        workload: The workload that ran.
        profile: The profile behind the predictions.
        prior: How hard the factors are held at 1.

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

    def correction(factors: FloatArray) -> Correction:
        compute = {kind: float(factor) for kind, factor in zip(kinds, factors)}
        return Correction(compute=compute, communication=float(factors[-1]))

    def predicted(factors: FloatArray) -> FloatArray:
        inputs = correction(factors).applied(workload, profile)
        return np.array([evaluate(plan, *inputs).step_s for plan, _ in observed])

    measured = np.array([seconds for _, seconds in observed], dtype=np.float64)
    return correction(fit_positive(predicted, measured, np.ones(len(kinds) + 1), prior))


def _over(value: Optional[float], factor: float) -> Optional[float]:
    return None if value is None else value / factor
