"""Every kind of training survives: a worker is killed within a step, and losses and state stay those of a calm run."""

import contextlib
import hashlib
from types import SimpleNamespace
from typing import Any, Callable, NamedTuple, Optional, Tuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from builders import cluster, device, plan, stage
from flax import linen as nn

import hwaware
from hwaware.bench.mortal import MortalWorker, rescuer_of

pytestmark = pytest.mark.alpa
LIMIT_S = 120.0
MICROBATCHES, LAYERS, STEPS, WIDTH = 4, 4, 5, 32
# A worker is killed in this step, at the program of this number that it runs.
KILLED_STEP, KILLED_RUN = 2, 6


@pytest.fixture(autouse=True)
def _runtime(worker_pool):
    from hwaware.activation import install_runtime

    install_runtime()


class Mlp(nn.Module):
    """Four layers, with dropout where a rate is given."""

    dropout: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        for _ in range(LAYERS):
            x = nn.tanh(nn.Dense(WIDTH, dtype=self.dtype, param_dtype=jnp.float32)(x))
            if self.dropout:
                x = nn.Dropout(self.dropout, deterministic=False)(x)
        return x


def batch_of(number, factor=1.0):
    x = np.random.default_rng(number).standard_normal((4 * 8, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(3 * x) * np.float32(factor)}


def initial_params(module):
    keys = {"params": jax.random.PRNGKey(0), "dropout": jax.random.PRNGKey(1)}
    return module.init(keys, jnp.ones((1, WIDTH)))


def made_of(module, optimizer):
    """Return a step and its state: parameters, the optimizer's slots, and a key."""
    params = initial_params(module)
    state = {"params": params, "slots": optimizer.init(params), "key": jax.random.PRNGKey(2)}

    def step(state, batch):
        import alpa

        used = jax.random.split(state["key"])[0]

        def loss(params):
            return jnp.mean((module.apply(params, batch["x"], rngs={"dropout": used}) - batch["y"]) ** 2)

        value, gradients = alpa.value_and_grad(loss)(state["params"])
        updates, slots = optimizer.update(gradients, state["slots"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "slots": slots, "key": jax.random.split(state["key"])[1]}, value

    return step, state


def adam():
    return optax.adam(1e-2)


def clipped():
    return optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2))


def scaled_state():
    import alpa  # noqa: F401
    from alpa.model.model_util import DynamicScale, TrainState

    module = Mlp(dtype=jnp.float16)
    return TrainState.create(
        apply_fn=module.apply,
        params=initial_params(module),
        tx=clipped(),
        use_master_copy=True,
        dynamic_scale=DynamicScale(growth_interval=1, scale=jnp.float32(1024.0), fin_steps=jnp.int32(0)),
    )


def scaled_step(state, batch):
    """As in Alpa's own examples: an update with gradients that overflowed is skipped."""

    def loss(params):
        return jnp.mean((state.apply_fn(params, batch["x"]).astype(jnp.float32) - batch["y"]) ** 2)

    scale, finite, value, gradients = state.dynamic_scale.value_and_grad(loss)(state.params)
    new = state.apply_gradients(grads=gradients)
    keep = lambda a, b: jax.tree_util.tree_map(lambda x, y: jnp.where(finite, x, y), a, b)  # noqa: E731
    return (
        new.replace(
            opt_state=keep(new.opt_state, state.opt_state),
            params=keep(new.params, state.params),
            master_copy=keep(new.master_copy, state.master_copy),
            dynamic_scale=scale,
        ),
        value,
    )


def halves():
    """Return the weights of four layers, half and half."""
    keys = jax.random.split(jax.random.PRNGKey(0), LAYERS)
    weights = [0.2 * jax.random.normal(key, (WIDTH, WIDTH)) for key in keys]
    return weights[:2], weights[2:]


def reversed_step(state, batch):
    """Return the loss first, then the halves of the state the other way round: each step swaps their places."""
    import alpa

    def loss(state):
        x = batch["x"]
        for weight in (*state[0], *state[1]):
            x = jnp.tanh(x @ weight)
        return jnp.mean((x - batch["y"]) ** 2)

    value, gradients = alpa.value_and_grad(loss)(state)
    first, second = jax.tree_util.tree_map(lambda weight, gradient: weight - 0.1 * gradient, state, gradients)
    return value, (second, first)


CHAIN = (stage(0, 1, "here:0"), stage(2, 3, "here:1"))


class Kind(NamedTuple):
    """A kind of training.

    Attributes:
        stages: Of its plan.
        module, optimizer: What it trains, by the usual step.
        made: Makes its step and state, where these are others.
        loss_first: True if its step returns the loss before the state.
        batch: Number of a step -> batch.
        two_hosts: True if each device counts as a host.
        equal_bits: True if a recovery changes no bit; else losses differ by 1e-6 at most.
    """

    stages: Tuple[Any, ...] = CHAIN
    module: Any = Mlp()
    optimizer: Callable[[], Any] = adam
    made: Optional[Callable[[], Any]] = None
    loss_first: bool = False
    batch: Callable[[int], Any] = batch_of
    two_hosts: bool = False
    equal_bits: bool = True


KIND_OF = {
    "replicas": Kind((stage(0, 1, "here:0", "here:1"), stage(2, 3, "here:2")), equal_bits=False),
    "tensor parallelism": Kind((stage(0, 1, ("here:0", "here:1")), stage(2, 3, "here:2")), equal_bits=False),
    "both": Kind((stage(0, 3, ("here:0", "here:1"), ("here:2", "here:3")),), equal_bits=False),
    "clipping": Kind(optimizer=clipped),
    "dropout": Kind(module=Mlp(0.3)),
    "float16": Kind(
        made=lambda: (scaled_step, scaled_state()), batch=lambda number: batch_of(number, 1e9 if number == 1 else 1.0)
    ),
    "gradient accumulation": Kind(optimizer=lambda: optax.MultiSteps(adam(), 2)),
    "reversed results": Kind(made=lambda: (reversed_step, halves()), loss_first=True),
    "two hosts": Kind(
        (stage(0, 1, "here:0", "here:1"), stage(2, 3, "here:2", "here:3")), two_hosts=True, equal_bits=False
    ),
}
KINDS = list(KIND_OF)


@pytest.fixture(scope="module")
def four(local_ray):
    return cluster({"here": 4}, inside=(1e9, 1e-4), addresses={"here": local_ray}, seconds=50.0, memory_bytes=1 << 30)


def digest_of(state):
    digest = hashlib.sha256()
    for leaf in jax.tree_util.tree_leaves(state):
        digest.update(np.asarray(leaf._value if hasattr(leaf, "_value") else leaf).tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def running(profile, survives, stages=CHAIN, **method):
    """Let programs that are compiled in the block have these stages; yield Alpa's method."""
    import alpa

    from hwaware.patching import meshes, rescue

    mesh = meshes.cluster_mesh(meshes.device_counts(profile))
    given = plan(*stages, num_microbatches=MICROBATCHES) if stages else None
    with hwaware.enabled(profile, plan=given, costs="model", survive=survives):
        try:
            with rescue.in_charge(rescuer_of(MortalWorker)) if survives else contextlib.nullcontext():
                yield alpa.PipeshardParallel(
                    devices=mesh, num_micro_batches=MICROBATCHES, stage_option="auto",
                    layer_option=alpa.AutoLayerOption(layer_num=LAYERS), **method,
                )  # fmt: skip
        finally:
            if mesh.launched_physical_mesh_group is not None:
                mesh.launched_physical_mesh_group.shutdown()


def kill_in_next_call(function, number=0, run=KILLED_RUN):
    """Let a worker of a function end within the next call, at the program of this number that it runs."""
    import ray

    workers = [worker for mesh in function.get_last_executable().mesh_group.meshes for worker in mesh.workers]
    ray.get(workers[number].die_at.remote("run", run), timeout=LIMIT_S)


def recoveries():
    return [event for event in hwaware.last_history().events if event.kind == "recovered"]


def trained(profile, kind, survives):
    """Return losses and the state's digest; where it survives, a worker is killed in the middle."""
    import alpa

    losses = []
    with running(profile, survives, kind.stages) as method:
        function, state = kind.made() if kind.made else made_of(kind.module, kind.optimizer())
        step = alpa.parallelize(function, method=method)
        for number in range(STEPS):
            if survives and number == KILLED_STEP:
                kill_in_next_call(step)
            results = step(state, kind.batch(number))
            loss, state = results if kind.loss_first else results[::-1]
            losses.append(float(loss._value))
        return losses, digest_of(state)


# By far the cheapest first; the others take as long as ten other tests.
@pytest.mark.parametrize("name", ["replicas", *(pytest.param(name, marks=pytest.mark.thorough) for name in KINDS[1:])])
def test_it_survives(four, monkeypatch, name):
    kind = KIND_OF[name]
    if kind.two_hosts:
        as_two_hosts(monkeypatch)
    calm, calm_digest = trained(four, kind, survives=False)
    found, digest = trained(four, kind, survives=True)
    assert len(recoveries()) == 1
    assert np.isfinite(found).all()
    if kind.equal_bits:
        assert (found, digest) == (calm, calm_digest)
    else:
        np.testing.assert_allclose(found, calm, rtol=1e-6)


def as_two_hosts(monkeypatch):
    """Let each device of a stage be a host of its own: the stage's workers meet, as on several machines."""
    from alpa.device_mesh import VirtualPhysicalMesh

    from hwaware.patching import meshes

    def sliced(virtual_mesh, plan, profile):
        del profile
        info = virtual_mesh.host_info[0]
        devices = [[[int(device.partition(":")[2])] for device in stage.devices] for stage in plan.stages]
        return [VirtualPhysicalMesh([0] * len(each), [info] * len(each), 1, virtual_mesh, each) for each in devices]

    monkeypatch.setattr(meshes, "slice_mesh", sliced)


@pytest.mark.thorough
def test_a_stage_across_hosts_moves_to_one_of_them(four, monkeypatch):
    """The worker there has JAX's devices of both hosts, so another one takes its place."""
    import alpa

    from hwaware.survival import moving

    as_two_hosts(monkeypatch)
    kind = KIND_OF["two hosts"]
    calm, _ = trained(four, kind, survives=False)
    function, state = made_of(Mlp(), adam())
    losses = []
    with running(four, True, kind.stages) as method:
        step = alpa.parallelize(function, method=method)
        for number in range(STEPS):
            if number == KILLED_STEP:
                moving.move_to(plan(stage(0, 3, "here:1"), num_microbatches=MICROBATCHES), "the test asks for it")
            state, loss = step(state, batch_of(number))
            losses.append(float(loss._value))
        assert [one.devices for one in hwaware.last_plan().stages] == [("here:1",)]
    assert [(event.kind, event.tries) for event in hwaware.last_history().events] == [("moved", 1)]
    np.testing.assert_allclose(losses, calm, rtol=1e-6)


@pytest.mark.thorough
def test_replicas_lose_a_device(four):
    """The program goes on on other devices, where gradients are summed in another order."""
    import alpa

    stages = (stage(0, 1, "here:0", "here:1"), stage(2, 3, "here:2"))
    calm, _ = trained(four, Kind(stages), survives=False)
    function, state = made_of(Mlp(), adam())
    losses = []
    with running(four, True, stages) as method:
        step = alpa.parallelize(function, method=method)
        for number in range(STEPS):
            if number == KILLED_STEP:
                group = step.get_last_executable().mesh_group
                left_out = (group.meshes[0].host_info[0]["NodeManagerAddress"], 1)
                rescue_of(group).recovery.left_out.add(left_out)
                kill_in_next_call(step)
            state, loss = step(state, batch_of(number))
            losses.append(float(loss._value))
        assert "here:1" not in [name for each in hwaware.last_plan().stages for name in each.devices]
    assert len(recoveries()) == 1
    np.testing.assert_allclose(losses, calm, rtol=1e-6)


def rescue_of(group):
    from hwaware.patching import rescue

    return rescue.run_of(group)


@pytest.mark.thorough
def test_state_is_created_and_another_function_follows(four):
    """`CreateStateParallel` makes the state, `FollowParallel` evaluates it; a worker is lost within each function."""
    import alpa

    def loss_of(params, batch):
        return jnp.mean((Mlp().apply(params, batch["x"]) - batch["y"]) ** 2, axis=1)

    def run(survives):
        function, shapes = made_of(Mlp(), adam())
        found = []
        with running(four, survives) as method:
            step = alpa.parallelize(function, method=method)
            create = alpa.parallelize(
                lambda: jax.tree_util.tree_map(lambda leaf: jnp.full(leaf.shape, 0.1).astype(leaf.dtype), shapes),
                method=alpa.CreateStateParallel(step, batch_of(0)),
            )
            create.get_executable()
            if survives:
                kill_in_next_call(create, 0, 1)
            state = create()
            specs = step.get_last_executable().get_input_placement_specs
            follow = alpa.FollowParallel(step, MICROBATCHES, lambda: (specs()[0]["params"], specs()[1]))
            evaluate = alpa.parallelize(loss_of, method=follow, donate_argnums=())
            for number in range(STEPS):
                if survives and number == KILLED_STEP:
                    kill_in_next_call(step)
                state, loss = step(state, batch_of(number))
                found += [float(loss._value), np.asarray(evaluate(state["params"], batch_of(9))._value).tolist()]
                if survives and number == KILLED_STEP + 1:
                    kill_in_next_call(evaluate, 1, 2)
            return found, digest_of(create()), digest_of(state)

    calm = run(False)
    assert run(True) == calm
    assert len(recoveries()) == 3


def test_a_function_that_follows_stays_with_its_workers(four):
    """The newest workers of the function that it follows are those of a smaller last batch."""
    import alpa

    with running(four, True) as method:
        function, state = made_of(Mlp(), adam())
        step = alpa.parallelize(function, method=method)
        state, _ = step(state, batch_of(0))

        def specs():
            inputs = step.get_last_executable().get_input_placement_specs()
            return inputs[0]["params"], inputs[1]["x"]

        follow = alpa.FollowParallel(step, MICROBATCHES, specs)
        evaluate = alpa.parallelize(Mlp().apply, method=follow, donate_argnums=())
        calm = np.asarray(evaluate(state["params"], batch_of(9)["x"])._value)
        runs = [rescue_of(evaluate.get_last_executable().mesh_group)]
        params = jax.tree_util.tree_map(lambda leaf: np.asarray(leaf._value), state["params"])
        state, _ = step(state, {name: rows[:16] for name, rows in batch_of(1).items()})
        runs.append(rescue_of(step.get_last_executable().mesh_group))
        kill_in_next_call(evaluate, 0, 1)
        for _ in range(2):  # a call may return before its worker is lost
            np.testing.assert_array_equal(evaluate(params, batch_of(9)["x"])._value, calm)
        assert [len(run.copies.events) for run in runs] == [1, 0]
        assert rescue_of(evaluate.get_last_executable().mesh_group) is runs[0]
        for run in runs:
            run.calls.group.shutdown()


@pytest.mark.thorough
def test_an_evaluation_with_workers_of_its_own(four):
    """Both functions have the same devices; each loses a worker."""
    import alpa

    from hwaware.patching import rescue

    def run(survives):
        function, state = made_of(Mlp(), adam())
        found = []
        with running(four, survives) as method, running(four, survives, pipeline_schedule="inference") as inference:
            step = alpa.parallelize(function, method=method)
            evaluate = alpa.parallelize(Mlp().apply, method=inference, donate_argnums=())
            for number in range(STEPS):
                if survives and number == KILLED_STEP:
                    kill_in_next_call(step)
                    kill_in_next_call(evaluate, 1, 2)
                state, loss = step(state, batch_of(number))
                outputs = evaluate(state["params"], batch_of(number)["x"])
                found += [float(loss._value), np.asarray(outputs._value).tolist()]
            digest = digest_of(state)
            runs = [rescue.run_of(each.get_last_executable().mesh_group) for each in (step, evaluate)]
            return found, digest, [len(each.copies.events) for each in runs if each is not None]

    calm = run(False)
    assert calm[2] == []
    assert run(True) == (*calm[:2], [1, 1])


def test_an_evaluation_survives_beside_its_training(four):
    """The history is the training's, and the evaluation leaves a device though it is not called any more."""
    import alpa
    import ray

    from hwaware.patching import meshes

    mesh = meshes.cluster_mesh(meshes.device_counts(four))  # both functions have the same devices
    with running(four, True, None) as method, running(four, True, None, pipeline_schedule="inference") as inference:
        method.devices = inference.devices = mesh
        function, state = made_of(Mlp(), adam())
        step = alpa.parallelize(function, method=method)
        evaluate = alpa.parallelize(Mlp().apply, method=inference, donate_argnums=())
        for number in range(2):
            state, _ = step(state, batch_of(number))
        evaluate(state["params"], batch_of(0)["x"])
        assert hwaware.last_history().calls == 2
        runs = [rescue_of(each.get_last_executable().mesh_group) for each in (step, evaluate)]
        vaults = [vault.actor for run in runs for vault in run.vaults.up.values()]
        used = [{device for one in run.calls.recipe().plan.stages for device in one.devices} for run in runs]
        (what, *_) = sorted(used[0] & used[1])
        answers = [None]
        for _ in range(20):
            if None in answers:
                state, loss = step(state, batch_of(2))
                float(loss._value)
                answers = ray.get([vault.drain.remote(what) for vault in vaults], timeout=LIMIT_S)
        assert all(answer.what == f"The training no longer uses {what}." for answer in answers)
        for run in runs:
            run.calls.group.shutdown()


def test_other_functions_go_on_after_a_host_has_joined(four, monkeypatch):
    """One of them leaves a device, and another one is compiled for a smaller batch; the late host is too small."""
    import alpa

    from hwaware.patching import meshes
    from hwaware.ray_cluster import Node
    from hwaware.survival import copying, draining, joining

    monkeypatch.setattr(copying, "idle_buddy", lambda *_: [])  # no vault starts on the late host, which is none
    address = "10.255.255.1"
    addresses = {"here": four.hosts[0].address, "late": address}
    grown = cluster((*four.devices, device("late:0", memory_bytes=1)), addresses=addresses)
    info, node = {"NodeManagerAddress": address}, Node("late", address, "late", {"GPU": 1.0}, 1)
    mesh = meshes.cluster_mesh(meshes.device_counts(four))
    with running(four, True, None) as method, running(four, True, None, pipeline_schedule="inference") as inference:
        method.devices = inference.devices = mesh
        function, state = made_of(Mlp(), adam())
        step = alpa.parallelize(function, method=method)
        evaluate = alpa.parallelize(Mlp().apply, method=inference, donate_argnums=())
        state, _ = step(state, batch_of(0))
        evaluate(state["params"], batch_of(0)["x"])
        runs = [rescue_of(each.get_last_executable().mesh_group) for each in (step, evaluate)]
        runs[1].recovery.left_out.add((address, 0))  # as it has left the host before
        join = joining.Joining(runs[0], None)
        join.follower = SimpleNamespace(grown=lambda *_: None)
        workload = runs[0].calls.recipe().workload
        join._take_in(joining._Joiner("late", node, info, grown, workload, {}))
        assert hwaware.last_profile() == grown
        assert np.isfinite(np.asarray(evaluate(state["params"], batch_of(0)["x"][:16])._value)).all()
        runs.append(rescue_of(evaluate.get_last_executable().mesh_group))
        assert runs[2].calls.recipe().profile == grown
        assert draining.drain(runs[1], "here:0").done
        assert runs[1].recovery.left_out == {(addresses["here"], 0)}
        for run in runs:
            run.calls.group.shutdown()


def test_rows_of_samples_that_are_the_next_batch_come_back_whole(four):
    """As with the hidden state of a recurrent model: each call returns rows that the next one cuts."""
    import alpa

    def passing(params, rows):
        def loss(params):
            out = Mlp().apply(params, rows)
            return jnp.mean((out - jnp.sin(3 * rows)) ** 2), out

        (_, out), gradients = alpa.value_and_grad(loss, has_aux=True)(params)
        return jax.tree_util.tree_map(lambda weight, slope: weight - 0.1 * slope, params, gradients), out

    def last_rows(survives):
        with running(four, survives) as method:
            step, params, rows = alpa.parallelize(passing, method=method), initial_params(Mlp()), batch_of(0)["x"]
            for number in range(STEPS):
                if survives and number == KILLED_STEP:
                    kill_in_next_call(step)
                params, rows = step(params, rows)
            return np.asarray(rows._value)

    calm = last_rows(False)
    np.testing.assert_array_equal(last_rows(True), calm)
    assert len(recoveries()) == 1


def test_a_value_that_every_stage_has_is_read_first(four):
    """The program notices the loss as it reads the step count, whose replica on one stage Alpa then fetches."""
    import alpa

    with running(four, survives=True) as method:
        function, state = made_of(Mlp(), adam())
        step = alpa.parallelize(function, method=method)
        for number in range(3):
            if number == 1:
                kill_in_next_call(step)
            state, loss = step(state, batch_of(number))
            count = state["slots"][0].count
            assert type(count).__name__ == "ReplicatedDistributedArray"
            assert (int(count._value), len(recoveries())) == (number + 1, min(number, 1))
        assert np.isfinite(loss._value)


@pytest.mark.thorough
def test_a_request_is_answered_again(four):
    import alpa

    params, requests = initial_params(Mlp()), [batch_of(number)["x"] for number in range(4)]

    def answers(survives):
        with running(four, survives, pipeline_schedule="inference") as method:
            answer = alpa.parallelize(Mlp().apply, method=method, donate_argnums=())
            found = [np.asarray(answer(params, requests[0])._value)]
            if survives:
                kill_in_next_call(answer, 0, 2)
            return found + [np.asarray(answer(params, request)._value) for request in requests[1:]]

    calm = answers(False)
    np.testing.assert_array_equal(answers(True), calm)
    assert len(recoveries()) == 1


@pytest.mark.thorough
def test_a_lost_key_is_found(four, monkeypatch):
    """Dropout draws other masks after a recovery that loses the key: the comparison of losses has to fail."""
    from hwaware.survival import recovering

    own_piece = recovering.own_piece
    monkeypatch.setattr(
        recovering, "own_piece", lambda name, value: own_piece(name, value * (value.dtype != np.uint32))
    )
    calm, _ = trained(four, KIND_OF["dropout"], survives=False)
    found, _ = trained(four, KIND_OF["dropout"], survives=True)
    assert found[:KILLED_STEP] == calm[:KILLED_STEP]
    assert found != calm
