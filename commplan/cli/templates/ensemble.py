"""Train an ensemble on shared input with ensemble.plan: python ensemble.py

Members are independent networks, each data-parallel. Records are read and unpacked once for all members.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import commplan

EPOCHS = 5
RATE = 0.05  # learning rate

if jax.default_backend() == "cpu" and jax.device_count() == 1:
    print(
        "one CPU device only; JAX_NUM_CPU_DEVICES=4 in the environment gives two members on two devices each"
    )
members = 2 if jax.device_count() >= 2 else 1
replicas = 2 if jax.device_count() >= 4 else 1
mesh = jax.make_mesh((members, replicas), ("member", "data"), devices=jax.devices()[: members * replicas])


def samples(count=2000):
    """Records of 8 numbers and a label: y = sin(x0) - x1 / 2."""
    x = np.random.default_rng(0).standard_normal((count, 8), np.float32)
    y = np.sin(x[:, 0]) - x[:, 1] / 2
    return np.concatenate([x, y[:, None]], axis=1)


def unpack(record):
    """Split a record, f32[9], into its input and its label."""
    return record[:8], record[8]


def jitter(x, rng):
    """Each member sees its own noise."""
    return x + 0.01 * rng.standard_normal(8, np.float32)


def init(key):
    """Random parameters of a network with one hidden layer."""
    first, second = jax.random.split(key)
    return {"hidden": jax.random.normal(first, (8, 32)) * 0.3, "out": jax.random.normal(second, (32,)) * 0.1}


def loss(params, x, y, mask):
    """The mean squared error over records. `mask` is False for rows that only fill the last batch."""
    errors = (jnp.tanh(x @ params["hidden"]) @ params["out"] - y) ** 2
    return jnp.sum(errors, where=mask) / jnp.maximum(mask.sum(), 1)


# Every rank draws parameters; the plan broadcasts those of replica 0.
keys = jax.random.split(jax.random.key(0), (members, replicas))
drawn = jax.vmap(jax.vmap(init))(keys)
shapes = jax.eval_shape(init, jax.random.key(0))
plan = commplan.load(Path(__file__).with_suffix(".plan"))
program = plan.compile(mesh, shapes={"params": shapes, "grads": shapes})
run = program.bind(mesh, sources={"samples": samples()}, functions={"unpack": unpack, "jitter": jitter})


@run.jit
@run.spmd(params="params", x="x", labels="labels", mask="labels", returns=("params", "loss"))
def train(state, params, x, labels, mask):
    """One step on a rank; gradients and losses are means over the replicas, weighted by their records."""
    value, grads = jax.value_and_grad(loss)(run.varying(params), x, labels, mask)
    out, state = run.step(state, grads=grads, loss=value, count=mask.sum().astype("float32"))
    params = jax.tree.map(lambda p, g: p - RATE * g, params, out.grads)
    return state, params, out.loss


state = run.init()
out, state = run.start(state, params=drawn)
params = out.params
with run.batches() as batches:
    for epoch in range(1, EPOCHS + 1):
        for item in batches:
            state, params, losses = train(state, params, item["x"], item["labels"], item.mask)
        texts = ", ".join(f"{float(value):.4f}" for value in np.asarray(losses))
        print(f"epoch {epoch}: loss of each member {texts}")
