"""Data parallelism gives the weights that one device would: train both ways and compare.

The plan is plans/data_parallel.plan without its wire type, so gradients travel as float32 and the only
difference left is the order of additions. One network is trained with optax on eight CPU devices through the
plan, and again on one device with the same global batches.

    python examples/data_parallel.py [--steps 30] [--seed 0]
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
import photos

PLAN = Path(__file__).parent / "plans" / "data_parallel.plan"
PIPELINE = "share,bucket,decompose,overlap"  # the usual passes but `wire`, which narrows what is sent
REPLICAS, BATCH = 8, 64
LIMIT = 1e-5


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare data-parallel training with one device.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--records", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", REPLICAS)

    crops = photos.Crops(options.records, seed=options.seed)
    rng = np.random.default_rng(options.seed)
    batches = [_batch(crops, rng) for _ in range(options.steps)]

    params, loss = together(batches, options.seed)
    single, single_loss = alone(batches, options.seed)
    gap = max(
        float(jnp.abs(a - b).max())
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(single), strict=True)
    )
    print(f"{options.steps} steps, global batch {BATCH}")
    print(f"{REPLICAS} devices through the plan: loss {loss:.6f}")
    print(f"1 device:                  loss {single_loss:.6f}")
    print(f"largest difference between the weights: {gap:.2e} (limit {LIMIT:.0e})")
    if gap > LIMIT:
        sys.exit("the weights differ by more than that")


def together(batches: list[tuple[Any, Any]], seed: int) -> tuple[Any, float]:
    """Final weights and the last loss of data-parallel training under the plan."""
    mesh = jax.make_mesh((REPLICAS,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    shapes = jax.eval_shape(convnet.init, jax.random.key(0))
    program = commplan.load(PLAN).compile(mesh, shapes={"params": shapes, "grads": shapes}, passes=PIPELINE)
    run = program.bind(mesh)
    state = run.init()
    keys = jax.random.split(jax.random.key(seed), REPLICAS)  # every replica draws; replica 0's are kept
    out, state = run.start(state, params=jax.vmap(convnet.init)(keys))
    params = out.params
    optimizer = optax.chain(commplan.optax.reduce(run, "grads"), _optimizer())
    opt = optimizer.init(params)

    @jax.jit
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

    loss = jnp.zeros(REPLICAS)
    for pixels, labels in batches:
        state, params, opt, loss = train(state, params, opt, pixels, labels)
    return params, float(loss.mean())


def alone(batches: list[tuple[Any, Any]], seed: int) -> tuple[Any, float]:
    """The same on one device, in plain JAX; replica 0's parameters are where both begin."""
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
