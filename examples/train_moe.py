"""A small GPT with mixtures of experts, trained under Alpa on a Ray cluster. Nothing here knows of hwaware."""

import alpa
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from models import Gpt

alpa.init(cluster="ray")
generator = np.random.default_rng(0)


def batch_of(size):
    """Sequences that count up by a step of their own, and the next token of each."""
    start, step = generator.integers(128, size=(size, 1)), generator.integers(1, 5, size=(size, 1))
    tokens = (start + step * np.arange(33)) % 128
    return {"x": tokens[:, :-1].astype(np.int32), "y": tokens[:, 1:].astype(np.int32)}


model = Gpt(experts=4)
batch = batch_of(16)
params = model.init(jax.random.PRNGKey(0), batch["x"][:1])["params"]
state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))


@alpa.parallelize(
    method=alpa.PipeshardParallel(
        num_micro_batches=4, layer_option=alpa.AutoLayerOption(layer_num=4), stage_option="auto"
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
