"""What Alpa's own tests check, written anew: same results with hwaware enabled, disabled, enabled then disabled.

Where workers are launched, what is enabled is checked, and that one training is Alpa's own again once hwaware is
disabled; all else runs with HWAWARE_ALL_CASES alone, as `make parity` sets it. patches/README.md has the table of
Alpa's test files and where each is covered. hwaware's runtime for stock JAX is there in all three: without it Alpa does
not run here at all.
"""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import applied, chosen, cluster

pytestmark = pytest.mark.alpa
WIDTH, SAMPLES, RATE = 32, 8, 0.1


MODES = ["enabled", "disabled", "enabled then disabled"]


@contextlib.contextmanager
def switched(mode, profile):
    """The stage option of a program that leaves its stages to Alpa: hwaware's search, or Alpa's equal stages."""
    import hwaware
    from hwaware.patching import leaves, stage_option, stock_jax

    stock_jax.install()
    if mode == "enabled":
        with hwaware.enabled(profile):
            yield "auto"
        return
    if mode == "enabled then disabled":
        hwaware.enable(profile)
        hwaware.disable()
    with applied(leaves.PATCHES):
        assert not stage_option.has_default()
        yield "uniform"


@pytest.fixture(params=chosen(MODES, 0))
def mode(request, profile):
    """As `switched`, for the cluster that runs."""
    with switched(request.param, profile) as option:
        yield option


@pytest.fixture(params=chosen(MODES, 2))
def without_ray(request):
    """As `switched`, where nothing is launched."""
    with switched(request.param, cluster("a", addresses={"a": "10.9.0.1"})) as option:
        yield option


@pytest.fixture
def parallel(mode, local_ray):
    """(method, mesh) of a pipeline on two devices of this machine; workers end with the test."""
    import alpa

    from hwaware.patching import meshes

    made = []

    def make(**options):
        mesh = meshes.cluster_mesh([(local_ray, 2)])
        made.append(mesh)
        options = {"layer_option": alpa.AutoLayerOption(layer_num=2), "stage_option": mode, **options}
        return alpa.PipeshardParallel(devices=mesh, num_micro_batches=2, **options)

    yield make
    for mesh in made:
        if mesh.launched_physical_mesh_group is not None:
            mesh.launched_physical_mesh_group.shutdown()
            mesh.launched_physical_mesh_group = None


def initial(layers=4):
    """Weights that need no random numbers."""
    grid = np.arange(WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH)
    return {f"w{k}": jnp.asarray(np.sin(grid * (k + 1)) / WIDTH**0.5) for k in range(layers)}


def mlp(params, x):
    for name in sorted(params):
        x = jnp.tanh(x @ params[name])
    return x


def bert(params, x):
    """Two encoder blocks: attention over the samples' tokens, then a dense part, each beside the residual stream."""
    for block in range(2):
        query, dense = params[f"w{2 * block}"], params[f"w{2 * block + 1}"]
        scores = jnp.einsum("bqh,bkh->bqk", x @ query, x) / np.float32(WIDTH**0.5)
        x = x + jnp.einsum("bqk,bkh->bqh", jax.nn.softmax(scores), x)
        x = x + jax.nn.gelu(x @ dense)
        x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
    return x


def batch_of(step, *shape):
    x = np.random.default_rng(step).standard_normal((SAMPLES, *shape, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.cos(x)}


def train_step(model, value_and_grad=jax.value_and_grad):
    def step(params, batch):
        def loss(params):
            return jnp.mean((model(params, batch["x"]) - batch["y"]) ** 2)

        value, gradients = value_and_grad(loss)(params)
        return jax.tree_util.tree_map(lambda p, g: p - RATE * g, params, gradients), value

    return step


def values(tree):
    return jax.tree_util.tree_map(lambda leaf: np.asarray(getattr(leaf, "_value", leaf)), tree)


def same(found, expected, tolerance=2e-5):
    found, expected = values(found), values(expected)
    assert jax.tree_util.tree_structure(found) == jax.tree_util.tree_structure(expected)
    for one, other in zip(jax.tree_util.tree_leaves(found), jax.tree_util.tree_leaves(expected)):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("model", "shape", "options"),
    chosen(
        [
            pytest.param(mlp, (), {}, id="mlp"),
            pytest.param(bert, (4,), {}, id="bert"),
            pytest.param(mlp, (), {"pipeline_schedule": "gpipe"}, id="gpipe"),
            pytest.param(bert, (4,), {"remat": True}, id="remat"),
        ],
        0,
        3,
    ),
)
def test_training(mode, parallel, model, shape, options):
    import alpa

    import hwaware

    options = dict(options)
    if options.pop("remat", False):
        options["layer_option"] = alpa.AutoLayerOption(layer_num=2, remat_mode="coarse_grained_remat")
    step = alpa.parallelize(train_step(model, alpa.value_and_grad), method=parallel(**options))
    plain, params, expected = jax.jit(train_step(model)), initial(), initial()
    for number in range(2):
        params, loss = step(params, batch_of(number, *shape))
        expected, wanted = plain(expected, batch_of(number, *shape))
        same(loss, wanted)
    same(params, expected)
    if mode == "auto":
        group = step.get_last_executable().mesh_group
        devices = [tuple(f"here:{device}" for device in mesh.devices[0]) for mesh in group]
        assert devices == [stage.devices for stage in hwaware.last_plan().stages]


@pytest.mark.parametrize("mode", ["enabled then disabled"], indirect=True)
def test_training_after_it_is_disabled(mode, parallel):
    test_training(mode, parallel, mlp, (), {})


def test_inference(parallel):
    import alpa

    run = alpa.parallelize(
        lambda params, batch: mlp(params, batch["x"]),
        donate_argnums=(),
        method=parallel(pipeline_schedule="inference"),
    )
    for number in range(2):
        same(run(initial(), batch_of(number)), mlp(initial(), batch_of(number)["x"]))


def test_state_is_created_where_it_is_used_and_another_function_follows(parallel):
    """Alpa's CreateStateParallel makes the first state on the workers; FollowParallel evaluates it there."""
    import alpa

    step = alpa.parallelize(train_step(mlp, alpa.value_and_grad), method=parallel())

    def create():
        grid = jnp.arange(WIDTH * WIDTH, dtype=jnp.float32).reshape(WIDTH, WIDTH)
        return {f"w{k}": jnp.sin(grid * (k + 1)) / WIDTH**0.5 for k in range(4)}

    state = alpa.parallelize(create, method=alpa.CreateStateParallel(step, batch_of(0)))()
    same(state, initial(), 1e-4)  # sines of large numbers
    executable = step.get_last_executable()
    placed = executable.get_input_placement_specs()[0]
    assert {name: array.device_mesh.mesh_id for name, array in state.items()} == {
        name: spec.mesh_ids[0] for name, spec in placed.items()
    }
    expected = values(state)
    state, loss = step(state, batch_of(0))
    expected, wanted = jax.jit(train_step(mlp))(expected, batch_of(0))
    same((state, loss), (expected, wanted))
    follow = alpa.parallelize(
        lambda params, batch: mlp(params, batch["x"]),
        method=alpa.FollowParallel(
            step, num_micro_batches=2, get_input_placement_specs=executable.get_input_placement_specs
        ),
    )
    same(follow(state, batch_of(1)), mlp(expected, batch_of(1)["x"]))
    # It runs on the workers of the function that it follows.
    assert follow.get_last_executable().mesh_group is executable.mesh_group


def test_checkpoint(parallel, tmp_path):
    import alpa

    step = alpa.parallelize(train_step(mlp, alpa.value_and_grad), method=parallel())
    params, _ = step(initial(), batch_of(0))
    kept = values(params)
    alpa.save_checkpoint(str(tmp_path), params, 1)
    step(params, batch_of(1))
    specs = step.get_last_executable().get_input_placement_specs()[0]
    restored = alpa.restore_checkpoint(str(tmp_path), 1, specs)
    same(restored, kept, 0.0)


def brute_force(costs, devices, microbatches, sizes):
    """The least sum(t) + (B - 1) max(t) over all cuts and sizes that use all devices."""
    layers, best = len(costs), np.inf
    for stages in range(1, layers + 1):
        for cuts in itertools.combinations(range(1, layers), stages - 1):
            edges = (0, *cuts, layers)
            for picked in itertools.product(range(len(sizes)), repeat=stages):
                if sum(sizes[k] for k in picked) == devices:
                    times = [costs[a, b - 1, k, 0] for a, b, k in zip(edges, edges[1:], picked)]
                    best = min(best, sum(times) + (microbatches - 1) * max(times))
    return best


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # of numba, about Alpa's code
def test_dynamic_programming(without_ray):
    from alpa.pipeline_parallel import stage_construction

    from hwaware.placement import training_dp

    for seed in range(5):
        costs = np.random.default_rng(seed).uniform(0.1, 1.0, (4, 4, 2, 1))
        problem = (4, 4, 8, [(1, 1), (1, 2)], 1, costs, np.full(costs.shape, 4096))
        expected = brute_force(costs, 4, 8, [1, 2])
        assert stage_construction.training_dp(*problem)[0] == pytest.approx(expected, rel=1e-5)
        assert stage_construction.training_dp_2(4, 8, problem[3], costs, problem[6])[0] == pytest.approx(
            expected, rel=1e-5
        )
        assert training_dp(*problem)[0] == pytest.approx(expected, rel=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("layers", [1, 4])
def test_layer_construction(without_ray, layers):
    """Layers cover all products, and the function stays what it was; also its gradient, with remat."""
    from alpa.pipeline_parallel.layer_construction import automatic_layer_construction, automatic_remat
    from alpa.pipeline_parallel.primitive_def import pipeline_p

    x = batch_of(0)["x"]

    def loss(params):
        return jnp.mean(mlp(params, x) ** 2)

    cut = automatic_layer_construction(loss, layer_num=layers, cost_criteria="flops")
    marks = [
        equation.params["mark_type"]
        for equation in jax.make_jaxpr(cut)(initial()).jaxpr.eqns
        if equation.primitive is pipeline_p
    ]
    assert (marks.count("start"), marks.count("end")) == (layers, layers)
    same(jax.jit(cut)(initial()), loss(initial()))
    remat = automatic_remat(loss, layer_num=layers)
    same(jax.jit(jax.grad(remat))(initial()), jax.grad(loss)(initial()))


@pytest.mark.parametrize("shapes", [[(1, 1)] * 4, [(1, 2), (1, 1), (1, 1)], [(2, 2)]])
def test_stage_construction_slices_the_cluster(without_ray, shapes):
    """Every device of the cluster is in one submesh."""
    from alpa.pipeline_parallel import stage_construction

    from hwaware.patching import meshes

    mesh = meshes.cluster_mesh([("10.9.0.1", 2), ("10.9.0.2", 2)])
    slices = stage_construction.get_sliced_virtual_submeshes(mesh, shapes)
    assert [part.shape for part in slices] == shapes
    assert sorted(name for part in slices for name in part.device_strs) == sorted(mesh.device_strs)
