"""Train a module of Haiku under Alpa on a Ray cluster. Nothing here knows of hwaware."""

import alpa
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

alpa.init(cluster="ray")
generator = np.random.default_rng(0)


@hk.without_apply_rng
@hk.transform
def mlp(x):
    """Run eight dense layers of 128."""
    return hk.nets.MLP([128] * 8, activate_final=True)(x)


def batch_of(size):
    """Return vectors and their absolute sines."""
    x = generator.standard_normal((size, 128), dtype=np.float32)
    return {"x": x, "y": np.abs(np.sin(x))}


batch = batch_of(16)
params = mlp.init(jax.random.PRNGKey(0), batch["x"][:1])
state = TrainState.create(apply_fn=mlp.apply, params=params, tx=optax.adam(1e-3))


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
