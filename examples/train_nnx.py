"""Train a module of flax.nnx under Alpa on a Ray cluster. Nothing here knows of hwaware."""

import alpa
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

alpa.init(cluster="ray")
generator = np.random.default_rng(0)


class Mlp(nnx.Module):
    """Eight dense layers of 128."""

    def __init__(self, rngs):
        self.layers = nnx.Sequential(*(nnx.Linear(128, 128, rngs=rngs) for _ in range(8)))

    def __call__(self, x):
        for layer in self.layers.layers:
            x = nnx.relu(layer(x))
        return x


def batch_of(size):
    """Return vectors and their absolute sines."""
    x = generator.standard_normal((size, 128), dtype=np.float32)
    return {"x": x, "y": np.abs(np.sin(x))}


# The parameters go through the step; the rest of the module is a constant of it.
definition, params = nnx.split(Mlp(nnx.Rngs(0)), nnx.Param)
batch = batch_of(16)


def apply(params, x):
    """Run the module with these parameters."""
    return nnx.merge(definition, params)(x)


state = TrainState.create(apply_fn=apply, params=params, tx=optax.adam(1e-3))


@alpa.parallelize(
    method=alpa.PipeshardParallel(
        num_micro_batches=4, layer_option=alpa.AutoLayerOption(layer_num=8), stage_option="auto"
    )
)
def train_step(state, batch):
    """Train one step of Adam."""

    def loss_of(params):
        return jnp.mean((state.apply_fn(params, batch["x"]) - batch["y"]) ** 2)

    loss, gradients = alpa.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


for step in range(5):
    state, loss = train_step(state, batch)
    print(f"step {step}: loss {float(loss._value):.4f}", flush=True)
alpa.shutdown()
