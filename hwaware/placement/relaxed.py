"""Price a pipeline with soft cuts and soft devices in JAX, and follow many descents of that cost at once.

    w_0 (sum c + sum (a + g)) / B + w_1 smooth-max(c_s, a_s, g_s, (c_s + c_{s+1} + a_s + g_s) / 2) + penalty for memory

A stage's time c is the work of its layers over the sum of its devices' rates. Expected send times are a and g. The
coefficients w start as 1; hwaware.placement.gradient fits them.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import jax  # the one search that needs it; imported only when asked for
import jax.numpy as jnp
import numpy as np

from hwaware.costs.curves import FloatArray

STEPS, RATE = 300, 0.1
HOTTEST, COLDEST = 1.0, 0.05
SINKHORN_ROUNDS = 8
# Weight of memory over the limit, against a cost that is scaled to about 1.
MEMORY_WEIGHT = 10.0
# Keeps divisions by weights that have gone to nothing finite.
TINY = 1e-6


class Start(NamedTuple):
    """Hold the point where one descent begins or ends.

    Attributes:
        widths: [N] logarithms of the stages' parts of the layers.
        devices: [D, D] weights of stages (rows) on devices.
        stages: Number of stages.
        single: True if each stage has one device.
    """

    widths: FloatArray
    devices: FloatArray
    stages: int
    single: bool


def descend(
    starts: Sequence[Start], constants: Dict[str, FloatArray], microbatches: float, coefficients: FloatArray
) -> List[Tuple[Start, FloatArray, FloatArray]]:
    """Return each start's end, with the ends of its stages [N] and its devices' weights [N, D]."""
    parameters = {
        "widths": np.stack([start.widths for start in starts]),
        "devices": np.stack([start.devices for start in starts]),
    }
    stages = parameters["widths"].shape[1]
    active = np.arange(stages)[None, :] < np.array([start.stages for start in starts])[:, None]
    single = np.array([start.single for start in starts])
    found = _descended(parameters, active, single, constants, microbatches, coefficients)
    widths, devices, cuts, chosen = (np.asarray(array, dtype=np.float64) for array in found)
    return [
        (start._replace(widths=widths[k], devices=devices[k]), cuts[k], chosen[k]) for k, start in enumerate(starts)
    ]


@jax.jit  # type: ignore[misc]  # JAX carries no types here
def _descended(parameters: Any, active: Any, single: Any, arrays: Any, microbatches: Any, coefficients: Any) -> Any:
    # Not with this module: optax's logging keeps the standard error that it finds, and may close it later.
    import optax

    parameters = {name: jnp.asarray(value) for name, value in parameters.items()}

    def total(every: Any, temperature: Any) -> Any:
        costs = jax.vmap(_cost, in_axes=(0, 0, 0, None, None, None, None))(
            every, active, single, temperature, arrays, microbatches, coefficients
        )
        return jnp.sum(costs)

    def step(state: Any, k: Any) -> Any:
        now, moments = state
        temperature = HOTTEST * (COLDEST / HOTTEST) ** (k / STEPS)
        slope = jax.grad(total)(now, temperature)
        changes, moments = adam.update(slope, moments)
        return (optax.apply_updates(now, changes), moments), None

    adam = optax.adam(RATE, eps=1e-9)
    (ends, _), _ = jax.lax.scan(step, (parameters, adam.init(parameters)), jnp.arange(STEPS))
    layers = arrays["turn"].shape[1]
    cuts = jax.vmap(lambda widths, mask: _positions(widths, mask, layers))(ends["widths"], active)
    chosen = jax.vmap(_weights, in_axes=(0, 0, 0, None))(ends["devices"], active, single, COLDEST)
    return ends["widths"], ends["devices"], cuts, chosen


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


def _cost(one: Any, mask: Any, single: Any, temperature: Any, arrays: Any, microbatches: Any, coefficients: Any) -> Any:
    layers, stages = arrays["turn"].shape[1], mask.shape[0]
    ends = _positions(one["widths"], mask, layers)
    middles = jnp.arange(layers) + 0.5
    before = jax.nn.sigmoid((ends[:, None] - middles) / (2 * temperature))
    within = before - jnp.concatenate([jnp.zeros((1, layers)), before[:-1]])  # [N, L]
    chosen = _weights(one["devices"], mask, single, temperature)
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
    later = jnp.clip(jnp.sum(mask) - jnp.arange(stages), 1, microbatches)
    kept = later * (within @ arrays["activation"]) / jnp.maximum(1.0, jnp.sum(chosen, axis=1))
    held = within @ arrays["resident"].T + kept[:, None]
    over = jnp.sum(chosen * jax.nn.relu(held / arrays["limit"][None, :] - 1))
    whole = jnp.sum(turn) + jnp.sum(there + back)
    return coefficients[0] * whole / microbatches + coefficients[1] * slowest + MEMORY_WEIGHT * over
