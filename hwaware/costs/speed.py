"""Price a cluster that is slower or faster than when it was measured, by few factors."""

from __future__ import annotations

import statistics
from types import MappingProxyType
from typing import Dict, Sequence, Tuple
from typing import Mapping as MappingOf

import numpy as np

from hwaware.cluster import ClusterProfile, Device, Link, SharedCard
from hwaware.costs.curves import FloatArray, fit_positive
from hwaware.costs.evaluate import evaluate
from hwaware.costs.own_times import changed_times, scaled
from hwaware.errors import RecordError, UnusableInputError
from hwaware.plans import Plan
from hwaware.records import Record
from hwaware.records import rebuilt as replace
from hwaware.result import BenchmarkResult, Mapping
from hwaware.workload import Workload

TIMES = ("forward_s", "backward_s", "update_s", "deviation_s")
# How hard a factor is held at 1: one step that is 20 % off moves it nearly all the way.
REFIT_PRIOR = 0.3


def at_speed(
    workload: Workload, profile: ClusterProfile, factor: float, of_kinds: MappingOf[str, float] = MappingProxyType({})
) -> Tuple[Workload, ClusterProfile]:
    """Return workload and cluster as if every device had taken `factor` times as long, or its kind's in `of_kinds`.

    Links stay as they are: a machine whose processors drift still has the rates of its links.

    Raises:
        RecordError: A time is then beyond its bound.

    Example:
        >>> from hwaware.workload import MeasuredTime
        >>> profile = ClusterProfile.uniform(hosts=1, flops_per_s=1e10)
        >>> times = {"cpu": {"1,1": MeasuredTime(forward_s=1.0, backward_s=2.0)}}
        >>> workload = Workload.uniform(measured=times)
        >>> slower, there = at_speed(workload, profile, 1.5)
        >>> slower.layers[0].measured["cpu"]["1,1"].backward_s, there.devices[0].throughput["float32"][0].seconds
        (3.0, 0.15000000000000002)
    """
    kind_of, before = {device.id: device.kind for device in profile.devices}, workload.layers

    def of(name: str) -> float:
        """Return the factor of a kind, or of a device with times of its own."""
        return of_kinds.get(name, of_kinds.get(kind_of.get(name, ""), factor))

    try:
        layers = [changed_times(one, lambda kind, _, t: scaled(t, **dict.fromkeys(TIMES, of(kind)))) for one in before]
        devices = tuple(_slower_device(device, of(device.kind)) for device in profile.devices)
        return replace(workload, layers=tuple(layers)), replace(profile, devices=devices)
    except ValueError as error:
        said = f"no machine was {factor:g} times as slow as while it was profiled: {error}."
        raise RecordError(said, "correct the reference times of the result.") from error


def prediction_at_speed_s(mapping: Mapping, result: BenchmarkResult) -> float:
    """Return a mapping's predicted step [s] at the speed that the machine had while it ran, by a reference.

        predicted x T(speed then) / T(speed while profiled)

    `evaluate` prices both, each kind of device at its own speed where known. Without profile and workload in the
    result, all of the step counts as computing. Without a reference, the prediction stays.
    """
    reference = mapping.profile_reference_s or result.environment.get("profile_reference_s")
    if not mapping.reference_s or not reference:
        return mapping.predicted_step_s
    factor = statistics.median(mapping.reference_s) / reference
    if result.profile is None or result.workload is None:
        return mapping.predicted_step_s * factor
    before = evaluate(mapping.plan, result.workload, result.profile)
    of_kinds = {kind: statistics.median(factors) for kind, factors in mapping.slowdowns.items()}
    now = evaluate(mapping.plan, *at_speed(result.workload, result.profile, factor, of_kinds))
    return mapping.predicted_step_s * (now.step_s / before.step_s if before.step_s > 0 else factor)


def _slower_device(device: Device, factor: float) -> Device:
    rates = {"memory_bandwidth_bytes_per_s": 1 / factor, "sum_bytes_per_s": 1 / factor}
    curves = {dtype: tuple(scaled(one, seconds=factor) for one in own) for dtype, own in device.throughput.items()}
    return replace(scaled(device, pass_s=factor, **rates), throughput=curves)


def slower_link(link: Link, factor: float) -> Link:
    """Return the link with every time multiplied by the factor."""
    samples = tuple(scaled(sample, seconds=factor) for sample in link.samples)
    rate = link.bandwidth_bytes_per_s / factor
    return replace(link, latency_s=link.latency_s * factor, bandwidth_bytes_per_s=rate, samples=samples)


def slower_card(card: SharedCard, factor: float) -> SharedCard:
    """Return the card with every rate divided by the factor."""
    rates = card.send_bytes_per_s / factor, card.receive_bytes_per_s / factor
    concurrent = tuple(replace(r, bytes_per_s=r.bytes_per_s / factor) for r in card.concurrent)
    return replace(card, send_bytes_per_s=rates[0], receive_bytes_per_s=rates[1], concurrent=concurrent)


class Correction(Record, frozen=True, kw_only=True):
    """Hold the factors by which a cluster differs from its profile, measured over predicted time; made by `refit`."""

    compute: Dict[str, float]  # of each device kind
    communication: float  # of messages and gradient sums

    def applied(self, workload: Workload, profile: ClusterProfile) -> Tuple[Workload, ClusterProfile]:
        """Return the workload and the profile with every time multiplied by its factor.

        Raises:
            RecordError: A time is then beyond its bound.
        """
        factor = self.communication
        slower, corrected = at_speed(workload, profile, 1.0, self.compute)
        devices = tuple(
            replace(slow, sum_bytes_per_s=scaled(device, sum_bytes_per_s=1 / factor).sum_bytes_per_s)
            for slow, device in zip(corrected.devices, profile.devices)
        )
        links = tuple(slower_link(link, factor) for link in profile.links)
        cards = tuple(slower_card(card, factor) for card in profile.shared_cards)
        collectives = tuple(
            replace(one, points=tuple(scaled(point, seconds=factor) for point in one.points))
            for one in profile.collectives
        )
        return slower, replace(corrected, devices=devices, links=links, shared_cards=cards, collectives=collectives)


def refit(
    observed: Sequence[Tuple[Plan, float]], workload: Workload, profile: ClusterProfile, prior: float = REFIT_PRIOR
) -> Correction:
    """Fit factors of computation (one a device kind) and communication to measured steps.

        minimise  (100 / m) sum_i (step_i(c, w) / measured_i - 1)^2 + prior^2 (sum_k log^2 c_k + log^2 w)

    step_i is the price of plan i with the corrected workload and profile. Factors that the steps leave open stay 1.

    Args:
        observed: Plans and their measured step times, at least one; medians of several steps are best.
        workload: The workload that ran.
        profile: The profile behind the predictions.
        prior: Weight that holds the factors at 1.

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
