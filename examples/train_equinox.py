"""Train a module of Equinox under Alpa on a Ray cluster. Nothing here knows of hwaware."""

import alpa
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

alpa.init(cluster="ray")
generator = np.random.default_rng(0)


def batch_of(size):
    """Return vectors and their absolute sines."""
    x = generator.standard_normal((size, 128), dtype=np.float32)
    return {"x": x, "y": np.abs(np.sin(x))}


# The parameters go through the step; the rest of the module is a constant of it.
model = eqx.nn.MLP(128, 128, width_size=128, depth=7, final_activation=jax.nn.relu, key=jax.random.PRNGKey(0))
params, rest = eqx.partition(model, eqx.is_array)
adam = optax.adam(1e-3)
state = (params, adam.init(params))


@alpa.parallelize(
    method=alpa.PipeshardParallel(
        num_micro_batches=4, layer_option=alpa.AutoLayerOption(layer_num=8), stage_option="auto"
    )
)
def train_step(state, batch):
    """Train one step of Adam."""

    params, slots = state

    def loss_of(params):
        predicted = jax.vmap(eqx.combine(params, rest))(batch["x"])
        return jnp.mean((predicted - batch["y"]) ** 2)

    loss, gradients = alpa.value_and_grad(loss_of)(params)
    updates, slots = adam.update(gradients, slots)
    return (eqx.apply_updates(params, updates), slots), loss


for step in range(5):
    state, loss = train_step(state, batch_of(16))
    print(f"step {step}: loss {float(loss._value):.4f}", flush=True)
alpa.shutdown()
