"""`run.layers` and `run.scan_layers` on the ranks of a communicator."""

from __future__ import annotations

from support import mpirun

PROGRAM = '''
import jax, jax.numpy as jnp, numpy as np
from mpi4py import MPI
import commplan

WIDTH, LAYERS = 16, 4
comm = MPI.COMM_WORLD
plan = commplan.loads("""plan sharded
axis data = 2
input weights : tree split data
input grads   : tree partial data
each step {
    whole = gather weights over data via ring
    grads = scatter grads over data by mean via bruck
    output whole, grads
}
""")
sizes = {"w": (WIDTH, WIDTH), "b": (WIDTH,)}
shape = {name: jax.ShapeDtypeStruct(dims, jnp.float32) for name, dims in sizes.items()}
run = plan.compile(comm, shapes={"weights": shape, "grads": shape}).bind(comm)
rng = np.random.default_rng(0)
created = run.context.backend.channel.groups.communicators()
shape["scale"] = jax.ShapeDtypeStruct((), jnp.float32)  # only in layers, which are compiled while tracing
params = [{k: rng.normal(size=v.shape).astype("f4") / 4 for k, v in shape.items()} for _ in range(LAYERS)]
x = rng.normal(size=(8, WIDTH)).astype("f4")


def block(weights, x):
    return weights["scale"] * jnp.tanh(x @ weights["w"] + weights["b"])


def loss(params):
    y = x
    for weights in params:
        y = block(weights, y)
    return (y**2).mean()


for scan in (False, True):
    whole = jax.tree.map(lambda *leaves: np.stack(leaves), *params) if scan else params

    @run.jit
    @run.spmd(params="same", x="split data", returns=("split data",))
    def step(state, params, x, scan=scan):
        layers = run.scan_layers if scan else run.layers
        shards, shapes = run.shards(params, stacked=scan), shape if scan else [shape] * LAYERS
        return state, jax.grad(lambda shards: (layers(block, shards, x, shapes=shapes) ** 2).mean())(shards)

    _, shards = step({}, whole, x[4 * comm.rank : 4 * comm.rank + 4])
    expected = jax.grad(loss)(params)
    for number, layer in enumerate(expected):
        for name, leaf in layer.items():
            own = shards[name][number] if scan else shards[number][name]
            part = leaf.reshape(2, -1)[comm.rank] if leaf.ndim else leaf
            np.testing.assert_allclose(own, part, atol=1e-6)

# MPI's own all-reduce reduces the scalar. No trace creates a communicator: ranks trace at different times.
assert run.context.backend.channel.groups.communicators() == created
'''


def test_gradients_are_those_of_the_whole_batch():
    done = mpirun.started(mpirun.command(2, PROGRAM))
    assert done.returncode == 0, done.stderr
