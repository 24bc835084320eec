"""Train, and go on from the newest checkpoint after a failure: python examples/restart.py [--folder checkpoints]

The process that you start trains nothing. It starts this file again with --train, and once more if that process fails:
a host was lost, the process was killed, memory ran out. It gives up after three failures without a new checkpoint in
between, and at once after exit code 2, which means that the program cannot run like this. Batches depend on the step
alone, so the losses are those of a program that nobody interrupted.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

MOST_FAILURES = 3
PAUSE_S = 5.0  # for the workers of the failed process to end
STEPS, EVERY = 12, 3


def supervise(command, folder, pause_s=PAUSE_S):
    """Run a command until it succeeds; returns its last exit code."""
    failures, seen = 0, checkpoints(folder)
    while True:
        code = subprocess.run(command).returncode
        if code in (0, 2):
            return code
        found = checkpoints(folder)
        failures, seen = (failures + 1 if found == seen else 1), found
        if failures == MOST_FAILURES:
            print(f"The training failed {failures} times without a new checkpoint: it is not started again.")
            return 1
        print(f"The training ended with exit code {code}; it is started again in {pause_s:g} s.", flush=True)
        time.sleep(pause_s)


def checkpoints(folder):
    """The names of the checkpoints, and when each was written."""
    return {path.name: path.stat().st_mtime_ns for path in Path(folder).glob("checkpoint_*")}


def train(folder):
    """Train from the newest checkpoint to the last step."""
    import alpa
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax.training.train_state import TrainState
    from models import Mlp

    import hwaware

    alpa.init(cluster="ray")
    model = Mlp()

    def batch_of(step):
        x = np.random.default_rng(step).standard_normal((16, 128), dtype=np.float32)
        return {"x": x, "y": np.sin(x)}

    @alpa.parallelize(
        method=alpa.PipeshardParallel(
            num_micro_batches=4, layer_option=alpa.AutoLayerOption(layer_num=8), stage_option="auto"
        )
    )
    def train_step(state, batch):
        def loss_of(params):
            return jnp.mean((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)

        loss, gradients = alpa.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=gradients), loss

    params = model.init(jax.random.PRNGKey(0), batch_of(0)["x"][:1])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))
    state, first = hwaware.restore_newest(folder, train_step, state, batch_of(0))
    print(f"process {os.getpid()} goes on from step {first}", flush=True)
    for step in range(first, STEPS):
        state, loss = train_step(state, batch_of(step))
        print(f"step {step}: loss {float(loss._value):.6f}", flush=True)
        if (step + 1) % EVERY == 0:
            alpa.save_checkpoint(folder, state, step + 1)
    alpa.shutdown()


def main():
    """Train, or see to it that another process does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="checkpoints", help="which every host reaches under the same path")
    parser.add_argument("--train", action="store_true", help="train in this process, once")
    options = parser.parse_args()
    folder = os.path.abspath(options.folder)
    if not options.train:
        return supervise([sys.executable, *sys.argv, "--train"], folder)
    return train(folder)


if __name__ == "__main__":
    sys.exit(main())
