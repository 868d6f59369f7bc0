"""Train with the servers of server.plan: mpirun --oversubscribe -n 4 python -m mpi4py server.py

The last two ranks store weights and momentum; the others are workers, which send gradients and get weights.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
from mpi4py import MPI

import commplan

STEPS = 200
BATCH = 64  # records of a step on each worker
WIDTH = 512  # hidden units
RATE = 0.002  # learning rate
DECAY = 0.9  # of the momentum, per step

jax.config.update("jax_platforms", "cpu")  # ranks of MPI exchange arrays of the CPU
comm = MPI.COMM_WORLD
if comm.size < 3:
    raise SystemExit(
        "the last two ranks serve and the others work: mpirun --oversubscribe -n 4 python -m mpi4py server.py"
    )


def init(key):
    """Random weights of a network with one hidden layer."""
    first, second = jax.random.split(key)
    hidden, out = jax.random.normal(first, (8, WIDTH)), jax.random.normal(second, (WIDTH,))
    return {"hidden": hidden * 0.3, "out": out * 0.02}


def loss(params, x, y):
    """The mean squared error over the records of x and y."""
    return jnp.mean((jnp.tanh(x @ params["hidden"]) @ params["out"] - y) ** 2)


def zeros(weights):
    """The initial momentum, on the servers."""
    return jax.tree.map(jnp.zeros_like, weights)


def sgd(weights, moment, grads):
    """Gradient descent with momentum; the servers call it on parts of the weights."""
    moment = jax.tree.map(lambda m, g: DECAY * m + g, moment, grads)
    return jax.tree.map(lambda w, m: w - RATE * m, weights, moment), moment


def batches(key):
    """Endless batches of a function to learn: y = sin(x0) - x1 / 2."""
    while True:
        key, batch_key = jax.random.split(key)
        x = jax.random.normal(batch_key, (BATCH, 8))
        yield x, jnp.sin(x[:, 0]) - x[:, 1] / 2


shapes = jax.eval_shape(init, jax.random.key(0))
plan = commplan.load(Path(__file__).with_suffix(".plan"))
run = plan.compile(comm, shapes={"params": shapes, "grads": shapes}).bind(
    comm, functions={"zeros": zeros, "sgd": sgd}
)
served = run.serve()
if served is not None:  # this rank is a server, and every worker has left
    print(served)
    raise SystemExit


@jax.jit
@run.spmd(weights="weights", x="params", y="params", returns=("weights", "params"))
def train(state, weights, x, y):
    """One step on a worker: x is f32[BATCH, 8], and y f32[BATCH]."""
    value, grads = jax.value_and_grad(loss)(run.varying(weights), x, y)
    out, state = run.step(state, grads=grads)  # gradients go to the servers, new weights come back
    return state, out.weights, value


worker, workers = run.place["worker"], run.context.sizes["worker"]
out, state = run.start(run.init(), params=init(jax.random.key(0)))
weights = out.weights
for step, (x, y) in zip(range(1, STEPS + 1), batches(jax.random.key(1 + worker)), strict=False):
    state, weights, value = train(state, weights, x, y)
    if worker == 0 and (step % 50 == 0 or step == 1):
        print(f"step {step:3}: loss {float(value):.4f} on worker 0 of {workers}", flush=True)
run.close()
