"""Differentiable search: cuts and stage-to-device choices relaxed to weights, the pipeline's cost followed downhill.

Every stage has a softmax over devices, made a fair division by Sinkhorn's scaling, and every cut a position between
layers, smoothed by a sigmoid. Both sharpen as the temperature falls. The relaxed cost is

    sum c + sum (a + g) + (B - 1) smooth-max(c_s, a_s, g_s, (c_s + c_{s+1} + a_s + g_s) / 2) + penalty for memory

with c, a, g the expected stage and send times. Several numbers of stages and starts are followed at once; the ends are
rounded to plans of single-device stages, judged by `evaluate`, and the best ones polished by small changes.

Sources: Sinkhorn, 1967; Mena et al., "Learning latent permutations with Gumbel-Sinkhorn networks", 2018.
"""

from __future__ import annotations

import random
import time
from typing import Any, Dict, List, Tuple

import numpy as np

from hwaware.costs.curves import FloatArray
from hwaware.placement.annealing import starting_states
from hwaware.placement.moves import Judge, Located, State, plan_of, polish
from hwaware.placement.request import Answer, Request

STEPS, RATE = 300, 0.1
HOTTEST, COLDEST = 1.0, 0.05
STARTS = 6
MOST_STAGES = 16
SINKHORN_ROUNDS = 8
# Rounded plans that are polished.
POLISHED = 6
# Weight of memory over the limit, against a cost that is scaled to about 1.
MEMORY_WEIGHT = 10.0
# Stands for a missing link in the relaxed cost, times the time of the whole model.
NO_LINK = 10.0


def solve(request: Request) -> Answer:
    """The best rounded and polished plan; reproducible by `request.seed` unless the time limit is reached."""
    deadline = time.monotonic() + request.time_limit_s
    judge, rng = Judge(request), random.Random(request.seed)
    rounded = _rounded(request, *_descend(request))
    # Where all relaxed ends are impossible, what people use today is still a start.
    priced = sorted(((judge.value(state), k) for k, state in enumerate(rounded)), key=lambda one: one[0])
    states = [rounded[k] for _, k in priced[:POLISHED]] or starting_states(request, judge)[:1]
    best, value = states[0], judge.value(states[0])
    for state in states:
        state = polish(state, judge, deadline, rng)
        found = judge.value(state)
        if found < value:
            best, value = state, found
    return Answer(plan_of(best, request))


def _constants(request: Request) -> Dict[str, FloatArray]:
    """Layer times [D, L], sends [L, D, D] and memory, scaled so that the whole model takes about 1."""
    costs = request.costs
    names = [device.id for device in costs.profile.devices]
    sums = [costs.sums((name,)) for name in names]
    trains = 0.0 if costs.schedule == "inference" else 1.0
    turn = np.array([np.diff(s.forward_s) + trains * np.diff(s.backward_s) for s in sums])
    scale = max(float(turn.sum(axis=1).mean()), 1e-30)
    layers = len(costs.workload.layers)
    sends = np.full((layers, len(names), len(names)), NO_LINK)
    for i, source in enumerate(names):
        for j, target in enumerate(names):
            times = costs.sends_s(source, target) if i != j else None
            if times is not None:
                sends[:, i, j] = np.array(times) / scale
    if request.objective == "alpa":
        sends = np.where(sends < NO_LINK, 0.0, sends)
    return {
        "turn": turn / scale,
        "sends": sends,
        "resident": np.array([np.diff(s.resident_bytes[0]) for s in sums]),
        "activation": np.diff(sums[0].activation_bytes),
        "limit": np.array([float(device.memory_bytes) for device in costs.profile.devices]),
    }


def _counts(request: Request) -> List[int]:
    """Numbers of stages that are tried."""
    most = min(len(request.costs.workload.layers), len(request.costs.profile.devices), MOST_STAGES)
    return sorted({max(1, round(most * part / 6)) for part in range(1, 7)})


def _descend(request: Request) -> Tuple[FloatArray, FloatArray, List[int]]:
    """The relaxed ends: cut positions [K, N], assignments [K, N, D], and the number of stages of each."""
    import jax  # noqa: TID251  # the one search that needs it, only when asked for
    import jax.numpy as jnp  # noqa: TID251

    constants = {name: jnp.asarray(value) for name, value in _constants(request).items()}
    devices, layers = constants["turn"].shape
    counts = [count for count in _counts(request) for _ in range(STARTS)]
    stages = max(counts)
    keys = jax.random.split(jax.random.PRNGKey(request.seed), 2)
    parameters = {
        "widths": 0.5 * jax.random.normal(keys[0], (len(counts), stages)),
        "devices": jax.random.normal(keys[1], (len(counts), devices, devices)),
    }
    active = jnp.arange(stages)[None, :] < jnp.asarray(counts)[:, None]
    microbatches = float(request.num_microbatches)

    def loss(one: Any, mask: Any, temperature: Any) -> Any:
        return _relaxed_cost(one, mask, temperature, constants, microbatches)

    def total(every: Any, temperature: Any) -> Any:
        return jnp.sum(jax.vmap(loss, in_axes=(0, 0, None))(every, active, temperature))

    def step(state: Any, k: Any) -> Any:
        now, first, second = state
        temperature = HOTTEST * (COLDEST / HOTTEST) ** (k / STEPS)
        slope = jax.grad(total)(now, temperature)
        # Adam (Kingma and Ba, 2015)
        first = jax.tree_util.tree_map(lambda m, g: 0.9 * m + 0.1 * g, first, slope)
        second = jax.tree_util.tree_map(lambda v, g: 0.999 * v + 0.001 * g * g, second, slope)
        now = jax.tree_util.tree_map(
            lambda x, m, v: x - RATE * (m / (1 - 0.9 ** (k + 1))) / (jnp.sqrt(v / (1 - 0.999 ** (k + 1))) + 1e-9),
            now,
            first,
            second,
        )
        return (now, first, second), None

    zeros = jax.tree_util.tree_map(jnp.zeros_like, parameters)
    (ends, _, _), _ = jax.jit(lambda state: jax.lax.scan(step, state, jnp.arange(STEPS)))((parameters, zeros, zeros))
    cuts = jax.vmap(lambda widths, mask: _positions(widths, mask, layers))(ends["widths"], active)
    chosen = jax.vmap(lambda logits: _fair(logits / COLDEST))(ends["devices"])
    return np.asarray(cuts, dtype=np.float64), np.asarray(chosen, dtype=np.float64), counts


def _positions(widths: Any, mask: Any, layers: int) -> Any:
    """Where each stage ends, between 0 and L; stages that do not exist have no layers."""
    import jax  # noqa: TID251  # the one search that needs it, only when asked for
    import jax.numpy as jnp  # noqa: TID251

    return layers * jnp.cumsum(jax.nn.softmax(jnp.where(mask, widths, -1e9)))


def _fair(logits: Any) -> Any:
    """Rows and columns that add up to 1, by Sinkhorn's scaling in logarithms."""
    import jax  # noqa: TID251  # the one search that needs it, only when asked for
    import jax.numpy as jnp  # noqa: TID251

    for _ in range(SINKHORN_ROUNDS):
        logits = logits - jax.nn.logsumexp(logits, axis=1, keepdims=True)
        logits = logits - jax.nn.logsumexp(logits, axis=0, keepdims=True)
    return jnp.exp(logits)


def _relaxed_cost(one: Any, mask: Any, temperature: Any, constants: Any, microbatches: float) -> Any:
    import jax  # noqa: TID251  # the one search that needs it, only when asked for
    import jax.numpy as jnp  # noqa: TID251

    layers, stages = constants["turn"].shape[1], mask.shape[0]
    ends = _positions(one["widths"], mask, layers)
    middles = jnp.arange(layers) + 0.5
    before = jax.nn.sigmoid((ends[:, None] - middles) / (2 * temperature))
    within = before - jnp.concatenate([jnp.zeros((1, layers)), before[:-1]])  # [N, L]
    chosen = _fair(one["devices"] / temperature)[:stages]  # [N, D]
    turn = jnp.einsum("nd,nl,dl->n", chosen, within, constants["turn"])
    at_cut = jax.nn.softmax(-(((ends[:-1, None] - (jnp.arange(layers) + 1.0)) / temperature) ** 2), axis=1)
    there = jnp.einsum("nd,ne,nl,lde->n", chosen[:-1], chosen[1:], at_cut, constants["sends"]) * mask[1:]
    back = jnp.einsum("nd,ne,nl,led->n", chosen[:-1], chosen[1:], at_cut, constants["sends"]) * mask[1:]
    pairs = (turn[:-1] + turn[1:] + there + back) / 2 * mask[1:]
    slow = jnp.concatenate([turn, there, back, pairs])
    sharp = 0.05 * temperature
    slowest = sharp * jax.nn.logsumexp(slow / sharp)
    later = jnp.sum(mask) - jnp.arange(stages)
    held = jnp.einsum("nd,nl,dl->n", chosen, within, constants["resident"])
    held = held + jnp.clip(later, 1, microbatches) * jnp.einsum("nl,l->n", within, constants["activation"])
    over = jax.nn.relu(held / (chosen @ constants["limit"]) - 1) * mask
    whole = jnp.sum(turn) + jnp.sum(there + back)
    return whole / microbatches + slowest + MEMORY_WEIGHT * jnp.sum(over)


def _rounded(request: Request, cuts: FloatArray, chosen: FloatArray, counts: List[int]) -> List[State]:
    """Each relaxed end as stages: the most wanted device first, every stage at least one layer; no repetitions."""
    names = [device.id for device in request.costs.profile.devices]
    layers, samples = len(request.costs.workload.layers), request.costs.workload.microbatch_size
    made: Dict[State, None] = {}
    for ends, weights, count in zip(cuts, chosen, counts):
        wanted, picked = weights[:count].copy(), [0] * count
        for _ in range(count):
            stage, device = np.unravel_index(int(np.argmax(wanted)), wanted.shape)
            picked[stage] = int(device)
            wanted[stage, :] = -1.0
            wanted[:, device] = -1.0
        edges = [0]
        for k in range(count - 1):
            edges.append(int(np.clip(round(ends[k]), edges[-1] + 1, layers - (count - 1 - k))))
        edges.append(layers)
        made[tuple(Located(edges[k], edges[k + 1] - 1, ((names[picked[k]],),), (samples,)) for k in range(count))] = (
            None
        )
    return list(made)
