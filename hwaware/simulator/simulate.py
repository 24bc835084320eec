"""Turn a plan into its timeline: run stages and channels event by event, in the prices of `evaluate`."""

from __future__ import annotations

import operator
from typing import Callable, Counter, Dict, List, Optional, Sequence, Tuple

from hwaware.cluster import ClusterProfile, SharedCard
from hwaware.costs import Cost, PreparedCosts, evaluate
from hwaware.costs.cards import Role, card_bytes_per_s
from hwaware.costs.evaluate import prepared_for
from hwaware.costs.stages import Replicas, boundary_s, check_plan, exchanging, one_by_one_s
from hwaware.errors import PlanError, UnusableInputError
from hwaware.formatting import SECONDS, percent, text
from hwaware.plans import Plan
from hwaware.simulator.engine import Run, run_blocking, run_overlapped
from hwaware.simulator.messages import Channel, Part
from hwaware.simulator.orders import channel_ends
from hwaware.timeline import Event, EventKind, Sends, Timeline
from hwaware.workload import Workload

# The simulator needs 6 s and 0.2 GiB for about this many events, such as 1,000 microbatches on 75 stages.
_MOST_EVENTS = 300_000
# (Last layer of a stage, its replicas, the next stage's replicas, costs) -> times of the messages there and back [s].
BoundaryPrice = Callable[[int, Replicas, Replicas, PreparedCosts], Tuple[float, float]]


def simulate(
    plan: Plan,
    workload: Workload,
    profile: ClusterProfile,
    *,
    sends: Sends = "overlapped",
    shared_links: bool = True,
    costs: Optional[PreparedCosts] = None,
) -> Timeline:
    """Run one step of a plan, event by event, in the prices that `evaluate` uses.

    The simulation shows two effects that `evaluate` leaves out. Messages of different stages slow each other down on a
    directed link between two hosts, and at a network card. With sends="blocking", messages leave late and block both
    ends, as in Alpa. A host that exchanges with several replicas then handles one message after the other.

    Args:
        plan: The plan.
        workload: The model's layers.
        profile: The cluster.
        sends: With "overlapped", messages leave at the end of their pass and hold up only their receiver, as with
            hwaware's runtime. With "blocking", Alpa's own order, sender and receiver wait for each message.
        shared_links: Let messages on one link slow each other down. False gives the rules of `evaluate`.
        costs: Prepared costs of the same workload, profile and schedule, to simulate many plans.

    Returns:
        The timeline; `step_s` is comparable with `evaluate(...).step_s`.

    Raises:
        PlanError: The plan does not fit the workload or the cluster.
        UnusableInputError: A device lacks measurements in the workload's data type. Or `sends` is unknown, an argument
            is no such record, or the step has more than 300,000 passes and messages.

    Example:
        >>> from hwaware import ClusterProfile, Plan, Workload, evaluate, simulate
        >>> from hwaware.plans import Replica, Stage
        >>> from hwaware.workload import Layer
        >>> layer = Layer(name="0", forward_flops=1e9, backward_flops=2e9, parameter_bytes=0, output_bytes=1e6,
        ...               activation_bytes=0)
        >>> workload = Workload(name="two", microbatch_size=4, dtype="float32", layers=(layer, layer))
        >>> profile = ClusterProfile.uniform(flops_per_s=1e10, bandwidth_bytes_per_s=1e7, latency_s=0)
        >>> plan = Plan(num_microbatches=2, stages=(Stage(layers=(0, 0), replicas=(Replica(devices=("h0:0",)),)),
        ...                                         Stage(layers=(1, 1), replicas=(Replica(devices=("h1:0",)),))))
        >>> round(simulate(plan, workload, profile).step_s, 6), round(evaluate(plan, workload, profile).step_s, 6)
        (1.1, 1.1)
    """
    if sends not in ("overlapped", "blocking"):
        raise UnusableInputError(f"sends is {sends!r}, expected 'overlapped' or 'blocking'.", "choose one of them.")
    costs = prepared_for(plan, workload, profile, costs)
    _require_few_events(plan)
    cost = evaluate(plan, workload, profile, costs)
    channels = _channels(plan, costs, shared_links, one_by_one_s if sends == "blocking" else boundary_s)
    forward = [stage.forward_s for stage in cost.stages]
    backward = [stage.backward_s for stage in cost.stages]
    engine = run_blocking if sends == "blocking" else run_overlapped
    run = engine(plan.schedule, forward, backward, channels, plan.num_microbatches)
    once = _once_events(cost, run.ends)
    events = sorted(_events(run, len(plan.stages)) + once, key=lambda event: event.end_s)
    return Timeline(
        step_s=max([*run.ends, *(event.end_s for event in once)]),
        schedule=plan.schedule,
        num_microbatches=plan.num_microbatches,
        devices=tuple(stage.devices for stage in plan.stages),
        events=tuple(events),
        sends=sends,
    )


def _require_few_events(plan: Plan) -> None:
    """Refuse a step whose events would fill the memory."""
    stages = len(plan.stages)
    passes_and_messages = max(0, 2 * stages - 1) * (1 if plan.schedule == "inference" else 2)
    events = passes_and_messages * plan.num_microbatches
    if events > _MOST_EVENTS:
        raise UnusableInputError(
            f"the step of {plan.num_microbatches} microbatches on {stages} stages has {events} passes and messages, "
            f"the simulator runs at most {_MOST_EVENTS}.",
            f"simulate a plan of at most {_MOST_EVENTS // passes_and_messages} microbatches; `hwaware evaluate` prices "
            "any number.",
            found=events,
            expected=_MOST_EVENTS,
        )


def _events(run: Run, stages: int) -> List[Event]:
    passes: Tuple[EventKind, EventKind] = ("forward", "backward")
    messages: Tuple[EventKind, EventKind] = ("activation", "gradient")
    found: List[Event] = []
    for start_s, end_s, who, number in run.events:
        stage, kinds = (who, passes) if who >= 0 else (channel_ends(~who, stages)[0], messages)
        found.append(Event(kind=kinds[number % 2], stage=stage, start_s=start_s, end_s=end_s, microbatch=number // 2))
    return found


def _once_events(cost: Cost, ends: Sequence[float]) -> List[Event]:
    """Return the gradient synchronisation and the update of each stage, after its own last pass."""
    found: List[Event] = []
    for index, (stage, end) in enumerate(zip(cost.stages, ends)):
        middle = end + stage.gradient_sync_s
        if stage.gradient_sync_s > 0:
            found.append(Event(kind="synchronisation", stage=index, start_s=end, end_s=middle))
        if stage.update_s > 0:
            found.append(Event(kind="update", stage=index, start_s=middle, end_s=middle + stage.update_s))
    return found


def _channels(plan: Plan, costs: PreparedCosts, shared_links: bool, price_s: BoundaryPrice) -> List[Channel]:
    """Return the channels of a plan, downwards first.

    `evaluate` shortens each message by its receiver's head start. Here a message takes its full time. The head start
    shortens the receiver's pass instead, once for all its messages.
    """
    stages, on_the_way = check_plan(plan, costs), costs.without_head_starts
    downwards: List[Channel] = []
    upwards: List[Channel] = []
    for stage, follower in zip(stages, stages[1:]):
        layer, both = stage.last, (stage.replicas, follower.replicas)
        times_s = price_s(layer, *both, on_the_way)
        hidden_s = map(operator.sub, boundary_s(layer, *both, on_the_way), boundary_s(layer, *both, costs))
        pairs = exchanging(*both)
        nbytes = costs.workload.layers[layer].output_bytes
        directions = (downwards, pairs), (upwards, [(target, source) for source, target in pairs])
        for seconds, hidden, (made, ends) in zip(times_s, hidden_s, directions):
            load = nbytes / seconds if seconds > 0 else 0.0
            parts = _parts(ends, costs) if shared_links and seconds > 0 else ()
            made.append(Channel(seconds, load, parts, hidden))
    return downwards + upwards


def _parts(pairs: Sequence[Tuple[str, str]], costs: PreparedCosts) -> Tuple[Part, ...]:
    """Return the links between hosts and the network cards that messages between these devices pass."""
    found: Dict[Tuple[str, ...], Part] = {}
    passing: Counter[Tuple[str, ...]] = Counter()
    for source, target in pairs:
        link = costs.link(source, target)
        hosts = costs.devices[source].host, costs.devices[target].host
        if hosts[0] == hosts[1]:
            continue  # inside a host, devices have ports of their own
        between_hosts = link.source in hosts
        name = ("link", *hosts) if between_hosts else ("link", source, target)
        found[name] = Part(name, _evenly)
        passing[name] += 1
        for card in costs.profile.shared_cards:
            for part in (
                *([_card_part(card, "send")] if source in card.devices else ()),
                *([_card_part(card, "receive")] if target in card.devices else ()),
            ):
                found[part.name] = part
                passing[part.name] += 1
    return tuple(part._replace(fraction=passing[name] / len(pairs)) for name, part in found.items())


def _evenly(loads: Sequence[float]) -> float:
    """Return the slowdown at a link: k messages share its rate equally."""
    return float(len(loads))


def _card_part(card: SharedCard, role: Role) -> Part:
    """Return the part that stands for a card. If its concurrent sends were measured, messages share it equally."""

    def slowdown(loads: Sequence[float]) -> float:
        if len(loads) == 1:
            return 1.0  # the message's price already includes how its own transfers slow each other down
        total = card_bytes_per_s(card, role, len(loads))
        if role == "send" and card.concurrent:
            return max(1.0, max(loads) * len(loads) / total)
        return max(1.0, sum(loads) / total)

    return Part((role, card.host, *card.devices), slowdown)


def disagreement(timeline: Timeline, cost: Cost) -> Optional[str]:
    """Return one sentence if the simulated step and the price differ by more than 5 %, else None.

    Raises:
        PlanError: The cost has no stages to compare.
    """
    if not cost.stages:
        raise PlanError("the cost has no stages.", "evaluate a plan that has stages.")
    off = timeline.step_s / cost.step_s - 1 if cost.step_s > 0 else 0.0
    if abs(off) <= 0.05:
        return None
    if off < 0:
        left_out = "how early later stages end their passes, sum gradients and update"
    elif timeline.sends == "blocking":
        left_out = "that messages share links, and that stages wait for them"
    else:
        left_out = "that messages share links, and some waits for slow messages"
    return (
        f"The simulated step takes {text(timeline.step_s, SECONDS)}, `hwaware evaluate` predicts "
        f"{text(cost.step_s, SECONDS)} by its formula ({percent(off, signed=True)}). The formula leaves out {left_out}."
    )
