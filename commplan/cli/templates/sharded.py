"""Train with sharded.plan, whose optimizer is sharded: python sharded.py

Each replica stores the momentum of its share of the parameters, and updates only this share.
"""

from pathlib import Path

import jax
import jax.numpy as jnp

import commplan

STEPS = 200
BATCH = 64  # records of a step, divided among the replicas
RATE = 0.02  # learning rate
DECAY = 0.9  # of the momentum, per step

if jax.default_backend() == "cpu" and jax.device_count() == 1:
    print("one CPU device only; JAX_NUM_CPU_DEVICES=4 in the environment gives four replicas")
replicas = max(n for n in (1, 2, 4, 8) if n <= jax.device_count())  # divisors of BATCH
mesh = jax.make_mesh((replicas,), ("data",), devices=jax.devices()[:replicas])


def init(key):
    """Random parameters of a network with one hidden layer."""
    first, second = jax.random.split(key)
    return {"hidden": jax.random.normal(first, (8, 32)) * 0.3, "out": jax.random.normal(second, (32,)) * 0.1}


def loss(params, x, y):
    """The mean squared error over the records of x and y."""
    return jnp.mean((jnp.tanh(x @ params["hidden"]) @ params["out"] - y) ** 2)


def zeros(params):
    """The initial momentum, for this replica's share."""
    return jax.tree.map(jnp.zeros_like, params)


def update(params, grads, momentum):
    """Gradient descent with momentum, on this replica's share."""
    momentum = jax.tree.map(lambda m, g: DECAY * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - RATE * m, params, momentum), momentum


def batches(key):
    """Endless batches of a function to learn: y = sin(x0) - x1 / 2."""
    while True:
        key, batch_key = jax.random.split(key)
        x = jax.random.normal(batch_key, (BATCH, 8))
        yield x, jnp.sin(x[:, 0]) - x[:, 1] / 2


params = init(jax.random.key(0))
shapes = jax.eval_shape(init, jax.random.key(0))
plan = commplan.load(Path(__file__).with_suffix(".plan"))
run = plan.compile(mesh, shapes={"params": shapes, "grads": shapes, "momentum": shapes}).bind(
    mesh, functions={"zeros": zeros, "update": update}
)


@run.jit
@run.spmd(params="params", x="split data", y="split data", returns=("params", "per data"))
def train(state, params, x, y):
    """One step on a rank: x is f32[BATCH / replicas, 8], and y f32[BATCH / replicas]."""
    value, grads = jax.value_and_grad(loss)(run.varying(params), x, y)
    out, state = run.step(state, params=params, grads=grads)
    return state, out.params, value


state = run.init()
_, state = run.start(state, params=params)
for step, (x, y) in zip(range(1, STEPS + 1), batches(jax.random.key(1)), strict=False):
    state, params, losses = train(state, params, x, y)
    if step % 50 == 0 or step == 1:
        print(f"step {step:3}: loss {float(losses.mean()):.4f} on {replicas} replicas")
