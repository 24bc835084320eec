"""Kill workers of a small training at seeded moments, and compare each loss and each state with a calm training's.

One training meets all kills, one after the other. They come at each kind of instruction, at
copies of its state, and at each part of a recovery. On a chain of single devices, every bit has to be the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

from hwaware.bench.mortal import IN_RECOVERY, IN_STEP, MortalWorker, rescuer_of
from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct

# Four microbatches of seven samples: no stage can have replicas, so every placement is a chain.
BATCH, MICROBATCHES, LAYERS = 28, 4, 4
# Steps that a kill may take: one in which the moment may come late, and one after it.
STEPS_A_KILL = 3
_ANSWER_LIMIT_S = 120.0


class Kill(NamedTuple):
    """One kill, and what became of the training.

    Attributes:
        kind: Moment, one of `IN_STEP` or `IN_RECOVERY`.
        times: How often the worker came to such moments before.
        stage: Number of the worker's stage.
        steps: Number of steps after the kill.
        is_met: True if the worker ended, and the training recovered.
        is_equal: True if every loss and state is the calm training's.
        took_s: Seconds of the recoveries.
    """

    kind: str
    times: int
    stage: int
    steps: int
    is_met: bool
    is_equal: bool
    took_s: float


def profile_of_three(address: str) -> ClusterProfile:
    """Return a made-up profile of one host with three devices, so slow that a small model is spread over them.

    Args:
        address: The host's address.
    """

    def device(index: int, seconds: float) -> Device:
        curve: Dict[str, Tuple[MatrixProduct, ...]] = {"float32": (MatrixProduct(flops=1e9, seconds=seconds),)}
        return Device(id=f"here:{index}", host="here", kind="cpu", memory_bytes=1 << 30, throughput=curve)

    return ClusterProfile(
        hosts=(Host(name="here", address=address),),
        devices=(device(0, 50.0), device(1, 100.0), device(2, 100.0)),
        links=(Link(source="here", target="here", latency_s=1e-4, bandwidth_bytes_per_s=1e9),),
    )


class Training:
    """A small training under Alpa.

    Attributes:
        run: The program that survives; None of a calm training.
        losses, digests: Loss and SHA-256 of the state of each step so far.
    """

    def __init__(self, profile: ClusterProfile, survives: bool) -> None:
        import alpa

        from hwaware import models
        from hwaware.activation import enabled
        from hwaware.patching import meshes, rescue

        self._model = models.make(models.MlpConfig(blocks=LAYERS, hidden=64))
        self._mesh = meshes.cluster_mesh(meshes.device_counts(profile))
        method = alpa.PipeshardParallel(
            devices=self._mesh,
            num_micro_batches=MICROBATCHES,
            layer_option=alpa.AutoLayerOption(layer_num=LAYERS),
            stage_option="auto",
        )
        self.losses: List[float] = []
        self.digests: List[str] = []
        self._enabled = enabled(profile, costs="model", survive=survives)
        self._enabled.__enter__()
        self._step = alpa.parallelize(self._train_step, method=method)
        self._state = self._model.initial_state(0)
        with rescue.in_charge(rescuer_of(MortalWorker)) if survives else contextlib.nullcontext():
            self.train()
        group = self._step.get_last_executable().mesh_group
        self.run = rescue.run_of(group)
        if self.run is not None:
            self.run.copies.every = 1

    def _train_step(self, state: Any, batch: Any) -> Any:
        import alpa

        return self._model.train_step(state, batch, value_and_grad=alpa.value_and_grad)

    def train(self) -> None:
        """Make a step."""
        import jax
        import numpy

        self._state, loss = self._step(self._state, self._model.batch(len(self.losses), BATCH))
        digest = hashlib.sha256()
        self.losses.append(float(loss._value))
        for leaf in jax.tree_util.tree_leaves(self._state):
            digest.update(numpy.asarray(leaf._value).tobytes())
        self.digests.append(digest.hexdigest())

    @property
    def workers(self) -> List[Any]:
        """Return the handles of the workers."""
        return [worker for mesh in self._step.get_last_executable().mesh_group.meshes for worker in mesh.workers]

    def close(self) -> None:
        """End the training."""
        group = self._mesh.launched_physical_mesh_group
        if group is not None:
            group.shutdown()
        self._enabled.__exit__(None, None, None)


def moments(count: int, seed: int) -> List[Tuple[str, int]]:
    """Return the kind of each kill, each equally often, and how often the worker comes to such a moment before.

    Example:
        >>> len({kind for kind, _ in moments(11, 0)})
        11
    """
    chance = random.Random(seed)
    kinds = [*IN_STEP, *IN_RECOVERY]
    drawn = [kinds[number % len(kinds)] for number in range(count)]
    chance.shuffle(drawn)
    most = {"run": 2 * MICROBATCHES, "send": MICROBATCHES, "receive": MICROBATCHES, "free": MICROBATCHES}
    return [(kind, chance.randint(1, most.get(kind, 1))) for kind in drawn]


def kills(address: str, count: int, seed: int, say: Callable[[str], None]) -> List[Kill]:
    """Train calmly, then with kills, on the Ray that this process is connected to; return what became of each.

    Args:
        address: Address of Ray's node.
        count: Number of kills.
        seed: Seed of the moments.
        say: Called with a line about each kill.
    """
    profile = profile_of_three(address)
    drawn = moments(count, seed)
    calm = Training(profile, survives=False)
    for _ in range(count * STEPS_A_KILL):
        calm.train()
    calm.close()
    training = Training(profile, survives=True)
    found = []
    try:
        chance = random.Random(seed)
        for kind, times in drawn:
            found.append(_killed(training, calm, kind, times, chance))
            say(f"{len(found)} of {count}: {_words(found[-1])}")
    finally:
        training.close()
    return found


def _killed(training: Training, calm: Training, kind: str, times: int, chance: random.Random) -> Kill:
    import ray

    assert training.run is not None
    workers = training.workers
    first, second = chance.sample(range(len(workers)), 2)
    before = training.run.history()
    ray.get(workers[first].die_at.remote(kind, times), timeout=_ANSWER_LIMIT_S)
    if kind in IN_RECOVERY:  # another loss starts the recovery
        os.kill(ray.get(workers[second].process_id.remote(), timeout=_ANSWER_LIMIT_S), signal.SIGKILL)
    for _ in range(STEPS_A_KILL):
        training.train()
    ray.get([worker.die_at.remote("", 0) for worker in training.workers], timeout=_ANSWER_LIMIT_S)
    after = training.run.history()
    new = [event for event in after.events[len(before.events) :] if event.kind == "recovered"]
    done = len(training.losses)
    is_equal = training.losses == calm.losses[:done] and training.digests == calm.digests[:done]
    is_met = len(new) + sum(event.tries - 1 for event in new) > (1 if kind in IN_RECOVERY else 0)
    return Kill(kind, times, first, STEPS_A_KILL, is_met, is_equal, sum(event.took_s for event in new))


def _words(kill: Kill) -> str:
    what = "equal" if kill.is_equal else "NOT EQUAL"
    met = f"recovered in {kill.took_s:.1f} s" if kill.is_met else "the moment did not come"
    return f"stage {kill.stage} at {kill.kind} {kill.times}: {met}, losses and state {what}"


def summary(found: Sequence[Kill]) -> str:
    """Return a line for each kind of moment, and one for all.

    Example:
        >>> print(summary([Kill("run", 3, 0, 3, True, True, 2.0)]))
        run: 1 of 1 met, 1 of 1 equal
        all: 1 of 1 met, 1 of 1 equal
    """
    by_kind: Dict[str, List[Kill]] = {}
    for kill in found:
        by_kind.setdefault(kill.kind, []).append(kill)
    return "\n".join(
        f"{kind}: {sum(kill.is_met for kill in these)} of {len(these)} met, "
        f"{sum(kill.is_equal for kill in these)} of {len(these)} equal"
        for kind, these in [*sorted(by_kind.items()), ("all", list(found))]
    )
