"""Train workers that are pulled towards a center with elastic.plan: python elastic.py

The workers store the center. If a separate process serves it (`server master = 1`, `tree on master`,
`by async(..)`), start the program with mpirun, as in `commplan new server`.
"""

from pathlib import Path

import jax
import jax.numpy as jnp

import commplan

STEPS = 200
BATCH = 64  # records of a step, divided among the workers
RATE = 0.05  # learning rate
PERIOD = 4  # steps between two exchanges, as in `every 4 steps` of the plan

if jax.default_backend() == "cpu" and jax.device_count() == 1:
    print("one CPU device only; JAX_NUM_CPU_DEVICES=4 in the environment gives four workers")
workers = max(n for n in (1, 2, 4, 8) if n <= jax.device_count())  # divisors of BATCH
mesh = jax.make_mesh((workers,), ("worker",), devices=jax.devices()[:workers])


def init(key):
    """Random parameters of a network with one hidden layer."""
    first, second = jax.random.split(key)
    return {"hidden": jax.random.normal(first, (8, 32)) * 0.3, "out": jax.random.normal(second, (32,)) * 0.1}


def loss(params, x, y):
    """The mean squared error over the records of x and y."""
    return jnp.mean((jnp.tanh(x @ params["hidden"]) @ params["out"] - y) ** 2)


def batches(key):
    """Endless batches of a function to learn: y = sin(x0) - x1 / 2."""
    while True:
        key, batch_key = jax.random.split(key)
        x = jax.random.normal(batch_key, (BATCH, 8))
        yield x, jnp.sin(x[:, 0]) - x[:, 1] / 2


params = jax.vmap(init)(jax.random.split(jax.random.key(0), workers))  # every worker has its own
shapes = jax.eval_shape(init, jax.random.key(0))
plan = commplan.load(Path(__file__).with_suffix(".plan"))
run = plan.compile(mesh, shapes={"params": shapes, "center": shapes}).bind(mesh)


def descend(params, x, y):
    """Return the parameters after a step of gradient descent, and the loss before it."""
    value, grads = jax.value_and_grad(loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), value


@jax.jit
@run.spmd(params="params", x="split worker", y="split worker", returns=("params", "per worker"))
def local(state, params, x, y):
    """A step without communication."""
    return state, *descend(params, x, y)


@jax.jit
@run.spmd(params="params", x="split worker", y="split worker", returns=("params", "per worker"))
def exchange(state, params, x, y):
    """A step with an exchange. It uses the parameters before the local step, so that the two can overlap."""
    out, state = run.every[PERIOD](state, params=params)
    params, value = descend(params, x, y)
    return state, jax.tree.map(jnp.subtract, params, out.pull), value


state = run.init()
_, state = run.start(state, params=params)
for step, (x, y) in zip(range(1, STEPS + 1), batches(jax.random.key(1)), strict=False):
    train = exchange if step % PERIOD == 0 else local
    state, params, losses = train(state, params, x, y)
    if step % 50 == 0 or step == 1:
        print(f"step {step:3}: mean loss {float(losses.mean()):.4f} of {workers} workers")
x, y = next(batches(jax.random.key(2)))
print(f"the center's loss: {float(loss(state['center'], x, y)):.4f}")
