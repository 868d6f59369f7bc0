"""Data parallelism gives the weights that one device would: train both ways and compare.

The plan is plans/data_parallel.plan without its wire type, so gradients travel as float32 and the only
difference left is the order of additions. One network is trained with optax on eight devices through the
plan, and again on one device with the same global batches. With --mpi the eight are ranks under mpirun.

    python examples/data_parallel.py [--steps 30] [--seed 0] [--device cpu]
    mpirun -n 8 python -m mpi4py examples/data_parallel.py --mpi
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import commplan
import commplan.optax
import convnet
import devices
import photos

PLAN = Path(__file__).parent / "plans" / "data_parallel.plan"
NARROW = ", wire = bf16, accumulate = f32"
REPLICAS, BATCH = 8, 64
LIMIT = 1e-5


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare data-parallel training with one device.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--records", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mpi", action="store_true", help="the replicas are the ranks that mpirun started")
    devices.add_option(parser)
    options = parser.parse_args(argv)
    if options.mpi and options.device == "gpu":
        parser.error("ranks of MPI exchange arrays of the CPU: --mpi goes with --device cpu")
    devices.exact_products()

    crops = photos.Crops(options.records, seed=options.seed)
    rng = np.random.default_rng(options.seed)
    batches = [_batch(crops, rng) for _ in range(options.steps)]

    if options.mpi:
        jax.config.update("jax_platforms", "cpu")
        params, loss = on_ranks(batches, options.seed)
    else:
        params, loss = on_devices(devices.choose(options.device, REPLICAS), batches, options.seed)
    if params is None:  # a rank that leaves the comparison to rank 0
        return
    single, single_loss = train_on_one_device(batches, options.seed)
    gap = max(
        float(jnp.abs(a - b).max())
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(single), strict=True)
    )
    print(f"{options.steps} steps, global batch {BATCH}")
    print(f"{REPLICAS} {'ranks' if options.mpi else 'devices'} through the plan: loss {loss:.6f}")
    print(f"1 device:                  loss {single_loss:.6f}")
    print(f"largest difference between the weights: {gap:.2e} (limit {LIMIT:.0e})")
    if gap > LIMIT:
        sys.exit("the weights differ by more than that")


def on_devices(chosen: list[Any], batches: list[tuple[Any, Any]], seed: int) -> tuple[Any, float]:
    """Final weights and the last loss of data-parallel training on a mesh of devices."""
    mesh = jax.make_mesh((REPLICAS,), ("data",), devices=chosen)
    keys = jax.random.split(jax.random.key(seed), REPLICAS)  # every replica draws; replica 0's are kept
    params, losses = train_under_plan(mesh, jax.vmap(convnet.init)(keys), batches)
    return params, float(losses.mean())


def on_ranks(batches: list[tuple[Any, Any]], seed: int) -> tuple[Any, float]:
    """The same on the ranks of MPI.COMM_WORLD, each with its own part of every batch; None but on rank 0."""
    from mpi4py import MPI  # noqa: PLC0415  it starts MPI

    comm: Any = MPI.COMM_WORLD
    each = BATCH // REPLICAS
    part = slice(comm.rank * each, (comm.rank + 1) * each)
    parts = [(pixels[part], labels[part]) for pixels, labels in batches]
    keys = jax.random.split(jax.random.key(seed), REPLICAS)
    params, losses = train_under_plan(comm, convnet.init(keys[comm.rank % REPLICAS]), parts)
    loss = comm.allreduce(float(losses)) / REPLICAS
    return (None if comm.rank else params), loss


def train_under_plan(where: Any, params: Any, batches: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Final weights and the last losses of training under the plan, on a mesh or on ranks."""
    shapes = jax.eval_shape(convnet.init, jax.random.key(0))
    plan = commplan.loads(PLAN.read_text(encoding="utf-8").replace(NARROW, ""), str(PLAN))
    program = plan.compile(where, shapes={"params": shapes, "grads": shapes})
    run = program.bind(where)
    out, state = run.start(run.init(), params=params)
    params = out.params
    optimizer = optax.chain(commplan.optax.reduce(run, "grads"), _optimizer())
    opt = optimizer.init(params)

    @run.jit
    @run.spmd(
        params="params",
        opt="params",
        pixels="split data",
        labels="split data",
        returns=("params", "params", "per data"),
    )
    def train(state: Any, params: Any, opt: Any, pixels: Any, labels: Any) -> Any:
        loss, grads = jax.value_and_grad(convnet.loss)(run.varying(params), pixels, labels)
        updates, opt = optimizer.update(grads, opt, params)
        return state, optax.apply_updates(params, updates), opt, loss

    losses = jnp.zeros(REPLICAS)
    for pixels, labels in batches:
        state, params, opt, losses = train(state, params, opt, pixels, labels)
    return params, losses


def train_on_one_device(batches: list[tuple[Any, Any]], seed: int) -> tuple[Any, float]:
    """Train on one device, in plain JAX, from the initial parameters of replica 0."""
    params = convnet.init(jax.random.split(jax.random.key(seed), REPLICAS)[0])
    optimizer = _optimizer()
    opt = optimizer.init(params)

    @jax.jit
    def train(params: Any, opt: Any, pixels: Any, labels: Any) -> Any:
        loss, grads = jax.value_and_grad(convnet.loss)(params, pixels, labels)
        updates, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    loss = jnp.zeros(())
    for pixels, labels in batches:
        params, opt, loss = train(params, opt, pixels, labels)
    return params, float(loss)


def _optimizer() -> optax.GradientTransformation:
    # Momentum adds gradients up as they are; Adam divides by their size, which blows up rounding near 0.
    return optax.sgd(0.01, momentum=0.9)


def _batch(crops: photos.Crops, rng: np.random.Generator) -> tuple[Any, Any]:
    chosen = rng.integers(len(crops), size=BATCH)
    pixels, labels = zip(*(photos.decode(crops[int(i)]) for i in chosen), strict=True)
    return np.stack(pixels), np.stack(labels)


if __name__ == "__main__":
    main()
