"""Locate the stages of a plan, and price them and the boundaries between them.

`price_stage` prices one range of layers, `stage_table` prices all ranges at once. Both add up the same parts.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import msgspec
import numpy as np

from hwaware.costs.compute import slowest_s
from hwaware.costs.curves import FloatArray
from hwaware.costs.memory import counted_twice, stage_memory_bytes
from hwaware.costs.prepared import PreparedCosts, ReplicaSums
from hwaware.costs.prepared import SharedReplica as SharedReplica
from hwaware.errors import PlanError
from hwaware.plans import Plan, Replica, Stage

Replicas = Tuple[SharedReplica, ...]
# Source devices, target devices, and the part of the microbatch that both replicas work on.
Exchange = Tuple[Tuple[str, ...], Tuple[str, ...], float]
# Stands for any number of microbatches in flight where a stage keeps nothing of them.
NO_LIMIT = 1e15


# Searches make stages by the thousand, and a Struct takes a third of a named tuple's time.
class LocatedStage(msgspec.Struct, frozen=True):
    """Hold layers first .. last on some devices, every replica with its share of each microbatch."""

    first: int
    last: int
    replicas: Replicas

    @property
    def devices(self) -> Tuple[str, ...]:
        """Return all devices, replica by replica."""
        return tuple([name for replica in self.replicas for name in replica.devices])

    def plan_stage(self) -> Stage:
        """Return the stage as a plan writes it: equal shares are left out."""
        equal = len({replica.share for replica in self.replicas}) == 1
        replicas = [Replica(devices=one.devices, share=None if equal else one.share) for one in self.replicas]
        return Stage(layers=(self.first, self.last), replicas=tuple(replicas))


class StagePrice(msgspec.Struct, frozen=True, gc=False):
    """Hold the price of one stage: seconds per microbatch (forward, backward), seconds per step, and bytes."""

    forward_s: float
    backward_s: float
    gradient_sync_s: float
    update_s: float
    memory_bytes: float
    memory_limit_bytes: float


class StageTable(NamedTuple):
    """Hold the prices of every range of layers, [L, L + 1] by first layer and layer after the last.

    Searches stack the tables of O ways to build a stage to [O, L, L + 1].
    """

    forward_s: FloatArray  # of one microbatch on the slowest replica
    backward_s: FloatArray
    per_step_s: FloatArray  # gradient synchronisation and update
    # Microbatches in flight that fit in memory. At 0, no longer range fits either. -1 marks a range that a rule
    # forbids, which says nothing about longer ones.
    most_in_flight: FloatArray
    excess_bytes: FloatArray  # by which one microbatch in flight is over the limit of the fullest device
    activation_bytes: FloatArray  # that each further microbatch adds there
    update_excess_bytes: FloatArray  # by which the optimizer's update is over the limit of the fullest device

    @classmethod
    def stacked(cls, tables: Sequence[StageTable]) -> StageTable:
        """Return the tables of several ways to build a stage as one."""
        return cls(*(np.ascontiguousarray(np.stack(column)) for column in zip(*tables)))

    def over_bytes(self, in_flight: float) -> FloatArray:
        """Return how far a stage is over the limit with so many microbatches in flight; negative is room."""
        passes = self.excess_bytes + (in_flight - 1) * self.activation_bytes
        return np.maximum(passes, self.update_excess_bytes)


def located(plan: Plan) -> Tuple[LocatedStage, ...]:
    """Return the stages of a plan, unchecked: replicas without a share divide equally what the others leave.

    Example:
        >>> replicas = (Replica(devices=("a:0",), share=0.5), Replica(devices=("b:0",)), Replica(devices=("c:0",)))
        >>> stages = located(Plan(num_microbatches=1, stages=(Stage(layers=(0, 0), replicas=replicas),)))
        >>> [replica.share for replica in stages[0].replicas]
        [0.5, 0.25, 0.25]
    """
    return tuple([LocatedStage(*stage.layers, _shared(stage)) for stage in plan.stages])


def _shared(stage: Stage) -> Replicas:
    given = [replica.share for replica in stage.replicas if replica.share is not None]
    equal = (1.0 - sum(given)) / max(1, len(stage.replicas) - len(given))
    return tuple(SharedReplica(one.devices, equal if one.share is None else one.share) for one in stage.replicas)


def check_plan(plan: Plan, costs: PreparedCosts) -> List[LocatedStage]:
    """Return the stages of a plan that runs this workload on this cluster.

    Raises:
        PlanError: The plan has no stages, leaves out a layer, names an unknown device or splits a sample.
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
    known = costs.whole
    return [
        LocatedStage(
            stage.layers[0],
            stage.layers[1],
            known[own[0].devices]  # most stages work on whole microbatches
            if len(own := stage.replicas) == 1 and own[0].share is None and own[0].devices in known
            else _checked(stage, index, costs),
        )
        for index, stage in enumerate(plan.stages)
    ]


def _checked(stage: Stage, index: int, costs: PreparedCosts) -> Replicas:
    unknown = [device for device in stage.devices if device not in costs.devices]
    if unknown:
        raise PlanError(
            f"stage {index} of the plan names unknown device {unknown[0]!r}; the cluster has "
            f"{', '.join(costs.devices)}.",
            "correct the device id, or give the profile of the plan's own cluster.",
        )
    samples, fix = costs.workload.microbatch_size, "give shares that are whole numbers of samples and add up to 1."
    given = sum(replica.share or 0.0 for replica in stage.replicas)
    missing = any(replica.share is None for replica in stage.replicas)
    if given >= 1 - 1e-6 if missing else abs(1 - given) > 1e-6:
        raise PlanError(f"the shares of stage {index} add up to {given:g}, expected 1.", fix)
    replicas = _shared(stage)
    for _, share in replicas:
        if abs(share * samples - round(share * samples)) > 1e-6 or round(share * samples) < 1:
            raise PlanError(
                f"a replica of stage {index} has share {share:g} of {samples} samples, which is {share * samples:g} "
                "samples, expected a whole number.",
                fix,
            )
    made = tuple(SharedReplica(devices, round(share * samples) / samples) for devices, share in replicas)
    if len(made) == 1:
        costs.whole[stage.devices] = made
    return made


def in_groups(devices: Sequence[str], group: int) -> Replicas:
    """Divide devices into equal replicas, each a tensor-parallel group of neighbours.

    Example:
        >>> in_groups(["a:0", "a:1"], 1)[1]
        SharedReplica(devices=('a:1',), share=0.5)
    """
    edges = range(0, len(devices), group)
    return tuple(SharedReplica(tuple(devices[k : k + group]), 1 / len(edges)) for k in edges)


def price_stage(
    stage: LocatedStage, costs: PreparedCosts, num_microbatches: int, in_flight: int, replicas: int = 1
) -> StagePrice:
    """Price one stage, whose slowest replica of each microbatch and fullest device count.

    `in_flight` are the microbatches whose activations the stage holds. A single replica may stand for one of several
    `replicas`, without their joint sums. `costs` caches stages with several replicas, as searches change one stage at a
    time.
    """
    if len(stage.replicas) > 1:
        return costs.cached(_price_replicated, stage, num_microbatches, in_flight)
    replica, first, end, limits = stage.replicas[0], stage.first, stage.last + 1, costs.memory_bytes
    s = costs.alone.get(replica) if replicas == 1 else None
    if s is None:
        s = costs.sums(*replica, replicas)
        if replicas == 1:
            costs.alone[replica] = s
    forward_s, backward_s, update_s, twice, kept, batches, new = _parts(s, first, end, num_microbatches)
    scratch, fullest, limit = max(s.scratch_bytes[first:end]), -math.inf, 0.0
    for device, resident in zip(replica.devices, s.resident_bytes):
        stays = max(0.0, resident[end] - resident[first] - twice)  # a layer's measured memory may be less
        passes, update = stage_memory_bytes(stays, kept, in_flight, batches, scratch, new)
        used, room = passes if passes > update else update, limits[device]
        if used - room > fullest - limit:
            fullest, limit = used, room
    if costs.schedule == "inference":
        return StagePrice(forward_s, 0.0, 0.0, 0.0, fullest, limit)
    return StagePrice(forward_s, backward_s, 0.0, update_s, fullest, limit)


def _price_replicated(costs: PreparedCosts, stage: LocatedStage, num_microbatches: int, in_flight: int) -> StagePrice:
    first, end, replicas, count = stage.first, stage.last + 1, stage.replicas, len(stage.replicas)
    sums = [costs.sums(*one, count) for one in replicas]
    # Replicas of like devices share their sums, and are priced once.
    like = [(id(s), *(costs.memory_bytes[name] for name in one.devices)) for s, one in zip(sums, replicas)]
    prices = {
        key: price_stage(LocatedStage(first, stage.last, (one,)), costs, num_microbatches, in_flight, count)
        for key, one in dict(zip(like, replicas)).items()
    }
    alone, deviations = [prices[key] for key in like], [s.deviation_s for s in sums]
    fullest = max(alone, key=lambda price: price.memory_bytes - price.memory_limit_bytes)
    forward_s = float(slowest_s([*np.array([price.forward_s for price in alone])], deviations, count))
    if costs.schedule == "inference":
        return StagePrice(forward_s, 0.0, 0.0, 0.0, fullest.memory_bytes, fullest.memory_limit_bytes)
    nbytes = np.array([sum(_summed_bytes(replicas, costs)[first:end].tolist())])
    backward_s = float(slowest_s([*np.array([price.backward_s for price in alone])], deviations, count))
    summed_s = float(costs.gradient_sums_s(nbytes, [replica.devices for replica in replicas])[0])
    update_s = max(price.update_s for price in alone)
    return StagePrice(forward_s, backward_s, summed_s, update_s, fullest.memory_bytes, fullest.memory_limit_bytes)


def _parts(s: ReplicaSums, first: Any, end: Any, num_microbatches: int) -> Tuple[Any, ...]:
    """Price layers first .. end - 1 on one replica, in seconds and bytes; arrays price many ranges."""
    forward, backward, updates, _, kept, samples, _, _, new, common, pass_s = s
    twice, twice_new = counted_twice(common, first, end) if common else (0.0, 0.0)
    return (
        forward[end] - forward[first] + pass_s,
        backward[end] - backward[first] + pass_s,
        updates[end] - updates[first],
        twice,
        kept[end] - kept[first],
        num_microbatches * (samples[end] - samples[first]),
        new[end] - new[first] - twice_new,
    )


def stage_table(
    replicas: Replicas, costs: PreparedCosts, num_microbatches: int, replicas_alike: bool = False
) -> StageTable:
    """Price a stage of every range of layers on these replicas, [L, L + 1].

    With `replicas_alike`, the first replica stands for all, which saves time.
    """
    layers, trains = len(costs.workload.layers), costs.schedule != "inference"
    first, end = np.arange(layers)[:, None], np.arange(layers + 1)[None, :]
    stages = end > first

    def ranges(values: FloatArray) -> FloatArray:
        return np.where(stages, values, 0.0)

    seconds: Tuple[List[FloatArray], ...] = ([], [], [])  # forward, backward, update
    deviations, memory = [], []
    for devices, share in replicas[:1] if replicas_alike else replicas:
        s = costs.sums(devices, share, len(replicas))
        # Devices that keep the same, and have the same memory, are priced once.
        unlike = {(id(one), costs.memory_bytes[name]): np.array(one) for name, one in zip(devices, s.resident_bytes)}
        arrays: Any = (*map(np.array, s[:-2]), s.common, s.pass_s)
        *times, twice, kept, batches, new = _parts(ReplicaSums(*arrays), first, end, num_microbatches)
        for found, own in zip(seconds, times):
            found.append(ranges(own))
        deviations.append(s.deviation_s)
        shared = ranges(kept), ranges(batches), _most(s.scratch_bytes), ranges(new)
        stay = [ranges(np.maximum(0.0, one[end] - one[first] - twice)) for one in unlike.values()]
        memory += [_most_in_flight(limit, one, *shared) for (_, limit), one in zip(unlike, stay)]
    most, excess, activation, updated = memory[0]
    for own, over, kept, over_new in memory[1:]:
        activation = np.where(over > excess, kept, activation)
        excess, most, updated = np.maximum(excess, over), np.minimum(most, own), np.maximum(updated, over_new)
    per_step = np.max(seconds[2], axis=0)
    if len(replicas) > 1 and trains:
        running = np.array([0.0, *np.cumsum(_summed_bytes(replicas, costs))])
        nbytes = ranges(running[end] - running[first])
        summed = costs.gradient_sums_s(nbytes.reshape(-1), [replica.devices for replica in replicas])
        per_step = summed.reshape(nbytes.shape) + per_step
    return StageTable(
        forward_s=slowest_s(seconds[0], deviations, len(replicas)),
        backward_s=slowest_s(seconds[1], deviations, len(replicas)) * trains,
        per_step_s=per_step * trains,
        most_in_flight=most,
        excess_bytes=excess,
        activation_bytes=activation,
        update_excess_bytes=updated,
    )


def _most_in_flight(
    limit: float, resident: FloatArray, kept: FloatArray, batches: FloatArray, scratch: FloatArray, new: FloatArray
) -> Tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Return columns of a `StageTable` for one device: from `most_in_flight` to `update_excess_bytes`."""
    room = limit - (resident + scratch + batches)
    own = np.where(kept > 0, np.floor(room / np.where(kept > 0, kept, 1.0)), np.where(room >= 0, NO_LIMIT, 0.0))
    # The division was rounded: `evaluate` compares the sum with the limit.
    own = np.where(stage_memory_bytes(resident, kept, own + 1, batches, scratch)[0] <= limit, own + 1, own)
    passes, update = stage_memory_bytes(resident, kept, own, batches, scratch, new)
    own = np.where(update > limit, 0.0, np.where(passes > limit, own - 1, own))
    return np.maximum(own, 0.0), kept - room, kept, update - limit


def _most(values: Sequence[float]) -> FloatArray:
    """Return the largest value of each range of layers, by [first, end]; 0 for ranges that end before they begin."""
    table = np.zeros((len(values), len(values) + 1))
    table[:, 1:] = np.maximum.accumulate(np.triu(np.broadcast_to(values, (len(values), len(values)))), axis=1)
    return table


def _summed_bytes(replicas: Replicas, costs: PreparedCosts) -> FloatArray:
    return costs.summed_bytes(min(len(replica.devices) for replica in replicas))


def boundary_s(layer: int, sources: Replicas, targets: Replicas, costs: PreparedCosts) -> Tuple[float, float]:
    """Price sending the output of `layer` from one stage's replicas to the next one's, and its gradient back.

        t = max(t(x_m n) of each message m, n sum of x_m / C(k) of each shared card)

    Message m carries the part x_m of the n bytes, in t(x_m n): see `exposed_time_s`. A card that k messages pass has
    the rate C(k): see `Cards`. Each replica holds a contiguous range of the samples, in order, and two replicas
    exchange the samples that both hold. Each device receives from its counterpart in the other replica. All messages
    travel at once. `costs` caches the prices.

    Example:
        >>> from hwaware import ClusterProfile, Workload
        >>> costs = PreparedCosts(Workload.uniform(layers=2, output_bytes=1e6), ClusterProfile.uniform(hosts=2))
        >>> first, second = (Replica(devices=("h0:0",)),), (Replica(devices=("h1:0",)),)
        >>> there_s, back_s = boundary_s(0, first, second, costs)
        >>> there_s == back_s > 0
        True
    """
    if len(sources) == 1 and len(targets) == 1:
        one, other = sources[0].devices, targets[0].devices
        both = costs.both_ways_s(one[0], other[0]) if len(one) == len(other) == 1 else None  # most pairs
        if both is not None:
            return both[0][layer], both[1][layer]
    return costs.cached(_boundary, layer, sources, targets)


def _boundary(costs: PreparedCosts, layer: int, sources: Replicas, targets: Replicas) -> Tuple[float, float]:
    there_s, back_s = _exchanges_s(layer, exchanged(sources, targets), costs)
    return float(there_s), float(back_s)


def boundaries_s(sources: Replicas, targets: Replicas, costs: PreparedCosts) -> Tuple[FloatArray, FloatArray]:
    """Return `boundary_s` for the outputs of all layers."""
    return _exchanges_s(slice(None), exchanged(sources, targets), costs)


def one_by_one_s(layer: int, sources: Replicas, targets: Replicas, costs: PreparedCosts) -> Tuple[float, float]:
    """Return `boundary_s` where a host handles one message after the other, as with Alpa's blocking sends.

    The devices of a tensor-parallel group still send at once.
    """
    busy: Dict[Tuple[str, str], Tuple[float, float]] = {}
    for exchange in exchanged(sources, targets):
        there, back = map(float, _exchanges_s(layer, [exchange], costs))
        for side, devices in (("source", exchange[0]), ("target", exchange[1])):
            for host in {costs.devices[device].host for device in devices}:
                before = busy.get((side, host), (0.0, 0.0))
                busy[side, host] = (before[0] + there, before[1] + back)
    return max(there for there, _ in busy.values()), max(back for _, back in busy.values())


def _exchanges_s(layer: Any, exchanges: Sequence[Exchange], costs: PreparedCosts) -> Tuple[Any, Any]:
    """Price exchanges at once, there and back: of one layer's output, or of all where `layer` is a slice."""
    larger: Any = np.maximum if isinstance(layer, slice) else max
    there_s: Any = -math.inf
    back_s: Any = -math.inf
    for sources, targets, share in exchanges:
        if len(sources) > 1 or len(targets) > 1:
            # The devices of a group wait for each other anyway: a message gains them nothing.
            there_s, back_s = larger(there_s, 0.0), larger(back_s, 0.0)
        for source, target in paired(sources, targets):
            there, back = costs.sends_s(source, target, share), costs.sends_s(target, source, share)
            if there is None or back is None:
                costs.link(source, target)  # says which link is missing
                raise AssertionError("a missing reverse link means symmetric")
            there_s, back_s = larger(there_s, there[layer]), larger(back_s, back[layer])
    if costs.cards:
        messages = [(s, t, common) for sources, targets, common in exchanges for s, t in paired(sources, targets)]
        out_s = costs.cards.seconds_per_byte(messages)
        home_s = costs.cards.seconds_per_byte((t, s, common) for s, t, common in messages)
        nbytes = costs.outputs_bytes[layer]
        there_s = larger(there_s, nbytes * out_s) if out_s > 0 else there_s
        back_s = larger(back_s, nbytes * home_s) if home_s > 0 else back_s
    return there_s, back_s


def exchanged(sources: Replicas, targets: Replicas) -> List[Exchange]:
    """Return the exchanges of two neighbouring stages: the replicas that hold samples in common."""
    found = []
    start = 0.0
    for source in sources:
        begin = 0.0
        for target in targets:
            common = min(start + source.share, begin + target.share) - max(start, begin)
            begin += target.share
            if common > 1e-9:
                # Shares that differ by rounding alone are one, so that send times are worked out once.
                found.append((source.devices, target.devices, round(common, 12)))
        start += source.share
    return found


def exchanging(sources: Replicas, targets: Replicas) -> List[Tuple[str, str]]:
    """Return the devices of two neighbouring stages that exchange messages, source and target of the activations."""
    return [pair for source, target, _ in exchanged(sources, targets) for pair in paired(source, target)]


def paired(sources: Sequence[str], targets: Sequence[str]) -> List[Tuple[str, str]]:
    """Pair the devices of two replicas that exchange something; the smaller group takes part several times.

    Example:
        >>> paired(("a:0", "a:1"), ("b:0",))
        [('a:0', 'b:0'), ('a:1', 'b:0')]
    """
    return [(sources[k % len(sources)], targets[k % len(targets)]) for k in range(max(len(sources), len(targets)))]
