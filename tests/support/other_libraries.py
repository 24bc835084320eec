"""Print a digest of a small use of each library of JAX that is installed here: python other_libraries.py"""

import hashlib
import importlib.util

import jax
import jax.numpy as jnp
import optax

X = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)


def digest(values):
    """Return a digest of the arrays of these values, bit by bit."""
    leaves = [leaf for leaf in jax.tree_util.tree_leaves(values) if isinstance(leaf, jax.Array)]
    return hashlib.sha256(b"".join(memoryview(jax.device_get(leaf)).tobytes() for leaf in leaves)).hexdigest()[:16]


def trained(params, loss_of):
    """Train for three steps of Adam with clipping."""
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    @jax.jit
    def step(carry, _):
        params, slots = carry
        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, slots = adam.update(gradients, slots, params)
        return (optax.apply_updates(params, updates), slots), loss

    return jax.lax.scan(step, (params, adam.init(params)), jnp.arange(3))


def of_flax():
    """Train a module with dropout and batch statistics."""
    from flax import linen

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.BatchNorm(use_running_average=False)(linen.Dense(5)(x))
            return linen.Dropout(0.5, deterministic=False)(x)

    model, key = Model(), jax.random.PRNGKey(0)
    variables = model.init({"params": key, "dropout": key}, X)

    def loss_of(params):
        held = {**variables, "params": params}
        y, _ = model.apply(held, X, rngs={"dropout": key}, mutable=["batch_stats"])
        return jnp.mean(y**2)

    return trained(variables["params"], loss_of)


def of_haiku():
    """Train a function with dropout."""
    import haiku

    model = haiku.transform(lambda x: haiku.dropout(haiku.next_rng_key(), 0.5, haiku.nets.MLP([5, 2])(x)))
    key = jax.random.PRNGKey(0)
    return trained(model.init(key, X), lambda params: jnp.mean(model.apply(params, key, X) ** 2))


def of_equinox():
    """Train a module, and count how often its step is traced."""
    import equinox

    model = equinox.nn.MLP(3, 2, 4, 2, key=jax.random.PRNGKey(0))
    params, rest = equinox.partition(model, equinox.is_array)
    counted = equinox.filter_jit(equinox.debug.assert_max_traces(lambda x: x * 2, max_traces=1))
    return trained(params, lambda params: jnp.mean(jax.vmap(equinox.combine(params, rest))(X) ** 2)), counted(X)


def of_diffrax():
    """Solve a differential equation, and take the gradient by its start."""
    import diffrax

    def end(start):
        term, solver = diffrax.ODETerm(lambda t, y, args: -y * t), diffrax.Tsit5()
        steps = diffrax.PIDController(rtol=1e-5, atol=1e-6)
        return diffrax.diffeqsolve(term, solver, 0.0, 1.0, 0.1, start, stepsize_controller=steps).ys[-1]

    return jax.value_and_grad(end)(jnp.float32(2.0))


if __name__ == "__main__":
    for use in (of_flax, of_haiku, of_equinox, of_diffrax):
        library = use.__name__[3:]
        if importlib.util.find_spec(library):
            print(library, digest(use()), flush=True)
