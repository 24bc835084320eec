"""The stages of a plan, checked against workload and cluster and priced one by one."""

from __future__ import annotations

import math
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import msgspec
import numpy as np

from hwaware.costs.memory import counted_twice, microbatches_in_flight, stage_memory_bytes
from hwaware.costs.prepared import PreparedCosts
from hwaware.costs.waiting import slowest_s
from hwaware.errors import PlanError
from hwaware.plans import Plan, Stage


class SharedReplica(NamedTuple):
    """A replica with its share of each microbatch filled in."""

    devices: Tuple[str, ...]
    share: float


# The devices of two replicas of neighbouring stages, and the part of the microbatch that both work on.
Exchange = Tuple[Sequence[str], Sequence[str], float]


# Plans are priced by the thousand, and a Struct is made in a third of a named tuple's time.
class LocatedStage(msgspec.Struct, frozen=True):
    """Layers first .. last on some devices."""

    first: int
    last: int
    replicas: Tuple[SharedReplica, ...]


# Prices of stages that are kept, some ten MiB at most.
MOST_PRICES = 50_000


class StagePrice(msgspec.Struct, frozen=True, gc=False):
    """What one stage takes: seconds per microbatch (forward, backward), seconds per step, and bytes."""

    forward_s: float
    backward_s: float
    gradient_sync_s: float
    update_s: float
    memory_bytes: float
    memory_limit_bytes: float


def check_plan(plan: Plan, costs: PreparedCosts) -> List[Tuple[SharedReplica, ...]]:
    """Check that a plan runs this workload on this cluster.

    Returns:
        The replicas of each stage, shares filled in.

    Raises:
        PlanError: The plan has no stages, leaves a layer out or names one too many, names an unknown device, or a
            share is not a whole number of samples.
    """
    if not plan.stages:
        reason, _, fix = (plan.reason or "its status is infeasible.").partition(" To fix: ")
        raise PlanError(f"the plan has no stages: {reason}", fix or "give a plan that has stages.")
    expected, found = len(costs.workload.layers), plan.stages[-1].layers[1] + 1
    if found != expected:
        raise PlanError(
            f"the plan covers {found} layers, but the workload {costs.workload.name!r} has {expected}.",
            f"end the last stage with layer {expected - 1}, or give the plan's own workload.",
        )
    return [_located(stage, index, costs) for index, stage in enumerate(plan.stages)]


def _located(stage: Stage, index: int, costs: PreparedCosts) -> Tuple[SharedReplica, ...]:
    """The replicas of a stage; those that work on whole microbatches, most of them, are kept in `costs`."""
    replicas = stage.replicas
    whole = replicas[0].devices if len(replicas) == 1 and replicas[0].share is None else ()
    found: Optional[Tuple[SharedReplica, ...]] = costs.whole_replicas.get(whole)
    if found is None:
        for replica in replicas:
            for device in replica.devices:
                if device not in costs.devices:
                    raise _unknown_device(index, device, costs)
        found = _with_shares(stage, index, costs.workload.microbatch_size)
        if whole:
            costs.whole_replicas[whole] = found
    return found


def _unknown_device(index: int, device: str, costs: PreparedCosts) -> PlanError:
    return PlanError(
        f"stage {index} of the plan names unknown device {device!r}; the cluster has {', '.join(costs.devices)}.",
        "correct the device id, or give the profile of the plan's own cluster.",
    )


def _with_shares(stage: Stage, index: int, microbatch_size: int) -> Tuple[SharedReplica, ...]:
    """Shares as given; what they leave is divided equally among the replicas without one."""
    given = [replica.share for replica in stage.replicas if replica.share is not None]
    missing = len(stage.replicas) - len(given)
    left = 1.0 - sum(given)
    fix = "give shares that are whole numbers of samples and add up to 1."
    if (missing == 0 and abs(left) > 1e-6) or (missing > 0 and left <= 1e-6):
        raise PlanError(f"the shares of stage {index} add up to {sum(given):g}, expected 1.", fix)

    def share_of(share: float) -> float:
        samples = share * microbatch_size
        if abs(samples - round(samples)) > 1e-6 or round(samples) < 1:
            raise PlanError(
                f"a replica of stage {index} has share {share:g} of {microbatch_size} samples, which is {samples:g} "
                "samples, expected a whole number.",
                fix,
            )
        return round(samples) / microbatch_size

    return tuple(SharedReplica(devices, share_of(share)) for devices, share in shared_replicas(stage))


def shared_replicas(stage: Stage) -> Tuple[SharedReplica, ...]:
    """The replicas of a stage, shares filled in and not checked: what the given ones leave is divided equally.

    Example:
        >>> from hwaware.plans import Replica
        >>> replicas = (Replica(devices=("a:0",), share=0.5), Replica(devices=("b:0",)), Replica(devices=("c:0",)))
        >>> [replica.share for replica in shared_replicas(Stage(layers=(0, 0), replicas=replicas))]
        [0.5, 0.25, 0.25]
    """
    given = [replica.share for replica in stage.replicas if replica.share is not None]
    equal = (1.0 - sum(given)) / max(1, len(stage.replicas) - len(given))
    return tuple(SharedReplica(one.devices, equal if one.share is None else one.share) for one in stage.replicas)


def price_stage(stage: LocatedStage, costs: PreparedCosts, num_microbatches: int, later_stages: int) -> StagePrice:
    """Price one stage; with several replicas, the slowest of each microbatch and the fullest count.

    Searches change one stage at a time: prices of stages with several replicas are kept in `costs`.
    """
    first, end, replicas = stage.first, stage.last + 1, stage.replicas
    in_flight = microbatches_in_flight(costs.schedule, num_microbatches, later_stages)
    trains = costs.schedule != "inference"
    if len(replicas) == 1:
        return _price_single(first, end, replicas[0], num_microbatches, in_flight, trains, costs)
    key = (first, end, num_microbatches, in_flight, replicas)
    found = costs.stage_prices.get(key)
    if found is None:
        if len(costs.stage_prices) >= MOST_PRICES:
            costs.stage_prices.clear()
        found = costs.stage_prices[key] = _price_replicated(
            first, end, replicas, num_microbatches, in_flight, trains, costs
        )
    return found


def _price_replicated(
    first: int,
    end: int,
    replicas: Sequence[SharedReplica],
    num_microbatches: int,
    in_flight: int,
    trains: bool,
    costs: PreparedCosts,
) -> StagePrice:
    sums = [costs.sums(replica.devices, replica.share, len(replicas)) for replica in replicas]
    memory = []
    for replica, s in zip(replicas, sums):
        twice, twice_new = counted_twice(s.common, first, end)
        for device, resident in zip(replica.devices, s.resident_bytes):
            used = stage_memory_bytes(
                resident[end] - resident[first] - twice,
                s.activation_bytes[end] - s.activation_bytes[first],
                in_flight,
                num_microbatches * (s.batch_bytes[end] - s.batch_bytes[first]),
                max(s.scratch_bytes[first:end]),
                s.update_bytes[end] - s.update_bytes[first] - twice_new,
            )
            memory.append((used, costs.memory_bytes[device]))
    fullest = max(memory, key=lambda used: used[0] - used[1])
    deviations = [max(s.deviation_s[first:end]) for s in sums]

    def slowest(seconds: Sequence[float]) -> float:
        if not any(deviations):  # nothing was timed: no arrays for one number
            return max(seconds)
        arrays = [[np.array(each) for each in values] for values in (seconds, deviations)]
        return float(slowest_s(arrays[0], arrays[1], len(seconds)))

    return StagePrice(
        forward_s=slowest([s.forward_s[end] - s.forward_s[first] + s.pass_s for s in sums]),
        backward_s=slowest([s.backward_s[end] - s.backward_s[first] + s.pass_s for s in sums]) if trains else 0.0,
        gradient_sync_s=_gradient_sync_s(first, end, replicas, costs) if trains else 0.0,
        update_s=max(s.update_s[end] - s.update_s[first] for s in sums) if trains else 0.0,
        memory_bytes=fullest[0],
        memory_limit_bytes=fullest[1],
    )


def _price_single(
    first: int,
    end: int,
    replica: SharedReplica,
    num_microbatches: int,
    in_flight: int,
    trains: bool,
    costs: PreparedCosts,
) -> StagePrice:
    """The price of a stage with one replica: nothing is synchronised, and nothing has to be compared."""
    devices, share = replica
    forward, backward, updates, residents, kept, samples, scratch, _, new, common, pass_s = costs.sums(devices, share)
    activations, batches = kept[end] - kept[first], num_microbatches * (samples[end] - samples[first])
    twice, twice_new = counted_twice(common, first, end) if common else (0.0, 0.0)
    most, update = max(scratch[first:end]), new[end] - new[first] - twice_new
    resident, limit = residents[0], costs.memory_bytes[devices[0]]
    stays = resident[end] - resident[first] - twice
    fullest = stage_memory_bytes(stays, activations, in_flight, batches, most, update)
    if len(devices) > 1:
        for device, resident in zip(devices[1:], residents[1:]):
            stays = resident[end] - resident[first] - twice
            used = stage_memory_bytes(stays, activations, in_flight, batches, most, update)
            room = costs.memory_bytes[device]
            if used - room > fullest - limit:
                fullest, limit = used, room
    forward_s = forward[end] - forward[first] + pass_s
    if not trains:
        return StagePrice(forward_s, 0.0, 0.0, 0.0, fullest, limit)
    backward_s = backward[end] - backward[first] + pass_s
    return StagePrice(forward_s, backward_s, 0.0, updates[end] - updates[first], fullest, limit)


def _gradient_sync_s(first: int, end: int, replicas: Sequence[SharedReplica], costs: PreparedCosts) -> float:
    """Return the time to sum the stage's gradients over its replicas; see `PreparedCosts.gradient_sums_s`."""
    if len(replicas) == 1:
        return 0.0
    layers = costs.workload.layers[first:end]
    placed = [replica.devices for replica in replicas]
    group = min(map(len, placed))
    nbytes = sum(layer.gradient_size_bytes / (1 if layer.tensor_parallel_bytes is None else group) for layer in layers)
    return float(costs.gradient_sums_s(np.array([nbytes]), placed)[0])


def boundary_s(
    layer: int, sources: Sequence[SharedReplica], targets: Sequence[SharedReplica], costs: PreparedCosts
) -> Tuple[float, float]:
    """Time to send the output of `layer` from one stage's replicas to the next one's, and its gradient back.

    Each replica holds a contiguous range of the samples, in order. Two replicas exchange the samples that both hold;
    a device of the target replica receives all of them from its counterpart in the source replica. All pairs send at
    once, so the slowest pair counts, or the slowest card that several of them pass. Kept in `costs`, as prices of
    stages are.

    Raises:
        PlanError: Two devices that have to exchange data have no link.
    """
    if len(sources) == 1 and len(targets) == 1:
        one, other = sources[0].devices, targets[0].devices
        both = costs.both_ways_s(one[0], other[0]) if len(one) == len(other) == 1 else None  # most pairs
        if both is not None:
            return both[0][layer], both[1][layer]
    key = (layer, *sources, None, *targets)
    found = costs.boundary_prices.get(key)
    if found is None:
        if len(costs.boundary_prices) >= MOST_PRICES:
            costs.boundary_prices.clear()
        pairs = _exchanges_s(layer, sources, targets, costs)
        found = max(there for _, _, there, _ in pairs), max(back for _, _, _, back in pairs)
        if costs.cards:
            found = _at_least(found, layer, exchanged(sources, targets), costs)
        costs.boundary_prices[key] = found
    return found


def _at_least(
    seconds: Tuple[float, float], layer: int, exchanges: Sequence[Exchange], costs: PreparedCosts
) -> Tuple[float, float]:
    """Times there and back, or what the cards need for exchanges at once if that is more."""
    nbytes = costs.workload.layers[layer].output_bytes
    there_s, back_s = crowded_s_per_byte(exchanges, costs)
    return (
        max(seconds[0], nbytes * there_s) if there_s > 0 else seconds[0],
        max(seconds[1], nbytes * back_s) if back_s > 0 else seconds[1],
    )


def crowded_s_per_byte(exchanges: Sequence[Exchange], costs: PreparedCosts) -> Tuple[float, float]:
    """What the cards between two stages need for each byte of a layer's output, there and back; 0 without crowds."""
    there = [(s, t, common) for source, target, common in exchanges for s, t in paired(source, target)]
    back = [(t, s, common) for s, t, common in there]
    return costs.cards.seconds_per_byte(there), costs.cards.seconds_per_byte(back)


def one_by_one_s(
    layer: int, sources: Sequence[SharedReplica], targets: Sequence[SharedReplica], costs: PreparedCosts
) -> Tuple[float, float]:
    """`boundary_s` where a host sends or receives one message after the other, as with Alpa's blocking sends.

    The devices of a tensor-parallel group still send at once.

    Raises:
        PlanError: Two devices that have to exchange data have no link.
    """
    busy: Dict[Tuple[str, str], Tuple[float, float]] = {}
    exchanges = exchanged(sources, targets) if costs.cards else []
    for index, (source, target, there, back) in enumerate(_exchanges_s(layer, sources, targets, costs)):
        if exchanges:
            there, back = _at_least((there, back), layer, exchanges[index : index + 1], costs)
        for side, replica in (("source", source), ("target", target)):
            for host in {costs.devices[device].host for device in replica.devices}:
                before = busy.get((side, host), (0.0, 0.0))
                busy[side, host] = (before[0] + there, before[1] + back)
    return max(there for there, _ in busy.values()), max(back for _, back in busy.values())


def _exchanges_s(
    layer: int, sources: Sequence[SharedReplica], targets: Sequence[SharedReplica], costs: PreparedCosts
) -> List[Tuple[SharedReplica, SharedReplica, float, float]]:
    """The pairs of replicas that hold samples in common, and their times there and back."""
    return [
        (source, target, *_pair_s(layer, source.devices, target.devices, common, costs))
        for source, target, common in _in_common(sources, targets)
    ]


def _in_common(
    sources: Sequence[SharedReplica], targets: Sequence[SharedReplica]
) -> List[Tuple[SharedReplica, SharedReplica, float]]:
    """The pairs of replicas that hold samples in common, and what part of the microbatch these are."""
    found = []
    start = 0.0
    for source in sources:
        begin = 0.0
        for target in targets:
            common = min(start + source.share, begin + target.share) - max(start, begin)
            begin += target.share
            if common > 1e-9:
                # Shares that differ by rounding alone are one, so that send times are worked out once.
                found.append((source, target, round(common, 12)))
        start += source.share
    return found


def exchanged(sources: Sequence[SharedReplica], targets: Sequence[SharedReplica]) -> List[Exchange]:
    """What two stages exchange: the devices of two replicas that hold samples in common, and what part these are."""
    return [(source.devices, target.devices, common) for source, target, common in _in_common(sources, targets)]


def exchanging(sources: Sequence[SharedReplica], targets: Sequence[SharedReplica]) -> List[Tuple[str, str]]:
    """The devices of two neighbouring stages that exchange messages, source and target of the activations."""
    return [pair for source, target, _ in exchanged(sources, targets) for pair in paired(source, target)]


def paired(sources: Sequence[str], targets: Sequence[str]) -> List[Tuple[str, str]]:
    """The devices of two replicas that exchange something; those of unlike groups are paired in turn.

    Example:
        >>> paired(("a:0", "a:1"), ("b:0",))
        [('a:0', 'b:0'), ('a:1', 'b:0')]
    """
    return [(sources[k % len(sources)], targets[k % len(targets)]) for k in range(max(len(sources), len(targets)))]


def least_exposed_s(sources: Sequence[str], targets: Sequence[str]) -> float:
    """A message between groups never takes less than nothing of a step: their devices wait for each other anyway."""
    return -math.inf if len(sources) == len(targets) == 1 else 0.0


def _pair_s(
    layer: int, sources: Tuple[str, ...], targets: Tuple[str, ...], share: float, costs: PreparedCosts
) -> Tuple[float, float]:
    forward = backward = least_exposed_s(sources, targets)
    for source, target in zip(sources, targets) if len(sources) == len(targets) else paired(sources, targets):
        there, back = costs.sends_s(source, target, share), costs.sends_s(target, source, share)
        if there is None or back is None:
            costs.link(source, target)  # says which link is missing
            raise AssertionError("a missing reverse link means symmetric")
        if there[layer] > forward:
            forward = there[layer]
        if back[layer] > backward:
            backward = back[layer]
    return forward, backward
