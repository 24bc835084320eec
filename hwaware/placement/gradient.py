"""Search by gradients: relax cuts and stage-to-device choices to weights, and follow the pipeline's cost downhill.

Every cut is a position between layers, smoothed by a sigmoid. Every stage has weights on devices. Sinkhorn's scaling
makes them a fair division, one device a stage. Or a softmax divides each device between the stages, which gives several
devices a stage. Cuts and weights sharpen as the temperature falls. The relaxed cost is

    (sum c + sum (a + g)) / B + smooth-max(c_s, a_s, g_s, (c_s + c_{s+1} + a_s + g_s) / 2) + penalty for memory

A stage's time c is the work of its layers over the sum of its devices' rates. Expected send times are a and g.

The search rounds the ends of the descent to plans and prices them with `evaluate` or another judge. Small changes then
polish the best plans.

Sources: Sinkhorn, 1967; Mena et al., "Learning latent permutations with Gumbel-Sinkhorn networks", 2018.
"""

from __future__ import annotations

import importlib.util
import random
import time
from typing import Any, Dict, NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from hwaware.compat.packages import JAX_PACKAGES
from hwaware.costs.curves import BoolArray, FloatArray, IntArray
from hwaware.errors import UnusableInputError
from hwaware.placement.improve import Judge, State, improved, polish
from hwaware.placement.problem import Answer, Problem

try:
    import jax  # the one search that needs it; imported only when asked for
    import jax.numpy as jnp

    if importlib.util.find_spec("optax") is None:  # imported later: its logging keeps the standard error that it finds
        raise ImportError(name="optax")
except ImportError as error:
    raise UnusableInputError(
        f"The solver gradient needs JAX and optax, but Python cannot import {error.name}.",
        f"pip install {' '.join(JAX_PACKAGES)} optax, or use the solver exact.",
    ) from error

# Descents of every number of stages that is tried: half with one device a stage, half with several.
STARTS = 6
MOST_STAGES = 16
# Send times (layers x devices x devices x starts) of one descent at most: some tens of MiB, seconds on two cores.
MOST_SENDS = 4_000_000
# Rounded plans that are polished.
POLISHED = 6
# Stands for a missing link in the relaxed cost, times the time of the whole model.
NO_LINK = 10.0
# Of a descent.
STEPS, RATE = 300, 0.1
HOTTEST, COLDEST = 1.0, 0.05
SINKHORN_ROUNDS = 8
# Weight of memory over the limit, against a cost that is scaled to about 1.
MEMORY_WEIGHT = 10.0
# Keeps divisions by weights that have gone to nothing finite.
TINY = 1e-6


class Starts(NamedTuple):
    """Hold the points where descents begin."""

    widths: FloatArray  # [S, N] logarithms of the stages' parts of the layers
    devices: FloatArray  # [S, D, D] weights of stages (rows) on devices
    stages: IntArray  # [S] number of stages
    single: BoolArray  # [S] each stage has one device


def solve(problem: Problem) -> Answer:
    """Return the best rounded and polished plan. `problem.seed` reproduces it if the search ends within its limit."""
    deadline = time.monotonic() + problem.time_limit_s
    judge, rng = Judge(problem), random.Random(problem.seed)
    starts = _starts(problem)
    cuts, chosen = (np.asarray(array, dtype=np.float64) for array in _descended(starts, _constants(problem)))
    ends = dict.fromkeys(
        _rounded(int(count), bool(alone), cut, weights, judge)
        for count, alone, cut, weights in zip(starts.stages, starts.single, cuts, chosen)
    )
    today = judge.baselines()
    # Where all relaxed ends are impossible, what people use today is still a start.
    states = [*sorted(ends, key=judge.price)[:POLISHED], *list(filter(judge.may_run, today))[:1]]
    best = min((polish(state, judge, rng, deadline) for state in states), key=judge.price)
    best = min([improved(best, judge, rng, deadline), *today], key=judge.price)
    return Answer(problem.plan(best))


def _constants(problem: Problem) -> Dict[str, Any]:
    """Return layer times [D, L], sends [L, D, D] and memory, scaled so that the whole model takes about 1."""
    costs = problem.costs
    names = [device.id for device in costs.profile.devices]
    sums = [costs.sums((name,)) for name in names]
    trains = 0.0 if costs.schedule == "inference" else 1.0
    turn = np.array([np.diff(s.forward_s) + trains * np.diff(s.backward_s) for s in sums])
    scale = max(float(turn.sum(axis=1).mean()), 1e-30)
    layers = len(costs.workload.layers)
    sends = np.full((layers, len(names), len(names)), NO_LINK)
    for i, source in enumerate(names):
        for j, target in enumerate(names):
            times = costs.without_head_starts.sends_s(source, target) if i != j else None
            if times is not None:
                sends[:, i, j] = np.array(times) / scale
    if problem.objective == "alpa":
        sends = np.where(sends < NO_LINK, 0.0, sends)
    return {
        "turn": turn / scale,
        "sends": sends,
        "resident": np.array(
            [np.diff(s.resident_bytes[0]) + problem.num_microbatches * np.diff(s.batch_bytes) for s in sums]
        ),
        "activation": np.diff(sums[0].activation_bytes),
        "limit": np.array([float(d.memory_bytes) - max(s.scratch_bytes) for d, s in zip(costs.profile.devices, sums)]),
        "microbatches": float(problem.num_microbatches),
    }


def _starts(problem: Problem) -> Starts:
    """Draw random weights for several numbers of stages."""
    rng = np.random.default_rng(problem.seed)
    devices, layers = len(problem.costs.profile.devices), len(problem.costs.workload.layers)
    most = min(layers, devices, MOST_STAGES)
    counts = sorted({max(1, round(most * part / 6)) for part in range(1, 7)})
    each = max(1, min(STARTS, MOST_SENDS // (len(counts) * layers * devices**2)))
    drawn = [(rng.standard_normal(most), rng.standard_normal((devices, devices))) for _ in range(len(counts) * each)]
    return Starts(
        widths=0.5 * np.stack([widths for widths, _ in drawn]),
        devices=np.stack([weights for _, weights in drawn]),
        stages=np.repeat(counts, each),
        single=np.array([(k + j) % 2 == 0 for j in range(len(counts)) for k in range(each)]),
    )


def _rounded(stages: int, single: bool, cuts: FloatArray, chosen: FloatArray, judge: Judge) -> State:
    """Round a relaxed end to stages of at least one layer and one device each, by the most wanted assignment."""
    layers, names = len(judge.problem.costs.workload.layers), judge.names
    edges = [0]
    for k in range(stages - 1):
        edges.append(int(np.clip(round(cuts[k]), edges[-1] + 1, layers - (stages - 1 - k))))
    edges.append(layers)
    picked = linear_sum_assignment(np.nan_to_num(chosen[:stages]), maximize=True)[1].tolist()
    groups = [[names[device]] for device in picked]
    if not single:
        for device in range(len(names)):
            if device not in picked and chosen[:stages, device].sum() > 0.5:
                groups[int(np.argmax(chosen[:stages, device]))].append(names[device])
    made = []
    for k, own in enumerate(groups):  # on as many of these devices as the target allows, the first one included
        ways = ((count, replicas) for count in range(len(own), 0, -1) for replicas in range(count, 0, -1))
        built = (judge.built(edges[k], edges[k + 1] - 1, own[:count], replicas) for count, replicas in ways)
        made.append(next(filter(None, built)))
    return tuple(made)


@jax.jit  # type: ignore[misc]  # JAX carries no types here
def _descended(starts: Starts, arrays: Any) -> Any:
    """Return the ends of each start's stages [S, N] and its devices' weights [S, N, D]."""
    import optax

    active = jnp.arange(starts.widths.shape[1])[None, :] < starts.stages[:, None]

    def total(every: Any, temperature: Any) -> Any:
        costs = jax.vmap(_cost, in_axes=(0, 0, 0, 0, None, None))
        return jnp.sum(costs(*every, active, starts.single, temperature, arrays))

    def step(state: Any, k: Any) -> Any:
        now, moments = state
        temperature = HOTTEST * (COLDEST / HOTTEST) ** (k / STEPS)
        slope = jax.grad(total)(now, temperature)
        changes, moments = adam.update(slope, moments)
        return (optax.apply_updates(now, changes), moments), None

    adam = optax.adam(RATE, eps=1e-9)
    first = (jnp.asarray(starts.widths), jnp.asarray(starts.devices))
    ((widths, devices), _), _ = jax.lax.scan(step, (first, adam.init(first)), jnp.arange(STEPS))
    layers = arrays["turn"].shape[1]
    cuts = jax.vmap(_positions, in_axes=(0, 0, None))(widths, active, layers)
    return cuts, jax.vmap(_weights, in_axes=(0, 0, 0, None))(devices, active, starts.single, COLDEST)


def _positions(widths: Any, mask: Any, layers: int) -> Any:
    """Return the end of each stage, between 0 and L; stages that do not exist have no layers."""
    return layers * jnp.cumsum(jax.nn.softmax(jnp.where(mask, widths, -1e9)))


def _weights(logits: Any, mask: Any, single: Any, temperature: Any) -> Any:
    """Return stages' weights on devices [N, D]: one device each by Sinkhorn's scaling, or each device divided."""
    stages = mask.shape[0]

    def scaled(fair: Any, _: Any) -> Any:
        fair = fair - jax.nn.logsumexp(fair, axis=1, keepdims=True)
        return fair - jax.nn.logsumexp(fair, axis=0, keepdims=True), None

    # A loop, not eight copies: it compiles much faster.
    fair, _ = jax.lax.scan(scaled, logits / temperature, None, length=SINKHORN_ROUNDS)
    wanted = jnp.where(mask[:, None], logits[:stages] / temperature, -1e9)
    idle = jnp.full((1, logits.shape[1]), -1.0)
    divided = jax.nn.softmax(jnp.concatenate([wanted, idle]), axis=0)[:-1]
    return jnp.where(single, jnp.exp(fair)[:stages], divided)


def _cost(widths: Any, devices: Any, mask: Any, single: Any, temperature: Any, arrays: Any) -> Any:
    """Return the relaxed cost of one start."""
    layers, stages = arrays["turn"].shape[1], mask.shape[0]
    ends = _positions(widths, mask, layers)
    middles = jnp.arange(layers) + 0.5
    before = jax.nn.sigmoid((ends[:, None] - middles) / (2 * temperature))
    within = before - jnp.concatenate([jnp.zeros((1, layers)), before[:-1]])  # [N, L]
    chosen = _weights(devices, mask, single, temperature)
    alone = within @ arrays["turn"].T  # [N, D]
    turn = jnp.where(mask, 1.0 / (jnp.sum(chosen / (alone + TINY), axis=1) + TINY), 0.0)
    parts = chosen / (jnp.sum(chosen, axis=1, keepdims=True) + TINY)
    at_cut = jax.nn.softmax(-(((ends[:-1, None] - (jnp.arange(layers) + 1.0)) / temperature) ** 2), axis=1)
    there = jnp.einsum("nd,ne,nl,lde->n", parts[:-1], parts[1:], at_cut, arrays["sends"]) * mask[1:]
    back = jnp.einsum("nd,ne,nl,led->n", parts[:-1], parts[1:], at_cut, arrays["sends"]) * mask[1:]
    pairs = (turn[:-1] + turn[1:] + there + back) / 2 * mask[1:]
    slow = jnp.concatenate([turn, there, back, pairs])
    sharp = 0.05 * temperature
    slowest = sharp * jax.nn.logsumexp(slow / sharp)
    later = jnp.clip(jnp.sum(mask) - jnp.arange(stages), 1, arrays["microbatches"])
    kept = later * (within @ arrays["activation"]) / jnp.maximum(1.0, jnp.sum(chosen, axis=1))
    held = within @ arrays["resident"].T + kept[:, None]
    over = jnp.sum(chosen * jax.nn.relu(held / arrays["limit"][None, :] - 1))
    whole = jnp.sum(turn) + jnp.sum(there + back)
    return whole / arrays["microbatches"] + slowest + MEMORY_WEIGHT * over
