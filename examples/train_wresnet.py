"""A Wide-ResNet on small images, trained under Alpa on a Ray cluster. Nothing here knows of hwaware."""

import alpa
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from models import WideResNet

alpa.init(cluster="ray")
generator = np.random.default_rng(0)


def batch_of(size):
    """Noisy images of ten patterns, and which one it is."""
    patterns = np.random.default_rng(1).standard_normal((10, 16, 16, 3))
    labels = generator.integers(10, size=size)
    images = patterns[labels] + generator.standard_normal((size, 16, 16, 3))
    return {"x": images.astype(np.float32), "y": labels.astype(np.int32)}


model = WideResNet()
batch = batch_of(16)
params = model.init(jax.random.PRNGKey(0), batch["x"][:1])["params"]
state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))


@alpa.parallelize(
    method=alpa.PipeshardParallel(
        num_micro_batches=4, layer_option=alpa.AutoLayerOption(layer_num=3), stage_option="auto"
    )
)
def train_step(state, batch):
    """One step of Adam."""

    def loss_of(params):
        logits = state.apply_fn({"params": params}, batch["x"])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))

    loss, gradients = alpa.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


for step in range(5):
    state, loss = train_step(state, batch)
    print(f"step {step}: loss {float(loss._value):.4f}", flush=True)
alpa.shutdown()
